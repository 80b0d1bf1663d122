"""A file with a row for each document, written as it comes: after a stop or a kill the same command goes on with it.

Until it is whole it is `OUT.part`: a first line with the hash of what the rows are made from, then a line for each row,
its checksum and its JSON."""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lineartime.atomic_io import MAX_BYTES, check_new, locked, replaced
from lineartime.config import to_dict
from lineartime.data.files import is_address, size_of, stamp_of
from lineartime.data.streams import ON_HUB
from lineartime.documents.examples import files_of
from lineartime.errors import ResourceError
from lineartime.settings import require

if TYPE_CHECKING:
    from lineartime.data.tokenizer import Tokenizer
    from lineartime.model import LanguageModel

logger = logging.getLogger(__name__)

WHOLE = b"lineartime has written all of these rows to the output\n"
"""The last line once the output is written, before it is renamed."""
N_CHECKSUM = 16
"""Bytes of a checksum."""
VECTOR = "embedding"
"""The field of a row that a `.npy` holds."""


def check_out(out: Path, endings: tuple[str, ...]) -> None:
    """Raise UsageError for a file that cannot be written, or is there already."""
    require(out.suffix in endings, "unknown kind of file", str(out), f"it takes {', '.join(endings)}")
    part = part_of(out)
    if os.path.lexists(out) and part.is_file():
        with part.open("rb") as file:
            file.seek(max(part.stat().st_size - len(WHOLE), 0))
            if file.read() == WHOLE:  # a process was killed between renaming the output and removing its rows
                part.unlink()
    check_new(out)


def description_of(model: "LanguageModel", tokenizer: "Tokenizer", names: Iterable[str],
                   settings: dict[str, Any]) -> dict[str, Any]:
    """What rows are made from: the model, the tokenizer, the files as they are now, and settings."""
    from lineartime.checkpoint import tensors_sha256  # loads PyTorch

    files = [[path, *state_of(path)] for name in names for path, _ in files_of(name)]
    head = getattr(model, "head", None)
    fields = to_dict(model.config) | (head.fields() if head else {})
    return {"weights": tensors_sha256(model.state_dict()), "model": fields, "tokenizer": tokenizer.sha256,
            "files": files, **settings}


def state_of(name: str) -> list[int | str]:
    """What tells that a file is as it was: its size, and the time of its last change, or what a store has for it. Text
    on stdin is never the same twice; a data set of the hub always is."""
    if name == "-" or name.startswith(ON_HUB):
        return [time.time_ns()] if name == "-" else []
    return [size_of(name), stamp_of(name) if is_address(name) else os.stat(name).st_mtime_ns]


def part_of(out: Path) -> Path:
    """The file that holds the rows until all are there."""
    return out.with_name(f"{out.name}.part")


@contextlib.contextmanager
def unfinished_rows(out: Path, description: dict[str, Any]) -> Iterator[tuple[int, Callable[[dict[str, Any]], None]]]:
    """Yields the number of rows that are there already, and a function that adds a row; at the end of the block the
    rows become `out`. After an error they stay.

    description: what the rows are made from. Raises UsageError for a file of other rows, ResourceError for the disk and
    a file that another process writes."""
    path = part_of(out)
    first = b'{"lineartime_rows": "%b"}\n' % hashlib.sha256(json.dumps(description).encode()).hexdigest().encode()
    n_rows = 0

    def add(row: dict[str, Any]) -> None:
        nonlocal n_rows
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        file.write(checksum(first, n_rows, line) + line)
        file.flush()
        n_rows += 1

    try:
        with os.fdopen(locked(path), "r+b") as file:
            begun = file.read(len(first))
            require(begun in (b"", first), "an unfinished file of other documents, another model or another version",
                    str(path), "delete it, or choose another --out")
            try:
                check_new(out)  # another process may have written it since
                n_rows = rows_there(file, first, path)
                begun = b""  # from here on n_rows says what would be lost
                yield n_rows, add
            except BaseException:
                if n_rows == 0 and not begun:  # it holds no row, and would refuse other settings
                    path.unlink(missing_ok=True)
                raise
            with replaced(out) as whole:  # the output is whole under its name before the rows go
                # `strict`: fewer rows are read than were written only if another process has changed the file.
                rows = (row for _, row in zip(range(n_rows), sound_rows(file, first), strict=True))
                write_rows(rows, n_rows, whole, out.suffix)
                file.write(WHOLE)
                file.flush()
            path.unlink(missing_ok=True)
    except BlockingIOError:
        raise ResourceError("another process is writing this file", path, "wait for it") from None
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None


def rows_there(file: IO[bytes], first: bytes, path: Path) -> int:
    """The number of rows of an open file up to the first that is damaged. What is behind them is cut off, and a new
    file gets its first line."""
    n_rows, end = 0, len(first)
    for row in sound_rows(file, first):
        n_rows, end = n_rows + 1, end + N_CHECKSUM + len(row)
    file.seek(end)
    rest = file.readline(MAX_BYTES)
    if rest.endswith(b"\n") and rest != WHOLE:  # a kill leaves less than a line
        logger.warning(f"damaged: {path}; its documents up to number {n_rows:,} are kept, the others are read again")
    file.seek(0)
    file.write(first)
    file.seek(end)
    file.truncate()
    return n_rows


def checksum(first: bytes, number: int, row: bytes) -> bytes:
    """The checksum of a row, which also holds its file's first line and its place in the file."""
    return hashlib.sha256(b"%b%d\n%b" % (first, number, row)).hexdigest()[:N_CHECKSUM].encode()


def sound_rows(file: IO[bytes], first: bytes) -> Iterator[bytes]:
    """The rows of an open file, up to the first that is damaged."""
    file.seek(len(first))
    number = 0
    while line := file.readline(MAX_BYTES):
        row = line[N_CHECKSUM:]
        if line[:N_CHECKSUM] != checksum(first, number, row):
            return
        yield row
        number += 1


def write_rows(rows: Iterable[bytes], n_rows: int, file: IO[bytes], ending: str) -> None:
    """Write rows of JSON to a `.jsonl`, or the vectors in them to a `.npy`; memory holds one row."""
    if ending == ".jsonl":
        file.writelines(rows)
        return
    for number, row in enumerate(rows):
        vector = np.array(json.loads(row)[VECTOR], "<f4")
        if number == 0:
            shape = {"descr": "<f4", "fortran_order": False, "shape": (n_rows, len(vector))}
            np.lib.format.write_array_header_1_0(file, shape)
        file.write(vector.tobytes())
