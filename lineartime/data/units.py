"""Units of work: a few million characters of a split, tokenised into files that are joined in order at the end.

A unit has three files: `00012.ids`, its ids, an end-of-document token after each document; `00012.rows`, for each
document its ids, words and bytes as uint64; and `00012.json`, which is written last and says that it is finished. A
document that goes on in the next unit has a row in both."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineartime.atomic_io import hashed_file, is_as_written, open_regular, read_bytes, write_atomically
from lineartime.data.read_text import Place
from lineartime.data.splits import SPLITS, CheckedFile, Part, Reader, Slice
from lineartime.data.tokenizer import Tokenizer, load_tokenizer
from lineartime.data.tokens import Split
from lineartime.errors import DataError

UNITS, FINISHED = "units", "finished"
"""Folders of `.ids` and `.rows`, and of `.json`."""
BLOCK_BYTES = 1 << 22
"""Bytes of a unit's file that are in memory at once."""
ROW_BYTES = 24


@dataclasses.dataclass
class Unit:
    """Consecutive slices of a split's files; or of a split that is cut inside its only document, the characters [first,
    stop) of a slice that begins at character `begin` of it."""

    number: int
    split: str
    characters: int
    slices: list[tuple[str, Slice]]
    """Path and place of each slice."""
    begin: int = 0
    first: int | None = None
    stop: int = 0


@dataclasses.dataclass
class Encoded:
    """What is known of a finished unit. open: its last document goes on in the next one. keeps: whether the tokenizer
    gives the text of its first piece back."""

    number: int
    ids: int
    rows: int
    words: int
    bytes: int
    open: bool
    keeps: bool
    files: dict[str, dict[str, Any]]
    """Bytes and SHA-256 of "ids" and "rows"."""


def unit_file(folder: Path, number: int, kind: str) -> Path:
    return folder / f"{number:05d}.{kind}"


def units_of(files: Iterable[CheckedFile], parts: dict[str, Part], unit_characters: int) -> list[Unit]:
    """The units of all text, in the order of the splits. Small files share a unit."""
    units: list[Unit] = []
    for name, part in parts.items():
        if part.unit == "characters":
            begin = 0
            ((part_first, part_stop),) = part.spans
            for one in part.files[0].slices:
                stop = begin + one.characters
                n_kept = min(stop, part_stop) - max(begin, part_first)
                if n_kept > 0:
                    path = str(part.files[0].source.path)
                    units.append(Unit(0, name, n_kept, [(path, one)], begin, part_first, part_stop))
                begin = stop
    cut_inside = any(part.unit == "characters" for part in parts.values())
    for split in SPLITS:
        if split == "train" and cut_inside:
            continue
        room = 0
        for file in files:
            for one in file.slices if file.source.split == split and file.documents else ():
                if room <= 0:
                    units.append(Unit(0, split, 0, []))
                    room = unit_characters
                units[-1].slices.append((str(file.source.path), one))
                units[-1].characters += one.characters
                room -= one.characters
    return [dataclasses.replace(unit, number=number) for number, unit in enumerate(units)]


class MadeTokenizer(NamedTuple):
    """A tokenizer for other processes: its file and SHA-256, its name in messages, and the type of its ids."""

    path: Path
    sha256: str
    name: str
    dtype: str


@functools.lru_cache(1)
def _opened(made: MadeTokenizer) -> tuple[Tokenizer, Callable[[str], bytes]]:
    """The tokenizer, and its `packer`, which a process keeps for its next unit."""
    tokenizer = load_tokenizer(made.path)
    if tokenizer.sha256 != made.sha256:
        raise DataError("the tokenizer has changed", made.path, "run the same command again")
    tokenizer.name = made.name
    return tokenizer, tokenizer.packer(made.dtype)


def _pieces(unit: Unit, reader: Reader) -> Iterator[tuple[str, bool, bool]]:
    """Text, whether it ends a document, and whether it goes on with a word."""
    for path, (at, line, n_pieces, _, in_word) in unit.slices:
        position = unit.begin
        in_word = in_word and (unit.first is None or position > unit.first)
        for text, last, _ in itertools.islice(reader(Path(path), start=Place(at, line)), n_pieces):
            if unit.first is not None:
                whole, text = len(text), text[max(unit.first - position, 0):max(unit.stop - position, 0)]
                position += whole
                last = position >= unit.stop
            if text:
                yield text, last, in_word
                in_word = not last and not text[-1].isspace()


def encode_unit(unit: Unit, reader: Reader, made: MadeTokenizer, folder: Path) -> Encoded:
    """Write the files of a unit into `folder`, unless an earlier call finished them.

    Raises DataError for text that cannot be encoded."""
    description = folder / FINISHED / f"{unit.number:05d}.json"
    if (finished := _finished(description, folder / UNITS)) is not None:
        return finished
    tokenizer, pack = _opened(made)
    ids_path, rows_path = (unit_file(folder / UNITS, unit.number, kind) for kind in ("ids", "rows"))
    for path in (ids_path, rows_path):  # of a process that was killed
        path.unlink(missing_ok=True)
    width = np.dtype(made.dtype).itemsize
    end = np.array([tokenizer.end_of_document], made.dtype).tobytes()
    files: dict[str, dict[str, Any]] = {}
    rows: list[tuple[int, int, int]] = []  # of documents that have ended and are not written yet
    whole = np.zeros(4, np.int64)  # ids, rows, words and bytes of the unit
    ids = words = n_bytes = 0  # of the document that is being read
    keeps: bool | None = None
    with hashed_file(ids_path, files) as write_ids, hashed_file(rows_path, files) as write_rows:
        for text, last, in_word in _pieces(unit, reader):
            packed = pack(text)
            _check_ids(packed, text, tokenizer, made.dtype)
            if keeps is None:
                keeps = tokenizer.decode(np.frombuffer(packed, made.dtype).tolist()) == text
            packed += end if last else b""
            write_ids(packed)
            ids += len(packed) // width
            words += len(text.split()) - (in_word and not text[0].isspace())
            n_bytes += len(text.encode())
            if last:
                rows.append((ids, words, n_bytes))
                whole += (ids, 1, words, n_bytes)
                ids = words = n_bytes = 0
            if len(rows) >= 4096:
                write_rows(np.array(rows, "<u8").tobytes())
                rows.clear()
        if is_open := ids > 0:  # the document goes on in the next unit
            rows.append((ids, words, n_bytes))
            whole += (ids, 1, words, n_bytes)
        write_rows(np.array(rows, "<u8").tobytes())
    n_ids, n_rows, n_words, all_bytes = whole.tolist()
    encoded = Encoded(unit.number, n_ids, n_rows, n_words, all_bytes, is_open, keeps is not False,
                      {"ids": files[ids_path.name], "rows": files[rows_path.name]})
    write_atomically(description, json.dumps(dataclasses.asdict(encoded)) + "\n")
    return encoded


def _finished(description: Path, folder: Path) -> Encoded | None:
    """The unit that an earlier call finished, if its files have their sizes; their hashes are compared when they are
    joined."""
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        encoded = Encoded(**json.loads(read_bytes(description)))
        if all(is_as_written(unit_file(folder, encoded.number, kind), file, by_hash=False)
               for kind, file in encoded.files.items()):
            return encoded
    return None


def _check_ids(packed: bytes, text: str, tokenizer: Tokenizer, dtype: str) -> None:
    ids = np.frombuffer(packed, dtype)
    if (ids == tokenizer.end_of_document).any():
        raise DataError("the tokenizer reads its end-of-document token out of text", repr(text[:40]))
    if tokenizer.mask is not None and ((ids == tokenizer.mask) | (ids == tokenizer.separator)).any():
        raise DataError("the tokenizer reads [MASK] or [SEP] out of text", repr(text[:40]))


def joined_ids(units: Iterable[tuple[Encoded, Path]], part: Part, dtype: str, split: Split) -> Iterator[np.ndarray]:
    """The ids of a part, whose documents lie in these units and their folders; its counts are added to `split`.

    Raises DataError for a file of a unit that is not as it was written."""
    document, spans = 0, part.spans if part.unit == "documents" else [(0, 1)]
    at = 0
    for unit, folder in units:
        rows_path = unit_file(folder, unit.number, "rows")
        if not is_as_written(rows_path, unit.files["rows"]) or unit.files["rows"]["bytes"] != unit.rows * ROW_BYTES:
            raise _damaged(rows_path)
        while at < len(spans) and spans[at][1] <= document:
            at += 1
        here = list(itertools.takewhile(lambda span, end=document + unit.rows: span[0] < end,  # type: ignore[misc]
                                        itertools.islice(spans, at, None)))
        if unit.rows and here:
            rows_N3 = np.memmap(rows_path, "<u8", "r").reshape(-1, 3)
            ends_N = np.concatenate([[0], np.cumsum(rows_N3[:, 0], dtype=np.int64)])
            wanted = []
            for first, stop in here:
                a, b = max(first - document, 0), min(stop - document, unit.rows)
                split.documents += b - a - (unit.open and b == unit.rows)
                split.words += int(rows_N3[a:b, 1].sum())
                split.bytes += int(rows_N3[a:b, 2].sum())
                wanted.append((int(ends_N[a]), int(ends_N[b])))
            yield from _ids_of_file(unit_file(folder, unit.number, "ids"), unit, dtype, wanted)
        document += unit.rows - unit.open


def _ids_of_file(path: Path, unit: Encoded, dtype: str, wanted: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """The ids of rising spans [start, stop) of a unit's file, all of which is compared with its hash."""
    digest, at, next_span = hashlib.sha256(), 0, 0
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size != unit.files["ids"]["bytes"]:
                raise _damaged(path)
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                if len(block) % np.dtype(dtype).itemsize:
                    raise _damaged(path)
                ids = np.frombuffer(block, dtype)
                while next_span < len(wanted) and wanted[next_span][0] < at + len(ids):
                    start, stop = wanted[next_span]
                    if len(part := ids[max(start - at, 0):max(stop - at, 0)]):
                        yield part
                    if stop > at + len(ids):
                        break
                    next_span += 1
                at += len(ids)
    except OSError:
        raise _damaged(path) from None
    if digest.hexdigest() != unit.files["ids"]["sha256"] or at != unit.ids:
        raise _damaged(path)


def _damaged(path: Path) -> DataError:
    return DataError("damaged or missing file", path, "delete its folder and prepare it again")
