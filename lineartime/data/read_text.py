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

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

from lineartime.base.errors import DataError, UsageError
from lineartime.base.files import MAX_BYTES
from lineartime.base.stores import Name, file_blocks, files_below, packing_of, reading, size_of, unpacked
from lineartime.data.corpora import wiki40b_document
from lineartime.data.rows import (
    UTF8,
    Row,
    array_rows,
    codec_of,
    is_array,
    is_utf8,
    json_lines,
    not_in_encoding,
    parquet_rows,
    table_rows,
    text_field,
)

ENDING = re.compile(r"\.(?:txt|md|csv|tsv|jsonl|json)(?:\.gz|\.bz2|\.xz|\.zst)?$|\.parquet$", re.IGNORECASE)
READS = "it takes .txt, .md, .csv, .tsv, .jsonl, .json, packed as .gz, .bz2, .xz or .zst too, and .parquet"
PIECE = 1 << 16
"""Characters in a piece."""
LONGEST_WHOLE = 1 << 22
"""Characters. A longer document is cut at the end of a line for a tokenizer that has to see documents whole."""
EXPANSION = 4
"""How many times larger than its file a packed text, or one in parquet, is taken to be when work is shared."""
BYTE_ORDER_MARK = "\ufeff"
BEFORE_WORD = re.compile(rb"[ \n](?=[!-~\xc3-\xdf\xe4-\xf4])")
"""In UTF-8, a space or line feed before what is no white space: byte-level tokenizers cut there, see `cut`."""
LAST_WORD = re.compile(r"(?s:.*)[\S\x1c-\x1f](?=[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000])")
"""All up to the last character that white space follows. Byte-level tokenizers cut between the two. Unlike Python they
do not count \\x1c to \\x1f as white space."""


class Piece(NamedTuple):
    """Part of a document; `last` marks the document's end."""

    text: str
    last: bool


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
    """The relative names of the files of text in a folder, and of all others. Beside other text a `.json` counts among
    the others: it has settings more often than text. Raises DataError."""
    names = files_below(folder)
    readable = [name for name in names if ending_of(name)]
    text = [name for name in readable if ending_of(name) != ".json"] or readable
    return text, [name for name in names if name not in {*text}]


def require_encoding(encoding: str) -> None:
    """Raise UsageError for an encoding that Python does not know."""
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        raise UsageError("unknown encoding", encoding, "such as utf-8, latin-1 or cp1252") from None


def ranges_of(name: Name, size: int, range_bytes: int, encoding: str = UTF8) -> list[tuple[int, int]]:
    """The ranges of bytes in which a file of this size may be read apart; one if that is not possible. They depend on
    nothing else, so any number of processes makes the same. range_bytes: of text, see `EXPANSION`."""
    apart = (ending_of(name) in (".txt", ".md", ".jsonl", ".parquet") and is_utf8(encoding)) or is_token_file(name)
    step = max(range_bytes // expansion_of(name), 1) if apart else max(size, 1)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def expansion_of(name: Name) -> int:
    """About how many times its size the text of a file is."""
    return EXPANSION if packing_of(name) or ending_of(name) == ".parquet" else 1


def read_pieces(name: Name, *, field: str = "text", task: str | None = None, encoding: str = UTF8, start: int = 0,
                stop: int | None = None) -> Iterator[Piece]:
    """The documents of a file, in order, each as pieces of at most `PIECE` characters; a blank document is one empty
    piece, or in a file that is one document pieces of white space.

    field: the field or column that holds the text. task: "wiki40b" takes its markers out. start, stop: a range of
    `ranges_of`; if its document goes on in the next range, no piece is marked as the last. An empty file has no
    piece."""
    if is_one_document(name):
        yield from _pieces_of_text(name, encoding, start, stop)
        return
    for where, record in read_rows(name, [field], encoding=encoding, start=start, stop=stop):
        text = text_field(record, field, where)
        text = wiki40b_document(text, where) if task == "wiki40b" else text
        yield from pieces_of("" if text.isspace() else text)


def _pieces_of_text(name: Name, encoding: str, start: int, stop: int | None) -> Iterator[Piece]:
    """The pieces of a file that is one document, or of a range of it."""
    size = size_of(name)
    stop = size if stop is None else stop
    with reading(name), unpacked(name) as file:
        begin = _before_word(file, start, stop) if start else 0
        if begin >= stop:  # no word begins here, so the range before has all of it; or the file is empty
            return
        end = _before_word(file, stop, size) if stop < size else size
        if start or stop < size:
            file.seek(begin)
        blocks = _blocks_of(file, None if packing_of(name) else end - begin)
        for text, last in cut(text_blocks(blocks, name, begin, encoding)):
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


def read_rows(name: Name, names: Sequence[str], *, optional: Sequence[str] = (), encoding: str = UTF8, start: int = 0,
              stop: int | None = None) -> Iterator[Row]:
    """The rows of a file of rows that are not blank. Of parquet only the columns `names`, which the file must have, and
    those of `optional` that it has, are read. start, stop: a range of `ranges_of`."""
    kind, size = ending_of(name), size_of(name)
    if not size:
        return
    if kind == ".parquet":
        yield from parquet_rows(name, names, optional, start, size if stop is None else stop)
        return
    with reading(name), unpacked(name) as file:
        if kind.startswith((".csv", ".tsv")):
            yield from table_rows(file, name, "\t" if kind.startswith(".tsv") else ",", encoding)
        elif not kind.startswith(".jsonl") and is_array(file):
            yield from array_rows(file, name, encoding)
        else:
            stop = None if packing_of(name) else stop  # a packed file has one range
            yield from json_lines(file, str(name), encoding, start, stop)


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
    """Join pieces into whole documents. One of more than `LONGEST_WHOLE` characters is cut at the ends of lines."""
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


def _blocks_of(file: IO[bytes], n_bytes: int | None) -> Iterator[bytes]:
    """The next bytes of an open file in blocks; None: to its end."""
    while block := file.read(1 << 20 if n_bytes is None else min(1 << 20, n_bytes)):
        n_bytes = None if n_bytes is None else n_bytes - len(block)
        yield block


def text_blocks(blocks: Iterable[bytes], name: object, position: int = 0, encoding: str = UTF8) -> Iterator[str]:
    """The text of blocks of bytes that begin at byte `position` of a file, without a byte order mark at its beginning.
    name: for errors. Raises DataError, with the byte, for what is not text."""
    decoder = codecs.getincrementaldecoder(encoding if position else codec_of(encoding))()
    may_have_nul = codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    for block in itertools.chain(blocks, [b""]):
        if b"\0" in block and not may_have_nul:
            raise DataError("a NUL byte: this is no text", f"{name}, byte {position + block.index(0)}")
        position += len(block)
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:  # e.object begins with the unfinished bytes of the previous block
            raise not_in_encoding(f"{name}, byte {position - len(e.object) + e.start}", encoding) from None
        except UnicodeError as e:  # UTF-16 without its byte order mark
            raise DataError(str(e), name, "name its order: --encoding utf-16-le or utf-16-be") from None


def text_of(name: Name, encoding: str = UTF8) -> Iterator[str]:
    """The text of a file of any name, which may be packed, or of stdin (`-`), in blocks."""
    return text_blocks(file_blocks(name), "stdin" if name == "-" else name, encoding=encoding)


def read_small(name: Name, most: int = MAX_BYTES) -> str:
    """The text of UTF-8 that `small_bytes` reads, without its byte order mark. Raises DataError for other text, and as
    that does."""
    try:
        return small_bytes(name, most).decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as e:
        where = f"{'stdin' if name == '-' else name}, byte {e.start}"
        raise DataError("not valid UTF-8", where, "save it as UTF-8") from None


def small_bytes(name: Name, most: int) -> bytes:
    """The bytes of a file, unpacked, or of stdin (`-`). Raises DataError for more than `most`, and for a file that
    cannot be read."""
    content = bytearray()
    for block in file_blocks(name):
        content += block
        if len(content) > most:
            where = "stdin" if name == "-" else name
            raise DataError("the text is too large", where, f"at most {most:,} bytes are read")
    return bytes(content)


def decode_next(block: bytes | None, tail: str, position: int, name: object) -> tuple[str, str, DataError | None]:
    """Decode the next block of a stream of UTF-8; None: its end. Returns its text, the bytes of a last character that
    is not whole yet, and the error behind the text, if there is one. tail: such bytes of the block before. Both are in
    hexadecimal. position: the block's first byte. name: for the error."""
    data, begin, error = bytes.fromhex(tail) + (block or b""), position - len(tail) // 2, None
    try:
        text, n = codecs.utf_8_decode(data, "strict", block is None)
    except UnicodeDecodeError as e:
        text, n = data[:e.start].decode(), len(data)
        error = DataError("not valid UTF-8", f"{name}, byte {begin + e.start}", "save it as UTF-8")
    return text if begin else text.removeprefix(BYTE_ORDER_MARK), data[n:].hex(), error
