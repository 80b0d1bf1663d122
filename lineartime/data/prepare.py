"""Tokenise text once into shards, in several processes. `tokens` describes the folder and reads it back."""

import contextlib
import dataclasses
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.base.errors import DataError, ResourceError, UsageError
from lineartime.base.files import new_folder, system_errors
from lineartime.base.settings import require
from lineartime.base.stores import Name, exists, hash_of, hashed_file, is_address, is_folder, joined, size_of, uploaded
from lineartime.data.auto_tokenizer import auto_tokenizer, is_saved_elsewhere
from lineartime.data.held_out import cut_document, held_out_documents
from lineartime.data.prepare_config import DEFAULT_VOCAB_SIZE, SAMPLE, PrepareSettings
from lineartime.data.read_text import is_one_document, is_token_file, ranges_of
from lineartime.data.sources import SPLITS, Source, find_sources
from lineartime.data.streams import save_streams
from lineartime.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    require_vocab_size,
    train_tokenizer,
)
from lineartime.data.tokens import DATA_MANIFEST, Manifest, Split, read_manifest, shard_name, verify_data
from lineartime.data.units import Slice, Unit, encode_unit, read_slice, rows_of
from lineartime.folders import copied, shipped_models, weights_folder

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int | None], None]
"""Takes a description, the amount done, and the total (None if unknown)."""
BLOCK_IDS = 1 << 21
"""Ids that are in memory at once when units are joined."""


def prepare(inputs: Iterable[Path | str] | Path, out: Path | str, *, progress: Progress | None = None,
            **options: Any) -> Manifest:
    """Read text, train or load a tokenizer, and write the token shards of every split to the new folder `out`.

    inputs: a file or folder, or several; `find_sources` finds the split of each file. options: the other fields of
    `PrepareSettings`. progress: called with files hashed, bytes checked and tokenised, ids written.
    Raises as `prepare_text` does."""
    given = {"inputs": inputs, "out": str(out)} | options
    given |= {name: (str(names),) if isinstance(names := given[name], str | Path) else tuple(map(str, names))
              for name in ("inputs", "validation", "test") if name in given}
    given |= {name: str(given[name]) for name in ("tokenizer",) if name in given}
    return prepare_text(PrepareSettings(**given), progress)


def prepare_text(asked: PrepareSettings, progress: Progress | None = None) -> Manifest:
    """`prepare` for settings.

    `out` appears only when it is complete. If `out` was prepared from the same text and settings it is verified and
    kept; text is not compared again if all is on the hub. The number of processes does not change a byte.
    Raises UsageError, DataError (with file and line or byte) or ResourceError (disk)."""
    out = asked.out if is_address(asked.out) else os.path.realpath(asked.out)
    show = partial(_shown, progress)
    with system_errors(out), tempfile.TemporaryDirectory() as work:
        taken = exists(joined(out, DATA_MANIFEST)) if is_address(out) else (
            exists(out) and not (is_folder(out) and not os.listdir(out)))
        require(not taken or exists(joined(out, DATA_MANIFEST)), "the output exists and is not a prepared folder", out,
                "choose another")
        tokenizer = named_tokenizer(asked)
        if taken and asked.is_from_hub:
            return _already_prepared(out, asked.for_manifest(None if tokenizer is None else tokenizer.sha256), None)
        sources = find_text(asked, tokenizer, work, show)
        if taken:
            shown = show("hashing", sources, len(sources))
            return _already_prepared(out, asked.for_manifest(None if tokenizer is None else tokenizer.sha256), [
                {"split": each.split, "name": each.name} | hash_of(each.path) for each in shown])
        with (uploaded(out) if is_address(out) else new_folder(Path(out))) as aside:
            units, held_out = cut_into_units(asked, sources, tokenizer)
            named = tokenizer
            tokenizer = tokenizer or _trained(asked, units, held_out, show)
            manifest = Manifest(asked.for_manifest(None if named is None else named.sha256), [], described(tokenizer),
                                tokenizer.dtype, asked.shard_tokens)
            write_all(str(aside), asked, sources, units, held_out, tokenizer, manifest, show)
            (aside / DATA_MANIFEST).write_text(manifest.to_json())
        return manifest


def write_all(out: str, asked: PrepareSettings, sources: list[Source], units: list[tuple[str, list[Slice]]],
              held_out: float | None, tokenizer: Tokenizer, manifest: Manifest, show: Any) -> None:
    """Tokenise all units, decide which documents are held out, and write the shards of each split."""
    with hashed_file(out, TOKENIZER_FILE, manifest.files) as write:
        write(tokenizer.json.encode())
    n_bytes = [sum(one.bytes for one in own) for _, own in units]
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_workers = 1 if sum(n_bytes) < asked.unit_bytes else min(asked.jobs or n_cores, len(units))
    done = encode_all([own for _, own in units], asked.reading, tokenizer, held_out is not None, n_workers)
    sizes = iter(n_bytes)
    shown = zip((split for split, _ in units), show("tokenising", done, sum(n_bytes), lambda unit: next(sizes)),
                strict=False)
    found: list[Unit] = []
    with tempfile.TemporaryFile(dir=out) as file:
        for split, of_split in itertools.groupby(shown, key=lambda each: each[0]):
            own, begin = [], file.tell()
            for _, unit in of_split:
                file.write(unit.ids.tobytes())
                own.append(dataclasses.replace(unit, ids=np.empty(0)))
            found += own
            file.flush()
            ids = np.memmap(file, tokenizer.dtype, "r", begin, ((file.tell() - begin) // np.dtype(tokenizer.dtype
                            ).itemsize,)) if file.tell() > begin else np.empty(0, tokenizer.dtype)
            rows_D4 = documents_of(own)
            manifest.blank_documents += int((rows_D4[:, 1] == 0).sum())
            for name, is_chosen_D in _divided(split, rows_D4, held_out, own[0].sources[0]["path"]).items():
                words, bytes_ = (int(rows_D4[is_chosen_D, column].sum()) for column in (1, 2))
                manifest.splits[name] = Split(int(is_chosen_D.sum()), 0, words, bytes_)
                blocks = chosen_ids(ids, rows_D4, is_chosen_D)
                shown_blocks = show("writing", blocks, int(rows_D4[is_chosen_D, 0].sum()), len)
                manifest.splits[name].tokens = _write_split(out, name, shown_blocks, manifest)
    manifest.sources = _sources(sources, found)
    manifest.notes = _notes(manifest, found)
    if held_out or asked.held_out:
        train, held = (manifest.splits[name] for name in ("train", "validation"))
        what = (f"{held.documents:,} of {held.documents + train.documents:,} documents, at equal distances"
                if held_out else "the end of the only document")
        logger.info(f"held out    {what}: {held.tokens / (held.tokens + train.tokens):.1%} of the tokens")


def encode_all(units: list[list[Slice]], how: dict[str, Any], tokenizer: Tokenizer, with_hashes: bool,
               n_workers: int) -> Iterator[Unit]:
    """All units in order, tokenised in so many processes. Raises ResourceError for a process that dies."""
    if n_workers <= 1:
        yield from (encode_unit(own, how, tokenizer, with_hashes) for own in units)
        return
    pool = ProcessPoolExecutor(n_workers, get_context("spawn"), _start, (tokenizer.json, tokenizer.name, how,
                                                                         with_hashes))
    try:
        waiting, rest = [], iter(units)
        for own in itertools.islice(rest, 2 * n_workers):
            waiting.append(pool.submit(_encode, own))
        while waiting:
            unit = waiting.pop(0).result()
            waiting += [pool.submit(_encode, own) for own in itertools.islice(rest, 1)]
            yield unit
    except BrokenProcessPool as e:
        raise ResourceError("a process that tokenises has died", str(e), "where memory was short use fewer --jobs"
                            ) from None
    finally:
        pool.shutdown(cancel_futures=True)


SHARED: list[Any] = []
"""In a worker: the tokenizer, and how text is read."""


def _start(json: str, name: str, *how: Any) -> None:
    SHARED[:] = [Tokenizer(json, name), *how]


def _encode(slices: list[Slice]) -> Unit:
    tokenizer, how, with_hashes = SHARED
    return encode_unit(slices, how, tokenizer, with_hashes)


def find_text(asked: PrepareSettings, tokenizer: Tokenizer | None, work: str, show: Any) -> list[Source]:
    """The files of every split. Text that can be read only once is copied into the work folder."""
    saved = save_streams(asked, joined(work, "streams"), show)
    sources = find_sources([SAMPLE] if asked.sample else saved.inputs, saved.validation, saved.test, task=asked.task)
    require(asked.held_out is None or all(each.split != "validation" for each in sources), "two validation splits",
            f"held_out = {asked.held_out}", "the inputs have one already; leave out held_out")
    for each in sources:
        require(asked.task != "wiki40b" or not is_one_document(each.path), "Wiki-40B is not .txt or .md", each.path,
                "name .parquet or .jsonl.gz, or leave out the task")
    if tokenizer is None and any(is_token_file(each.path) for each in sources):
        raise UsageError("token files need the tokenizer that made them", asked.inputs[0], "name it: --tokenizer FILE")
    return sources


def named_tokenizer(asked: PrepareSettings) -> Tokenizer | None:
    """The tokenizer that is asked for; None for one that is to be trained on the text."""
    if asked.tokenizer == "train":
        require_vocab_size(asked.vocab_size or DEFAULT_VOCAB_SIZE, mlm=asked.is_masked)
        return None
    stored, masked = is_address(asked.tokenizer), asked.is_masked
    path = copied(asked.tokenizer, (".json",), TOKENIZER_FILE) if stored else Path(asked.tokenizer)
    if path.is_dir() and is_saved_elsewhere(path):
        return auto_tokenizer(path, mlm=masked)
    if asked.tokenizer == "bytes":
        return byte_tokenizer(mlm=masked)
    if asked.tokenizer in shipped_models() or (path.is_dir() and not (path / TOKENIZER_FILE).is_file()):
        path = weights_folder(asked.tokenizer)
    return load_tokenizer(path / TOKENIZER_FILE if path.is_dir() else path, mlm=masked)


def cut_into_units(asked: PrepareSettings, sources: list[Source], tokenizer: Tokenizer | None
                   ) -> tuple[list[tuple[str, list[Slice]]], float | None]:
    """The units of all text, in the order of the splits; and the share of documents to hold out, None for none, or if
    the only document is cut."""
    slices = [(each.split, _slices_of(each.path, asked, tokenizer)) for each in sources]
    train, held_out = [own for split, own in slices if split == "train"], asked.held_out
    if held_out and len(train) == 1 and is_one_document(train[0][0].path):
        parts = cut_document(train[0], held_out, asked.reading)
        slices, held_out = [*zip(("train", "validation"), parts, strict=True),
                            *(each for each in slices if each[0] != "train")], None
    return _units_of(slices, asked.unit_bytes), held_out


def _slices_of(path: str, asked: PrepareSettings, tokenizer: Tokenizer | None) -> list[Slice]:
    """The slices of a file. A document is not read apart if the tokenizer has to see it whole."""
    size, whole = size_of(path), tokenizer is not None and not tokenizer.reads_pieces and is_one_document(path)
    ranges = ranges_of(path, size, max(size, 1) if whole else asked.unit_bytes, asked.encoding) or [(0, 0)]
    return [Slice(path, start, stop, to_end=is_one_document(path) and stop == size) for start, stop in ranges]


def _units_of(slices: list[tuple[str, list[Slice]]], unit_bytes: int) -> list[tuple[str, list[Slice]]]:
    """The units of all text, in the order of the splits: the split and the slices of each. Small files share a unit."""
    units: list[tuple[str, list[Slice]]] = []
    for split in SPLITS:
        n_left = 0
        for one in (one for of, own in slices if of == split for one in own):
            if n_left <= 0:
                units.append((split, []))
                n_left = unit_bytes
            units[-1][1].append(one)
            n_left -= one.bytes
    return units


def _trained(asked: PrepareSettings, units: list[tuple[str, list[Slice]]], held_out: float | None, show: Any
             ) -> Tokenizer:
    """A tokenizer that is trained on pieces of the train split at equal distances."""
    slices = [one for split, own in units for one in own if split == "train"]
    n_bytes = sum(one.bytes for one in slices)
    shown = show("checking", slices, n_bytes, lambda one: one.bytes)
    pieces = ((text, 0, last) for one in shown for text, last in read_slice(one, asked.reading))
    is_chosen_D = _divided("train", rows_of(pieces, held_out is not None), held_out, slices[0].path)["train"]
    every, vocab_size = -(-n_bytes // asked.train_characters), asked.vocab_size or DEFAULT_VOCAB_SIZE
    texts = itertools.islice(_texts_of(slices, is_chosen_D, asked.reading), 0, None, every)
    shown = show("training the tokenizer", texts, n_bytes // every, len)
    learning = show("learning its vocabulary", (), vocab_size)  # this takes as long as reading
    return train_tokenizer(itertools.chain(shown, learning), vocab_size, mlm=asked.is_masked)


def _texts_of(slices: list[Slice], is_chosen_D: np.ndarray, how: dict[str, Any]) -> Iterator[str]:
    """The pieces of the chosen documents."""
    document = 0
    for one in slices:
        for text, last in read_slice(one, how):
            if is_chosen_D[document]:
                yield text
            document += last


def _divided(split: str, rows_DN: np.ndarray, held_out: float | None, path: str) -> dict[str, np.ndarray]:
    """Which documents are in the split, and of train which are held out, in bool `[D]`; blank ones are left out. Raises
    DataError for an empty split.

    rows_DN: the `ROW` of each document, or its first columns if none is held out. path: for errors."""
    is_kept_D = rows_DN[:, 1] > 0
    if not is_kept_D.any():
        raise DataError("nothing but white space" if len(is_kept_D) else "no documents", path,
                        f"the {split} split would be empty")
    if split != "train" or held_out is None:
        return {split: is_kept_D}
    if is_kept_D.sum() == 1:
        raise DataError("of one document in rows nothing can be held out", path, "save its text alone as .txt")
    is_held_D = is_kept_D.copy()
    is_held_D[is_kept_D] = held_out_documents(rows_DN[is_kept_D, 2], rows_DN[is_kept_D, 3], held_out)
    return {"train": is_kept_D & ~is_held_D, "validation": is_held_D}


def _write_split(out: Name, name: str, arrays: Iterable[np.ndarray], manifest: Manifest) -> int:
    """Write one split's shards and document positions; returns the number of targets."""
    end_of_document, n_ids = manifest.tokenizer["end_of_document"], 0
    with contextlib.ExitStack() as shard, hashed_file(out, f"{name}-documents.bin", manifest.files) as write_positions:
        for ids in itertools.chain([np.array([end_of_document], manifest.dtype)], arrays):
            write_positions((np.flatnonzero(ids == end_of_document) + n_ids).astype("<u8").tobytes())
            while len(ids):
                if n_ids % manifest.shard_tokens == 0:
                    shard.close()
                    number = n_ids // manifest.shard_tokens
                    write = shard.enter_context(hashed_file(out, shard_name(name, number), manifest.files))
                fitting = ids[:manifest.shard_tokens - n_ids % manifest.shard_tokens]
                write(fitting.tobytes())
                n_ids += len(fitting)
                ids = ids[len(fitting):]
    return n_ids - 1


def documents_of(units: list[Unit]) -> np.ndarray:
    """The `ROW` of each document of some units."""
    rows_D4 = np.zeros((sum(len(unit.rows_N4) for unit in units), 4), "<u8")
    document = 0
    for unit in units:
        rows_D4[document:document + len(unit.rows_N4)] += unit.rows_N4
        document += len(unit.rows_N4) - unit.open
    return rows_D4[:document]


def chosen_ids(ids: np.ndarray, rows_D4: np.ndarray, is_chosen_D: np.ndarray) -> Iterator[np.ndarray]:
    """The ids of the chosen documents, in order."""
    ends_D = np.concatenate([[0], rows_D4[:, 0].cumsum().astype(np.int64)])
    runs_R2 = np.flatnonzero(np.diff(is_chosen_D, prepend=False, append=False)).reshape(-1, 2)
    for begin, stop in ends_D[runs_R2].tolist():
        for at in range(begin, stop, BLOCK_IDS):
            yield np.array(ids[at:min(at + BLOCK_IDS, stop)])


def _sources(sources: list[Source], units: list[Unit]) -> list[dict[str, Any]]:
    """The files of text as the manifest has them. Raises DataError for the same text in two splits."""
    begun = {each["path"]: each for unit in units for each in unit.sources if "sha256" in each}
    listed, first = [], dict[str, Source]()
    for source in sources:
        found = begun[source.path]
        listed.append({"split": source.split, "name": source.name, "bytes": found["bytes"], "sha256": found["sha256"]})
        other = first.setdefault(found["sha256"], source)
        if other.split != source.split and found["bytes"]:
            raise DataError("the same text in two splits", f"{other.name} of {other.split} and {source.name} of "
                            f"{source.split}", "take it out of one")
    return listed


def _notes(manifest: Manifest, units: list[Unit]) -> list[str]:
    """What was left out, and what the tokenizer does not keep."""
    there = {each["path"] for unit in units for each in unit.sources if each["pieces"]}
    n_empty, n_vocabulary = len(manifest.sources) - len(there), manifest.tokenizer["vocab_size"]
    n_ids = sum(int(unit.rows_N4[:, 0].sum()) for unit in units)
    lost, unknown = (sum(getattr(unit, name) for unit in units) for name in ("lost", "unknown"))
    notes = []
    if n_vocabulary < (asked := manifest.settings.get("vocab_size", 0)):
        notes.append(f"the text gave a vocabulary of {n_vocabulary:,} of the {asked:,} asked for")
    if n_empty:
        notes.append(f"{n_empty:,} files have no documents and were left out")
    if manifest.blank_documents:
        notes.append(f"{manifest.blank_documents:,} documents are white space only and were left out")
    if lost or unknown:
        notes.append("this tokenizer does not keep the text exactly: scores per byte leave out what it drops "
                     f"({lost:,} documents, {unknown / n_ids:.2%} of the tokens are unknown)")
    return notes


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of a tokenizer."""
    of_mask = {} if tokenizer.mask is None else {"mask": tokenizer.mask, "separator": tokenizer.separator,
                                                 "special": tokenizer.special}
    return {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document} | of_mask


def _already_prepared(out: str, settings: dict[str, Any], sources: list[dict[str, Any]] | None) -> Manifest:
    """The manifest of an output that has this text with these settings already; `sources`: its files, None for those of
    the hub. Raises UsageError for another one."""
    manifest = read_manifest(out)
    old, new = manifest.settings | {"text": manifest.sources}, settings | {"text": sources or manifest.sources}
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    how = [name if name == "text" else f"{name} {old.get(name)} -> {new.get(name)}" for name in changed]
    require(not how, "the output was prepared differently", f"{out} ({', '.join(how)})", "choose another or delete it")
    verify_data(out)
    manifest.already_prepared = True
    return manifest


def _counted(progress: Progress | None, what: str, total: int | None) -> Callable[[int], None]:
    """A function that takes the amount of each item that is done, and reports their sum."""
    n_done = 0

    def add(amount: int) -> None:
        nonlocal n_done
        n_done += amount
        if progress is not None:
            progress(what, n_done, total)

    add(0)
    return add


def _shown(progress: Progress | None, what: str, items: Iterable[Any], total: int | None,
           amount: Callable[[Any], int] = lambda item: 1) -> Iterator[Any]:
    """Pass the items on, and report the sum of the amounts of the items done."""
    add = _counted(progress, what, total)
    for item in items:
        yield item
        add(amount(item))
