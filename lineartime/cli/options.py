"""The options of a verb, made from the fields of a dataclass that Python callers use too.

A field is `name: Annotated[type, "help"] = default`, or `Annotated[type, "help", "--other-name METAVAR"]`, or for a
positional argument `Annotated[type, "help", "METAVAR"]`. A field without a help text has no option.

Why typer, and neither tyro nor jsonargparse, which read dataclasses by themselves: a mistake there prints a box or a
page of usage of many lines, and we promise one line; and typer completes names in the shell."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as typer takes it: a parameter whose type is a dataclass becomes an option for each of its fields. The
    other parameters stay. The dataclass checks the values."""
    parameters: list[inspect.Parameter] = []
    settings: dict[str, tuple[type, dict[str, Any]]] = {}
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        if not dataclasses.is_dataclass(kind := parameter.annotation):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        hints = typing.get_type_hints(kind, include_extras=True)
        own = {field.name: hints[field.name] for field in dataclasses.fields(kind) if
               typing.get_origin(hints[field.name]) is Annotated}
        settings[parameter.name] = typing.cast("type", kind), own
        parameters += [option(field, own[field.name]) for field in dataclasses.fields(kind) if field.name in own]

    def call(**given: Any) -> None:
        for name, (kind, own) in settings.items():
            values = {field: given.pop(field) for field in own}
            given[name] = kind(**{field: tuple(value or ()) if is_several(own[field]) else value
                                  for field, value in values.items()})
        verb(**given)

    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def option(field: "dataclasses.Field[Any]", annotation: Any) -> inspect.Parameter:
    """The parameter that typer makes an option of, or a positional argument."""
    kind, text, *spelled = typing.get_args(annotation)
    if not isinstance(text, str):  # it is typer's own already
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                                 annotation=annotation)
    name, _, metavar = (spelled[0] if spelled else f"--{field.name.replace('_', '-')}").partition(" ")
    choices = [choice for choice in typing.get_args(kind) if typing.get_origin(kind) is Literal]
    more: dict[str, Any] = {"help": text}
    if choices:
        more["autocompletion"] = lambda start: [choice for choice in choices if choice.startswith(start)]
    shown = (typer.Option(name, metavar=metavar or None, **more) if name.startswith("--") else
             typer.Argument(metavar=name, **more))
    default = None if is_several(annotation) else ... if field.default is dataclasses.MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default,
                             annotation=Annotated[shell_type(kind), shown])


def is_several(annotation: Any) -> bool:
    """Whether an option may be given again."""
    return typing.get_origin(typing.get_args(annotation)[0]) is tuple


def shell_type(kind: Any) -> Any:
    """The type as typer has it: lists for tuples, and text for what is text or a path, or one of a few words."""
    if typing.get_origin(kind) is tuple:
        return list[shell_type(typing.get_args(kind)[0])] | None  # type: ignore[misc]
    is_text = typing.get_origin(kind) is Literal or {str, Path} <= {*typing.get_args(kind)}
    return str if is_text else kind
