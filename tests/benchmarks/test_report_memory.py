"""The study of text: differences by seed, by hand; what one seed, or none, may say; what is drawn of it."""

import copy
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.paper import memory
from benchmarks.paper.records import read_records
from benchmarks.paper.results import of_cell, results_of
from benchmarks.paper.scales import cells_of
from made_rows import made_rows, step_row, times

ROOT = Path(__file__).parents[2]
CELLS = {cell.row: cell for cell in cells_of("memory", "cpu")}
MADE = made_rows("memory")
ROWS = [(row, record) for row, cell in CELLS.items() for record in MADE
        if {**record["settings"], "seed": 0} == cell.settings(0)]
CONV = "FLASH, three changes"
PLACE = "<!-- table memory cpu: begin -->\nold\n<!-- table memory cpu: end -->\n"


def made(change=lambda row, seed, record: None, keep=lambda row, seed: True):
    """All rows of the study: step times, and of training those that are kept, each changed in place."""
    steps, trained = ([each for each in ROWS if each[1]["kind"] == kind] for kind in ("step", "train"))
    kept = [(row, record["settings"]["seed"], copy.deepcopy(record)) for row, record in trained
            if keep(row, record["settings"]["seed"])]
    for each in kept:
        change(*each)
    return [record for _, record in steps] + [record for _, _, record in kept]


def results(*arguments, **options):
    return results_of("memory", "cpu", made(*arguments, **options))


def lines_of(text):
    """The lines of a table by their first cell, without the stars of emphasis."""
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {first: rest for first, *rest in cells}


def test_an_interval_is_the_one_that_the_results_tell():
    """docs/results.md: FLASH on Wiki-40B's form at 512 and 2,048, paired by seed."""
    told = results_of("lm_wiki40b", "cpu", read_records(ROOT / "benchmarks/rows/quality.jsonl"))
    for rival, column, mean, half in (("Transformer++", "512", 0.06, 0.08), ("Transformer++", "2048", 0.13, 0.14),
                                      ("FLASH-Quad", "512", 0.07, 0.17), ("FLASH-Quad", "2048", 0.06, 0.19)):
        ours, theirs = (of_cell(told.trained.loss, row, column).droplevel(["row", "column"])
                        for row in ("FLASH", rival))
        found = ours - theirs
        assert list(found.index) == [0, 1, 2] and round(-found.mean(), 2) == mean
        assert round(memory.half_width(found), 2) == half and not memory.told_apart(found)


@pytest.mark.parametrize(("values", "words", "text"), [
    ([0.1], "one seed, no claim", "+0.100"), ([-0.1, -0.11, -0.09], "ahead", "**-0.100 ± 0.025**"),
    ([0.1, 0.11, 0.09], "behind", "**+0.100 ± 0.025**"),
    ([-0.1, 0.05], "cannot be told apart", "-0.025 ± 0.953"),
    ([-0.01, -0.2, -0.05], "cannot be told apart, all 3 seeds ahead", "-0.087 ± 0.249"),
    ([0.01, 0.2], "cannot be told apart, all 2 seeds behind", "+0.105 ± 1.207")])
def test_a_difference_is_claimed_where_its_interval_leaves_0_out(values, words, text):
    found = pd.Series(values)
    assert (memory.verdict(found), memory.difference_text(found)) == (words, text)


def test_the_whole_split_is_compared_seed_by_seed():
    def change(row, seed, record):
        if row == "Transformer++":
            record["held_out"]["loss"] = 3.85 + 0.01 * seed + (0.03, 0.04, 0.05)[seed]

    lines = lines_of(memory.whole_part(results(change)))
    assert lines["Transformer++"] == ["behind", "+0.040 ± 0.025", "+0.030, +0.040, +0.050"]
    assert lines["Transformer++, width 256, to FLASH, width 256"] == ["one seed, no claim", "-0.050", "-0.050"]
    assert "FLASH" not in lines and "FLASH, width 256" not in lines


def timed(**ms):
    """Step times, all of one run."""
    return [step_row(CELLS[name]) | {"cpu_ms": times(value), "run": "1"} for name, value in ms.items()]


def curves(**of_rows):
    """Training rows with these curves of seeds 0, 1, ..."""
    return [record | {"curve": curve, "tokens": 8192 * curve[-1][0]} for row, record in ROWS
            if record["kind"] == "train" for curve in of_rows.get(row, [])[record["settings"]["seed"]:][:1]]


def test_equal_time_is_where_the_first_of_two_ends():
    flash = [[[500, 5.0], [1000, 4.0], [2000, 3.0]], [[500, 5.1], [1000, 4.1], [2000, 3.1]]]
    slow, fast = [[[500, 4.0], [1000, 3.5], [2000, 2.0]]] * 2, [[[500, 6.0], [1000, 5.0], [2000, 3.2]]] * 2
    rows = curves(**{"FLASH": flash, "Transformer++": slow, memory.LOCAL: fast})
    found = results_of("memory", "cpu", rows + timed(**{"FLASH": 100.0, "Transformer++": 160.0, memory.LOCAL: 80.0}))
    lines = lines_of(memory.time_part(found))
    # 2,000 steps of 100 ms are 1,250 of 160, a quarter of the way from 3.5 to 2; FLASH has 3.0 and 3.1.
    assert lines["Transformer++"] == ["1,250", "2,000", "3.125", "3.050", "+0.075 ± 0.635", "-1.050 ± 0.635"]
    # 2,000 steps of 80 ms are 1,600 of FLASH's: 4.0 - 0.6 and 4.1 - 0.6.
    assert lines[memory.LOCAL] == ["2,000", "1,600", "3.200", "3.450", "-0.250 ± 0.635", "+0.150 ± 0.635"]
    # Before the first evaluation nothing is known, nor without times of one run.
    found = results_of("memory", "cpu", rows + timed(**{"FLASH": 100.0, "Transformer++": 401.0}))
    assert memory.time_part(found) == memory.NOT_YET
    assert memory.time_part(results_of("memory", "cpu", rows)) == memory.NOT_YET


def test_recurrence_is_compared_by_class_with_flash_and_with_its_local_half():
    def change(row, seed, record):
        for each in record["recurrence"]["classes"]:
            if row == CONV and each["kind"] == "rare bigram" and each["seen"] == "in earlier chunks only":
                each["loss"] -= 1.0
            if row == "Transformer++" and each["kind"] == "bigram" and each["seen"] == "not before":
                each |= {"n_tokens": 0, "loss": None}

    found = results(change)
    with_flash, with_local = (part for part in memory.parts(found) if part.startswith("| model | token"))
    lines = lines_of(with_flash)
    assert lines["model"] == [f"{kind}, {seen}" for kind in ("token", "bigram", "rare bigram")
                              for seen in ("in its chunk", "in earlier chunks only", "not before")]
    assert [cell.split()[0] for cell in lines[CONV]] == ["-0.200"] * 7 + ["-1.200", "-0.200"]
    assert lines["Transformer++"][5] == "-" and lines["Transformer++"][4] != "-"
    lines = lines_of(with_local)
    assert [cell.split()[0] for cell in lines[CONV]] == ["-0.100"] * 7 + ["-1.100", "-0.100"]
    assert lines["FLASH"][0].startswith("+0.100") and lines["FLASH (LocalOnly), its loss"][0] == "2.760"
    assert not any("256" in name for name in lines)


@pytest.mark.parametrize(("at_half", "at_end", "words"), [
    (-0.2, -0.1, "fades"), (-0.1, -0.2, "grows"), (0.2, 0.1, "fades"), (0.1, 0.2, "grows"), (-0.1, 0.1, "fades")])
def test_a_difference_that_the_second_half_takes_back_fades(at_half, at_end, words):
    def change(row, seed, record):
        if row == CONV:
            record["curve"] = [[step, loss + 0.25 + (at_half if step <= 1000 else at_end) + 1e-3 * seed * (step > 1000)]
                               for step, loss in record["curve"]]
        if row == "FLASH":
            record["curve"] = [[step, loss + 0.05] for step, loss in record["curve"]]

    lines = lines_of(memory.tokens_part(results(change)))
    assert lines["model"] == ["second half", "3.3 M", "6.6 M", "9.8 M", "13.1 M", "16.4 M", "from 8.2 M to the end"]
    told, *rest = lines[CONV]
    shown = [f"{x:+.3f}" for x in [at_half] * 2 + [at_end + 1e-3] * 3 + [at_end + 1e-3 - at_half]]
    assert told == words and [cell.split()[0] for cell in rest] == shown
    assert lines["Transformer++"][0] == "cannot be told"
    assert lines["Transformer++, width 256, to FLASH, width 256"][0] == "one seed, no claim"
