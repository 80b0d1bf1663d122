"""All pictures: speed and memory by context, the figures of the paper, and curves of recall. A
picture is panels of lines beside each other, with one legend below; it is drawn as PNG."""

import hashlib
import itertools
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks import Row
from benchmarks.markdown import parameters, tokens, unique
from benchmarks.paper.results import CELL, Results, costs, curve_of, of_cell, speedups, spread, step_speedups
from benchmarks.paper.tables import value
from benchmarks.recall.study import ABOUT, STUDY, accuracies, learned, sizes, without_keys
from benchmarks.recall.tasks import Task
from benchmarks.speed import KIND, OURS, contexts_of, dtypes_of, newest, side_name, size_of, title
from lineartime.base.files import replaced
from lineartime.training.plot import COLOURS, STYLE

IN_FRONT = ("FLASH", "GAU", "C = 256", "to the same quality")
QUALITY = "minus nats per token"
RING = {"marker": "o", "linestyle": "", "markersize": 7, "color": "#444444", "markerfacecolor": "white", "zorder": 4}
DASHED: dict[str, Any] = {"color": "#555555", "linewidth": 1.1, "linestyle": (0, (5, 4)), "zorder": 1.5}
DOTTED: dict[str, Any] = {"color": "black", "linewidth": 1.6, "marker": "", "linestyle": (0, (1, 2)), "zorder": 3}


@dataclass(frozen=True)
class Line:
    """Points from left to right: place, height and perhaps its least and most, in a style."""

    name: str
    points: tuple[tuple[float, ...], ...]
    style: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One diagram of lines, with a dashed one at `level`."""

    title: str
    x_label: str
    y_label: str = ""
    lines: tuple[Line, ...] = ()
    x_scale: Literal["linear", "log"] = "linear"
    contexts: tuple[tuple[int, str], ...] = ()  # what is written along the bottom, which then has powers of two
    log_heights: bool = False
    level: float | None = None
    level_name: str = ""


@dataclass(frozen=True)
class Picture:
    """Panels under a caption, which is also the alternative text."""

    caption: str
    panels: tuple[Panel, ...]


def digest(picture: Picture) -> str:
    """A hash of all that a picture is drawn from; a file of older rows is found out by it."""
    # The pictures in the repository were drawn when a panel also had `dots`, after its lines.
    text = json.dumps(asdict(picture)).replace(', "x_scale"', ', "dots": [], "x_scale"')
    return hashlib.sha256(text.encode()).hexdigest()


def draw(picture: Picture, path: Path) -> None:
    """Write a picture as PNG, whole or not at all: a caption, panels in at most three columns, and
    one legend for all, for which the picture grows. Raises ResourceError."""
    panels = picture.panels
    n_columns = 2 if len(panels) == 4 else min(3, len(panels))
    n_rows, width = math.ceil(len(panels) / n_columns), max(0.3 + 4.2 * n_columns, 8)
    with matplotlib.rc_context(STYLE), replaced(path) as file:
        figure = Figure(figsize=(width, 0.3 + 3.2 * n_rows), dpi=150, layout="constrained")
        places = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
        handles: dict[str, Any] = {}
        for axes, panel in zip(places, panels, strict=False):
            draw_lines(axes, panel)
            scale_axes(axes, panel, panels)
            axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True)) | handles
        for axes in places[len(panels):]:
            axes.remove()
        in_row = max(1, width // max(1.9, 0.6 + 0.095 * max(map(len, handles), default=0)))
        figure.set_figheight(0.3 + 3.2 * n_rows + 0.25 * math.ceil(len(handles) / in_row))
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=max(int(in_row), 1))
        figure.suptitle(textwrap.fill(picture.caption, round(13.5 * width)), fontsize=9.5, x=0.008, ha="left",
                        color="#555555")
        figure.savefig(file, format="png", facecolor="white", metadata={"Rows": digest(picture)})


def draw_lines(axes: Axes, panel: Panel) -> None:
    """Lines, each with a band from the least to the most; a single point has a bar."""
    for line in (line for line in panel.lines if line.points):
        x, y, *reach = (list(column) for column in zip(*line.points, strict=True))
        style: dict[str, Any] = {"linewidth": 1.5, "marker": "o", "markersize": 4, "zorder": 2} | line.style
        axes.plot(x, y, label=line.name, **style | ({"marker": "o", "markersize": 6} if len(x) == 1 else {}))
        if reach and len(x) == 1:
            axes.vlines(x, reach[0], reach[1], color=line.style["color"], alpha=0.5, linewidth=2)
        elif reach:
            axes.fill_between(x, reach[0], reach[1], color=line.style["color"], alpha=0.18, linewidth=0)
    if panel.level is not None:
        axes.axhline(panel.level, label=panel.level_name, **DASHED)


def scale_axes(axes: Axes, panel: Panel, panels: Sequence[Panel]) -> None:
    """Scales of a panel and what is written along its axes. Logarithmic heights are of all."""
    if panel.contexts:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(*zip(*panel.contexts, strict=True))
    if panel.log_heights:
        heights = [height for each in panels if each.log_heights
                   for line in each.lines for point in line.points for height in point[1:]]
        low, high = min(heights), max(heights)
        room = max(1.15, 2.3 * (low / high) ** 0.5)  # two round numbers are between limits that are 5 times apart
        axes.set(yscale="log", ylim=(low / room, high * room))
    if panel.x_scale == "log":
        axes.set_xscale("log")
    for axis in [axes.xaxis] * (panel.x_scale == "log") + [axes.yaxis] * panel.log_heights:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1000 else f"{y:g}"))
        axis.set_minor_formatter(NullFormatter())


def speed_pictures(table: pd.DataFrame) -> dict[str, Picture]:
    """Pictures of time and memory by file name; none without two contexts to join."""
    first = table.iloc[0]
    machine = "cpu" if first["device"] == "cpu" else re.sub(r"\W+", "-", first["hardware"].lower()).strip("-")
    parts = [first["benchmark"], first["name"], machine, f"{first['threads']}threads" if first["threads"] > 1 else "",
             parameters(size_of(table)).replace(" ", ""), f"{table.n_tokens.max()}"]
    time = {"step": "ms per token of a step", "forward": "ms per token"}
    pictures = {}
    for what, told, column, y_label in (
            ("time", "Time per token", "ms", time.get(first["benchmark"], "ms per generated token")),
            ("memory", "Peak memory", "peak_mib", "peak memory, MiB")):
        panels = speed_panels(table, column, y_label)
        if any(len(line.points) > 1 for panel in panels for line in panel.lines):
            stem = re.sub(r"[^\w.+-]+", "-", "-".join(part for part in (*parts, what) if part))
            pictures[f"{stem}.png"] = Picture(f"{told} against context. {title(table)}. {first['hardware']}", panels)
    return pictures


def speed_panels(table: pd.DataFrame, column: str, y_label: str) -> tuple[Panel, ...]:
    """A panel for each type with any values, a line for each side and variant, FLASH in front; or
    one for all types, where another side has one that FLASH has not."""
    known = newest(table).dropna(subset=["ms", column])
    n_variants, dtypes = known.groupby("side").variant.nunique(), dtypes_of(known)
    ours = set(known.dtype[known.side == OURS])
    in_one = 0 < len(ours) < len(dtypes)
    colours = dict(zip(sorted(table.side.unique(), key=lambda side: side != OURS), itertools.cycle(COLOURS),
                       strict=False))
    names = {dtype: ", ".join(dtypes) if in_one else dtype for dtype in dtypes}
    lines: dict[str, list[Line]] = {name: [] for name in names.values()}
    for (side, variant, dtype), found in known.groupby(KIND, sort=False):
        style: dict[str, Any] = {"color": colours[side], **({"linewidth": 2.2, "zorder": 3} if side == OURS else {})}
        if n_variants[side] > 1 and variant == "eager":
            style |= {"linewidth": 1.1, "linestyle": "--"}
        if in_one:
            style["linestyle"] = ("-", (0, (5, 2)), (0, (1, 1.5)))[dtypes.index(dtype)]
        words = [side_name(side), variant if n_variants[side] > 1 else "", dtype if in_one else ""]
        points = tuple(found[["context", column]].itertuples(index=False, name=None))
        lines[names[dtype]].append(Line(", ".join(filter(None, words)), points, style))
    contexts = tuple((context, tokens(context)) for context in contexts_of(table))
    return tuple(Panel(dtype, "tokens of context", y_label, tuple(drawn), contexts=contexts, log_heights=True)
                 for dtype, drawn in lines.items())


def figures_of(results: Results) -> dict[str, Picture]:
    """The paper's figures of a table by file name; none of what nothing is known of."""
    if results.table.name not in FIGURES:
        return {}
    what, shows, panels_of = FIGURES[results.table.name]
    panels = tuple(panel for panel in panels_of(results) if panel.lines)
    words = f"{results.table.title}, {results.scale.name} scale. {shows}"
    return {f"{results.table.name}-{results.scale.name}-{what}.png": Picture(words, panels)} if panels else {}


def line(name: str, names: Iterable[str], heights: pd.DataFrame) -> Line:
    """heights: by place: height, least and most. names: of all lines in a picture, for colours."""
    ordered = sorted(names, key=lambda each: each not in IN_FRONT)
    style = {"color": COLOURS[ordered.index(name) % len(COLOURS)]}
    return Line(name, tuple(heights.astype(float).itertuples(name=None)),
                style | ({"zorder": 3, "linewidth": 2.2} if name in IN_FRONT else {}))


def lines(names: Iterable[str], heights: pd.DataFrame) -> tuple[Line, ...]:
    """heights: by row and place, height, least and most."""
    known = {name: of_cell(heights, name).droplevel("row").sort_index() for name in unique(names)}
    return tuple(line(name, known, found) for name, found in known.items() if len(found))


def cost_panels(results: Results) -> list[Panel]:
    """Figures 5 to 8: the time of a step by context, then a panel for each context: quality, which
    is minus the held-out loss, against steps x time, of cells that were trained and timed. The
    dashed line is the best of the reference's mean curve. The first third of a curve, where quality
    rises steeply, is left out, but nothing after the last point before the dashed line."""
    known, panels = costs(results), latency_panels(results)
    unit_s, units = (60.0, "minutes") if (known.seconds * known.steps).max() < 7200 else (3600.0, "hours")
    for column in own_columns(results):
        best, drawn, rings, clocks = math.nan, [], [], []
        for row in (row for row in results.rows if (row, column) in known.index):
            cell, curve = known.loc[(row, column)], curve_of(results, row, column)
            best, cost = float(cell.best), cell.seconds / unit_s
            reached = cost * cell.reached
            n_before = sum(cost * curve.index < reached) if reached > 0 else len(curve)
            start = min(len(curve) // 3, max(n_before - 1, 0))
            heights = (-curve).agg(["mean", "min", "max"], axis=1).set_axis(cost * curve.index)
            drawn.append(line(row, results.table.models, heights[start:]))
            rings += [(float(reached), -best)] if row != results.table.reference and reached > 0 else []
            timed = results.steps.record[row, column]
            clocks.append("processor time" if timed["clock"] == "cpu" else f"time on one {timed['gpu'] or 'processor'}")
        ends = [each.points[-1][0] for each in drawn]
        drawn += [Line("reaches it", tuple(rings), RING)] if rings else []
        panels.append(Panel(title_of(results, column), f"{', '.join(unique(clocks))}, {units}", QUALITY,
                            tuple(drawn), level=None if math.isnan(best) else -best,
                            level_name=f"best of {results.table.reference}",
                            x_scale="log" if ends and max(ends) > 10 * min(ends) else "linear"))
    return panels if len(known) else []


def latency_panels(results: Results) -> list[Panel]:
    """Time against the context, with quartiles: per token, or where columns differ in more than the
    context, of a step; nothing without two contexts to join."""
    of_step, steps = results.table.kind == "step", results.steps
    contexts = {column: results.table.columns[column].context for column in own_columns(results)
                if column in steps.index.get_level_values("column")}
    if len(contexts) < 2:
        return []
    ms = steps[["median", "q1", "q3"]].div(1.0 if of_step else steps.tokens / 1000, axis=0)
    return [Panel("Time of a training step", "tokens of context" + (" x rows" if of_step else ""),
                  "ms" if of_step else "ms per 1,000 tokens", lines(results.table.models, by_context(ms, contexts)),
                  contexts=tuple((context, column if of_step else tokens(context))
                                 for column, context in contexts.items()), log_heights=True)]


def by_context(values: pd.DataFrame, contexts: Mapping[str, int]) -> pd.DataFrame:
    return values[values.index.isin(list(contexts), level="column")].rename(index=contexts, level="column")


def size_panels(results: Results) -> list[Panel]:
    """Figure 3: a line for each kind of layer, a point for each size."""
    quality = (-results.trained.loss.astype(float)).groupby(["row", "column"]).agg(["mean", "min", "max"])
    quality["ms"] = 1000 * results.steps["median"] / results.steps.tokens
    points = quality.dropna().rename(index=lambda row: row.split()[0], level="row").set_index("ms", append=True)
    return [Panel(title_of(results, column), "ms per 1,000 tokens of training", QUALITY,
                  lines((row.split()[0] for row in results.table.models),
                        points[points.index.isin([column], level="column")].droplevel("column")))
            for column in results.columns]


def by_model(results: Results) -> pd.DataFrame:
    """The losses of cells with the model, a row's words before the comma: those of several seeds
    first, then from the best to the worst."""
    each = spread(results.trained.loss)
    models = each.index.get_level_values("row").str.split(",").str[0]
    return each.assign(row=models, is_one_seed=each["min"].isna()).sort_values(["is_one_seed", "mean"])


def lasting_panels(results: Results) -> list[Panel]:
    """A line for each model: its best row of each length, one of several seeds if there is one, by
    tokens and by time, with the model's median time of a step."""
    each = by_model(results).assign(tokens=results.trained.tokens.groupby(CELL).first() / 1e6,
                                    **costs(results)[["steps", "seconds"]])
    each["minutes"] = each.steps * each.seconds.groupby(each.row).transform("median") / 60
    best = each.drop_duplicates(["row", "tokens"])
    places = {"tokens": "million tokens", "minutes": "minutes of one processor core"}
    return [Panel("", words, "nats per token", lines(best.row, drawn.set_index(["row", place])[["mean", "min", "max"]]),
                  x_scale="log") for place, words in places.items() if len(drawn := best.dropna(subset=place))]


def minutes_panels(results: Results) -> list[Panel]:
    """A line for each model: its best row at each context, one of several seeds if there is one."""
    contexts = {name: column.context for name, column in results.table.columns.items()}
    best = by_model(results).reset_index("column").drop_duplicates(["row", "column"]).set_index(["row", "column"])
    return [Panel("", "tokens of context", "nats per token",
                  lines(best.index.unique("row"), by_context(best[["mean", "min", "max"]], contexts)),
                  contexts=tuple((context, tokens(context)) for context in contexts.values()))]


def speedup_panels(results: Results) -> list[Panel]:
    """Figure 1: a panel for each Transformer, FLASH's speed-up over it against the context."""
    panels, contexts = [], {name: column.context for name, column in results.table.columns.items()}
    for rival in (row for row in results.table.models if row != "FLASH"):
        quality, step = (of_cell(found, "FLASH").droplevel("row").dropna()
                         for found in (speedups(results, rival), step_speedups(results, rival)))
        each = pd.DataFrame(quality.seeds.tolist(), quality.index)
        paper = pd.Series({name: value("speedup", "speedup", rival, name) for name in contexts})
        heights = {"to the same quality": pd.DataFrame({"value": quality.value, "low": each.min(axis=1),
                                                        "high": each.max(axis=1)}),
                   "by the time of a step": step,
                   "the paper's": pd.DataFrame(dict.fromkeys(step.columns, paper.dropna()))}
        drawn = lines(heights, by_context(pd.concat(heights, names=["row", "column"]), contexts))
        panels.append(Panel(f"Over {rival}", "tokens of context", "times as fast",
                            drawn if len(step) or len(quality) else (), log_heights=True, level=1.0,
                            level_name="as fast",
                            contexts=tuple((context, tokens(context)) for context in contexts.values())))
    return panels


def own_columns(results: Results) -> list[str]:
    """The columns that the scale runs itself, without those of other tables' runs."""
    planned = {column for _, column in results.table.cells[results.scale.name]}
    return [column for column in results.columns if column in planned]


def title_of(results: Results, column: str) -> str:
    """The context, after the column's name if that says more."""
    context = f"ontext {results.table.columns[column].context:,}"
    return f"C{context}" if column.isdigit() else f"{column}, c{context}"


COST = ("cost", "Quality against what training costs", cost_panels)
FIGURES: dict[str, tuple[str, str, Callable[[Results], list[Panel]]]] = {
    **dict.fromkeys(("mlm_c4", "lm_wiki40b", "lm_pg19", "flash_ablation", "chunk_size", "more_tokens"), COST),
    "gau_vs_transformer": ("sizes", "Quality against the time of a step", size_panels),
    "gpu_latency": ("latency", "Time of a training step", latency_panels),
    "lasting": ("loss", "Loss at the end of runs, by their length", lasting_panels),
    "minutes": ("loss", "Loss after ten minutes, by context", minutes_panels),
    "speedup": ("speedup", "FLASH's speed-up", speedup_panels)}
"""By table: the end of its file's name, what it shows, and its panels."""


def recall_picture(rows: Sequence[Row], task: str) -> Picture:
    """Accuracy by number of facts, by length, and by step, each model's mean and range."""
    (what, n_values, counted), (lengths, n_facts) = ABOUT[task], sizes(rows, task)
    models = learned(rows, task)
    if len(models) > len(COLOURS):
        models = {name: models[name] for name in STUDY["lists"]["drawn"] if name in models}
    by_number, by_length, by_step = [], [], []
    for (name, runs), colour in zip(models.items(), COLOURS, strict=False):
        style = {"color": colour}
        by_number.append(Line(name, spread_points({n: accuracies(runs, lengths[0], n) for n in n_facts}), style))
        by_length.append(Line(name, spread_points({length: accuracies(runs, length) for length in lengths}), style))
        by_step.append(Line(name, tuple((step, right) for step, _, right in runs[0]["curve"]), style))
    if counted == Task.counted:  # a model that would know a row's values but not their keys, drawn on top
        known, name = [without_keys(task, n) for n in n_facts], "the values without their keys"
        mean, steps = statistics.fmean(known), [step for each in by_step for step, _ in each.points] or [0]
        by_number.append(Line(name, tuple(zip(n_facts, known, strict=True)), DOTTED))
        by_length.append(Line(name, tuple((length, mean) for length in lengths), DOTTED))
        by_step.append(Line(name, ((min(steps), mean), (max(steps), mean)), DOTTED))
    guess: dict[str, Any] = {"y_label": "accuracy", "level": 1 / n_values, "level_name": "a guess"}
    return Picture(
        f"Recall, {what}. Mean accuracy of the answers over the seeds at the best learning rate, with the "
        "range of the seeds; the curves over steps are of the first seed.", (
            Panel(f"in rows of {lengths[0]} tokens", f"{counted} (n)", lines=tuple(by_number),
                  contexts=tuple((n, str(n)) for n in n_facts), **guess),
            Panel("in longer rows, all numbers", "tokens in the row", lines=tuple(by_length),
                  contexts=tuple((length, f"{length:,}") for length in lengths), **guess),
            Panel("while it learns, all numbers", "step", lines=tuple(by_step), **guess)))


def spread_points(values: Mapping[int, Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """At each place that has values: their mean, the least and the most."""
    return tuple((place, statistics.fmean(each), min(each), max(each)) for place, each in values.items() if each)
