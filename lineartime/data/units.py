"""Units of work: a few million characters of a split, tokenised into files that are joined in order at the end.

A unit has three files: `00012.ids`, its ids, an end-of-document token after each document; `00012.rows`, for each
document its ids, words and bytes as uint64; and `00012.json`, which is written last, says that it is finished, and has
the hashes of both. None is flushed to the disk: what a crash leaves torn is known by its hash, and made again. A
document that goes on in the next unit has a row in both."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineartime.atomic_io import hash_of, is_as_written, read_bytes
from lineartime.data.slices import CheckedFile, Reading, Slice, read_slice
from lineartime.data.splits import SPLITS
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from lineartime.data.tokens import Split
from lineartime.errors import DataError

UNITS, FINISHED = "units", "finished"
"""Folders of `.ids` and `.rows`, and of `.json`."""
BLOCK_IDS = 1 << 21
"""Ids that are in memory at once when units are joined."""


class Unit(NamedTuple):
    """Consecutive slices of a split's files."""

    split: str
    slices: list[Slice]

    @property
    def characters(self) -> int:
        return sum(one.characters for one in self.slices)


@dataclasses.dataclass
class Encoded:
    """What is known of a finished unit. open: its last document goes on in the next one. keeps: whether the tokenizer
    gives the text of its first piece back. unknown: how often it has no token for what it reads."""

    number: int
    ids: int
    rows: int
    words: int
    bytes: int
    open: bool
    keeps: bool
    files: dict[str, dict[str, Any]]
    """Bytes and SHA-256 of "ids" and "rows"."""
    unknown: int = 0


def unit_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:05d}.{kind}"


def units_of(files: Iterable[CheckedFile], unit_characters: int) -> list[Unit]:
    """The units of all text, in the order of the splits. Small files share a unit."""
    units: list[Unit] = []
    for split in SPLITS:
        n_left = 0
        for file in files:
            for one in file.slices if file.split == split and file.documents else ():
                if n_left <= 0:
                    units.append(Unit(split, []))
                    n_left = unit_characters
                units[-1].slices.append(one)
                n_left -= one.characters
    return units


@functools.lru_cache(1)
def _opened(folder: str, sha256: str, name: str) -> tuple[Tokenizer, Callable[[str], bytes]]:
    """The tokenizer of `folder`, with its name in messages, and its `packer`, which a process keeps for its next
    unit."""
    tokenizer = load_tokenizer(Path(folder, TOKENIZER_FILE))
    if tokenizer.sha256 != sha256:
        raise DataError("the tokenizer has changed", Path(folder, TOKENIZER_FILE), "run the same command again")
    tokenizer.name = name
    return tokenizer, tokenizer.packer()


def encode_unit(number: int, slices: list[Slice], reading: Reading, folder: str, sha256: str,
                name: str) -> dict[str, Any]:
    """Write the files of a unit into `folder`, unless an earlier call finished them; returns the fields of `Encoded`.

    sha256, name: of the tokenizer in `folder`. Raises DataError for text that cannot be encoded."""
    description = unit_file(Path(folder, FINISHED), number, "json")
    if (finished := _finished(description, Path(folder, UNITS))) is not None:
        return finished
    tokenizer, pack = _opened(folder, sha256, name)
    end = np.array([tokenizer.end_of_document], tokenizer.dtype).tobytes()
    rows: list[tuple[int, int, int]] = []  # of documents that have ended and are not written yet
    whole = np.zeros(4, np.int64)  # ids, rows, words and bytes of the unit
    ids = words = n_bytes = unknown = 0  # of the document that is being read; unknown of the unit
    keeps: bool | None = None
    paths = {kind: unit_file(Path(folder, UNITS), number, kind) for kind in ("ids", "rows")}
    with paths["ids"].open("wb") as ids_file, paths["rows"].open("wb") as rows_file:
        for text, last, in_word in (piece for one in slices for piece in read_slice(Slice(*one), reading)):
            packed = pack(text)
            found = np.frombuffer(packed, tokenizer.dtype)
            _check_ids(found, text, tokenizer)
            if keeps is None:
                keeps = tokenizer.decode(found.tolist()) == text
            unknown += 0 if tokenizer.unknown is None else int((found == tokenizer.unknown).sum())
            ids += len(found) + last
            words += len(text.split()) - (in_word and not text[0].isspace())
            n_bytes += len(text.encode())
            ids_file.write(packed + end if last else packed)
            if last:
                rows.append((ids, words, n_bytes))
                whole += (ids, 1, words, n_bytes)
                ids = words = n_bytes = 0
            if len(rows) >= 4096:
                rows_file.write(np.array(rows, "<u8").tobytes())
                rows.clear()
        if is_open := ids > 0:  # the document goes on in the next unit
            rows.append((ids, words, n_bytes))
            whole += (ids, 1, words, n_bytes)
        rows_file.write(np.array(rows, "<u8").tobytes())
    n_ids, n_rows, n_words, all_bytes = whole.tolist()
    encoded = Encoded(number, n_ids, n_rows, n_words, all_bytes, is_open, keeps is not False,
                      {kind: hash_of(path) for kind, path in paths.items()}, unknown)
    description.write_text(json.dumps(dataclasses.asdict(encoded)) + "\n")
    return dataclasses.asdict(encoded)


def _finished(description: Path, folder: Path) -> dict[str, Any] | None:
    """The unit that an earlier call finished, if its files are as it wrote them."""
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        encoded = Encoded(**json.loads(read_bytes(description)))
        if all(is_as_written(unit_file(folder, encoded.number, kind), file) for kind, file in encoded.files.items()):
            return dataclasses.asdict(encoded)
    return None


def _check_ids(ids: np.ndarray, text: str, tokenizer: Tokenizer) -> None:
    if (ids == tokenizer.end_of_document).any():
        raise DataError("the tokenizer reads its end-of-document token out of text", repr(text[:40]))
    if tokenizer.mask is not None and ((ids == tokenizer.mask) | (ids == tokenizer.separator)).any():
        raise DataError("the tokenizer reads [MASK] or [SEP] out of text", repr(text[:40]))


def joined_ids(units: Iterable[tuple[Encoded, Path]], spans: list[tuple[int, int]], dtype: str,
               split: Split) -> Iterator[np.ndarray]:
    """The ids of the documents in some spans, in order, of all that lie in these units and their folders; the counts of
    what is in the spans are added to `split`.

    Raises DataError for a file of a unit that is not as it was written."""
    document, at = 0, 0
    for unit, folder in units:
        ids_N, rows_N3 = _read_unit(unit, folder, dtype)
        ends_N = np.concatenate([[0], np.cumsum(rows_N3[:, 0], dtype=np.int64)])
        while at < len(spans) and spans[at][1] <= document:
            at += 1
        here = at
        while here < len(spans) and spans[here][0] < document + unit.rows:
            first, stop = (min(max(each - document, 0), unit.rows) for each in spans[here])
            # A document that goes on in the next unit counts there.
            split.documents += stop - first - (unit.open and stop == unit.rows)
            split.words += int(rows_N3[first:stop, 1].sum())
            split.bytes += int(rows_N3[first:stop, 2].sum())
            for begin in range(ends_N[first], ends_N[stop], BLOCK_IDS):
                yield ids_N[begin:min(begin + BLOCK_IDS, ends_N[stop])]
            here += 1
        document += unit.rows - unit.open


def _read_unit(unit: Encoded, folder: Path, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids and the rows of a unit, which are compared with their hashes and mapped into memory."""
    made = []
    for kind, kind_dtype, n in (("ids", dtype, unit.ids), ("rows", "<u8", 3 * unit.rows)):
        path = unit_file(folder, unit.number, kind)
        same_size = unit.files[kind]["bytes"] == n * np.dtype(kind_dtype).itemsize
        if not same_size or not is_as_written(path, unit.files[kind]):
            raise DataError("damaged or missing file", path, "delete its folder and prepare it again")
        made.append(np.memmap(path, kind_dtype, "r") if n else np.empty(0, kind_dtype))
    return made[0], made[1].reshape(-1, 3)
