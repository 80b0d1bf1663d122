"""Tokenise text once into shards: all steps of `shares` on this machine. `tokens` describes the folder and reads it
back."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lineartime.atomic_io import DONE, remove_leftovers, system_errors, unfinished_folder
from lineartime.data import shares
from lineartime.data.files import exists, hash_of, is_address, is_folder, joined, make_folder, remove
from lineartime.data.prepare_config import PrepareSettings
from lineartime.data.tokens import DATA_MANIFEST, Manifest, read_manifest, verify_data
from lineartime.data.units import Slice
from lineartime.data.workers import encode_all
from lineartime.errors import DataError
from lineartime.settings import require

Progress = Callable[[str, int, int | None], None]
"""Takes a description, the amount done, and the total (None if unknown)."""


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

    `out` appears only when it is complete; in a store its manifest.json comes last. The units of text that a killed or
    interrupted call has tokenised stay in a hidden folder beside `out`, and the same call does not make them again. If
    `out` was prepared from the same text and settings it is verified and kept; text is not compared again if all is on
    the hub. The number of processes does not change a byte.
    Raises UsageError, DataError (with file and line or byte) or ResourceError (disk)."""
    out = asked.out if is_address(asked.out) else os.path.realpath(asked.out)
    show = functools.partial(_shown, progress)
    with system_errors(out):
        taken = _is_taken(out)
        require(not taken or exists(joined(out, DATA_MANIFEST)), "the output exists and is not a prepared folder", out,
                "choose another")
        if taken and not is_address(out):
            remove_leftovers(Path(out))
        with _work_folder(out) as work:
            remove(joined(work, DONE))  # of a call that was killed
            if taken and asked.is_from_hub:
                tokenizer = shares.named_tokenizer(asked)
                return _already_prepared(out, asked.for_manifest(None if tokenizer is None else tokenizer.sha256), None)
            if taken:
                job, _ = shares.find_text(asked, work, show)
                shown = show("hashing", job["sources"], len(job["sources"]))
                return _already_prepared(out, job["settings"], [{"split": split, "name": name} | hash_of(path)
                                                                for split, name, path, _ in shown])
            job = shares.plan(asked, work, show, anew=True)
            n_bytes = [sum(Slice(*one).bytes for one in own) for _, own in job["units"]]
            # By default one process for each core that this one may use; macOS does not say which these are.
            n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            n_jobs = asked.jobs or n_cores
            n_workers = 1 if sum(n_bytes) < asked.unit_bytes else min(n_jobs, len(n_bytes))
            encoded = _counted(progress, "tokenising", sum(n_bytes))
            encode_all(work, n_workers, lambda index: encoded(n_bytes[index]))
            return shares.join(work, out if is_address(out) else joined(work, DONE), show)


@contextlib.contextmanager
def _work_folder(out: str) -> Iterator[str]:
    """The folder for the work that becomes `out`. A folder `done` in it becomes `out` at the end."""
    if not is_address(out):
        with unfinished_folder(Path(out), worth=shares.UNITS) as folder:
            try:
                yield str(folder)
            except DataError as e:
                if f"{folder}/" not in str(e.where):
                    raise
                # In a copy of a stream, streams/0/stdin.txt: the folder will be gone.
                raise DataError(e.what, str(e.where).replace(f"{folder}/", ""), e.todo) from None
        return
    make_folder(work := f"{out.rstrip('/')}.unfinished")
    yield work
    remove(work)


def _is_taken(out: str) -> bool:
    """Whether something is at `out`; an empty folder is nothing, and in a store what has no manifest yet."""
    if is_address(out):
        return exists(joined(out, DATA_MANIFEST))
    return exists(out) and not (is_folder(out) and not os.listdir(out))


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
