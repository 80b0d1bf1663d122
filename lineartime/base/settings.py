"""Typed settings: fields of a dataclass are checked, replaced by name, and parsed from text."""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable
from contextlib import suppress
from numbers import Integral
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lineartime.base.errors import LineartimeError, UsageError

PRECISIONS = ("float32", "bfloat16")
OTHER_WORDS = {
    "d_model": "dim width hidden_size embed_dim n_embd", "n_layers": "depth num_layers num_hidden_layers n_layer",
    "n_heads": "heads num_heads num_attention_heads n_head", "chunk_size": "group_size", "query_key_dim": "dim_head",
    "vocab_size": "num_tokens", "context": "seq_len max_seq_len sequence_length block_size", "learning_rate": "lr",
    "tokens_per_step": "batch_size batch", "steps": "epochs max_steps n_steps num_steps", "warmup_steps": "warmup",
    "clip": "grad_clip max_grad_norm", "activation_checkpointing": "gradient_checkpointing", "precision": "dtype bf16",
    "dropout": "attn_dropout hidden_dropout", "token_shift": "shift_tokens", "layers": "layer_types"}
"""Fields of configurations, and other words for them."""
MEANT = {word: field for field, words in OTHER_WORDS.items() for word in words.split()}


def require(condition: bool, what: str, where: object, todo: str | None = None,
            kind: type[LineartimeError] = UsageError) -> None:
    """Raise kind(what, where, todo) unless the condition holds."""
    if not condition:
        raise kind(what, where, todo)


def require_counts(**counts: int | None) -> None:
    """Raise UsageError unless each number, where it is not None, is a whole one from 1."""
    for name, count in counts.items():
        require(count is None or (isinstance(count, Integral) and int(count) >= 1), "wrong value",
                f"{name} = {count!r}", "it takes whole numbers from 1")


def require_name(kind: str, name: str, valid: Iterable[str]) -> None:
    """Raise UsageError, with the name that is meant or the nearest ones, unless `name` is valid."""
    valid = list(valid)
    if name not in valid:
        given = str(name)
        near = difflib.get_close_matches(given, valid, n=5, cutoff=0)
        meant = [MEANT[given]] if MEANT.get(given) in valid else difflib.get_close_matches(given, near, 1, 0.5)
        todo = f"one of {', '.join(valid)}" if len(valid) < 12 else f"the nearest are {', '.join(near)}"
        if meant:
            todo = f"did you mean {meant[0]}?"
        raise UsageError(f"unknown {kind}", name, todo)


def replace_fields(config: Any, fields: dict[str, Any]) -> Any:
    """`dataclasses.replace` that raises UsageError for an unknown field."""
    for name in fields:
        require_name("setting", name, [f.name for f in dataclasses.fields(config)])
    made = dataclasses.replace(config, **fields)
    require("n_layers" not in fields or made.n_layers == fields["n_layers"], "layers names another number of layers",
            f"{getattr(made, 'n_layers', None)} names, n_layers = {fields.get('n_layers')}", "leave n_layers out")
    return made


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
    for name, kind in get_type_hints(type(config)).items():
        value, choices = getattr(config, name), choices_of(kind)
        require(not isinstance(value, int) or -2**63 <= value < 2**63, "wrong value", name, "the number is too large")
        if isinstance(value, int) and not isinstance(value, bool) and float in choices:
            object.__setattr__(config, name, float(value))
        elif not any(value == each if isinstance(each, str) else type(value) is each for each in choices):
            raise UsageError("wrong value", f"{name} = {value!r}", f"it takes {describe_kind(kind, of_python=True)}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UsageError("wrong value", f"{name} = {value!r}", "it takes a finite number")


def choices_of(kind: Any) -> list[Any]:
    """What a field of a declared type takes: types, and the words of a `Literal`."""
    alternatives = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [choice for each in alternatives
            for choice in (get_args(each) if get_origin(each) is Literal else (get_origin(each) or each,))]


def describe_kind(kind: Any, of_python: bool = False) -> str:
    """What a field of a declared type takes, in words of Python or of the command and its files."""
    words = {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "none",
             tuple: "names with commas between"}
    if of_python:
        words |= {bool: "True or False", types.NoneType: "None", tuple: "a list of names"}
    return " or ".join(words.get(each, repr(each) if of_python else each) for each in choices_of(kind))


def field_text(value: Any) -> str:
    """The value of a field as `parse_field` reads it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parse_field(name: str, text: str, kind: Any) -> Any:
    """The value that the text of a field means, by its declared type. Raises UsageError."""
    choices, word = choices_of(kind), text.lower()
    if tuple in choices:
        return tuple(filter(None, map(str.strip, text.split(","))))
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
