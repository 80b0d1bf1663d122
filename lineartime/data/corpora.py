"""The paper's data sets in their published form: C4, Wiki-40B and PG-19.

C4 (`allenai/c4`) is gzipped lines of JSON with plain text. Wiki-40B (`google/wiki40b`) is parquet whose text has
structure markers. PG-19 is a `.txt` per book or the parquet of `emozilla/pg19`, and has an official number of words."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lineartime.atomic_io import scratch_folder
from lineartime.data.hub import hub_library, hub_records
from lineartime.data.read_text import Convert, text_field
from lineartime.data.splits import SPLITS, Source
from lineartime.errors import DataError, UsageError

HUB = {"c4": ("allenai/c4", "en"), "wiki40b": ("google/wiki40b", "en"), "pg19": ("emozilla/pg19", None)}
"""Name and configuration of each data set on the hub."""
PREFERRED = {"wiki40b": ".parquet"}
"""The ending of the published files. Copies in other formats beside them are not read."""
MARKER = re.compile("_START_(ARTICLE|SECTION|PARAGRAPH)_")
PG19 = ((28_602, 1_973_136_207), (50, 3_007_061), (100, 6_966_499))
"""Books and words of the train, validation and test split, as published."""
PG19_TOLERANCE = 0.02


def published_words(documents: int, words: int) -> int | None:
    """The official number of words of the PG-19 split with these counts; None for any other text.

    A split counts as published if it has exactly as many books and, within 2%, as many words between white space.
    Copies differ by that much in line ends and headers, so a hash of the text would recognise one copy only."""
    for books, official in PG19:
        if documents == books and abs(words - official) <= PG19_TOLERANCE * official:
            return official
    return None


def wiki40b_text(text: str) -> str:
    """Plain text of a Wiki-40B article, with every word and without markers.

    A marker begins a part: `_START_ARTICLE_` the title, `_START_SECTION_` a heading, `_START_PARAGRAPH_` paragraphs, in
    which `_NEWLINE_` is a line feed. Each part is stripped of white space; empty parts are left out. A paragraph that
    follows its heading begins on the next line; a blank line separates all other parts:

        Title                       _START_ARTICLE_
                                    Title
        First paragraph.            _START_PARAGRAPH_
        Second paragraph.           First paragraph._NEWLINE_Second paragraph.
                                    _START_SECTION_
        Heading                     Heading
        More text.                  _START_PARAGRAPH_
                                    More text.

    Some languages are published as Python literals of bytes, b'\\n_START_ARTICLE_...', which are decoded.
    Raises ValueError for a text without a marker that is not blank, because it is not from Wiki-40B."""
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
    """The function that turns a record's field into text, for `read_text.read_pieces`; None if the field is text."""
    return _wiki40b_record if task == "wiki40b" else None


def _wiki40b_record(text: str, where: str) -> str:
    try:
        return wiki40b_text(text)
    except ValueError as e:
        raise DataError("not a Wiki-40B article", where, str(e)) from None


def check_kinds(task: str | None, sources: list[Source]) -> list[str]:
    """Notes about files that were left out. Raises UsageError for a format that the task does not have."""
    for source in sources:
        if task == "wiki40b" and source.path.name.lower().endswith(".txt"):
            raise UsageError("Wiki-40B is not .txt", source.path, "name .parquet or .jsonl.gz, or leave out the task")
    unread = {ending for source in sources for ending in source.unread}
    if unread and task:
        return [f"{' and '.join(sorted(unread))} files lie beside the {PREFERRED[task]} files and were not read"]
    return []


@contextlib.contextmanager
def hub_files(task: str, out: Path, *, documents: int | None, field: str,
              show: Callable[..., Iterator[Any]]) -> Iterator[list[Path]]:
    """Download the splits of a data set on the hub into files (`train.jsonl`, ...) in a temporary folder beside `out`.

    The files take as much disk as the text; with them the text is downloaded once although `prepare` reads it several
    times. documents: read only the first so many documents of each split. show: passes records on and reports progress.
    Raises UsageError if `datasets` is not installed, DataError for a data set that cannot be read or has the wrong
    form."""
    library = hub_library()
    (name, config), convert = HUB[task], converter(task)
    with scratch_folder(out) as folder:
        paths = []
        records = show(f"reading {name}", hub_records(library, name, config, SPLITS, documents), None)
        for split, group in itertools.groupby(records, key=lambda record: record[0]):
            paths.append(folder / f"{split}.jsonl")
            with paths[-1].open("w", encoding="utf-8") as file:
                for number, (_, record) in enumerate(group):
                    where = f"{name}, {split}, document {number}"
                    text = text_field(record, field, where)
                    text = convert(text, where) if convert else text
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        if folder / "train.jsonl" not in paths:
            raise DataError("no train split", name, f"it has {', '.join(path.stem for path in paths) or 'nothing'}")
        yield paths
