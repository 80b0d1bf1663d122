"""Units of work: a few million bytes of a split, tokenised into files that are joined in order at the end.

A unit has three files: `00012.ids`, its ids, an end-of-document token after each document; `00012.rows`, for each
document its ids, words and bytes as uint64; and `00012.json`, which is written last, says that it is finished, and has
the hashes of both: what a crash leaves torn is known by its hash, and made again. A document that goes on in the next
unit has a row in both."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lineartime.data.files import hash_of, joined, opened, opened_new, read_all, reading, write_text
from lineartime.data.read_text import expansion_of, is_one_document, is_token_file, ranges_of, read_pieces, read_whole
from lineartime.data.token_files import read_token_file
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import Split
from lineartime.errors import DataError

UNITS = "units"
"""The folder of a job's units."""
BLOCK_IDS = 1 << 21
"""Ids that are in memory at once when units are joined."""
ReadArguments = dict[str, Any]
"""The named arguments of `read_pieces`: field, max_line_bytes, task, encoding."""


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

    @property
    def bytes(self) -> int:
        """About how many of text it has."""
        if self.characters is not None:
            return self.characters
        return (self.stop - self.start) * expansion_of(self.path) - self.skip


class CheckedFile(NamedTuple):
    """A file that was read to its end."""

    path: str
    split: str
    bytes: int
    documents: int
    """Those that are not blank."""
    blank: int
    characters: list[int]
    """Of each range of a file that is one document; else of the whole file."""


@dataclasses.dataclass
class Encoded:
    """What is known of a finished unit. open: its last document goes on in the next one. lost: documents, or parts of
    one, that the tokenizer does not give back. unknown: how often it has no token for what it reads."""

    ids: int
    rows: int
    words: int
    bytes: int
    open: bool
    lost: int
    unknown: int
    files: dict[str, dict[str, Any]]
    """Bytes and SHA-256 of "ids" and "rows"."""


class DocumentCount:
    """Counts documents as their pieces come. with_hashes: also makes a hash of each that is not blank."""

    def __init__(self, with_hashes: bool) -> None:
        self.characters = self.documents = self.blank = 0
        self.hashes: list[bytes] | None = [] if with_hashes else None
        self._digest, self._is_blank = hashlib.blake2b(digest_size=8), True

    def add(self, content: bytes, n_characters: int, is_blank: bool, last: bool) -> None:
        """Count a piece, of which `last` says whether it ends its document."""
        if self.hashes is not None:
            self._digest.update(content)
        self.characters += n_characters
        self._is_blank = self._is_blank and is_blank
        if last:
            self.blank += self._is_blank
            self.documents += not self._is_blank
            if self.hashes is not None and not self._is_blank:
                self.hashes.append(self._digest.digest())
            self._digest, self._is_blank = hashlib.blake2b(digest_size=8), True


def check_file(path: str, size: int, how: ReadArguments, range_bytes: int, hashes: str | None = None) -> dict[str, Any]:
    """Read a file to its end: its size and SHA-256, and the last fields of `CheckedFile`. Raises DataError.

    hashes: a new file for a hash of each document that is not blank, by which copies are found."""
    count = DocumentCount(hashes is not None)
    if is_token_file(path):
        for ids in read_token_file(path):
            count.add(ids.tobytes(), len(ids), False, True)
    apart = is_one_document(path)
    ranges = ranges_of(path, size, range_bytes, how["encoding"]) if apart else [(0, size)]
    characters = []
    for start, stop in [] if is_token_file(path) else ranges:
        before = count.characters
        for text, last in read_pieces(path, **how, start=start, stop=stop):
            count.add(text.encode(), len(text), not text or text.isspace(), last)
        characters.append(count.characters - before)
    if hashes is not None:
        with opened_new(hashes) as file:
            file.write(b"".join(count.hashes or ()))
    return hash_of(path) | {"documents": count.documents, "blank": count.blank,
                            "characters": characters or [count.characters]}


def slices_of(file: CheckedFile, range_bytes: int, encoding: str, whole: bool) -> list[Slice]:
    """The slices of a file. whole: a document may not be read apart."""
    apart = not (whole and is_one_document(file.path))
    ranges = ranges_of(file.path, file.bytes, range_bytes if apart else max(file.bytes, 1), encoding)
    return [Slice(file.path, start, stop) for start, stop in ranges]


def read_slice(one: Slice, how: ReadArguments) -> Iterator[tuple[str, bool]]:
    """The pieces of a slice: text, and whether it ends a document. Blank documents of a file of rows have none."""
    skip, n_left = one.skip, one.characters
    for text, last in read_pieces(one.path, start=one.start, stop=one.stop, **how):
        own = text[skip:] if n_left is None else text[skip:skip + n_left]
        skip -= min(skip, len(text))
        n_left = None if n_left is None else n_left - len(own)
        if own:
            yield own, last or (one.ends and n_left == 0)
        if n_left == 0:
            return


def tokenised(slices: list[Slice], how: ReadArguments, tokenizer: Tokenizer, pack: Callable[[str], bytes]
              ) -> Iterator[tuple[str, np.ndarray, bool]]:
    """The pieces of some slices with their ids, and whether a document ends. A token file has ids, which are decoded
    for the counts of words and bytes; special tokens at the ends of its documents are left out."""
    for is_tokens, group in itertools.groupby(slices, lambda one: is_token_file(one.path)):
        if not is_tokens:
            pieces = (piece for one in group for piece in read_slice(one, how))
            for text, last in pieces if tokenizer.reads_pieces else read_whole(pieces):
                yield text, np.frombuffer(pack(text), tokenizer.dtype), last
            continue
        for one in group:
            for ids in read_token_file(one.path, one.start, one.stop):
                if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                    raise DataError("a token outside the vocabulary", one.path, "name the tokenizer that made it")
                while len(ids) and ids[-1] in tokenizer.special:
                    ids = ids[:-1]
                yield tokenizer.decode(ids.tolist()), ids.astype(tokenizer.dtype), True


def encode_unit(folder: str, number: int, slices: list[Slice], how: ReadArguments, tokenizer: Tokenizer,
                pack: Callable[[str], bytes]) -> None:
    """Write the files of a unit into `folder`, unless they are there as an earlier call wrote them.

    pack: the tokenizer's `packer`. Raises DataError for text that cannot be encoded."""
    name = joined(folder, f"{number:05d}")
    if is_finished(name):
        return
    end = np.array([tokenizer.end_of_document], tokenizer.dtype).tobytes()
    rows: list[tuple[int, int, int]] = []  # of documents that have ended and are not written yet
    whole = np.zeros(4, np.int64)  # ids, rows, words and bytes of the unit
    ids = words = n_bytes = lost = unknown = 0  # of the document that is being read; the last two of the unit
    last, in_word = True, False
    with opened_new(f"{name}.ids") as ids_file, opened_new(f"{name}.rows") as rows_file:
        for text, found, last in tokenised(slices, how, tokenizer, pack):
            _check_ids(found, text, tokenizer)
            if not tokenizer.is_lossless:
                lost += tokenizer.decode(found.tolist()) != text
                unknown += 0 if tokenizer.unknown is None else int((found == tokenizer.unknown).sum())
            ids += len(found) + last
            words += len(text.split()) - (in_word and not text[0].isspace())
            n_bytes += len(text.encode())
            in_word = not last and not text[-1].isspace()
            ids_file.write(found.tobytes() + end if last else found.tobytes())
            if last:
                rows.append((ids, words, n_bytes))
                whole += (ids, 1, words, n_bytes)
                ids = words = n_bytes = 0
            if len(rows) >= 4096:
                rows_file.write(np.array(rows, "<u8").tobytes())
                rows.clear()
        if not last:  # the document goes on in the next unit
            rows.append((ids, words, n_bytes))
            whole += (ids, 1, words, n_bytes)
        rows_file.write(np.array(rows, "<u8").tobytes())
    n_ids, n_rows, n_words, all_bytes = whole.tolist()
    encoded = Encoded(n_ids, n_rows, n_words, all_bytes, not last, lost, unknown,
                      {kind: hash_of(f"{name}.{kind}") for kind in ("ids", "rows")})
    write_text(f"{name}.json", json.dumps(dataclasses.asdict(encoded)) + "\n")


def _check_ids(ids: np.ndarray, text: str, tokenizer: Tokenizer) -> None:
    if (ids == tokenizer.end_of_document).any():
        raise DataError("the tokenizer reads its end-of-document token out of text", repr(text[:40]))
    if tokenizer.mask is not None and ((ids == tokenizer.mask) | (ids == tokenizer.separator)).any():
        raise DataError("the tokenizer reads [MASK] or [SEP] out of text", repr(text[:40]))


def is_finished(name: str) -> bool:
    """Whether the files of a unit are there as they were written."""
    with contextlib.suppress(DataError):
        return all(hash_of(f"{name}.{kind}") == expected for kind, expected in read_encoded(name).files.items())
    return False


def read_encoded(name: str) -> Encoded:
    """The description of a finished unit. Raises DataError if it is missing or damaged."""
    try:
        return Encoded(**json.loads(read_all(f"{name}.json")))
    except (ValueError, TypeError) as e:
        raise DataError("damaged file", f"{name}.json", str(e)) from None


def joined_ids(units: Iterable[tuple[str, Encoded]], spans: list[tuple[int, int]], dtype: str,
               split: Split) -> Iterator[np.ndarray]:
    """The ids of the documents in some spans, in order, of all that lie in these units; the counts of what is in the
    spans are added to `split`. Raises DataError for a file of a unit that is not as it was written."""
    document, at, width = 0, 0, np.dtype(dtype).itemsize
    for name, unit in units:
        while at < len(spans) and spans[at][1] <= document:
            at += 1
        here = at
        if here < len(spans) and spans[here][0] < document + unit.rows:
            with _opened_unit(name, unit) as (ids, rows_N3):
                ends_N = np.concatenate([[0], np.cumsum(rows_N3[:, 0], dtype=np.int64)])
                while here < len(spans) and spans[here][0] < document + unit.rows:
                    first, stop = (min(max(each - document, 0), unit.rows) for each in spans[here])
                    # A document that goes on in the next unit counts there.
                    split.documents += stop - first - (unit.open and stop == unit.rows)
                    split.words += int(rows_N3[first:stop, 1].sum())
                    split.bytes += int(rows_N3[first:stop, 2].sum())
                    ids.seek(ends_N[first] * width)
                    for begin in range(ends_N[first], ends_N[stop], BLOCK_IDS):
                        yield np.frombuffer(ids.read(width * (min(begin + BLOCK_IDS, ends_N[stop]) - begin)), dtype)
                    here += 1
        document += unit.rows - unit.open


@contextlib.contextmanager
def _opened_unit(name: str, unit: Encoded) -> Iterator[tuple[Any, np.ndarray]]:
    """The open ids of a unit and its rows, after both are compared with their hashes."""
    for kind, expected in unit.files.items():
        path = f"{name}.{kind}"
        if hash_of(path) != expected:
            raise DataError("damaged file", path, "run the same command again")
    with reading(name), opened(f"{name}.ids") as ids, opened(f"{name}.rows") as rows:
        yield ids, np.frombuffer(rows.read(), "<u8").reshape(-1, 3)
