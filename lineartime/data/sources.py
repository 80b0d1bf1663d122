"""Where text comes from: files of every split, by their names; stdin; data sets of the hub."""

import contextlib
import importlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lineartime.base.errors import DataError, UsageError, raised_as
from lineartime.base.settings import require
from lineartime.base.stores import Name, expanded, files_below, is_address, packing_of, reading, size_of, store_of
from lineartime.base.words import Progress
from lineartime.data.prepare_config import SAMPLE, PrepareSettings
from lineartime.data.read_text import ENDING, READS, Record, is_token_file, kind_of, text_field, text_of

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation",
               "dev": "validation", "test": "test"}
SPLIT_FILE = re.compile(rf"(?:\w+-)?({'|'.join(SPLIT_NAMES)})(?:[-.]\d+(?:-of-\d+)?)?(?:{ENDING.pattern}|\.ds|\.bin)",
                        re.IGNORECASE)
"""Names of a split's files, such as `train.txt` and `c4-train.00000-of-01024.json.gz`."""
ABOUT = re.compile(r"(^|/)(readme|license|notice|contributing|changelog)\.md$", re.IGNORECASE)
"""Pages about a folder, which are no text of it."""
EXPANSION = 4  # how many times larger than its file a packed text, or one in parquet, is taken to be
ON_HUB = "hub:"
HUB_NAME = re.compile(ON_HUB + r"([^:\[\]]+)(?::([^:/\[\]]+))?/([^:/\[\]]+)(?:\[:([1-9]\d*)\])?")


class Source(NamedTuple):
    """One file of a split. `name` is relative to the user's argument: the same on any machine.
    is_text: it is one document, whatever its name ends with."""

    split: str
    name: str
    path: str
    is_text: bool = False

    @property
    def kind(self) -> str:
        return ".txt" if self.is_text else kind_of(self.path)

    @property
    def n_bytes(self) -> int:
        """Of its text; where that is packed, a guess."""
        return size_of(self.path) * (EXPANSION if packing_of(self.path) or self.kind == ".parquet" else 1)


def find_text(settings: PrepareSettings, work: Path, progress: Progress | None) -> list[Source]:
    """The files of every split, see `find_sources`. Stdin and data sets of the hub are first copied
    into `work`, for text is read several times. Raises for text that does not fit the settings."""
    saved = {split: [saved_stream(name, settings.field, work / split / str(number), progress)
                     for number, name in enumerate(names)] for split, names in settings.names.items()}
    inputs = [SAMPLE] if settings.sample else saved["train"]
    sources = find_sources(inputs, saved["validation"], saved["test"], task=settings.task)
    for source in sources:
        require(settings.held_out is None or source.split != "validation", "two validation splits",
                f"held_out = {settings.held_out}", "the inputs have one already; leave out held_out")
        require(settings.task != "wiki40b" or source.kind != ".txt", "Wiki-40B is not .txt or .md", source.path,
                "name .parquet or .jsonl.gz, or leave out the task")
        require(settings.tokenizer != "train" or not is_token_file(source.path),
                "token files need the tokenizer that made them", source.path, "name it: --tokenizer FILE")
    return sources


@contextlib.contextmanager
def copies_named(work: Path, settings: PrepareSettings) -> Iterator[None]:
    """Inside the block, an error that names a copy in `work` names stdin or the data set."""
    def given(copy: re.Match[str]) -> str:
        name = settings.names[copy[1]][int(copy[2])]
        return "stdin" if name == "-" else name

    try:
        yield
    except (DataError, UsageError) as e:
        raise type(e)(re.sub(rf"{re.escape(str(work))}/(\w+)/(\d+)/[^/]+?[.](?:txt|jsonl)", given, str(e))) from None


def find_sources(inputs: Iterable[Name], validation: Iterable[Name] = (), test: Iterable[Name] = (), *,
                 task: str | None = None) -> list[Source]:
    """The files of every split, in an order that depends on names only.

    inputs: the train split, unless files, folders or subfolders are called train, validation and
    test; then only these. validation, test: files or folders of these splits. task: of Wiki-40B the
    published `.parquet` is read, not a copy beside it. Raises UsageError for ambiguous inputs and
    unknown kinds of files, DataError for what is missing and for nothing to read."""
    found = {split: [each for name in names for each in _found_by(name, task)]
             for split, names in (("", inputs), ("validation", validation), ("test", test))}
    sources = [source for _, own in found[""] for source in own]
    splits = {source.split for source in sources}
    if (held_out := splits & {"validation", "test"}) and "" in splits:
        bare = next(source.path for source in sources if not source.split)
        raise UsageError("the other inputs name their split and this one does not", bare,
                         "leave it out, rename it, or give the others with --validation and --test")
    if "train" not in splits or not held_out:
        sources = [source._replace(split="train") for source in sources]
    for split in ("validation", "test"):
        is_there = any(source.split == split for source in sources)
        for path, own in found[split]:
            require(not is_there, f"two {split} splits", path, "the inputs have one already")
            has_several = len({source.split for source in own}) > 1
            require(not has_several, "this folder has splits of its own", path, "name the files or the subfolder")
            sources += [source._replace(split=split) for source in own]
    seen: set[str] = set()
    for source in sources:
        real = source.path if is_address(source.path) else os.path.realpath(source.path)
        require(real not in seen, "the same file twice", source.path, "name it once")
        seen.add(real)
    return in_order(sources)


def in_order(sources: Iterable[Source]) -> list[Source]:
    """Files by split: train, validation, test."""
    return sorted(sources, key=lambda source: SPLITS.index(source.split))


def _found_by(name: Name, task: str | None) -> Iterator[tuple[str, list[Source]]]:
    """The files and folders that a name stands for, each with its files that are read."""
    for path in expanded(name):
        with reading(path):
            store, there = store_of(path)
            is_folder = store.isdir(there)
        if is_folder:
            split = SPLIT_NAMES.get(PurePosixPath(path).name.lower(), "")
            below = [Source("", each, os.path.join(path, each)) for each in files_below(path)]
            yield path, [source._replace(split=source.split or split) for source in _read_in(path, below, task)]
            continue
        size_of(path)  # which says what is missing
        require(is_address(path) or os.path.isfile(path), "not a regular file", path, kind=DataError)
        own = path.rpartition("/")[2]
        source = Source(_split_of(own), own, path)
        if not source.kind and not is_token_file(path):
            todo = (f"{READS}; any other UTF-8 text that is named itself; and token files, .ds of datatrove and "
                    ".bin of Megatron-LM")
            require(path == str(name), "unknown kind of file", path, todo)
            with raised_as(UsageError, "unknown kind of file", path, DataError, todo=todo):
                next(text_of(path), "")  # raises unless it begins as text
            source = source._replace(is_text=True)
        yield path, [source]


def _read_in(folder: str, there: list[Source], task: str | None) -> list[Source]:
    """The files of a folder that are read: text without pages about the folder, or token files;
    only the splits, where subfolders or files are called train, validation and test. They must be
    of one kind: whole documents, or rows in files of one ending."""
    text = [source for source in there if source.kind and not ABOUT.search(source.name)]
    sources = _with_splits(folder, text or [source for source in there if is_token_file(source.path)])
    require(bool(sources), "nothing to read in this folder", folder, READS, DataError)
    kinds = sorted({source.kind for source in sources})
    if task == "wiki40b" and ".parquet" in kinds:
        sources = [source for source in sources if source.kind == ".parquet"]
    elif len(kinds) > 1:
        raise UsageError("several kinds of files side by side", f"{folder} has {' and '.join(kinds)}",
                         f"name the files of one kind, such as {folder}/*{kinds[0]}")
    if text and len(sources) < len(there):  # beside token files lie their indexes
        logger.info(f"left out    {len(there) - len(sources):,} of {len(there):,} files in {folder}: no text, about "
                    "the folder, or of no split")
    return sources


def _with_splits(folder: str, sources: list[Source]) -> list[Source]:
    """The files that have a split, if one is of train or all have one; all, if none has. Raises
    UsageError for others, and for a train split deeper in the folder: what is held out would be
    trained on."""
    deep = [source for source in sources if "/" in source.name]
    by_folder = [source._replace(split=SPLIT_NAMES.get(source.name.split("/")[0].lower(), "")) for source in deep]
    by_name = [source._replace(split=_split_of(source.name)) for source in sources if "/" not in source.name]
    for own in (by_folder, by_name):
        splits = [source.split for source in own]
        if "train" in splits or (all(splits) and len(own) == len(sources)):
            return [source for source in own if source.split]
    for source in deep:
        *parents, last = source.name.lower().split("/")
        if "train" in (*parents, _split_of(last)):
            raise UsageError("the splits lie deeper in this folder", folder, f"name the folder that has {source.name}")
    for source in (*by_folder, *by_name):
        require(not source.split, "this folder has a split and text of none", os.path.join(folder, source.name),
                "rename it or leave it out, or give it with --validation or --test")
    return sources


def _split_of(name: str) -> str:
    found = SPLIT_FILE.fullmatch(name)
    return SPLIT_NAMES[found[1].lower()] if found else ""


def saved_stream(name: str, field: str, folder: Path, progress: Progress | None) -> str:
    """The name of a file or folder itself; for stdin (`-`) and the hub, a new file in `folder`."""
    if name != "-" and not name.startswith(ON_HUB):
        return name
    folder.mkdir(parents=True)
    path = folder / ("stdin.txt" if name == "-" else f"{on_hub(name)[2]}.jsonl")  # a split, as `find_sources` knows it
    with path.open("w", encoding="utf-8", newline="") as file:
        if name == "-":
            file.writelines(text_of("-"))  # checked as it comes, as a device may have no end
        else:
            for number, (where, fields) in enumerate(hub_rows(name), 1):
                file.write(json.dumps({field: text_field(fields, field, where)}) + "\n")
                if progress is not None:
                    progress(f"reading {name}", number, None)
    if name == "-" and not path.stat().st_size:
        raise DataError("no text", "stdin", "pipe some in: cat notes.txt | lineartime prepare - ...")
    return str(path)


def on_hub(name: str) -> tuple[str, str | None, str, int | None]:
    """Data set, configuration, split and number of records of a name. Raises UsageError."""
    found = HUB_NAME.fullmatch(name)
    if found is None:
        raise UsageError("no such name on the hub", name, "say hub:NAME/SPLIT, as in hub:stanfordnlp/imdb/train, or "
                         "hub:NAME:CONFIGURATION/SPLIT[:RECORDS], as in hub:allenai/c4:en/train[:1000]")
    data, config, split, n_most = found.groups()
    return data, config, split, int(n_most) if n_most else None


def hub_rows(name: str) -> Iterator[Record]:
    """Stream the records of a name such as `hub:allenai/c4:en/train[:1000]`, and no more. Raises
    UsageError for another name and without `datasets`, DataError for errors of the library."""
    data, config, split, n_most = on_hub(name)
    with raised_as(UsageError, "reading the hub needs datasets", name, ImportError, todo="pip install datasets"):
        library = importlib.import_module("datasets")
    with contextlib.ExitStack() as after:  # no bars and warnings of its own meanwhile
        for each in map(logging.getLogger, ("datasets", "huggingface_hub")):
            after.callback(each.setLevel, each.level)
            each.setLevel(logging.ERROR)
        if not library.are_progress_bars_disabled():
            after.callback(library.enable_progress_bars)
            library.disable_progress_bars()
        try:
            records = library.load_dataset(data, config, split=split, streaming=True)
            for number, record in enumerate(itertools.islice(records, n_most), 1):
                yield Record(f"{name}, row {number}", record)
        except Exception as e:
            raise DataError("cannot read from the hub", name, f"{type(e).__name__}: {e}"[:300]) from None
