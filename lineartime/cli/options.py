"""Options of the command line, made from the annotated parameters of a verb, and fields of a dataclass that it takes.

An option is `name: Annotated[type, "help"] = default`. Behind the help text may stand how it is spelled, if not
`--name`: "--other-name METAVAR", or "METAVAR" for a positional argument; and the names that the shell completes. A
field without a help text has no option.

Why typer, and neither tyro nor jsonargparse, which read dataclasses by themselves: a mistake there prints a box or a
page of usage of many lines, and we promise one line; and typer completes names in the shell."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from lineartime.base.errors import UsageError
from lineartime.config import PRESETS, TASKS
from lineartime.training.run_config import SIZES, parse_setting

Model = Annotated[str, f"A model: {', '.join(PRESETS)}.", "MODEL", PRESETS]
Size = Annotated[str, f"{', '.join(SIZES)}.", SIZES]
Task = Annotated[str, "Take the model as the paper has it for c4, wiki40b or pg19.", TASKS]
Setting = Annotated[dict[str, Any], "Set any field that `lineartime config` lists, for `info` one of the model. May be "
                    "given again; `none` switches a field off.", "--set NAME=VALUE"]
Device = Annotated[str | None, "cpu or cuda; by default cuda if there is one."]
Precision = Annotated[Literal["float32", "bfloat16"], "bfloat16 is faster and less exact."]
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
    if typing.get_origin(annotation) is Annotated:
        return Option(name, annotation.__origin__, annotation.__metadata__, default)
    return Option(name, annotation, (), default)


def fields_of(kind: Any) -> Iterator[Option]:
    """The options of a dataclass. One that may be given again can be left out here: the verb checks if it is needed."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        option = option_of(field.name, hints[field.name], field.default)
        if option.notes and option.default is dataclasses.MISSING:
            is_many = typing.get_origin(option.kind) is tuple
            yield option._replace(default=() if is_many else inspect.Parameter.empty)
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
    if dataclasses.is_dataclass(option.kind):
        for field in fields_of(option.kind):
            yield from shell_parameters(field)
        return
    text, *more = option.notes
    first, metavar = option.spelled
    names = next((each for each in more if not isinstance(each, str)), ())
    complete = (lambda incomplete: [name for name in names if name.startswith(incomplete)]) if names else None
    shown = (typer.Option(first, metavar=metavar, help=text, autocompletion=complete) if first.startswith("--") else
             typer.Argument(metavar=first, help=text, autocompletion=complete))
    need_not_be_given = option.default == () or typing.get_origin(option.kind) is dict
    yield inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY,
                            default=None if need_not_be_given else option.default,
                            annotation=Annotated[shell_form(option.kind)[0], shown])


def shell_form(kind: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The type that typer takes for one of ours, and what makes our value of typer's."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:  # --set, which may be given again
        return list[str] | None, lambda texts: dict(parse_setting(text) for text in texts or [])
    if origin is tuple:  # what may be given again
        return list[shell_form(inner[0])[0]] | None, lambda values: tuple(values or ())  # type: ignore[misc]
    in_one = [typing.get_args(each)[0] for each in inner if typing.get_origin(each) is tuple]
    if in_one:  # `tuple[number, ...] | None`: numbers in one text, with commas
        return str | None, lambda text: None if text is None else numbers(text, in_one[0])
    return str if {str, Path} <= {*inner} else kind, lambda value: value  # str: a name or a path


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


def numbers(text: str, kind: type) -> tuple[Any, ...]:
    """Numbers such as `1e-4,7e-5`, or if `kind` is int whole numbers. Raises UsageError."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise UsageError("wrong value", text, f"it takes {what}, with commas") from None
