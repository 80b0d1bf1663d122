"""The paper's figures, and pictures of its tables, from the records of `lineartime reproduce`.

A picture is a few panels. What is in them is worked out first, apart from how it is drawn.
"""

import hashlib
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lineartime.benchmark.markdown import joined, number, tokens, unique
from lineartime.plot import (
    COLOURS,
    DASHED,
    draw_into,
    drawing,
    label_plainly,
    label_positions,
    middle,
    scale_logarithmically,
)
from lineartime.reproduce.markdown import GAPS
from lineartime.reproduce.paper import read_paper
from lineartime.reproduce.results import (
    CELL,
    Results,
    curve_of,
    of_cell,
    paired,
    positions_of,
    seconds_per_step,
    speedups,
    spread,
    step_speedups,
    steps_to,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = {
    "gau_vs_transformer": ("sizes",), "gau_ablation": ("perplexity",), "mhsa_ablation": ("perplexity",),
    "mlm_c4": ("cost", "positions"), "lm_wiki40b": ("cost", "positions"), "lm_pg19": ("cost", "positions"),
    "triviaqa": ("answers",), "flash_ablation": ("cost", "positions"), "gap": ("gap",),
    "chunk_size": ("cost", "positions"), "gpu_latency": ("latency",), "speedup": ("speedup",),
    "more_tokens": ("cost", "positions")}
OF_OTHERS = ("perplexity",)
"""What is drawn of each of the paper's tables, and of a study that is not the paper's."""

SHOWS = {
    "cost": "Quality against what training costs", "positions": "Loss by position in the context",
    "latency": "Time of a training step", "sizes": "Quality against the time of a step", "speedup": "FLASH's speed-up",
    "perplexity": "Perplexity, left is better", "answers": "Pretraining and answers",
    "gap": "What mixed chunks add to the perplexity, left is better"}

COLOUR_OF = {
    "FLASH": COLOURS[0], "GAU": COLOURS[0], "FLASH-Quad": COLOURS[2], "C = T": COLOURS[2],
    "Transformer": COLOURS[6], "Transformer+": COLOURS[4], "MHSA+MLP": COLOURS[4],
    "Transformer++": COLOURS[1], "MHSA+GLU": COLOURS[1], "MC-TFM++": COLOURS[3], "Combiner": COLOURS[3],
    "Performer": COLOURS[5], "Performer-Matmul": COLOURS[3], "Transformer++, 2e-3": COLOURS[3],
    "FLASH (LocalOnly)": COLOURS[5], "FLASH (GlobalOnly)": COLOURS[2],
    "C = 1": COLOURS[3], "C = 16": COLOURS[4], "C = 64": COLOURS[5], "C = 128": COLOURS[1], "C = 256": COLOURS[0],
    "C = 512": COLOURS[6],
    "to the same quality": COLOURS[0], "by the time of a step": COLOURS[5], "the paper's": COLOURS[6]}
"""A line's, the same in every picture; others take one after the other of all."""
IN_FRONT = ("FLASH", "GAU", "C = 256", "to the same quality")

UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
FAR_APART = 10.0
"""Times: what training costs in one panel, from which on a linear scale hides the cheapest."""
PER_ROW = 3
"""Panels beside each other."""

Point = tuple[float, float, float, float]
"""Place, height, and the least and the most that the height may be."""


@dataclass(frozen=True)
class Line:
    """Points from left to right."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Lines:
    """A panel of lines."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    axes: str = "plain"
    """"plain", "quality" (zoomed to where curves part), "contexts" (both logarithmic) or "positions"."""
    contexts: tuple[tuple[int, str], ...] = ()
    """What is written along the bottom of "contexts"."""
    level: float | None = None
    """Height of the dashed line."""
    level_name: str = ""
    crossings: tuple[float, ...] = ()
    """Where lines reach that height."""


@dataclass(frozen=True)
class Dots:
    """A panel of names below each other, each with the numbers of its seeds."""

    title: str
    x_label: str
    values: tuple[tuple[str, tuple[float, ...]], ...]
    level: float | None = None
    """Place of the dashed line."""
    level_name: str = ""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.values]

    @property
    def is_known(self) -> bool:
        return any(values for _, values in self.values)


Panels = Sequence[Lines | Dots]


def files_of(results: Results) -> list[tuple[str, str]]:
    """File names of a table's pictures and what each shows; none of what nothing is known of."""
    return [(f"{results.table.name}-{results.scale.name}-{what}.png", what)
            for what in PICTURES.get(results.table.name, OF_OTHERS) if panels_of(results, what)]


def panels_of(results: Results, what: str) -> Panels:
    """All that a picture is drawn from; empty where nothing of it is known."""
    made: dict[str, Callable[[Results], Panels]] = {
        "cost": cost_panels, "positions": position_panels, "latency": latency_panels, "sizes": size_panels,
        "speedup": speedup_panels, "perplexity": perplexity_dots, "answers": answer_dots, "gap": gap_dots}
    return [panel for panel in made[what](results) if (panel.lines if isinstance(panel, Lines) else panel.is_known)]


def alt_text(results: Results, what: str) -> str:
    """"Table 1: changes to GAU, cpu scale. Perplexity, left is better. 3 seeds"."""
    words = f"{results.table.title}, {results.scale.name} scale. {SHOWS[what]}"
    seeds = sorted(set(results.trained.groupby(level=CELL).size()))
    if what == "latency" or not seeds:
        return words
    return f"{words}. {' to '.join(unique(map(str, (seeds[0], seeds[-1]))))} {'seed' if seeds == [1] else 'seeds'}"


def digest(results: Results, what: str) -> str:
    """A hash of all that a picture is drawn from; the picture carries it, so that one of older records is found out."""
    drawn = [alt_text(results, what), [asdict(panel) for panel in panels_of(results, what)]]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def line(name: str, x: Iterable[float], values: pd.DataFrame) -> Line:
    """values: of each point what its seeds have; drawn are mean, least and most."""
    return Line(name, tuple((float(place), float(mean), float(least), float(most)) for place, (mean, least, most)
                            in zip(x, values.agg(["mean", "min", "max"], axis=1).to_numpy(), strict=True)))


def cost_panels(results: Results) -> list[Lines]:
    """Figures 5 to 8: the time of a step by context, then a panel for each context, quality against steps x time.

    Only cells that were both trained and timed are in it."""
    seconds = seconds_per_step(results)
    if seconds.empty:
        return []
    longest = (seconds * results.trained.steps.groupby(level=CELL).first()).max()
    unit = next(unit for unit in UNITS if longest >= 2 * unit[0] or unit == UNITS[-1])
    return [*latency_panels(results), *(cost_panel(results, column, seconds, *unit) for column in own_columns(results))]


def cost_panel(results: Results, column: str, seconds: pd.Series, unit_s: float, units: str) -> Lines:
    """One context. Quality is minus the held-out loss; the dashed line is the best of the reference's mean curve."""
    reference = results.table.reference
    best = curve_of(results, reference, column).mean(axis=1).min() if reference else math.nan
    lines, crossings, clocks = [], [], []
    for row in results.rows:
        if (row, column) in seconds:
            s, curve = seconds[row, column] / unit_s, curve_of(results, row, column)
            lines.append(line(row, s * curve.index, -curve))
            crossings += [s * steps_to(best, curve.mean(axis=1))] if row != reference else []
            timed = results.steps.record[row, column]
            clocks.append("processor time" if timed["clock"] == "cpu" else f"time on one {timed['gpu'] or 'processor'}")
    return Lines(title_of(results, column), f"{joined(unique(clocks))}, {units}", "minus log perplexity",
                 tuple(lines), "quality", level=None if math.isnan(best) else -float(best),
                 level_name=f"best of {reference}",
                 crossings=tuple(float(place) for place in crossings if not math.isnan(place)))


def latency_panels(results: Results) -> list[Lines]:
    """Time against the context, with quartiles: per token, or where columns differ in more than the context, of a step.

    Nothing without two contexts to join."""
    of_step = results.table.kind == "step"
    steps = results.steps
    contexts = {column: results.table.columns[column].context for column in own_columns(results)
                if column in steps.index.get_level_values("column")}
    if len(contexts) < 2:
        return []
    per = 1.0 if of_step else steps.tokens / 1000
    ms = steps[["median", "q1", "q3"]].astype(float).div(per, axis=0)
    lines = []
    for row in results.rows:
        points = sorted((float(contexts[column]), float(median), float(q1), float(q3))
                        for (_, column), median, q1, q3 in of_cell(ms, row).itertuples() if column in contexts)
        lines += [Line(row, tuple(points))] if points else []
    return [Lines("Time of a training step", "tokens of context" + (" x rows" if of_step else ""),
                  "ms" if of_step else "ms per 1,000 tokens", tuple(lines), "contexts",
                  tuple((context, column if of_step else tokens(context)) for column, context in contexts.items()))]


def position_panels(results: Results) -> list[Lines]:
    """A panel for each context: the loss of early and of late tokens, at the end of training."""
    panels = []
    for column in own_columns(results):
        spans = {row: positions_of(results, row, column) for row in results.rows}
        lines = [line(row, [middle(*span) for span in found.index], found)
                 for row, found in spans.items() if len(found)]
        panels.append(Lines(title_of(results, column), "position, tokens", "held-out nats per token", tuple(lines),
                            "positions"))
    return panels


def size_panels(results: Results) -> list[Lines]:
    """Figure 3: a line for each kind of layer, a point for each size."""
    ms, loss, panels = 1000 * results.steps["median"] / results.steps.tokens, spread(results.trained.loss), []
    for column in results.columns:
        points: dict[str, list[Point]] = {}
        for row in results.rows:
            if (row, column) in ms and (row, column) in loss.index:
                mean, least, most, _ = loss.loc[(row, column)].astype(float)
                points.setdefault(row.split()[0], []).append((float(ms[row, column]), -mean, -most, -least))
        lines = tuple(Line(kind, tuple(sorted(found))) for kind, found in points.items())
        panels.append(Lines(title_of(results, column, True), "ms per 1,000 tokens of training", "minus log perplexity",
                            lines))
    return panels


def speedup_panels(results: Results) -> list[Lines]:
    """Figure 1: a panel for each Transformer, FLASH's speed-up over it against the context."""
    panels, columns = [], results.table.columns
    contexts = tuple((column.context, tokens(column.context)) for column in columns.values())
    for rival in (row for row in results.table.models if row != "FLASH"):
        quality, step = (of_cell(found, "FLASH").droplevel("row")
                         for found in (speedups(results, rival), step_speedups(results, rival)))
        reached = {name: pd.Series([value, *seeds]) for name, value, seeds in quality.dropna().itertuples()}
        paper = {name: read_paper()[results.table.name].value("speedup", rival, name) for name in columns}
        heights = {"to the same quality": [(name, each[0], each.min(), each.max()) for name, each in reached.items()],
                   "by the time of a step": list(step.itertuples()),
                   "the paper's": [(name, value, value, value) for name, value in paper.items() if value]}
        lines = tuple(Line(label, tuple(sorted((columns[name].context, float(value), float(low), float(high))
                                               for name, value, low, high in found)))
                      for label, found in heights.items() if found)
        panels.append(Lines(f"Over {rival}", "tokens of context", "times as fast",
                            lines if len(step) or reached else (), "contexts", contexts, level=1.0,
                            level_name="as fast"))
    return panels


def perplexity_dots(results: Results) -> list[Dots]:
    """Tables 1 and 2: a panel for each column; the dashed line is the mean of the row that others are changes of."""
    first = results.table.reference or next(iter(results.table.models))
    panels = []
    for column in results.columns:
        values = values_of(results, results.trained.perplexity, column)
        original = dict(values).get(first)
        panels.append(Dots(title_of(results, column, True), "perplexity per token", values,
                           sum(original) / len(original) if original else None, first))
    return panels


def answer_dots(results: Results) -> list[Dots]:
    """Table 4: perplexity of pretraining, and F1 beside that of a guess by word overlap."""
    (column,) = results.table.columns
    guesses = [record["word_overlap"]["f1"] for record in results.finetuned.record]
    return [Dots("Pretraining, left is better", "perplexity per masked token",
                 values_of(results, results.trained.perplexity, column)),
            Dots("Answers, right is better", "F1, percent", values_of(results, results.finetuned.f1, column),
                 max(guesses, default=None), "a guess by word overlap")]


def gap_dots(results: Results) -> list[Dots]:
    """Table 5: a panel for each task; what each seed's perplexity is with mixed chunks, less that without them."""
    panels = []
    for task in ("LM", "MLM"):
        gaps = {f"{whole} to {mixed}, {column.context:,}": paired(results, (mixed, name), (whole, name), "perplexity")
                for whole, mixed in GAPS for name, column in results.table.columns.items() if name.split()[0] == task}
        panels.append(Dots(task, "perplexity per token",
                           tuple((name, tuple(gap.tolist())) for name, gap in gaps.items() if len(gap)), 0.0,
                           "no difference"))
    return panels


def own_columns(results: Results) -> list[str]:
    """Those with a cell that the scale runs and has records of: not where runs of other tables are all there is."""
    own = results.cells[results.cells.planned & results.cells.known]
    return [column for column in results.columns if column in own.index.get_level_values("column")]


def values_of(results: Results, values: pd.Series, column: str) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Of each row the numbers of its seeds, perhaps none."""
    return tuple((row, tuple(of_cell(values, row, column).tolist())) for row in results.table.models)


def title_of(results: Results, column: str, named: bool = False) -> str:
    """With the column's name, if it is asked for and says more than its context."""
    context = f"ontext {results.table.columns[column].context:,}"
    return f"{column}, c{context}" if named and not column.isdigit() else f"C{context}"


def draw_all(tables: Iterable[Results], folder: Path) -> list[Path]:
    """Every picture of these tables, into a folder that is made if need be. Raises ResourceError."""
    return draw_into(folder, {name: partial(draw, results, what) for results in tables
                              for name, what in files_of(results)})


def draw(results: Results, what: str, path: Path) -> None:
    """One picture of `files_of`. Raises ResourceError where it cannot be written."""
    panels = panels_of(results, what)
    n_columns = 2 if len(panels) == 4 else min(PER_ROW, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    names = panels[0].names if isinstance(panels[0], Dots) else []
    height = 1.1 + 0.36 * len(names) if names else 3.3
    with drawing(path, width=max(0.3 + 4.2 * n_columns, 8), height=0.8 + height * n_rows,
                 metadata={"Rows": digest(results, what)}) as figure:
        places = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
        for i, (axes, panel) in enumerate(zip(places, panels, strict=False)):
            axes.set_title(panel.title)
            axes.spines["right"].set_visible(False)
            axes.set_xlabel(panel.x_label)
            if isinstance(panel, Lines):
                draw_lines(axes, panel)
                left = panels[i - 1] if i % n_columns else None
                axes.set_ylabel("" if isinstance(left, Lines) and left.y_label == panel.y_label else panel.y_label)
            else:
                draw_dots(axes, panel)
                axes.tick_params(labelleft=axes is places[0] or panel.names != names)
        for axes in places[len(panels):]:
            axes.set_visible(False)
        words = textwrap.fill(alt_text(results, what), round(13.5 * figure.get_figwidth()))
        figure.suptitle(words, fontsize=9.5, x=0.008, ha="left", color="#555555")
        lines = [line.name for panel in panels if isinstance(panel, Lines) for line in panel.lines]
        add_legend(figure, places, [*results.table.models, *lines])


def draw_lines(axes: "Axes", panel: Lines) -> None:
    """Means as lines, with a band from the least to the most; a single point has a bar."""
    from matplotlib.ticker import LogLocator

    others = itertools.cycle(COLOURS)
    for line in panel.lines:
        x, y, low, high = (list(values) for values in zip(*line.points, strict=True))
        front = line.name in IN_FRONT
        look: dict[str, Any] = {"color": COLOUR_OF.get(line.name) or next(others), "zorder": 3 if front else 2,
                                "linewidth": 2.2 if front else 1.5}
        if len(x) == 1:
            reach = [[y[0] - low[0]], [high[0] - y[0]]]
            axes.errorbar(x, y, reach, fmt="o", capsize=4, markersize=6, label=line.name, **look)
            continue
        axes.plot(x, y, marker="" if panel.axes == "quality" else "o", markersize=4, label=line.name, **look)
        axes.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    if panel.level is not None:
        axes.axhline(panel.level, label=panel.level_name, **DASHED)
    if panel.level is not None and panel.crossings:
        axes.plot(panel.crossings, [panel.level] * len(panel.crossings), "o", markersize=7, markerfacecolor="white",
                  markeredgecolor="#444444", markeredgewidth=1.2, zorder=4, label="reaches it")
    if panel.axes == "quality":
        zoom_to_end(axes, panel)
    elif panel.axes == "contexts":
        scale_logarithmically(axes, dict(panel.contexts))
        widen(axes, panel)
    elif panel.axes == "positions":
        label_positions(axes)
        axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))


def zoom_to_end(axes: "Axes", panel: Lines) -> None:
    """Leave out the first third of every curve, where quality rises so fast that the rest would be pressed together.

    Costs that are far apart are on a logarithmic scale."""
    late = [point for line in panel.lines for point in line.points[len(line.points) // 3:]]
    low, high = min(point[2] for point in late), max(point[3] for point in late)
    room = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - room, max(high, panel.level or high) + room)
    ends = [line.points[-1][0] for line in panel.lines]
    if max(ends) > FAR_APART * min(ends):
        axes.set_xscale("log")
        axes.set_xlim(0.9 * min(point[0] for point in late), 1.1 * max(ends))
        label_plainly(axes.xaxis)
    else:
        axes.set_xlim(0, None)


def widen(axes: "Axes", panel: Lines) -> None:
    """Limits of a logarithmic height that have round numbers between them, however alike the times are."""
    heights = [height for line in panel.lines for _, _, *reach in line.points for height in reach]
    axes.set_ylim(min(heights) / 1.7, max(heights) * 1.7)


def draw_dots(axes: "Axes", panel: Dots) -> None:
    """Every seed a ring, the mean a dot with its number at the right, a bar from the least to the most."""
    for place, (_, values) in enumerate(panel.values):
        axes.axhline(place, color="#e8e8e8", linewidth=0.8, zorder=0)
        if values:
            axes.plot([min(values), max(values)], [place, place], color=COLOURS[0], linewidth=2, alpha=0.5)
            if len(values) > 1:
                axes.plot(values, [place] * len(values), "o", color=COLOURS[0], markerfacecolor="none", label="a seed")
            axes.plot([sum(values) / len(values)], [place], "o", color=COLOURS[0], markersize=8, label="mean")
        axes.annotate(number(sum(values) / len(values)) if values else "not run", (1.02, place), va="center",
                      xycoords=("axes fraction", "data"), color="#333333" if values else "#888888", fontsize=9.5)
    if panel.level is not None:
        axes.axvline(panel.level, label=panel.level_name, **DASHED)
    axes.set_yticks(range(len(panel.names)), panel.names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(panel.values) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)


def add_legend(figure: "Figure", panels: Sequence["Axes"], order: Sequence[str]) -> None:
    """One for all panels, below them; the names of `order` first and as they are there."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = sorted(handles, key=lambda label: order.index(label) if label in order else len(order))
    inches = max(1.9, 0.6 + 0.105 * max(map(len, labels), default=0))
    n_rows = math.ceil(len(labels) / (figure.get_figwidth() // inches))
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center",
                  ncols=math.ceil(len(labels) / n_rows))
