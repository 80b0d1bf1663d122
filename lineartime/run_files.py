"""The files of a run's folder, by name and as they are read. Nothing here imports torch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lineartime.base.atomic_io import read_json, read_json_lines
from lineartime.base.errors import CheckpointError, UsageError
from lineartime.base.settings import require
from lineartime.config import ModelConfig, TrainConfig, stored_config, to_dict

RUN_FILE, METRICS_FILE, RESULT_FILE = "run.json", "metrics.jsonl", "result.json"
"""What a run is, the numbers of its steps, and its scores at the end."""
CONFIG_FILE = "config.json"
WEIGHTS, WEIGHTS_FILE = "model", "model.safetensors"
OPTIMIZER = "optimizer"
"""Name of the moments: those of one process are in `optimizer.safetensors`, those of several in a file each."""


def require_run(out: Path) -> None:
    """Raise UsageError unless this is the folder of a run."""
    require((out / RUN_FILE).exists(), "not a run", str(out), "give the --out folder of `lineartime train`")


def read_run(out: Path) -> dict[str, Any]:
    """A run's description, in which a field that is newer than the run has its default. Raises UsageError if it is
    missing, CheckpointError if it is damaged."""
    require_run(out)
    run = read_json(out / RUN_FILE)
    with damaged(out / RUN_FILE):
        if not all(isinstance(run[name], str) for name in ("id", "preset", "task", "data")):
            raise ValueError("its id, preset, task or data is no text")
        models = ("model", "from_model") if "from" in run else ("model",)
        return run | {name: to_dict(stored_config(ModelConfig(), run[name])) for name in models} | {
            "train": to_dict(stored_config(TrainConfig(), run["train"]))}


def saved_run(out: Path) -> dict[str, Any]:
    """The description of the run that a folder holds; empty if there is none, or if it has saved nothing yet or is
    damaged, which `Run` reports."""
    if (out / RESULT_FILE).exists() or any(out.glob("step-*")):
        with suppress(CheckpointError, UsageError):
            return read_run(out)
    return {}


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without a last line that was cut off; none if it has not written any. Raises DataError for
    any other line that is damaged."""
    def parse(record: Any) -> dict[str, Any]:
        loss = record["held_out"]["loss"] if "held_out" in record else record["loss"]
        require_numbers(record["step"], record["clock"]["time"], loss)
        return record

    path = out / METRICS_FILE
    return read_json_lines(path, parse, "a line of metrics") if path.exists() else []


def read_result(out: Path) -> dict[str, Any]:
    """A completed run's result. Raises CheckpointError if missing, damaged or of another run; and as `read_run`."""
    run, result = read_run(out), read_json(out / RESULT_FILE)
    with damaged(out / RESULT_FILE):
        require_numbers(result.get("held_out", result)["loss"])
        if result.get("run", run["id"]) != run["id"] or result["steps"] != run["train"]["steps"]:
            raise ValueError(f"it is the result of another run than that of {RUN_FILE}")  # older ones have no id
    return result


def read_fine_tuning(out: Path) -> dict[str, Any]:
    """The result of a completed folder of `lineartime finetune`. Raises CheckpointError if it is missing or damaged."""
    result = read_json(out / RESULT_FILE)
    with damaged(out / RESULT_FILE):
        if result["best"] not in [f"lr-{each}" for each in result["learning_rates"]]:
            raise ValueError("it names no best run")
    return result


def best_run(out: Path) -> Path:
    """The best run in a completed folder of `lineartime finetune`. Any other folder is returned as it is. Raises
    CheckpointError for a damaged folder."""
    if (out / RUN_FILE).exists() or not (out / RESULT_FILE).exists():
        return out
    best = out / read_fine_tuning(out)["best"]
    if not (best / RUN_FILE).exists():
        raise CheckpointError("damaged", out / RESULT_FILE, "the best run is not there")
    return best


def require_numbers(*values: Any) -> None:
    """Raise ValueError or ArithmeticError unless all values of a JSON file are finite numbers."""
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{value!a:.40} is no number")


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Raise a CheckpointError for the file where the block finds a wrong value."""
    try:
        yield
    except KeyError as e:
        raise CheckpointError("damaged", path, f"{e} is missing") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, UsageError) as e:
        raise CheckpointError("damaged", path, str(e)) from None
