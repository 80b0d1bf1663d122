"""The one reader of text files, for every verb. It reads a piece at a time, so memory does not grow with a file or a
document.

    kind        documents
    .txt .md    one
    .csv .tsv   one in each row; the first row names the columns
    .jsonl      one in each line, a JSON object
    .json       the same, or one array of objects
    .parquet    one in each row

All but `.parquet` may be packed: `.gz`, `.bz2`, `.xz`, `.zst`. Text is UTF-8; a byte order mark at its beginning and
blank rows are left out. What is wrong is a DataError with the file and the line, row or byte."""

import bz2
import codecs
import contextlib
import csv
import functools
import glob
import gzip
import io
import json
import logging
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from lineartime.data.corpora import wiki40b_document
from lineartime.errors import DataError

ENDING = re.compile(r"\.(?:txt|md|csv|tsv|jsonl|json)(?:\.gz|\.bz2|\.xz|\.zst)?$|\.parquet$", re.IGNORECASE)
READS = "it takes .txt, .md, .csv, .tsv, .jsonl, .json, packed as .gz, .bz2, .xz or .zst too, and .parquet"
PIECE = 1 << 16
"""Characters in a piece."""
MAX_LINE_BYTES = 64 << 20
MAX_ARRAY_BYTES = 1 << 30
"""Largest JSON array, which is read whole."""
LARGEST_EXPANSION, EXPANSION_FREE = 100, 64 << 20
"""Text may be so many times its file, or so many bytes."""
BYTE_ORDER_MARK = "\ufeff"
AS_UTF8 = "save it as UTF-8"

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where reading a file can begin: `at` is a byte, or a row of parquet; `line` is the number of the line before."""

    at: int = 0
    line: int = 0


class Piece(NamedTuple):
    """Part of a document; `last` marks the document's end. next: where reading can go on, if it can."""

    text: str
    last: bool
    next: Place | None = None


class Row(NamedTuple):
    """A record with its place, for errors. next: where reading can go on, if it can."""

    where: str
    fields: Any
    next: Place | None = None


def ending_of(name: str) -> str:
    """The ending of a file that can be read, in lower case, such as ".jsonl.gz"; "" of any other."""
    found = ENDING.search(name)
    return found[0].lower() if found else ""


def is_one_document(name: str) -> bool:
    """Whether a file that can be read is one document, and not rows."""
    return ending_of(name).startswith((".txt", ".md"))


def expanded(name: Path | str) -> list[Path]:
    """The files and folders that a pattern such as `books/*.txt` stands for, in order; or the path itself."""
    found = [] if os.path.lexists(name) else sorted(glob.glob(str(name), recursive=True))
    return [Path(each) for each in found] or [Path(name)]


def files_below(folder: Path) -> list[str]:
    """Relative names of all files that are not hidden, in order; each folder is read once, through links too. Raises
    OSError."""

    def refuse(e: OSError) -> None:
        raise e

    names: list[str] = []
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        if os.path.realpath(parent) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(parent))
        folders[:] = [name for name in sorted(folders) if not name.startswith(".")]
        names += [(Path(parent) / name).relative_to(folder).as_posix() for name in files if not name.startswith(".")]
    return sorted(names)


def text_files_below(folder: Path) -> tuple[list[str], list[str]]:
    """The relative names of the files of text in a folder, and of all others. A `.json` is one of the others where
    there is more: it has settings more often than text. Raises OSError."""
    names = files_below(folder)
    text = {name: ending_of(name) for name in names if ending_of(name)}
    text = {name: ending for name, ending in text.items() if ending != ".json"} or text
    return list(text), [name for name in names if name not in text]


def read_pieces(path: Path, *, field: str = "text", max_line_bytes: int = MAX_LINE_BYTES,
                task: str | None = None, start: Place | None = None) -> Iterator[Piece]:
    """All documents of one file, in order, each as pieces of at most `PIECE` characters. A blank document is one empty
    piece, or in a file that is one document pieces of white space. field: the field or column that holds the text.
    task: "wiki40b" takes its markers out. start: where to begin, the `next` of an earlier piece. An empty file has no
    piece."""
    start = start or Place()
    if is_one_document(path.name):
        yield from _pieces_of_text(path, start)
        return
    for where, record, following in read_rows(path, [field], max_line_bytes=max_line_bytes, start=start):
        text = text_field(record, field, where)
        text = wiki40b_document(text, where) if task == "wiki40b" else text
        text = "" if text.isspace() else text
        for piece in cut(text[i:i + PIECE] for i in range(0, len(text), PIECE)):
            yield piece._replace(next=following) if piece.last else piece


def _pieces_of_text(path: Path, start: Place) -> Iterator[Piece]:
    """The pieces of a file that is one document."""
    with readable(path), opened(path) as file:
        if path.stat().st_size == 0:
            return
        if _packing(path):
            yield from cut(text_blocks(file, path))
            return
        mark = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        at = start.at or mark
        file.seek(at)
        for text, last, _ in cut(text_blocks(file, path, at)):
            at += len(text.encode())
            yield Piece(text, last, Place(at))


def read_rows(path: Path, names: Sequence[str], *, optional: Sequence[str] = (), max_line_bytes: int = MAX_LINE_BYTES,
              start: Place | None = None) -> Iterator[Row]:
    """The rows of a file of rows that are not blank. Of parquet only the columns `names`, which the file must have, and
    those of `optional` that it has, are read."""
    start, kind = start or Place(), ending_of(path.name)
    if path.is_file() and path.stat().st_size == 0:
        return
    if kind == ".parquet":
        yield from _parquet_rows(path, names, optional, start.at)
        return
    with readable(path), opened(path) as file:
        if kind.startswith((".csv", ".tsv")):
            yield from _csv_rows(file, path, "\t" if kind.startswith(".tsv") else ",")
        elif not kind.startswith(".jsonl") and _is_array(file):
            yield from _array_rows(file, path)
        else:
            if start.at:
                file.seek(start.at)
            yield from json_lines(file, str(path), max_line_bytes, start.line, can_seek=not _packing(path))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside the block, errors of reading a file are DataErrors."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as e:
        raise DataError(f"damaged {_packing(path)} file", path, str(e)) from None
    except OSError as e:
        what = f"damaged {_packing(path)} file" if _packing(path) and e.errno is None else "cannot read"
        raise DataError(what, path, e.strerror or str(e)) from None


def _packing(path: Path) -> str:
    ending = path.suffix.lower()
    return ending if ending in (".gz", ".bz2", ".xz", ".zst") else ""


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked."""
    packing = _packing(path)
    if not packing:
        return path.open("rb")
    if packing == ".zst":
        import pyarrow

        return io.BufferedReader(_Unpacked(path, pyarrow.input_stream(str(path), compression="zstd")), 1 << 20)
    packers: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
    return io.BufferedReader(_Unpacked(path, packers[packing].open(path)), 1 << 20)


class _Unpacked(io.RawIOBase):
    """The bytes of a packed file. Raises DataError for far too many: it was made to exhaust its reader."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path, self.file, self.n_left = path, file, most_bytes(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        self.n_left -= len(data)
        if self.n_left < 0:
            raise _too_large(self.path)
        buffer[:len(data)] = data
        return len(data)

    def close(self) -> None:
        self.file.close()
        super().close()


def most_bytes(path: Path) -> int:
    """How large the text of a file may be."""
    return max(LARGEST_EXPANSION * path.stat().st_size, EXPANSION_FREE)


def _too_large(path: Path) -> DataError:
    return DataError(f"the text is more than {LARGEST_EXPANSION} times the file", path, "unpack it first")


def cut(blocks: Iterable[str], size: int = PIECE) -> Iterator[Piece]:
    """Cut one document into pieces of at most `size` characters; the cuts depend on its text, not on its blocks.

    A piece ends before the last white space between two words. Byte-level BPE has a boundary there, so the tokens are
    those of the whole document. Only if 4,096 characters have no such place can a cut change a token."""
    buffer = ""
    for block in blocks:
        buffer += block
        while len(buffer) > size + 1:
            end = next((i for i in range(size, max(size - 4096, 0), -1)
                        if buffer[i] in " \n" and not buffer[i + 1].isspace()), size)
            yield Piece(buffer[:end], False)
            buffer = buffer[end:]
    yield Piece(buffer, True)


def text_blocks(file: IO[bytes], name: object, position: int = 0) -> Iterator[str]:
    """The text of an open file of UTF-8, which is at byte `position`, without a byte order mark at its beginning. name:
    for errors."""
    decoder = codecs.getincrementaldecoder("utf-8" if position else "utf-8-sig")()
    while True:
        block = file.read(1 << 20)
        nul = block.find(b"\0")
        if nul >= 0:
            raise DataError("a NUL byte: this is no text", f"{name}, byte {position + nul}")
        position += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:  # e.object begins with the unfinished bytes of the previous block
            byte = position - len(e.object) + e.start
            raise DataError("not valid UTF-8", f"{name}, byte {byte}", AS_UTF8) from None
        if not block:
            return
        yield text


def json_lines(file: IO[bytes], name: str, max_line_bytes: int = MAX_LINE_BYTES, n_before: int = 0, *,
               can_seek: bool = False) -> Iterator[Row]:
    """The records of open JSON lines. n_before: lines before the first. can_seek: whether reading can go on after a
    line."""
    number = n_before
    while line := file.readline(max_line_bytes + 1):
        number += 1
        if len(line) > max_line_bytes:
            raise DataError("line is too long", f"{name}:{number}", f"the limit is {max_line_bytes} bytes")
        if line == b"\n" and isinstance(file, io.BufferedReader):  # a packed file may have a thousand million of them
            block = file.peek()
            number += len(file.read(len(block) - len(block.lstrip(b"\n"))))
        elif not line.isspace():
            where = f"{name}:{number}"
            yield Row(where, _json_value(line, where), Place(file.tell(), number) if can_seek else None)


def _is_array(file: Any) -> bool:
    """Whether an open `.json` begins with a bracket."""
    return file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _array_rows(file: IO[bytes], path: Path) -> Iterator[Row]:
    """The items of a JSON array, which is read whole."""
    most = min(MAX_ARRAY_BYTES, most_bytes(path))
    content = file.read(most + 1)
    if len(content) > most:
        raise DataError("the array is too large", path, "write each item on a line of its own, as .jsonl")
    for number, item in enumerate(_json_value(content, str(path)), 1):
        yield Row(f"{path}, item {number}", item)


def _json_value(content: bytes, where: str) -> Any:
    """What a file or line of JSON says. A name that occurs twice in an object is refused."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return record

    try:
        return parse_json(content.decode("utf-8-sig"), where, object_pairs_hook=as_dict)
    except UnicodeDecodeError as e:
        raise DataError("not valid UTF-8", f"{where}, byte {e.start}", AS_UTF8) from None


def _csv_rows(file: IO[bytes], path: Path, delimiter: str) -> Iterator[Row]:
    """The rows of a table as text, placed by their first lines."""
    csv.field_size_limit(MAX_LINE_BYTES)
    line = 1
    # A byte that is not UTF-8 becomes a lone surrogate, so that its line is known.
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = csv.reader(_checked_lines(text, path), delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            if len({*names}) < len(names):
                raise DataError("the same column twice", path, ", ".join(names))
            line = rows.line_num + 1
            for row in rows:
                where = f"{path}:{line}"
                if row and len(row) != len(names):
                    raise DataError("a row of another length", where, f"{len(row)} fields, the first row {len(names)}")
                if row:
                    yield Row(where, dict(zip(names, row, strict=True)))
                line = rows.line_num + 1
        except csv.Error as e:
            raise DataError("not valid CSV", f"{path}:{line}", str(e)) from None


def _checked_lines(file: Iterable[str], path: Path) -> Iterator[str]:
    """The lines of a table. Warns of a last line without an end: the file may have been cut inside a field."""
    number, line = 0, ""
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise DataError("a NUL byte: this is no text", f"{path}:{number}")
        if not line.isascii() and any("\udc80" <= each <= "\udcff" for each in line):
            raise DataError("not valid UTF-8", f"{path}:{number}", AS_UTF8)
        yield line
    if line and not line.endswith(("\n", "\r")):
        warn_once(f"the last line has no end, so the file may be cut: {path}:{number}: {line!r:.80}")


@functools.cache
def warn_once(line: str) -> None:
    """Warn of a file that may be read twice: it is checked first. A warning, for results may go to stdout."""
    logger.warning(line)


def _parquet_rows(path: Path, names: Sequence[str], optional: Sequence[str], first: int) -> Iterator[Row]:
    """The rows of a parquet file from row `first`; 16 are in memory at a time, or one where text is much larger than
    its file: one long text, again and again."""
    import pyarrow
    from pyarrow import parquet

    row = n_characters = 0
    most = most_bytes(path) if path.is_file() else 0
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, page_checksum_verification=True) as file:
            there = file.schema_arrow.names
            for name in names:
                if there.count(name) != 1:
                    columns_there = ", ".join(map(repr, there[:8]))
                    raise DataError(f"no column {name!r}", path, f"it has {columns_there}{hint_of_option(name)}")
            columns = [*dict.fromkeys(names), *(name for name in optional if name in there)]
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            largest = max((group.total_byte_size for group in groups), default=0)
            if largest > most:
                raise _too_large(path)
            n_rows = 1 if largest > LARGEST_EXPANSION * path.stat().st_size else 16
            skipped = 0
            while skipped < len(groups) and row + groups[skipped].num_rows <= first:
                row += groups[skipped].num_rows
                skipped += 1
            for batch in file.iter_batches(batch_size=n_rows, columns=columns, use_threads=False,
                                           row_groups=list(range(skipped, len(groups)))):
                for i in range(batch.num_rows):
                    row += 1
                    if row > first:
                        fields = {name: batch.column(name)[i].as_py() for name in columns}
                        n_characters += sum(len(value) for value in fields.values() if isinstance(value, str))
                        if n_characters > most:  # one long text that is stored once
                            raise _too_large(path)
                        yield Row(f"{path}, row {row}", fields, Place(row))
    except FileNotFoundError:
        raise DataError("cannot read", path, "no such file") from None
    except UnicodeDecodeError:
        raise DataError("not valid UTF-8", f"{path}, row {row}") from None
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise DataError("cannot read as parquet", path, str(e).splitlines()[0] if str(e) else None) from None


def text_field(record: Any, name: str, where: str) -> str:
    """The text in a field of a record. Raises DataError if there is none."""
    if not isinstance(record, dict):
        raise DataError("not a JSON object", where)
    if name not in record:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"no field {name!r}", where, f"it has {names}{hint_of_option(name)}")
    return checked(record[name], f"field {name!r}", where)


def hint_of_option(name: str) -> str:
    """How to name another field; who has named one already knows."""
    return "; name one with --text-field" if name == "text" else ""


def parse_json(text: str, where: object, **hooks: Any) -> Any:
    """`json.loads`. Raises DataError for text that is not JSON, with line and column (the column alone with hooks)."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise DataError("not valid JSON", where, "it is nested too deeply") from None
    except json.JSONDecodeError as e:
        line = "" if hooks else f":{e.lineno}"
        raise DataError("not valid JSON", f"{where}{line}, column {e.colno}", e.msg) from None
    except ValueError as e:
        raise DataError("not valid JSON", where, str(e)) from None


def checked(text: Any, what: str, where: str) -> str:
    """`text` itself. Raises DataError unless it is a string of valid Unicode."""
    if not isinstance(text, str):
        raise DataError(f"{what} is not a string", where, "make it one, or take the document out")
    check_text(text, what, where)
    return text


def check_text(text: str, what: str, where: str) -> None:
    """Raise DataError for a string with a lone surrogate, which JSON can spell."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError("a lone surrogate", where, f"{what} is no valid Unicode") from None
