"""A row with one field after another deleted or changed to another type."""

import copy
import json


def paths_of(row):
    """Of every field, and of those inside one."""
    for key, value in row.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *inner) for inner in paths_of(value))


def changed(row, path, value):
    """A copy with another value of a field, or without it (value ...)."""
    made = copy.deepcopy(row)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1]) if value is ... else inner.__setitem__(path[-1], value)
    return made


def lines_of_other_types(row, path):
    """JSON of the row with values of other types in a field."""
    was = row
    for key in path:
        was = was[key]
    for value in (["x"], {"x": 1}, "x", 7, True, float("nan")):
        if was is not None and type(value) is not type(was) and not (value == 7 and type(was) is float):
            yield json.dumps(changed(row, path, value))
