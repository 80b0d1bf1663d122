"""A file of what was found of each document, written as it comes: a process that was stopped or killed goes on with it.

Until it is whole it is `OUT.part`: a line that says how it is made, then a JSON object a line."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lineartime.atomic_io import replaced
from lineartime.config import to_dict
from lineartime.documents.examples import ON_HUB, STDIN, files_of
from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.settings import require

if TYPE_CHECKING:
    import pyarrow

    from lineartime.data.tokenizer import Tokenizer
    from lineartime.model import LanguageModel

ROWS_AT_ONCE = 1024
BEGINS = b'{"weights": "'
"""How a description begins."""
CUT = b'"cut": true'
"""What only the row of a cut document has: in JSON text a quotation mark has a backslash in front."""
VECTOR = "embedding"
"""The field of a row that a `.npy` holds."""


def check_out(out: Path, endings: tuple[str, ...]) -> None:
    """Raise UsageError for a file that cannot be written, or is there already."""
    require(out.suffix in endings, "unknown kind of file", str(out), f"it takes {', '.join(endings)}")
    require(not os.path.lexists(out), "the output is there already", str(out), "choose another or delete it")
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
    from lineartime.model import DocumentClassifier

    head = model.head.fields() if isinstance(model, DocumentClassifier) else {}
    return {"weights": weights_sha256(model), "model": to_dict(model.config) | head, "tokenizer": tokenizer.sha256,
            "files": files, **settings}


def part_of(out: Path) -> Path:
    """The file that holds the rows until all are there."""
    return out.with_name(f"{out.name}.part")


@contextlib.contextmanager
def unfinished_rows(out: Path, description: dict[str, Any],
                    schema: Callable[[], "pyarrow.Schema"]
                   ) -> Iterator[tuple[int, int, Callable[[dict[str, Any]], None]]]:
    """Yields the number of rows that are there already, that of cut documents among them, and a function that adds a
    row; at the end of the block the rows become `out`. After an error they stay.

    description: what the rows are made from. schema: the columns of a `.parquet`. Raises UsageError for a file of
    other rows, ResourceError for the disk and a file that another process writes."""
    path, first = part_of(out), json.dumps(description).encode() + b"\n"
    try:
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResourceError("another process is writing this file", out, "wait for it") from None
            n_done, n_cut = rows_of(file, first, path)

            def add(row: dict[str, Any]) -> None:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()

            yield n_done, n_cut, add
            os.fsync(file.fileno())
            file.seek(len(first))
            with replaced(out) as whole:
                write_rows(file, whole, out.suffix, schema)
        path.unlink()
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None


def rows_of(file: IO[bytes], first: bytes, path: Path) -> tuple[int, int]:
    """The number of whole rows of an open file, and of cut documents among them; what is behind them is cut off, and a
    file of ours without rows gets its first line anew. Raises UsageError for any other file."""
    file.seek(0)
    begun, n_rows, n_cut, end = file.readline(), 0, 0, len(first)
    is_ours = begun[: len(BEGINS)] == BEGINS[: len(begun)]
    if is_ours and not file.readline().endswith(b"\n"):  # of a process that ended before its first row
        file.truncate(0)
        file.write(first)
        file.flush()
        return 0, 0
    if begun != first:
        raise UsageError("a file of other documents, or of another model, is unfinished", path,
                         "delete it, or choose another --out")
    file.seek(len(first))
    for line in file:
        if not line.endswith(b"\n"):
            break
        n_rows, n_cut, end = n_rows + 1, n_cut + (CUT in line), end + len(line)
    file.truncate(end)
    return n_rows, n_cut


def write_rows(rows: IO[bytes], file: IO[bytes], ending: str, schema: Callable[[], "pyarrow.Schema"]) -> None:
    """Copy rows of JSON into a file of another kind."""
    if ending == ".jsonl":
        shutil.copyfileobj(rows, file)
    elif ending == ".npy":
        begin, n_rows = rows.tell(), sum(1 for _ in rows)
        rows.seek(begin)
        vectors = (np.array(json.loads(line)[VECTOR], "<f4") for line in rows)
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
            while batch := [json.loads(line) for line in itertools.islice(rows, ROWS_AT_ONCE)]:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=columns))
