"""`--log`: the lines of `metrics.jsonl` for TensorBoard, Weights & Biases or Trackio too, by their own libraries.

Nothing is sent: each writes files below the run's folder. What they cannot write is said once and stays in
`metrics.jsonl`."""

import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lineartime.atomic_io import read_json
from lineartime.config import to_dict
from lineartime.run_config import RunConfig
from lineartime.settings import require, require_name

TRACKERS = ("tensorboard", "wandb", "trackio")
Library = tuple[Callable[[dict[str, float], dict[str, Any]], None], Callable[[], None]]
"""What writes a line, given its numbers by name and the line, and what closes the library."""

logger = logging.getLogger(__name__)


def require_tracker(name: str) -> None:
    """Raise UsageError for an unknown name, and for a library that is not installed."""
    require_name("tracker", name, TRACKERS)
    require(importlib.util.find_spec(name) is not None, "the library is not installed", name,
            f"pip install {name}, or leave out --log: metrics.jsonl has all of it")


class Tracker:
    """An `on_step` of training that writes each line by one of `TRACKERS`. It is opened at the first line, so that
    a run that is complete leaves no trace. When it fails, that is said once and nothing more is written."""

    def __init__(self, name: str, config: RunConfig):
        self.name, self.config = name, config
        self.library: Library | None = None
        self.failed = False

    def __call__(self, record: dict[str, Any]) -> None:
        if not self.failed:
            self.attempt(self.write, record)

    def write(self, record: dict[str, Any]) -> None:
        self.library = self.library or open_library(self.name, self.config, record)
        self.library[0](numbers_of(record), record)

    def close(self) -> None:
        if self.library is not None:
            self.attempt(self.library[1])

    def attempt(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call a library that is not ours, whose errors do not stop the training."""
        try:
            act(*arguments)
        except Exception as e:
            if not self.failed:
                logger.warning(f"{self.name} does not go on: {type(e).__name__}: {e}; the metrics are in metrics.jsonl")
            self.failed = True


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, those inside a table by a path such as "held_out/loss"."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in numbers_of(value).items()}
        elif name not in ("step", "steps", "time"):
            found[name] = value
    return found


def open_library(name: str, config: RunConfig, first: dict[str, Any]) -> Library:
    """Open a library for the lines of a run, of which `first` is the first."""
    how: dict[str, Any] = {"project": "lineartime", "name": os.path.basename(config.out),
                           "config": {**to_dict(config.model), **to_dict(config.train)}}
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # A resume writes lines again, of the first step its score alone: what older files have of them is hidden.
        writer = SummaryWriter(f"{config.out}/tensorboard", purge_step=first["step"] + ("held_out" in first))

        def write(numbers: dict[str, float], record: dict[str, Any]) -> None:
            for each, value in numbers.items():
                writer.add_scalar(each, value, record["step"], walltime=record["clock"]["time"])

        return write, writer.close
    if name == "wandb":
        import wandb

        from lineartime.data.run_settings import RUN_FILE

        # A resume is a further file of the same run.
        run = wandb.init(**how, dir=config.out, mode="offline", id=read_json(Path(config.out) / RUN_FILE)["id"])
        return lambda numbers, record: run.log(numbers, step=record["step"]), run.finish
    os.environ.setdefault("TRACKIO_DIR", os.path.abspath(f"{config.out}/trackio"))  # it is read at the import
    import trackio

    trackio.init(**how, embed=False, resume="allow")
    return lambda numbers, record: trackio.log(numbers, step=record["step"]), trackio.finish
