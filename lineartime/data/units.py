"""Units of work: a few million bytes of a split, tokenised by one process."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lineartime.base.errors import DataError
from lineartime.data.read_text import ReadSlice, is_token_file
from lineartime.data.sources import Source
from lineartime.data.token_files import read_token_file
from lineartime.data.tokenizer import Tokenizer

ROW = np.dtype(("<u8", 4))
"""A document, or its part in a unit: ids, words, bytes, hash."""
LINE_SEARCH = 1 << 16
"""A single document is cut at a line that begins within this many characters."""
EXPANSION = 4
"""How many times larger than its file a packed text, or one in parquet, is taken to be."""


class Slice(NamedTuple):
    """A range of a file's bytes, see `read_pieces`, with about `n_bytes` of text."""

    path: str
    start: int
    stop: int | None
    n_bytes: int


class Unit(NamedTuple):
    """What one process tokenises at once. Small files share a unit."""

    split: str
    slices: list[Slice]

    @property
    def n_bytes(self) -> int:
        return sum(one.n_bytes for one in self.slices)


@dataclasses.dataclass
class Encoded:
    """A unit that is tokenised."""

    ids: np.ndarray
    rows_N4: np.ndarray
    is_open: bool = False
    """Its last document goes on in the next unit, and has a row in both."""
    n_lost: int = 0
    """Documents, or parts of one, that the tokenizer does not give back."""
    n_unknown: int = 0
    """How often the tokenizer has no token for what it reads."""
    paths: set[str] = dataclasses.field(default_factory=set)
    """The files of which it has text."""


def units_of(sources: Iterable[Source], unit_bytes: int, tokenizer: Tokenizer | None) -> list[Unit]:
    """The units of all text. A document is in one slice if the tokenizer has to see it whole.
    tokenizer: None for one that is to be trained."""
    units: list[Unit] = []
    n_left = 0
    for source in sources:
        is_whole = source.kind == ".txt" and tokenizer is not None and not tokenizer.reads_pieces
        for one in slices_of(source, None if is_whole else unit_bytes):
            if n_left <= 0 or units[-1].split != source.split:
                units.append(Unit(source.split, []))
                n_left = unit_bytes
            units[-1].slices.append(one)
            n_left -= one.n_bytes
    return units


def slices_of(source: Source, slice_bytes: int | None) -> list[Slice]:
    """The slices of a file, each with so many bytes of text; one slice for None, and for a file
    that cannot be read apart. They depend on nothing else. A document is read to its end, however
    far the file has grown by then: its last slice has no end."""
    size, ending = source.n_bytes, source.ending  # a token file has no ending, a packed file has two
    expansion = EXPANSION if ending == ".parquet" or ending.count(".") == 2 else 1
    if not size or slice_bytes is None or ending not in ("", ".txt", ".md", ".jsonl", ".parquet"):
        return [Slice(source.path, 0, None, size * expansion)]
    ends = [*range(0, size, max(slice_bytes // expansion, 1)), size]
    slices = [Slice(source.path, start, stop, (stop - start) * expansion) for start, stop in itertools.pairwise(ends)]
    return [*slices[:-1], slices[-1]._replace(stop=None)] if source.kind == ".txt" else slices


def rows_of(pieces: Iterable[tuple[str, int, bool]], with_hashes: bool) -> np.ndarray:
    """The `ROW` of each document. pieces: text, number of ids, and whether its document ends."""
    def rows() -> Iterator[tuple[int, int, int, int]]:
        ids = words = n_bytes = 0
        last, in_word, digest = True, False, hashlib.blake2b(digest_size=8)
        for text, n_ids, last in pieces:
            content = text.encode()
            ids, n_bytes = ids + n_ids, n_bytes + len(content)
            words += len(text.split()) - (in_word and text[:1].strip() != "")
            in_word = text[-1:].strip() != ""
            digest.update(content if with_hashes else b"")
            if last:
                yield ids, words, n_bytes, int.from_bytes(digest.digest())
                ids, words, n_bytes, in_word, digest = 0, 0, 0, False, hashlib.blake2b(digest_size=8)
        if not last:  # it goes on in the next unit
            yield ids, words, n_bytes, int.from_bytes(digest.digest())

    return np.fromiter(rows(), ROW)


def documents_of(units: list[Encoded]) -> np.ndarray:
    """The `ROW` of each document of some units."""
    rows_D4 = np.zeros((sum(len(unit.rows_N4) for unit in units), 4), "<u8")
    document = 0
    for unit in units:
        rows_D4[document:document + len(unit.rows_N4)] += unit.rows_N4
        document += len(unit.rows_N4) - unit.is_open
    return rows_D4[:document]


def encode_unit(unit: Unit, read: ReadSlice, tokenizer: Tokenizer, with_hashes: bool) -> Encoded:
    """Tokenise a unit. Raises DataError for text that cannot be read or tokenised."""
    encoded, parts = Encoded(np.empty(0), np.empty(0)), [np.empty(0, tokenizer.dtype)]
    end = np.array([tokenizer.end_of_document], tokenizer.dtype)

    def pieces() -> Iterator[tuple[str, int, bool]]:  # whose ids are kept in `parts`
        for one in unit.slices:
            for text, ids, last in _tokenised(one, read, tokenizer):
                tokenizer.require_ordinary(ids, f"{one.path}: {text[:40]!r}")
                if not tokenizer.is_lossless:
                    encoded.n_lost += tokenizer.decode(ids.tolist()) != text
                    encoded.n_unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
                encoded.paths.add(one.path)
                encoded.is_open = not last
                parts.extend([ids, end] if last else [ids])
                yield text, len(ids) + last, last

    encoded.rows_N4 = rows_of(pieces(), with_hashes)
    encoded.ids = np.concatenate(parts)
    return encoded


def _tokenised(one: Slice, read: ReadSlice, tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray, bool]]:
    """The parts of a slice with their ids, and whether a document ends. Ids of a token file are
    decoded, without special tokens at the ends of a document."""
    if not is_token_file(one.path):
        for text, last in tokenizer.parts_of(read(one.path, start=one.start, stop=one.stop)):
            yield text, np.frombuffer(tokenizer.pack(text) if text else b"", tokenizer.dtype), last
        return
    for ids in read_token_file(one.path, one.start, one.stop):
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise DataError("a token outside the vocabulary", one.path, "name the tokenizer that made it")
        own = np.flatnonzero(~np.isin(ids, tokenizer.special))
        ids = ids[own[0]:own[-1] + 1] if len(own) else ids[:0]
        yield tokenizer.decode(ids.tolist()), ids.astype(tokenizer.dtype), True


def cut_document(path: str, share: float, folder: Path, read: ReadSlice) -> list[Source]:
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
