"""A file of what was found of each document, written as it comes: a process that was stopped or killed goes on with it.

Until it is whole it is `OUT.part`: a first line with the hash of what the rows are made from, then a line for each row,
its checksum and its JSON; a checksum is of the row and of the checksum before it."""

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lineartime.atomic_io import MAX_BYTES, locked, replaced
from lineartime.config import to_dict
from lineartime.documents.examples import ON_HUB, files_of
from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.settings import require

if TYPE_CHECKING:
    import pyarrow

    from lineartime.data.tokenizer import Tokenizer
    from lineartime.documents.examples import Example
    from lineartime.documents.pooling import Mean
    from lineartime.model import LanguageModel

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024
BEGINS = b'{"lineartime_rows": "'
N_CHECKSUM = 16
"""Bytes of a checksum."""
WHOLE = b"whole\n"
"""The last line once the output is written: all that is left to do is to rename one file and to remove the other."""
VECTOR = "embedding"
"""The field of a row that a `.npy` holds."""


def result_row(example: "Example", mean: "Mean", **found: Any) -> dict[str, Any]:
    """A row: the place of a document, the tokens that were read, and what was found."""
    return {"file": example.file, "number": example.number, "tokens": mean.n_tokens, "cut": mean.is_cut, **found}


def result_schema(**found: "pyarrow.DataType") -> "pyarrow.Schema":
    """The columns of these rows."""
    import pyarrow

    return pyarrow.schema({"file": pyarrow.string(), "number": pyarrow.int64(), "tokens": pyarrow.int64(),
                           "cut": pyarrow.bool_(), **found})


def check_out(out: Path, endings: tuple[str, ...]) -> None:
    """Raise UsageError for a file that cannot be written, or is there already. The unfinished file goes if a process
    was killed between renaming the output and removing it."""
    require(out.suffix in endings, "unknown kind of file", str(out), f"it takes {', '.join(endings)}")
    if os.path.lexists(out):
        if part_of(out).exists():
            with contextlib.suppress(OSError, ResourceError), opened_part(part_of(out)) as file:
                is_ours = file.read(len(BEGINS)) == BEGINS
                file.seek(-len(WHOLE), os.SEEK_END)
                if is_ours and file.read() == WHOLE:
                    part_of(out).unlink()
        raise UsageError("the output exists already", str(out), "choose another or delete it")
    require(out.parent.is_dir(), "cannot write", str(out), "there is no such folder")


def weights_sha256(model: "LanguageModel") -> str:
    """The hash of a model's weights."""
    digest = hashlib.sha256()
    for parameter in model.state_dict().values():
        digest.update(parameter.cpu().contiguous().numpy())
    return digest.hexdigest()


def description_of(model: "LanguageModel", tokenizer: "Tokenizer", names: Iterable[str],
                   settings: dict[str, Any]) -> dict[str, Any]:
    """What rows are made from: the model, the tokenizer, the files as they are now, and settings. Text on stdin is
    never the same twice. Raises DataError for a file that is not there."""
    files: list[list[Any]] = []
    for name in names:
        if name.startswith(ON_HUB) or name == "-":
            files.append([name, *([time.time_ns()] if name == "-" else [])])
            continue
        for path in files_of(name):
            try:
                found = path.stat()
            except OSError as e:
                raise DataError("cannot read the input", path, e.strerror) from None
            files.append([str(path), found.st_size, found.st_mtime_ns])
    head = getattr(model, "head", None)
    fields = to_dict(model.config) | (head.fields() if head else {})
    return {"weights": weights_sha256(model), "model": fields, "tokenizer": tokenizer.sha256, "files": files,
            **settings}


def part_of(out: Path) -> Path:
    """The file that holds the rows until all are there."""
    return out.with_name(f"{out.name}.part")


@contextlib.contextmanager
def opened_part(path: Path) -> Iterator[IO[bytes]]:
    """Open and lock the unfinished file, or a new one. Raises OSError for a link, a file of two names and what is no
    regular file, ResourceError for a file that another process writes."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1):
        raise OSError(errno.EINVAL, "it is a link, or no regular file with one name", str(path))
    try:
        descriptor = locked(path)
    except BlockingIOError:
        raise ResourceError("another process is writing this file", path, "wait for it") from None
    with os.fdopen(descriptor, "r+b") as file:
        yield file


@contextlib.contextmanager
def unfinished_rows(out: Path, description: dict[str, Any],
                    schema: Callable[[], "pyarrow.Schema"]
                    ) -> Iterator[tuple[int, int, Callable[[dict[str, Any]], None]]]:
    """Yields the number of rows that are there already, that of cut documents among them, and a function that adds a
    row; at the end of the block the rows become `out`. After an error they stay.

    description: what the rows are made from. schema: the columns of a `.parquet`. Raises UsageError for a file of
    other rows, ResourceError for the disk and a file that another process writes."""
    path = part_of(out)
    first = BEGINS + hashlib.sha256(json.dumps(description).encode()).hexdigest().encode() + b'"}\n'
    try:
        with opened_part(path) as file:
            n_done, n_cut, last = rows_there(file, first, path)
            n_rows = n_done

            def add(row: dict[str, Any]) -> None:
                nonlocal n_rows, last
                line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                n_rows, last = n_rows + 1, checksum(last, line)
                file.write(last + line)
                file.flush()

            try:
                yield n_done, n_cut, add
            except BaseException:
                if n_rows == 0:  # nothing is lost, and other settings are not refused
                    path.unlink(missing_ok=True)
                raise
            # The output is whole under its name before the rows go; WHOLE says so to the next process after a kill.
            os.fsync(file.fileno())
            with replaced(out) as whole:
                write_rows(all_rows(file, first, n_rows, path), n_rows, whole, out.suffix, schema)
                file.write(WHOLE)
                file.flush()
            path.unlink(missing_ok=True)
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None


def rows_there(file: IO[bytes], first: bytes, path: Path) -> tuple[int, int, bytes]:
    """The number of rows of an open file up to the first that is damaged, that of cut documents among them, and the
    last checksum; what is behind them is cut off. A file without a whole first line gets it. Raises UsageError for a
    file that does not begin with this line."""
    begun, n_rows, n_cut, end, last = file.read(len(first)), 0, 0, len(first), first
    if begun and not (begun.startswith(BEGINS) and first.startswith(begun)):
        raise UsageError("an unfinished file of other documents, of another model or of another version", path,
                         "delete it, or choose another --out")
    if begun != first:  # it is new, or a kill has cut it off
        file.seek(0)
        try:
            file.write(first)
            file.flush()
        except OSError:  # of a full disk; what a few bytes of a line are of could not be told
            path.unlink()
            raise
    # A checksum covers all rows before it: what is behind the first wrong one cannot be trusted.
    for own, row in sound_rows(file, first):
        last, n_rows, n_cut, end = own, n_rows + 1, n_cut + json.loads(row)["cut"], end + N_CHECKSUM + len(row)
    file.seek(end)
    rest = file.readline(MAX_BYTES)
    if rest.endswith(b"\n") and rest != WHOLE:  # a kill leaves less than a line
        logger.warning(f"damaged: {path}; its documents up to number {n_rows:,} are kept, the others are read again")
    file.truncate(end)
    file.seek(end)
    return n_rows, n_cut, last


def checksum(before: bytes, row: bytes) -> bytes:
    """The checksum of a row, given that of the row before it."""
    return hashlib.sha256(before + row).hexdigest()[:N_CHECKSUM].encode()


def sound_rows(file: IO[bytes], first: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The rows of an open file with their checksums, up to the first that is damaged."""
    file.seek(len(first))
    last = first
    while line := file.readline(MAX_BYTES):
        before, last, row = last, line[:N_CHECKSUM], line[N_CHECKSUM:]
        if last != checksum(before, row):
            break
        yield last, row


def all_rows(file: IO[bytes], first: bytes, n_rows: int, path: Path) -> Iterator[bytes]:
    """The rows of an open file. Raises ResourceError if they are not as many as were written."""
    n_sound = 0
    for _, row in sound_rows(file, first):
        n_sound += 1
        yield row
    if n_sound != n_rows:
        raise ResourceError("another process has changed this file", path, "run the same command again")


def write_rows(rows: Iterator[bytes], n_rows: int, file: IO[bytes], ending: str,
               schema: Callable[[], "pyarrow.Schema"]) -> None:
    """Write rows of JSON to a file of any kind."""
    if ending == ".jsonl":
        file.writelines(rows)
    elif ending == ".npy":
        vectors = (np.array(json.loads(row)[VECTOR], "<f4") for row in rows)
        one = next(vectors, np.empty(0, "<f4"))
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False,
                                                    "shape": (n_rows, len(one))})
        for vector in itertools.chain((one,), vectors):
            file.write(vector.tobytes())
    else:
        import pyarrow
        from pyarrow import parquet

        columns = schema()
        with parquet.ParquetWriter(file, columns) as writer:
            while batch := [json.loads(row) for row in itertools.islice(rows, ROWS_AT_ONCE)]:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=columns))
