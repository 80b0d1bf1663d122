"""The paper's tables beside ours: its numbers by its names, seeds and speed-ups by hand, and what was not run."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.__main__ import app
from benchmarks.figures import digest, draw, figures_of
from benchmarks.pages import fill_pages, filled
from benchmarks.paper.report import speedup_texts, table_section
from benchmarks.paper.results import (
    read_records,
    results_of,
    speedups,
    step_speedups,
    steps_to,
)
from benchmarks.paper.tables import TABLES, cells_of
from benchmarks.recall.study import read_rows as read_recall
from benchmarks.speed import read_rows as read_speed
from command_line import Call, assert_refused
from command_line import call as call  # a fixture
from lineartime.errors import DataError, UsageError
from made_rows import made_rows, step_row, times, train_row

ROOT = Path(__file__).parents[2]
WHOLE = 0.125
"""What the whole held-out split adds to the last point of a curve, which is of a part of it."""


def cell_of(table, row, column, scale="cpu"):
    return next(cell for cell in cells_of(table, scale) if (cell.row, cell.column) == (row, column))


def written(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(cell, *curves_of_seeds, tokens_per_step=2048):
    """Rows of seeds 0, 1, ... with these curves, lists of (step, nats)."""
    rows = []
    for seed, curve in enumerate(curves_of_seeds):
        row = train_row(cell, seed) | {"curve": [list(point) for point in curve],
                                       "tokens": curve[-1][0] * tokens_per_step}
        row["held_out"] |= {"loss": curve[-1][1] + WHOLE}
        rows.append(row)
    return rows


def timed(cell, ms, run="1", time="2026-01-01T00:00:00Z"):
    return step_row(cell) | {"cpu_ms": times(ms), "run": run, "time": time}


def line_of(section, measure, row):
    """The cells of a row of the table below a title."""
    below = section[section.index(measure):]
    return next([part.strip() for part in line.strip("|").split("|")] for line in below.splitlines()
                if line.startswith(f"| {row} |"))


def test_the_newest_row_of_a_seed_counts_and_a_failed_one_only_alone():
    cell = cell_of("lm_wiki40b", "FLASH", "512")
    (old,), (new,) = trained(cell, [(800, 3.0)]), trained(cell, [(800, 2.0)])
    failed = {"kind": "train", "scale": "cpu", "text": cell.text.name, "settings": cell.settings(0), "failed": "memory"}
    other = failed | {"settings": cell.settings(1)}
    results = results_of("lm_wiki40b", "cpu", [old, new, failed, other])
    assert results.trained.loss.tolist() == [2.0 + WHOLE]
    assert results.failed == {("FLASH", "512", "train", 1): "memory"}
    text = table_section(results_of("lm_wiki40b", "cpu", [other]))
    assert line_of(text, "Perplexity", "FLASH")[2] == "failed"
    assert "Failed: FLASH, 512, seed 1: memory." in text and "Ours:" not in text


def two_models(ours, theirs, *more, ms=(100, 300)):
    flash, plus_plus = (cell_of("lm_wiki40b", row, "2048") for row in ("FLASH", "Transformer++"))
    rows = [*trained(flash, *ours), *trained(plus_plus, *theirs), timed(flash, ms[0]), timed(plus_plus, ms[1]), *more]
    return results_of("lm_wiki40b", "cpu", rows)


OURS, THEIRS = ("FLASH", "2048"), ("Transformer++", "2048")


def test_the_speed_up_is_the_references_time_to_its_best_over_ours_to_the_same_loss():
    results = two_models([[(400, 4.5), (800, 3.5)], [(400, 5.5), (800, 4.5)]], [[(400, 5.0), (800, 4.0)]])
    assert step_speedups(results, "Transformer++").value[OURS] == pytest.approx(3.0)
    found = speedups(results, "Transformer++")
    # The mean curve is the reference's; the first seed is there after 600 of its 800 steps, the second never.
    assert found.value[OURS] == pytest.approx(3.0)
    assert found.seeds[OURS] == pytest.approx([3.0 * 800 / 600, math.nan], nan_ok=True)
    texts = speedup_texts(results, "Transformer++")
    assert texts[OURS] == "3.00 (1 of 2 seeds --)"
    assert found.value[THEIRS] == 1.0 and texts[THEIRS] == "1.00"


def test_who_never_gets_there_has_no_speed_up():
    results = two_models([[(400, 5.0), (800, 4.1)]], [[(400, 5.0), (800, 4.0)]])
    assert math.isnan(speedups(results, "Transformer++").value[OURS])
    assert speedup_texts(results, "Transformer++")[OURS] == "--"


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


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_its_rows_with_and_without_any_run(name):
    without = table_section(results_of(name, "paper", []))
    assert "not run" in without and "commit" not in without
    results = results_of(name, "cpu", made_rows(name))
    section = table_section(results)
    assert ("not run" in section) == (len(results.steps) < len(TABLES[name].models) * len(TABLES[name].columns))
    if name != "speedup":
        assert all((f"| {row} |" in section) == (row in results.rows) for row in TABLES[name].models)
    tables = [part.splitlines() for part in section.split("\n\n") if part.startswith("|")]
    assert tables and all(len({line.count("|") for line in table}) == 1 for table in tables)


@pytest.mark.parametrize("broken", [
    {"kind": "other"}, {"curve": []}, {"curve": None}, {"held_out": None}, {"settings": {}}, {"tokens": ...}])
def test_a_row_that_lacks_something_is_an_error_of_one_line(tmp_path, broken):
    row = train_row(cell_of("lm_wiki40b", "FLASH", "512"), 0) | broken
    row = {key: value for key, value in row.items() if value is not ...}
    with pytest.raises(DataError, match="not a row of a run") as raised:
        read_records(written(tmp_path, [train_row(cell_of("lm_wiki40b", "FLASH", "512"), 1), row]))
    assert "line 2" in str(raised.value) and "\n" not in str(raised.value)


PLACE = "before\n<!-- table gap cpu: begin -->\nold\n<!-- table gap cpu: end -->\nafter\n"


@pytest.mark.parametrize("text", [
    "nothing\n", "<!-- table gap: begin -->\n<!-- table gap: end -->\n",
    "<!-- table gaps cpu: begin -->\n<!-- table: end -->\n", PLACE + "<!-- table lm_pg19 cpu: begin -->\n"])
def test_a_page_with_a_wrong_place_is_an_error_and_stays(tmp_path, text):
    page, images = tmp_path / "page.md", tmp_path / "images"
    page.write_text(text)
    with pytest.raises(UsageError) as raised:
        fill_pages([page], images, "table", made_rows("gap"))
    assert "\n" not in str(raised.value) and page.read_text() == text and not images.exists()


@pytest.mark.parametrize(("kind", "read", "rows"), [
    ("table", read_records, "quality"), ("speed", read_speed, "speed"), ("recall", read_recall, "recall")])
def test_the_projects_pages_are_what_its_rows_give(kind, read, rows):
    """After new rows: python -m benchmarks report [speed or recall] --into PAGE, for each page with a place."""
    measured = read(ROOT / "benchmarks" / "rows" / f"{rows}.jsonl")
    pages = [page for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks" / "tables")
             for page in folder.glob("*.md") if f"<!-- {kind}" in page.read_text()]
    assert pages
    for page in pages:
        text = page.read_text()
        made, drawn = filled(text, page, ROOT / "benchmarks" / "tables" / "images", kind, measured)
        assert made == text
        for name, picture in drawn.items():
            with Image.open(ROOT / "benchmarks" / "tables" / "images" / name) as file:
                assert file.text["Rows"] == digest(picture), name


def test_the_command_prints_a_table(tmp_path, call: Call):
    code, out, _ = call("report", "gau_ablation", "--rows", written(tmp_path, made_rows("gau_ablation")), app=app)
    assert code == 0 and out == table_section(results_of("gau_ablation", "cpu", made_rows("gau_ablation")))


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("gaps",), 2, "unknown table: gaps; did you mean gap?"),
    (("gap", "--scale", "tpu"), 2, "unknown scale: tpu"),
    (("speed", "--scale", "cpu"), 2, "arguments that do not go together: --scale; leave it out"),
    (("gap", "--into", "README.md"), 2, "arguments that do not go together: gap and --into; leave out the table"),
    (("gap", "--rows", "nothing.jsonl"), 3,
     "no rows to report: nothing.jsonl; `python -m benchmarks reproduce` writes them"),
    (("gap", "--rows", ROOT / "README.md"), 3, "README.md, line 1")])
def test_bad_arguments_are_errors_of_one_line(arguments, code, message, call: Call):
    got, _, err = call("report", *arguments, app=app)
    assert_refused(got, err, code, message)


def test_a_picture_knows_its_rows(tmp_path):
    def picture(rows):
        ((name, found),) = figures_of(results_of("chunk_size", "cpu", rows)).items()
        return name, found

    rows = made_rows("chunk_size")
    name, found = picture(rows)
    draw(found, tmp_path / name)
    with Image.open(tmp_path / name) as file:
        assert file.text["Rows"] == digest(found) == digest(picture(made_rows("chunk_size"))[1])
    assert digest(picture([row for row in rows if row["settings"].get("seed") != 2])[1]) != digest(found)
