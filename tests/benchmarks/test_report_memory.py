"""The study of text: differences by seed, by hand; what one seed, or none, may say; what is drawn of it."""

import pandas as pd
import pytest

from benchmarks.paper import memory
from benchmarks.paper.results import results_of
from benchmarks.paper.tables import cells_of
from made_rows import made_rows, step_row, times

CELLS = {cell.row: cell for cell in cells_of("memory", "cpu")}
MADE = made_rows("memory")
ROWS = [(row, record) for row, cell in CELLS.items() for record in MADE
        if {**record["settings"], "seed": 0} == cell.settings(0)]


def lines_of(text):
    """The lines of a table by their first cell, without the stars of emphasis."""
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize(("values", "words", "text"), [
    ([0.1], "one seed, no claim", "+0.100"), ([-0.1, -0.11, -0.09], "ahead", "**-0.100 ± 0.025**"),
    ([0.1, 0.11, 0.09], "behind", "**+0.100 ± 0.025**"),
    ([-0.1, 0.05], "cannot be told apart", "-0.025 ± 0.953"),
    ([-0.01, -0.2, -0.05], "cannot be told apart, all 3 seeds ahead", "-0.087 ± 0.249"),
    ([0.01, 0.2], "cannot be told apart, all 2 seeds behind", "+0.105 ± 1.207")])
def test_a_difference_is_claimed_where_its_interval_leaves_0_out(values, words, text):
    found = pd.Series(values)
    assert (memory.verdict(found), memory.difference_text(found)) == (words, text)


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
