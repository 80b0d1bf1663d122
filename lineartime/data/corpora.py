"""The paper's data sets in the form they are published in: C4, Wiki-40B and PG-19.

C4 (`allenai/c4`) is gzipped lines of JSON, and its text is text. Wiki-40B (`google/wiki40b`) is parquet, and its text
has markers. PG-19 is a `.txt` per book or the parquet of `emozilla/pg19`, and has an official number of words."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lineartime.atomic_io import scratch_folder
from lineartime.data.hub import hub_library, hub_records
from lineartime.data.read_text import Convert, checked
from lineartime.data.splits import SPLITS, Source
from lineartime.errors import DataError, UsageError

HUB = {"c4": ("allenai/c4", "en"), "wiki40b": ("google/wiki40b", "en"), "pg19": ("emozilla/pg19", None)}
"""Name and configuration of each data set on the hub."""
PREFERRED = {"wiki40b": ".parquet"}
"""The published kind of file, which is read where copies in other kinds lie beside it."""
MARKER = re.compile("_START_(ARTICLE|SECTION|PARAGRAPH)_")
PG19 = ((28_602, 1_973_136_207), (50, 3_007_061), (100, 6_966_499))
"""Books and words of the train, validation and test split, as published."""
PG19_TOLERANCE = 0.02


def published_words(documents: int, words: int) -> int | None:
    """The official number of words of the PG-19 split that these counts are of; None for any other text.

    A split is taken for the published one if it has exactly as many books, and within 2% as many words between white
    space: that much the copies differ in line ends, headers and how they count. No other choice of books is that close
    by accident, and a split that is cut or mixed has another number of books. It costs nothing; a hash of the text
    would know one copy only."""
    for books, official in PG19:
        if documents == books and abs(words - official) <= PG19_TOLERANCE * official:
            return official
    return None


def wiki40b_text(text: str) -> str:
    """Plain text of a Wiki-40B article. Whatever the text is, no marker is left in it and no word lost.

    A marker begins a part: `_START_ARTICLE_` the title, `_START_SECTION_` a heading, `_START_PARAGRAPH_` paragraphs, in
    which `_NEWLINE_` is a line feed. A part is stripped of white space around it, and left out where nothing remains. A
    paragraph that follows its heading begins on the next line; all other parts have a blank line between them:

        Title                       _START_ARTICLE_
                                    Title
        First paragraph.            _START_PARAGRAPH_
        Second paragraph.           First paragraph._NEWLINE_Second paragraph.
                                    _START_SECTION_
        Heading                     Heading
        More text.                  _START_PARAGRAPH_
                                    More text.

    Some languages are published as the literal of the text's bytes, b'\\n_START_ARTICLE_...', which is read as such.
    Raises ValueError for a text that is not blank and begins no part: it is not from Wiki-40B."""
    if text.startswith(("b'", 'b"')) and text.endswith(text[1]):
        text = text[2:-1].encode("ascii").decode("unicode_escape").encode("latin-1").decode("utf-8")
    before, *marked = MARKER.split(text)
    if not marked and not text.isspace() and text:
        raise ValueError("no structure marker such as _START_ARTICLE_")
    written, last = _lines(before), ""
    for part, content in zip(marked[::2], marked[1::2], strict=True):
        content = _lines(content)
        if content and written:
            written += "\n" if (last, part) == ("SECTION", "PARAGRAPH") else "\n\n"
        if content:
            written, last = written + content, part
    return written


def _lines(content: str) -> str:
    return content.replace("_NEWLINE_", "\n").strip()


def converter(task: str | None) -> Convert | None:
    """What makes text of a record of the task, for `read_text.read_pieces`; None where the record has text."""
    return _wiki40b if task == "wiki40b" else None


def _wiki40b(text: str, where: str) -> str:
    try:
        return wiki40b_text(text)
    except ValueError as e:
        raise DataError("not a Wiki-40B article", where, str(e)) from None


def check_kinds(task: str | None, sources: Iterable[Source]) -> list[str]:
    """What a person should know of the files that were chosen. Raises UsageError for a kind that the task has not."""
    unread: set[str] = set()
    for source in sources:
        if task == "wiki40b" and source.path.name.lower().endswith(".txt"):
            raise UsageError("Wiki-40B is not .txt", source.path, "name .parquet or .jsonl.gz, or leave out the task")
        unread |= {*source.unread}
    if unread and task:
        return [f"{' and '.join(sorted(unread))} files lie beside the {PREFERRED[task]} files and were not read"]
    return []


@contextlib.contextmanager
def hub_files(task: str, out: Path, *, documents: int | None, field: str,
              show: Callable[..., Iterator[Any]]) -> Iterator[list[Path]]:
    """The splits of a data set on the hub as files of their text, `train.jsonl` and so on, in a folder beside `out`
    that is gone afterwards.

    `prepare` reads text several times and the network should be read once: this takes as much disk as the text.
    `documents` takes the first so many of each split; `show` passes records on and reports progress.
    Raises UsageError where `datasets` is not installed, DataError where the data set cannot be read or is not what it
    should be."""
    library = hub_library()
    (name, config), convert = HUB[task], converter(task)
    with scratch_folder(out) as folder:
        paths = []
        records = show(f"reading {name}", hub_records(library, name, config, SPLITS, documents), None, lambda _: 1)
        for split, group in itertools.groupby(records, key=lambda record: record[0]):
            paths.append(folder / f"{split}.jsonl")
            with paths[-1].open("w", encoding="utf-8") as file:
                for number, (_, record) in enumerate(group):
                    where = f"{name}, {split}, document {number}"
                    text = _text_of_record(record, field, where)
                    text = convert(text, where) if convert else text
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        if folder / "train.jsonl" not in paths:
            raise DataError("no train split", name, f"it has {', '.join(path.stem for path in paths) or 'nothing'}")
        yield paths


def _text_of_record(record: Any, field: str, where: str) -> str:
    if not isinstance(record, dict) or field not in record:
        names = ", ".join(map(repr, list(record)[:8])) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"no field {field!r}", where, f"the record has {names}")
    return checked(record[field], f"field {field!r}", where)
