"""What every row of a measurement must have, before a table is made of it."""

import math
from collections.abc import Mapping
from typing import Any

from benchmarks import Row


def require_types(row: Row, types: Mapping[type, str]) -> None:
    """Raise KeyError for a field that is missing, TypeError for one of another type; numbers are finite.

    types: names of fields; a dot leads into a field, and one with "?" may be missing or null."""
    for wanted, name in ((wanted, name) for wanted, names in types.items() for name in names.split()):
        value: Any = row
        for key in name.rstrip("?").split("."):
            value = value.get(key) if name.endswith("?") else value[key]
        number = wanted is float and type(value) in (int, float) and abs(value) < math.inf
        if not (number or (wanted is not float and type(value) is wanted) or (value is None and name.endswith("?"))):
            raise TypeError(f"{name.rstrip('?')} is {str(value)[:40]}")


def require_times(times: Row) -> None:
    """Raise as `require_types` for a spread that is not one of times, ValueError for one that does not rise from 0."""
    require_types(times, {float: "median q1 q3", int: "n"})
    if not 0 < times["q1"] <= times["median"] <= times["q3"]:
        raise ValueError("its quartiles are not times")


def require_provenance(row: Row) -> None:
    """Raise as `require_types` for what every row says of its machine and its making."""
    require_types(row, {
        str: "time command device dtype cpu torch commit?" + " gpu" * (row["device"] != "cpu"), int: "threads cores",
        float: "memory_gib load_average"})
