"""Curves of one run, and of several beside each other, as PNG."""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lineartime.config import ModelConfig
from lineartime.errors import CheckpointError, DataError, ResourceError, UsageError
from lineartime.info import describe, millions
from lineartime.run import METRICS_FILE, RESULT_FILE, read_metrics, read_run
from lineartime.settings import replace_fields

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PLOT_FILE = "loss.png"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
"""Told apart by people with any colour vision (Okabe and Ito)."""
DASHED: dict[str, Any] = {"color": "#444444", "linewidth": 1.1, "linestyle": (0, (5, 4)), "zorder": 1.5}


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
    try:
        return _read_curves(run_dir)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise CheckpointError("damaged run", run_dir, f"{type(e).__name__}: {e}") from None


def _read_curves(run_dir: Path) -> Curves:
    run = read_run(run_dir)
    lines = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    training = [line for line in lines if "held_out" not in line]
    if not training:
        raise UsageError("nothing to plot yet", run_dir, "let the training make a step")
    scores = [(line["step"], line["held_out"]) for line in lines if "held_out" in line]
    result: dict[str, Any] = {}
    if (run_dir / RESULT_FILE).exists():
        result = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
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


def plot_run(run_dir: Path) -> Path:
    """Draw a run's loss into its folder and return the picture's path.

    Training loss thin and smoothed, held-out loss as points, bits per byte on the right, the learning rate as a shadow.
    Raises UsageError where nothing has been trained, CheckpointError for a damaged run."""
    curves = read_curves(run_dir)
    with drawing(run_dir / PLOT_FILE, width=9, height=5.2) as figure:
        axes = figure.subplots()
        draw_learning_rate(axes, curves)
        smooth = smoothed(curves.loss)
        axes.plot(curves.step, curves.loss, color=COLOURS[0], alpha=0.25, linewidth=0.7)
        axes.plot(curves.step, smooth, color=COLOURS[0], linewidth=1.8, label="training")
        shown = [*after_start(smooth), curves.loss.min(), *after_start(curves.held_out_loss)]
        if curves.held_out_step:
            label = "held-out"
            if curves.bits_per_byte is not None:
                label += f", {curves.bits_per_byte:.3f} bits per byte at the end"
            axes.plot(curves.held_out_step, curves.held_out_loss, "o-", color=COLOURS[1], linewidth=1, markersize=5,
                      label=label)
        if curves.bits_per_nat:
            factor = curves.bits_per_nat
            scale = (lambda loss: loss * factor, lambda bits: bits / factor)
            axes.secondary_yaxis("right", functions=scale).set_ylabel("bits per byte of held-out text")
            if curves.xz_bits_per_byte is not None:
                axes.axhline(curves.xz_bits_per_byte / factor, color="#555555", linewidth=1, linestyle=(0, (5, 4)),
                             label=f"xz -9e, {curves.xz_bits_per_byte:.3f} bits per byte")
                shown.append(curves.xz_bits_per_byte / factor)
        zoom(axes, shown)
        axes.set_xlabel(f"step of {curves.tokens_per_step:,} tokens")
        axes.set_ylabel(f"loss, {curves.unit}")
        axes.set_title(curves.title)
        axes.legend(loc="upper right")
    return run_dir / PLOT_FILE


def plot_comparison(run_dirs: Mapping[str, Path], out_png: Path) -> Path:
    """Draw several runs beside each other: loss over tokens, and held-out loss by position in the context.

    run_dirs: label to run. Losses compare where the tokenizer is the same. Raises UsageError where nothing has been
    trained."""
    runs = {label: read_curves(run_dir) for label, run_dir in run_dirs.items()}
    colour = dict(zip(runs, itertools.cycle(COLOURS), strict=False))
    scored = [label for label, curves in runs.items() if curves.loss_by_position]
    with drawing(out_png, width=12 if scored else 7.5, height=4.8) as figure:
        panels = figure.subplots(1, 2 if scored else 1, squeeze=False)[0]
        shown: list[float] = []
        for label, curves in runs.items():
            smooth, per_step, points = smoothed(curves.loss), curves.tokens_per_step / 1e6, bool(curves.held_out_step)
            panels[0].plot(curves.step * per_step, smooth, color=colour[label], linewidth=1.2,
                           alpha=0.45 if points else 1, label=None if points else label)
            panels[0].plot([step * per_step for step in curves.held_out_step], curves.held_out_loss, "o-",
                           color=colour[label], linewidth=1.6, markersize=4, label=label if points else None)
            shown += [*after_start(smooth), *after_start(curves.held_out_loss)]
        zoom(panels[0], shown)
        panels[0].set_title("held-out loss (points) and training loss (smoothed)")
        panels[0].set_xlabel("million tokens of training")
        panels[0].set_ylabel(", ".join(sorted({curves.unit for curves in runs.values()})))
        for label in scored:
            blocks = runs[label].loss_by_position
            panels[1].plot([middle(block["first"], block["last"]) for block in blocks],
                           [block["loss"] for block in blocks], "o-", color=colour[label], linewidth=1.6, markersize=4,
                           label=label)
        if scored:
            panels[1].set_title("held-out loss by position in the context")
            label_positions(panels[1])
        for axes in panels:
            axes.legend(loc="upper right")
    return out_png


def plot_context_use(files: Mapping[str, Path], out_png: Path) -> Path:
    """Draw what models gain from context: the same tokens at several contexts, with standard errors over documents; and
    loss by position in the document, at the shortest context and at the longest.

    files: label to what `lineartime evaluate --contexts` wrote. Raises DataError for anything else."""
    from matplotlib.ticker import LogLocator

    uses = {label: read_context_use(path) for label, path in files.items()}
    colour = dict(zip(uses, itertools.cycle(COLOURS), strict=False))
    with drawing(out_png, width=12, height=4.8) as figure:
        left, right = figure.subplots(1, 2)
        for label, use in uses.items():
            errors = [error or 0.0 for error in use["gain_errors"]]
            left.errorbar(use["contexts"], use["gains"], errors, fmt="o-", color=colour[label], linewidth=1.6,
                          markersize=4, capsize=3, label=f"{label}, {use['n_tokens']:,} tokens of "
                          f"{len(use['documents'])} documents")
            blocks = use["loss_by_position"]
            places = [middle(block["first"], block["last"]) for block in blocks]
            for at, style, context in (("shortest", ":", use["contexts"][0]), ("longest", "-", use["contexts"][-1])):
                right.plot(places, [block[at] for block in blocks], "o" + style, color=colour[label], linewidth=1.6,
                           markersize=4, label=f"{label}, context {context:,}")
            for axes in (left, right):
                axes.axvline(use["trained_context"], color=colour[label], linewidth=1, linestyle=(0, (5, 4)), alpha=0.6)
        left.axhline(0, color="#888888", linewidth=1)
        left.set_title("gain from context, the same tokens (dashed: trained context)")
        left.set_ylabel("nats per token below the shortest context")
        right.set_title("loss by position in the document")
        right.set_ylabel("nats per token")
        for axes, name in ((left, "context, tokens"), (right, "tokens of the document so far")):
            label_positions(axes)
            axes.set_xlabel(name)
            axes.legend(loc="best")
        right.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
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


def label_positions(axes: "Axes") -> None:
    """Powers of two along the bottom."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g}K"))
    axes.set_xlabel("position, tokens")


def draw_into(folder: Path, pictures: Mapping[str, Callable[[Path], None]]) -> list[Path]:
    """Draw pictures into a folder, which is made if need be; returns their paths. Raises ResourceError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError("cannot make the folder", folder, e.strerror) from None
    for name, draw in pictures.items():
        draw(folder / name)
    return [folder / name for name in pictures]


def middle(first: int, last: int) -> float:
    """Of the positions from a first to a last, where position is on a logarithmic scale."""
    return ((first - 0.5) * (last + 0.5)) ** 0.5


def scale_logarithmically(axes: "Axes", contexts: Mapping[int, str]) -> None:
    """Both axes, with the names of the contexts that were measured and plain numbers."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(contexts), list(contexts.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    label_plainly(axes.yaxis)


def label_plainly(axis: "Axis") -> None:
    """1, 2, 5, 10 along a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1000 else f"{y:g}"))
    axis.set_minor_formatter(NullFormatter())


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


def after_start(values: Any) -> Any:
    """All but the first thirtieth, where the loss falls so fast that the rest would be pressed together."""
    return values[len(values) // 30 :]


def zoom(axes: "Axes", shown: list[float]) -> None:
    """Limit the loss axis to these values, with room for the learning rate below."""
    finite = [loss for loss in shown if np.isfinite(loss)]
    if finite:
        low, high = min(finite), max(finite)
        room = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - 3 * room, high + room)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window around each entry, a fiftieth of the run wide; narrower at the start, where the loss falls."""
    index = np.arange(len(values))
    reach = np.minimum(index, len(values) // 100)
    first, stop = index - reach, np.minimum(index + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[first]) / (stop - first)


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
            "axes.edgecolor": "#888888", "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e8e8e8",
            "legend.frameon": False}):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        aside = path.with_name(f".tmp-{path.name}")
        try:
            figure.savefig(aside, format="png", facecolor="white", metadata=metadata)
            os.replace(aside, path)
        except OSError as e:
            aside.unlink(missing_ok=True)
            raise ResourceError("cannot write", path, e.strerror) from None
