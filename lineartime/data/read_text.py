"""The reader of text files, a piece at a time, so that memory does not grow with a document.

    kind            documents
    .txt .md        one; and so in a file of another name
    .csv .tsv       one in each row; the first row names the columns
    .jsonl .json    one in each line, a JSON object
    .parquet        one in each row

All but `.parquet` may be packed: `.gz`, `.bz2`, `.xz`, `.zst`. Text is UTF-8; a byte order mark at
its beginning and blank rows are left out. What is wrong is a DataError with line, row or byte."""

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from shlex import quote
from typing import IO, Any, NamedTuple

from lineartime.base.errors import DataError, raised_as
from lineartime.base.files import MAX_BYTES
from lineartime.base.settings import require
from lineartime.base.stores import Name, file_blocks, is_address, opened, reading, size_of, unpacked
from lineartime.data.corpora import wiki40b_text

ENDING = re.compile(r"\.(?:txt|md|csv|tsv|jsonl|json)(?:\.gz|\.bz2|\.xz|\.zst)?$|\.parquet$", re.IGNORECASE)
READS = "it takes .txt, .md, .csv, .tsv, .jsonl, .json, packed as .gz, .bz2, .xz or .zst too, and .parquet"
PIECE = 1 << 16  # characters in a piece
MAX_LINE_BYTES = 64 << 20  # longest line of JSON, and longest field of a table
LARGEST_EXPANSION, EXPANSION_FREE = 100, 16 << 20
"""A file may have so many times its size of text, or so many characters, whichever is more."""
BYTE_ORDER_MARK = "\ufeff"
LAST_WORD = re.compile(r"(?s:.*)[\S\x1c-\x1f](?=[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000])")
"""All up to the last character that white space follows. Byte-level tokenizers cut between the two.
Unlike Python they do not count \\x1c to \\x1f as white space."""


class Piece(NamedTuple):
    """Part of a document; `last` marks the document's end."""

    text: str
    last: bool


Read = Callable[[Name], Iterator[Piece]]  # `read_pieces` with the settings of this text


class Record(NamedTuple):
    """What a row of a file says, with its place for errors."""

    where: str
    fields: Any


def ending_of(name: Name) -> str:
    """The ending of a file that can be read, such as ".jsonl.gz"; "" of any other."""
    found = ENDING.search(str(name))
    return found[0].lower() if found else ""


def kind_of(name: Name) -> str:
    """".txt" for a file that is one document, else its ending, see `ending_of`."""
    ending = ending_of(name)
    return ".txt" if ending.startswith((".txt", ".md")) else ending


def is_token_file(name: Name) -> bool:
    """Whether a name is that of a file of tokens, which `token_files` reads."""
    return str(name).endswith((".ds", ".bin"))


def not_utf8(name: object, where: str) -> DataError:
    return DataError("not valid UTF-8", f"{name}{where}", f"convert it: iconv -f latin1 -t utf-8 {name}")


def text_counter(name: Name) -> Callable[[int], None]:
    """A function that adds up a file's text, and raises DataError for more than fits the file."""
    n_left = max(LARGEST_EXPANSION * size_of(name), EXPANSION_FREE)

    def count(n: int) -> None:
        nonlocal n_left
        n_left -= n
        if n_left < 0:
            raise DataError(f"the text is more than {LARGEST_EXPANSION} times the file", name, "unpack it first")

    return count


def read_pieces(name: Name, *, field: str = "text", task: str | None = None) -> Iterator[Piece]:
    """The documents of a file, in order, each as pieces of at most `PIECE` characters. A blank
    document is one empty piece, or in a file that is one document pieces of white space; an empty
    file has no piece.

    field: the field or column that holds the text. task: "wiki40b" takes its markers out. Raises
    DataError."""
    count = text_counter(name)
    if kind_of(name) in ("", ".txt"):
        with unpacked(name) as file:
            if file.peek(1):
                for piece in cut_pieces(text_blocks(iter(partial(file.read, 1 << 20), b""), name)):
                    count(len(piece.text))
                    yield piece
        return
    for where, fields in read_rows(name, [field]):
        text = text_field(fields, field, where)
        count(len(text))
        if task == "wiki40b":
            with raised_as(DataError, "not a Wiki-40B article", where, ValueError):
                text = wiki40b_text(text)
        yield from pieces_of("" if text.isspace() else text)


def cut_pieces(blocks: Iterable[str], size: int = PIECE) -> Iterator[Piece]:
    """Cut a document into pieces of at most `size` characters; the cuts depend on its text alone.

    A piece ends before the last white space between two words, where byte-level BPE has a boundary.
    Only if 4,096 characters have no such place can a cut change a token."""
    buffer = ""
    for block in blocks:
        buffer += block
        while len(buffer) > size + 1:
            end = next((i for i in range(size, max(size - 4096, 0), -1)
                        if buffer[i] in " \n" and not buffer[i + 1].isspace()), size)
            yield Piece(buffer[:end], False)
            buffer = buffer[end:]
    yield Piece(buffer, True)


def pieces_of(text: str) -> Iterator[Piece]:
    """The pieces of a document that is in memory."""
    return cut_pieces(text[i:i + PIECE] for i in range(0, len(text), PIECE))


def text_blocks(blocks: Iterable[bytes], name: object) -> Iterator[str]:
    """The text of blocks of bytes, without a byte order mark at its beginning. Raises DataError,
    with the byte, for what is not text."""
    tail, position = "", 0
    for block in itertools.chain(blocks, [None]):
        text, tail, error = decode_next(block, tail, position, name)
        if error is not None:
            raise error
        position += len(block or b"")
        yield text


def decode_next(block: bytes | None, tail: str, position: int, name: object) -> tuple[str, str, DataError | None]:
    """Decode a block of a stream of UTF-8, None at its end: its text, the bytes of a last character
    that is not whole yet, in hexadecimal, and the error behind the text. tail: such bytes of the
    block before. position: the block's first byte."""
    data, begin, error = bytes.fromhex(tail) + (block or b""), position - len(tail) // 2, None
    try:
        text, n = codecs.utf_8_decode(data, "strict", block is None)
    except UnicodeDecodeError as e:
        text, n = data[:e.start].decode(), len(data)
        error = not_utf8(name, f", byte {begin + e.start}")
    if "\0" in text:
        error = DataError("a NUL byte: this is no text", f"{name}, byte {begin + data.index(0)}")
        text, n = text[: text.index("\0")], len(data)
    return text if begin else text.removeprefix(BYTE_ORDER_MARK), data[n:].hex(), error


def text_of(name: Name) -> Iterator[str]:
    """The text of a file of any name, which may be packed, or of stdin (`-`), in blocks."""
    return text_blocks(file_blocks(name), "stdin" if name == "-" else name)


def read_small(name: Name, most: int = MAX_BYTES) -> str:
    """The text of a file, which may be packed, or of stdin (`-`), without its byte order mark.
    Raises DataError for what cannot be read, is no text in UTF-8, or has more than `most` bytes."""
    content, where = bytearray(), "stdin" if name == "-" else name
    for block in file_blocks(name):
        content += block
        if len(content) > most:
            raise DataError("the text is too large", where, f"at most {most:,} bytes are read")
    return "".join(text_blocks([bytes(content)], where))


def read_rows(name: Name, names: Sequence[str], *, optional: Sequence[str] = ()) -> Iterator[Record]:
    """The rows of a file that are not blank. Of parquet only the columns `names`, which it must
    have, and those of `optional` that it has, are read."""
    kind = ending_of(name)
    if kind == ".parquet":
        with reading(name):
            yield from _parquet_rows(name, names, optional)
        return
    with unpacked(name) as file:
        if kind.startswith((".csv", ".tsv")):
            yield from _table_rows(file, name, "\t" if kind.startswith(".tsv") else ",")
        else:
            yield from _json_lines(file, name)


def _json_lines(file: Any, name: Name) -> Iterator[Record]:
    number, count = 0, text_counter(name)
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{name}:{number}"
        if line == b"\n":  # a small packed file may have a thousand million of them
            blank = file.peek(1)
            n_more = len(file.read(len(blank) - len(blank.lstrip(b"\n"))))
            number += n_more
            count(n_more)
        count(len(line))
        if len(line) > MAX_LINE_BYTES:
            raise DataError("line is too long", where, f"the limit is {MAX_LINE_BYTES} bytes")
        line = line.removeprefix(codecs.BOM_UTF8).strip()
        if line == b"[":
            raise DataError("an array of JSON", where, f"write each item on a line of its own: jq -c .[] {name}")
        try:
            text = line.decode()
        except UnicodeDecodeError as e:
            raise not_utf8(name, f":{number}, byte {e.start}") from None
        if text:
            yield Record(where, parse_json(text, where))


def parse_json(text: str, where: object) -> Any:
    """`json.loads`. Raises DataError, with line and column, for text that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        why = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)
        if isinstance(e, json.JSONDecodeError):
            line = f":{e.lineno}" if "\n" in text.rstrip() else ""
            where, why = f"{where}{line}, column {e.colno}", e.msg
        raise DataError("not valid JSON", where, why) from None


def _table_rows(file: IO[bytes], name: Name, delimiter: str) -> Iterator[Record]:
    """The rows of a table, each with the line on which it begins; every field is text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    line = 1
    # A byte that is not UTF-8 becomes a lone surrogate, so that its line is known.
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        rows = csv.reader(_checked_lines(text, name), delimiter=delimiter, strict=True)
        try:
            names = next((row for row in rows if row), [])
            require(len({*names}) == len(names), "the same column twice", name, ", ".join(names), DataError)
            between = [each for each in ";\t|" if len(names) == 1 and each in names[0]]
            if between:
                raise DataError("not a comma between the columns", name,
                                f"it is {between[0]!r}; save it with commas, or with tabs as .tsv")
            line = rows.line_num + 1
            for row in rows:
                if row and len(row) != len(names):
                    raise DataError("a row of another length", f"{name}:{line}",
                                    f"it has {len(row)} fields; give it {len(names)}, as the first row has")
                if row:
                    yield Record(f"{name}:{line}", dict(zip(names, row, strict=True)))
                line = rows.line_num + 1
        except csv.Error as e:
            raise DataError("not valid CSV", f"{name}:{line}", str(e)) from None


def _checked_lines(file: IO[str], name: Name) -> Iterator[str]:
    count = text_counter(name)
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), ""), 1):
        count(len(line))
        if len(line) == MAX_LINE_BYTES:
            raise DataError("line is too long", f"{name}:{number}", f"the limit is {MAX_LINE_BYTES} bytes")
        if "\0" in line:
            raise DataError("a NUL byte: this is no text", f"{name}:{number}")
        if not line.isascii() and any("\udc80" <= each <= "\udcff" for each in line):
            raise not_utf8(name, f":{number}")
        yield line


def _parquet_rows(name: Name, names: Sequence[str], optional: Sequence[str]) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    if not size_of(name):
        return
    row, count = 0, text_counter(name)
    try:
        source = opened(name) if is_address(name) else str(name)
        with parquet.ParquetFile(source, buffer_size=1 << 20, page_checksum_verification=True) as file:
            there = file.schema_arrow.names
            for column in names:
                if there.count(column) != 1:
                    raise _missing("column", column, name, there)
            columns = [*dict.fromkeys(names), *(column for column in optional if column in there)]
            for number in range(file.metadata.num_row_groups):
                count(file.metadata.row_group(number).total_byte_size)  # unpacked: a page may be as large
                for batch in file.iter_batches(16, row_groups=[number], columns=columns, use_threads=False):
                    for i in range(batch.num_rows):
                        row += 1
                        yield Record(f"{name}, row {row}",
                                     {column: batch.column(column)[i].as_py() for column in columns})
    except UnicodeDecodeError:
        raise DataError("not valid UTF-8", f"{name}, row {row}") from None
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as e:
        raise DataError("cannot read as parquet", name, str(e).splitlines()[0] if str(e) else None) from None


def text_field(record: Any, name: str, where: str) -> str:
    """The text in a field of a record. Raises DataError if there is none."""
    require(isinstance(record, dict), "not a JSON object", where, kind=DataError)
    if name not in record:
        raise _missing("field", name, where, list(record))
    return checked(record[name], f"field {name!r}", where)


def _missing(kind: str, name: str, where: Name, there: Sequence[str]) -> DataError:
    has = ", ".join(map(repr, there[:8])) or "none"
    likely = sorted((each for each in there if name.casefold() in each.casefold()), key=len)
    if name != "text":  # the user has named it, or it is one of TriviaQA's
        hint = f"; did you mean {likely[0]!r}?" if likely else ""
    else:
        hint = f"; name it: --text-field {quote(likely[0])}" if likely else "; name one with --text-field"
    return DataError(f"no {kind} {name!r}", where, f"it has {has}{hint}")


def checked(text: Any, what: str, where: str) -> str:
    """`text` itself. Raises DataError if it is no string or has a lone surrogate, as JSON may."""
    if not isinstance(text, str):
        raise DataError(f"{what} is not a string", where, "make it one, or take the document out")
    with raised_as(DataError, "a lone surrogate", where, UnicodeEncodeError, todo=f"{what} is no valid Unicode"):
        text.encode()
    return text
