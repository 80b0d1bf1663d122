"""The paper's figures, and pictures of its tables, from the rows of `lineartime reproduce`.

A picture is a few panels. What is in them is worked out first, apart from how it is drawn.
"""

import hashlib
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineartime.benchmark.figures import label_plainly, scale_logarithmically
from lineartime.benchmark.markdown import number, span_of, tokens
from lineartime.errors import ResourceError
from lineartime.plot import COLOURS, drawing, label_positions
from lineartime.reproduce.markdown import GAPS
from lineartime.reproduce.paper import read_paper
from lineartime.reproduce.results import (
    Outcome,
    Outcomes,
    Seeds,
    paired,
    perplexity_of,
    speedup,
    step_speedup,
    steps_to,
)
from lineartime.reproduce.tables import Column

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
DASHED: dict[str, Any] = {"color": "#444444", "linewidth": 1.1, "linestyle": (0, (5, 4)), "zorder": 1.5}
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


Panels = Sequence[Lines | Dots]


def files_of(outcomes: Outcomes) -> list[tuple[str, str]]:
    """File names of a table's pictures and what each shows; none of what nothing is known of."""
    return [(f"{outcomes.table.name}-{outcomes.scale.name}-{what}.png", what)
            for what in PICTURES.get(outcomes.table.name, OF_OTHERS) if panels_of(outcomes, what)]


def panels_of(outcomes: Outcomes, what: str) -> Panels:
    """All that a picture is drawn from; empty where nothing of it is known."""
    made: dict[str, Callable[[Outcomes], Panels]] = {
        "cost": cost_panels, "positions": position_panels, "latency": latency_panels, "sizes": size_panels,
        "speedup": speedup_panels, "perplexity": perplexity_dots, "answers": answer_dots, "gap": gap_dots}
    return made[what](outcomes)


def alt_text(outcomes: Outcomes, what: str) -> str:
    """"Table 1: changes to GAU, cpu scale. Perplexity, left is better. 3 seeds"."""
    words = f"{outcomes.table.title}, {outcomes.scale.name} scale. {SHOWS[what]}"
    seeds = sorted({len(outcome.trained) for outcome in outcomes.known if outcome.trained})
    if what == "latency" or not seeds:
        return words
    return f"{words}. {span_of(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'}"


def digest(outcomes: Outcomes, what: str) -> str:
    """A hash of all that a picture is drawn from; the picture carries it, so that one of older rows is found out."""
    drawn = [alt_text(outcomes, what), [asdict(panel) for panel in panels_of(outcomes, what)]]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def cost_panels(outcomes: Outcomes) -> list[Lines]:
    """Figures 5 to 8: the time of a step by context, then a panel for each context, quality against steps x time.

    Only cells that were both trained and timed are in it."""
    costs = [outcome.cost_s(outcome.curve[-1].step) for outcome in outcomes.known if outcome.curve]
    longest = max((cost for cost in costs if cost is not None), default=None)
    if longest is None:
        return []
    unit = next(unit for unit in UNITS if longest >= 2 * unit[0] or unit == UNITS[-1])
    panels = [cost_panel(outcomes, column, *unit) for column in own_columns(outcomes)]
    return [panel for panel in (*latency_panels(outcomes), *panels) if panel.lines]


def cost_panel(outcomes: Outcomes, column: str, unit_s: float, units: str) -> Lines:
    """One context. Quality is minus the held-out loss; the dashed line is the best of the reference's mean curve."""
    reference = outcomes.table.reference
    best = least_loss(outcomes.cells[reference, column]) if reference else None
    lines, crossings, clocks = [], [], []
    for outcome in in_column(outcomes, column):
        s = outcome.cost_s(1)
        if s is None:
            continue
        lines.append(Line(outcome.cell.row, tuple(quality(s * point.step / unit_s, point.loss)
                                                  for point in outcome.curve)))
        if best is not None and outcome.cell.row != reference:
            steps = steps_to(best, [(point.step, point.loss.mean) for point in outcome.curve])
            crossings += [] if steps is None else [s * steps / unit_s]
        row = outcome.timed[-1]
        clocks.append("processor time" if row["clock"] == "cpu" else f"time on one {row['gpu'] or 'processor'}")
    return Lines(title_of(outcomes.table.columns[column]), f"{span_of(clocks)}, {units}" if clocks else "",
                 "minus log perplexity", not_empty(lines), "quality", level=None if best is None else -best,
                 level_name=f"best of {reference}", crossings=tuple(crossings))


def quality(x: float, loss: Seeds) -> Point:
    """Minus log perplexity; the least is that of the most loss."""
    return x, -loss.mean, -loss.most, -loss.least


def least_loss(outcome: Outcome) -> float | None:
    """Of the mean curve, in nats per token."""
    return min((point.loss.mean for point in outcome.curve), default=None)


def latency_panels(outcomes: Outcomes) -> list[Lines]:
    """Time against the context, with quartiles: per token, or where columns differ in more than the context, of a step.

    Nothing without two contexts to join."""
    table = outcomes.table
    columns = {name: column.context for name, column in own_columns(outcomes).items()
               if any(outcome.timed for outcome in in_column(outcomes, name))}
    if len(columns) < 2:
        return []
    of_step = table.kind == "step"
    lines = []
    for row in table.models:
        points = []
        for name, context in columns.items():
            outcome = outcomes.cells[row, name]
            ms, times = (outcome.step_ms, 1) if of_step else (outcome.ms_per_token, 1000)
            if ms:
                points.append((context, ms.median * times, ms.q1 * times, ms.q3 * times))
        lines.append(Line(row, tuple(points)))
    contexts = tuple((context, name if of_step else tokens(context)) for name, context in columns.items())
    return [Lines("Time of a training step", "tokens of context" + (" x rows" if of_step else ""),
                  "ms" if of_step else "ms per 1,000 tokens", not_empty(lines), "contexts", contexts)]


def position_panels(outcomes: Outcomes) -> list[Lines]:
    """A panel for each context: the loss of early and of late tokens, at the end of training."""
    panels = []
    for name, column in own_columns(outcomes).items():
        lines = not_empty(Line(outcome.cell.row, tuple(
            (math.sqrt((span.first - 0.5) * (span.last + 0.5)), span.loss.mean, span.loss.least, span.loss.most)
            for span in outcome.loss_by_position)) for outcome in in_column(outcomes, name))
        if lines:
            panels.append(Lines(title_of(column), "position, tokens", "held-out nats per token", lines, "positions"))
    return panels


def size_panels(outcomes: Outcomes) -> list[Lines]:
    """Figure 3: a line for each kind of layer, a point for each size."""
    panels = []
    for name, column in outcomes.table.columns.items():
        points: dict[str, list[Point]] = {}
        for outcome in in_column(outcomes, name):
            if outcome.loss and outcome.ms_per_token:
                kind = outcome.cell.row.split()[0]
                points.setdefault(kind, []).append(quality(1000 * outcome.ms_per_token.median, outcome.loss))
        lines = tuple(Line(kind, tuple(sorted(found))) for kind, found in points.items())
        if lines:
            panels.append(Lines(title_of(column, name), "ms per 1,000 tokens of training",
                                "minus log perplexity", lines))
    return panels


def speedup_panels(outcomes: Outcomes) -> list[Lines]:
    """Figure 1: a panel for each Transformer, FLASH's speed-up over it against the context."""
    panels = []
    columns = outcomes.table.columns
    for rival in (row for row in outcomes.table.models if row != "FLASH"):
        by_quality: list[Point] = []
        by_step: list[Point] = []
        for name, column in columns.items():
            ours, theirs = outcomes.cells["FLASH", name], outcomes.cells[rival, name]
            quality, step = speedup(ours, theirs), step_speedup(ours, theirs)
            if quality and quality.value is not None:
                values = [quality.value, *(value for value in quality.seeds if value is not None)]
                by_quality.append((column.context, quality.value, min(values), max(values)))
            if step:
                by_step.append((column.context, step.value, step.low, step.high))
        lines = not_empty([Line("to the same quality", tuple(by_quality)),
                           Line("by the time of a step", tuple(by_step))])
        printed = [(column.context, read_paper()[outcomes.table.name].value("speedup", rival, name))
                   for name, column in columns.items()]
        if lines:
            lines += not_empty([Line("the paper's", tuple((x, y, y, y) for x, y in printed if y))])
            contexts = tuple((column.context, tokens(column.context)) for column in columns.values())
            panels.append(Lines(f"Over {rival}", "tokens of context", "times as fast", lines, "contexts", contexts,
                                level=1.0, level_name="as fast"))
    return panels


def perplexity_dots(outcomes: Outcomes) -> list[Dots]:
    """Tables 1 and 2: a panel for each column; the dashed line is the mean of the row that others are changes of."""
    first = outcomes.table.reference or next(iter(outcomes.table.models))
    panels = []
    for name, column in outcomes.table.columns.items():
        original = outcomes.cells[first, name].perplexity
        panels.append(Dots(title_of(column, name), "perplexity per token",
                           values_of(outcomes, name, lambda outcome: outcome.perplexity),
                           original.mean if original else None, first))
    return [panel for panel in panels if any(values for _, values in panel.values)]


def answer_dots(outcomes: Outcomes) -> list[Dots]:
    """Table 4: perplexity of pretraining, and F1 beside that of a guess by word overlap."""
    (column,) = outcomes.table.columns
    guesses = [row["word_overlap"]["f1"] for outcome in outcomes.known for row in outcome.finetuned.values()]
    panels = [Dots("Pretraining, left is better", "perplexity per masked token",
                   values_of(outcomes, column, lambda outcome: outcome.perplexity)),
              Dots("Answers, right is better", "F1, percent", values_of(outcomes, column, lambda outcome: outcome.f1),
                   max(guesses, default=None), "a guess by word overlap")]
    return [panel for panel in panels if any(values for _, values in panel.values)]


def gap_dots(outcomes: Outcomes) -> list[Dots]:
    """Table 5: a panel for each task; what each seed's perplexity is with mixed chunks, less that without them."""
    panels = []
    for task in ("LM", "MLM"):
        columns = [(name, column.context) for name, column in outcomes.table.columns.items() if name.split()[0] == task]
        values = []
        for (whole, mixed), (name, context) in itertools.product(GAPS, columns):
            gap = paired(outcomes.cells[mixed, name], outcomes.cells[whole, name], perplexity_of)
            values += [(f"{whole} to {mixed}, {context:,}", gap.values)] if gap else []
        if values:
            panels.append(Dots(task, "perplexity per token", tuple(values), 0.0, "no difference"))
    return panels


def own_columns(outcomes: Outcomes) -> dict[str, Column]:
    """Those with a cell that the scale runs and has rows of: not where runs of other tables are all there is."""
    return {name: column for name, column in outcomes.table.columns.items()
            if any(outcome.planned and outcome.known for outcome in in_column(outcomes, name))}


def in_column(outcomes: Outcomes, column: str) -> list[Outcome]:
    return [outcomes.cells[row, column] for row in outcomes.table.models]


def not_empty(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def values_of(outcomes: Outcomes, column: str, of: Callable[[Outcome], Seeds | None],
              ) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Of each row the numbers of its seeds, perhaps none."""
    found = [(outcome.cell.row, of(outcome)) for outcome in in_column(outcomes, column)]
    return tuple((row, seeds.values if seeds else ()) for row, seeds in found)


def title_of(column: Column, name: str = "") -> str:
    """With the column's name, if that says more than its context."""
    return f"Context {column.context:,}" if name in ("", str(column.context)) else f"{name}, context {column.context:,}"


def draw_all(tables: Iterable[Outcomes], folder: Path) -> list[Path]:
    """Every picture of these tables, into a folder that is made if need be. Raises ResourceError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError("cannot make the folder", folder, e.strerror) from None
    drawn = []
    for outcomes in tables:
        for name, what in files_of(outcomes):
            draw(outcomes, what, folder / name)
            drawn.append(folder / name)
    return drawn


def draw(outcomes: Outcomes, what: str, path: Path) -> None:
    """One picture of `files_of`. Raises ResourceError where it cannot be written."""
    panels = panels_of(outcomes, what)
    n_columns = 2 if len(panels) == 4 else min(PER_ROW, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    names = panels[0].names if isinstance(panels[0], Dots) else []
    height = 1.1 + 0.36 * len(names) if names else 3.3
    with drawing(path, width=max(0.3 + 4.2 * n_columns, 8), height=0.8 + height * n_rows,
                 metadata={"Rows": digest(outcomes, what)}) as figure:
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
        words = textwrap.fill(alt_text(outcomes, what), round(13.5 * figure.get_figwidth()))
        figure.suptitle(words, fontsize=9.5, x=0.008, ha="left", color="#555555")
        lines = [line.name for panel in panels if isinstance(panel, Lines) for line in panel.lines]
        add_legend(figure, places, [*outcomes.table.models, *lines])


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
