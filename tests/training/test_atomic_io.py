"""Files of JSON lines: added to, cut off by a kill, read while they grow."""

import json
import os
import threading

import pytest

from lineartime.atomic_io import append_json_lines, read_json_lines
from lineartime.errors import DataError, ResourceError


def values(path):
    return read_json_lines(path, lambda row: row["a"], "a row of ours")


def test_rows_are_added_and_read(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    append_json_lines(path, [{"a": 1}])
    append_json_lines(path, [{"a": 2}, {"a": 3}])
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n' and values(path) == [1, 2, 3]
    with pytest.raises(ResourceError, match="cannot write"):
        append_json_lines(tmp_path, [{"a": 1}])


@pytest.mark.parametrize(("left", "kept"), [('{"a": 1}\n{"a": 2', [1]), ('{"a"', []), ("", []), ('{"a": 1}\n', [1]),
                                            ('{"a": 1}\n{"a": 2}', [1, 2])])
def test_a_line_that_was_cut_off_is_left_out_and_taken_out_and_a_whole_one_is_not(left, kept, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(left)
    assert values(path) == kept
    append_json_lines(path, [{"a": 9}])
    assert values(path) == [*kept, 9] and path.read_text().count("\n") == len(kept) + 1


def test_what_is_something_else_is_said_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": 1}\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"not a row of ours: .*rows.jsonl, line 2"):
        values(path)
    for last in (b'{"a": 2', b"\x00\x00", b'{"a": "\xff"}', b""):  # a whole line, so that nobody is writing it
        path.write_bytes(b'{"a": 1}\n' + last + b"\n")
        with pytest.raises(DataError, match=r"rows\.jsonl, line 2"):
            values(path)
    path.write_bytes(b'{"a": 1}\n\xff')
    assert values(path) == [1]
    with pytest.raises(DataError, match="cannot read the rows"):
        values(tmp_path / "none.jsonl")


def test_a_pipe_takes_rows(tmp_path):
    os.mkfifo(path := tmp_path / "pipe")
    said = []
    reader = threading.Thread(target=lambda: said.append(path.read_text()))
    reader.start()
    append_json_lines(path, [{"a": 1}])
    reader.join(10)
    assert [json.loads(line) for line in said[0].splitlines()] == [{"a": 1}]
