"""`--log`: the lines of `metrics.jsonl` for TensorBoard, Weights & Biases or Trackio too, by their own libraries.

Nothing is sent: each writes files below the run's folder. What they cannot write is said once and stays in
`metrics.jsonl`."""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lineartime.atomic_io import read_json
from lineartime.config import to_dict
from lineartime.run_config import RunConfig
from lineartime.settings import require, require_name

TRACKERS = ("tensorboard", "wandb", "trackio")
Write = Callable[[dict[str, float], dict[str, Any]], None]
"""Takes the numbers of a line by name, and the line."""

logger = logging.getLogger(__name__)


def require_tracker(name: str) -> None:
    """Raise UsageError for an unknown name, and for a library that is not installed."""
    require_name("tracker", name, TRACKERS)
    require(importlib.util.find_spec(name) is not None, "the library is not installed", name,
            f"pip install {name}, or leave out --log: metrics.jsonl has all of it")


@contextmanager
def tracked(name: str, config: RunConfig) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A callback for `train`'s `on_step` that also writes each line by a library of `TRACKERS`. It is opened at the
    first line, so that a run that is complete leaves no trace."""
    opened: list[tuple[Write, Callable[[], None]]] = []
    failed = False

    @contextmanager
    def at_most_a_warning() -> Iterator[None]:
        nonlocal failed
        try:
            yield
        except Exception as e:  # of a library that is not ours
            if not failed:
                logger.warning(f"{name} does not go on: {type(e).__name__}: {e}; the metrics are in metrics.jsonl")
            failed = True

    def on_step(record: dict[str, Any]) -> None:
        if failed:
            return
        with at_most_a_warning():
            if not opened:
                opened.append(OPEN[name](config, record))
            opened[0][0](numbers_of(record), record)

    try:
        yield on_step
    finally:
        for _, close in opened:
            with at_most_a_warning():
                close()


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, those inside a table by a path such as "held_out/loss"."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in numbers_of(value).items()}
        elif name not in ("step", "steps", "time"):
            found[name] = value
    return found


def open_tensorboard(config: RunConfig, first: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    # A resume writes lines again, of the first step its score alone: what older files have of them is hidden.
    writer = SummaryWriter(f"{config.out}/tensorboard", purge_step=first["step"] + ("held_out" in first))

    def write(numbers: dict[str, float], record: dict[str, Any]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, record["step"], walltime=record["clock"]["time"])

    return write, writer.close


def open_wandb(config: RunConfig, first: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    import wandb

    from lineartime.data.run_settings import RUN_FILE

    # A resume is a further file of the same run.
    run = wandb.init(project="lineartime", name=os.path.basename(config.out), dir=config.out, mode="offline",
                     id=read_json(Path(config.out) / RUN_FILE)["id"],
                     config={**to_dict(config.model), **to_dict(config.train)})
    return lambda numbers, record: run.log(numbers, step=record["step"]), run.finish


def open_trackio(config: RunConfig, first: dict[str, Any]) -> tuple[Write, Callable[[], None]]:
    os.environ.setdefault("TRACKIO_DIR", os.path.abspath(f"{config.out}/trackio"))  # it is read at the import
    import trackio

    trackio.init(project="lineartime", name=os.path.basename(config.out), embed=False,
                 resume="allow", config={**to_dict(config.model), **to_dict(config.train)})
    return lambda numbers, record: trackio.log(numbers, step=record["step"]), trackio.finish


OPEN: dict[str, Callable[[RunConfig, dict[str, Any]], tuple[Write, Callable[[], None]]]] = {
    "tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}
