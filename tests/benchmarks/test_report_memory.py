"""The study of text: differences by seed, by hand; what one seed, or none, may say; what is drawn of it."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from PIL import Image

from benchmarks.pages import fill_pages
from benchmarks.paper import memory
from benchmarks.paper.figures import LEFT_OUT_NATS, pictures_of
from benchmarks.paper.markdown import table_section
from benchmarks.paper.records import read_records
from benchmarks.paper.results import of_cell, results_of
from benchmarks.paper.scales import cells_of
from benchmarks.paper.tables import TABLES
from lineartime.plot import digest
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
        ours, theirs = ({key[-1]: loss for key, loss in of_cell(told.trained.loss, row, column).items()}
                        for row in ("FLASH", rival))
        found = memory.differences(ours, theirs)
        assert list(found) == [0, 1, 2] and round(-fmean(found.values()), 2) == mean
        assert round(memory.half_width(found.values()), 2) == half and not memory.told_apart(found)


@pytest.mark.parametrize(("values", "words", "text"), [
    ([0.1], "one seed, no claim", "+0.100"), ([-0.1, -0.11, -0.09], "ahead", "**-0.100 ± 0.025**"),
    ([0.1, 0.11, 0.09], "behind", "**+0.100 ± 0.025**"),
    ([-0.1, 0.05], "cannot be told apart", "-0.025 ± 0.953"),
    ([-0.01, -0.2, -0.05], "cannot be told apart, all 3 seeds ahead", "-0.087 ± 0.249"),
    ([0.01, 0.2], "cannot be told apart, all 2 seeds behind", "+0.105 ± 1.207")])
def test_a_difference_is_claimed_where_its_interval_leaves_0_out(values, words, text):
    found = dict(enumerate(values))
    assert (memory.verdict(found), memory.difference_text(found)) == (words, text)


def test_differences_are_of_seeds_that_both_have():
    losses = {"FLASH": {0: 4.0, 1: 4.5, 2: 5.0}, "other": {2: 4.9, 0: 4.2, 7: 1.0}}
    assert memory.paired(losses, "other", "FLASH") == pytest.approx({0: 0.2, 2: -0.1})
    assert memory.paired(losses, "other", "nothing") == {} and memory.difference_text({}) == "-"


def test_the_whole_split_is_compared_seed_by_seed():
    def change(row, seed, record):
        if row == "Transformer++":
            record["held_out"]["loss"] = 3.85 + 0.01 * seed + (0.03, 0.04, 0.05)[seed]

    lines = lines_of(memory.whole_part(results(change)))
    assert lines["Transformer++"] == ["behind", "+0.040 ± 0.025", "+0.030, +0.040, +0.050"]
    assert lines["Transformer++, width 256, to FLASH, width 256"] == ["one seed, no claim", "-0.050", "-0.050"]
    assert "FLASH" not in lines and "FLASH, width 256" not in lines


def test_articles_and_masked_text_are_compared_by_column():
    rows = copy.deepcopy([record for record in made_rows("memory_texts") if record["kind"] == "train"])
    for record in rows:
        settings = record["settings"]
        better = settings.get("key_conv") and settings["model"] == "flash" and settings["task"] == "c4"
        record["held_out"]["loss"] = 3.0 + settings["seed"] - (0.25 + settings["seed"] / 100 if better else 0)
    found = results_of("memory_texts", "cpu", rows)
    lines = lines_of(memory.columns_part(found))
    assert lines["FLASH, its loss"] == ["4.000", "4.000"]
    assert lines["FLASH, three changes"] == ["+0.000 ± 0.000", "-0.260 ± 0.025"]
    assert lines["Transformer++"] == ["+0.000 ± 0.000", "+0.000 ± 0.000"]
    assert memory.columns_part(found) in table_section(found)


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


def test_contexts_are_compared_with_flash_at_the_same_and_with_the_models_own_shortest():
    def change(row, seed, record):
        if row == CONV:
            record["context_use"]["losses"] = [3.9 + 0.01 * seed - gain for gain in (0, 0.1, 0.2, 0.3, 0.3, 0.4)]

    found = results(change)
    by_context, gains = lines_of(memory.context_part(found)), lines_of(memory.gain_part(found))
    assert by_context["model"] == ["512", "1K", "2K", "4K", "8K", "16K"] and gains["model"] == by_context["model"][1:]
    assert by_context["FLASH, its loss"] == ["3.860", "3.850", "3.840", "3.830", "3.820", "3.810"]
    # FLASH has 3.85, 3.86 and 3.87 at 512, and 0.01 less at each longer context.
    assert [cell.split()[0] for cell in by_context[CONV]] == [
        "+0.050", "-0.040", "-0.130", "-0.220", "-0.210", "-0.300"]
    assert [cell.split()[0] for cell in gains[CONV]] == ["+0.100", "+0.200", "+0.300", "+0.300", "+0.400"]
    assert gains["FLASH"][-1] == "+0.050 ± 0.000" and gains["Transformer++, width 256"][-1] == "+0.050"
    assert by_context["Transformer++, width 256, to FLASH, width 256"] == ["-0.050"] * 6


def test_recurrence_is_compared_by_class_with_flash_and_with_its_local_half():
    def change(row, seed, record):
        for each in record["recurrence"]["classes"]:
            if row == CONV and each["kind"] == "rare bigram" and each["seen"] == "in earlier chunks only":
                each["loss"] -= 1.0
            if row == "Transformer++" and each["kind"] == "bigram" and each["seen"] == "not before":
                each |= {"n_tokens": 0, "loss": None}

    found = results(change)
    lines = lines_of(memory.class_part(found, memory.compared(found)))
    assert lines["model"] == [f"{kind}, {seen}" for kind in ("token", "bigram", "rare bigram")
                              for seen in ("in its chunk", "in earlier chunks only", "not before")]
    assert [cell.split()[0] for cell in lines[CONV]] == ["-0.200"] * 7 + ["-1.200", "-0.200"]
    assert lines["Transformer++"][5] == "-" and lines["Transformer++"][4] != "-"
    lines = lines_of(memory.class_part(found, memory.compared_with_local(found)))
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
    shown = [memory.signed(at_half)] * 2 + [memory.signed(at_end + 1e-3)] * 3 + [memory.signed(at_end + 1e-3 - at_half)]
    assert told == words and [cell.split()[0] for cell in rest] == shown
    assert lines["Transformer++"][0] == "cannot be told"
    assert lines["Transformer++, width 256, to FLASH, width 256"][0] == "one seed, no claim"


def test_what_is_missing_is_said():
    def left_out(row, seed):
        return row not in (memory.LOCAL, "FLASH, width 256") and not (row == CONV and seed == 1)

    def change(row, seed, record):
        if row == "Transformer++" and seed == 2:
            del record["recurrence"]

    found = results(change, keep=left_out)
    text = table_section(found)
    assert (f"\nNot measured yet, or not evaluated: Transformer++, seed 2; {memory.LOCAL}, seed 0, 1, 2; {CONV}, "
            "seed 1; FLASH, width 256, seed 0.\n") in text
    assert text.count(memory.NOT_YET) == 1  # the differences to FLASH's local half
    assert "Not measured yet" not in table_section(results())
    assert table_section(results(keep=lambda row, seed: False)).count(memory.NOT_YET) == 7
    without = results(keep=lambda row, seed: row != "FLASH")
    assert table_section(without).count(memory.NOT_YET) == 0  # width 256 has a FLASH of its own
    alone = results(keep=lambda row, seed: row == "FLASH")
    assert table_section(alone).count(memory.NOT_YET) == 6  # all but the gain from context
    nothing = table_section(results_of("memory", "cpu", []))
    assert "\nNot measured yet: not run at this scale, `python -m benchmarks reproduce memory --scale cpu" in nothing


def test_one_seed_claims_nothing():
    text = table_section(results(keep=lambda row, seed: seed == 0))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables and not any("±" in line or "**" in line or "ahead" in line or "fades" in line for line in tables)


def picture_of(found):
    ((name, picture),) = pictures_of(found).items()
    assert name == "memory-cpu-worth.png"
    return picture


def test_the_picture_has_contexts_recurrence_and_tokens():
    by_context, single, bigrams, rare, by_tokens = picture_of(results()).panels
    several = [row for row in TABLES["memory"].models if row not in TABLES["memory"].one_seed]
    assert [line.name for line in by_context.lines] == several
    assert dict(by_context.lines[0].points) == pytest.approx({512 * 2**i: 3.86 - 0.01 * i for i in range(6)})
    assert [panel.title.split(",")[0] for panel in (single, bigrams, rare)] == ["Tokens", "Bigrams", "Rare bigrams"]
    for panel in (single, bigrams, rare):
        assert [words.replace("\n", " ") for _, words in panel.contexts] == [
            "in its chunk", "in earlier chunks only", "not before"]
        assert len(panel.lines) == 3 * (len(several) - 1) and all(len(line.points) == 1 for line in panel.lines)
        for (place, _), each in zip(panel.contexts, (panel.lines[i:i + 1] for i in range(3)), strict=True):
            assert place / 1.3 < each[0].points[0][0] < place * 1.3  # beside the words of its class
        assert len({line.points[0][0] for line in panel.lines}) == len(panel.lines)  # none on another
        assert panel.level == 0 and panel.lines[0].points[0][1:] == pytest.approx((-0.05, -0.05, -0.05))
    (first, *_), last = by_tokens.lines[0].points[0], by_tokens.lines[0].points[-1]
    assert first == pytest.approx(4.9152) and last == pytest.approx((16.384, -0.05, -0.05, -0.05))


def test_a_loss_that_rises_beyond_the_trained_context_is_not_drawn():
    def change(row, seed, record):
        if row == "Transformer++":
            record["context_use"]["losses"][-2:] = [3.86 + LEFT_OUT_NATS - 0.01, 9.0]

    line = picture_of(results(change)).panels[0].lines[1]
    assert line.name == "Transformer++" and [place for place, _ in line.points] == [512, 1024, 2048, 4096, 8192]


def test_panels_without_rows_are_left_out():
    def change(row, seed, record):
        del record["context_use"], record["recurrence"]

    assert [panel.x_label for panel in picture_of(results(change)).panels] == ["million tokens trained on"]
    assert pictures_of(results(keep=lambda row, seed: False)) == {}


def test_one_command_fills_the_page(tmp_path):
    page, rows = tmp_path / "memory.md", made()
    page.write_text(f"before\n{PLACE}<!-- recall pairs: begin -->\nkept\n<!-- recall pairs: end -->\n")
    picture, _ = fill_pages([page], tmp_path / "images", "table", rows)
    text = page.read_text()
    assert text.startswith("before\n") and "\nold\n" not in text and "\nkept\n" in text
    for words in ("(images/memory-cpu-worth.png)", "**Differences to FLASH, whole split.**", "**Equal time.**",
                  "**Gain from context.**", "| Speed-up over FLASH by time of a step |", "fade?**"):
        assert words in text
    with Image.open(picture) as image:
        assert image.text["Rows"] == digest(picture_of(results()))


def test_the_text_needs_no_torch(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made()))
    code = ("import sys; from benchmarks.__main__ import PROGRAM, app, main\n"
            "sys.argv[1:] = ['report', 'memory', '--rows', sys.argv[1]]\n"
            "try: main(app, PROGRAM)\nexcept SystemExit: assert not {'torch', 'matplotlib'} & sys.modules.keys()")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "rows.jsonl")], cwd=ROOT, check=True,
                          capture_output=True, text=True)
    assert "**Differences to FLASH, whole split.**" in done.stdout
