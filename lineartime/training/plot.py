"""Curves as PNG, of one run or of several in one picture."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineartime.base.files import check_new, damaged, replaced
from lineartime.base.settings import require
from lineartime.base.stores import read_all
from lineartime.base.words import millions, part_of
from lineartime.config import ModelConfig
from lineartime.folders import METRICS_FILE, RESULT_FILE, read_metrics, read_result, read_run
from lineartime.model.language_model import number_of_parameters

PLOT_FILE = "loss.png"
MADE_BY = b"Software\0lineartime"  # what a picture of ours says near its beginning
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#882255")
"""People with any colour vision can tell them apart (Okabe and Ito, and a red of Tol's)."""
STYLE: dict[Any, Any] = {
    "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e8e8e8", "legend.frameon": False, "lines.markersize": 4, "text.usetex": False}
"""Settings of matplotlib for all pictures."""


class Curves(NamedTuple):
    """What a picture shows of a run."""

    title: str
    unit: str  # the unit of the losses, such as nats per token
    tokens: np.ndarray  # millions of tokens until each step in the metrics, at which `loss` is the training loss
    loss: np.ndarray
    learning_rate: np.ndarray
    held_out: list[tuple[float, float]]  # millions of tokens, and the held-out loss
    part: str  # how much of the held-out text a score has, if not all of it, such as "5 of 9 tokens"


def read_curves(run_dir: Path) -> Curves:
    """A run's metrics, and its result if there is one. Raises UsageError where nothing has been
    trained, CheckpointError where what the run wrote is damaged."""
    run, lines = read_run(run_dir), read_metrics(run_dir)
    training = [line for line in lines if "held_out" not in line]
    require(bool(training), "nothing to plot yet", str(run_dir), "let the training make a step")
    scores = [(line["step"], line["held_out"]["loss"]) for line in lines if "held_out" in line]
    if (run_dir / RESULT_FILE).exists():
        result = read_result(run_dir)
        if not scores or scores[-1][0] < result["steps"]:  # else it is there already
            scores.append((result["steps"], result.get("held_out", result)["loss"]))  # fine-tuning has no "held_out"
    config, millions_per_step = ModelConfig(**run["model"]), run["train"]["tokens_per_step"] / 1e6
    of_text = "nats per token" if config.causal else "nats per masked token"
    with damaged(run_dir / METRICS_FILE):
        return Curves(
            f"{run['preset']}, {millions(number_of_parameters(config))} parameters, context {config.context:,}",
            "nats per window" if run["task"] == "questions" else of_text,
            np.array([line["step"] for line in training]) * millions_per_step,
            np.array([line["loss"] for line in training]), np.array([line["learning_rate"] for line in training]),
            [(step * millions_per_step, loss) for step, loss in scores],
            next((part_of(line["held_out"]) for line in reversed(lines) if "held_out" in line), ""))


def plot_run(run_dir: Path) -> Path:
    """Draw a run into its folder; returns the picture's path. Raises as `read_curves`; and
    UsageError for a link to a file that a stranger's run may have in the picture's place."""
    curves, picture = read_curves(run_dir), run_dir / PLOT_FILE
    require(not picture.is_symlink(), "a link is in the picture's place", str(picture), "remove it")
    return draw_curves({curves.title: curves}, picture)


def plot_side_by_side(run_dirs: Mapping[str, Path], out_png: Path) -> Path:
    """Draw the losses and the learning rates of runs, by label, over tokens; returns the picture's
    path. Losses compare if the tokenizer is the same. Raises as `read_curves`; ResourceError; and
    UsageError for a file that is there and is no picture of ours."""
    if not (out_png.is_file() and MADE_BY in read_all(out_png, 200)):
        check_new(out_png)
    return draw_curves({label: read_curves(run_dir) for label, run_dir in run_dirs.items()}, out_png)


def draw_curves(runs: Mapping[str, Curves], out_png: Path) -> Path:
    """`plot_side_by_side` of curves that were read."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        legend_height = 0.25 * -(-len(runs) // 2)
        figure = Figure(figsize=(8, 4.5 + legend_height), dpi=150, layout="constrained")
        losses, rates = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        losses.set(title="held-out loss (points) and training loss",
                   ylabel=", ".join(sorted({curves.unit for curves in runs.values()})))
        rates.set(xlabel="million tokens of training", ylabel="learning rate")
        for colour, (label, curves) in zip(itertools.cycle(COLOURS), runs.items(), strict=False):
            # A label that begins with "_" would be left out, and "$" would begin a formula.
            label = (" " * label.startswith("_") + label).replace("$", r"\$")
            label += f" (held-out: {curves.part})" if curves.part else ""
            marker = "o" if len(curves.tokens) == 1 else ""  # nobody would see a line of one point
            start = len(curves.loss) // 30  # the loss falls so fast there that the rest would be pressed flat
            points = curves.held_out
            losses.plot(curves.tokens[start:], smoothed(curves.loss)[start:], color=colour, marker=marker,
                        linewidth=1.2, label=None if points else label, alpha=0.45 if points else 1)
            if points:
                losses.plot(*zip(*points, strict=True), color=colour, marker="o", label=label)
            rates.plot(curves.tokens, curves.learning_rate, color=colour, marker=marker)
        figure.legend(loc="outside lower center", ncols=2)
        with replaced(out_png) as file:
            figure.savefig(file, format="png", facecolor="white", metadata={"Software": "lineartime"})
    return out_png


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window around each entry, a fiftieth of the run wide; narrower at the start."""
    index = np.arange(len(values))
    reach = np.minimum(index, len(values) // 100)
    first, stop = index - reach, np.minimum(index + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[first]) / (stop - first)
