"""Units of work: a few million bytes of a split, tokenised into files that are joined in order at the end.

A unit has three files: `00012.ids`, its ids, an end-of-document token after each document; `00012.rows`, for each
document its ids, words, bytes and, where some are held out, a hash, as uint64; and `00012.json`, which is written last,
has the hashes of both or what is wrong with the text: what a crash leaves torn is known by its hash, and made again. A
document that goes on in the next unit has a row in both."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lineartime.data.files import hash_of, opened, opened_new, read_all, reading
from lineartime.data.read_text import expansion_of, is_token_file, read_pieces, read_whole
from lineartime.data.token_files import read_token_file
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import Split
from lineartime.errors import DataError

BLOCK_IDS = 1 << 21
"""Ids that are in memory at once when units are joined."""
ROW = np.dtype(("<u8", 4))
"""Of a document, or the part of it in a unit: ids, words, bytes, hash."""
ReadArguments = dict[str, Any]
"""The named arguments of `read_pieces`: field, task, encoding."""
Faults = dict[str, list[Any]]
"""What is wrong with a file, by its path: the arguments of a DataError."""


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
class Encoded:
    """What is known of a unit that is done.

    made_from: the hash of its text, its tokenizer and how it is read; "" if nothing is written. open: its last document
    goes on in the next unit. lost: documents, or parts of one, that the tokenizer does not give back. unknown: how
    often it has no token for what it reads. sources: the path of each file, its number of pieces and, in the unit in
    which it begins, its bytes and SHA-256. files: bytes and SHA-256 of "ids" and "rows"."""

    made_from: str = ""
    ids: int = 0
    rows: int = 0
    open: bool = False
    lost: int = 0
    unknown: int = 0
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    faults: Faults = dataclasses.field(default_factory=dict)


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


def pieces_noting_faults(slices: Iterable[Slice], how: ReadArguments, faults: Faults
                         ) -> Iterator[tuple[str, int, bool]]:
    """The pieces of some slices as `rows_of` takes them. Of a file that cannot be read the fault is noted, and the next
    one is read. Token files have none."""
    for one in slices:
        try:
            for text, last in () if is_token_file(one.path) or one.path in faults else read_slice(one, how):
                yield text, 0, last
        except DataError as e:
            faults[one.path] = [e.what, str(e.where), e.todo]


def faults_of(slices: Iterable[Slice], how: ReadArguments) -> Faults:
    """What is wrong with the files of some slices, which are read to find it."""
    faults = Faults()
    for _ in pieces_noting_faults(slices, how, faults):
        pass
    return faults


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


def encode_unit(name: str, slices: list[Slice], how: ReadArguments, tokenizer: Tokenizer, with_hashes: bool) -> Encoded:
    """Write the ids and rows of a unit; returns its description, which has faults if something is wrong with its
    text."""
    unit, fault = Encoded(), list[Any]()
    try:
        with opened_new(f"{name}.ids") as file:
            rows_N4 = rows_of(_written(file, slices, how, tokenizer, unit), with_hashes)
        with opened_new(f"{name}.rows") as file:
            file.write(rows_N4.tobytes())
    except DataError as e:
        fault = [e.what, str(e.where), e.todo]
    if fault:  # not in the handler, which keeps what was read
        return Encoded(faults=faults_of(slices, how) or {"": fault})
    unit.ids, unit.rows = int(rows_N4[:, 0].sum()), len(rows_N4)
    unit.files = {kind: hash_of(f"{name}.{kind}") for kind in ("ids", "rows")}
    return unit


def _written(file: Any, slices: list[Slice], how: ReadArguments, tokenizer: Tokenizer, unit: Encoded
             ) -> Iterator[tuple[str, int, bool]]:
    """The pieces of some slices, whose ids are written into an open file and counted."""
    end = np.array([tokenizer.end_of_document], tokenizer.dtype)
    for one in slices:
        n_pieces = 0
        for text, ids, last in _tokenised(one, how, tokenizer):
            _check_ids(ids, f"{one.path}: {text[:40]!r}", tokenizer)
            if not tokenizer.is_lossless:
                unit.lost += tokenizer.decode(ids.tolist()) != text
                unit.unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
            n_pieces, unit.open = n_pieces + 1, not last
            file.write((np.append(ids, end) if last else ids).tobytes())
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


def is_finished(name: str, made_from: str) -> bool:
    """Whether the files of a unit are there, made from this and as they were written."""
    with contextlib.suppress(DataError):
        unit = read_encoded(name)
        return unit.made_from == made_from and all(
            hash_of(f"{name}.{kind}") == expected for kind, expected in unit.files.items())
    return False


def read_encoded(name: str) -> Encoded:
    """The description of a unit. Raises DataError if it is missing or damaged."""
    try:
        return Encoded(**json.loads(read_all(f"{name}.json")))
    except (ValueError, TypeError) as e:
        raise DataError("damaged file", f"{name}.json", str(e)) from None


def documents_of(units: list[tuple[str, Encoded]], n_columns: int) -> np.ndarray:
    """The first columns of the `ROW` of each document of some units. Raises DataError for a file that is not as it was
    written."""
    rows_DN = np.zeros((sum(unit.rows for _, unit in units), n_columns), "<u8")
    document = 0
    for name, unit in units:
        rows_DN[document:document + unit.rows] += _rows(name, unit)[:, :n_columns]
        document += unit.rows - unit.open
    return rows_DN[:document]


def chosen_ids(units: list[tuple[str, Encoded]], is_chosen_D: np.ndarray, dtype: str, split: Split
               ) -> Iterator[np.ndarray]:
    """The ids of the chosen documents, in order, of all that lie in some units; their counts are added to `split`.
    Raises DataError for a file that is not as it was written."""
    document, width = 0, np.dtype(dtype).itemsize
    for name, unit in units:
        is_chosen_N = is_chosen_D[document:document + unit.rows]
        document += unit.rows - unit.open
        if not is_chosen_N.any():
            continue
        rows_N4 = _rows(name, unit)
        _, words, n_bytes, _ = rows_N4[is_chosen_N].sum(0).tolist()
        # A document that goes on in the next unit counts there.
        split.documents += int(is_chosen_N.sum()) - bool(unit.open and is_chosen_N[-1])
        split.words, split.bytes = split.words + words, split.bytes + n_bytes
        ends_N = np.concatenate([[0], rows_N4[:, 0].cumsum().astype(np.int64)])
        runs_R2 = np.flatnonzero(np.diff(is_chosen_N, prepend=False, append=False)).reshape(-1, 2)
        _require_as_written(f"{name}.ids", unit.files["ids"])
        with reading(name), opened(f"{name}.ids") as file:
            for begin, stop in ends_N[runs_R2].tolist():
                file.seek(begin * width)
                for at in range(begin, stop, BLOCK_IDS):
                    yield np.frombuffer(file.read(width * (min(at + BLOCK_IDS, stop) - at)), dtype)


def _rows(name: str, unit: Encoded) -> np.ndarray:
    _require_as_written(f"{name}.rows", unit.files["rows"])
    return np.frombuffer(read_all(f"{name}.rows"), "<u8").reshape(-1, 4)


def _require_as_written(path: str, expected: dict[str, Any]) -> None:
    if hash_of(path) != expected:
        raise DataError("damaged file", path, "run the same command again")
