"""What a run of `lineartime train` will be: its plan, and its time."""

import itertools
import statistics
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.cli.terminal import Terminal, duration, say
from lineartime.distributed.ranks import launched
from lineartime.run_config import RunConfig

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest

COUNTED_FROM = 1e12
"""FLOPs of a run, at least, from which its memory is counted, which takes seconds."""
TIMED = 3
"""Micro-batches of the run that are timed before its time is told."""
RECENT = 32
"""Micro-batches by whose times the time left is told."""


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
        f"{n_tokens:,} tokens, {words_of(n_tokens / n_train)} epochs"
        + (": above ten, the model learns the text by heart; lower --steps" if n_tokens > 10 * n_train else ""))
    if 6 * model.least_parameters * n_tokens < COUNTED_FROM:
        return
    from lineartime.plan import plan

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
    """Shows how far a step is and how long the run will still take, and tells its time after its first micro-batches;
    the `on_micro_batch` of training."""

    def __init__(self, config: RunConfig, manifests: "list[Manifest]", terminal: Terminal):
        self.config, self.terminal = config, terminal
        self.held_out = tokens_of(manifests, "validation")
        self.n_begun, self.first = 0, 0
        self.began: deque[float] = deque(maxlen=RECENT)

    def __call__(self, step: int, number: int) -> None:
        self.first = self.first if self.n_begun else step
        left, steps = self.left(step, number), self.config.train.steps
        if self.n_begun == TIMED:
            say(f"time     {left}" + (f" for the {steps - step:,} steps that are left" if self.first else ""))
        self.n_begun += 1
        self.began.append(time.perf_counter())
        self.terminal.micro_batch(step, steps, number, n_micro_batches(self.config), left)

    def left(self, step: int, number: int = 0) -> str | None:
        """How long the run will still take, in words, now that `number` micro-batches of the next step are done; None
        before the first one's end."""
        lengths = [b - a for a, b in itertools.pairwise([*self.began, time.perf_counter()])]
        return duration(self.seconds_left(step, number, statistics.median(lengths))) if lengths else None

    def seconds_left(self, step: int, number: int, micro_batch_s: float) -> float:
        """Of the steps and of the held-out scores, of which a token takes a third of one in training."""
        train = self.config.train
        n_scores = train.steps // train.eval_every - step // train.eval_every
        scored = n_scores * min(train.eval_tokens, self.held_out) + min(train.last_eval_tokens, self.held_out)
        of_scores = scored / train.micro_batch_tokens / 3 / launched().size
        return micro_batch_s * (n_micro_batches(self.config) * (train.steps - step) - number + of_scores)


def words_of(number: float) -> str:
    """A number to two digits."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
