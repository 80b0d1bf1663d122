"""Units of work: a few million bytes of a split, tokenised by one process."""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lineartime.base.errors import DataError, LineartimeError
from lineartime.data.read_text import Read, is_token_file, pieces_of
from lineartime.data.sources import Source
from lineartime.data.token_files import read_token_file
from lineartime.data.tokenizer import Tokenizer

ROW = np.dtype(("<u8", 5))  # ids, words, bytes and hash of a part, which add up, and whether its document ends
LINE_SEARCH = 1 << 16  # a single document is cut at a line that begins within this many characters
PART_BYTES = 64  # what a part takes in memory beside its text, at least


class Part(NamedTuple):
    """What is tokenised in one call: a piece of a document, or all of it, or its ids from a token
    file. `before` is the document's last character before it."""

    path: str
    content: str | np.ndarray
    last: bool
    before: str = ""


@dataclasses.dataclass
class Unit:
    """What one process tokenises at once. A document may go on in the next unit."""

    split: str
    parts: list[Part] = dataclasses.field(default_factory=list)
    n_bytes: int = 0  # bytes of the files, for progress
    error: LineartimeError | None = None
    """Why the text after these parts cannot be read. It is raised after any error of theirs, as if
    they had been tokenised before more was read."""

    def __iter__(self) -> Iterator[Part]:
        yield from self.parts
        if self.error is not None:
            raise self.error


@dataclasses.dataclass
class Encoded:
    """A unit that is tokenised."""

    split: str
    n_bytes: int
    ids: np.ndarray
    rows_P5: np.ndarray  # the `ROW` of each part
    n_lost: int = 0  # documents, or parts of one, that the tokenizer does not give back
    n_unknown: int = 0  # how often the tokenizer has no token for what it reads
    paths: set[str] = dataclasses.field(default_factory=set)  # the files of which it has text


def units_of(sources: list[Source], unit_bytes: int, read: Read, tokenizer: Tokenizer | None) -> Iterator[Unit]:
    """Read all text, in order, as units of about so many bytes. Each split has one at least.
    tokenizer: None for one that is to be trained."""
    unit, size = Unit(sources[0].split), 0
    try:
        for source in sources:
            if source.split != unit.split:
                yield unit
                unit, size = Unit(source.split), 0
            n_left = source.n_bytes
            for part in parts_of(source.path, read, tokenizer):
                if size >= unit_bytes:
                    yield unit
                    unit, size = Unit(source.split), 0
                n = len(part.content.encode()) if isinstance(part.content, str) else part.content.nbytes
                unit.parts.append(part)
                size += n + PART_BYTES
                unit.n_bytes += min(n, n_left)
                n_left -= min(n, n_left)
            unit.n_bytes += n_left
    except LineartimeError as e:
        unit.error = e
    yield unit


def parts_of(path: str, read: Read, tokenizer: Tokenizer | None) -> Iterator[Part]:
    """The parts of a file in which a tokenizer takes it; None takes the pieces as they are."""
    if is_token_file(path):
        yield from (Part(path, ids, True) for ids in read_token_file(path))
        return
    before = ""
    for text, last in read(path) if tokenizer is None else tokenizer.parts_of(read(path)):
        yield Part(path, text, last, before)
        before = "" if last else text[-1:]


def row_of(part: Part, text: str, n_ids: int, with_hash: bool) -> tuple[int, int, int, int, bool]:
    """The `ROW` of a part. The hash is summed over pieces: it is the same for all of a document."""
    n_words = len((part.before + text).split()) - len(part.before.split())  # a word of the part before may go on
    hashes = [hashlib.blake2b(piece.encode(), digest_size=8).digest() for piece, _ in pieces_of(text)] * with_hash
    return n_ids, n_words, len(text.encode()), sum(map(int.from_bytes, hashes)) % 2**64, part.last


def documents_of(rows: list[np.ndarray]) -> np.ndarray:
    """The ids, words, bytes and hash of each document, uint64 `[D, 4]`, from the rows of parts."""
    rows_P5 = np.concatenate(rows)
    firsts_D = np.flatnonzero(np.roll(rows_P5[:, 4], 1))  # after the end of a document, as the last part is one
    return np.add.reduceat(rows_P5[:, :4], firsts_D)


def encode_unit(unit: Unit, tokenizer: Tokenizer, with_hashes: bool) -> Encoded:
    """Tokenise a unit. Raises DataError for text that cannot be read or tokenised."""
    end, arrays, rows = np.array([tokenizer.end_of_document], tokenizer.dtype), [np.empty(0, tokenizer.dtype)], []
    encoded = Encoded(unit.split, unit.n_bytes, end, end)
    for part in unit:
        text, ids = _tokenised(part, tokenizer)
        tokenizer.require_ordinary(ids, f"{part.path}: {text[:40]!r}")
        if not tokenizer.is_lossless:
            encoded.n_lost += tokenizer.decode(ids.tolist()) != text
            encoded.n_unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
        encoded.paths.add(part.path)
        arrays += [ids, end] if part.last else [ids]
        rows.append(row_of(part, text, len(ids) + part.last, with_hashes))
    encoded.ids, encoded.rows_P5 = np.concatenate(arrays), np.fromiter(rows, ROW)
    return encoded


def _tokenised(part: Part, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
    """The text of a part and its ids. Ids of a token file are decoded, without special tokens at
    the ends of a document."""
    if isinstance(part.content, str):
        packed = tokenizer.pack(part.content) if part.content else b""
        return part.content, np.frombuffer(packed, tokenizer.dtype)
    ids = part.content
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        raise DataError("a token outside the vocabulary", part.path, "name the tokenizer that made it")
    own = np.flatnonzero(~np.isin(ids, tokenizer.special))
    ids = ids[own[0]:own[-1] + 1] if len(own) else ids[:0]
    return tokenizer.decode(ids.tolist()), ids.astype(tokenizer.dtype)


def cut_document(path: str, share: float, folder: Path, read: Read) -> list[Source]:
    """Copy the only document into two files of a folder, for train and validation, cut before a
    line if one begins soon. Raises DataError for too little text."""
    n = sum(len(text) for text, _ in read(path))
    cut = n - int(n * share)
    if cut == n:
        raise DataError("too little text to hold some out", path, f"held_out = {share}")
    parts = [Source(split, "", str(folder / f"{split}.txt")) for split in ("train", "validation")]
    pieces, n_left, rest = (text for text, _ in read(path)), cut, ""
    # Each with a byte order mark, which is not read: a text may begin with another.
    with (open(parts[0].path, "w", encoding="utf-8-sig", newline="") as train,
          open(parts[1].path, "w", encoding="utf-8-sig", newline="") as validation):
        while n_left:
            text = next(pieces)
            train.write(text[:n_left])
            rest, n_left = text[n_left:], max(n_left - len(text), 0)
        while len(rest) < LINE_SEARCH and (text := next(pieces, "")):
            rest += text
        line = rest[:LINE_SEARCH].find("\n") + 1
        line = line if 2 * (n - cut - line) >= n - cut else 0
        train.write(rest[:line])
        validation.write(rest[line:])
        validation.writelines(pieces)
    return parts
