"""Ratios of measured times: by hand, and within a run."""

import json

import pytest

from benchmarks import ROOT
from benchmarks.provenance import rows_in
from benchmarks.speed import compare, ratio_table, read_rows, tables_of
from lineartime.base.errors import DataError

FLASH = next(row for row in rows_in(ROOT / "benchmarks/rows/speed.jsonl")
             if row["benchmark"] == "step" and (row["label"], row["dtype"]) == ("flash", "float32") and "cpu_ms" in row)


def made(model, ms, run="1", quartiles=(0.9, 1.1), time="2026-01-01T00:00:00Z", **wrong):
    """A row; quartiles are in medians."""
    q1, q3 = ms * quartiles[0], ms * quartiles[1]
    times = {"median": ms, "q1": q1, "q3": q3, "min": q1, "max": q3, "n": 5} | wrong
    return FLASH | {"model": model, "label": model, "run": run, "cpu_ms": times, "time": time}


def table_of(tmp_path, *rows):
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (table,) = tables_of(read_rows(tmp_path / "rows"))
    return table


def test_a_ratio_is_the_others_time_over_ours_with_the_quartiles_apart(tmp_path):
    table = table_of(tmp_path, made("flash", 100, quartiles=(0.9, 1.25)),
                     made("transformer++", 150, quartiles=(0.8, 1.2)))
    (both,) = compare(table, "transformer++", by_type=True).itertuples()
    assert (both.value, both.low, both.high) == pytest.approx((1.5, 150 * 0.8 / 125, 150 * 1.2 / 90))


def test_only_rows_of_one_run_are_divided_and_the_newest_run_counts(tmp_path):
    new = {"time": "2026-02-01T00:00:00Z"}
    text = ratio_table(table_of(tmp_path, made("flash", 100, "b", **new), made("transformer++", 130, "b", **new),
                                made("flash", 10, "a"), made("transformer++", 999, "a"),
                                made("flash-pytorch", 70, "c", **new)))
    assert "1.30" in text and "99.9" not in text and "FLASH-pytorch" not in text


@pytest.mark.parametrize("wrong", [{"q1": 0}, {"q1": -1.0}, {"q3": 0.5}, {"median": 10**9}])
def test_times_that_are_no_quartiles_are_refused(tmp_path, wrong):
    with pytest.raises(DataError, match="not a row of a measurement"):
        table_of(tmp_path, made("flash", 100, **wrong))
