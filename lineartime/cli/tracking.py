"""`--log tensorboard`: the lines of `metrics.jsonl` for TensorBoard too, in the folder `tensorboard` of the run."""

import importlib.util
from typing import Any

from lineartime.settings import require, require_name


def require_tracker(name: str) -> None:
    """Raise UsageError for another name than "tensorboard", and where that library is not installed."""
    require_name("tracker", name, ["tensorboard"])
    require(importlib.util.find_spec("tensorboard") is not None, "the library is not installed", name,
            "pip install tensorboard, or leave out --log: metrics.jsonl has all of it")


class Tracker:
    """An `on_step` of training that writes each line for TensorBoard. The files are opened at the first line, so that a
    run that is complete leaves no trace."""

    def __init__(self, folder: str):
        self.folder = folder
        self.writer: Any = None

    def __call__(self, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        step = record["step"]
        if self.writer is None:
            # A resume writes lines again, of the first step its score alone: what older files have of them is hidden.
            self.writer = SummaryWriter(self.folder, purge_step=step + ("held_out" in record))
        for name, value in numbers_of(record).items():
            self.writer.add_scalar(name, value, step, walltime=record["clock"]["time"])

    def close(self) -> None:
        """Write what is still in memory."""
        if self.writer is not None:
            self.writer.close()


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, those inside a table by a path such as "held_out/loss"."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in numbers_of(value).items()}
        elif name not in ("step", "steps", "time"):
            found[name] = value
    return found
