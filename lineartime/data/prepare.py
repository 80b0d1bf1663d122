"""Tokenise text once into shards. `tokens` describes the folder and reads it back."""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.atomic_io import (
    MAX_LINES_BYTES,
    hashed_file,
    read_bytes,
    remove_leftovers,
    unfinished_folder,
    write_atomically,
    written_aside,
)
from lineartime.config import TASKS
from lineartime.data import corpora
from lineartime.data.parts import PART_FILE, PART_VERSION, TextPart, ordered_parts, parse_part, read_part, share
from lineartime.data.pretrained import shipped_models, weights_folder
from lineartime.data.read_text import MAX_LINE_BYTES
from lineartime.data.splits import CheckedFile, Part, Reader, Slice, Source, divide, find_sources, pieces_of
from lineartime.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    require_vocab_size,
    train_tokenizer,
    with_tokens,
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
from lineartime.data.units import UNIT_CHARACTERS, Encoded, Unit, joined_ids, unit_file, units_of
from lineartime.data.workers import Run, reader_of, worker_pool
from lineartime.errors import DataError, ResourceError
from lineartime.settings import require, require_name

logger = logging.getLogger(__name__)

SAMPLE = Path(__file__).parents[1] / "text" / "jane_eyre.txt"
"""The book that ships with the package."""
JOURNAL = "units.jsonl"
"""In the unfinished folder: the tokenizer's hash, then a line for each unit that is done."""
Show = Callable[..., Iterator[Any]]


def prepare(inputs: Iterable[Path], out: Path, *, sample: bool = False, tokenizer: str | Path = "train",
            add_tokens: Path | None = None, vocab_size: int = 32_000, held_out: float | None = None,
            validation: Iterable[Path] = (), test: Iterable[Path] = (), field: str = "text", task: str | None = None,
            hub: bool = False, documents: int | None = None, mlm: bool = False, jobs: int | None = None,
            train_characters: int = 1 << 28,
            shard_tokens: int = 1 << 27, max_line_bytes: int = MAX_LINE_BYTES, part: str | None = None,
            unit_characters: int = UNIT_CHARACTERS,
            progress: Callable[[str, int, int | None], None] | None = None) -> Manifest:
    """Read text, train or load a tokenizer, and write the token shards of every split to the new folder `out`.

    inputs, validation, test: files or folders; `find_sources` finds the split of each file. sample: read the book that
    ships with the package instead of inputs. held_out: at least this fraction of the text becomes the validation split,
    as whole documents at equal distances over the input (`splits.spread_documents`); of a single document the last
    fraction of its characters, from the next line on if one begins within 65,536 characters. tokenizer: "train"
    (byte-level BPE of `vocab_size`, trained on at most about `train_characters` from evenly spread pieces of the train
    split), "bytes", the path of a tokenizer.json, or a run, a checkpoint, an exported folder or a shipped model that
    has one. add_tokens: a file of further tokens for it, see `with_tokens`. field: the JSON field or parquet column.
    task: one of the paper's data sets, which decides how its text is read (`corpora`). hub: read the task from the hub
    instead of inputs, of each split the first `documents`. mlm: add the tokens "[MASK]" and "[SEP]" to the tokenizer;
    the task "c4" implies it. jobs: processes that read and tokenise, by default one for each core that this process may
    use; they do not change the result. part: "2/8" prepares the second of eight shares of the files, for `join`; it
    takes a tokenizer that is there, and the manifest is not written. unit_characters: what a process takes at once, and
    what is done again after a kill; it does not change the result.
    progress is called with a description, the amount done and the total (None if unknown): files hashed and checked,
    characters tokenised, ids written.
    `out` appears only when it is complete. What a killed or interrupted call has tokenised stays in a hidden folder
    beside `out`, and the same call goes on from there. If `out` was prepared from the same text and settings it is
    verified and kept; text on the hub is not compared again.
    Raises UsageError, DataError (with file and line or byte) or ResourceError (disk)."""
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    require(held_out is None or 0 < held_out < 1, "wrong value", f"held_out = {held_out}", "it lies between 0 and 1")
    for name, value in (("jobs", jobs), ("train_characters", train_characters), ("shard_tokens", shard_tokens),
                        ("unit_characters", unit_characters),
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
        require(task is not None, "the hub has several data sets", "none is named",
                f"give --task, one of {', '.join(corpora.HUB)}")
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
        require(add_tokens is None, "tokens are added to a tokenizer that is there", str(add_tokens),
                "name it: --tokenizer RUN")
        settings |= {"tokenizer": "train", "vocab_size": vocab_size, "train_characters": train_characters}
    else:
        ready = byte_tokenizer(mlm=mlm) if tokenizer == "bytes" else load_tokenizer(tokenizer_file(tokenizer), mlm=mlm)
        ready = ready if add_tokens is None else with_tokens(ready, Path(add_tokens))
        settings["tokenizer"] = ready.sha256
    out, shared = Path(os.path.realpath(out)), None if part is None else parse_part(part)
    if shared:
        require(ready is not None, "a part needs a tokenizer that is there", f"--part {part}", "make one from some of "
                "the text with `lineartime prepare SOME --out DATA`, and name it: --tokenizer DATA/tokenizer.json")
        require(not hub, "the hub is not read in parts", f"--part {part}", "leave out --part")
    all_files = [[source.split, source.name] for source in sources]
    first = 0
    reading = {"field": "text" if hub else field, "max_line_bytes": max_line_bytes, "task": None if hub else task}
    reader = reader_of(reading)
    try:
        if shared:
            own = share([source.path.stat().st_size for source in sources], *shared)
            sources, first = sources[own.start:own.stop], own.start
        exists = out.exists() and not (out.is_dir() and not any(out.iterdir()))
        if hub and exists:
            return _already_prepared(out, settings, None)
        with contextlib.ExitStack() as stack:
            show = functools.partial(_shown, progress)
            if hub:
                asked = corpora.hub_files(settings["task"], out, documents=documents, field=field, show=show)
                sources = find_sources(stack.enter_context(asked))
            run = stack.enter_context(worker_pool(jobs))
            few = sum(source.path.stat().st_size for source in sources) < unit_characters
            hashes = dict(show("hashing", run([{"do": "hash", "path": str(source.path)} for source in sources], few),
                               len(sources)))
            hashed = [{"split": source.split, "name": source.name} | hashes[number]
                      for number, source in enumerate(sources)]
            manifest = Manifest(FORMAT_VERSION, settings, hashed, {}, "", shard_tokens, {}, 0, notes, {})
            if exists and shared:
                _require_same_part(out, (*shared, settings, all_files, hashed))
                return dataclasses.replace(manifest, already_prepared=True)
            if exists:
                return _already_prepared(out, settings, hashed)
            _refuse_shared_text(hashed)
            with unfinished_folder(out, JOURNAL) as folder:
                key = {"out": out.name, "settings": settings, "text": hashed, "part": part, "all": all_files,
                       "unit_characters": unit_characters} | ({} if held_out is None else {"held_out": "spread"})
                files = _resumed(folder, key, sources)
                if files is None:
                    tasks = [{"do": "check", "reading": reading, "slice_characters": unit_characters} | source._asdict()
                             | {"path": str(source.path)} for source in sources]
                    found = dict(show("checking", run(tasks, few), len(sources)))
                    files = [_checked_file(source, *found[number]) for number, source in enumerate(sources)]
                parts = {} if shared else divide(reader, files, held_out)
                _keep(folder, key, files)
                ready = _tokenizer(folder, ready, lambda: _trained(reader, parts["train"], vocab_size, train_characters,
                                                                   mlm, show))
                units = units_of(files, parts, unit_characters)
                encoded = _encode(folder, units, ready, reading, run, show)
                named = [(unit.split, encoded[unit.number]) for unit in units]
                if shared:
                    counts = [[file.documents, file.blank, file.characters] for file in files]
                    text_part = TextPart(PART_VERSION, *shared, settings, all_files, first, hashed, counts, notes,
                                         named)
                    write_atomically(folder / "units" / PART_FILE, text_part.to_json())
                    write_atomically(folder / "units" / TOKENIZER_FILE, ready.json)
                    os.rename(folder / "units", folder / "done")
                    _describe(manifest, ready)
                    for unit in units:
                        _add(manifest.splits.setdefault(unit.split, Split()), encoded[unit.number])
                    return manifest
                (folder / "done").mkdir()
                _write_folder(folder / "done", manifest, files, parts,
                              [(split, unit, folder / "units") for split, unit in named], ready, show)
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None
    return manifest


def tokenizer_file(name: str | Path) -> Path:
    """The tokenizer.json that a person names: by its path, or by the folder or the shipped model that it belongs to."""
    path = Path(name)
    if str(name) in shipped_models() or (path.is_dir() and not (path / TOKENIZER_FILE).is_file()):
        path = weights_folder(str(name))
    return path / TOKENIZER_FILE if path.is_dir() else path


def join(parts: Sequence[Path], out: Path, *,
         progress: Callable[[str, int, int | None], None] | None = None) -> Manifest:
    """Check all parts of a text (`prepare` with `part`) and join them in the new folder `out`, which is byte for byte
    what one `prepare` makes.

    progress as for `prepare`: ids written. Raises UsageError for parts that are missing, are there twice or do not
    belong together, DataError for damaged ones, ResourceError (disk)."""
    out, in_order = Path(os.path.realpath(out)), ordered_parts([Path(folder) for folder in parts])
    settings, notes = in_order[0][0].settings, list(in_order[0][0].notes)
    hashed = [source for part, _ in in_order for source in part.sources]
    files = [_checked_file(Source(source["split"], source["name"], Path(source["name"])), documents, blank, n, [])
             for part, _ in in_order
             for source, (documents, blank, n) in zip(part.sources, part.checked, strict=True)]
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            return _already_prepared(out, settings, hashed)
        _refuse_shared_text(hashed)
        one = sum(file.documents for file in files if file.source.split == "train") == 1
        require(not (one and settings["held_out"]), "a single document cannot be held out in parts", str(out),
                "prepare it without --part")
        tokenizer = load_tokenizer(in_order[0][1] / TOKENIZER_FILE)
        if tokenizer.sha256 != settings["tokenizer"]:
            raise DataError("damaged or missing file", in_order[0][1] / TOKENIZER_FILE, "prepare this part again")
        manifest = Manifest(FORMAT_VERSION, settings, hashed, {}, "", settings["shard_tokens"], {}, 0, notes, {})
        with written_aside(out) as folder:
            _write_folder(folder, manifest, files, divide(reader_of_nothing, files, settings["held_out"]),
                          [(split, unit, where) for part, where in in_order for split, unit in part.units], tokenizer,
                          functools.partial(_shown, progress))
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None
    return manifest


def reader_of_nothing(path: Path, **place: Any) -> Iterator[Any]:
    """The reader of parts, whose text is elsewhere."""
    raise AssertionError(path)


def _checked_file(source: Source, documents: int, blank: int, characters: int, slices: Iterable[Any]) -> CheckedFile:
    return CheckedFile(source, documents, blank, characters, [Slice(*one) for one in slices])


def _resumed(folder: Path, key: dict[str, Any], sources: list[Source]) -> list[CheckedFile] | None:
    """What was found of the files when the same call was cut off; None where there is nothing, and then the folder is
    emptied."""
    if (folder / "done" / PART_FILE).exists() and not (folder / "units").exists():
        os.rename(folder / "done", folder / "units")  # it was cut off between the last two steps
    shutil.rmtree(folder / "done", ignore_errors=True)
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        kept = json.loads(read_bytes(folder / "work.json", MAX_LINES_BYTES))
        if kept["key"] == json.loads(json.dumps(key)):
            return [_checked_file(source, *found) for source, found in zip(sources, kept["files"], strict=True)]
    for path in folder.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return None


def _keep(folder: Path, key: dict[str, Any], files: list[CheckedFile]) -> None:
    if not (folder / "work.json").exists():
        write_atomically(folder / "work.json", json.dumps({"key": key, "files": [file[1:] for file in files]}))


def _trained(reader: Reader, part: Part, vocab_size: int, train_characters: int, mlm: bool, show: Show) -> Tokenizer:
    n_train = sum(file.characters for file in part.files)
    every = -(-n_train // train_characters)
    sampled = itertools.islice(pieces_of(reader, part), 0, None, every)
    shown = show("training the tokenizer", sampled, n_train // every, lambda piece: len(piece.text))
    texts = itertools.chain((piece.text for piece in shown), show("learning its vocabulary", (), vocab_size))
    return train_tokenizer(texts, vocab_size, mlm=mlm)  # the last takes as long as reading


def _tokenizer(folder: Path, ready: Tokenizer | None, train: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer of the journal, or the one that is ready, or a trained one; then the journal begins anew."""
    path, journal = folder / TOKENIZER_FILE, folder / JOURNAL
    lines = _journal(journal)
    if lines and path.exists():
        with contextlib.suppress(DataError):
            kept = load_tokenizer(path)
            if kept.sha256 == lines[0].get("tokenizer") and (ready is None or ready.sha256 == kept.sha256):
                return ready or kept
    ready = ready or train()
    write_atomically(path, ready.json)
    shutil.rmtree(folder / "units", ignore_errors=True)
    write_atomically(journal, json.dumps({"tokenizer": ready.sha256}) + "\n")
    return ready


def _journal(path: Path) -> list[dict[str, Any]]:
    """The lines of the journal up to the first that is incomplete."""
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, RecursionError):
        for line in read_bytes(path, MAX_LINES_BYTES).splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            lines.append(json.loads(line))
    return lines


def _encode(folder: Path, units: list[Unit], tokenizer: Tokenizer, reading: dict[str, Any], run: Run,
            show: Show) -> dict[int, Encoded]:
    """Tokenise the units that are not done yet; returns all of them by their numbers."""
    first, *lines = _journal(folder / JOURNAL)
    where = folder / "units"
    where.mkdir(exist_ok=True)
    done: dict[int, Encoded] = {}
    for line in lines:
        unit = Encoded(**line)
        with contextlib.suppress(OSError):
            if all(unit_file(where, unit.number, kind).stat().st_size == file["bytes"]
                   for kind, file in unit.files.items()):
                done[unit.number] = unit
    for path in where.iterdir():
        if path.suffix not in (".ids", ".rows"):  # of a process that was killed
            path.unlink()
    write_atomically(folder / JOURNAL, "".join(json.dumps(line) + "\n" for line in (
        first, *(dataclasses.asdict(unit) for unit in done.values()))))
    left = [unit for unit in units if unit.number not in done]
    made = {"path": str(folder / TOKENIZER_FILE), "sha256": tokenizer.sha256, "name": tokenizer.name,
            "dtype": _dtype(tokenizer)}
    tasks = [{"do": "encode", "reading": reading, "unit": dataclasses.asdict(unit), "tokenizer": made,
              "folder": str(where)} for unit in left]
    results = itertools.chain(((unit, None) for unit in units if unit.number in done),
                              ((left[number], result) for number, result in run(tasks, False)))
    total = sum(unit.characters for unit in units)
    with (folder / JOURNAL).open("ab") as journal:
        for unit, result in show("tokenising", results, total, lambda item: item[0].characters):
            if result is None:
                continue
            pid = result.pop("pid")
            for kind in result["files"]:
                path = unit_file(where, unit.number, kind)
                os.replace(path.with_name(f"{path.name}.{pid}"), path)
            journal.write(json.dumps(result).encode() + b"\n")
            journal.flush()
            os.fsync(journal.fileno())
            done[unit.number] = Encoded(**result)
    return done


def _describe(manifest: Manifest, tokenizer: Tokenizer) -> None:
    manifest.tokenizer = {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
                          "end_of_document": tokenizer.end_of_document}
    if tokenizer.mask is not None:
        manifest.tokenizer |= {"mask": tokenizer.mask, "separator": tokenizer.separator, "special": tokenizer.special}
    manifest.dtype = _dtype(tokenizer)


def _add(split: Split, unit: Encoded) -> None:
    split.documents += unit.rows - unit.open
    split.tokens += unit.ids
    split.words += unit.words
    split.bytes += unit.bytes


def _dtype(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"


def _add_notes(manifest: Manifest, tokenizer: Tokenizer, keeps: bool) -> None:
    asked = manifest.settings.get("vocab_size", 0)
    if tokenizer.vocab_size < asked:
        manifest.notes.append(f"the text gave a vocabulary of {tokenizer.vocab_size:,} of the {asked:,} asked for")
    if manifest.blank_documents:
        manifest.notes.append(f"{manifest.blank_documents:,} documents are white space only and were left out")
    if not keeps:
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


def _require_same_part(out: Path, asked: tuple[Any, ...]) -> None:
    remove_leftovers(out)
    require((out / PART_FILE).is_file(), "the output exists and is not a part", str(out), "choose another")
    part = read_part(out)
    require((part.number, part.of, part.settings, part.files, part.sources) == asked,
            "the output was prepared differently", str(out), "choose another or delete it")


def _write_folder(folder: Path, manifest: Manifest, files: list[CheckedFile], parts: dict[str, Part],
                  units: list[tuple[str, Encoded, Path]], tokenizer: Tokenizer, show: Show) -> None:
    """Write all files from the units, with their splits and folders, and complete the manifest."""
    _describe(manifest, tokenizer)
    manifest.blank_documents = sum(file.blank for file in files)
    with hashed_file(folder / TOKENIZER_FILE, manifest.files) as write:
        write(tokenizer.json.encode())

    def ids() -> Iterator[tuple[str, np.ndarray]]:
        for name, part in parts.items():
            own = [(unit, where) for split, unit, where in units
                   if split == (name if part.unit == "characters" else part.files[0].source.split)]
            yield from ((name, block) for block in joined_ids(own, part, manifest.dtype, manifest.splits[name]))

    manifest.splits = {name: Split() for name in parts}
    shown = show("writing", ids(), sum(unit.ids for _, unit, _ in units), lambda item: len(item[1]))
    for name, group in itertools.groupby(shown, key=lambda item: item[0]):
        manifest.splits[name].tokens = _write_split(folder, name, (block for _, block in group), manifest)
    first = next(name for name in parts)
    split = first if parts[first].unit == "characters" else parts[first].files[0].source.split
    if manifest.settings.get("held_out"):
        train, held = (manifest.splits[name] for name in ("train", "validation"))
        what = ("the end of the only document" if parts["validation"].unit == "characters" else
                f"{held.documents:,} of {held.documents + train.documents:,} documents, at equal distances")
        logger.info(f"held out    {what}: {held.tokens / (held.tokens + train.tokens):.1%} of the tokens")
    _add_notes(manifest, tokenizer, next(unit.keeps for of, unit, _ in units if of == split and unit.rows))
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
