"""Units of work: a few million bytes of a split, tokenised by one process. A document that goes on in the next unit
has a row in both."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lineartime.base.errors import DataError
from lineartime.base.stores import hash_of
from lineartime.data.read_text import expansion_of, is_token_file, read_pieces, read_whole
from lineartime.data.token_files import read_token_file
from lineartime.data.tokenizer import Tokenizer

ROW = np.dtype(("<u8", 4))
"""Of a document, or the part of it in a unit: ids, words, bytes, hash."""
ReadArguments = dict[str, Any]
"""The named arguments of `read_pieces`: field, task, encoding."""


class Slice(NamedTuple):
    """A range of a file's bytes, see `ranges_of`, or some of the characters in it."""

    path: str
    start: int
    stop: int
    skip: int = 0
    """Characters that are left out at its beginning."""
    characters: int | None = None
    """Characters that are read after these; None: all."""
    ends: bool = False
    """Whether its document is cut, and ends with it."""
    to_end: bool = False
    """Whether it has the end of its file's document, which is read however far the file has grown by then."""

    @property
    def bytes(self) -> int:
        """About how many bytes of text it has."""
        if self.characters is not None:
            return self.characters
        return (self.stop - self.start) * expansion_of(self.path) - self.skip


@dataclasses.dataclass
class Unit:
    """A unit that is tokenised.

    open: its last document goes on in the next unit. lost: documents, or parts of one, that the tokenizer does not give
    back. unknown: how often it has no token for what it reads. sources: the path of each file, its number of pieces
    and, in the unit in which it begins, its bytes and SHA-256."""

    ids: np.ndarray
    rows_N4: np.ndarray
    open: bool = False
    lost: int = 0
    unknown: int = 0
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def read_slice(one: Slice, how: ReadArguments) -> Iterator[tuple[str, bool]]:
    """The pieces of a slice: text, and whether it ends a document. A blank document is one empty piece."""
    skip, n_left = one.skip, one.characters
    for text, last in read_pieces(one.path, start=one.start, stop=None if one.to_end else one.stop, **how):
        own = text[skip:] if n_left is None else text[skip:skip + n_left]
        skip -= min(skip, len(text))
        n_left = None if n_left is None else n_left - len(own)
        if own or last:
            yield own, last or (one.ends and n_left == 0)
        if n_left == 0:
            return


def rows_of(pieces: Iterable[tuple[str, int, bool]], with_hashes: bool) -> np.ndarray:
    """The `ROW` of each document of some pieces: text, the number of its ids, and whether it ends a document."""

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


def encode_unit(slices: list[Slice], how: ReadArguments, tokenizer: Tokenizer, with_hashes: bool) -> Unit:
    """Tokenise some slices. Raises DataError for text that cannot be read or tokenised."""
    unit, parts = Unit(np.empty(0), np.empty(0)), list[np.ndarray]()
    unit.rows_N4 = rows_of(_written(parts, slices, how, tokenizer, unit), with_hashes)
    unit.ids = np.concatenate([np.empty(0, tokenizer.dtype), *parts])
    return unit


def _written(parts: list[np.ndarray], slices: list[Slice], how: ReadArguments, tokenizer: Tokenizer, unit: Unit
             ) -> Iterator[tuple[str, int, bool]]:
    """The pieces of some slices, whose ids are collected and counted."""
    end = np.array([tokenizer.end_of_document], tokenizer.dtype)
    for one in slices:
        n_pieces = 0
        for text, ids, last in _tokenised(one, how, tokenizer):
            _check_ids(ids, f"{one.path}: {text[:40]!r}", tokenizer)
            if not tokenizer.is_lossless:
                unit.lost += tokenizer.decode(ids.tolist()) != text
                unit.unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
            n_pieces, unit.open = n_pieces + 1, not last
            parts += [ids, end] if last else [ids]
            yield text, len(ids) + last, last
        begins = one.start == one.skip == 0
        unit.sources.append({"path": one.path, "pieces": n_pieces} | (hash_of(one.path) if begins else {}))


def _tokenised(one: Slice, how: ReadArguments, tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray, bool]]:
    """The pieces of a slice with their ids, and whether a document ends. A token file has ids, which are decoded for
    the counts of words and bytes; special tokens at the ends of its documents are left out."""
    if not is_token_file(one.path):
        pieces = read_slice(one, how)
        for text, last in pieces if tokenizer.reads_pieces else read_whole(pieces):
            yield text, np.frombuffer(tokenizer.pack(text) if text else b"", tokenizer.dtype), last
        return
    for ids in read_token_file(one.path, one.start, one.stop):
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise DataError("a token outside the vocabulary", one.path, "name the tokenizer that made it")
        own = np.flatnonzero(~np.isin(ids, tokenizer.special))
        ids = ids[own[0]:own[-1] + 1] if len(own) else ids[:0]
        yield tokenizer.decode(ids.tolist()), ids.astype(tokenizer.dtype), True


def _check_ids(ids: np.ndarray, where: str, tokenizer: Tokenizer) -> None:
    if (ids == tokenizer.end_of_document).any():
        raise DataError("the tokenizer reads its end-of-document token out of text", where)
    if tokenizer.mask is not None and ((ids == tokenizer.mask) | (ids == tokenizer.separator)).any():
        raise DataError("the tokenizer reads [MASK] or [SEP] out of text", where)
