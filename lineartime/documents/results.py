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
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lineartime.atomic_io import MAX_BYTES, locked, open_regular, replaced
from lineartime.config import to_dict
from lineartime.documents.examples import ON_HUB, STDIN, files_of
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
FIRST_LINE = BEGINS + b'%s"}\n'
N_FIRST, N_CHECKSUM = len(FIRST_LINE % bytes(64)), 16
"""Bytes of the first line, and of a checksum."""
WHOLE = b"whole\n"
"""The last line once the output is written: all that is left to do is to rename one file and to remove the other."""
CUT = b'"cut": true'
"""What only the row of a cut document has: in JSON text a quotation mark has a backslash in front."""
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
        with contextlib.suppress(OSError, ResourceError), open_regular(part_of(out)) as file:
            is_ours = is_first_line(file.read(N_FIRST))
            file.seek(-len(WHOLE), os.SEEK_END)
            if is_ours and file.read() == WHOLE:
                with opened_part(part_of(out)):
                    part_of(out).unlink()
    require(not os.path.lexists(out), "the output exists already", str(out), "choose another or delete it")
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
        for path in files_of(name):
            if not path.is_file():
                raise DataError("cannot read the input", path, "no such file")
            found = path.stat()
            files.append([str(path), found.st_size, found.st_mtime_ns])
        files += [[name]] if name.startswith(ON_HUB) else [[name, time.time_ns()]] if name == STDIN else []
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
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link, or no regular file", str(path))
    try:
        descriptor = locked(path)
    except BlockingIOError:
        raise ResourceError("another process is writing this file", path, "wait for it") from None
    with os.fdopen(descriptor, "r+b") as file:
        if os.fstat(descriptor).st_nlink > 1:
            raise OSError(errno.EMLINK, "it has a second name", str(path))
        yield file


def is_first_line(line: bytes) -> bool:
    return re.fullmatch(FIRST_LINE.replace(b"%s", b"[0-9a-f]{64}"), line) is not None


@contextlib.contextmanager
def unfinished_rows(out: Path, description: dict[str, Any],
                    schema: Callable[[], "pyarrow.Schema"]
                    ) -> Iterator[tuple[int, int, Callable[[dict[str, Any]], None]]]:
    """Yields the number of rows that are there already, that of cut documents among them, and a function that adds a
    row; at the end of the block the rows become `out`. After an error they stay.

    description: what the rows are made from. schema: the columns of a `.parquet`. Raises UsageError for a file of
    other rows, ResourceError for the disk and a file that another process writes."""
    path = part_of(out)
    first = FIRST_LINE % hashlib.sha256(json.dumps(description).encode()).hexdigest().encode()
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

            yield n_done, n_cut, add
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
    last checksum; what is behind them is cut off. A file of ours without rows, or an empty one, gets its first line
    anew. Raises UsageError for any other file."""
    file.seek(0)
    begun, n_rows, n_cut, end, last = file.read(N_FIRST), 0, 0, N_FIRST, first
    has_rows = file.readline(MAX_BYTES).endswith(b"\n")
    is_half = begun.startswith(BEGINS) and first.startswith(begun)  # of a kill in its first write
    if begun and not is_half and (has_rows or not is_first_line(begun)):
        raise UsageError("an unfinished file of other documents, of another model or of another version", path,
                         "delete it, or choose another --out")
    if begun != first:
        file.seek(0)
        file.truncate()
        try:
            file.write(first)
            file.flush()
        except OSError:  # of a full disk; a file with a few bytes of a line could not be told from somebody else's
            path.unlink(missing_ok=True)
            raise
    # A checksum covers all rows before it: what is behind the first wrong one cannot be trusted.
    for own, row in sound_rows(file, first):
        last, n_rows, n_cut, end = own, n_rows + 1, n_cut + (CUT in row), end + N_CHECKSUM + len(row)
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
