"""Pictures of the paper's tables: what is in them is what the rows say, and what is drawn can be read."""

import itertools

import pytest
from PIL import Image

from benchmarks.figures import figures_of
from benchmarks.paper.results import results_of
from benchmarks.paper.scales import SCALES, Cell
from benchmarks.paper.tables import TABLES
from benchmarks.pictures import digest, draw
from made_rows import final_loss, made_rows, step_ms


def made(table, scale="cpu", keep=lambda row: True):
    return results_of(table, scale, [row for row in made_rows(table, scale=scale) if keep(row)])


def panels_of(results, what):
    """Of one of a table's pictures; none where it has no such picture."""
    picture = figures_of(results).get(f"{results.table.name}-{results.scale.name}-{what}.png")
    return list(picture.panels) if picture else []


def cell_of(table, row, column, scale="cpu"):
    return Cell(TABLES[table], row, column, SCALES[scale])


def line_of(panel, name):
    (line,) = (line for line in panel.lines if line.name == name)
    return line


def cost_panel(table, column):
    context = TABLES[table].columns[column].context
    return next(panel for panel in panels_of(made(table), "cost") if panel.title == f"Context {context:,}")


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


def test_a_picture_knows_its_rows(tmp_path):
    ((name, picture),) = figures_of(made("chunk_size")).items()
    draw(picture, tmp_path / name)
    with Image.open(tmp_path / name) as written:
        assert written.text["Rows"] == digest(picture)
    (fewer,) = figures_of(made("chunk_size", keep=lambda row: row["settings"].get("seed") != 2)).values()
    (again,) = figures_of(made("chunk_size")).values()
    assert digest(fewer) != digest(picture) == digest(again)
