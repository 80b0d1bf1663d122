"""Rows that are added to a file: whole lines, after whatever a kill has left."""

import pytest

from benchmarks.append import append_json_lines
from lineartime.atomic_io import read_json_lines


@pytest.mark.parametrize(("left", "kept"), [('{"a": 1}\n{"a": 2', [1]), ('{"a"', []), ('{"a": 1}\n{"a": 2}', [1, 2])])
def test_a_line_that_was_cut_off_is_taken_out_and_a_whole_one_is_not(left, kept, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(left)
    append_json_lines(path, [{"a": 9}])
    assert read_json_lines(path, lambda row: row["a"], "a row") == [*kept, 9]
    assert path.read_text().count("\n") == len(kept) + 1
