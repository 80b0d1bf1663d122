"""Options of the command line, made from the annotated parameters of a verb, and fields of a dataclass that it takes.

An option is `name: Annotated[type, "help"] = default`. Behind the help text may stand how it is spelled, if not
`--name`: "--other-name METAVAR", or "METAVAR" for a positional argument; and the names that the shell completes. An
option with an empty help text works and is not shown. A field without a help text has no option.

Why typer, and neither tyro nor jsonargparse, which read dataclasses by themselves: a mistake there prints a box or a
page of usage of many lines, and we promise one line; and typer completes names in the shell."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from lineartime.config import MODEL_FIELDS, PRESETS, TASKS, TRAIN_FIELDS, ModelConfig, TrainConfig
from lineartime.run_config import RUN_FIELDS, SIZES, parse_setting
from lineartime.settings import describe_kind, require

Model = Annotated[str, f"A model: {', '.join(PRESETS)}.", "MODEL", PRESETS]
Size = Annotated[str, f"{', '.join(SIZES)}.", SIZES]
Task = Annotated[str, "Take the model as the paper has it for c4, wiki40b or pg19.", TASKS]
Setting = Annotated[dict[str, Any], "Set any field of the model or of its training; `lineartime config` lists them. "
                    "May be given again; `none` switches a field off.", "--set NAME=VALUE"]
Device = Annotated[str | None, "cpu or cuda; by default cuda if there is one."]
Precision = Annotated[str, "float32 or bfloat16, which is faster and less exact."]
RankTimeout = Annotated[float, "Under torchrun: take a process for lost when it has not answered for so many seconds."]


class Option(NamedTuple):
    """A parameter of a verb, or a field of a dataclass that it takes."""

    name: str
    kind: Any
    """Its type. Of a dataclass each field is an option."""
    notes: tuple[Any, ...]
    """What stands behind the type: the help, how the option is spelled, the words that the shell completes."""
    default: Any
    """`inspect.Parameter.empty`: there is none."""

    @property
    def spelled(self) -> tuple[str, str | None]:
        """How a person types it, and what stands for its value in its help."""
        texts = [note for note in self.notes[1:] if isinstance(note, str)]
        whole = texts[0] if texts else f"--{self.name.replace('_', '-')}"
        first, _, metavar = whole.partition(" ")
        return (first, metavar or None) if whole.startswith("--") else (whole, None)


def option_of(name: str, annotation: Any, default: Any) -> Option:
    """The option of a parameter or field."""
    if kind_is(annotation, Annotated):
        return Option(name, annotation.__origin__, annotation.__metadata__, default)
    return Option(name, annotation, (), default)


def fields_of(kind: Any) -> Iterator[Option]:
    """The options of a dataclass. One that may be given again need not be given: the dataclass refuses none."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        option = option_of(field.name, hints[field.name], field.default)
        if option.notes and option.default is dataclasses.MISSING:
            yield option._replace(default=() if kind_is(option.kind, tuple) else inspect.Parameter.empty)
        elif option.notes:
            yield option


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as typer takes it: every parameter becomes an option, and a dataclass an option for each of its fields.
    The dataclass checks the values."""
    options = [option_of(each.name, each.annotation, each.default)
               for each in inspect.signature(verb, eval_str=True).parameters.values()]

    def call(**given: Any) -> None:  # by typer, with the values of all options
        verb(**{option.name: value_of(option, given) for option in options})

    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for option in options for parameter in shell_parameters(option)])
    return call


def shell_parameters(option: Option) -> Iterator[inspect.Parameter]:
    """The parameters that typer makes options of, or a positional argument."""
    kind, default = option.kind, option.default
    if dataclasses.is_dataclass(kind):
        for field in fields_of(kind):
            yield from shell_parameters(field)
        return
    text, *more = option.notes or [None]
    annotation: Any = Annotated[kind, text]
    if isinstance(text, str):  # else it is typer's own already
        first, metavar = option.spelled
        named = next((each for each in more if not isinstance(each, str)), ())
        words = typing.get_args(kind) if kind_is(kind, Literal) else named
        complete = complete_setting if kind_is(kind, dict) else completion(words) if words else None
        how: dict[str, Any] = {"help": text, "hidden": not text, "autocompletion": complete}
        shown = (typer.Option(first, metavar=metavar, **how) if first.startswith("--") else
                 typer.Argument(metavar=first, **how))
        annotation = Annotated[shell_form(kind)[0], shown]
        default = None if default == () or kind_is(kind, dict) else default
    yield inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def shell_form(kind: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The type that typer takes for one of ours, and what makes our value of typer's."""
    inner = typing.get_args(kind)
    if kind_is(kind, dict):  # --set, which may be given again
        return list[str] | None, lambda texts: dict(parse_setting(text) for text in texts or [])
    if kind_is(kind, tuple):  # what may be given again
        return list[shell_form(inner[0])[0]] | None, lambda values: tuple(values or ())  # type: ignore[misc]
    in_one = [typing.get_args(each)[0] for each in inner if kind_is(each, tuple)]
    if in_one:  # `tuple[number, ...] | None`: numbers in one text, with commas
        return str | None, lambda text: None if text is None else numbers(text, in_one[0])
    is_text = kind_is(kind, Literal) or {str, Path} <= {*inner}  # one of a few words; a name or a path
    return str if is_text else kind, lambda value: value


def kind_is(kind: Any, origin: Any) -> bool:
    """Whether a type is made of a generic one, as `tuple[int, ...]` is of `tuple`."""
    return typing.get_origin(kind) is origin


def value_of(option: Option, given: dict[str, Any]) -> Any:
    """The value of a parameter or field, from those that typer gives."""
    if dataclasses.is_dataclass(option.kind):
        kind = typing.cast("type", option.kind)
        return kind(**{field.name: value_of(field, given) for field in fields_of(kind)})
    return shell_form(option.kind)[1](given[option.name])


def given_options(settings: Any) -> list[str]:
    """The options of a dataclass that are not at their defaults, as a person types them."""
    given = []
    for option in fields_of(type(settings)):
        value = getattr(settings, option.name)
        if dataclasses.is_dataclass(value):
            given += given_options(value)
        elif value not in (option.default, (), {}):
            given.append(option.spelled[0])
    return given


def numbers(text: str, kind: type = float) -> tuple[Any, ...]:
    """Numbers between 0 and 1 such as `1e-4,7e-5`, or if `kind` is int whole numbers from 1. Raises UsageError."""
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    holds = bool(values) and all(value >= 1 if kind is int else 0 < value < 1 for value in values)
    require(holds, "wrong value", text,
            f"it takes {'whole numbers from 1' if kind is int else 'numbers between 0 and 1'}, with commas")
    return values


def completion(names: Any) -> Callable[[str], list[str]]:
    """For the shell: those of the names that begin with what is written."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """For the shell: the fields of --set, and after "=" the values of a field that has few."""
    name, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{field}=" for field in (*RUN_FIELDS, *MODEL_FIELDS, *TRAIN_FIELDS) if field.startswith(incomplete)]
    kinds = typing.get_type_hints(ModelConfig) | typing.get_type_hints(TrainConfig)
    words = {"model": PRESETS, "task": TASKS, "size": SIZES}.get(name) or (
        describe_kind(kinds[name]).split(" or ") if name in kinds else ())
    return [f"{name}={word}" for word in words if word.startswith(value) and " " not in word]
