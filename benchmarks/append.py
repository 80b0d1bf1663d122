"""Rows of measurements: added to a file that a kill may have cut off, and read again."""

import fcntl
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lineartime.base.errors import ResourceError
from lineartime.base.files import read_json_lines


def rows_in(path: Path, parse: Callable[[Any], dict[str, Any]] = dict, what: str = "a row") -> list[dict[str, Any]]:
    """The rows of a file, oldest first; none where there is no file. A last line that was cut off
    is left out. Raises DataError for another file. parse, what: as in
    `read_json_lines`."""
    return read_json_lines(path, parse, what) if path.exists() else []


def append_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a file, one line each, and flush it to the disk. An incomplete last line is
    removed first. Raises ResourceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            if path.is_file():  # not /dev/stdout
                fcntl.flock(file, fcntl.LOCK_EX)  # what another process has half written is not cut off
                whole, newline, last = path.read_bytes().rpartition(b"\n")
                try:
                    if last:
                        json.loads(last)
                        file.write(b"\n")
                except ValueError:
                    file.truncate(len(whole + newline))
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            file.flush()
            if path.is_file():
                os.fsync(file.fileno())
    except OSError as e:
        raise ResourceError("cannot write", path, e.strerror or str(e)) from None
