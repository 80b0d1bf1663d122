"""Text that can be read only once: stdin, and data sets of the Hugging Face hub, which `datasets` reads."""

import contextlib
import dataclasses
import importlib
import itertools
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lineartime.data.corpora import HUB
from lineartime.data.files import Name, joined, make_folder, opened_new, size_of
from lineartime.data.prepare_config import PrepareSettings
from lineartime.data.read_text import text_field
from lineartime.errors import DataError, UsageError
from lineartime.settings import require

ON_HUB = "hub:"


def stdin_blocks(size: int = 1 << 20, *, ticks: bool = False) -> Iterator[bytes]:
    """What comes on stdin, to its end, in blocks of at most `size` bytes. ticks: also b"" now and then while nothing
    comes."""
    while sys.stdin is not None:
        # Waited for a little at a time: a signal that comes just before a read is not seen until the read returns.
        if select.select([sys.stdin], [], [], 0.2)[0]:
            if not (block := os.read(sys.stdin.fileno(), size)):
                return
            yield block
        elif ticks:
            yield b""


def on_hub(name: str) -> tuple[str, str | None, str]:
    """The data set, the configuration and the split that a name has. Raises UsageError."""
    of, _, split = name.removeprefix(ON_HUB).rpartition("/")
    data, _, config = of.partition(":")
    require(bool(data and split), "no such name on the hub", name,
            "say hub:NAME/SPLIT, as in hub:stanfordnlp/imdb/train")
    return data, config or None, split


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


def save_streams(asked: PrepareSettings, folder: Name, show: Callable[..., Iterator[Any]]) -> PrepareSettings:
    """The settings, with a file in `folder` in the place of each stream, because `prepare` reads text several times.

    show: passes records on and reports progress. Raises UsageError if `datasets` is missing, DataError for a stream
    that cannot be read or has no text."""
    if asked.hub:
        name, config = HUB[str(asked.task)]
        saved = _save_hub(name, config, ("train", "validation", "test"), asked, joined(folder, "hub"), show)
        if not any(each.endswith("/train.jsonl") for each in saved):
            there = ", ".join(each.rpartition("/")[2].removesuffix(".jsonl") for each in saved)
            raise DataError("no train split", name, f"it has {there or 'nothing'}")
        return dataclasses.replace(asked, inputs=tuple(saved), hub=False, documents=None)
    count = itertools.count()

    def of(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_saved(name, asked, joined(folder, str(next(count))), show) for name in names)

    return dataclasses.replace(asked, inputs=of(asked.inputs), validation=of(asked.validation), test=of(asked.test))


def _saved(name: str, asked: PrepareSettings, folder: str, show: Callable[..., Iterator[Any]]) -> str:
    """The file of an input: itself, or the copy of a stream."""
    if name == "-":
        make_folder(folder)
        with opened_new(joined(folder, "stdin.txt")) as file:
            for block in stdin_blocks():
                if b"\0" in block:  # and not the endless copy of a device
                    raise DataError("a NUL byte: this is no text", "stdin")
                file.write(block)
        if not size_of(joined(folder, "stdin.txt")):
            raise DataError("no text", "stdin", "pipe some in: cat notes.txt | lineartime prepare - ...")
        return joined(folder, "stdin.txt")
    if name.startswith(ON_HUB):
        data, config, split = on_hub(name)
        saved = _save_hub(data, config, (split,), asked, folder, show)
        if not saved:
            raise DataError("no such split", name)
        return saved[0]
    return name


def _save_hub(name: str, config: str | None, splits: tuple[str, ...], asked: PrepareSettings, folder: str,
              show: Callable[..., Iterator[Any]]) -> list[str]:
    """Download splits of a data set into files such as `train.jsonl`; returns the names of those that exist."""
    make_folder(folder)
    saved = []
    found = hub_records(hub_library(), name, config, splits, asked.documents)
    for split, group in itertools.groupby(show(f"reading {name}", found, None), key=lambda record: record[0]):
        saved.append(joined(folder, f"{split}.jsonl"))
        with opened_new(saved[-1]) as file:
            for number, (_, record) in enumerate(group):
                text = text_field(record, asked.field, f"{name}, {split}, document {number}")
                file.write(json.dumps({asked.field: text}, ensure_ascii=False).encode() + b"\n")
    return saved
