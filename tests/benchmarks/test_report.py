"""Reports of measured rows: pages are what the rows give, ratios are by hand and within a run."""

import json
import math

import pandas as pd
import pytest
from PIL import Image

from benchmarks import ROOT, speed
from benchmarks.figures import Picture, digest
from benchmarks.pages import fill_pages, filled
from benchmarks.paper.results import read_records, steps_to
from benchmarks.provenance import rows_in
from benchmarks.recall import study
from lineartime.base.errors import DataError, UsageError

ROWS = ROOT / "benchmarks" / "rows"

@pytest.mark.parametrize(("loss", "steps"), [(9.0, 100), (4.0, 200), (3.0, 250), (2.0, 300), (1.0, 500), (0.9, None)])
def test_steps_to_a_loss_are_where_the_curve_first_is_there(loss, steps):
    found = steps_to(loss, pd.Series({100: 9.0, 200: 4.0, 300: 2.0, 400: 5.0, 500: 1.0}))
    assert math.isnan(found) if steps is None else found == pytest.approx(steps)


@pytest.mark.parametrize("broken", [{"kind": "other"}, {"curve": [[]]}, {"held_out": None}, {"settings": {}},
                                    {"tokens": ...}])
def test_a_row_that_lacks_something_is_an_error_of_one_line(tmp_path, broken):
    whole = next(row for row in read_records(ROWS / "quality.jsonl") if row["kind"] == "train")
    row = {key: value for key, value in (whole | broken).items() if value is not ...}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(whole)}\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match="not a row of a run") as raised:
        read_records(tmp_path / "rows.jsonl")
    assert "line 2" in str(raised.value) and "\n" not in str(raised.value)


PLACE = "before\n<!-- table gap cpu: begin -->\nold\n<!-- table gap cpu: end -->\nafter\n"


@pytest.mark.parametrize("text", [
    "nothing\n", "<!-- table gap: begin -->\n<!-- table gap: end -->\n",
    "<!-- table gaps cpu: begin -->\n<!-- table: end -->\n", PLACE + "<!-- table lm_pg19 cpu: begin -->\n"])
def test_a_page_with_a_wrong_place_is_an_error_and_stays(tmp_path, text):
    page, images = tmp_path / "page.md", tmp_path / "images"
    page.write_text(text)
    with pytest.raises(UsageError) as raised:
        fill_pages([page], images, "table", read_records(ROWS / "quality.jsonl"))
    assert "\n" not in str(raised.value) and page.read_text() == text and not images.exists()


@pytest.mark.parametrize(("kind", "read", "rows"), [
    ("table", read_records, "quality"), ("speed", speed.read_rows, "speed"), ("recall", study.read_rows, "recall")])
def test_the_projects_pages_are_what_its_rows_give(kind, read, rows):
    """After new rows: python -m benchmarks report [speed or recall] --into PAGE, for each page."""
    measured = read(ROWS / f"{rows}.jsonl")
    pages = [page for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks" / "tables")
             for page in folder.glob("*.md") if f"<!-- {kind}" in page.read_text()]
    assert pages
    for page in pages:
        drawn: dict[str, Picture] = {}
        assert filled(page, ROOT / "benchmarks" / "tables" / "images", kind, measured, drawn) == page.read_text()
        for name, picture in drawn.items():
            with Image.open(ROOT / "benchmarks" / "tables" / "images" / name) as file:
                assert file.text["Rows"] == digest(picture), name


@pytest.mark.parametrize(("task", "other"), [("text", {"learning_rate": None}), ("pairs", {"steps": 9})])
def test_a_run_that_is_not_the_studys_leaves_the_studys_line(task, other):
    """A trained model of that name, which was asked alone, and a run with another setting."""
    rows = study.read_rows(ROWS / "recall.jsonl")
    row = next(row for row in rows if (row["task"], row["model"], row["seed"]) == (task, "flash", 0)) | other
    row |= {"accuracy": {length: dict.fromkeys(told, 1.0) for length, told in row["accuracy"].items()},
            "training": row["training"] | other}
    before, after = (study.section(given, task).splitlines() for given in (rows, [*rows, row]))
    assert {line for line in before if "| flash" in line} <= {*after}
    assert any("| flash, steps=9 | " in line and "1.00" in line for line in after) == (task == "pairs")


FLASH = next(row for row in rows_in(ROWS / "speed.jsonl")
             if row["benchmark"] == "step" and (row["label"], row["dtype"]) == ("flash", "float32") and "cpu_ms" in row)


def made(model, ms, run="1", quartiles=(0.9, 1.1), time="2026-01-01T00:00:00Z", **wrong):
    """A row; quartiles are in medians."""
    q1, q3 = ms * quartiles[0], ms * quartiles[1]
    times = {"median": ms, "q1": q1, "q3": q3, "min": q1, "max": q3, "n": 5} | wrong
    return FLASH | {"model": model, "label": model, "run": run, "cpu_ms": times, "time": time}


def table_of(tmp_path, *rows):
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (table,) = speed.tables_of(speed.read_rows(tmp_path / "rows"))
    return table


def test_a_ratio_is_the_others_time_over_ours_with_the_quartiles_apart(tmp_path):
    table = table_of(tmp_path, made("flash", 100, quartiles=(0.9, 1.25)),
                     made("transformer++", 150, quartiles=(0.8, 1.2)))
    (both,) = speed.compare(table, "transformer++", by_type=True).itertuples()
    assert (both.value, both.low, both.high) == pytest.approx((1.5, 150 * 0.8 / 125, 150 * 1.2 / 90))


def test_only_rows_of_one_run_are_divided_and_the_newest_run_counts(tmp_path):
    new = {"time": "2026-02-01T00:00:00Z"}
    text = speed.ratio_table(table_of(tmp_path, made("flash", 100, "b", **new), made("transformer++", 130, "b", **new),
                                made("flash", 10, "a"), made("transformer++", 999, "a"),
                                made("flash-pytorch", 70, "c", **new)))
    assert "1.30" in text and "99.9" not in text and "FLASH-pytorch" not in text


@pytest.mark.parametrize("wrong", [{"q1": 0}, {"q1": -1.0}, {"q3": 0.5}, {"median": 10**9}])
def test_times_that_are_no_quartiles_are_refused(tmp_path, wrong):
    with pytest.raises(DataError, match="not a row of a measurement"):
        table_of(tmp_path, made("flash", 100, **wrong))
