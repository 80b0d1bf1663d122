"""Data sets on the Hugging Face hub, read by `datasets`."""

import contextlib
import importlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lineartime.atomic_io import scratch_folder
from lineartime.data.corpora import HUB, wiki40b_document
from lineartime.data.read_text import text_field
from lineartime.errors import DataError, UsageError


def hub_library() -> Any:
    """The module `datasets`. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module("datasets")
    except ImportError as e:
        raise UsageError("a package is missing that reads the hub", str(e), "pip install datasets") from None


def hub_records(library: Any, name: str, config: str | None, splits: Iterable[str],
                n_most: int | None = None) -> Iterator[tuple[str, Any]]:
    """Stream (split, record) pairs of the splits that exist, at most `n_most` of each. Raises DataError for errors of
    the library."""
    with quiet(library):
        try:
            there = library.load_dataset(name, config, streaming=True)
            for split in splits:
                for record in itertools.islice(there[split] if split in there else (), n_most):
                    yield split, record
        except Exception as e:
            message = f"{type(e).__name__}: {e}"[:300]
            raise DataError("cannot read from the hub", name, " ".join(message.split())) from None


@contextlib.contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Switch the library's progress bars and warnings off; errors are reported in one line, and verbs have own bars."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels, bars = [logger.level for logger in loggers], not library.are_progress_bars_disabled()
    library.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            library.enable_progress_bars()


@contextlib.contextmanager
def hub_files(task: str, out: Path, *, documents: int | None, field: str,
              show: Callable[..., Iterator[Any]]) -> Iterator[list[Path]]:
    """Download the splits of a task's data set into files (`train.jsonl`, ...) in a temporary folder beside `out`.

    `prepare` reads text several times, and this way downloads it once. documents: read only the first so many of each
    split. show: passes records on and reports progress. Raises UsageError if `datasets` is not installed, DataError for
    a data set that cannot be read or has the wrong form."""
    library, (name, config) = hub_library(), HUB[task]
    with scratch_folder(out) as folder:
        paths = []
        found = hub_records(library, name, config, ("train", "validation", "test"), documents)
        for split, group in itertools.groupby(show(f"reading {name}", found, None), key=lambda record: record[0]):
            paths.append(folder / f"{split}.jsonl")
            with paths[-1].open("w", encoding="utf-8") as file:
                for number, (_, record) in enumerate(group):
                    where = f"{name}, {split}, document {number}"
                    text = text_field(record, field, where)
                    text = wiki40b_document(text, where) if task == "wiki40b" else text
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        if folder / "train.jsonl" not in paths:
            raise DataError("no train split", name, f"it has {', '.join(path.stem for path in paths) or 'nothing'}")
        yield paths
