"""Curves as PNG, of one run and of several runs side by side."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lineartime.base.errors import CheckpointError, UsageError
from lineartime.base.files import replaced
from lineartime.base.words import millions
from lineartime.config import ModelConfig
from lineartime.folders import RESULT_FILE, read_metrics, read_result, read_run
from lineartime.model.language_model import number_of_parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_FILE = "loss.png"
UNITS = {"questions": "nats per window"}
"""The unit of the loss of a fine-tuned run, by task."""
DPI = 150
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#882255")
"""People with any colour vision can tell them apart (Okabe and Ito, and a red of Tol's)."""
STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e8e8e8", "legend.frameon": False, "text.usetex": False}
"""Settings of matplotlib for all pictures."""


class Curves(NamedTuple):
    """What the pictures show of a run."""

    title: str
    unit: str
    """The unit of the losses, such as nats per token."""
    tokens: np.ndarray
    """Millions of tokens that were trained on at each line of the metrics."""
    loss: np.ndarray
    """The training loss there."""
    held_out: list[tuple[float, float]]
    """Millions of tokens and held-out losses."""
    by_position: list[dict[str, float]]
    """The last held-out loss by position in the row, empty until the run is over."""


def read_curves(run_dir: Path) -> Curves:
    """A run's metrics, and its result if there is one.

    Raises UsageError where nothing has been trained, CheckpointError where what the run wrote is damaged."""
    run = read_run(run_dir)
    lines = read_metrics(run_dir)
    training = [line for line in lines if "held_out" not in line]
    if not training:
        raise UsageError("nothing to plot yet", run_dir, "let the training make a step")
    try:
        scores, by_position = [(line["step"], line["held_out"]["loss"]) for line in lines if "held_out" in line], []
        if (run_dir / RESULT_FILE).exists():
            final = read_result(run_dir)
            held_out = final.get("held_out", final)  # of questions the scores lie beside the steps
            by_position = held_out.get("loss_by_position", [])
            if not scores or scores[-1][0] < final.get("best_step", final["steps"]):  # else it is drawn already
                scores.append((final["steps"], held_out["loss"]))
        config, millions_per_step = ModelConfig(**run["model"]), run["train"]["tokens_per_step"] / 1e6
        return Curves(
            f"{run['preset']}, {millions(number_of_parameters(config))} parameters, context {config.context:,}",
            UNITS.get(run["task"]) or ("nats per token" if config.causal else "nats per masked token"),
            np.array([line["step"] for line in training]) * millions_per_step,
            np.array([line["loss"] for line in training]),
            [(step * millions_per_step, loss) for step, loss in scores], by_position)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError("damaged run", run_dir, f"{type(e).__name__}: {e}") from None


def plot_run(run_dir: Path) -> Path:
    """Draw a run as `plot_side_by_side` does, into its folder, and return the picture's path.

    Raises UsageError where nothing has been trained, CheckpointError for a damaged run, ResourceError."""
    return plot_side_by_side({read_curves(run_dir).title: run_dir}, run_dir / PLOT_FILE)


def plot_side_by_side(run_dirs: Mapping[str, Path], out_png: Path) -> Path:
    """Draw runs in one picture: their losses over tokens, and the last held-out loss by position in the context.

    run_dirs: label to run. Losses compare where the tokenizer is the same. Raises UsageError where nothing has been
    trained, CheckpointError for a damaged run, ResourceError."""
    import matplotlib
    from matplotlib.figure import Figure

    runs = {label: read_curves(run_dir) for label, run_dir in run_dirs.items()}
    with matplotlib.rc_context(STYLE):
        n_panels = 2 if any(curves.by_position for curves in runs.values()) else 1
        figure = Figure(figsize=(8 if n_panels == 1 else 8.7, 3.5), dpi=DPI, layout="constrained")
        losses, *by_position = figure.subplots(1, n_panels, squeeze=False).flat
        losses.set(title="held-out loss (points) and training loss", xlabel="million tokens of training",
                   ylabel=", ".join(sorted({curves.unit for curves in runs.values()})))
        for axes in by_position:
            axes.set(title="held-out loss by position", xlabel="position, tokens")
            use_powers_of_two(axes)
        for colour, (label, curves) in zip(itertools.cycle(COLOURS), runs.items(), strict=False):
            start = len(curves.loss) // 30  # the loss falls so fast there that the rest would be pressed flat
            draw_curve(losses, curves.tokens[start:], smoothed(curves.loss)[start:],
                       "" if curves.held_out else label, color=colour, linewidth=1.2,
                       alpha=0.45 if curves.held_out else 1)
            if curves.held_out:
                tokens, held_out = zip(*curves.held_out, strict=True)
                draw_curve(losses, tokens, held_out, label, color=colour, marker="o")
            if curves.by_position:
                blocks = curves.by_position
                middles = [((block["first"] - 0.5) * (block["last"] + 0.5)) ** 0.5 for block in blocks]
                draw_curve(by_position[0], middles, [block["loss"] for block in blocks], "", color=colour, marker="o")
        save_figure(figure, out_png)
    return out_png


def draw_curve(axes: "Axes", x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, label: str,
               **style: Any) -> None:
    """A line, which is not in the legend if its label is "". A single point is a dot, or nobody would see it."""
    dot = {"marker": "o", "markersize": 6} if len(x) == 1 else {}
    label = (" " * label.startswith("_") + label).replace("$", r"\$")  # "_" would leave it out, "$" begin a formula
    axes.plot(x, y, label=label, **({"linewidth": 1.5, "markersize": 4, "zorder": 2} | style | dot))


def use_powers_of_two(axes: "Axes") -> None:
    """A logarithmic x axis of token counts: 64, 256, 1K, 4K."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g}K"))


def save_figure(figure: "Figure", path: Path) -> None:
    """Put one legend for all panels below them, for which the figure grows, and write the figure as PNG, whole or not
    at all. Raises ResourceError."""
    n_labels = sum(len(axes.get_legend_handles_labels()[1]) for axes in figure.axes)
    if n_labels:
        figure.set_figheight(3.5 + 0.25 * math.ceil(n_labels / 3))
        figure.legend(loc="outside lower center", ncols=3)
    with replaced(path) as file:
        figure.savefig(file, format="png", facecolor="white")


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window around each entry, a fiftieth of the run wide; narrower at the start, where the loss falls."""
    index = np.arange(len(values))
    reach = np.minimum(index, len(values) // 100)
    first, stop = index - reach, np.minimum(index + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[first]) / (stop - first)
