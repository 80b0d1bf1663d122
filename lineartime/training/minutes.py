"""The steps of a run that shall take so many minutes, by the speed of its first steps."""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lineartime.base.ranks import Ranks, connected, gather_json
from lineartime.base.settings import require
from lineartime.folders import saved_run
from lineartime.training.loop import Callbacks, Loop, Setup, require_fitting_ranks
from lineartime.training.run import Run
from lineartime.training.run_config import RunConfig, config_for_data
from lineartime.training.runtime import pick_device

PLANNED = ("steps", "warmup_steps", "eval_every", "save_every")
MOST_LOOKS, MEASURED, LOOKED, LAST_S = 10, 0.05, 0.1, 5.0
"""Most held-out scores, and checkpoints, of a run; the shares of its time in which its speed is
measured and it is scored; and seconds for the sample and the picture."""

logger = logging.getLogger(__name__)


class Trial(Run):
    """A run that leaves no trace."""

    def __init__(self, config: RunConfig, ranks: Ranks):
        self.out, self.config, self.ranks = Path(config.out), config, ranks

    def resume(self, *_: Any) -> int:
        return 0

    def log(self, record: dict[str, Any]) -> None:
        pass


@contextmanager
def planned(settings: Mapping[str, Any], begin: Callable[[Ranks], Setup], device: torch.device | str | None,
            callbacks: Callbacks, rank_timeout: float) -> Iterator[RunConfig]:
    """The run of `settings`, which has "minutes", with its steps: those of the run that is saved in
    its folder, or as many as there is time for. Other ranks are connected in the block. Raises
    UsageError if the folder has another run, and as `fit_once` does."""
    begun, minutes = time.monotonic(), settings["minutes"]
    given = {name: value for name, value in settings.items() if name != "minutes"}
    run, stop = config_for_data(given), callbacks.stop
    if there := saved_run(Path(run.out)):
        require(there.get("minutes") == minutes, "another run is here", run.out,
                f"minutes: {there.get('minutes')} -> {minutes}. Give another --out, or the same settings")
        yield config_for_data({name: there["train"][name] for name in PLANNED} | given)
        return
    picked = pick_device(device, give_back=run.train.shard)
    require_fitting_ranks(run)
    with connected(picked.type, rank_timeout, run.train.context_parallel, lambda: stop.check("before step 1")) as ranks:
        logger.info(f"{minutes:g} minutes: the speed of the first steps is measured")
        speed, n, looks = speed_and_steps(run, begin(ranks), picked, callbacks, ranks, begun + 60 * minutes)
        tokens = run.train.tokens_per_step
        logger.info(f"{minutes:g} minutes: {n:,} steps of {tokens:,} tokens at {speed:.3g} steps/s")
        every = {"eval_every": max(n // looks, 1), "save_every": max(n // MOST_LOOKS, 1)}
        yield config_for_data({**every, **given, "steps": n})


def speed_and_steps(run: RunConfig, setup: Setup, device: torch.device, callbacks: Callbacks, ranks: Ranks,
                    end: float) -> tuple[float, int, int]:
    """Steps per second; and how many steps, with how many held-out scores and the last one, end at
    the time `end`. Rank 0 decides for all."""
    watch = callbacks.stop.watch("before step 1", None, "", None, ranks)
    loop = Loop(Trial(run, ranks), setup, device, Callbacks(on_micro_batch=lambda step, number: watch(step)))
    seconds, last = list[float](), time.monotonic()
    enough = last + MEASURED * (end - last)
    while len(seconds) < 3 or (len(seconds) < 20 and gather_json(last < enough, ranks)[0]):
        loop.step(len(seconds))
        seconds.append(time.monotonic() - last)
        last = time.monotonic()
    scores = setup.objective.evaluate(loop.model, watch)
    look, step = time.monotonic() - last, statistics.median(seconds[1:])
    looks = min(max(int(LOOKED * (end - last) / look), 1), MOST_LOOKS)
    # The last score has all held-out tokens, or three times those of training: what is less.
    left, per_token = end - time.monotonic() - looks * look - LAST_S, look / scores["n_tokens"]
    n = max((left - scores["of_tokens"] * per_token) / step,
            left / (step + 3 * run.train.tokens_per_step * per_token), 1)
    return tuple(gather_json([1 / step, int(n), looks], ranks)[0])
