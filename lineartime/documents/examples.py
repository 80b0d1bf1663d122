"""Documents with labels or without: a text, or a pair of texts, of files, folders and stdin.

`data.read_text` says which files are read, and how. In a folder the label of a document that is a file is the name of
the folder that holds it, the first below the given one."""

import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lineartime.data.files import expanded
from lineartime.data.read_text import (
    READS,
    Row,
    check_text,
    checked,
    ending_of,
    is_one_document,
    read_pieces,
    read_rows,
    text_blocks,
    text_field,
    text_files_below,
    warn_once,
)
from lineartime.errors import DataError
from lineartime.finetune_config import Fields, Labels
from lineartime.settings import require

Label = str | tuple[str, ...]


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


def read_stdin() -> bytes:
    """All of stdin, which is waited for. Raises DataError for nothing."""
    content = sys.stdin.buffer.read() if sys.stdin is not None else b""
    if not content:
        raise DataError("nothing on stdin", todo="pipe a document into it")
    return content


def text_examples(texts: Iterable[str | tuple[str, str]]) -> Iterator[Example]:
    """Texts, or pairs of texts, as documents. Raises UsageError for what is neither, DataError for one that is white
    space."""
    require(not isinstance(texts, str), "a list of texts is needed", f"{str(texts)[:40]!r}", "put the text into a list")
    for number, text in enumerate(texts, 1):
        pair = (text, None) if isinstance(text, str) else text
        require(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
                and isinstance(pair[1], str | None), "neither a text nor a pair of texts", f"text {number}")
        yield example_of("", number, f"text {number}", pair[0], pair[1])


def read_examples(inputs: Iterable[Path | str | bytes], fields: Fields | None = None,
                  labels: Labels | None = None) -> Iterator[Example]:
    """The documents of all inputs, in order; those of a folder in the order of their names. Bytes are what `read_stdin`
    returns, one document.

    labels: the kind of their labels; None: none is read. Raises UsageError for an input of an unknown kind. Raises
    DataError, with its place, for a document without text or label, a field that is missing, and files that cannot be
    read."""
    fields = fields or Fields()
    columns = [fields.text, *([fields.pair] if fields.pair else []), *([fields.label] if labels else [])]
    for each in inputs:
        if isinstance(each, bytes):
            yield of_text("".join(text_blocks(io.BytesIO(each), "stdin")), "stdin", fields)
            continue
        for path in files_of(each):  # a file of rows has a document in each row, any other is one document
            check_text(str(path), "its name", ascii(str(path)))  # rows could not hold it
            require(ending_of(path.name) != "", "unknown kind of file", str(path), READS)
            if not path.is_file():
                raise DataError("cannot read the input", path, "there is no such file, or it is not a regular one")
            if not is_one_document(path.name):
                yield from of_rows(read_rows(path, columns), str(path), fields, labels)
                continue
            above = path.relative_to(each).parts[:-1] if path.is_relative_to(each) else ()
            label = labels and parse_label(above[0] if above else None, labels, str(path),
                                           "put it into a folder of that name")
            yield of_text("".join(piece.text for piece in read_pieces(path)), str(path), fields, label)


def of_text(text: str, where: str, fields: Fields, label: Label | None = None) -> Example:
    """The example of a file that is one document."""
    require(fields.pair is None, "this file has no pairs of texts", where, "name one that has rows")
    return example_of(where, 1, where, text, None, label)


def of_rows(rows: Iterable[Row], file: str, fields: Fields, labels: Labels | None) -> Iterator[Example]:
    """The examples of rows. Raises DataError if there is none."""
    number = 0
    for number, (where, row) in enumerate(rows, 1):
        text = text_field(row, fields.text, where)
        second = text_field(row, fields.pair, where) if fields.pair else None
        if labels and fields.label not in row:
            raise DataError(f"no field {fields.label!r}", where, f"the row has {', '.join(map(repr, row))}")
        label = labels and parse_label(row[fields.label], labels, where, "give it one or take it out")
        yield example_of(file, number, where, text, second, label)
    if not number:
        raise DataError("no documents", file, "take it out")


def files_of(name: Path | str) -> list[Path]:
    """The files that an input stands for, in order: itself, those that a pattern matches, or those below a folder that
    can be read. Warns of files in a folder that are skipped. Raises DataError for a folder without any."""
    files: list[Path] = []
    for path in map(Path, expanded(name)):
        if not path.is_dir():
            files.append(path)
            continue
        names, others = text_files_below(path)
        if not names:
            raise DataError("nothing to read in this folder", path, READS)
        if others:
            warn_once(f"skipped in {path}: {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} "
                      f"({len(others):,} files); {READS}")
        files += [path / each for each in names]
    return files


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
    if labels == "several" and isinstance(value, list | str):
        parts = value if isinstance(value, list) else value.split(";")
        return tuple(dict.fromkeys(name_of_class(part, where) for part in parts))
    return name_of_class(value, where)


def name_of_class(value: Any, where: str) -> str:
    """A class as text. Raises DataError for what is neither text nor a whole number."""
    name = str(value).strip()
    if not isinstance(value, str | int) or not name:
        raise DataError("a label that is no class", f"{where}: {value!r:.40}",
                        "it is text or a whole number; --labels several takes lists")
    return checked(name, "the label", where)
