"""Options of the command line. Typer reads a signature, so `with_options` writes one for each verb.

A verb's parameter becomes an option, and so does each field of a dataclass that it takes: `name:
Annotated[type, "help"] = default`. Behind the help may stand how the option is spelled, if not
`--name`: "--other-name METAVAR", or "METAVAR" for a positional argument; and the names that the
shell completes. A field that is not annotated so has no option.

Why typer: tyro and jsonargparse read dataclasses by themselves, but a mistake prints a page there,
and we promise one line; and typer completes names in the shell."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_origin

import typer

from lineartime.base.errors import CheckpointError, UsageError, raised_as
from lineartime.base.settings import require
from lineartime.base.stores import is_address
from lineartime.cli.terminal import OWN_MODULES
from lineartime.config import NOT_IMPORTED, PRESETS, TASKS
from lineartime.training.run_config import SIZES, parse_setting

Model = Annotated[str, f"A model: {', '.join(PRESETS)}.", "MODEL", PRESETS]
Size = Annotated[str, f"{', '.join(SIZES)}.", SIZES]
Task = Annotated[str, "Take the model as the paper has it for c4, wiki40b or pg19.", TASKS]
Setting = Annotated[dict[str, Any], "Set any field that `lineartime config` lists, for `info` one of the model. May be "
                    "given again; `none` switches a field off.", "--set NAME=VALUE"]
Device = Annotated[str | None, "cpu or cuda; by default cuda if there is one."]
Precision = Annotated[Literal["float32", "bfloat16"], "bfloat16 is less exact; it reads, and in C writes, faster."]
RankTimeout = Annotated[float, "Under torchrun: take a process for lost when it has not answered for so many seconds."]
IMPORT = Parameter("imports", Parameter.KEYWORD_ONLY, default=(), annotation=Annotated[
    tuple[str, ...], "A module with layers of yours, also of this folder. May be given again.", "--import MODULE"])
"""What every verb takes that makes or opens a model."""


def numbers(kind: type, text: str | None) -> tuple[Any, ...]:
    """Numbers such as `1e-4,7e-5`, or if `kind` is int whole numbers. Raises UsageError."""
    what = "whole numbers" if kind is int else "numbers"
    with raised_as(UsageError, "wrong value", text, ValueError, todo=f"it takes {what}, with commas"):
        return tuple(map(kind, text.split(","))) if text else ()


def local_path(text: str) -> Path:
    """The path that a text means. Raises UsageError for an address, which a path would change."""
    require(not is_address(text), "an address where a path is needed", text, "name a file or folder of this machine")
    return Path(text)


def settings_of(pairs: list[str] | None) -> dict[str, Any]:
    """The settings of texts NAME=VALUE. Raises UsageError."""
    settings = [parse_setting(pair) for pair in pairs or ()]
    require(len(dict(settings)) == len(settings), "a setting is given twice", " ".join(pairs or ()), "give it once")
    import_own(*own_modules(dict(settings).get("layers", ())))
    return dict(settings)


def own_modules(layers: Iterable[str]) -> list[str]:
    """The modules of the layers with names MODULE:CLASS, each once."""
    return [*dict.fromkeys(name.partition(":")[0] for name in layers if ":" in name)]


def import_own(*modules: str) -> None:
    """Import modules of the user's, from the current folder if they are not installed. Raises
    UsageError for whatever they raise."""
    for module in modules:
        OWN_MODULES.add(module)
        try:
            sys.path += {os.getcwd()} - {*sys.path}
            importlib.import_module(module)
        except (Exception, SystemExit) as e:
            raise UsageError("cannot import the module", module, f"{type(e).__name__}: {e}") from e


AGAIN = list[str] | None  # the type, for typer, of what may be given again; None: it was not given
FORMS: dict[Any, tuple[Any, Callable[[Any], Any]]] = {
    dict[str, Any]: (AGAIN, settings_of),
    tuple[str, ...]: (AGAIN, lambda texts: tuple(texts or ())),
    tuple[Path | str, ...]: (AGAIN, lambda texts: tuple(texts or ())),
    tuple[int, ...]: (str | None, partial(numbers, int)),
    tuple[float, ...]: (str | None, partial(numbers, float)),
    Path | str: (str, str),
    Path: (Path, local_path),
    Path | None: (Path | None, lambda text: None if text is None else local_path(text))}
"""Types of ours that typer does not take: what it takes instead, and what makes our value of it."""


def with_options(verb: Callable[..., None], opens: bool = True) -> Callable[..., None]:
    """The verb as typer takes it; opens: whether with `IMPORT`. A dataclass checks its fields."""
    parameters = signature(verb, eval_str=True).parameters.values()
    options = {each.name: options_of(each) for each in parameters}

    def call(imports: AGAIN = None, **given: Any) -> None:  # by typer, with the values of all options
        arguments = {}
        import_own(*(imports or ()))
        for parameter in parameters:
            values = {option.name: given[option.name] for option in options[parameter.name]}
            for option in options[parameter.name]:
                require(not isinstance(value := given[option.name], int) or -2**63 <= value < 2**63, "wrong value",
                        f"{spelled(option)} = {value}", "the number is too large")  # many libraries take 64 bits
                if (kind := option.annotation.__origin__) in FORMS:
                    values[option.name] = FORMS[kind][1](values[option.name])
            takes_many = dataclasses.is_dataclass(parameter.annotation)
            arguments[parameter.name] = parameter.annotation(**values) if takes_many else values[parameter.name]
        try:
            verb(**arguments)
        except CheckpointError as e:
            if e.what != NOT_IMPORTED:
                raise
            module = str(e.where).partition(":")[0]  # the command's words take the place of Python's
            raise CheckpointError(e.what, e.where, f"if you trust it, add --import {module}") from None

    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    call.__signature__ = Signature(  # type: ignore[attr-defined]
        [typer_parameter(option) for each in (*options.values(), [IMPORT] * opens) for option in each])
    return call


def options_of(parameter: Parameter) -> list[Parameter]:
    """The parameter, or the fields of a dataclass that are options. None of those that may be given
    again is required here: the dataclass says what it lacks."""
    if not dataclasses.is_dataclass(parameter.annotation):
        return [parameter]
    fields = signature(cast("type", parameter.annotation), eval_str=True).parameters.values()
    options = [field for field in fields if get_origin(field.annotation) is Annotated]
    return [each.replace(default=()) if get_origin(each.annotation.__origin__) is tuple
            and each.default is Parameter.empty else each for each in options]


def spelled(option: Parameter) -> str:
    """How an option is spelled, perhaps with what it takes; or what a positional argument is."""
    notes = option.annotation.__metadata__[1:]
    return next((note for note in notes if isinstance(note, str)), f"--{option.name.replace('_', '-')}")


def typer_parameter(option: Parameter) -> Parameter:
    """The parameter that typer makes an option of, or a positional argument."""
    kind, (text, *notes) = option.annotation.__origin__, option.annotation.__metadata__
    names = next((note for note in notes if not isinstance(note, str)), ())
    complete = (lambda incomplete: [name for name in names if name.startswith(incomplete)]) if names else None
    first, _, metavar = spelled(option).partition(" ")
    shown = (typer.Option(first, metavar=metavar or None, help=text, autocompletion=complete, path_type=str)
             if first.startswith("--") else typer.Argument(metavar=first, help=text, autocompletion=complete))
    form, default = FORMS[kind][0] if kind in FORMS else kind, option.default
    if form == AGAIN and (option.default is not Parameter.empty or kind == dict[str, Any]):
        default = None
    elif isinstance(default, tuple):  # of numbers
        default = ",".join(map(str, default)) or None
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[form, shown])
