"""Typed settings: a dataclass field checked, replaced by name, read from the command line or from TOML.

Every refusal is a UsageError that names the field and, for an unknown name, the nearest valid one."""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from lineartime.errors import UsageError


def require(condition: bool, what: str, where: str, todo: str | None = None) -> None:
    """Raise UsageError(what, where, todo) unless the condition holds."""
    if not condition:
        raise UsageError(what, where, todo)


def require_name(kind: str, name: str, valid: Iterable[str]) -> None:
    """Raise UsageError unless `name` is valid, suggesting the nearest name that is."""
    valid = list(valid)
    if name not in valid:
        near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
        raise UsageError(f"unknown {kind}", name, f"did you mean {near[0]}?" if near else f"one of {', '.join(valid)}")


def require_precision(precision: str) -> None:
    """Raise UsageError for a precision of the arithmetic that there is not."""
    require(precision in ("float32", "bfloat16"), "wrong value", f"precision = {precision}",
            "it takes float32 or bfloat16")


def replace_fields(config: Any, fields: dict[str, Any]) -> Any:
    """`dataclasses.replace`, but an unknown field is a UsageError."""
    names = [f.name for f in dataclasses.fields(config)]
    for name in fields:
        require_name("setting", name, names)
    return dataclasses.replace(config, **fields)


def check_fields(config: Any) -> None:
    """Raise UsageError where a field of a dataclass has not the type it declares.

    An int becomes a float where one is meant, and must fit into 64 bits, as everything that counts does."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, int) and not -2**63 <= value < 2**63:
            raise UsageError("wrong value", name, "the number is too large")
        if isinstance(value, int) and not isinstance(value, bool) and float in _alternatives(kind):
            object.__setattr__(config, name, float(value))
        elif not _is_a(value, kind):
            raise UsageError("wrong value", f"{name} = {value!r}", f"it takes {_describe(kind)}")
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


def _describe(kind: Any) -> str:
    words = []
    for alternative in _alternatives(kind):
        if typing.get_origin(alternative) is Literal:
            words += [str(choice) for choice in typing.get_args(alternative)]
        else:
            words.append("none" if alternative is type(None) else
                         {int: "a whole number", float: "a number", bool: "true or false"}[alternative])
    return " or ".join(words)


def parse_field(name: str, text: str, kind: Any) -> Any:
    """The text of one field read as its declared type; "none" is None where the field allows it."""
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
    raise UsageError("wrong value", f"{name} = {text!r}", f"it takes {_describe(kind)}")


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; they are flat, so a section is refused."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError("cannot read the configuration", path, e.strerror) from None
    except (ValueError, RecursionError) as e:
        raise UsageError("not valid TOML", path, str(e)) from None
    for name, value in settings.items():
        require(not isinstance(value, dict), "settings are flat", f"[{name}] in {path}", "move its fields to the top")
    return settings
