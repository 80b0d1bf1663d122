"""Records of an open file: lines of JSON, a table, parquet. Each comes with its place, and what is wrong is a DataError
with it."""

import codecs
import csv
import functools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from io import TextIOWrapper
from typing import IO, Any, NamedTuple

from lineartime.base.errors import DataError
from lineartime.base.stores import Name, is_address, opened, size_of

MAX_LINE_BYTES = 64 << 20
"""Longest line of JSON, and longest field of a table."""

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """What a row of a file says, with its place for errors."""

    where: str
    fields: Any


def not_utf8(name: object, where: str) -> DataError:
    """The error of text in another encoding."""
    return DataError("not valid UTF-8", f"{name}{where}", f"convert it: iconv -f latin1 -t utf-8 {name}")


def json_lines(file: IO[bytes], name: Name, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """The records of JSON lines, or those whose lines begin in a range of bytes."""
    number, after = 0, f" after byte {start}" if start else ""
    if start:
        file.seek(start - 1)
        while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):  # of a line of the range before
            pass
    at = file.tell() if start else 0
    while (stop is None or at < stop) and (line := file.readline(MAX_LINE_BYTES + 1)):
        number, at = number + 1, at + len(line)
        where = f"{name}:{number}{after}"
        if len(line) > MAX_LINE_BYTES:
            raise DataError("line is too long", where, f"the limit is {MAX_LINE_BYTES} bytes")
        line = line.removeprefix(codecs.BOM_UTF8).strip()
        if line in (b"[", b"[{"):
            raise DataError("an array of JSON", where, f"write each item on a line of its own: jq -c .[] {name}")
        if line:
            yield Record(where, _json_value(line, name, where.removeprefix(str(name))))


def _json_value(content: bytes, name: Name, where: str) -> Any:
    """What a line of JSON says. A name that occurs twice in an object is refused."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return record

    try:
        text = content.decode()
    except UnicodeDecodeError as e:
        raise not_utf8(name, f"{where}, byte {e.start}") from None
    return parse_json(text, f"{name}{where}", object_pairs_hook=as_dict)


def parse_json(text: str, where: object, **hooks: Any) -> Any:
    """`json.loads`. Raises DataError for text that is not JSON, with line and column (of a single line the column)."""
    try:
        return json.loads(text, **hooks)
    except (ValueError, RecursionError) as e:
        why = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)
        if isinstance(e, json.JSONDecodeError):
            line = f":{e.lineno}" if "\n" in text.rstrip() else ""
            where, why = f"{where}{line}, column {e.colno}", e.msg
        raise DataError("not valid JSON", where, why) from None


def table_rows(file: IO[bytes], name: Name, delimiter: str) -> Iterator[Record]:
    """The rows of a table, each with the line on which it begins; every field is text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    line = 1
    # A byte that is not UTF-8 becomes a lone surrogate, so that its line is known.
    with TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        rows = csv.reader(_checked_lines(text, name), delimiter=delimiter, strict=True)
        try:
            names = next((row for row in rows if row), [])
            if len({*names}) < len(names):
                raise DataError("the same column twice", name, ", ".join(names))
            line = rows.line_num + 1
            for row in rows:
                if row and len(row) != len(names):
                    raise DataError("a row of another length", f"{name}:{line}",
                                    f"it has {len(row)} fields; give it {len(names)}, as the first row has")
                if row:
                    yield Record(f"{name}:{line}", dict(zip(names, row, strict=True)))
                line = rows.line_num + 1
        except csv.Error as e:
            raise DataError("not valid CSV", f"{name}:{line}", str(e)) from None


def _checked_lines(file: Iterable[str], name: Name) -> Iterator[str]:
    """The lines of a table. Warns of a last line without an end: the file may have been cut inside a field."""
    number, line = 0, ""
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise DataError("a NUL byte: this is no text", f"{name}:{number}")
        if not line.isascii() and any("\udc80" <= each <= "\udcff" for each in line):
            raise not_utf8(name, f":{number}")
        yield line
    if line and not line.endswith(("\n", "\r")):
        warn_once(f"the last line has no end, so the file may be cut: {name}:{number}: {line!r:.80}")


@functools.cache
def warn_once(line: str) -> None:
    """Warn once, though a file is read twice, first to check it. It goes to stderr, for results may go to stdout."""
    logger.warning(line)


def parquet_rows(name: Name, names: Sequence[str], optional: Sequence[str] = (), start: int = 0,
                 stop: int | None = None) -> Iterator[Record]:
    """The rows of the groups of a parquet file that begin in a range of bytes. Only the columns `names`, which the file
    must have, and those of `optional` that it has are read."""
    import pyarrow
    from pyarrow import parquet

    if not size_of(name):
        return
    row = 0
    try:
        source = opened(name) if is_address(name) else str(name)
        with parquet.ParquetFile(source, buffer_size=1 << 20, page_checksum_verification=True) as file:
            columns = _columns(file.schema_arrow, names, optional, name)
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                first = group.column(0)
                begin = max(first.dictionary_page_offset or first.data_page_offset, 0)
                if not start <= begin < (math.inf if stop is None else stop):
                    row += group.num_rows
                    continue
                for batch in file.iter_batches(16, row_groups=[number], columns=columns, use_threads=False):
                    for i in range(batch.num_rows):
                        row += 1
                        yield Record(f"{name}, row {row}",
                                     {column: batch.column(column)[i].as_py() for column in columns})
    except UnicodeDecodeError:
        raise DataError("not valid UTF-8", f"{name}, row {row}") from None
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise DataError("cannot read as parquet", name, str(e).splitlines()[0] if str(e) else None) from None


def _columns(schema: Any, names: Sequence[str], optional: Sequence[str], name: Name) -> list[str]:
    """The columns to read. Raises DataError unless each of `names` is there once."""
    for column in names:
        if schema.names.count(column) != 1:
            texts = [one.name for one in schema if column == "text" != one.name and str(one.type).endswith("string")]
            raise _missing(f"no column {column!r}", name, schema.names, texts)
    return [*dict.fromkeys(names), *(column for column in optional if column in schema.names)]


def text_field(record: Any, name: str, where: str) -> str:
    """The text in a field of a record. Raises DataError if there is none."""
    if not isinstance(record, dict):
        raise DataError("not a JSON object", where)
    if name not in record:
        texts = [each for each, value in record.items() if isinstance(value, str) and name == "text"]
        raise _missing(f"no field {name!r}", where, list(record), texts)
    return checked(record[name], f"field {name!r}", where)


def _missing(what: str, where: Name, there: Sequence[str], others: Sequence[str]) -> DataError:
    """The error of a field that is missing. others: the fields that could be meant; empty if the user named the field
    with an option, and so knows the option."""
    hint = f"; name one with --text-field, such as --text-field {others[0]}" if others else ""
    return DataError(what, where, f"it has {', '.join(map(repr, there[:8])) or 'none'}{hint}")


def checked(text: Any, what: str, where: str) -> str:
    """`text` itself. Raises DataError unless it is a string, and for a lone surrogate, which JSON can spell."""
    if not isinstance(text, str):
        raise DataError(f"{what} is not a string", where, "make it one, or take the document out")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError("a lone surrogate", where, f"{what} is no valid Unicode") from None
    return text
