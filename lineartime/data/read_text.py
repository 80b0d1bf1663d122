"""Documents read from text files, a piece at a time, so that memory does not grow with a file or a document.

A `.txt`, `.md` or `.txt.gz` is one document; `.jsonl`, `.jsonl.gz` and `.json.gz` hold one per line (a JSON object),
`.parquet` one per row."""

import codecs
import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from lineartime.errors import DataError

ENDINGS = (".txt", ".md", ".txt.gz", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
PIECE = 1 << 16
"""Characters in a piece."""
MAX_LINE_BYTES = 64 << 20
LARGEST_EXPANSION, EXPANSION_FREE = 100, 64 << 20
"""Text may be so many times its file, or so many characters."""
BYTE_ORDER_MARK = "\ufeff"
AS_UTF8 = "save it as UTF-8"
Convert = Callable[[str, str], str]
"""Turns a record's field into text. The second argument is the field's place, for errors."""


class Piece(NamedTuple):
    """Part of a document; `last` marks the document's end."""

    text: str
    last: bool


@dataclass
class Place:
    """Where reading a file begins: `at` is a byte, or a row of parquet; `line` is the number of the line before."""

    at: int = 0
    line: int = 0


def ending_of(name: str) -> str:
    """The one of `ENDINGS` that a file name has, or ""."""
    return next((ending for ending in sorted(ENDINGS, key=len, reverse=True) if name.lower().endswith(ending)), "")


def read_pieces(path: Path, *, field: str = "text", max_line_bytes: int = MAX_LINE_BYTES,
                convert: Convert | None = None, place: Place | None = None) -> Iterator[Piece]:
    """All documents of one file, in order, each as pieces of at most `PIECE` characters. A blank document is one empty
    piece, or in a file that is one document pieces of white space. field: the JSON field or parquet column. convert:
    applied to the field. place: where to begin. It moves along: after a document, and in a `.txt` after any piece, it
    is where the next one begins. A compressed file has no place but its beginning, which does not move.

    Raises DataError, with the line, row or byte, for a file that cannot be read."""
    place = Place() if place is None else place
    with readable(path):
        ending = ending_of(path.name)
        if ending in (".txt", ".md"):
            with opened(path) as file:
                file.seek(place.at)
                for piece in cut(text_blocks(file, path, place)):
                    place.at += len(piece.text.encode())
                    yield piece
            return
        if ending == ".txt.gz":
            with opened(path) as file:
                yield from cut(text_blocks(file, path, Place()))
            return
        found = (_parquet_texts(path, field, place) if ending == ".parquet"
                 else _json_texts(path, field, max_line_bytes, place))
        empty, size, characters = True, path.stat().st_size, 0
        for where, text in found:
            empty, characters = False, characters + len(text)
            require_expansion(path, size, characters)
            text = convert(text, where) if convert else text
            text = "" if text.isspace() else text
            yield from cut(text[i:i + PIECE] for i in range(0, len(text), PIECE))
        if empty:
            raise DataError("no documents in this file", path)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside the block, errors of reading a file are DataErrors. Raises DataError for an empty file."""
    try:
        if path.stat().st_size == 0:
            raise DataError("empty file", path, "take it out")
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise DataError("damaged gzip file", path, str(e)) from None
    except OSError as e:
        raise DataError("cannot read", path, e.strerror or str(e)) from None


def require_expansion(path: Path, size: int, expanded: int) -> None:
    """Raise DataError for a file whose text is absurdly larger: made to exhaust its reader."""
    if expanded > max(LARGEST_EXPANSION * size, EXPANSION_FREE):
        raise DataError(f"the text is more than {LARGEST_EXPANSION} times the file", path, "unpack it first")


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


def text_blocks(file: IO[bytes], name: object, place: Place) -> Iterator[str]:
    """The text of an open file of UTF-8, which is at `place`, without its byte order mark, which `place` is moved
    behind. name: for errors. Raises DataError, with the byte, for what is no text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = place.at
    while True:
        block = file.read(1 << 20)
        nul = block.find(b"\0")
        if nul >= 0:
            raise DataError("a NUL byte: this is no text", f"{name}, byte {position + nul}")
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:
            # e.object begins with the unfinished bytes of the previous block.
            byte = position + len(block) - len(e.object) + e.start
            raise DataError("not valid UTF-8", f"{name}, byte {byte}", AS_UTF8) from None
        if not block:
            return
        if position == 0 and text.startswith(BYTE_ORDER_MARK):
            place.at, text = len(BYTE_ORDER_MARK.encode()), text[1:]
        yield text
        position += len(block)


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if it is a `.gz`."""
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def check_gzip(path: Path) -> None:
    """Read a `.gz` to its end. Raises DataError if it is damaged."""
    with path.open("rb") as raw, gzip.open(raw) as file:
        try:
            while file.read(1 << 20):
                require_expansion(path, os.fstat(raw.fileno()).st_size, file.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise DataError("damaged gzip file", f"{path}, at or before byte {raw.tell()}", str(e)) from None


def _json_texts(path: Path, field: str, max_line_bytes: int, place: Place) -> Iterator[tuple[str, str]]:
    """The line, for errors, and the text of each document."""
    for where, record in json_records(path, max_line_bytes, place):
        yield where, text_field(record, field, where, "line")


def json_records(path: Path, max_line_bytes: int = MAX_LINE_BYTES,
                 place: Place | None = None) -> Iterator[tuple[str, Any]]:
    """The line, for errors, and the content of each line of a file of JSON lines that is not blank. place: as in
    `read_pieces`. Raises DataError, with the line, for what is not JSON, and OSError."""
    place, compressed = Place() if place is None else place, path.name.lower().endswith(".gz")
    with opened(path) as file:
        if place.at:
            file.seek(place.at)
        for number, where, record in json_lines(file, str(path), max_line_bytes, place.line):
            if not compressed:
                place.at, place.line = file.tell(), number
            yield where, record


def json_lines(file: IO[bytes], name: str, max_line_bytes: int = MAX_LINE_BYTES,
               n_before: int = 0) -> Iterator[tuple[int, str, Any]]:
    """The number, the place, for errors, and the content of each line of JSON lines that is not blank. n_before: lines
    before the first. Raises DataError as `json_records` does."""
    number = n_before
    while line := file.readline(max_line_bytes + 1):
        number, where = number + 1, f"{name}:{number + 1}"
        if len(line) > max_line_bytes:
            raise DataError("line is too long", where, f"the limit is {max_line_bytes} bytes")
        if not line.isspace():
            yield number, where, _record_of_line(line, where)


def _record_of_line(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as e:
        raise DataError("not valid UTF-8", f"{where}, byte {e.start} of the line", AS_UTF8) from None
    return parse_json(text, where, object_pairs_hook=_object, parse_constant=_no_constant)


def text_field(record: Any, name: str, where: str, what: str) -> str:
    """The text in a field of a record. Raises DataError if there is none; `what` is a word for the record."""
    if not isinstance(record, dict):
        raise DataError("not a JSON object", where)
    if name not in record:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"no field {name!r}", where, f"the {what} has {names}")
    return checked(record[name], f"field {name!r}", where)


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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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


def _parquet_texts(path: Path, field: str, place: Place) -> Iterator[tuple[str, str]]:
    """The row, for errors, and the text of each document."""
    import pyarrow

    def chosen(schema: Any) -> list[str]:
        if schema.names.count(field) != 1:
            raise DataError(f"no column {field!r}", path, f"its columns are {', '.join(schema.names)}")
        kind = schema.field(field).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"column {field!r} is not text", path, f"it is {kind}")
        return [field]

    for where, record in parquet_records(path, chosen, place.at):
        text = checked(record[field], f"column {field!r}", where)
        place.at += 1
        yield where, text


def parquet_records(path: Path, choose: Callable[[Any], list[str]],
                    first: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place, whose rows begin at 1, and the columns of each row of a parquet file, without the `first` first ones,
    16 rows in memory at a time.
    `choose` names the columns, given the file's schema. Raises DataError for a file that cannot be read, and as
    `choose` does."""
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, page_checksum_verification=True) as file:
            columns = choose(file.schema_arrow)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            largest = max((group.total_byte_size for group in groups), default=0)
            require_expansion(path, path.stat().st_size, largest)
            n_rows = 1 if largest > LARGEST_EXPANSION * path.stat().st_size else 16  # one long text, again and again
            skipped = 0
            while skipped < len(groups) and row + groups[skipped].num_rows <= first:
                row += groups[skipped].num_rows
                skipped += 1
            for batch in file.iter_batches(batch_size=n_rows, columns=columns, use_threads=False,
                                           row_groups=list(range(skipped, len(groups)))):
                for i in range(batch.num_rows):
                    if row >= first:
                        yield f"{path}, row {row + 1}", {name: batch.column(name)[i].as_py() for name in columns}
                    row += 1
    except FileNotFoundError:
        raise DataError("cannot read", path, "no such file") from None
    except UnicodeDecodeError:
        raise DataError("not valid UTF-8", f"{path}, row {row + 1}") from None
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise DataError("cannot read as parquet", path, str(e).splitlines()[0] if str(e) else None) from None
