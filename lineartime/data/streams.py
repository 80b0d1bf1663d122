"""Text that can be read only once: stdin, and data sets of the Hugging Face hub, which `datasets` reads."""

import contextlib
import dataclasses
import importlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from lineartime.base.errors import DataError, UsageError
from lineartime.base.stores import Name, joined, make_folder, opened_new, size_of, stdin_blocks
from lineartime.data.prepare_config import PrepareSettings
from lineartime.data.read_text import text_blocks
from lineartime.data.rows import Row, text_field

ON_HUB = "hub:"
HUB_NAME = re.compile(ON_HUB + r"([^:\[\]]+)(?::([^:/\[\]]+))?/([^:/\[\]]+)(?:\[:([1-9]\d*)\])?")


def on_hub(name: str) -> tuple[str, str | None, str, int | None]:
    """The data set, the configuration, the split and the number of records that a name has. Raises UsageError."""
    found = HUB_NAME.fullmatch(name)
    if found is None:
        raise UsageError("no such name on the hub", name, "say hub:NAME/SPLIT, as in hub:stanfordnlp/imdb/train, or "
                         "hub:NAME:CONFIGURATION/SPLIT[:RECORDS], as in hub:allenai/c4:en/train[:1000]")
    data, config, split, n_most = found.groups()
    return data, config, split, int(n_most) if n_most else None


def hub_library() -> Any:
    """The module `datasets`. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module("datasets")
    except ImportError as e:
        raise UsageError("a package is missing that reads the hub", str(e), "pip install datasets") from None


def hub_rows(name: str) -> Iterator[Row]:
    """Stream the records that a name such as `hub:allenai/c4:en/train[:1000]` has, and no more. Raises UsageError for
    another name and if `datasets` is missing, DataError for errors of the library."""
    (data, config, split, n_most), library = on_hub(name), hub_library()
    with quiet(library):
        try:
            records = library.load_dataset(data, config, split=split, streaming=True)
            for number, record in enumerate(itertools.islice(records, n_most), 1):
                yield Row(f"{name}, row {number}", record)
        except Exception as e:
            message = f"{type(e).__name__}: {e}"[:300]
            raise DataError("cannot read from the hub", name, " ".join(message.split())) from None


@contextlib.contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Switch off the library's progress bars and warnings: errors have one line here, and verbs have their own bars."""
    with contextlib.ExitStack() as after:
        for logger in map(logging.getLogger, ("datasets", "huggingface_hub")):
            after.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        if not library.are_progress_bars_disabled():
            after.callback(library.enable_progress_bars)
            library.disable_progress_bars()
        yield


def save_streams(asked: PrepareSettings, folder: Name, show: Callable[..., Iterator[Any]]) -> PrepareSettings:
    """The settings, with a file in `folder` in the place of each stream, because `prepare` reads text several times.

    show: passes records on and reports progress. Raises as `hub_rows` does, and DataError for stdin without text."""
    count = itertools.count()

    def saved(name: str) -> str:
        if name != "-" and not name.startswith(ON_HUB):
            return name
        own = joined(folder, str(next(count)))
        make_folder(own)
        return _save_stdin(own, asked.encoding) if name == "-" else _save_hub(name, asked.field, own, show)

    inputs, validation, test = (tuple(map(saved, names)) for names in (asked.inputs, asked.validation, asked.test))
    return dataclasses.replace(asked, inputs=inputs, validation=validation, test=test)


def _save_stdin(folder: str, encoding: str) -> str:
    path = joined(folder, "stdin.txt")
    given, checked = itertools.tee(stdin_blocks())  # checked as it comes, as a device may have no end
    with opened_new(path) as file:
        for _, block in zip(text_blocks(checked, "stdin", encoding=encoding), given, strict=False):
            file.write(block)
    if not size_of(path):
        raise DataError("no text", "stdin", "pipe some in: cat notes.txt | lineartime prepare - ...")
    return path


def _save_hub(name: str, field: str, folder: str, show: Callable[..., Iterator[Any]]) -> str:
    """The file has the split's name, by which `find_sources` knows the split."""
    _, _, split, _ = on_hub(name)
    path = joined(folder, f"{split}.jsonl")
    with opened_new(path) as file:
        for row in show(f"reading {name}", hub_rows(name), None):
            text = text_field(row.fields, field, row.where)
            file.write(json.dumps({field: text}).encode() + b"\n")  # ASCII, which most encodings read
    return path
