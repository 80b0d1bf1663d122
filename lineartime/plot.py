"""Pictures as PNG: panels of lines or dots, and with them the curves of one run and of several beside each other."""

import hashlib
import itertools
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lineartime.atomic_io import replaced
from lineartime.config import ModelConfig
from lineartime.errors import CheckpointError, DataError, ResourceError, UsageError
from lineartime.info import describe, millions
from lineartime.run import METRICS_FILE, RESULT_FILE, read_metrics, read_result, read_run
from lineartime.settings import replace_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PLOT_FILE = "loss.png"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
"""Told apart by people with any colour vision (Okabe and Ito)."""
DASHED: dict[str, Any] = {"color": "#555555", "linewidth": 1.1, "linestyle": (0, (5, 4)), "zorder": 1.5}
TRAINING = {"color": COLOURS[0], "marker": ""}


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
    """Lines; or dots, which are names below each other, each with the numbers of its seeds, perhaps none."""

    title: str
    x_label: str
    y_label: str = ""
    lines: tuple[Line, ...] = ()
    dots: tuple[tuple[str, tuple[float, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    """Right of the dots."""
    x_scale: Literal["linear", "log", "positions"] = "linear"
    """"positions" are powers of two."""
    contexts: tuple[tuple[int, str], ...] = ()
    """What is written along the bottom, which then has powers of two."""
    log_heights: bool = False
    x_limits: tuple[float, float | None] | None = None
    y_limits: tuple[float, float] | None = None
    level: float | None = None
    """Height of a dashed line; among dots, its place."""
    level_name: str = ""
    crossings: tuple[float, ...] = ()
    """Where lines reach that height."""


@dataclass(frozen=True)
class Picture:
    """Panels under a caption, which says all that the alternative text of the picture has to say."""

    caption: str
    panels: tuple[Panel, ...]


def digest(picture: Picture) -> str:
    """A hash of all that a picture is drawn from; the file carries it, so that one of older rows is found out."""
    return hashlib.sha256(json.dumps(asdict(picture)).encode()).hexdigest()


def draw_into(folder: Path, pictures: Mapping[str, Picture]) -> list[Path]:
    """Draw pictures into a folder, which is made if need be; returns their paths. Raises ResourceError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError("cannot make the folder", folder, e.strerror) from None
    for name, picture in pictures.items():
        draw_picture(picture, folder / name)
    return [folder / name for name in pictures]


def draw_picture(picture: Picture, path: Path) -> None:
    """Write a picture as PNG. Raises ResourceError."""
    n_columns, n_rows = grid(picture.panels)
    height = max(1.1 + 0.36 * len(panel.dots) if panel.dots else 3.2 for panel in picture.panels)
    with drawing(path, width=max(0.3 + 4.2 * n_columns, 8), height=0.3 + height * n_rows,
                 metadata={"Rows": digest(picture)}) as figure:
        draw_panels(figure, picture.panels)
        words = textwrap.fill(picture.caption, round(13.5 * figure.get_figwidth()))
        figure.suptitle(words, fontsize=9.5, x=0.008, ha="left", color="#555555")


@contextmanager
def drawing(path: Path, *, width: float, height: float, metadata: dict[str, str] | None = None) -> Iterator["Figure"]:
    """An empty figure, in inches, that is written to `path` when all is drawn: whole or not at all.

    metadata: texts for the file's header.
    Raises ResourceError."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({
            "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.spines.top": False,
            "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True, "axes.axisbelow": True,
            "grid.color": "#e8e8e8", "legend.frameon": False}):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        with replaced(path) as file:
            figure.savefig(file, format="png", facecolor="white", metadata=metadata)


def grid(panels: Sequence[Panel]) -> tuple[int, int]:
    """Columns and rows."""
    n_columns = 2 if len(panels) == 4 else min(3, len(panels))
    return n_columns, math.ceil(len(panels) / n_columns)


def draw_panels(figure: "Figure", panels: Sequence[Panel]) -> list["Axes"]:
    """Panels beside each other, and one legend for all of them below, which makes the figure higher."""
    n_columns, n_rows = grid(panels)
    places = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for axes in places[len(panels):]:
        axes.remove()
    handles: dict[str, Any] = {}
    for i, (axes, panel) in enumerate(zip(places, panels, strict=False)):
        left = panels[i - 1] if i % n_columns else None
        draw_dots(axes, panel)
        draw_lines(axes, panel)
        scale_axes(axes, panel, panels)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label if left is None or left.y_label != panel.y_label else "")
        if left and left.dots:
            axes.tick_params(labelleft=[name for name, _ in left.dots] != [name for name, _ in panel.dots])
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        inches = max(1.9, 0.6 + 0.095 * max(map(len, handles)))
        n_legend_rows = math.ceil(len(handles) / max(1, figure.get_figwidth() // inches))
        figure.set_figheight(figure.get_figheight() + 0.25 * n_legend_rows)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center",
                      ncols=math.ceil(len(handles) / n_legend_rows))
    return places[:len(panels)]


def draw_lines(axes: "Axes", panel: Panel) -> None:
    """Lines, each with a band from the least to the most; a single point has a bar."""
    others = itertools.cycle(COLOURS)
    for line in (line for line in panel.lines if line.points):
        x, y, *reach = (list(column) for column in zip(*line.points, strict=True))
        style = {"linewidth": 1.5, "marker": "o", "markersize": 4, "zorder": 2, **line.style}
        style["color"] = style.get("color") or next(others)
        style |= {"marker": "o", "markersize": 6} if len(x) == 1 else {}
        axes.plot(x, y, label=line.name, **style)
        if reach and len(x) == 1:
            axes.vlines(x, reach[0], reach[1], color=style["color"], alpha=0.5, linewidth=2)
        elif reach:
            axes.fill_between(x, reach[0], reach[1], color=style["color"], alpha=0.18, linewidth=0)
    if panel.level is not None:
        (axes.axvline if panel.dots else axes.axhline)(panel.level, label=panel.level_name, **DASHED)
        if panel.crossings:
            axes.plot(panel.crossings, [panel.level] * len(panel.crossings), "o", markersize=7, markerfacecolor="white",
                      markeredgecolor="#444444", markeredgewidth=1.2, zorder=4, label="reaches it")


def draw_dots(axes: "Axes", panel: Panel) -> None:
    """Every seed a ring, the mean a dot with its number at the right, a bar from the least to the most."""
    for place, (_, values) in enumerate(panel.dots):
        axes.axhline(place, color="#e8e8e8", linewidth=0.8, zorder=0)
        if values:
            axes.plot([min(values), max(values)], [place, place], color=COLOURS[0], linewidth=2, alpha=0.5)
            if len(values) > 1:
                axes.plot(values, [place] * len(values), "o", color=COLOURS[0], markerfacecolor="none", label="a seed")
            axes.plot([sum(values) / len(values)], [place], "o", color=COLOURS[0], markersize=8, label="mean")
        axes.annotate(panel.notes[place], (1.02, place), va="center", xycoords=("axes fraction", "data"),
                      color="#333333" if values else "#888888", fontsize=9.5)
    if panel.dots:
        axes.set_yticks(range(len(panel.dots)), [name for name, _ in panel.dots])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(panel.dots) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.08)


def scale_axes(axes: "Axes", panel: Panel, panels: Sequence[Panel]) -> None:
    """Scales, limits and what is written along a panel's axes. Logarithmic heights are those of all panels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    logarithmic: list[Axis] = [axes.yaxis] if panel.log_heights else []
    if panel.contexts or panel.x_scale == "positions":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g}K"))
    elif panel.x_scale == "log":
        axes.set_xscale("log")
        logarithmic.append(axes.xaxis)
    if panel.contexts:
        axes.set_xticks(*zip(*panel.contexts, strict=True))
    if panel.log_heights:
        axes.set_yscale("log")
        heights = [height for each in panels if each.log_heights
                   for line in each.lines for point in line.points for height in point[1:]]
        low, high = min(heights), max(heights)
        room = max(1.15, 2.3 * (low / high) ** 0.5)  # two round numbers are between limits that are 5 times apart
        axes.set_ylim(low / room, high * room)
    for axis in logarithmic:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1000 else f"{y:g}"))
        axis.set_minor_formatter(NullFormatter())
    if panel.x_limits:
        axes.set_xlim(*panel.x_limits)
    if panel.y_limits:
        axes.set_ylim(*panel.y_limits)


def around(values: Sequence[float], below: float = 1.0) -> tuple[float, float] | None:
    """Limits of an axis with a little room, below several times as much; None where no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low) or 0.1
    return low - below * room, high + room


def middle(first: int, last: int) -> float:
    """Of the positions from a first to a last, where position is on a logarithmic scale."""
    return ((first - 0.5) * (last + 0.5)) ** 0.5


@dataclass(frozen=True)
class Curves:
    """What the pictures show of a run; losses are in nats per token, or per masked token."""

    title: str
    unit: str
    """Of the losses."""
    tokens_per_step: int
    step: np.ndarray
    loss: np.ndarray
    learning_rate: np.ndarray
    held_out_step: list[int]
    held_out_loss: list[float]
    bits_per_nat: float | None
    """Held-out bits per byte over held-out nats per token; one number, for it is the tokenizer's."""
    bits_per_byte: float | None
    """Of all held-out text, when the run is over."""
    xz_bits_per_byte: float | None
    loss_by_position: list[dict[str, Any]]


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
        result: dict[str, Any] = {}
        if (run_dir / RESULT_FILE).exists():
            result = read_result(run_dir)
            if not scores or scores[-1][0] < result["steps"]:  # else it would be a second point, of other tokens
                scores.append((result["steps"], result["held_out"]))
        final = result["held_out"] if result else {}
        config = replace_fields(ModelConfig(), run["model"])
        whole = final or (scores[-1][1] if scores else None)
        return Curves(
            title=f"{run['preset']}, {millions(describe(config).n_parameters)} parameters, context {config.context:,}",
            unit="nats per token" if config.causal else "nats per masked token",
            tokens_per_step=run["train"]["tokens_per_step"],
            step=np.array([line["step"] for line in training]),
            loss=np.array([line["loss"] for line in training]),
            learning_rate=np.array([line["learning_rate"] for line in training]),
            held_out_step=[step for step, _ in scores],
            held_out_loss=[score["loss"] for _, score in scores],
            bits_per_nat=whole["bits_per_byte"] / whole["loss"] if whole and config.causal else None,
            bits_per_byte=final.get("bits_per_byte"),
            xz_bits_per_byte=result.get("xz_bits_per_byte"),
            loss_by_position=final.get("loss_by_position", []),
        )
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise CheckpointError("damaged run", run_dir, f"{type(e).__name__}: {e}") from None


def plot_run(run_dir: Path) -> Path:
    """Draw a run's loss into its folder and return the picture's path.

    Training loss thin and smoothed, held-out loss as points, bits per byte on the right, the learning rate as a shadow.
    Raises UsageError where nothing has been trained, CheckpointError for a damaged run."""
    curves = read_curves(run_dir)
    smooth, bits, xz = smoothed(curves.loss), curves.bits_per_nat, curves.xz_bits_per_byte
    at_end = f", {curves.bits_per_byte:.3f} bits per byte at the end" if curves.bits_per_byte is not None else ""
    level = xz / bits if bits and xz is not None else None
    shown = [*after_start(smooth), curves.loss.min(), *after_start(curves.held_out_loss)]
    panel = Panel(curves.title, f"step of {curves.tokens_per_step:,} tokens", f"loss, {curves.unit}", (
        Line("", pairs(curves.step, curves.loss), {**TRAINING, "alpha": 0.25, "linewidth": 0.7}),
        Line("training", pairs(curves.step, smooth), {**TRAINING, "linewidth": 1.8}),
        Line(f"held-out{at_end}", pairs(curves.held_out_step, curves.held_out_loss), {"color": COLOURS[1]})),
        y_limits=around(shown if level is None else [*shown, level], below=3), level=level,
        level_name=f"xz -9e, {xz:.3f} bits per byte" if level is not None else "")
    with drawing(run_dir / PLOT_FILE, width=9, height=5) as figure:
        (axes,) = draw_panels(figure, [panel])
        draw_learning_rate(axes, curves)
        if bits:
            scale = (lambda loss: loss * bits, lambda heights: heights / bits)
            axes.secondary_yaxis("right", functions=scale).set_ylabel("bits per byte of held-out text")
    return run_dir / PLOT_FILE


def plot_comparison(run_dirs: Mapping[str, Path], out_png: Path) -> Path:
    """Draw several runs beside each other: loss over tokens, and held-out loss by position in the context.

    run_dirs: label to run. Losses compare where the tokenizer is the same. Raises UsageError where nothing has been
    trained."""
    runs = {label: read_curves(run_dir) for label, run_dir in run_dirs.items()}
    losses, places, shown = [], [], []
    for colour, (label, curves) in zip(itertools.cycle(COLOURS), runs.items(), strict=False):
        smooth, scored, look = smoothed(curves.loss), bool(curves.held_out_step), {"color": colour}
        millions_per_step = curves.tokens_per_step / 1e6
        losses += [Line("" if scored else label, pairs(curves.step * millions_per_step, smooth),
                        {**look, "marker": "", "linewidth": 1.2, "alpha": 0.45 if scored else 1}),
                   Line(label, pairs(np.array(curves.held_out_step) * millions_per_step, curves.held_out_loss), look)]
        places.append(Line(label, by_position(curves.loss_by_position, "loss"), look))
        shown += [*after_start(smooth), *after_start(curves.held_out_loss)]
    panels = [Panel("held-out loss (points) and training loss (smoothed)", "million tokens of training",
                    ", ".join(sorted({curves.unit for curves in runs.values()})), tuple(losses),
                    y_limits=around(shown, below=3))]
    if any(line.points for line in places):
        panels.append(Panel("held-out loss by position in the context", "position, tokens", panels[0].y_label,
                            tuple(places), x_scale="positions"))
    with drawing(out_png, width=12 if len(panels) > 1 else 7.5, height=4.7) as figure:
        draw_panels(figure, panels)
    return out_png


def plot_context_use(files: Mapping[str, Path], out_png: Path) -> Path:
    """Draw what models gain from context: the same tokens at several contexts, with standard errors over documents; and
    loss by position in the document, at the shortest context and at the longest.

    files: label to what `lineartime evaluate --contexts` wrote. Raises DataError for anything else."""
    uses = {label: read_context_use(path) for label, path in files.items()}
    gains, losses = [], []
    for colour, (label, use) in zip(itertools.cycle(COLOURS), uses.items(), strict=False):
        contexts, errors = use["contexts"], [error or 0.0 for error in use["gain_errors"]]
        gains.append(Line(f"{label}, {use['n_tokens']:,} tokens of {len(use['documents'])} documents, contexts "
                          f"{contexts[0]:,} to {contexts[-1]:,}",
                          tuple((context, gain, gain - error, gain + error) for context, gain, error in zip(
                              contexts, use["gains"], errors, strict=True)), {"color": colour}))
        losses += [Line("", by_position(use["loss_by_position"], which), {"color": colour, "linestyle": dashes})
                   for which, dashes in (("shortest", ":"), ("longest", "-"))]
    with drawing(out_png, width=12, height=4.7) as figure:
        panels = draw_panels(figure, [
            Panel("gain from context, the same tokens (dashed: trained context)", "context, tokens",
                  "nats per token below the shortest context", tuple(gains), level=0,
                  contexts=tuple((context, f"{context:,}") for context in dict.fromkeys(
                      context for use in uses.values() for context in use["contexts"]))),
            Panel("loss by position at the longest context (dotted: the shortest)", "tokens of the document so far",
                  "nats per token", tuple(losses), x_scale="positions")])
        for axes, (line, use) in itertools.product(panels, zip(gains, uses.values(), strict=True)):
            axes.axvline(use["trained_context"], **DASHED | line.style | {"alpha": 0.6})
    return out_png


def read_context_use(path: Path) -> dict[str, Any]:
    """What `lineartime evaluate --contexts` wrote. Raises DataError."""
    try:
        use = json.loads(path.read_text(encoding="utf-8"))
        for name in ("contexts", "gains", "gain_errors", "documents", "loss_by_position"):
            len(use[name])
        for name in ("n_tokens", "trained_context"):
            int(use[name])
        return use
    except OSError as e:
        raise DataError("cannot read", path, e.strerror) from None
    except (ValueError, KeyError, TypeError):
        raise DataError("not a file of `lineartime evaluate --contexts`", path) from None


def draw_learning_rate(axes: "Axes", curves: Curves) -> None:
    """A grey shadow along the bottom, a sixth of the height at its peak."""
    rate = curves.learning_rate
    shadow = axes.twinx()
    shadow.set_zorder(axes.get_zorder() - 1)
    axes.patch.set_visible(False)
    shadow.fill_between(curves.step, rate, color="#000000", alpha=0.06, linewidth=0)
    shadow.set_ylim(0, 6 * max(rate.max(), 1e-30))
    shadow.set_axis_off()
    peak = int(rate.argmax())
    shadow.annotate(f"learning rate, peak {rate[peak]:g}", (curves.step[peak], rate[peak]), xytext=(4, 3),
                    textcoords="offset points", color="#999999", fontsize=9)


def pairs(x: Any, y: Any) -> tuple[tuple[float, float], ...]:
    """Points of a line."""
    return tuple(zip(x, y, strict=True))


def by_position(blocks: Sequence[Mapping[str, Any]], which: str) -> tuple[tuple[float, float], ...]:
    """Points of a line: one of the losses of each block of positions, at its middle."""
    return tuple((middle(block["first"], block["last"]), block[which]) for block in blocks)


def after_start(values: Any) -> Any:
    """All but the first thirtieth, where the loss falls so fast that the rest would be pressed together."""
    return values[len(values) // 30 :]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window around each entry, a fiftieth of the run wide; narrower at the start, where the loss falls."""
    index = np.arange(len(values))
    reach = np.minimum(index, len(values) // 100)
    first, stop = index - reach, np.minimum(index + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[first]) / (stop - first)
