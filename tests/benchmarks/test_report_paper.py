"""Reports of measured rows: pages are what the rows give, and what is wrong is one line."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.figures import Picture, digest
from benchmarks.pages import fill_pages, filled
from benchmarks.paper.results import read_records, steps_to
from benchmarks.recall.report import section
from benchmarks.recall.study import read_rows as read_recall
from benchmarks.speed import read_rows as read_speed
from lineartime.base.errors import DataError, UsageError

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "rows"
IMAGE = ROOT / "benchmarks" / "tables" / "images" / "recall-pairs.png"

curve_points = st.lists(st.floats(0.5, 9), min_size=1, max_size=12).map(
    lambda losses: [(100 * i, loss) for i, loss in enumerate(losses, 1)])


@given(curve_points, st.floats(0.4, 9.1))
def test_steps_to_a_loss_are_where_the_curve_first_is_there(curve, loss):
    steps = steps_to(loss, pd.Series(dict(curve)))
    if math.isnan(steps):
        assert all(value > loss for _, value in curve)
        return
    assert all(value > loss for step, value in curve if step < steps)
    before, after = ([point for point in curve if point[0] <= steps] or curve[:1])[-1], next(
        point for point in curve if point[0] >= steps)
    assert after[1] <= loss or steps == before[0]
    if steps not in [step for step, _ in curve]:
        share = (steps - before[0]) / (after[0] - before[0])
        assert before[1] + share * (after[1] - before[1]) == pytest.approx(loss)


@pytest.mark.parametrize("broken", [{"kind": "other"}, {"curve": []}, {"held_out": None}, {"settings": {}},
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
    ("table", read_records, "quality"), ("speed", read_speed, "speed"), ("recall", read_recall, "recall")])
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
    rows = read_recall(ROWS / "recall.jsonl")
    row = next(row for row in rows if (row["task"], row["model"], row["seed"]) == (task, "flash", 0)) | other
    row |= {"accuracy": {length: dict.fromkeys(told, 1.0) for length, told in row["accuracy"].items()},
            "training": row["training"] | other}
    before, after = (section(given, task).splitlines() for given in (rows, [*rows, row]))
    assert {line for line in before if "| flash" in line} <= {*after}
    assert any("| flash, steps=9 | " in line and "1.00" in line for line in after) == (task == "pairs")
