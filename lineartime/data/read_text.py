"""The one reader of text files, for every verb. It reads a piece at a time, so memory does not grow with a file or a
document.

    kind            documents
    .txt .md        one
    .csv .tsv       one in each row; the first row names the columns
    .jsonl .json    one in each line, a JSON object
    .parquet        one in each row

All but `.parquet` may be packed: `.gz`, `.bz2`, `.xz`, `.zst`. Text is UTF-8; a byte order mark at its beginning and
blank rows are left out. What is wrong is a DataError with the file and the line, row or byte.

Several processes read one file by ranges of its bytes, see `units.slices_of`. Each reads what begins in its own range: lines,
groups of rows of parquet, or the words of a text. So every document is read once."""

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

from lineartime.base.errors import DataError
from lineartime.base.files import MAX_BYTES
from lineartime.base.stores import Name, file_blocks, size_of, unpacked
from lineartime.data.corpora import wiki40b_document
from lineartime.data.rows import Record, json_lines, not_utf8, parquet_rows, table_rows, text_field

ENDING = re.compile(r"\.(?:txt|md|csv|tsv|jsonl|json)(?:\.gz|\.bz2|\.xz|\.zst)?$|\.parquet$", re.IGNORECASE)
READS = "it takes .txt, .md, .csv, .tsv, .jsonl, .json, packed as .gz, .bz2, .xz or .zst too, and .parquet"
PIECE = 1 << 16
"""Characters in a piece."""
LARGEST_EXPANSION, EXPANSION_FREE = 100, 64 << 20
"""The text of a file may have so many times the file's bytes, or so many characters, whichever is more."""
BYTE_ORDER_MARK = "\ufeff"
BEFORE_WORD = re.compile(rb"[ \n](?=[!-~\xc3-\xdf\xe4-\xf4])")
"""In UTF-8, a space or line feed before what is no white space: byte-level tokenizers cut there, see `cut_pieces`."""
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


def read_pieces(name: Name, *, field: str = "text", task: str | None = None, start: int = 0, stop: int | None = None
                ) -> Iterator[Piece]:
    """The documents of a file, in order, each as pieces of at most `PIECE` characters; a blank document is one empty
    piece, or in a file that is one document pieces of white space.

    field: the field or column that holds the text. task: "wiki40b" takes its markers out. start, stop: a range of
    `slices_of`; if its document goes on in the next range, no piece is marked as the last. An empty file has no piece.
    Raises DataError, also for a small file of much text, which may have been made to fill the disk."""
    pieces = _pieces_of_text(name, start, stop) if is_one_document(name) else (
        piece for text in _texts_of_rows(name, field, task, start, stop) for piece in pieces_of(text))
    n_characters = 0
    for piece in pieces:
        n_characters += len(piece.text)
        if n_characters > EXPANSION_FREE and n_characters > LARGEST_EXPANSION * size_of(name):
            raise DataError(f"the text is more than {LARGEST_EXPANSION} times the file", name, "unpack it first")
        yield piece


def _pieces_of_text(name: Name, start: int, stop: int | None) -> Iterator[Piece]:
    """The pieces of a file that is one document, or of a range of it."""
    with unpacked(name) as file:
        begin = _before_word(file, start, stop) if start else 0 if file.peek(1) else None
        if begin is None:  # no word begins here, so the range before has all of it; or the file is empty
            return
        end = None if stop is None else _before_word(file, stop, None)
        if start or stop is not None:
            file.seek(begin)
        for text, last in cut_pieces(text_blocks(_blocks_of(file, None if end is None else end - begin), name, begin)):
            yield Piece(text, last and end is None)


def _before_word(file: IO[bytes], start: int, stop: int | None) -> int | None:
    """The first place of `BEFORE_WORD` in [start, stop), or in all that follows; None if there is none."""
    file.seek(start)
    at, block = start, b""
    while (stop is None or at < stop) and (more := file.read(PIECE if stop is None else min(PIECE, stop + 1 - at))):
        if found := BEFORE_WORD.search(block + more):
            begin = at - len(block) + found.start()
            return begin if stop is None or begin < stop else None
        at, block = at + len(more), more[-1:]
    return None


def _blocks_of(file: IO[bytes], n_bytes: int | None) -> Iterator[bytes]:
    """The next bytes of an open file in blocks; None: to its end."""
    while block := file.read(1 << 20 if n_bytes is None else min(1 << 20, n_bytes)):
        n_bytes = None if n_bytes is None else n_bytes - len(block)
        yield block


def _texts_of_rows(name: Name, field: str, task: str | None, start: int, stop: int | None) -> Iterator[str]:
    """The documents of a file of rows; a blank one is empty."""
    for where, fields in read_rows(name, [field], start=start, stop=stop):
        text = text_field(fields, field, where)
        text = wiki40b_document(text, where) if task == "wiki40b" else text
        yield "" if text.isspace() else text


def read_rows(name: Name, names: Sequence[str], *, optional: Sequence[str] = (), start: int = 0,
              stop: int | None = None) -> Iterator[Record]:
    """The rows of a file of rows that are not blank. Of parquet only the columns `names`, which the file must have, and
    those of `optional` that it has, are read. start, stop: as of `read_pieces`."""
    kind = ending_of(name)
    if kind == ".parquet":
        yield from parquet_rows(name, names, optional, start, stop)
        return
    with unpacked(name) as file:
        if kind.startswith((".csv", ".tsv")):
            yield from table_rows(file, name, "\t" if kind.startswith(".tsv") else ",")
        else:
            yield from json_lines(file, name, start, stop)


def cut_pieces(blocks: Iterable[str], size: int = PIECE) -> Iterator[Piece]:
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
    return cut_pieces(text[i:i + PIECE] for i in range(0, len(text), PIECE))


def text_blocks(blocks: Iterable[bytes], name: object, position: int = 0) -> Iterator[str]:
    """The text of blocks of bytes that begin at byte `position` of a file, without a byte order mark at its beginning.
    name: for errors. Raises DataError, with the byte, for what is not text."""
    decoder = codecs.getincrementaldecoder("utf-8" if position else "utf-8-sig")()
    for block in itertools.chain(blocks, [b""]):
        if b"\0" in block:
            raise DataError("a NUL byte: this is no text", f"{name}, byte {position + block.index(0)}")
        position += len(block)
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:  # e.object begins with the unfinished bytes of the previous block
            raise not_utf8(name, f", byte {position - len(e.object) + e.start}") from None


def text_of(name: Name) -> Iterator[str]:
    """The text of a file of any name, which may be packed, or of stdin (`-`), in blocks."""
    return text_blocks(file_blocks(name), "stdin" if name == "-" else name)


def read_small(name: Name, most: int = MAX_BYTES) -> str:
    """The text of a file, which may be packed, or of stdin (`-`), without its byte order mark. Raises DataError for a
    file that cannot be read, for more than `most` bytes, and for what is not UTF-8."""
    content, where = bytearray(), "stdin" if name == "-" else name
    for block in file_blocks(name):
        content += block
        if len(content) > most:
            raise DataError("the text is too large", where, f"at most {most:,} bytes are read")
    try:
        return content.decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as e:
        raise not_utf8(where, f", byte {e.start}") from None


def decode_next(block: bytes | None, tail: str, position: int, name: object) -> tuple[str, str, DataError | None]:
    """Decode the next block of a stream of UTF-8; None: its end. Returns its text, the bytes of a last character that
    is not whole yet, and the error behind the text, if there is one. tail: such bytes of the block before. Both are in
    hexadecimal. position: the block's first byte. name: for the error."""
    data, begin, error = bytes.fromhex(tail) + (block or b""), position - len(tail) // 2, None
    try:
        text, n = codecs.utf_8_decode(data, "strict", block is None)
    except UnicodeDecodeError as e:
        text, n = data[:e.start].decode(), len(data)
        error = DataError("not valid UTF-8", f"{name}, byte {begin + e.start}", f"convert it: iconv -f latin1 -t utf-8 {name}")
    return text if begin else text.removeprefix(BYTE_ORDER_MARK), data[n:].hex(), error
