"""The files of every split, found from their names."""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from lineartime.data.files import Name, expanded, is_address, is_folder, joined, reading, store_of
from lineartime.data.read_text import READS, ending_of, is_one_document, is_token_file, text_files_below
from lineartime.errors import DataError, UsageError

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation",
               "dev": "validation", "test": "test"}
SPLIT_FILE = re.compile(rf"(?:\w+-)?({'|'.join(SPLIT_NAMES)})(?:[-.]\d+(?:-of-\d+)?)?")
"""Names of a split's files: `train`, `train-00000-of-00001`, `c4-train.00000-of-01024`."""
FIRST = (".txt", ".md", ".txt.gz", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
"""Of a folder files of other kinds are read only if it has none of these."""
ABOUT = ("readme", "license", "notice", "contributing", "changelog")
"""Names of `.md` files that are about the folder."""


class Source(NamedTuple):
    """One file of a split. `name` is relative to the user's argument, so it is the same on another machine."""

    split: str
    name: str
    path: str
    unread: tuple[str, ...] = ()
    """Endings of the files beside it that were left out."""


def find_sources(inputs: Iterable[Name], validation: Iterable[Name] = (), test: Iterable[Name] = (), *,
                 task: str | None = None) -> list[Source]:
    """The files of every split, in an order that depends on names only.

    inputs: the train split, unless files, or subfolders of a folder, are called train, validation and test; then only
    those are read. validation, test: files or folders of these splits. task: of "wiki40b" the published `.parquet` is
    read, and not copies beside it. Raises UsageError for ambiguous inputs, DataError for inputs that are missing, empty
    or not regular files."""
    inputs, validation, test = ([path for name in names for path in expanded(name)]
                                for names in (inputs, validation, test))
    preferred = ".parquet" if task == "wiki40b" else None
    sources = [source for path in inputs for source in _sources_of(path, preferred)]
    splits = {source.split for source in sources}
    if "train" in splits and splits & {"validation", "test"}:
        for source in sources:
            if not source.split:
                raise UsageError("the other inputs name their split and this one does not", source.path,
                                 "leave it out or rename it")
    else:
        sources = [source._replace(split="train") for source in sources]
    for split, paths in (("validation", validation), ("test", test)):
        if paths and any(source.split == split for source in sources):
            raise UsageError(f"two {split} splits", paths[0], "the inputs have one already")
        for path in paths:
            found = _sources_of(path, preferred)
            if len({source.split for source in found}) > 1:
                raise UsageError("this folder has splits of its own", path, "name the files or the subfolder")
            sources += [source._replace(split=split) for source in found]
    seen: set[str] = set()
    for source in sources:
        real = source.path if is_address(source.path) else os.path.realpath(source.path)
        if real in seen:
            raise UsageError("the same file twice", source.path, "name it once")
        seen.add(real)
    return sorted(sources, key=lambda source: SPLITS.index(source.split))


def _sources_of(path: str, preferred: str | None) -> list[Source]:
    """The files of one input; the split is "" if the name has none."""
    if is_folder(path):
        return _sources_in_folder(path, preferred)
    require_file(path)
    if not ending_of(path) and not is_token_file(path):
        raise UsageError("unknown kind of file", path,
                         f"{READS}; and token files, .ds of datatrove and .bin of Megatron-LM")
    name = PurePosixPath(path).name
    return [Source(_split_of(name), name, path)]


def require_file(path: Name) -> None:
    """Raise DataError for what is missing or no regular file."""
    with reading(path):
        if is_address(path):
            store, there = store_of(path)
            store.info(there)
        elif not os.path.isfile(path):
            os.stat(path)
            raise DataError("not a regular file", path)


def _sources_in_folder(folder: str, preferred: str | None) -> list[Source]:
    """The files of a folder: its splits if it has a train split, else all that can be read; of one kind."""
    names = _readable_names(folder)
    # Subfolders called train, validation and test come first, then such files.
    by_folder = {name: SPLIT_NAMES.get(name.split("/")[0].lower(), "") if "/" in name else "" for name in names}
    by_name = {name: "" if "/" in name else _split_of(name) for name in names}
    splits = next((each for each in (by_folder, by_name) if "train" in each.values()), None)
    if splits is None:
        _refuse_deeper_splits(folder, names)
        splits = dict.fromkeys(names, "")
    else:
        endings = {ending_of(name) for name in names if splits[name]}
        others = [name for name in names if not splits[name]]
        for name in others:
            if "/" not in name and ending_of(name) in endings:
                raise UsageError("this file belongs to no split", joined(folder, name),
                                 "leave it out or name the files")
        _say_skipped(folder, others, "they belong to no split")
        names = [name for name in names if splits[name]]
    endings = {".txt" if is_one_document(name) else ending_of(name) for name in names}
    if preferred in endings:
        names = [name for name in names if ending_of(name) == preferred]
    elif len(endings) > 1:
        raise UsageError("several kinds of files side by side", f"{folder} has {' and '.join(sorted(endings))}",
                         f"name the files of one kind, such as {folder}/*{min(endings)}")
    if not is_address(folder):
        for name in names:
            require_file(joined(folder, name))
    unread = tuple(sorted(endings - {preferred})) if preferred in endings else ()
    return [Source(splits[name], name, joined(folder, name), unread) for name in names]


def _readable_names(folder: str) -> list[str]:
    """The names of the files that can be read. Left out if others are there: kinds that are not in `FIRST`; an `.md` or
    `.txt.gz` that lies beside rows; and what is about the folder."""
    with reading(folder):
        readable, others = text_files_below(folder)
    if not readable and any(map(is_token_file, others)):
        return list(filter(is_token_file, others))
    if not readable:
        raise DataError("nothing to read in this folder", folder, READS)
    _say_skipped(folder, others, READS)
    about = [name for name in readable if ending_of(name) == ".md" and PurePosixPath(name).stem.lower() in ABOUT]
    chosen = [name for name in readable if name not in about] or about
    chosen = [name for name in chosen if ending_of(name) in FIRST] or chosen
    if not all(map(is_one_document, chosen)):
        chosen = [name for name in chosen if ending_of(name) == ".txt" or not is_one_document(name)]
    _say_skipped(folder, sorted({*readable} - {*chosen}), "they lie beside other text, or are about the folder")
    return chosen


def _refuse_deeper_splits(folder: str, names: list[str]) -> None:
    """Raise UsageError for a train split in a subfolder: its validation split would be trained on."""
    for name in names:
        *parents, last = name.split("/")
        if parents and (_split_of(last) == "train" or "train" in [parent.lower() for parent in parents]):
            raise UsageError("the splits lie deeper in this folder", folder, f"name the folder that has {name}")


def _say_skipped(folder: str, names: list[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
        logger.info(f"skipped     {', '.join(names[:5])}{more} in {folder}: {why}")


def _split_of(name: str) -> str:
    match = SPLIT_FILE.fullmatch(name.lower()[:-len(ending_of(name)) or None])
    return SPLIT_NAMES[match[1]] if match else ""
