"""Typed settings: fields of a dataclass are checked, replaced by name, and parsed from the command line.

Errors are UsageErrors that name the field and, for an unknown name, the nearest valid one."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from lineartime.errors import UsageError


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


def require_precision(precision: str) -> None:
    """Raise UsageError unless `precision` is "float32" or "bfloat16"."""
    require(precision in ("float32", "bfloat16"), "wrong value", f"precision = {precision}",
            "it takes float32 or bfloat16")


def replace_fields(config: Any, fields: dict[str, Any]) -> Any:
    """`dataclasses.replace` that raises UsageError for an unknown field."""
    names = [f.name for f in dataclasses.fields(config)]
    for name in fields:
        require_name("setting", name, names)
    return dataclasses.replace(config, **fields)


def check_fields(config: Any) -> None:
    """Raise UsageError unless every field of a dataclass has its declared type, ints fit into 64 bits, and floats are
    finite. An int in a float field becomes a float."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, int) and not -2**63 <= value < 2**63:
            raise UsageError("wrong value", name, "the number is too large")
        if isinstance(value, int) and not isinstance(value, bool) and float in _alternatives(kind):
            object.__setattr__(config, name, float(value))
        elif not _is_a(value, kind):
            raise UsageError("wrong value", f"{name} = {value!r}", f"it takes {describe_kind(kind)}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UsageError("wrong value", f"{name} = {value!r}", "it takes a finite number")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_a(value: Any, kind: Any) -> bool:
    for alternative in _alternatives(kind):
        if typing.get_origin(alternative) is Literal:
            if value in typing.get_args(alternative):
                return True
        elif type(value) is alternative:
            return True
    return False


def describe_kind(kind: Any) -> str:
    """What a field of a declared type takes, in words."""
    words = []
    for alternative in _alternatives(kind):
        if typing.get_origin(alternative) is Literal:
            words += [str(choice) for choice in typing.get_args(alternative)]
        else:
            words.append("none" if alternative is type(None) else
                         {int: "a whole number", float: "a number", bool: "true or false"}[alternative])
    return " or ".join(words)


def parse_field(name: str, text: str, kind: Any) -> Any:
    """Parse the text of one field as its declared type; "none" is None if the field allows it. Raises UsageError."""
    if text.lower() == "none" and type(None) in _alternatives(kind):
        return None
    if text.lower() in ("true", "false") and bool in _alternatives(kind):
        return text.lower() == "true"
    for number in (int, float):
        if number in _alternatives(kind):
            try:
                return number(text)
            except ValueError:
                continue
    if any(typing.get_origin(a) is Literal for a in _alternatives(kind)):
        return text
    raise UsageError("wrong value", f"{name} = {text!r}", f"it takes {describe_kind(kind)}")
