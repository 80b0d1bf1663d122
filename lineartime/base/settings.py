"""Typed settings: fields of a dataclass are checked, replaced by name, and parsed from text."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

from lineartime.base.errors import UsageError

PRECISIONS = ("float32", "bfloat16")


def require(condition: bool, what: str, where: str, todo: str | None = None) -> None:
    """Raise UsageError(what, where, todo) unless the condition holds."""
    if not condition:
        raise UsageError(what, where, todo)


def require_name(kind: str, name: str, valid: Iterable[str]) -> None:
    """Raise UsageError, with the nearest valid name, unless `name` is valid."""
    valid = list(valid)
    if name not in valid:
        near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
        raise UsageError(f"unknown {kind}", name, f"did you mean {near[0]}?" if near else f"one of {', '.join(valid)}")


def replace_fields(config: Any, fields: dict[str, Any]) -> Any:
    """`dataclasses.replace` that raises UsageError for an unknown field."""
    for name in fields:
        require_name("setting", name, [f.name for f in dataclasses.fields(config)])
    return dataclasses.replace(config, **fields)


Rule = tuple[bool, str, str, str | None]
"""Whether something is wrong, and the error's what, where and todo. where: names of fields, which
the error gives with their values, or any other text."""


def check_rules(config: Any, rules: Iterable[Rule]) -> None:
    """Raise UsageError for the first thing that is wrong in a configuration."""
    for is_wrong, what, where, todo in rules:
        if is_wrong:
            names = where.split()
            if all(hasattr(config, name) for name in names):
                where = ", ".join(f"{name} = {field_text(getattr(config, name))}" for name in names)
            raise UsageError(what, where, todo)


def check_fields(config: Any) -> None:
    """Raise UsageError unless every field of a dataclass has its declared type, ints fit into 64
    bits, and floats are finite. An int in a float field becomes a float."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value, choices = getattr(config, name), choices_of(kind)
        if isinstance(value, int) and not -2**63 <= value < 2**63:
            raise UsageError("wrong value", name, "the number is too large")
        if isinstance(value, int) and not isinstance(value, bool) and float in choices:
            object.__setattr__(config, name, float(value))
        elif not any(value == each if isinstance(each, str) else type(value) is each for each in choices):
            raise UsageError("wrong value", f"{name} = {value!r}", f"it takes {describe_kind(kind, of_python=True)}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UsageError("wrong value", f"{name} = {value!r}", "it takes a finite number")


def choices_of(kind: Any) -> list[Any]:
    """What a field of a declared type takes: types, and the words of a `Literal`."""
    alternatives = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return [choice for each in alternatives
            for choice in (typing.get_args(each) if typing.get_origin(each) is Literal else (each,))]


def describe_kind(kind: Any, of_python: bool = False) -> str:
    """What a field of a declared type takes, in words of Python or of the command and its files."""
    words = {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "none"}
    if of_python:
        words |= {bool: "True or False", types.NoneType: "None"}
    return " or ".join(words.get(each, repr(each) if of_python else each) for each in choices_of(kind))


def field_text(value: Any) -> str:
    """The value of a field as `parse_field` reads it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parse_field(name: str, text: str, kind: Any) -> Any:
    """The value that the text of a field means, by its declared type. Raises UsageError."""
    choices, word = choices_of(kind), text.lower()
    if word == "none" and types.NoneType in choices:
        return None
    if word in ("true", "false") and bool in choices:
        return word == "true"
    for number in (int, float):
        if number in choices:
            with suppress(ValueError):
                return number(text)
    if text in choices:
        return text
    raise UsageError("wrong value", f"{name} = {text!r}", f"it takes {describe_kind(kind)}")
