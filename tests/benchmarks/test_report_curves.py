"""Pictures of the paper's tables: what is in them is what the rows say, and what is drawn can be read."""

import itertools
import math

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text
from PIL import Image

from benchmarks.pages import fill_pages
from benchmarks.paper.figures import IN_FRONT, PICTURES, pictures_of
from benchmarks.paper.results import positions_of, results_of
from benchmarks.paper.scales import SCALES, Cell
from benchmarks.paper.tables import TABLES
from lineartime import plot
from lineartime.errors import ResourceError
from lineartime.plot import digest, draw, figure_of
from made_rows import final_loss, made_rows, step_ms


def made(table, scale="cpu", keep=lambda row: True):
    return results_of(table, scale, [row for row in made_rows(table, scale=scale) if keep(row)])


def panels_of(results, what):
    """Of one of a table's pictures; none where it has no such picture."""
    picture = pictures_of(results).get(f"{results.table.name}-{results.scale.name}-{what}.png")
    return list(picture.panels) if picture else []


def cell_of(table, row, column, scale="cpu"):
    return Cell(TABLES[table], row, column, SCALES[scale])


def line_of(panel, name):
    (line,) = (line for line in panel.lines if line.name == name)
    return line


def seeds_of(panel):
    return {name: values for name, values, _ in panel.dots}


def cost_panel(table, column):
    context = TABLES[table].columns[column].context
    return next(panel for panel in panels_of(made(table), "cost") if panel.title == f"Context {context:,}")


def test_every_table_has_pictures():
    assert PICTURES.keys() <= TABLES.keys()
    for table in TABLES:
        assert list(pictures_of(made(table))) == [
            f"{table}-cpu-{what}.png" for what in PICTURES.get(table, ("perplexity",))]
        assert pictures_of(results_of(table, "cpu", [])) == {}


def test_quality_stands_over_the_time_that_training_took():
    panel, cell = cost_panel("lm_wiki40b", "2048"), cell_of("lm_wiki40b", "FLASH", "2048")
    settings = cell.settings(0)
    ms_per_token = step_ms(cell) / settings["micro_batch_tokens"]
    minutes = settings["steps"] * settings["tokens_per_step"] * ms_per_token / 1e3 / 60
    x, y, low, high = line_of(panel, "FLASH").points[-1]
    assert panel.x_label == "processor time, minutes"
    assert x == pytest.approx(minutes)
    assert (y, low, high) == pytest.approx((-final_loss(cell, 1), -final_loss(cell, 2), -final_loss(cell, 0)))
    planned = TABLES["lm_wiki40b"].cells["cpu"]
    assert len(line_of(panel, "FLASH").points) == 7  # of 10, the first third is left out
    assert [line.name for line in panel.lines] == [
        *(row for row in TABLES["lm_wiki40b"].models if (row, "2048") in planned), "reaches it"]


def test_the_dashed_line_is_the_references_best_and_rings_are_where_others_are_as_good():
    panel, reference = cost_panel("lm_wiki40b", "2048"), cell_of("lm_wiki40b", "Transformer++", "2048")
    assert panel.level == pytest.approx(-final_loss(reference, 1)) and panel.level_name == "best of Transformer++"
    crossed = {}
    for line in panel.lines[:-1]:
        for (x, y, *_), (later, above, *_) in itertools.pairwise(line.points):
            if y < panel.level <= above:
                crossed[line.name] = x + (later - x) * (panel.level - y) / (above - y)
    assert crossed.pop("Transformer++") == pytest.approx(line_of(panel, "Transformer++").points[-1][0])
    assert crossed.keys() == {"FLASH-Quad", "FLASH"}
    rings = line_of(panel, "reaches it").points
    assert [x for x, _ in rings] == pytest.approx([crossed["FLASH-Quad"], crossed["FLASH"]])
    assert {y for _, y in rings} == {panel.level}


def test_a_ring_is_on_its_curve():
    rows = made_rows("lm_wiki40b")
    for row in rows:
        if row["kind"] == "train" and row["settings"]["model"] == "flash":
            row["curve"] = [[step, loss - 9] for step, loss in row["curve"]]
    panel = panels_of(results_of("lm_wiki40b", "cpu", rows), "cost")[-1]
    assert line_of(panel, "FLASH").points[0][0] == min(x for x, _ in line_of(panel, "reaches it").points)
    assert len(line_of(panel, "FLASH").points) == 10 and len(line_of(panel, "Transformer").points) == 7


def test_a_cell_that_was_not_timed_has_no_cost_and_a_reference_that_was_not_trained_no_line():
    results = made("lm_wiki40b", keep=lambda row: row["kind"] == "train" or row["settings"]["model"] != "flash-quad")
    panel = panels_of(results, "cost")[-1]
    assert "FLASH" in [line.name for line in panel.lines] and "FLASH-Quad" not in [line.name for line in panel.lines]
    results = made("lm_wiki40b", keep=lambda row: row["settings"]["model"] != "transformer++")
    panel = panels_of(results, "cost")[-1]
    assert panel.level is None and "reaches it" not in [line.name for line in panel.lines]
    assert panels_of(made("lm_wiki40b", keep=lambda row: row["kind"] == "train"), "cost") == []


def test_a_context_that_only_other_tables_ran_is_left_out():
    rows = made_rows("lm_wiki40b", "chunk_size", scale="gpu")
    results = results_of("lm_wiki40b", "gpu", rows)
    assert ("FLASH-Quad", "1024", 0) in results.trained.index
    for what in ("cost", "positions"):
        titles = [panel.title for panel in panels_of(results, what)]
        assert [title for title in titles if "Context" in title] == ["Context 512", "Context 2,048", "Context 8,192"]


def test_latency_is_per_token_and_of_a_step_where_columns_are_steps():
    results = made("lm_wiki40b")
    panel = panels_of(results, "cost")[0]
    cell = cell_of("lm_wiki40b", "FLASH-Quad", "2048")
    per_1000 = 1000 * step_ms(cell) / cell.settings()["micro_batch_tokens"]
    assert panel.contexts == ((512, "512"), (2048, "2K")) and panel.y_label == "ms per 1,000 tokens"
    assert line_of(panel, "FLASH-Quad").points[-1] == pytest.approx((2048, per_1000, 0.97 * per_1000, 1.03 * per_1000))
    results = made("gpu_latency")
    (panel,) = panels_of(results, "latency")
    cell = cell_of("gpu_latency", "Performer", "2048 x 1")
    assert panel.contexts == ((512, "512 x 4"), (2048, "2048 x 1")) and panel.y_label == "ms"
    assert line_of(panel, "Performer").points[-1][:2] == (2048, pytest.approx(step_ms(cell)))
    one = made("gpu_latency", keep=lambda row: row["settings"]["context"] == 512)
    assert panels_of(one, "latency") == []


def test_positions_are_drawn_in_the_middle_of_their_spans():
    results = made("lm_pg19")
    panel = panels_of(results, "positions")[-1]
    spans = positions_of(results, "FLASH", "4096")
    (first, last), losses = spans.index[-1], spans.iloc[-1]
    x, y, low, high = line_of(panel, "FLASH").points[-1]
    assert panel.title == "Context 4,096" and last == 4096
    assert first < x < last and x == pytest.approx(math.sqrt(first * last), rel=1e-3)
    assert (y, low, high) == (losses.mean(), losses.min(), losses.max()) and low < y < high


def test_figure_3_joins_the_sizes_of_a_kind():
    kinds = {"MHSA+MLP", "MHSA+GLU", "GAU"}
    lm, mlm = panels_of(made("gau_vs_transformer"), "sizes")
    assert {line.name for line in lm.lines} == kinds and {len(line.points) for line in lm.lines} == {3}
    assert {len(line.points) for line in mlm.lines} == {1}
    assert (lm.title, mlm.title) == ("LM, context 512", "MLM, context 512")
    lm, _ = panels_of(made("gau_vs_transformer", "paper"), "sizes")
    assert {len(line.points) for line in lm.lines} == {3}
    assert all(list(line.points) == sorted(line.points) for line in lm.lines)


def test_speed_ups_stand_beside_the_papers():
    results = made("speedup")
    over, over_plus_plus = panels_of(results, "speedup")
    assert (over.title, over_plus_plus.title) == ("Over Transformer", "Over Transformer++")
    assert line_of(over, "the paper's").points[-1][:2] == (8192, 25.6)
    assert line_of(over_plus_plus, "the paper's").points[0][:2] == (512, 1.2)
    ours, theirs = (cell_of("speedup", row, "2048") for row in ("FLASH", "Transformer"))
    per_token = [step_ms(cell) / cell.settings()["micro_batch_tokens"] for cell in (ours, theirs)]
    assert line_of(over, "by the time of a step").points[-1][:2] == (2048, pytest.approx(per_token[1] / per_token[0]))
    assert line_of(over, "to the same quality").points[-1][1] > per_token[1] / per_token[0]


def test_a_loss_that_is_never_reached_has_no_speed_up():
    rows = made_rows("speedup")
    for row in rows:
        if row["kind"] == "train" and row["settings"]["model"] == "flash":
            row["curve"] = [[step, loss + 9] for step, loss in row["curve"]]
    for panel in panels_of(results_of("speedup", "cpu", rows), "speedup"):
        assert [line.name for line in panel.lines] == ["by the time of a step", "the paper's"]


def test_dots_are_the_seeds():
    results = made("gau_ablation")
    lm, mlm = panels_of(results, "perplexity")
    cell = cell_of("gau_ablation", "no gating", "LM")
    assert list(seeds_of(lm)) == list(seeds_of(mlm)) == list(TABLES["gau_ablation"].models)
    assert seeds_of(lm)["no gating"] == pytest.approx([math.exp(final_loss(cell, seed)) for seed in range(3)])
    assert lm.level == pytest.approx(sum(seeds_of(lm)["original GAU"]) / 3) and lm.level_name == "original GAU"
    some = made("gau_ablation", keep=lambda row: row["settings"].get("gate", True))
    assert seeds_of(panels_of(some, "perplexity")[0])["no gating"] == ()


def test_gaps_are_seed_by_seed():
    results = made("gap")
    lm, _ = panels_of(results, "gap")
    flash, quad = (cell_of("gap", row, "LM 2048") for row in ("FLASH", "FLASH-Quad"))
    assert seeds_of(lm)["FLASH-Quad to FLASH, 2,048"] == pytest.approx(
        [math.exp(final_loss(flash, seed)) - math.exp(final_loss(quad, seed)) for seed in range(3)])
    assert lm.level == 0


def test_answers_stand_beside_a_guess():
    pretraining, answers = panels_of(made("triviaqa"), "answers")
    assert seeds_of(answers)["Combiner"] == (11.0,) and answers.level == 26.0 and pretraining.level is None
    (alone,) = panels_of(made("triviaqa", keep=lambda row: row["kind"] != "finetune"), "answers")
    assert alone == pretraining


def words_of(figure):
    """Texts that can be seen, with where they are. An axis keeps labels that it does not use, or not any more."""
    unused = set()
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            used = [tick.label1 for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
                    if limits[0] <= tick.get_loc() <= limits[1] and axes.get_visible()]
            unused |= {label for tick in (*axis.majorTicks, *axis.minorTicks) for label in (tick.label1, tick.label2)
                       if label not in used}
    return [(text.get_text(), text.get_window_extent()) for text in figure.findobj(Text)
            if text not in unused and text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize(("table", "scale"), [*((table, "cpu") for table in TABLES), ("lm_wiki40b", "paper"),
                                              ("lm_pg19", "gpu"), ("gau_vs_transformer", "paper"), ("gap", "paper")])
def test_what_is_drawn_can_be_read(tmp_path, monkeypatch, table, scale):
    """No words on other words or outside; every line in its colour, which is the same in all panels."""
    drawn = []

    def looked_at(picture):
        figure = figure_of(picture)
        figure.draw_without_rendering()
        drawn.append((figure.bbox, words_of(figure)))
        return figure

    monkeypatch.setattr(plot, "figure_of", looked_at)
    pictures = pictures_of(made(table, scale))
    for name, picture in pictures.items():
        draw(picture, tmp_path / name)
        (whole, words), pixels = drawn.pop(), imread(tmp_path / name)[..., :3]
        assert len(words) > 10
        for text, extent in words:
            assert extent.x0 > 0 and extent.y0 > 0 and extent.x1 < whole.x1 and extent.y1 < whole.y1, text
        for (one, first), (other, second) in itertools.combinations(words, 2):
            width = min(first.x1, second.x1) - max(first.x0, second.x0)
            height = min(first.y1, second.y1) - max(first.y0, second.y0)
            assert width < 1 or height < 1, f"{one!r} is on {other!r}"
        colours = {(line.name, line.style["color"]) for panel in picture.panels for line in panel.lines}
        assert len({name for name, _ in colours}) == len({colour for _, colour in colours}) == len(colours)
        assert all(colour == plot.COLOURS[0] for name, colour in colours if name in IN_FRONT)
        for colour in {colour for name, colour in colours if name != "reaches it"} or {plot.COLOURS[0]}:
            assert (np.abs(pixels - matplotlib.colors.to_rgb(colour)).max(-1) < 0.02).sum() > 50, colour


def test_a_picture_knows_its_rows(tmp_path):
    ((name, picture),) = pictures_of(made("gau_ablation")).items()
    draw(picture, tmp_path / name)
    with Image.open(tmp_path / name) as written:
        assert written.text["Rows"] == digest(picture)
    (fewer,) = pictures_of(made("gau_ablation", keep=lambda row: row["settings"].get("seed") != 2)).values()
    (again,) = pictures_of(made("gau_ablation")).values()
    assert digest(fewer) != digest(picture) == digest(again)
    assert picture.caption == "Table 1: changes to GAU, cpu scale. Perplexity, left is better. 3 seeds"
    assert fewer.caption.endswith("2 seeds")


def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "page.md").write_text("<!-- table gau_ablation cpu: begin -->\n<!-- table: end -->\n")
    with pytest.raises(ResourceError, match="cannot make the folder") as raised:
        fill_pages([tmp_path / "page.md"], tmp_path / "file", "table", made_rows("gau_ablation"))
    assert "\n" not in str(raised.value)
