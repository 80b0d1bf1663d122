"""Text is prepared in shares, by any number of processes or machines; the result has the same bytes.

    step      reads                  writes into the work folder
    plan      the names of files     job.json; and what can be read only once: streams/
    check     each file, to its end  checked/00012.json
    arrange   what was found         units.json, and the tokenizer if it is trained
    encode    each unit              units/00012.ids, .rows, .json
    join      the units              the shards of each split, in the output folder

`check` and `encode` do a share of their tasks: share k of n has the tasks k, k + n, k + 2n, ... What is done already is
not done again, so a share that was killed is simply run again. The work folder may be in any store."""

import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.data.auto_tokenizer import auto_tokenizer, is_saved_elsewhere
from lineartime.data.files import (
    Name,
    exists,
    hashed_file,
    joined,
    make_folder,
    read_all,
    remove,
    size_of,
    write_text,
)
from lineartime.data.held_out import Spans, cut_document, divide_documents
from lineartime.data.prepare_config import DEFAULT_VOCAB_SIZE, SAMPLE, PrepareSettings
from lineartime.data.read_text import is_token_file
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
    UNITS,
    CheckedFile,
    Encoded,
    ReadArguments,
    Slice,
    check_file,
    encode_unit,
    joined_ids,
    read_encoded,
    read_slice,
    slices_of,
)
from lineartime.errors import DataError, UsageError, raise_faults
from lineartime.model_names import shipped_models, weights_folder

logger = logging.getLogger(__name__)

JOB, CHECKED, UNITS_FILE, STREAMS = "job.json", "checked", "units.json", "streams"
Done = Callable[[int], None]
"""Is told the number of each task that is done."""
Show = Callable[..., Iterator[Any]]
"""Passes items on and reports progress: `show(what, items, total, amount of an item)`."""


def no_show(what: str, items: Iterable[Any], *_: Any) -> Iterator[Any]:
    """A `Show` that says nothing."""
    return iter(items)


def plan(asked: PrepareSettings, work: Name, show: Show = no_show) -> dict[str, Any]:
    """Find the files of every split, and write job.json, which the other steps read; returns it.

    Raises UsageError for inputs that do not go together and for the work folder of another job, DataError for files
    that cannot be read."""
    tokenizer = named_tokenizer(asked)
    make_folder(work)
    saved = save_streams(asked, joined(work, STREAMS), show)
    sources = find_sources([SAMPLE] if asked.sample else saved.inputs, saved.validation, saved.test, task=asked.task)
    asked.require_fitting(sources)
    if tokenizer is None and any(is_token_file(each.path) for each in sources):
        raise UsageError("token files need the tokenizer that made them", asked.inputs[0], "name it: --tokenizer FILE")
    unread = " and ".join(sorted({ending for source in sources for ending in source.unread}))
    job = {"settings": asked.for_manifest(None if tokenizer is None else tokenizer.sha256),
           "notes": [f"{unread} files lie beside the .parquet files and were not read"] if unread else [],
           "reading": asked.reading, "range_bytes": asked.unit_bytes, "held_out": asked.held_out,
           "sources": [[each.split, each.name, each.path, size_of(each.path)] for each in sources],
           "tokenizer": None if tokenizer is None else tokenizer.name, "mlm": asked.is_masked,
           "vocab_size": asked.vocab_size or DEFAULT_VOCAB_SIZE, "train_characters": asked.train_characters,
           "shard_tokens": asked.shard_tokens}
    if exists(joined(work, JOB)) and read_object(joined(work, JOB)) != job:
        raise UsageError("this folder has the work of other text or settings", work, "choose another or delete it")
    if tokenizer is not None:
        write_text(joined(work, TOKENIZER_FILE), tokenizer.json)
    write_text(joined(work, JOB), json.dumps(job))
    return job


def check(work: Name, number: int = 0, of: int = 1, done: Done | None = None) -> None:
    """Read the files of share `number` of `of` to their ends, so that their faults are found before anything is
    tokenised. A fault is written down, and `arrange` says all of them at once."""
    job = read_object(joined(work, JOB))
    make_folder(joined(work, CHECKED))
    for index in range(number, len(job["sources"]), of):
        name, (_, _, path, size) = joined(work, CHECKED, f"{index:05d}"), job["sources"][index]
        if not exists(f"{name}.json"):
            try:
                found = check_file(path, size, job["reading"], job["range_bytes"],
                                   f"{name}.hashes" if job["held_out"] else None)
            except DataError as e:
                found = {"fault": [e.what, e.where and str(e.where), e.todo]}
            write_text(f"{name}.json", json.dumps(found))
        if done is not None:
            done(index)


def arrange(work: Name, show: Show = no_show) -> dict[str, Any]:
    """Decide which documents are held out, train the tokenizer if none was named, and write units.json, which says what
    each unit has; returns it. Units of another text or tokenizer are removed.

    Raises DataError for the faults of files, for the same text in two splits, and for a split that would be empty."""
    job = read_object(joined(work, JOB))
    files, sources = _checked_files(work, job)
    hashes = [np.frombuffer(read_all(joined(work, CHECKED, f"{index:05d}.hashes")), "<u8")
              for index, file in enumerate(files) if job["held_out"] and file.split == "train" and file.documents]
    splits = divide_documents(files, job["held_out"], hashes)
    tokenizer = opened_tokenizer(work, job) if job["tokenizer"] else None
    slices = _slices_of_splits(files, job, tokenizer is not None and not tokenizer.reads_pieces)
    if tokenizer is None:
        tokenizer = _trained(slices, splits["train"], job, show)
        write_text(joined(work, TOKENIZER_FILE), tokenizer.json)
    text = json.dumps({"tokenizer": tokenizer.sha256, "sources": sources, "notes": _notes(job, files, tokenizer),
                       "blank_documents": sum(file.blank for file in files), "splits": splits,
                       "units": _units_of(slices, job["range_bytes"])})
    if not exists(joined(work, UNITS_FILE)) or read_all(joined(work, UNITS_FILE)) != text.encode():
        remove(joined(work, UNITS))
        write_text(joined(work, UNITS_FILE), text)
    return json.loads(text)


def encode(work: Name, number: int = 0, of: int = 1, done: Done | None = None) -> None:
    """Tokenise the units of share `number` of `of`. Raises DataError for text that cannot be encoded, or a tokenizer
    that has changed."""
    job, arranged = read_object(joined(work, JOB)), read_object(joined(work, UNITS_FILE))
    tokenizer = opened_tokenizer(work, job)
    if tokenizer.sha256 != arranged["tokenizer"]:
        raise DataError("the tokenizer has changed", joined(work, TOKENIZER_FILE), "run the same command again")
    make_folder(joined(work, UNITS))
    pack = tokenizer.packer()
    for index in range(number, len(arranged["units"]), of):
        slices = [Slice(*each) for each in arranged["units"][index][1]]
        encode_unit(joined(work, UNITS), index, slices, job["reading"], tokenizer, pack)
        if done is not None:
            done(index)


def join(work: Name, out: Name, show: Show = no_show) -> Manifest:
    """Join all units in the shards of each split, in a new folder `out`; its manifest comes last. Returns the manifest.

    Raises DataError for a unit that is missing or is not as it was written."""
    job, arranged = read_object(joined(work, JOB)), read_object(joined(work, UNITS_FILE))
    tokenizer = opened_tokenizer(work, job)
    manifest = Manifest(job["settings"], arranged["sources"], described(tokenizer), tokenizer.dtype,
                        job["shard_tokens"], blank_documents=arranged["blank_documents"], notes=arranged["notes"])
    units = [(split, joined(work, UNITS, f"{index:05d}")) for index, (split, _) in enumerate(arranged["units"])]
    encoded = [(split, name, read_encoded(name)) for split, name in units]
    make_folder(out)
    with hashed_file(out, TOKENIZER_FILE, manifest.files) as write:
        write(tokenizer.json.encode())
    blocks = _blocks(encoded, arranged["splits"], manifest)
    shown = show("writing", blocks, sum(unit.ids for *_, unit in encoded), lambda item: len(item[1]))
    for name, group in itertools.groupby(shown, key=lambda item: item[0]):
        manifest.splits[name].tokens = _write_split(out, name, (block for _, block in group), manifest)
    _note_losses(manifest, [unit for *_, unit in encoded])
    if job["held_out"]:
        train, held = (manifest.splits[name] for name in ("train", "validation"))
        what = ("the end of the only document" if arranged["splits"]["validation"][0] == "validation" else
                f"{held.documents:,} of {held.documents + train.documents:,} documents, at equal distances")
        logger.info(f"held out    {what}: {held.tokens / (held.tokens + train.tokens):.1%} of the tokens")
    write_text(joined(out, DATA_MANIFEST), manifest.to_json())
    return manifest


# What the steps use


def read_object(name: Name) -> Any:
    """A file of JSON. Raises DataError for one that cannot be read or is damaged."""
    try:
        return json.loads(read_all(name))
    except ValueError as e:
        raise DataError("damaged file", name, str(e)) from None


def named_tokenizer(asked: PrepareSettings) -> Tokenizer | None:
    """The tokenizer that is asked for; None for one that is to be trained on the text."""
    if asked.tokenizer == "train":
        require_vocab_size(asked.vocab_size or DEFAULT_VOCAB_SIZE, mlm=asked.is_masked)
        return None
    path, masked = Path(asked.tokenizer), asked.is_masked
    if path.is_dir() and is_saved_elsewhere(path):
        ready = auto_tokenizer(path, mlm=masked)
    elif asked.tokenizer == "bytes":
        ready = byte_tokenizer(mlm=masked)
    else:
        if asked.tokenizer in shipped_models() or (path.is_dir() and not (path / TOKENIZER_FILE).is_file()):
            path = weights_folder(asked.tokenizer)
        ready = load_tokenizer(path / TOKENIZER_FILE if path.is_dir() else path, mlm=masked)
    return ready if asked.add_tokens is None else with_tokens(ready, asked.add_tokens)


def opened_tokenizer(work: Name, job: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a job, with its name in messages."""
    text = read_all(joined(work, TOKENIZER_FILE)).decode()
    return Tokenizer(text, job["tokenizer"] or str(joined(work, TOKENIZER_FILE)))


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of a tokenizer."""
    of_mask = {} if tokenizer.mask is None else {"mask": tokenizer.mask, "separator": tokenizer.separator,
                                                 "special": tokenizer.special}
    return {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document} | of_mask


def _checked_files(work: Name, job: dict[str, Any]) -> tuple[list[CheckedFile], list[dict[str, Any]]]:
    """What `check` has found, and the files as the manifest has them. Raises DataError for faults."""
    found = [read_object(joined(work, CHECKED, f"{index:05d}.json")) for index in range(len(job["sources"]))]
    raise_faults([DataError(*each["fault"]) for each in found if "fault" in each])
    files, sources, first = [], [], dict[str, tuple[str, str]]()
    for (split, name, path, size), each in zip(job["sources"], found, strict=True):
        files.append(CheckedFile(path, split, size, each["documents"], each["blank"], each["characters"]))
        sources.append({"split": split, "name": name, "bytes": each["bytes"], "sha256": each["sha256"]})
        other = first.setdefault(each["sha256"], (split, name))
        if other[0] != split and size:
            raise DataError("the same text in two splits", f"{other[1]} of {other[0]} and {name} of {split}",
                            "take it out of one")
    return files, sources


def _slices_of_splits(files: list[CheckedFile], job: dict[str, Any], whole: bool) -> list[tuple[str, list[Slice]]]:
    """The slices of each file, with the split that they are units of. whole: documents are not read apart."""
    there = [file for file in files if file.documents]
    slices = [(file.split, slices_of(file, job["range_bytes"], job["reading"]["encoding"], whole)) for file in there]
    train = [i for i, file in enumerate(there) if file.split == "train"]
    if job["held_out"] and [there[i].documents for i in train] == [1]:  # it is cut
        (i,) = train
        halves = cut_document(there[i], slices[i][1], job["held_out"], job["reading"])
        slices[i:i + 1] = list(zip(("train", "validation"), halves, strict=True))
    return slices


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


def _trained(slices: list[tuple[str, list[Slice]]], train: Spans, job: dict[str, Any], show: Show) -> Tokenizer:
    """A tokenizer that is trained on pieces at equal distances."""
    n_bytes = sum(one.bytes for split, own in slices if split == train.source for one in own)
    every = -(-n_bytes // job["train_characters"])
    texts = itertools.islice(_texts_of(slices, train, job["reading"]), 0, None, every)
    shown = show("training the tokenizer", texts, n_bytes // every, len)
    learning = show("learning its vocabulary", (), job["vocab_size"])  # this takes as long as reading
    return train_tokenizer(itertools.chain(shown, learning), job["vocab_size"], mlm=job["mlm"])


def _texts_of(slices: list[tuple[str, list[Slice]]], part: Spans, how: ReadArguments) -> Iterator[str]:
    """The pieces of a split's documents."""
    document, spans = 0, iter(part.spans)
    first, stop = next(spans)
    for one in (one for split, own in slices if split == part.source for one in own):
        for text, last in read_slice(one, how):
            if document >= stop:
                first, stop = next(spans, (sys.maxsize, sys.maxsize))
            if first <= document < stop:
                yield text
            document += last


def _notes(job: dict[str, Any], files: list[CheckedFile], tokenizer: Tokenizer) -> list[str]:
    """What `prepare` says of the text."""
    notes, asked = list(job["notes"]), job["settings"].get("vocab_size", 0)
    n_empty, n_blank = sum(file.documents + file.blank == 0 for file in files), sum(file.blank for file in files)
    if tokenizer.vocab_size < asked:
        notes.append(f"the text gave a vocabulary of {tokenizer.vocab_size:,} of the {asked:,} asked for")
    if n_empty:
        notes.append(f"{n_empty:,} files have no documents and were left out")
    if n_blank:
        notes.append(f"{n_blank:,} documents are white space only and were left out")
    return notes


def _note_losses(manifest: Manifest, units: list[Encoded]) -> None:
    """Say in the manifest what the tokenizer does not keep."""
    n_ids, lost, unknown = (sum(getattr(unit, name) for unit in units) for name in ("ids", "lost", "unknown"))
    if lost or unknown:
        manifest.notes.append("this tokenizer does not keep the text exactly: scores per byte leave out what it drops "
                              f"({lost:,} documents, {unknown / n_ids:.2%} of the tokens are unknown)")


def _blocks(encoded: list[tuple[str, str, Encoded]], splits: dict[str, Any], manifest: Manifest
            ) -> Iterator[tuple[str, np.ndarray]]:
    """The ids of each split in blocks, with its name; its counts go into the manifest."""
    for name, (source, spans) in splits.items():
        manifest.splits[name] = Split()
        own = [(where, unit) for split, where, unit in encoded if split == source]
        for block in joined_ids(own, spans, manifest.dtype, manifest.splits[name]):
            yield name, block


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
