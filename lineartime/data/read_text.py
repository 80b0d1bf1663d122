"""The one reader of text files, for every verb. It reads a piece at a time, so memory does not grow with a file or a
document.

    kind        documents
    .txt .md    one
    .csv .tsv   one in each row; the first row names the columns
    .jsonl      one in each line, a JSON object
    .json       the same, or one array of objects
    .parquet    one in each row

All but `.parquet` may be packed: `.gz`, `.bz2`, `.xz`, `.zst`. Text is UTF-8, or in a named encoding; a byte order mark
at its beginning and blank rows are left out. What is wrong is a DataError with the file and the line, row or byte.

Several processes read one file by ranges of its bytes, see `ranges_of`. Each reads what begins in its own range: lines,
groups of rows of parquet, or the words of a text. So every document is read once."""

import bz2
import codecs
import csv
import functools
import gzip
import io
import json
import logging
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from lineartime.data.corpora import wiki40b_document
from lineartime.data.files import Name, files_below, is_address, opened, reading, size_of
from lineartime.errors import DataError, UsageError

ENDING = re.compile(r"\.(?:txt|md|csv|tsv|jsonl|json)(?:\.gz|\.bz2|\.xz|\.zst)?$|\.parquet$", re.IGNORECASE)
READS = "it takes .txt, .md, .csv, .tsv, .jsonl, .json, packed as .gz, .bz2, .xz or .zst too, and .parquet"
PIECE = 1 << 16
"""Characters in a piece."""
LONGEST_WHOLE = 1 << 22
"""Characters. A longer document is cut at the end of a line for a tokenizer that has to see documents whole."""
MAX_LINE_BYTES = 64 << 20
MAX_ARRAY_BYTES = 1 << 30
"""Largest JSON array, which is read whole."""
LARGEST_EXPANSION, EXPANSION_FREE = 100, 64 << 20
"""Text may be so many times its file, or so many bytes."""
EXPANSION = 4
"""About how many times its file the text is that is packed, or in parquet: by it work is shared evenly."""
BYTE_ORDER_MARK = "\ufeff"
UTF8 = "utf-8"
BEFORE_WORD = re.compile(rb"[ \n](?=[!-~\xc3-\xdf\xe4-\xf4])")
"""In UTF-8, white space before a character that is none: a place at which byte-level tokenizers cut, see `cut`."""
LAST_WORD = re.compile(r"(?s:.*)\S(?=[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000])")
"""All up to the last character that white space follows. Byte-level tokenizers cut between the two. Unlike Python they
do not count \\x1c to \\x1f as white space, so these are taken for neither."""

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Part of a document; `last` marks the document's end."""

    text: str
    last: bool


class Row(NamedTuple):
    """A record with its place, for errors."""

    where: str
    fields: Any


def ending_of(name: Name) -> str:
    """The ending of a file that can be read, in lower case, such as ".jsonl.gz"; "" of any other."""
    found = ENDING.search(str(name))
    return found[0].lower() if found else ""


def is_one_document(name: Name) -> bool:
    """Whether a file that can be read is one document, and not rows."""
    return ending_of(name).startswith((".txt", ".md"))


def is_token_file(name: Name) -> bool:
    """Whether a name is that of a file of tokens, which `token_files` reads."""
    return str(name).endswith((".ds", ".bin"))


def text_files_below(folder: Name) -> tuple[list[str], list[str]]:
    """The relative names of the files of text in a folder, and of all others. A `.json` is one of the others where
    there is more: it has settings more often than text. Raises OSError."""
    names = files_below(folder)
    text = {name: ending_of(name) for name in names if ending_of(name)}
    text = {name: ending for name, ending in text.items() if ending != ".json"} or text
    return list(text), [name for name in names if name not in text]


def require_encoding(encoding: str) -> None:
    """Raise UsageError for an encoding that Python does not know."""
    try:
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError):
        raise UsageError("unknown encoding", encoding, "such as utf-8, latin-1 or cp1252") from None


def ranges_of(name: Name, size: int, range_bytes: int, encoding: str = UTF8) -> list[tuple[int, int]]:
    """The ranges of bytes in which a file of this size may be read apart; one if that is not possible. They depend on
    nothing else, so any number of processes makes the same. range_bytes: of text, see `EXPANSION`."""
    apart = (ending_of(name) in (".txt", ".md", ".jsonl", ".parquet") and encoding == UTF8) or is_token_file(name)
    step = max(range_bytes // expansion_of(name), 1) if apart else max(size, 1)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def expansion_of(name: Name) -> int:
    """About how many times its size the text of a file is."""
    return EXPANSION if _packing(name) or ending_of(name) == ".parquet" else 1


def read_pieces(name: Name, *, field: str = "text", max_line_bytes: int = MAX_LINE_BYTES, task: str | None = None,
                encoding: str = UTF8, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """The documents of a file, in order, each as pieces of at most `PIECE` characters; a blank document is one empty
    piece, or in a file that is one document pieces of white space.

    field: the field or column that holds the text. task: "wiki40b" takes its markers out. start, stop: a range of
    `ranges_of`; the pieces of a document that goes on in the next one are none of them the last. An empty file has no
    piece."""
    if is_one_document(name):
        yield from _pieces_of_text(name, encoding, start, stop)
        return
    rows = read_rows(name, [field], max_line_bytes=max_line_bytes, encoding=encoding, start=start, stop=stop)
    for where, record in rows:
        text = text_field(record, field, where)
        text = wiki40b_document(text, where) if task == "wiki40b" else text
        text = "" if text.isspace() else text
        yield from pieces_of(text)


def _pieces_of_text(name: Name, encoding: str, start: int, stop: int | None) -> Iterator[Piece]:
    """The pieces of a file that is one document, or of a range of it."""
    size = size_of(name)
    if not size:
        return
    with reading(name), unpacked(name) as file:
        if _packing(name) or encoding != UTF8:
            yield from cut(text_blocks(file, name, encoding=encoding))
            return
        stop = size if stop is None else stop
        begin = _before_word(file, start, stop) if start else 0
        if begin >= stop:  # no word begins here, so the range before has all of it
            return
        end = _before_word(file, stop, size) if stop < size else size
        file.seek(begin)
        for text, last in cut(text_blocks(file, name, begin, end)):
            yield Piece(text, last and end == size)


def _before_word(file: IO[bytes], start: int, stop: int) -> int:
    """The first place of `BEFORE_WORD` in [start, stop), else `stop`."""
    file.seek(start)
    at, block = start, b""
    while at < stop and (more := file.read(min(PIECE, stop + 1 - at))):
        if found := BEFORE_WORD.search(block + more):
            return min(at - len(block) + found.start(), stop)
        at, block = at + len(more), more[-1:]
    return stop


def read_rows(name: Name, names: Sequence[str], *, optional: Sequence[str] = (), max_line_bytes: int = MAX_LINE_BYTES,
              encoding: str = UTF8, start: int = 0, stop: int | None = None) -> Iterator[Row]:
    """The rows of a file of rows that are not blank. Of parquet only the columns `names`, which the file must have, and
    those of `optional` that it has, are read. start, stop: a range of `ranges_of`."""
    kind, size = ending_of(name), size_of(name)
    if not size:
        return
    if kind == ".parquet":
        yield from _parquet_rows(name, names, optional, start, size if stop is None else stop)
        return
    with reading(name), unpacked(name) as file:
        if kind.startswith((".csv", ".tsv")):
            yield from _csv_rows(file, name, "\t" if kind.startswith(".tsv") else ",", encoding)
        elif not kind.startswith(".jsonl") and _is_array(file):
            yield from _array_rows(file, name, encoding)
        else:
            stop = None if _packing(name) else stop  # a packed file has one range
            yield from json_lines(file, str(name), max_line_bytes, encoding, start, stop)


def _packing(name: Name) -> str:
    """The ending of a packed file, else ""."""
    ending = f".{str(name).rpartition('.')[2].lower()}"
    return ending if ending in (".gz", ".bz2", ".xz", ".zst") else ""


def unpacked(name: Name) -> IO[bytes]:
    """The bytes of a file, unpacked."""
    file, packing = opened(name), _packing(name)
    if not packing:
        return file
    if packing == ".zst":
        import pyarrow

        return io.BufferedReader(_Unpacked(name, file, pyarrow.CompressedInputStream(file, "zstd")), 1 << 20)
    packers: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
    return io.BufferedReader(_Unpacked(name, file, packers[packing].open(file)), 1 << 20)


class _Unpacked(io.RawIOBase):
    """The bytes of a packed file. Raises DataError for far too many: it was made to exhaust its reader."""

    def __init__(self, name: Name, packed: IO[bytes], file: Any):
        self.name, self.packed, self.file, self.n_left = name, packed, file, most_bytes(name)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.file.read(len(buffer))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:
            raise DataError(f"damaged {_packing(self.name)} file", self.name, str(e)) from None
        self.n_left -= len(data)
        if self.n_left < 0:
            raise _too_large(self.name)
        buffer[:len(data)] = data
        return len(data)

    def close(self) -> None:
        self.file.close()
        self.packed.close()
        super().close()


def most_bytes(name: Name) -> int:
    """How large the text of a file may be."""
    return max(LARGEST_EXPANSION * size_of(name), EXPANSION_FREE)


def _too_large(name: Name) -> DataError:
    return DataError(f"the text is more than {LARGEST_EXPANSION} times the file", name, "unpack it first")


def file_blocks(name: Name, n_read: int = 0) -> Iterator[bytes]:
    """The bytes of a file, unpacked, behind the first `n_read`."""
    with reading(name), unpacked(name) as file:
        while n_read:
            if not (block := file.read(min(n_read, 1 << 20))):
                raise DataError("the file is shorter than what was read of it", name)
            n_read -= len(block)
        while block := file.read(PIECE):
            yield block


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


def pieces_of(text: str) -> Iterator[Piece]:
    """The pieces of a document that is in memory."""
    return cut(text[i:i + PIECE] for i in range(0, len(text), PIECE))


def read_whole(pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Whole documents, of their pieces. One of more than `LONGEST_WHOLE` characters is cut at the ends of lines."""
    text = ""
    for piece, last in pieces:
        text += piece
        if not last and len(text) >= LONGEST_WHOLE and (end := text.rfind("\n") + 1):
            yield text[:end], False
            text = text[end:]
        if last:
            yield text, True
            text = ""
    if text:  # of a slice that ends before its document
        yield text, False


def text_blocks(file: IO[bytes], name: object, position: int = 0, stop: int | None = None,
                encoding: str = UTF8) -> Iterator[str]:
    """The text of an open file, which is at byte `position`, up to byte `stop`, without a byte order mark at its
    beginning. name: for errors."""
    decoder = codecs.getincrementaldecoder("utf-8-sig" if encoding == UTF8 and not position else encoding)()
    may_have_nul = encoding.lower().startswith(("utf-16", "utf-32", "utf16", "utf32"))
    while True:
        block = file.read(1 << 20 if stop is None else min(1 << 20, stop - position))
        nul = -1 if may_have_nul else block.find(b"\0")
        if nul >= 0:
            raise DataError("a NUL byte: this is no text", f"{name}, byte {position + nul}")
        position += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:  # e.object begins with the unfinished bytes of the previous block
            raise not_in_encoding(f"{name}, byte {position - len(e.object) + e.start}", encoding) from None
        if not block:
            return
        yield text


def decode_next(block: bytes | None, tail: str, position: int, name: object) -> tuple[str, str, DataError | None]:
    """The text of the next bytes of a stream of UTF-8, None at its end; the bytes of a character that goes on behind
    them; and what is wrong behind the text. tail: those of a character before them, both in hexadecimal. position: of
    the block."""
    data, begin, error = bytes.fromhex(tail) + (block or b""), position - len(tail) // 2, None
    try:
        text, n = codecs.utf_8_decode(data, "strict", block is None)
    except UnicodeDecodeError as e:
        text, n = data[:e.start].decode(), len(data)
        error = DataError("not valid UTF-8", f"{name}, byte {begin + e.start}", "save it as UTF-8")
    return text if begin else text.removeprefix(BYTE_ORDER_MARK), data[n:].hex(), error


def not_in_encoding(where: str, encoding: str = UTF8) -> DataError:
    """The error of text that is not in the encoding in which it is read."""
    return DataError(f"not valid {encoding.upper()}", where, "save it as UTF-8, or name its encoding, such as "
                     "--encoding latin-1")


def json_lines(file: IO[bytes], name: str, max_line_bytes: int = MAX_LINE_BYTES, encoding: str = UTF8, start: int = 0,
               stop: int | None = None) -> Iterator[Row]:
    """The records of open JSON lines, or those whose lines begin in a range of bytes."""
    number, after = 0, f" after byte {start}" if start else ""
    if start:
        file.seek(start - 1)
        while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):  # of a line of the range before
            pass
    at = file.tell() if start else 0
    while (stop is None or at < stop) and (line := file.readline(max_line_bytes + 1)):
        number, at = number + 1, at + len(line)
        where = f"{name}:{number}{after}"
        if len(line) > max_line_bytes:
            raise DataError("line is too long", where, f"the limit is {max_line_bytes} bytes")
        if line == b"\n" and isinstance(file, io.BufferedReader):  # a packed file may have a thousand million of them
            block = file.peek()
            more = len(file.read(len(block) - len(block.lstrip(b"\n"))))
            number, at = number + more, at + more
        elif not line.isspace():
            yield Row(where, _json_value(line, where, encoding))


def _is_array(file: Any) -> bool:
    """Whether an open `.json` begins with a bracket."""
    return file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _array_rows(file: IO[bytes], name: Name, encoding: str) -> Iterator[Row]:
    """The items of a JSON array, which is read whole."""
    most = min(MAX_ARRAY_BYTES, most_bytes(name))
    content = file.read(most + 1)
    if len(content) > most:
        raise DataError("the array is too large", name, "write each item on a line of its own, as .jsonl")
    for number, item in enumerate(_json_value(content, str(name), encoding), 1):
        yield Row(f"{name}, item {number}", item)


def _json_value(content: bytes, where: str, encoding: str) -> Any:
    """What a file or line of JSON says. A name that occurs twice in an object is refused."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return record

    try:
        text = content.decode("utf-8-sig" if encoding == UTF8 else encoding)
    except UnicodeDecodeError as e:
        raise not_in_encoding(f"{where}, byte {e.start}", encoding) from None
    return parse_json(text, where, object_pairs_hook=as_dict)


def _csv_rows(file: IO[bytes], name: Name, delimiter: str, encoding: str) -> Iterator[Row]:
    """The rows of a table as text, placed by their first lines."""
    csv.field_size_limit(MAX_LINE_BYTES)
    line = 1
    # A byte that is not UTF-8 becomes a lone surrogate, so that its line is known.
    codec, errors = ("utf-8-sig", "surrogateescape") if encoding == UTF8 else (encoding, "strict")
    with io.TextIOWrapper(file, codec, errors, newline="") as text:
        rows = csv.reader(_checked_lines(text, name), delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            if len({*names}) < len(names):
                raise DataError("the same column twice", name, ", ".join(names))
            line = rows.line_num + 1
            for row in rows:
                where = f"{name}:{line}"
                if row and len(row) != len(names):
                    raise DataError("a row of another length", where, f"{len(row)} fields, the first row {len(names)}")
                if row:
                    yield Row(where, dict(zip(names, row, strict=True)))
                line = rows.line_num + 1
        except csv.Error as e:
            raise DataError("not valid CSV", f"{name}:{line}", str(e)) from None
        except UnicodeDecodeError:
            raise not_in_encoding(f"{name}, after line {line}", encoding) from None


def _checked_lines(file: Iterable[str], name: Name) -> Iterator[str]:
    """The lines of a table. Warns of a last line without an end: the file may have been cut inside a field."""
    number, line = 0, ""
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise DataError("a NUL byte: this is no text", f"{name}:{number}")
        if not line.isascii() and any("\udc80" <= each <= "\udcff" for each in line):
            raise not_in_encoding(f"{name}:{number}")
        yield line
    if line and not line.endswith(("\n", "\r")):
        warn_once(f"the last line has no end, so the file may be cut: {name}:{number}: {line!r:.80}")


@functools.cache
def warn_once(line: str) -> None:
    """Warn of a file that may be read twice: it is checked first. A warning, for results may go to stdout."""
    logger.warning(line)


def _parquet_rows(name: Name, names: Sequence[str], optional: Sequence[str], start: int, stop: int) -> Iterator[Row]:
    """The rows of the groups of a parquet file that begin in a range of bytes; 16 rows are in memory at a time, or one
    where text is much larger than its file: one long text, again and again."""
    import pyarrow
    from pyarrow import parquet

    row = n_characters = 0
    most = most_bytes(name)
    try:
        source = opened(name) if is_address(name) else str(name)
        with parquet.ParquetFile(source, buffer_size=1 << 20, page_checksum_verification=True) as file:
            there = file.schema_arrow.names
            for column in names:
                if there.count(column) != 1:
                    raise DataError(f"no column {column!r}", name, f"it has {', '.join(map(repr, there[:8]))}"
                                    f"{hint_of_option(column, there)}")
            columns = [*dict.fromkeys(names), *(column for column in optional if column in there)]
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                if not start <= max(_first_byte(group), 0) < stop:
                    row += group.num_rows
                    continue
                if group.total_byte_size > most:
                    raise _too_large(name)
                n_rows = 1 if group.total_byte_size > LARGEST_EXPANSION * size_of(name) else 16
                for batch in file.iter_batches(n_rows, row_groups=[number], columns=columns, use_threads=False):
                    for i in range(batch.num_rows):
                        row += 1
                        fields = {column: batch.column(column)[i].as_py() for column in columns}
                        n_characters += sum(len(value) for value in fields.values() if isinstance(value, str))
                        if n_characters > most:  # one long text that is stored once
                            raise _too_large(name)
                        yield Row(f"{name}, row {row}", fields)
    except FileNotFoundError:
        raise DataError("cannot read", name, "no such file") from None
    except UnicodeDecodeError:
        raise DataError("not valid UTF-8", f"{name}, row {row}") from None
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise DataError("cannot read as parquet", name, str(e).splitlines()[0] if str(e) else None) from None


def _first_byte(group: Any) -> int:
    """Where the first column of a group of rows begins in its file."""
    column = group.column(0)
    return column.dictionary_page_offset or column.data_page_offset


def text_field(record: Any, name: str, where: str) -> str:
    """The text in a field of a record. Raises DataError if there is none."""
    if not isinstance(record, dict):
        raise DataError("not a JSON object", where)
    if name not in record:
        texts = [each for each, value in record.items() if isinstance(value, str)]
        raise DataError(f"no field {name!r}", where,
                        f"it has {', '.join(map(repr, list(record)[:8])) or 'none'}{hint_of_option(name, texts)}")
    return checked(record[name], f"field {name!r}", where)


def hint_of_option(name: str, there: Sequence[str]) -> str:
    """How to name another field; who has named one already knows."""
    return f"; name one with --text-field, such as --text-field {there[0]}" if name == "text" and there else ""


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
