"""Tokenise text once into shards, in several processes; `tokens` reads them."""

import contextlib
import dataclasses
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar

import numpy as np

from lineartime.base.errors import DataError, ResourceError
from lineartime.base.files import clear_leftovers, hashed_stream, new_folder, system_errors
from lineartime.base.settings import require
from lineartime.base.stores import exists, hash_of, is_address, is_empty, uploaded
from lineartime.base.words import Progress
from lineartime.data.prepare_config import DEFAULT_VOCAB_SIZE, PrepareSettings
from lineartime.data.read_text import Read, read_pieces
from lineartime.data.sources import Source, copies_named, find_text, in_order
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, named_tokenizer, train_tokenizer
from lineartime.data.tokens import DATA_MANIFEST, Manifest, Split, read_manifest, shard_name, verify_data
from lineartime.data.units import ROW, Encoded, Unit, cut_document, documents_of, encode_unit, row_of, units_of

T = TypeVar("T")
logger = logging.getLogger(__name__)

BLOCK_IDS = 1 << 21  # ids that are in memory at once when units are joined


def prepare(inputs: Iterable[Path | str] | Path, out: Path | str, *, progress: Progress | None = None,
            **options: Any) -> Manifest:
    """Read text, train or load a tokenizer, and write the tokens of every split to `out`. inputs:
    files or folders, see `find_sources`. options: other fields of `PrepareSettings`. progress: told
    of files hashed, bytes tokenised, ids written. Raises as `prepare_text` does."""
    given = {"inputs": inputs, "out": out, "tokenizer": "train"} | options
    for name in ("inputs", "validation", "test"):
        names = given.get(name, ())
        given[name] = (str(names),) if isinstance(names, str | Path) else tuple(map(str, names))
    return prepare_text(PrepareSettings(**given | {name: str(given[name]) for name in ("out", "tokenizer")}), progress)


def prepare_text(settings: PrepareSettings, progress: Progress | None = None) -> Manifest:
    """`prepare` for settings. `out` appears only when it is complete; after a kill the same call
    begins again. If it was prepared from the same text and settings it is verified and kept; text
    that is all on the hub is not compared again. The number of processes does not change a byte.
    Raises UsageError, DataError (with file and line or byte) or ResourceError (disk)."""
    out = settings.out if is_address(settings.out) else os.path.realpath(settings.out)
    with system_errors(out):
        is_prepared = exists(os.path.join(out, DATA_MANIFEST), ResourceError)
        require(is_prepared or is_empty(out), "the output exists and is not a prepared folder", out, "choose another")
        tokenizer, asked = None, Manifest(settings.for_manifest, shard_tokens=settings.shard_tokens)
        if settings.tokenizer != "train":
            tokenizer = named_tokenizer(settings.tokenizer, mlm=settings.is_masked)
            asked.settings["tokenizer"] = tokenizer.sha256
        is_all_on_hub = bool(settings.inputs) and len(settings.from_hub) == sum(map(len, settings.names.values()))
        if is_prepared and is_all_on_hub:  # it is not read again to be compared
            return already_prepared(out, asked)
        made = uploaded(None) if is_prepared else uploaded(out) if is_address(out) else new_folder(Path(out))
        with made as folder, copies_named(folder.parent / "text", settings):
            sources = find_text(settings, folder.parent / "text", progress)
            asked.sources = listed(sources, progress)
            if is_prepared:
                return already_prepared(out, asked)
            write_prepared(folder, settings, sources, tokenizer, asked, progress)
            (folder / DATA_MANIFEST).write_text(asked.to_json())
        return asked


def listed(sources: list[Source], progress: Progress | None) -> list[dict[str, Any]]:
    """The files of text as a manifest has them. Raises DataError for one text in two splits."""
    files, first = [], dict[str, Source]()
    for source in counted(progress, "hashing", sources, len(sources)):
        file = hash_of(source.path)
        files.append({"split": source.split, "name": source.name} | file)
        other = first.setdefault(file["sha256"], source)
        require(other.split == source.split or not file["bytes"], "the same text in two splits",
                f"{other.name} of {other.split} and {source.name} of {source.split}", "take it out of one", DataError)
    return files


def already_prepared(out: str, asked: Manifest) -> Manifest:
    """The manifest of an output that has this text with these settings already. asked: without
    sources if all text is on the hub. Raises UsageError for another output."""
    manifest = read_manifest(out)
    old = manifest.settings | {"text": manifest.sources}
    new = asked.settings | {"text": asked.sources or manifest.sources}
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    how = [name if name == "text" else f"{name} {old.get(name)} -> {new.get(name)}" for name in changed]
    require(not how, "the output was prepared differently", f"{out} ({', '.join(how)})", "choose another or delete it")
    verify_data(out)
    if not is_address(out):
        clear_leftovers(Path(out))
    manifest.already_prepared = True
    return manifest


def write_prepared(folder: Path, settings: PrepareSettings, sources: list[Source], tokenizer: Tokenizer | None,
                   manifest: Manifest, progress: Progress | None) -> None:
    """Tokenise all text, decide which documents are held out, and write the tokenizer and the
    shards of each split. tokenizer: None to train one. manifest: gets what there is to say."""
    read, held_out = partial(read_pieces, field=settings.field, task=settings.task), settings.held_out
    first_files = {each.split: each.path for each in reversed(sources)}  # for errors
    of_train = [each for each in sources if each.split == "train" and each.n_bytes]
    if held_out and [each.kind for each in of_train] == [".txt"]:
        parts = cut_document(of_train[0].path, held_out, folder.parent, read)
        sources = in_order([*parts, *(each for each in sources if each is not of_train[0])])
        held_out, first_files["validation"] = None, first_files["train"]
    tokenizer = tokenizer or trained(settings, sources, held_out, read, progress)
    manifest.dtype = tokenizer.dtype
    manifest.tokenizer = {name: getattr(tokenizer, name) for name in ("sha256", "vocab_size", "end_of_document")}
    if tokenizer.mask is not None:
        manifest.tokenizer |= {name: getattr(tokenizer, name) for name in ("mask", "separator", "special")}
    with hashed_stream(folder / TOKENIZER_FILE, manifest.files) as write:
        write(bytes(tokenizer.json, "utf-8"))

    n_bytes = sum(source.n_bytes for source in sources)
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_workers = min(settings.jobs or n_cores, n_bytes // (4 * settings.unit_bytes))  # a new process takes a while
    units = units_of(sources, settings.unit_bytes, read, tokenizer)
    done = counted(progress, "tokenising", encode_all(units, tokenizer, held_out is not None, n_workers), n_bytes,
                   lambda encoded: encoded.n_bytes)
    found: list[Encoded] = []
    for split, of_split in itertools.groupby(done, key=lambda encoded: encoded.split):
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            own = []
            for encoded in of_split:
                file.write(encoded.ids.tobytes())
                own.append(dataclasses.replace(encoded, ids=np.empty(0)))
            found += own
            rows_D4 = documents_of([encoded.rows_P5 for encoded in own])
            write_documents(folder, split, file, rows_D4, held_out, first_files[split], manifest, progress)
    manifest.notes = notes_of(manifest, found, len(sources))
    if settings.held_out:
        train, held = (manifest.splits[name] for name in ("train", "validation"))
        what = (f"{held.documents:,} of {held.documents + train.documents:,} documents, at equal distances"
                if held_out is not None else "the end of the only document")
        logger.info(f"held out    {what}: {held.tokens / (held.tokens + train.tokens):.1%} of the tokens")


def trained(settings: PrepareSettings, sources: list[Source], held_out: float | None, read: Read,
            progress: Progress | None) -> Tokenizer:
    """A tokenizer that is trained on pieces of the train split at equal distances."""
    sources = [source for source in sources if source.split == "train"]
    n_bytes = sum(source.n_bytes for source in sources)
    units = units_of(sources, settings.unit_bytes, read, None)
    checked = counted(progress, "checking", units, n_bytes, lambda unit: unit.n_bytes)
    rows = [np.fromiter((row_of(part, str(part.content), 0, held_out is not None) for part in unit), ROW)
            for unit in checked]
    is_chosen_D = divided("train", documents_of(rows), held_out, sources[0].path)["train"]

    def chosen() -> Iterator[str]:
        document = 0
        for text, last in itertools.chain.from_iterable(read(source.path) for source in sources):
            if is_chosen_D[document]:
                yield text
            document += last

    every, vocab_size = -(-n_bytes // settings.train_characters), settings.vocab_size or DEFAULT_VOCAB_SIZE
    spread = itertools.islice(chosen(), 0, None, every)
    texts = counted(progress, "training the tokenizer", spread, n_bytes // every, len)
    learning = counted(progress, "learning its vocabulary", list[str](), vocab_size)  # it takes as long as reading
    return train_tokenizer(itertools.chain(texts, learning), vocab_size, mlm=settings.is_masked)


def encode_all(units: Iterable[Unit], tokenizer: Tokenizer, with_hashes: bool, n_workers: int) -> Iterator[Encoded]:
    """All units in order, tokenised in so many processes. Raises ResourceError if one dies."""
    if n_workers <= 1:
        yield from (encode_unit(unit, tokenizer, with_hashes) for unit in units)
        return
    pool = ProcessPoolExecutor(n_workers, multiprocessing.get_context("spawn"), end_with_parent)
    calls = (submitted(pool, unit, tokenizer, with_hashes) for unit in units)
    try:
        waiting = [*itertools.islice(calls, 2 * n_workers)]  # not all: what is done lies in memory
        while waiting:
            encoded = waiting.pop(0).result()
            waiting += itertools.islice(calls, 1)
            yield encoded
    except BrokenProcessPool as e:
        raise ResourceError("a process that tokenises has died", str(e), "where memory was short use fewer --jobs"
                            ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def submitted(pool: ProcessPoolExecutor, *arguments: Any) -> Future[Encoded]:
    """`encode_unit` in another process, which may start here. It does not run the user's script
    first, which would call `prepare` again."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        return pool.submit(encode_unit, *arguments)
    finally:
        sys.modules["__main__"] = main


def end_with_parent() -> None:
    """Let this process end when its parent does, even by SIGKILL; Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]  # called in a child alone
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def divided(split: str, rows_D4: np.ndarray, share: float | None, path: str) -> dict[str, np.ndarray]:
    """Which documents are in the split, and of train which are held out, in bool `[D]`: documents
    at equal distances with at least `share` of the bytes, or fewer where that would be most of the
    text; at least one, and not all. Equal ones go together, unless all are equal. Blank ones are
    left out. Raises DataError for an empty split."""
    is_kept_D = rows_D4[:, 1] > 0
    require(bool(is_kept_D.any()), "nothing but white space" if len(is_kept_D) else "no documents", path,
            f"the {split} split would be empty", DataError)
    if split != "train" or share is None:
        return {split: is_kept_D}
    _, _, bytes_D, hashes_D = rows_D4[is_kept_D].T
    if len(bytes_D) == 1:
        raise DataError("of one document in rows nothing can be held out", path, "save its text alone as .txt")
    if len({*hashes_D.tolist()}) == 1:
        hashes_D = np.arange(len(hashes_D))
    _, firsts, groups_D = np.unique(hashes_D, return_index=True, return_inverse=True)
    groups_U = np.argsort(firsts)  # groups of equal documents, in the order of their first ones
    bytes_U = np.bincount(groups_D, bytes_D)[groups_U]
    n, shares_U, fewer = len(groups_U), bytes_U / bytes_U.sum(), None
    k = min(max(1, round(n * share)), n - 1)
    while True:
        chosen = (2 * np.arange(k) + 1) * n // (2 * k)
        if k == n - 1 or shares_U[chosen].sum() >= share * (1 - 1e-9):
            break
        k, fewer = min(k + 1 + k // 50, n - 1), chosen
    if shares_U[chosen].sum() > max(2 * share, 0.5) and fewer is not None:
        chosen = fewer
    is_held_D = is_kept_D.copy()
    is_held_D[is_kept_D] = np.isin(groups_D, groups_U[chosen])
    return {"train": is_kept_D & ~is_held_D, "validation": is_held_D}


def write_documents(folder: Path, split: str, ids: IO[bytes], rows_D4: np.ndarray, held_out: float | None, path: str,
                    manifest: Manifest, progress: Progress | None) -> None:
    """Write the documents of a split, whose ids are in a file, and those held out of it."""
    manifest.blank_documents += int((rows_D4[:, 1] == 0).sum())
    for name, is_chosen_D in divided(split, rows_D4, held_out, path).items():
        n_ids, n_words, n_bytes, _ = rows_D4[is_chosen_D].sum(0).tolist()
        blocks = counted(progress, "writing", chosen_ids(ids, manifest.dtype, rows_D4[:, 0], is_chosen_D), n_ids, len)
        manifest.splits[name] = Split(int(is_chosen_D.sum()), n_ids, n_words, n_bytes)
        write_shards(folder, name, blocks, manifest)


def chosen_ids(file: IO[bytes], dtype: str, n_ids_D: np.ndarray, is_chosen_D: np.ndarray) -> Iterator[np.ndarray]:
    """The ids of the chosen documents, in order, from a file with the ids of all."""
    ends_D = np.concatenate([[0], n_ids_D.cumsum().astype(np.int64)])
    runs_R2 = np.flatnonzero(np.diff(is_chosen_D, prepend=False, append=False)).reshape(-1, 2)
    for begin, stop in ends_D[runs_R2].tolist():
        file.seek(begin * np.dtype(dtype).itemsize)
        for at in range(begin, stop, BLOCK_IDS):
            yield np.fromfile(file, dtype, min(BLOCK_IDS, stop - at))


def write_shards(folder: Path, name: str, arrays: Iterable[np.ndarray], manifest: Manifest) -> None:
    """Write one split's shards and the positions of its documents."""
    end_of_document, n_ids = manifest.end_of_document, 0
    positions = hashed_stream(folder / f"{name}-documents.bin", manifest.files)
    with contextlib.ExitStack() as shard, positions as write_positions:
        for ids in itertools.chain([np.array([end_of_document], manifest.dtype)], arrays):
            write_positions((np.flatnonzero(ids == end_of_document) + n_ids).astype("<u8").tobytes())
            while len(ids):
                if n_ids % manifest.shard_tokens == 0:
                    shard.close()
                    number = n_ids // manifest.shard_tokens
                    write = shard.enter_context(hashed_stream(folder / shard_name(name, number), manifest.files))
                fitting = ids[:manifest.shard_tokens - n_ids % manifest.shard_tokens]
                write(fitting.tobytes())
                n_ids += len(fitting)
                ids = ids[len(fitting):]


def notes_of(manifest: Manifest, units: list[Encoded], n_files: int) -> list[str]:
    """What was left out of so many files of text, and what the tokenizer does not keep."""
    n_empty = n_files - len(set().union(*(unit.paths for unit in units)))
    n_ids = sum(int(unit.rows_P5[:, 0].sum()) for unit in units)
    n_lost, n_unknown = sum(unit.n_lost for unit in units), sum(unit.n_unknown for unit in units)
    notes = []
    if manifest.vocab_size < (asked := manifest.settings.get("vocab_size", 0)):
        notes.append(f"the text gave a vocabulary of {manifest.vocab_size:,} of the {asked:,} asked for")
    if n_empty:
        notes.append(f"{n_empty:,} files have no documents and were left out")
    if manifest.blank_documents:
        notes.append(f"{manifest.blank_documents:,} documents are white space only and were left out")
    if n_lost or n_unknown:
        notes.append("this tokenizer does not keep the text exactly: scores per byte leave out what it drops "
                     f"({n_lost:,} documents, {n_unknown / n_ids:.2%} of the tokens are unknown)")
    return notes


def counted(progress: Progress | None, what: str, items: Iterable[T], total: int | None,
            amount: Callable[[T], int] = lambda item: 1) -> Iterator[T]:
    """Pass the items on, and report the sum of the amounts of those done."""
    report, n_done = progress or (lambda *done: None), 0
    report(what, 0, total)
    for item in items:
        yield item
        n_done += amount(item)
        report(what, n_done, total)
