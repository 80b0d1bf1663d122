"""What a run of `lineartime train` will be: its size where none is named, its plan, and its time."""

import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineartime.cli.terminal import Terminal, say
from lineartime.distributed.ranks import launched
from lineartime.run_config import SHAPE_FIELDS, SIZES, RunConfig, size_settings

if TYPE_CHECKING:
    import torch

    from lineartime.data.tokens import Manifest

COUNTED_FROM = 1e12
"""FLOPs of a run, at least, from which its memory is counted, which takes seconds."""
TIMED = 3
"""Micro-batches of the run that are timed before its time is told."""


def sized_config(given: dict[str, Any], *, is_whole: bool, device: str | None) -> tuple[RunConfig, str]:
    """The run of the settings `given`, and how large it is and why. Where they name no size and no `SHAPE_FIELDS`, it
    is as large as the run that is in the folder, or as fits the machine; those of a file are whole: the paper's size.

    Wrong settings are refused before torch is imported. Raises as `config_for_data` and `pick_device` do, and
    CheckpointError for a damaged run in the folder."""
    from lineartime.data.run_settings import config_for_data

    shapes = [name for name in SHAPE_FIELDS if name in given]
    if "size" in given or shapes or is_whole:
        rest = f", but for {', '.join(shapes)}" if shapes else ""
        return config_for_data(given), f"{given.get('size', 'paper')}{rest}"
    if "from" in given and given.keys() & {"steps", "tokens_per_step"}:
        return config_for_data(given), "that of the weights"
    config_for_data({"size": next(iter(SIZES)), **given})
    stored = stored_sizes(given)
    if stored:
        return config_for_data(stored | given), "that of the run in this folder"
    from lineartime.runtime import pick_device

    size, why = fitting_size(pick_device(device))
    return config_for_data({"size": size, **given}), f"{size}, for {why}; --size names another: {', '.join(SIZES)}"


def stored_sizes(given: dict[str, Any]) -> dict[str, Any]:
    """The fields that a size has, of the run in the folder `out` that has the same preset and task; none without one,
    and for one that has saved nothing yet, which the next overwrites.

    Raises CheckpointError for a damaged description."""
    from lineartime.data.run_settings import saved_run
    from lineartime.run import read_run

    if not saved_run(Path(given["out"])):
        return {}
    run = read_run(Path(given["out"]))
    preset = given.get("model", run["preset"])
    if run.get("from") != given.get("from") or (run["preset"], run["task"]) != (preset, given.get("task", "wiki40b")):
        return {}
    fields = {**run["train"], **({} if "from" in given else run["model"])}
    return {name: fields[name] for size in SIZES for name in size_settings(size, preset, {}) if name in fields}


def fitting_size(device: "torch.device") -> tuple[str, str]:
    """The largest size that trains on this machine within hours, but never the paper's; and why, in words."""
    from lineartime.runtime import available_bytes

    if device.type == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(device).total_memory
        return "base" if memory >= 20 * 2**30 else "small", f"a GPU of {memory / 2**30:.0f} GiB"
    n_cores, available = len(os.sched_getaffinity(0)), available_bytes()
    enough = available is None or available >= 8 * 2**30
    memory_words = "" if available is None else f" and {available / 2**30:.0f} GiB of free memory"
    return "small" if n_cores >= 8 and enough else "tiny", f"a processor with {n_cores} cores{memory_words}"


def say_plan(config: RunConfig, manifests: "list[Manifest]", size: str, device: str | None) -> None:
    """Print what a run will read, make and take, unless it is complete."""
    from lineartime.data.run_settings import RESULT_FILE
    from lineartime.info import describe
    from lineartime.runtime import available_bytes, pick_device

    if (Path(config.out) / RESULT_FILE).exists():
        return
    model, train, on = config.model, config.train, pick_device(device)
    n_tokens, n_train = train.steps * train.tokens_per_step, tokens_of(manifests, "train")
    held_out = tokens_of(manifests, "validation")
    layers = f"{model.n_layers} {'layer' if model.ffn == 'gau' else 'pair'}{'s' * (model.n_layers > 1)}"
    chunks = "" if model.chunk_size is None else f", chunks of {model.chunk_size:,}"
    say(f"size     {size}")
    say(f"model    {config.preset}, {describe(model).n_parameters / 1e6:,.1f} M parameters: {layers} of width "
        f"{model.d_model}{chunks}")
    if config.preset == "flash" and config.source is None and not model.is_ablated_gau:
        say("also     flash is the paper's; flash+ learns to recall what is further back than a chunk")
    say(f"data     {n_train:,} tokens to train on, {held_out:,} held out")
    say(f"run      {train.steps:,} steps of {train.tokens_per_step:,} tokens in rows of {model.context:,}: "
        f"{n_tokens:,} tokens, {words_of(n_tokens / n_train)} epochs")
    if 6 * model.least_parameters * n_tokens < COUNTED_FROM:
        return
    from lineartime.benchmark.plan import plan

    found, ranks = plan(config, launched().size), launched()
    if on.type == "cuda":
        say(f"memory   about {(found.total - found.process - found.holes) / 2**30:.1f} GiB of tensors in each process")
        return
    available = available_bytes()
    free = "" if available is None else f"; {available / 2**30:.1f} GiB are free"
    if available is not None and found.total > available:
        free += ". It will not fit: name a smaller --size, or lower micro_batch_tokens"
    each = f" in each of {ranks.size} processes" if ranks.size > 1 else ""
    say(f"memory   about {found.total / 2**30:.1f} GiB{each}{free}")


def n_micro_batches(config: RunConfig) -> int:
    """Micro-batches of a step that each process has."""
    return max(config.rows_per_step // config.micro_batch_rows * config.train.context_parallel // launched().size, 1)


def tokens_of(manifests: "list[Manifest]", split: str) -> int:
    """The tokens of a split of all texts."""
    return sum(manifest.splits[split].tokens for manifest in manifests if split in manifest.splits)


class Pace:
    """Shows how far a step is, and tells the time of the run once after its first micro-batches; the `on_micro_batch`
    of training."""

    def __init__(self, config: RunConfig, manifests: "list[Manifest]", terminal: Terminal):
        self.config, self.terminal = config, terminal
        self.held_out = tokens_of(manifests, "validation")
        self.began: list[float] = []
        self.first: int | None = None

    def __call__(self, step: int, number: int) -> None:
        train, n = self.config.train, n_micro_batches(self.config)
        self.first = step if self.first is None else self.first
        if len(self.began) <= TIMED:
            self.began.append(time.perf_counter())
            if len(self.began) == TIMED + 1:
                each = statistics.median(b - a for a, b in zip(self.began, self.began[1:], strict=False))
                say(f"time     {duration(self.seconds_left(step, each))}"
                    + (f" for the {train.steps - step:,} steps that are left" if self.first else ""))
        self.terminal.micro_batch(step, train.steps, number, n)

    def seconds_left(self, step: int, micro_batch_s: float) -> float:
        """Of the steps and of the held-out scores, of which a token takes a third of one in training."""
        train = self.config.train
        n_scores = train.steps // train.eval_every - step // train.eval_every
        scored = n_scores * min(train.eval_tokens, self.held_out) + self.held_out
        of_scores = scored / train.micro_batch_tokens / 3 / launched().size
        return micro_batch_s * (n_micro_batches(self.config) * (train.steps - step) + of_scores)


def words_of(number: float) -> str:
    """A number to two digits."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def duration(seconds: float) -> str:
    """A time in words, to one unit."""
    if seconds < 10:
        return "a few seconds"
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"about {seconds / length:,.0f} {unit}"
    return f"about {seconds:.0f} seconds"
