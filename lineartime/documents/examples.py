"""Documents with labels or without: a text, or a pair of texts, of files, folders, stores, stdin and the hub.

`data.read_text` says which files are read, and how. In a folder the label of a document that is a file is the name of
the folder that holds it, the first below the given one."""

import io
import math
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lineartime.data.files import Name, expanded, is_folder, joined
from lineartime.data.read_text import (
    READS,
    ending_of,
    is_one_document,
    read_pieces,
    read_rows,
    small_bytes,
    text_blocks,
    text_files_below,
)
from lineartime.data.rows import Row, checked, json_lines, text_field, warn_once
from lineartime.data.sources import require_file
from lineartime.data.streams import ON_HUB, hub_rows
from lineartime.errors import DataError, raise_faults
from lineartime.finetune_config import Fields, Labels
from lineartime.settings import require

Label = str | tuple[str, ...] | float
MAX_STDIN = 256 << 20
"""Most bytes of stdin, which are held in memory."""


class Example(NamedTuple):
    """A document, or a pair of texts, and its label if one is asked for."""

    file: str
    number: int
    """Of the document in its file, from 1."""
    where: str
    """Its place, for errors."""
    text: str
    second: str | None
    label: Label | None


def text_examples(texts: Iterable[str | tuple[str, str]], in_pairs: bool = False) -> Iterator[Example]:
    """Texts, or pairs of texts, as documents. Raises UsageError for what is neither, and for one text if they must be
    in pairs; DataError for one that is white space."""
    require(not isinstance(texts, str), "a list of texts is needed", f"{str(texts)[:40]!r}", "put the text into a list")
    for number, text in enumerate(texts, 1):
        pair = (text, None) if isinstance(text, str) else text
        require(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
                and isinstance(pair[1], str | None), "neither a text nor a pair of texts", f"text {number}")
        require(pair[1] is not None or not in_pairs, "this model learned from pairs of texts", f"text {number}",
                "give it a pair")
        yield example_of("", number, f"text {number}", pair[0], pair[1])


def read_examples(inputs: Iterable[Name | bytes], fields: Fields | None = None,
                  labels: Labels | None = None) -> Iterator[Example]:
    """The documents of all inputs, in order; those of a folder in the order of their names.

    inputs: files, folders, patterns, addresses, `hub:NAME/SPLIT`, `-` for stdin, or bytes that were read from it.
    labels: the kind of their labels; None: none is read. Raises UsageError for an input of an unknown kind. Raises
    DataError, with its place, for a document without text or label, a field that is missing, and files that cannot be
    read; it comes after the documents of all other files, so that it tells of all faulty files."""
    fields, faults = fields or Fields(), list[DataError]()
    for each in inputs:
        for given, folder in [(each, None)] if isinstance(each, bytes) else files_of(each):
            try:
                yield from _examples_of(given, folder, fields, labels)
            except DataError as e:
                faults.append(e)
    raise_faults(faults)


def files_of(name: Name) -> Iterator[tuple[str, str | None]]:
    """The files that an input stands for, in order: itself, those that a pattern matches, or those below a folder that
    can be read. With each comes the first folder below the given one that holds it, or None. Warns of files in a folder
    that are skipped. Raises DataError for a folder without any."""
    for path in expanded(name):
        if not is_folder(path):
            yield path, None
            continue
        names, others = text_files_below(path)
        if not names:
            raise DataError("nothing to read in this folder", path, READS)
        if others:
            warn_once(f"skipped in {path}: {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} "
                      f"({len(others):,} files); {READS}")
        for each in names:
            yield joined(path, each), each.split("/")[0] if "/" in each else None


def _examples_of(given: str | bytes, folder: str | None, fields: Fields, labels: Labels | None) -> Iterator[Example]:
    """The examples of one file, of stdin, or of a data set of the hub. folder: the label of what is one document.
    Raises DataError if there is none."""
    name = "stdin" if isinstance(given, bytes) or given == "-" else given
    content = _content_of(given, [fields.text, *([fields.pair] if fields.pair else []),
                                  *([fields.label] if labels else [])], fields)
    if isinstance(content, str):
        require(fields.pair is None, "this file has no pairs of texts", name, "name one that has rows")
        label = labels and parse_label(folder, labels, name, "put it into a folder of that name")
        yield example_of(name, 1, name, content, None, label)
        return
    number = 0
    for number, (where, row) in enumerate(content, 1):
        text = text_field(row, fields.text, where)
        second = text_field(row, fields.pair, where) if fields.pair else None
        if labels and fields.label not in row:
            raise DataError(f"no field {fields.label!r}", where, f"the row has {', '.join(map(repr, row))}")
        label = labels and parse_label(row[fields.label], labels, where, "give it one or take it out")
        yield example_of(name, number, where, text, second, label)
    if not number:
        raise DataError("no documents", name, "take it out")


def _content_of(given: str | bytes, columns: list[str], fields: Fields) -> str | Iterator[Row]:
    """The text of what is one document, else rows, which have these columns if they are of parquet."""
    encoding = fields.encoding
    if given == "-":
        given = small_bytes(given, MAX_STDIN)
    if isinstance(given, bytes):
        if not given:
            raise DataError("nothing on stdin", todo="pipe some text into it")
        if fields.stdin == "jsonl":
            return json_lines(io.BytesIO(given), "stdin", encoding=encoding)
        return "".join(text_blocks([given], "stdin", encoding=encoding))
    if given.startswith(ON_HUB):
        return hub_rows(given)
    checked(given, "its name", ascii(given))  # rows could not hold it
    require_file(given)
    require(ending_of(given) != "", "unknown kind of file", given, READS)
    if is_one_document(given):
        return "".join(piece.text for piece in read_pieces(given, encoding=encoding))
    return read_rows(given, columns, encoding=encoding)


def example_of(file: str, number: int, where: str, text: str, second: str | None,
               label: Label | None = None) -> Example:
    """An example. Raises DataError for a text that is white space."""
    if not text.strip() or (second is not None and not second.strip()):
        raise DataError("an empty document", where, "take it out")
    return Example(file, number, where, text, second, label)


def parse_label(value: Any, labels: Labels, where: str, todo: str) -> Label:
    """A label of this kind. Several are a list, or text with ";" between them. Raises DataError."""
    if value is None or value == "":
        raise DataError("no label", where, todo)
    if labels == "number":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError("a label that is no number", f"{where}: {value!r:.40}", "give it a number or take it out")
        return number
    if labels == "several" and isinstance(value, list | str):
        parts = value if isinstance(value, list) else value.split(";")
        return tuple(dict.fromkeys(name_of_class(part, where) for part in parts))
    return name_of_class(value, where)


def name_of_class(value: Any, where: str) -> str:
    """A class as text, in Unicode's form NFC, so that a letter with an accent is the same however it was typed. Raises
    DataError for what is neither text nor a whole number."""
    name = unicodedata.normalize("NFC", str(value)).strip()
    if not isinstance(value, str | int) or not name:
        raise DataError("a label that is no class", f"{where}: {value!r:.40}",
                        "it is text or a whole number; --labels takes several and number too")
    return checked(name, "the label", where)
