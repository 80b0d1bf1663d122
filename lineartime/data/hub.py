"""Records of data sets on the Hugging Face hub, read by `datasets`."""

import contextlib
import importlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

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
