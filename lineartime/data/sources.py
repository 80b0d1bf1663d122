"""The files of every split, found from their names."""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from lineartime.base.errors import DataError, UsageError
from lineartime.base.stores import Name, expanded, files_below, is_address, is_folder, joined, size_of
from lineartime.data.read_text import READS, ending_of, is_one_document, is_token_file

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation",
               "dev": "validation", "test": "test"}
SPLIT_FILE = re.compile(rf"(?:\w+-)?({'|'.join(SPLIT_NAMES)})(?:[-.]\d+(?:-of-\d+)?)?")
"""Names of a split's files: `train`, `train-00000-of-00001`, `c4-train.00000-of-01024`."""
BESIDE_TEXT = [re.compile(pattern, re.IGNORECASE) for pattern in (
    r"(^|/)(readme|license|notice|contributing|changelog)\.md$", r"\.json$", r"\.[ct]sv(\.\w+)?$")]
"""Pages about the folder, settings, and tables that describe the text."""


class Source(NamedTuple):
    """One file of a split. `name` is relative to the user's argument, so it is the same on another machine."""

    split: str
    name: str
    path: str


def find_sources(inputs: Iterable[Name], validation: Iterable[Name] = (), test: Iterable[Name] = (), *,
                 task: str | None = None) -> list[Source]:
    """The files of every split, in an order that depends on names only.

    inputs: the train split, unless files or folders, or subfolders of a folder, are called train, validation and test;
    then only those are read. validation, test: files or folders of these splits. task: of "wiki40b" the published
    `.parquet` is read, and not copies beside it. Raises UsageError for ambiguous inputs and unknown kinds of files,
    DataError for what is missing or no regular file, and for a folder with nothing to read."""
    preferred = ".parquet" if task == "wiki40b" else None
    sources = [source for name in inputs for path in expanded(name) for source in _sources_of(path, preferred)]
    splits = {source.split for source in sources}
    if (held_out := splits & {"validation", "test"}) and "" in splits:
        bare = next(source.path for source in sources if not source.split)
        raise UsageError("the other inputs name their split and this one does not", bare,
                         "leave it out, rename it, or give the others with --validation and --test")
    if "train" not in splits or not held_out:
        sources = [source._replace(split="train") for source in sources]
    for split, names in (("validation", validation), ("test", test)):
        paths = [path for name in names for path in expanded(name)]
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
        own = SPLIT_NAMES.get(PurePosixPath(path).name.lower(), "")
        return [source._replace(split=source.split or own) for source in _sources_in_folder(path, preferred)]
    require_file(path)
    if not ending_of(path) and not is_token_file(path):
        raise UsageError("unknown kind of file", path,
                         f"{READS}; and token files, .ds of datatrove and .bin of Megatron-LM")
    name = PurePosixPath(path).name
    return [Source(_split_of(name), name, path)]


def require_file(path: Name) -> None:
    """Raise DataError for what is missing or no regular file."""
    size_of(path)
    if not is_address(path) and not os.path.isfile(path):
        raise DataError("not a regular file", path)


def _sources_in_folder(folder: str, preferred: str | None) -> list[Source]:
    """The files of a folder that are read, by these rules in order:

    1. Text is read, and token files in a folder without text. Hidden files are not.
    2. If subfolders are called train, validation and test, or else files, only these splits are read.
    3. What lies beside other text is left out: pages about the folder, such as README.md; `.json`, which has settings
       more often than text; tables; and `.md` beside rows.
    4. What is left must be of one kind: whole documents, or rows in files of one ending. Of several kinds only
       `preferred` is read, if it is there."""
    there = files_below(folder)
    names = [name for name in there if ending_of(name)] or [name for name in there if is_token_file(name)]
    if not names:
        raise DataError("nothing to read in this folder", folder, READS)
    if ending_of(names[0]):  # beside token files lie their indexes
        _say_skipped(folder, there, names, READS)

    splits = _splits_in(folder, names)
    _say_skipped(folder, names, splits, "they belong to no split")

    names = list(splits)
    for beside in BESIDE_TEXT:
        names = [name for name in names if not beside.search(name)] or names
    if not all(map(is_one_document, names)):
        names = [name for name in names if not ending_of(name).startswith(".md")]
    _say_skipped(folder, splits, names, "they lie beside other text, or are about the folder")

    kinds = {name: ".txt" if is_one_document(name) else ending_of(name) for name in names}
    several = sorted(set(kinds.values()))
    if preferred in several:
        names = [name for name in names if kinds[name] == preferred]
        _say_skipped(folder, kinds, names, f"they lie beside {preferred} files")
    elif len(several) > 1:
        raise UsageError("several kinds of files side by side", f"{folder} has {' and '.join(several)}",
                         f"name the files of one kind, such as {folder}/*{several[0]}")
    if not is_address(folder):
        for name in names:
            require_file(joined(folder, name))
    return [Source(splits[name], name, joined(folder, name)) for name in names]


def _splits_in(folder: str, names: list[str]) -> dict[str, str]:
    """The split of each name that has one, if one is of train or all have one; else "" for all names. Subfolders come
    before files. Raises UsageError for a train split deeper in the folder: its validation split would be trained on."""
    by_folder = {name: SPLIT_NAMES.get(name.split("/")[0].lower(), "") for name in names if "/" in name}
    by_name = {name: _split_of(name) for name in names if "/" not in name}
    for splits in (by_folder, by_name):
        if "train" in splits.values() or (all(splits.values()) and len(splits) == len(names)):
            return {name: split for name, split in splits.items() if split}
    for name in by_folder:
        *parents, last = name.lower().split("/")
        if "train" in (*parents, _split_of(last)):
            raise UsageError("the splits lie deeper in this folder", folder, f"name the folder that has {name}")
    return dict.fromkeys(names, "")


def _split_of(name: str) -> str:
    match = SPLIT_FILE.fullmatch(name.lower().removesuffix(ending_of(name)).removesuffix(".ds").removesuffix(".bin"))
    return SPLIT_NAMES[match[1]] if match else ""


def _say_skipped(folder: str, names: Iterable[str], kept: Iterable[str], why: str) -> None:
    skipped = sorted({*names} - {*kept})
    if skipped:
        more = f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else ""
        logger.info(f"skipped     {', '.join(skipped[:5])}{more} in {folder}: {why}")
