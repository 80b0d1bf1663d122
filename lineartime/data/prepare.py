"""Tokenise text once into shards. `tokens` describes the folder and reads it back."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.atomic_io import hash_of, hashed_file, remove_leftovers, written_aside
from lineartime.config import TASKS
from lineartime.data import corpora
from lineartime.data.read_text import MAX_LINE_BYTES, PIECE, Piece, read_pieces
from lineartime.data.splits import Part, Reader, Source, check_source, divide, find_sources, pieces_of
from lineartime.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    require_vocab_size,
    train_tokenizer,
)
from lineartime.data.tokens import (
    DATA_MANIFEST,
    FORMAT_VERSION,
    Manifest,
    Split,
    read_manifest,
    shard_name,
    verify_file,
)
from lineartime.errors import DataError, ResourceError
from lineartime.settings import require, require_name

SAMPLE = Path(__file__).parents[1] / "text" / "jane_eyre.txt"
"""The book that ships with the package."""


def prepare(inputs: Iterable[Path], out: Path, *, sample: bool = False, tokenizer: str | Path = "train",
            vocab_size: int = 32_000, held_out: float | None = None, validation: Iterable[Path] = (),
            test: Iterable[Path] = (), field: str = "text", task: str | None = None, hub: bool = False,
            documents: int | None = None, mlm: bool = False, jobs: int | None = None, train_characters: int = 1 << 28,
            shard_tokens: int = 1 << 27, max_line_bytes: int = MAX_LINE_BYTES,
            progress: Callable[[str, int, int | None], None] | None = None) -> Manifest:
    """Read text, train or load a tokenizer, and write the token shards of every split to the new folder `out`.

    inputs, validation, test: files or folders; `find_sources` finds the split of each file. sample: read the book that
    ships with the package instead of inputs. held_out: the last fraction of the documents, at least one, becomes the
    validation split; of a single document the last fraction of its characters, from the next line on if one begins
    within 65,536 characters. tokenizer: "train" (byte-level BPE of `vocab_size`, trained on at most about
    `train_characters` from evenly spread pieces of the train split), "bytes", or the path of a tokenizer.json. field:
    the JSON field or parquet column. task: one of the paper's data sets, which decides how its text is read
    (`corpora`). hub: read the task from the hub instead of inputs, of each split the first `documents`. mlm: add the
    tokens "[MASK]" and "[SEP]" to the tokenizer; the task "c4" implies it. jobs: threads that tokenise, by default one
    per core; they do not change the result. progress is called with a description, the amount done and the total (None
    if unknown): files hashed and checked, characters tokenised.
    `out` appears only when it is complete. If `out` was prepared from the same text and settings it is verified and
    kept; text on the hub is not compared again.
    Raises UsageError, DataError (with file and line or byte) or ResourceError (disk)."""
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    require(held_out is None or 0 < held_out < 1, "wrong value", f"held_out = {held_out}", "it lies between 0 and 1")
    for name, value in (("jobs", jobs), ("train_characters", train_characters), ("shard_tokens", shard_tokens),
                        ("max_line_bytes", max_line_bytes), ("documents", 1 if documents is None else documents)):
        require(value >= 1, "wrong value", f"{name} = {value}", "it takes 1 or more")
    inputs, validation, test, mlm = list(inputs), list(validation), list(test), mlm or task == "c4"
    settings: dict[str, Any] = {"held_out": held_out, "field": field, "shard_tokens": shard_tokens}
    settings |= {"mlm": True} if mlm else {}
    sources: list[Source] = []
    if task is not None:
        require_name("task", task, TASKS)
        settings["task"] = task
    if hub:
        require(task is not None, "no data set is named", "hub", f"name the task: {', '.join(corpora.HUB)}")
        require(not (inputs or sample or validation or test or held_out), "wrong inputs", "the hub and others",
                "a data set of the hub comes with its splits")
        settings |= {"hub": corpora.HUB[settings["task"]][0], "documents": documents}
    else:
        require(documents is None, "only the hub is read in part", f"documents = {documents}", "leave it out")
        require(sample != bool(inputs), "wrong inputs", f"{len(inputs)} and the sample" if sample else "there are none",
                "name files or folders, or ask for the sample")
        sources = find_sources([SAMPLE] if sample else inputs, validation, test,
                               preferred=corpora.PREFERRED.get(task or ""))
        require(held_out is None or all(source.split != "validation" for source in sources), "two validation splits",
                f"held_out = {held_out}", "the inputs have one already; leave out held_out")
    notes = corpora.check_kinds(task, sources)
    ready = None
    if tokenizer == "train":
        require_vocab_size(vocab_size, mlm=mlm)
        settings |= {"tokenizer": "train", "vocab_size": vocab_size, "train_characters": train_characters}
    else:
        ready = byte_tokenizer(mlm=mlm) if tokenizer == "bytes" else load_tokenizer(Path(tokenizer), mlm=mlm)
        settings["tokenizer"] = ready.sha256
    out = Path(os.path.realpath(out))
    reader = functools.partial(read_pieces, field="text" if hub else field, max_line_bytes=max_line_bytes,
                               convert=None if hub else corpora.converter(task))
    try:
        exists = out.exists() and not (out.is_dir() and not any(out.iterdir()))
        if hub and exists:
            return _already_prepared(out, settings, None)
        with contextlib.ExitStack() as stack:
            show = functools.partial(_shown, progress)
            if hub:
                asked = corpora.hub_files(settings["task"], out, documents=documents, field=field, show=show)
                sources = find_sources(stack.enter_context(asked))
            hashed = [{"split": source.split, "name": source.name} | hash_of(source.path)
                      for source in show("hashing", sources, len(sources))]
            if exists:
                return _already_prepared(out, settings, hashed)
            _refuse_shared_text(hashed)
            files = [check_source(reader, source) for source in show("checking", sources, len(sources))]
            parts = divide(reader, files, held_out)
            n_characters = sum(file.characters for file in files)
            with written_aside(out) as folder:
                manifest = Manifest(FORMAT_VERSION, settings, hashed, {}, "", shard_tokens, {}, 0, notes, {})
                manifest.blank_documents = sum(file.blank for file in files)
                if ready is None:
                    n_train = sum(file.characters for file in parts["train"].files)
                    every = -(-n_train // train_characters)
                    sampled = itertools.islice(pieces_of(reader, parts["train"]), 0, None, every)
                    shown = show("training the tokenizer", sampled, n_train // every, lambda piece: len(piece.text))
                    ready = train_tokenizer((piece.text for piece in shown), vocab_size, mlm=mlm)
                _write_folder(folder, manifest, reader, parts, ready, jobs, n_characters, show)
                _add_notes(manifest, ready, next(pieces_of(reader, parts["train"])).text)
                (folder / DATA_MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None
    return manifest


def _add_notes(manifest: Manifest, tokenizer: Tokenizer, text: str) -> None:
    asked = manifest.settings.get("vocab_size", 0)
    if tokenizer.vocab_size < asked:
        manifest.notes.append(f"the text gave a vocabulary of {tokenizer.vocab_size:,} of the {asked:,} asked for")
    if manifest.blank_documents:
        manifest.notes.append(f"{manifest.blank_documents:,} documents are white space only and were left out")
    if tokenizer.decode(tokenizer.encode(text)) != text:
        manifest.notes.append("this tokenizer does not keep the text exactly: scores per byte leave out what it drops")


def _refuse_shared_text(sources: list[dict[str, Any]]) -> None:
    seen: dict[str, dict[str, Any]] = {}
    for source in sources:
        first = seen.setdefault(source["sha256"], source)
        if first["split"] != source["split"]:
            where = f"{first['name']} of {first['split']} and {source['name']} of {source['split']}"
            raise DataError("the same text in two splits", where, "take it out of one")


def _already_prepared(out: Path, settings: dict[str, Any], sources: list[dict[str, Any]] | None) -> Manifest:
    remove_leftovers(out)
    require((out / DATA_MANIFEST).is_file(), "the output exists and is not a prepared folder", str(out),
            "choose another")
    manifest = read_manifest(out)
    old, new = manifest.settings | {"text": manifest.sources}, settings | {"text": sources or manifest.sources}
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    how = [name if name == "text" else f"{name} {old.get(name)} -> {new.get(name)}" for name in changed]
    require(not how, "the output was prepared differently", f"{out} ({', '.join(how)})", "choose another or delete it")
    for name in manifest.files:
        verify_file(out, manifest, name)
    return dataclasses.replace(manifest, already_prepared=True)


def _write_folder(folder: Path, manifest: Manifest, reader: Reader, parts: dict[str, Part], tokenizer: Tokenizer,
                  jobs: int, n_characters: int, show: Callable[..., Iterator[Any]]) -> None:
    """Write all files but the manifest, and complete the manifest's fields."""
    manifest.tokenizer = {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
                          "end_of_document": tokenizer.end_of_document}
    if tokenizer.mask is not None:
        manifest.tokenizer |= {"mask": tokenizer.mask, "separator": tokenizer.separator, "special": tokenizer.special}
    manifest.dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    with hashed_file(folder / TOKENIZER_FILE, manifest.files) as write:
        write(tokenizer.json.encode())
    all_pieces = ((name, piece) for name, part in parts.items() for piece in pieces_of(reader, part))
    shown = show("tokenising", all_pieces, n_characters, lambda item: len(item[1].text))
    for name, group in itertools.groupby(shown, key=lambda item: item[0]):
        split = manifest.splits[name] = Split()
        pieces = _counted((piece for _, piece in group), split)
        ids = _encode(pieces, tokenizer, manifest.dtype, jobs)
        split.tokens = _write_split(folder, name, ids, manifest)


def _counted(pieces: Iterable[Piece], split: Split) -> Iterator[Piece]:
    in_word = False
    for text, last in pieces:
        split.documents += last
        split.words += len(text.split()) - (in_word and not text[0].isspace())
        split.bytes += len(text.encode())
        in_word = not last and not text[-1].isspace()
        yield Piece(text, last)


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: str, jobs: int) -> Iterator[np.ndarray]:
    """The ids of all pieces in order, an end-of-document token after each document, encoded by `jobs` threads.

    Threads, not processes: the tokenizer releases the interpreter's lock, and threads end with a killed run."""

    def encode(batch: list[Piece]) -> np.ndarray:
        ids: list[int] = []
        for text, last in batch:
            ids += tokenizer.encode(text)
            if last:
                ids.append(tokenizer.end_of_document)
        if ids.count(tokenizer.end_of_document) != sum(last for _, last in batch):
            raise DataError("the tokenizer reads its end-of-document token out of text", repr(batch[0].text[:40]))
        if tokenizer.mask is not None and (tokenizer.mask in ids or tokenizer.separator in ids):
            raise DataError("the tokenizer reads [MASK] or [SEP] out of text", repr(batch[0].text[:40]))
        return np.array(ids, dtype=dtype)

    with ThreadPoolExecutor(jobs) as pool:
        waiting: deque[Future[np.ndarray]] = deque()
        try:
            for batch in _batches(pieces):
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > 2 * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces, half a full piece or more together."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= PIECE // 2:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_split(folder: Path, name: str, arrays: Iterable[np.ndarray], manifest: Manifest) -> int:
    """Write one split's shards and document positions; returns the number of targets."""
    end_of_document = manifest.tokenizer["end_of_document"]
    n_ids = 0
    documents = folder / f"{name}-documents.bin"
    with contextlib.ExitStack() as shard, hashed_file(documents, manifest.files) as write_positions:
        for ids in itertools.chain([np.array([end_of_document], manifest.dtype)], arrays):
            write_positions((np.flatnonzero(ids == end_of_document) + n_ids).astype("<u8").tobytes())
            while len(ids):
                if n_ids % manifest.shard_tokens == 0:
                    shard.close()
                    path = folder / shard_name(name, n_ids // manifest.shard_tokens)
                    write = shard.enter_context(hashed_file(path, manifest.files))
                fitting = ids[:manifest.shard_tokens - n_ids % manifest.shard_tokens]
                write(fitting.tobytes())
                n_ids += len(fitting)
                ids = ids[len(fitting):]
    return n_ids - 1


def _shown(progress: Callable[[str, int, int | None], None] | None, what: str, items: Iterable[Any],
           total: int | None, amount: Callable[[Any], int] = lambda item: 1) -> Iterator[Any]:
    """Pass the items on, and report to `progress` the sum of the amounts of the items done."""
    done = 0
    if progress is not None:
        progress(what, done, total)
    for item in items:
        yield item
        done += amount(item)
        if progress is not None:
            progress(what, done, total)
