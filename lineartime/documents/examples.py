"""Documents with labels or without, read one after another from files, folders, the hub or stdin.

`data.read_text` says which files are read, and how. In a folder the label of a document that is a file is the name of
the folder that holds it, the first below the given one. `hub:NAME/SPLIT`, or `hub:NAME:CONFIGURATION/SPLIT`, is a data
set of the hub."""

import io
import itertools
import logging
import math
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast, get_args

from lineartime.data.hub import hub_library, hub_records
from lineartime.data.read_text import (
    MAX_LINE_BYTES,
    READS,
    Piece,
    Row,
    checked,
    cut,
    ending_of,
    is_one_document,
    json_lines,
    read_pieces,
    read_rows,
    text_blocks,
    text_field,
    text_files_below,
    warn_once,
)
from lineartime.errors import DataError
from lineartime.finetune_config import Fields, Labels
from lineartime.settings import require, require_name

STDIN, ON_STDIN, ON_HUB = "-", "stdin", "hub:"
"""The names of stdin as an input and as a place, and how the name of a data set of the hub begins."""
Stdin = Literal["text", "jsonl"]
"""What stdin has: the text of one document, or a document in each line of JSON."""
Label = str | tuple[str, ...] | float

logger = logging.getLogger(__name__)


class Example(NamedTuple):
    """A document, or a pair of texts, and its label if one is asked for."""

    file: str
    number: int
    """Of the document in its file, from 1."""
    where: str
    """Its place, for errors."""
    text: Iterable[str]
    """In pieces, to be read once. Reading them raises DataError for a document without text."""
    second: str | None
    label: Label | None


def text_examples(texts: Iterable[str | tuple[str, str]]) -> Iterator[Example]:
    """Texts, or pairs of texts, as documents. Raises UsageError for what is neither, DataError for one that is white
    space."""
    require(not isinstance(texts, str), "a list of texts is needed", f"{str(texts)[:40]!r}", "put the text into a list")
    for number, text in enumerate(texts, 1):
        pair = (text, None) if isinstance(text, str) else text
        require(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
                and isinstance(pair[1], str | None), "neither a text nor a pair of texts", f"text {number}")
        one, second = pair
        require_text(one, second, f"text {number}")
        yield Example("", number, f"text {number}", (one,), second, None)


def read_examples(names: Iterable[Path | str], fields: Fields | None = None, labels: Labels | None = None,
                  stdin: Stdin = "text", source: "WaitingInput | None" = None) -> Iterator[Example]:
    """The documents of all inputs, in order; those of a folder in the order of their names.

    names: files, folders, `hub:NAME/SPLIT`, or `-` for stdin. labels: the kind of their labels; None: none is read.
    stdin: what stdin has. source: stdin, if the caller asks it whether it is idle. Raises UsageError for an input of an
    unknown kind: at once for what names alone tell. Raises DataError, with its place, for a document without text or
    label, a field that is missing, and files that cannot be read."""
    inputs, fields = [str(name) for name in names], fields or Fields()
    require_name("kind of stdin", stdin, get_args(Stdin))
    if labels is not None:
        require_name("kind of labels", labels, get_args(Labels))
    if STDIN in inputs and stdin == "text":
        require(labels is None, "a document of stdin has no label", STDIN, "name a file")
        require(fields.pair is None, "a document of stdin is no pair of texts", STDIN,
                "it may be JSON lines: --stdin jsonl")
    for name in inputs:
        if name.startswith(ON_HUB):
            on_hub(name)
    return itertools.chain.from_iterable(of_input(name, fields, labels, stdin, source) for name in inputs)


def of_input(name: str, fields: Fields, labels: Labels | None, stdin: Stdin,
             source: "WaitingInput | None") -> Iterator[Example]:
    """The documents of one input, see `read_examples`."""
    if name.startswith(ON_HUB):
        data, config, split = on_hub(name)
        rows = enumerate(hub_records(hub_library(), data, config, [split]), 1)
        yield from of_records((Row(f"{name}, row {row}", record) for row, (_, record) in rows), name, fields, labels)
    elif name != STDIN:
        for path, folder in files_and_labels(Path(name)):
            yield from of_file(path, fields, labels, folder)
    else:
        file = cast("IO[bytes]", source or WaitingInput())
        if stdin == "jsonl":
            yield from of_records(json_lines(file, ON_STDIN), ON_STDIN, fields, labels)
        else:
            pieces = cut(text_blocks(file, ON_STDIN))
            yield Example(ON_STDIN, 1, ON_STDIN, not_blank(pieces, ON_STDIN), None, None)


def files_and_labels(path: Path) -> Iterator[tuple[Path, str | None]]:
    """A file; or those below a folder, each with the name of the first folder that holds it. Warns of files of another
    kind, which are skipped. Raises DataError for a folder without any."""
    if not path.is_dir():
        yield path, None
        return
    paths = files_of(str(path))
    if not paths:
        raise DataError("nothing to read in this folder", path, READS)
    if others := text_files_below(path)[1]:
        warn_once(f"skipped in {path}: {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} "
                  f"({len(others):,} files); {READS}")
    for each in paths:
        above = each.relative_to(path).parts[:-1]
        yield each, above[0] if above else None


def files_of(name: str) -> list[Path]:
    """The files that an input stands for, in order: those below a folder that can be read; none for stdin and the hub.
    Raises DataError for a folder that cannot be read."""
    if name == STDIN or name.startswith(ON_HUB):
        return []
    if not Path(name).is_dir():
        return [Path(name)]
    try:
        return [Path(name, below) for below in text_files_below(Path(name))[0]]
    except OSError as e:
        raise DataError("cannot read the input", name, e.strerror) from None


def check_inputs(names: Iterable[Path | str], out: Path | None = None) -> None:
    """Raise UsageError for a file that is read twice, and for an output in an input folder, which the next run would
    read. Raises DataError as `files_of` does."""
    seen: set[str] = set()
    for name in map(str, names):
        files = {os.path.realpath(path) for path in files_of(name)} or {name}
        require(not seen & files, "the same input twice", name, "name it once")
        seen |= files
        if out is not None and Path(name).is_dir():
            require(Path(name).resolve() not in (out.resolve(), *out.resolve().parents),
                    "the output is inside an input folder", str(out), "choose another place for it")


def check_examples(names: Iterable[Path | str], fields: Fields, progress: Callable[[int], None]) -> None:
    """Read the files among inputs once and keep nothing: raises what `read_examples` does, before a model has read what
    stands in front. progress is called with the number of documents checked."""
    files = [name for name in map(str, names) if name != STDIN and not name.startswith(ON_HUB)]
    for number, example in enumerate(read_examples(files, fields), 1):
        for _ in example.text:
            progress(number)


def of_file(path: Path, fields: Fields, labels: Labels | None, folder: str | None) -> Iterator[Example]:
    """The documents of one file. folder: the name that is the label of a file that is one document."""
    try:
        str(path).encode()
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError("not a regular file", path)
    except UnicodeEncodeError:  # results name the file
        raise DataError("a file whose name is not valid UTF-8", ascii(str(path)), "rename it") from None
    except OSError as e:
        raise DataError("cannot read the input", path, e.strerror) from None
    require(ending_of(path.name) != "", "unknown kind of file", str(path), READS)
    if not is_one_document(path.name):
        wanted = [fields.text, fields.pair, fields.label if labels else None]
        rows = read_rows(path, [name for name in wanted if name is not None])
        yield from of_records(rows, str(path), fields, labels)
        return
    require(fields.pair is None, "this file has no pairs of texts", str(path), "name one that has rows")
    label = None if labels is None else parse_label(folder, labels, str(path), "put it into a folder of that name")
    yield Example(str(path), 1, str(path), not_blank(read_pieces(path), str(path)), None, label)


def of_records(rows: Iterable[Row], name: str, fields: Fields, labels: Labels | None) -> Iterator[Example]:
    """The documents of rows."""
    number = 0
    for number, (where, record, _) in enumerate(rows, 1):
        text = text_field(record, fields.text, where)
        second = None if fields.pair is None else text_field(record, fields.pair, where)
        require_text(text, second, where)
        label = None
        if labels is not None:
            if fields.label not in record:
                raise DataError(f"no field {fields.label!r}", where, f"the row has {', '.join(map(repr, record))}")
            label = parse_label(record[fields.label], labels, where, "give it one or take it out")
        yield Example(name, number, where, (text,), second, label)
    if not number:
        raise nothing_on_stdin() if name == ON_STDIN else DataError("no documents", name, "take it out")


def require_text(text: str, second: str | None, where: str) -> None:
    """Raise DataError for a text that is white space."""
    if not text.strip() or (second is not None and not second.strip()):
        raise DataError("an empty document", where, "take it out")


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
            raise DataError("a label that is no number", f"{where}: {value!r:.40}",
                            "give it a number or take the row out, or leave out --labels number")
        return number
    if labels == "several" and isinstance(value, list | str):
        parts = value if isinstance(value, list) else value.split(";")
        return tuple(dict.fromkeys(name_of_class(part, where) for part in parts))
    return name_of_class(value, where)


def name_of_class(value: Any, where: str) -> str:
    """A class as text. Raises DataError for what is neither text nor a whole number."""
    name = str(value).strip()
    if not isinstance(value, str | int) or not name:
        raise DataError("a label that is no class", f"{where}: {value!r:.40}",
                        "it is text or a whole number; --labels takes several and number too")
    return checked(name, "the label", where)


def not_blank(pieces: Iterable[Piece], where: str) -> Iterator[str]:
    """The text of a document's pieces. Raises DataError at its end if it is white space."""
    blank = True
    for piece in pieces:
        blank = blank and not piece.text.strip()
        yield piece.text
    if blank:
        raise nothing_on_stdin() if where == ON_STDIN else DataError("an empty document", where, "take it out")


def nothing_on_stdin() -> DataError:
    return DataError("nothing on stdin", todo="pipe documents into it")


class WaitingInput:
    """The bytes of stdin, which can be asked whether the next line is there."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        """wait: called every tenth of a second while nothing comes; what it raises ends the reading."""
        self.wait, self.held, self.begun, self.ended = wait, bytearray(), False, False
        self.n_newlines = 0
        """In the bytes that are held."""

    def is_ready(self, seconds: float) -> bool:
        """Whether something can be read, or is so within `seconds`."""
        try:
            return bool(select.select([sys.stdin.buffer], [], [], seconds)[0])
        except (OSError, ValueError):  # text in memory
            return True

    def take(self) -> None:
        """Hold what comes next too. Raises DataError if stdin is closed."""
        if sys.stdin is None:
            raise nothing_on_stdin()
        self.begun = True
        while not self.is_ready(0.1):
            self.wait()
        block = cast(io.BufferedReader, sys.stdin.buffer).read1(1 << 16)
        self.held += block
        self.n_newlines += block.count(b"\n")
        self.ended = not block

    def has_line(self) -> bool:
        """Whether a line, the end, or more than a line may have is held."""
        return self.n_newlines > 0 or self.ended or len(self.held) > MAX_LINE_BYTES

    def is_idle(self) -> bool:
        """Whether stdin is being read and its next line has to be waited for."""
        while self.begun and not self.has_line() and self.is_ready(0):
            self.take()
        return self.begun and not self.has_line()

    def readline(self, size: int) -> bytes:
        """The next line, of at most `size` bytes."""
        while not self.has_line():
            self.take()
        return self.cut_off(min(self.held.find(b"\n") + 1 or len(self.held), size))

    def read(self, size: int) -> bytes:
        """What is there, of at most `size` bytes, at least one until the end."""
        if not self.held and not self.ended:
            self.take()
        return self.cut_off(min(len(self.held), size))

    def cut_off(self, n: int) -> bytes:
        """The first bytes, which are held no more."""
        block = bytes(self.held[:n])
        del self.held[:n]
        self.n_newlines -= block.count(b"\n")
        return block


def on_hub(name: str) -> tuple[str, str | None, str]:
    """The data set, the configuration and the split of `hub:NAME/SPLIT` or `hub:NAME:CONFIGURATION/SPLIT`. Raises
    UsageError."""
    of, _, split = name.removeprefix(ON_HUB).rpartition("/")
    data, _, config = of.partition(":")
    require(bool(data and split), "no such name on the hub", name,
            "say hub:NAME/SPLIT, as in hub:stanfordnlp/imdb/train")
    return data, config or None, split
