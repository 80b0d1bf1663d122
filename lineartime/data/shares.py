"""Text is prepared in shares, by any number of processes or machines; the result has the same bytes.

    step    reads                           writes into the work folder
    plan    the names of files; the text,   job.json and tokenizer.json; what can be read only once: streams/
            if a tokenizer is trained, or if the end of the only document is held out
    encode  each unit                       units/00012.ids, .rows, .json
    join    the units                       the shards of each split, in the output folder

`encode` does a share of the units: share k of n has the units k, k + n, k + 2n, ... What is done already is not done
again, so a share that was killed is simply run again. The work folder may be in any store."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.data.auto_tokenizer import auto_tokenizer, is_saved_elsewhere
from lineartime.data.files import (
    Name,
    exists,
    files_below,
    hash_of,
    hashed_file,
    is_address,
    joined,
    make_folder,
    read_all,
    size_of,
    stamp_of,
    write_text,
)
from lineartime.data.held_out import cut_document, held_out_documents
from lineartime.data.prepare_config import DEFAULT_VOCAB_SIZE, SAMPLE, PrepareSettings
from lineartime.data.read_text import is_one_document, is_token_file, ranges_of
from lineartime.data.sources import SPLITS, find_sources
from lineartime.data.streams import save_streams
from lineartime.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    require_vocab_size,
    train_tokenizer,
    with_tokens,
)
from lineartime.data.tokens import DATA_MANIFEST, Manifest, Split, shard_name
from lineartime.data.units import (
    Encoded,
    Faults,
    Slice,
    chosen_ids,
    documents_of,
    encode_unit,
    faults_of,
    is_finished,
    pieces_noting_faults,
    read_encoded,
    read_slice,
    rows_of,
)
from lineartime.errors import DataError, UsageError, raise_faults
from lineartime.model_names import copied, shipped_models, weights_folder
from lineartime.settings import require

logger = logging.getLogger(__name__)

JOB, UNITS, STREAMS = "job.json", "units", "streams"
BEGUN = re.compile(r"tokenizer\.json|(?:train|validation|test)-(?:documents|\d{5})\.bin")
"""Files of an output without its manifest."""
Job = dict[str, Any]
"""What job.json has: settings of the manifest, the files of each split, the units."""
Done = Callable[[int], None]
"""Is told the number of each unit that is done."""
Show = Callable[..., Iterator[Any]]
"""Passes items on and reports progress: `show(what, items, total, amount of an item)`."""


def no_show(what: str, items: Iterable[Any], *_: Any) -> Iterator[Any]:
    """A `Show` that says nothing."""
    return iter(items)


def plan(asked: PrepareSettings, work: Name, show: Show = no_show, *, anew: bool = False) -> Job:
    """Find the files of every split, train the tokenizer if none is named, and write both with the units into the work
    folder; returns the job. anew: replace the job of other text or settings.

    Raises UsageError for inputs that do not go together and for the work folder of another job, DataError for files
    that cannot be read."""
    job, tokenizer = find_text(asked, work, show)
    job |= _cut_into_units(job, asked, tokenizer)
    if exists(joined(work, JOB)) and not anew and _read_object(joined(work, JOB)) != job:
        raise UsageError("this folder has the work of other text or settings", work, "choose another or delete it")
    write_text(joined(work, TOKENIZER_FILE), (tokenizer or _trained(asked, job, show)).json)
    write_text(joined(work, JOB), json.dumps(job))
    return job


def encode(work: Name, number: int = 0, of: int = 1, done: Done | None = None) -> None:
    """Tokenise the units of share `number` of `of`. After a unit whose text is wrong the others are only read, so that
    `join` can say soon what else is wrong. Raises DataError for a damaged work folder."""
    job, tokenizer = _opened(work)
    make_folder(joined(work, UNITS))
    origins, is_right = _origins(job, tokenizer), True
    for index in range(number, len(origins), of):
        name, slices = _unit_name(work, index), [Slice(*each) for each in job["units"][index][1]]
        if not is_finished(name, origins[index]):
            unit = (encode_unit(name, slices, job["reading"], tokenizer, job["held_out"] is not None) if is_right else
                    Encoded(faults=faults_of(slices, job["reading"])))
            is_right = is_right and not unit.faults
            unit.made_from = origins[index] if unit.files else ""
            write_text(f"{name}.json", json.dumps(dataclasses.asdict(unit)) + "\n")
        if done is not None:
            done(index)


def join(work: Name, out: Name, show: Show = no_show) -> Manifest:
    """Decide which documents are held out, and join all units in the shards of each split, in the folder `out`, which
    is new or has what a killed call wrote; its manifest comes last. Returns the manifest.

    Raises UsageError for another folder, DataError for the faults of files, for the same text in two splits, for a
    split that would be empty, and for a unit that is missing or is not as it was written."""
    job, tokenizer = _opened(work)
    units = _finished_units(work, job, tokenizer)
    manifest = Manifest(job["settings"], _sources(job, units), described(tokenizer), tokenizer.dtype,
                        job["shard_tokens"])
    make_folder(out)
    others = [name for name in files_below(out) if not BEGUN.fullmatch(name)]
    require(not others, "the output has other files", ", ".join([str(out), *others[:3]]), "choose another")
    with hashed_file(out, TOKENIZER_FILE, manifest.files) as write:
        write(tokenizer.json.encode())
    for source in (split for split in SPLITS if any(of == split for of, *_ in units)):
        own = [(name, unit) for split, name, unit in units if split == source]
        rows_DN = documents_of(own, 2 if job["held_out"] is None else 4)
        manifest.blank_documents += int((rows_DN[:, 1] == 0).sum())
        path = own[0][1].sources[0]["path"]
        for split, is_chosen_D in _divided(source, rows_DN, job["held_out"], path).items():
            manifest.splits[split] = Split()
            blocks = chosen_ids(own, is_chosen_D, manifest.dtype, manifest.splits[split])
            shown = show("writing", blocks, int(rows_DN[is_chosen_D, 0].sum()), len)
            manifest.splits[split].tokens = _write_split(out, split, shown, manifest)
    manifest.notes = _notes(manifest, units)
    if asked := job["settings"]["held_out"]:
        train, held = (manifest.splits[name] for name in ("train", "validation"))
        what = (f"{held.documents:,} of {held.documents + train.documents:,} documents, at equal distances"
                if asked == job["held_out"] else "the end of the only document")
        logger.info(f"held out    {what}: {held.tokens / (held.tokens + train.tokens):.1%} of the tokens")
    write_text(joined(out, DATA_MANIFEST), manifest.to_json())
    return manifest


# What `plan` uses


def find_text(asked: PrepareSettings, work: Name, show: Show) -> tuple[Job, Tokenizer | None]:
    """The job of some settings without its units, and the tokenizer, unless it is to be trained. Text that can be read
    only once is copied into the work folder; no other text is read. Raises as `plan` does."""
    tokenizer = named_tokenizer(asked)
    make_folder(work)
    saved = save_streams(asked, joined(work, STREAMS), show)
    sources = find_sources([SAMPLE] if asked.sample else saved.inputs, saved.validation, saved.test, task=asked.task)
    require(asked.held_out is None or all(each.split != "validation" for each in sources), "two validation splits",
            f"held_out = {asked.held_out}", "the inputs have one already; leave out held_out")
    for each in sources:
        require(asked.task != "wiki40b" or not is_one_document(each.path), "Wiki-40B is not .txt or .md", each.path,
                "name .parquet or .jsonl.gz, or leave out the task")
    if tokenizer is None and any(is_token_file(each.path) for each in sources):
        raise UsageError("token files need the tokenizer that made them", asked.inputs[0], "name it: --tokenizer FILE")
    # A copy in the work folder is made anew each time, so its hash is taken; of other files their time and size.
    stamps = [hash_of(each.path)["sha256"] if each.path.startswith(joined(work, STREAMS)) else stamp_of(each.path)
              for each in sources]
    return {"settings": asked.for_manifest(None if tokenizer is None else tokenizer.sha256),
            "reading": asked.reading, "shard_tokens": asked.shard_tokens,
            "sources": [[each.split, each.name, each.path, stamp]
                        for each, stamp in zip(sources, stamps, strict=True)],
            "tokenizer": None if tokenizer is None else tokenizer.name}, tokenizer


def named_tokenizer(asked: PrepareSettings) -> Tokenizer | None:
    """The tokenizer that is asked for; None for one that is to be trained on the text."""
    if asked.tokenizer == "train":
        require_vocab_size(asked.vocab_size or DEFAULT_VOCAB_SIZE, mlm=asked.is_masked)
        return None
    stored, masked = is_address(asked.tokenizer), asked.is_masked
    path = copied(asked.tokenizer, (".json",), TOKENIZER_FILE) if stored else Path(asked.tokenizer)
    if path.is_dir() and is_saved_elsewhere(path):
        ready = auto_tokenizer(path, mlm=masked)
    elif asked.tokenizer == "bytes":
        ready = byte_tokenizer(mlm=masked)
    else:
        if asked.tokenizer in shipped_models() or (path.is_dir() and not (path / TOKENIZER_FILE).is_file()):
            path = weights_folder(asked.tokenizer)
        ready = load_tokenizer(path / TOKENIZER_FILE if path.is_dir() else path, mlm=masked)
    return ready if asked.add_tokens is None else with_tokens(ready, asked.add_tokens)


def _cut_into_units(job: Job, asked: PrepareSettings, tokenizer: Tokenizer | None) -> Job:
    """The "units" of a job, and "held_out": the share of documents; None for none, or if the only document is cut."""
    slices = [(split, _slices_of(path, asked, tokenizer)) for split, _, path, _ in job["sources"]]
    train, held_out = [own for split, own in slices if split == "train"], asked.held_out
    if held_out and len(train) == 1 and is_one_document(train[0][0].path):
        parts = cut_document(train[0], held_out, asked.reading)
        slices, held_out = [*zip(("train", "validation"), parts, strict=True),
                            *(each for each in slices if each[0] != "train")], None
    return {"units": _units_of(slices, asked.unit_bytes), "held_out": held_out}


def _slices_of(path: str, asked: PrepareSettings, tokenizer: Tokenizer | None) -> list[Slice]:
    """The slices of a file. A document is not read apart if the tokenizer has to see it whole."""
    size, whole = size_of(path), tokenizer is not None and not tokenizer.reads_pieces and is_one_document(path)
    ranges = ranges_of(path, size, max(size, 1) if whole else asked.unit_bytes, asked.encoding) or [(0, 0)]
    return [Slice(path, start, stop, to_end=is_one_document(path) and stop == size) for start, stop in ranges]


def _units_of(slices: list[tuple[str, list[Slice]]], unit_bytes: int) -> list[list[Any]]:
    """The units of all text, in the order of the splits: the split and the slices of each. Small files share a unit."""
    units: list[list[Any]] = []
    for split in SPLITS:
        n_left = 0
        for one in (one for of, own in slices if of == split for one in own):
            if n_left <= 0:
                units.append([split, []])
                n_left = unit_bytes
            units[-1][1].append(list(one))
            n_left -= one.bytes
    return units


def _trained(asked: PrepareSettings, job: Job, show: Show) -> Tokenizer:
    """A tokenizer that is trained on pieces of the train split at equal distances. All text is read first, so that its
    faults are said before this takes its time."""
    slices, others = ([Slice(*one) for split, own in job["units"] for one in own if (split == "train") == is_train]
                      for is_train in (True, False))
    n_bytes, faults = sum(one.bytes for one in slices), Faults()
    shown = show("checking", slices, n_bytes, lambda one: one.bytes)
    rows_D4 = rows_of(pieces_noting_faults(shown, job["reading"], faults), job["held_out"] is not None)
    raise_faults([DataError(*each) for each in (faults | faults_of(others, job["reading"])).values()])
    is_chosen_D = _divided("train", rows_D4, job["held_out"], slices[0].path)["train"]
    every, vocab_size = -(-n_bytes // asked.train_characters), asked.vocab_size or DEFAULT_VOCAB_SIZE
    texts = itertools.islice(_texts_of(slices, is_chosen_D, job), 0, None, every)
    shown = show("training the tokenizer", texts, n_bytes // every, len)
    learning = show("learning its vocabulary", (), vocab_size)  # this takes as long as reading
    return train_tokenizer(itertools.chain(shown, learning), vocab_size, mlm=asked.is_masked)


def _texts_of(slices: list[Slice], is_chosen_D: np.ndarray, job: Job) -> Iterator[str]:
    """The pieces of the chosen documents."""
    document = 0
    for one in slices:
        for text, last in read_slice(one, job["reading"]):
            if is_chosen_D[document]:
                yield text
            document += last


# What `join` uses


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


def _finished_units(work: Name, job: Job, tokenizer: Tokenizer) -> list[tuple[str, str, Encoded]]:
    """The split, the name and the description of each unit. Raises DataError for the faults of text, and for a unit
    that is missing or made from something else."""
    names = [_unit_name(work, index) for index in range(len(job["units"]))]
    units = [(split, name, read_encoded(name)) for (split, _), name in zip(job["units"], names, strict=True)]
    raise_faults([DataError(*fault) for fault in {path: fault for *_, unit in reversed(units)
                                                  for path, fault in unit.faults.items()}.values()])
    for (_, name, unit), origin in zip(units, _origins(job, tokenizer), strict=True):
        if unit.made_from != origin:
            raise DataError("made from other text or another tokenizer", f"{name}.json", "run the same command again")
    return units


def _sources(job: Job, units: list[tuple[str, str, Encoded]]) -> list[dict[str, Any]]:
    """The files of text as the manifest has them. Raises DataError for the same text in two splits."""
    begun = {each["path"]: each for *_, unit in units for each in unit.sources if "sha256" in each}
    sources, first = [], dict[str, tuple[str, str]]()
    for split, name, path, _ in job["sources"]:
        found = begun[path]
        sources.append({"split": split, "name": name, "bytes": found["bytes"], "sha256": found["sha256"]})
        other = first.setdefault(found["sha256"], (split, name))
        if other[0] != split and found["bytes"]:
            raise DataError("the same text in two splits", f"{other[1]} of {other[0]} and {name} of {split}",
                            "take it out of one")
    return sources


def _notes(manifest: Manifest, units: list[tuple[str, str, Encoded]]) -> list[str]:
    """What was left out, and what the tokenizer does not keep."""
    there = {each["path"] for *_, unit in units for each in unit.sources if each["pieces"]}
    n_empty, n_vocabulary = len(manifest.sources) - len(there), manifest.tokenizer["vocab_size"]
    n_ids, lost, unknown = (sum(getattr(unit, name) for *_, unit in units) for name in ("ids", "lost", "unknown"))
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


# What several steps use


def _opened(work: Name) -> tuple[Job, Tokenizer]:
    """The job of a work folder, and its tokenizer."""
    job, file = _read_object(joined(work, JOB)), joined(work, TOKENIZER_FILE)
    return job, Tokenizer(read_all(file).decode(), job["tokenizer"] or file)


def _read_object(name: Name) -> Any:
    """A file of JSON. Raises DataError for one that cannot be read or is damaged."""
    try:
        return json.loads(read_all(name))
    except ValueError as e:
        raise DataError("damaged file", name, str(e)) from None


def _unit_name(work: Name, index: int) -> str:
    return joined(work, UNITS, f"{index:05d}")


def _origins(job: Job, tokenizer: Tokenizer) -> list[str]:
    """For each unit a hash of all that decides what it has."""
    stamps = {path: stamp for _, _, path, stamp in job["sources"]}
    how = [job["reading"], tokenizer.sha256, job["held_out"] is not None]
    return [hashlib.sha256(json.dumps([slices, [stamps[path] for path, *_ in slices], how]).encode()).hexdigest()
            for _, slices in job["units"]]
