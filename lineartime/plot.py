"""Pictures as PNG: panels of lines or dots, and with them the curves of one run and of several beside each other."""

import hashlib
import itertools
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lineartime.atomic_io import read_bytes, replaced
from lineartime.config import ModelConfig
from lineartime.data.run_settings import RESULT_FILE
from lineartime.errors import CheckpointError, DataError, UsageError
from lineartime.info import describe, millions
from lineartime.run import METRICS_FILE, read_metrics, read_result, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_FILE = "loss.png"
UNITS = {"classify": "nats per label", "embed": "nats per text of a pair"}
"""Of the losses of runs that are fine-tuned on documents, by task."""
DPI = 150
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#882255")
"""Told apart by people with any colour vision (Okabe and Ito, and a red of Tol's)."""
DASHED: dict[str, Any] = {"color": "#555555", "linewidth": 1.1, "linestyle": (0, (5, 4)), "zorder": 1.5}


@dataclass(frozen=True)
class Line:
    """Points from left to right: place and height, and perhaps the least and the most that the height may be."""

    name: str
    """In the legend, if there is one."""
    points: tuple[tuple[float, ...], ...]
    style: dict[str, Any] = field(default_factory=dict)
    """Settings of matplotlib other than the usual ones."""


@dataclass(frozen=True)
class Panel:
    """Lines; or dots, which are names below each other; or a heat map."""

    title: str
    x_label: str
    y_label: str = ""
    lines: tuple[Line, ...] = ()
    dots: tuple[tuple[str, tuple[float, ...], str], ...] = ()
    """Of each name the numbers of its seeds, perhaps none, and what is written at the right."""
    heat: tuple[tuple[str, tuple[float | None, ...]], ...] = ()
    """Of each name, from the top, shares between 0 and 1 from left to right, from begin to end: a heat map. None is
    left white."""
    x_scale: Literal["linear", "log", "positions"] = "linear"
    """"positions" are powers of two."""
    contexts: tuple[tuple[int, str], ...] = ()
    """What is written along the bottom, which then has powers of two."""
    log_heights: bool = False
    level: float | None = None
    """Height of a dashed line; among dots, its place."""
    level_name: str = ""


@dataclass(frozen=True)
class Picture:
    """Panels under a caption, which says all that the alternative text of the picture has to say."""

    caption: str
    panels: tuple[Panel, ...]


def digest(picture: Picture) -> str:
    """A hash of all that a picture is drawn from; the file carries it, so that one of older rows is found out."""
    def drawn(fields: list[tuple[str, Any]]) -> dict[str, Any]:  # older pictures know no heat maps
        return {name: value for name, value in fields if name != "heat" or value}

    return hashlib.sha256(json.dumps(asdict(picture, dict_factory=drawn)).encode()).hexdigest()


def draw(picture: Picture, path: Path) -> None:
    """Write a picture as PNG, whole or not at all. Raises ResourceError."""
    import matplotlib

    with matplotlib.rc_context({
            "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.spines.top": False,
            "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True, "axes.axisbelow": True,
            "grid.color": "#e8e8e8", "legend.frameon": False}), replaced(path) as file:
        figure_of(picture).savefig(file, format="png", facecolor="white", metadata={"Rows": digest(picture)})


def figure_of(picture: Picture) -> "Figure":
    """Panels beside each other, in at most three columns, and one legend for all of them below."""
    from matplotlib.figure import Figure

    panels = picture.panels
    n_columns = 2 if len(panels) == 4 else min(3, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    width = max(0.3 + 4.2 * n_columns, 8)
    height = 0.3 + n_rows * max(1.1 + 0.36 * len(panel.dots) if panel.dots else 3.2 for panel in panels)
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    places = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for axes in places[len(panels):]:
        axes.remove()
    handles: dict[str, Any] = {}
    for i, (axes, panel) in enumerate(zip(places, panels, strict=False)):
        left = panels[i - 1] if i % n_columns else None
        draw_dots(axes, panel)
        draw_heat(axes, panel)
        draw_lines(axes, panel)
        scale_axes(axes, panel, panels)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label if left is None or left.y_label != panel.y_label else "")
        if left and left.dots:
            axes.tick_params(labelleft=[name for name, *_ in left.dots] != [name for name, *_ in panel.dots])
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        n_legend_rows = math.ceil(len(handles) / max(1, width // max(1.9, 0.6 + 0.095 * max(map(len, handles)))))
        figure.set_figheight(height + 0.25 * n_legend_rows)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center",
                      ncols=math.ceil(len(handles) / n_legend_rows))
    figure.suptitle(textwrap.fill(picture.caption, round(13.5 * width)), fontsize=9.5, x=0.008, ha="left",
                    color="#555555")
    return figure


def draw_lines(axes: "Axes", panel: Panel) -> None:
    """Lines, each with a band from the least to the most; a single point has a bar."""
    for line in (line for line in panel.lines if line.points):
        x, y, *reach = (list(column) for column in zip(*line.points, strict=True))
        style = {"linewidth": 1.5, "marker": "o", "markersize": 4, "zorder": 2, **line.style}
        style |= {"marker": "o", "markersize": 6} if len(x) == 1 else {}
        (drawn,) = axes.plot(x, y, label=line.name, **style)
        if reach and len(x) == 1:
            axes.vlines(x, reach[0], reach[1], color=drawn.get_color(), alpha=0.5, linewidth=2)
        elif reach:
            axes.fill_between(x, reach[0], reach[1], color=drawn.get_color(), alpha=0.18, linewidth=0)
    if panel.level is not None:
        (axes.axvline if panel.dots else axes.axhline)(panel.level, label=panel.level_name, **DASHED)


def draw_dots(axes: "Axes", panel: Panel) -> None:
    """Every seed a ring, the mean a dot with its words at the right, a bar from the least to the most."""
    for place, (_, values, note) in enumerate(panel.dots):
        axes.axhline(place, color="#e8e8e8", linewidth=0.8, zorder=0)
        if values:
            axes.plot([min(values), max(values)], [place, place], color=COLOURS[0], linewidth=2, alpha=0.5)
            if len(values) > 1:
                axes.plot(values, [place] * len(values), "o", color=COLOURS[0], markerfacecolor="none", label="a seed")
            axes.plot([sum(values) / len(values)], [place], "o", color=COLOURS[0], markersize=8, label="mean")
        axes.annotate(note, (1.02, place), va="center", xycoords=("axes fraction", "data"), fontsize=9.5,
                      color="#333333" if values else "#888888")
    if panel.dots:
        axes.set_yticks(range(len(panel.dots)), [name for name, *_ in panel.dots])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(panel.dots) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.08)


def draw_heat(axes: "Axes", panel: Panel) -> None:
    """A field for each share, the number in it."""
    if not panel.heat:
        return
    names, shares = zip(*panel.heat, strict=True)
    axes.imshow(np.array(shares, dtype=float), vmin=0, vmax=1, cmap="YlGnBu", aspect="auto")
    for row, values in enumerate(shares):
        for column, share in enumerate(values):
            if share is not None:
                axes.text(column, row, f"{share:.2f}".replace("0.", "."), ha="center", va="center", fontsize=8.5,
                          color="white" if share > 0.6 else "#333333")
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks([-0.5, len(shares[0]) - 0.5], ["begin", "end"])
    axes.grid(visible=False)


def scale_axes(axes: "Axes", panel: Panel, panels: Sequence[Panel]) -> None:
    """Scales of a panel and what is written along its axes. Logarithmic heights are those of all panels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    if panel.contexts or panel.x_scale == "positions":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g}K"))
    if panel.contexts:
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


def middle(first: int, last: int) -> float:
    """Of the positions from a first to a last, where position is on a logarithmic scale."""
    return ((first - 0.5) * (last + 0.5)) ** 0.5


@dataclass(frozen=True)
class Curves:
    """What the pictures show of a run: losses in nats per token, or per masked token (`unit`), of training and with
    their steps held out; held-out bits per byte over nats, which is the tokenizer's; the result, when it is over."""

    title: str
    unit: str
    tokens_per_step: int
    step: np.ndarray
    loss: np.ndarray
    held_out: list[tuple[int, float]]
    final: dict[str, Any]
    bits_per_nat: float | None


def read_curves(run_dir: Path) -> Curves:
    """A run's metrics, and its result if there is one.

    Raises UsageError where nothing has been trained, CheckpointError where what the run wrote is damaged."""
    run = read_run(run_dir)
    lines = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    training = [line for line in lines if "held_out" not in line]
    if not training:
        raise UsageError("nothing to plot yet", run_dir, "let the training make a step")
    try:
        scores = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
        final: dict[str, Any] = {}
        if (run_dir / RESULT_FILE).exists():
            final = read_result(run_dir)
            if not scores or scores[-1][0] < final["steps"]:  # else it would be a second point, of other tokens
                scores.append((final["steps"], final["held_out"]))
        config = ModelConfig(**run["model"])
        whole = final["held_out"] if final else scores[-1][1] if scores else None
        return Curves(
            f"{run['preset']}, {millions(describe(config).n_parameters)} parameters, context {config.context:,}",
            UNITS.get(run["task"]) or ("nats per token" if config.causal else "nats per masked token"),
            run["train"]["tokens_per_step"],
            np.array([line["step"] for line in training]), np.array([line["loss"] for line in training]),
            [(step, score["loss"]) for step, score in scores], final,
            whole["bits_per_byte"] / whole["loss"] if whole and config.causal and "bits_per_byte" in whole else
            None)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise CheckpointError("damaged run", run_dir, f"{type(e).__name__}: {e}") from None


def plot_run(run_dir: Path) -> Path:
    """Draw a run's loss into its folder and return the picture's path: training loss thin and smoothed, held-out loss
    as points.

    Raises UsageError where nothing has been trained, CheckpointError for a damaged run."""
    curves = read_curves(run_dir)
    xz, at_end = curves.final.get("xz_bits_per_byte"), curves.final.get("held_out", {}).get("bits_per_byte")
    style = {"color": COLOURS[0], "marker": ""}
    panel = Panel(curves.title, f"step of {curves.tokens_per_step:,} tokens", f"loss, {curves.unit}", (
        Line("", after_start(curves.step, curves.loss), {**style, "alpha": 0.25, "linewidth": 0.7}),
        Line("training", after_start(curves.step, smoothed(curves.loss)), {**style, "linewidth": 1.8}),
        Line("held-out" + (f", {at_end:.3f} bits per byte at the end" if at_end is not None else ""),
             tuple(curves.held_out), {"color": COLOURS[1]})),
        level=xz / curves.bits_per_nat if curves.bits_per_nat and xz is not None else None,
        level_name="" if xz is None else f"xz -9e, {xz:.3f} bits per byte")
    draw(Picture("", (panel,)), run_dir / PLOT_FILE)
    return run_dir / PLOT_FILE


def plot_comparison(run_dirs: Mapping[str, Path], out_png: Path) -> Path:
    """Draw several runs beside each other: loss over tokens, and held-out loss by position in the context.

    run_dirs: label to run. Losses compare where the tokenizer is the same. Raises UsageError where nothing has been
    trained."""
    runs = {label: read_curves(run_dir) for label, run_dir in run_dirs.items()}
    losses, places = [], []
    for colour, (label, curves) in zip(itertools.cycle(COLOURS), runs.items(), strict=False):
        scored, millions_per_step = bool(curves.held_out), curves.tokens_per_step / 1e6
        losses += [Line("" if scored else label, after_start(curves.step * millions_per_step, smoothed(curves.loss)),
                        {"color": colour, "marker": "", "linewidth": 1.2, "alpha": 0.45 if scored else 1}),
                   Line(label, tuple((step * millions_per_step, loss) for step, loss in curves.held_out),
                        {"color": colour})]
        blocks = curves.final.get("held_out", {}).get("loss_by_position", [])
        places += [Line(label, by_position(blocks, "loss"), {"color": colour})] if blocks else []
    unit = ", ".join(sorted({curves.unit for curves in runs.values()}))
    panels = [Panel("held-out loss (points) and training loss", "million tokens of training", unit, tuple(losses))]
    if places:
        panels.append(Panel("held-out loss by position", "position, tokens", unit, tuple(places), x_scale="positions"))
    draw(Picture("", tuple(panels)), out_png)
    return out_png


def plot_context_use(files: Mapping[str, Path], out_png: Path) -> Path:
    """Draw what models gain from context: the same tokens at several contexts, with standard errors over documents; and
    loss by position in the document, at the shortest context and at the longest.

    files: label to what `lineartime evaluate --contexts` wrote. Raises DataError for anything else."""
    uses = {label: read_context_use(path) for label, path in files.items()}
    gains, losses = [], []
    for colour, (label, use) in zip(itertools.cycle(COLOURS), uses.items(), strict=False):
        errors = [error or 0.0 for error in use["gain_errors"]]
        gains.append(Line(f"{label}, trained at {use['trained_context']:,}; {use['n_tokens']:,} tokens of "
                          f"{len(use['documents'])} documents",
                          tuple((context, gain, gain - error, gain + error) for context, gain, error in zip(
                              use["contexts"], use["gains"], errors, strict=True)), {"color": colour}))
        losses += [Line("", by_position(use["loss_by_position"], which), {"color": colour, "linestyle": dashes})
                   for which, dashes in (("shortest", ":"), ("longest", "-"))]
    contexts = sorted({context for use in uses.values() for context in use["contexts"]})
    draw(Picture("Gain from context, the same tokens; loss by position at the longest context (dotted: the shortest)", (
        Panel("gain from context", "context, tokens", "nats per token below the shortest", tuple(gains), level=0,
              contexts=tuple((context, f"{context:,}") for context in contexts)),
        Panel("loss by position", "tokens of the document so far", "nats per token", tuple(losses),
              x_scale="positions"))), out_png)
    return out_png


def read_context_use(path: Path) -> dict[str, Any]:
    """What `lineartime evaluate --contexts` wrote. Raises DataError."""
    try:
        use = json.loads(read_bytes(path))
        numbers = [*use["contexts"], *use["gains"], *(error or 0.0 for error in use["gain_errors"]), use["n_tokens"],
                   use["trained_context"], len(use["documents"])]
        places = ("first", "last", "shortest", "longest")
        numbers += [block[name] for block in use["loss_by_position"] for name in places]
        if not (all(type(number) in (int, float) and 0 <= abs(number) < 1e15 for number in numbers)
                and len(use["contexts"]) == len(use["gains"]) == len(use["gain_errors"]) > 0
                and min(use["contexts"]) >= 1):
            raise ValueError
        return use
    except OSError as e:
        raise DataError("cannot read", path, e.strerror) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError("not a file of `lineartime evaluate --contexts`", path) from None


def by_position(blocks: Sequence[Mapping[str, Any]], which: str) -> tuple[tuple[float, float], ...]:
    """Points of a line: one of the losses of each block of positions, at its middle."""
    return tuple((middle(block["first"], block["last"]), block[which]) for block in blocks)


def after_start(x: np.ndarray, y: np.ndarray) -> tuple[tuple[float, float], ...]:
    """Points of a line but the first thirtieth, where the loss falls so fast that the rest would be pressed flat."""
    return tuple(zip(x.tolist(), y.tolist(), strict=True))[len(x) // 30:]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window around each entry, a fiftieth of the run wide; narrower at the start, where the loss falls."""
    index = np.arange(len(values))
    reach = np.minimum(index, len(values) // 100)
    first, stop = index - reach, np.minimum(index + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[first]) / (stop - first)
