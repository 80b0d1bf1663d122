"""Tokenise text once into shards. `tokens` describes the folder and reads it back.

`prepare` finds the files and their splits, hashes and checks them, trains the tokenizer, tokenises units of text in
several processes, and joins them into the shards of each split."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.atomic_io import hash_of, hashed_file, read_bytes, remove_leftovers, unfinished_folder, written_aside
from lineartime.data import corpora
from lineartime.data.hub import hub_files
from lineartime.data.parts import TextPart, first_part, ordered_parts, require_same_part, write_part
from lineartime.data.prepare_config import DEFAULT_VOCAB_SIZE, PrepareSettings
from lineartime.data.slices import CheckedFile, Part, Reading, Slice, check_file, divide, hold_out, texts_of
from lineartime.data.splits import Source, find_sources
from lineartime.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    require_vocab_size,
    train_tokenizer,
    with_tokens,
)
from lineartime.data.tokens import DATA_MANIFEST, Manifest, Split, read_manifest, shard_name, verify_file
from lineartime.data.units import FINISHED, UNITS, Encoded, encode_unit, joined_ids, units_of
from lineartime.data.workers import Run, worker_pool
from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.run_config import shipped_models, weights_folder
from lineartime.settings import require

logger = logging.getLogger(__name__)

SAMPLE = Path(__file__).parents[1] / "text" / "jane_eyre.txt"
"""The book that ships with the package."""
Progress = Callable[[str, int, int | None], None]
"""Takes a description, the amount done, and the total (None if unknown)."""
Show = Callable[..., Iterator[Any]]
"""`_shown` for some `progress`."""


def prepare(inputs: Iterable[Path | str], out: Path | str, *, progress: Progress | None = None,
            **options: Any) -> Manifest:
    """Read text, train or load a tokenizer, and write the token shards of every split to the new folder `out`.

    inputs: files or folders; `find_sources` finds the split of each file. options: the other fields of
    `PrepareSettings`. progress: called with files hashed and checked, characters tokenised, ids written.
    Raises as `prepare_text` does."""
    options |= {name: tuple(map(Path, options[name])) for name in ("validation", "test") if name in options}
    return prepare_text(PrepareSettings(tuple(map(Path, inputs)), Path(out), **options), progress)


def prepare_text(asked: PrepareSettings, progress: Progress | None = None) -> Manifest:
    """`prepare` for settings.

    `out` appears only when it is complete. The units of text that a killed or interrupted call has tokenised stay in a
    hidden folder beside `out`, and the same call does not make them again. If `out` was prepared from the same text and
    settings it is verified and kept; text on the hub is not compared again. The numbers of processes and of characters
    in a unit do not change a byte.
    Raises UsageError, DataError (with file and line or byte) or ResourceError (disk)."""
    sources = [] if asked.hub else find_text(asked)
    ready = ready_tokenizer(asked)
    manifest = Manifest(manifest_settings(asked, ready), shard_tokens=asked.shard_tokens,
                        notes=_unread_notes(asked.task, sources))
    out, show = Path(os.path.realpath(asked.out)), functools.partial(_shown, progress)
    with _disk_errors(out), contextlib.ExitStack() as stack:
        if exists := _is_taken(out):
            remove_leftovers(out)
        if asked.hub:
            if exists:
                return _already_prepared(out, manifest.settings, None)
            downloaded = hub_files(str(asked.task), out, documents=asked.documents, field=asked.field, show=show)
            sources = find_sources(stack.enter_context(downloaded))
        part = None
        if asked.share:
            part, sources = first_part(*asked.share, manifest, sources)
        run = stack.enter_context(worker_pool(asked.n_jobs))
        few = sum(source.path.stat().st_size for source in sources) < asked.unit_characters
        hashes = show("hashing", run(hash_of, [(str(source.path),) for source in sources], few), len(sources))
        manifest.sources = [{"split": source.split, "name": source.name} | each
                            for source, each in zip(sources, hashes, strict=True)]
        if exists and part:
            require_same_part(out, part, manifest)
            return dataclasses.replace(manifest, already_prepared=True)
        if exists:
            return _already_prepared(out, manifest.settings, manifest.sources)
        _refuse_shared_text(manifest.sources)
        with unfinished_folder(out, worth=UNITS) as folder:
            shutil.rmtree(folder / "done", ignore_errors=True)  # of a call that was killed while it wrote
            # All text is read once before anything is written, so that its faults are found first.
            tasks = [(str(source.path), source.split, _reading(asked), asked.unit_characters) for source in sources]
            found = list(show("checking", run(check_file, tasks, few), len(sources)))
            files = [CheckedFile(*each)._replace(slices=[Slice(*one) for one in each[-1]]) for each in found]
            _make(folder, asked, files, ready, manifest, part, run, show)
    return manifest


def find_text(asked: PrepareSettings) -> list[Source]:
    """The files of text, with their splits. Raises as `find_sources` does, and UsageError for two validation splits and
    for a format that the task does not have."""
    sources = find_sources([SAMPLE] if asked.sample else asked.inputs, asked.validation, asked.test, task=asked.task)
    require(asked.held_out is None or all(source.split != "validation" for source in sources), "two validation splits",
            f"held_out = {asked.held_out}", "the inputs have one already; leave out held_out")
    for source in sources:
        if asked.task == "wiki40b" and source.path.name.lower().endswith(".txt"):
            raise UsageError("Wiki-40B is not .txt", source.path, "name .parquet or .jsonl.gz, or leave out the task")
    return sources


def _unread_notes(task: str | None, sources: list[Source]) -> list[str]:
    """What to say of copies in other formats that were left out."""
    unread = sorted({ending for source in sources for ending in source.unread})
    return [f"{' and '.join(unread)} files lie beside the .parquet files and were not read"] if unread and task else []


def ready_tokenizer(asked: PrepareSettings) -> Tokenizer | None:
    """The tokenizer that is asked for; None for one that is to be trained on the text."""
    if asked.tokenizer == "train":
        require_vocab_size(asked.vocab_size or DEFAULT_VOCAB_SIZE, mlm=asked.is_masked)
        return None
    ready = (byte_tokenizer(mlm=asked.is_masked) if asked.tokenizer == "bytes" else
             load_tokenizer(tokenizer_file(asked.tokenizer), mlm=asked.is_masked))
    return ready if asked.add_tokens is None else with_tokens(ready, Path(asked.add_tokens))


def tokenizer_file(name: str | Path) -> Path:
    """The tokenizer.json that a person names: by its path, or by the folder or the shipped model that it belongs to."""
    path = Path(name)
    if str(name) in shipped_models() or (path.is_dir() and not (path / TOKENIZER_FILE).is_file()):
        path = weights_folder(str(name))
    return path / TOKENIZER_FILE if path.is_dir() else path


def manifest_settings(asked: PrepareSettings, ready: Tokenizer | None) -> dict[str, Any]:
    """The settings that decide what is written, as the manifest has them."""
    settings: dict[str, Any] = {"held_out": asked.held_out, "field": asked.field, "shard_tokens": asked.shard_tokens}
    if asked.is_masked:
        settings["mlm"] = True
    if asked.task is not None:
        settings["task"] = asked.task
    if asked.hub:
        settings |= {"hub": corpora.HUB[settings["task"]][0], "documents": asked.documents}
    if ready is None:
        return settings | {"tokenizer": "train", "vocab_size": asked.vocab_size or DEFAULT_VOCAB_SIZE,
                           "train_characters": asked.train_characters}
    return settings | {"tokenizer": ready.sha256}


def join(parts: Sequence[Path], out: Path, *, progress: Progress | None = None) -> Manifest:
    """Check all parts of a text (`prepare` with `part`) and join them in the new folder `out`, which is byte for byte
    what one `prepare` makes.

    progress as for `prepare`: ids written. Raises UsageError for parts that are missing, are there twice or do not
    belong together, DataError for damaged ones, ResourceError (disk)."""
    out, in_order = Path(os.path.realpath(out)), ordered_parts([Path(folder) for folder in parts])
    settings = in_order[0][0].settings
    manifest = Manifest(settings, [source for part, _ in in_order for source in part.sources],
                        shard_tokens=settings["shard_tokens"], notes=list(in_order[0][0].notes))
    files = [CheckedFile(source["name"], source["split"], documents, blank, n, [])
             for part, _ in in_order
             for source, (documents, blank, n) in zip(part.sources, part.checked, strict=True)]
    with _disk_errors(out):
        if _is_taken(out):
            remove_leftovers(out)
            return _already_prepared(out, settings, manifest.sources)
        _refuse_shared_text(manifest.sources)
        one = sum(file.documents for file in files if file.split == "train") == 1
        require(not (one and settings["held_out"]), "a single document cannot be held out in parts", str(out),
                "prepare it without --part")
        tokenizer = load_tokenizer(in_order[0][1] / TOKENIZER_FILE)
        if tokenizer.sha256 != settings["tokenizer"]:
            raise DataError("damaged or missing file", in_order[0][1] / TOKENIZER_FILE, "prepare this part again")
        _describe(manifest, tokenizer, files)
        units = [(split, unit, folder) for part, folder in in_order for split, unit in part.units]
        with written_aside(out) as folder:
            _write_folder(folder, manifest, divide(files, settings["held_out"]), units, tokenizer,
                          functools.partial(_shown, progress))
    return manifest


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """Inside the block, an OSError is a ResourceError."""
    try:
        yield
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None


def _is_taken(out: Path) -> bool:
    """Whether something is at `out`; an empty folder is nothing."""
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _reading(asked: PrepareSettings) -> Reading:
    """How files are read. What comes from the hub is text already."""
    return {"field": "text" if asked.hub else asked.field, "max_line_bytes": asked.max_line_bytes,
            "task": None if asked.hub else asked.task}


def _make(folder: Path, asked: PrepareSettings, files: list[CheckedFile], ready: Tokenizer | None,
          manifest: Manifest, part: TextPart | None, run: Run, show: Show) -> None:
    """Tokenise all text into units in `folder`, and make its subfolder `done` of them; complete the manifest, or the
    part."""
    reading = _reading(asked)
    n_train = sum(file.characters for file in files if file.split == "train" and file.documents)
    whole, files = files, files if part else hold_out(files, asked.held_out, reading)
    parts = {} if part else divide(files, asked.held_out)
    tokenizer = ready or _trained(texts_of(files, parts["train"], reading), n_train, asked, show)
    _describe(manifest, tokenizer, whole)
    encoded = _encode(folder, files, asked, tokenizer, manifest, run, show)
    if part:
        write_part(folder / UNITS, part, files, encoded, manifest, tokenizer)
        os.rename(folder / UNITS, folder / "done")
        return
    (folder / "done").mkdir()
    _write_folder(folder / "done", manifest, parts, [(split, unit, folder / UNITS) for split, unit in encoded],
                  tokenizer, show)


def _trained(texts: Iterator[str], n_characters: int, asked: PrepareSettings, show: Show) -> Tokenizer:
    """A tokenizer that is trained on pieces at equal distances."""
    vocab_size = asked.vocab_size or DEFAULT_VOCAB_SIZE
    every = -(-n_characters // asked.train_characters)
    shown = show("training the tokenizer", itertools.islice(texts, 0, None, every), n_characters // every, len)
    learning = show("learning its vocabulary", (), vocab_size)  # this takes as long as reading
    return train_tokenizer(itertools.chain(shown, learning), vocab_size, mlm=asked.is_masked)


def _encode(folder: Path, files: list[CheckedFile], asked: PrepareSettings, tokenizer: Tokenizer, manifest: Manifest,
            run: Run, show: Show) -> list[tuple[str, Encoded]]:
    """Tokenise all units into subfolders of `folder`; returns their splits and descriptions. Those that a call for the
    same text and tokenizer has finished are kept."""
    units, begun = units_of(files, asked.unit_characters), folder / "begun"
    described = [manifest.settings, manifest.sources, tokenizer.sha256, units]
    key = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    if not begun.exists() or read_bytes(begun) != key.encode():
        for name in (UNITS, FINISHED):
            shutil.rmtree(folder / name, ignore_errors=True)
        begun.write_text(key)
    for name in (UNITS, FINISHED):
        (folder / name).mkdir(exist_ok=True)
    (folder / TOKENIZER_FILE).write_text(tokenizer.json, encoding="utf-8")
    tasks = [(number, unit.slices, _reading(asked), str(folder), tokenizer.sha256, tokenizer.name)
             for number, unit in enumerate(units)]
    shown = show("tokenising", zip(units, run(encode_unit, tasks), strict=True),
                 sum(unit.characters for unit in units), lambda item: item[0].characters)
    return [(unit.split, Encoded(**fields)) for unit, fields in shown]


def _describe(manifest: Manifest, tokenizer: Tokenizer, files: list[CheckedFile]) -> None:
    """Put into the manifest what is known before the text is tokenised."""
    manifest.tokenizer = {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
                          "end_of_document": tokenizer.end_of_document}
    if tokenizer.mask is not None:
        manifest.tokenizer |= {"mask": tokenizer.mask, "separator": tokenizer.separator, "special": tokenizer.special}
    manifest.dtype = tokenizer.dtype
    manifest.blank_documents = sum(file.blank for file in files)
    asked, n_empty = manifest.settings.get("vocab_size", 0), sum(file.documents + file.blank == 0 for file in files)
    if tokenizer.vocab_size < asked:
        manifest.notes.append(f"the text gave a vocabulary of {tokenizer.vocab_size:,} of the {asked:,} asked for")
    if n_empty:
        manifest.notes.append(f"{n_empty:,} files have no documents and were left out")
    if manifest.blank_documents:
        manifest.notes.append(f"{manifest.blank_documents:,} documents are white space only and were left out")


def _refuse_shared_text(sources: list[dict[str, Any]]) -> None:
    seen: dict[str, dict[str, Any]] = {}
    for source in sources:
        first = seen.setdefault(source["sha256"], source)
        if first["split"] != source["split"]:
            where = f"{first['name']} of {first['split']} and {source['name']} of {source['split']}"
            raise DataError("the same text in two splits", where, "take it out of one")


def _already_prepared(out: Path, settings: dict[str, Any], sources: list[dict[str, Any]] | None) -> Manifest:
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


def _write_folder(folder: Path, manifest: Manifest, parts: dict[str, Part], units: list[tuple[str, Encoded, Path]],
                  tokenizer: Tokenizer, show: Show) -> None:
    """Write all files from the units, with their splits and folders, and complete the manifest."""
    with hashed_file(folder / TOKENIZER_FILE, manifest.files) as write:
        write(tokenizer.json.encode())
    manifest.splits = {name: Split() for name in parts}
    blocks = ((name, block) for name, part in parts.items()
              for block in joined_ids([(unit, where) for split, unit, where in units if split == part.source],
                                      part.spans, manifest.dtype, manifest.splits[name]))
    shown = show("writing", blocks, sum(unit.ids for _, unit, _ in units), lambda item: len(item[1]))
    for name, group in itertools.groupby(shown, key=lambda item: item[0]):
        manifest.splits[name].tokens = _write_split(folder, name, (block for _, block in group), manifest)
    if manifest.settings.get("held_out"):
        train, held = (manifest.splits[name] for name in ("train", "validation"))
        what = ("the end of the only document" if parts["validation"].source == "validation" else
                f"{held.documents:,} of {held.documents + train.documents:,} documents, at equal distances")
        logger.info(f"held out    {what}: {held.tokens / (held.tokens + train.tokens):.1%} of the tokens")
    first = parts[next(iter(parts))].source
    keeps = next(unit.keeps for split, unit, _ in units if split == first and unit.rows)
    if not keeps or any(unit.unknown for _, unit, _ in units):
        manifest.notes.append("this tokenizer does not keep the text exactly: scores per byte leave out what it drops")
    (folder / DATA_MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


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


def _shown(progress: Progress | None, what: str, items: Iterable[Any],
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
