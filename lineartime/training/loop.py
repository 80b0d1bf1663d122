"""The training loop. A batch is a function of (seed, step): a run is weights, moments, a step."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.base.errors import NumericsError, ResourceError
from lineartime.base.ranks import Ranks, connected, gather, gather_json, in_rows, launched, require_same, wait_for_all
from lineartime.config import to_dict
from lineartime.folders import RESULT_FILE, read_result, saved_steps, step_name, write_result
from lineartime.model.language_model import LanguageModel
from lineartime.training.gradient import compute_gradient, divide
from lineartime.training.objectives import Objective
from lineartime.training.optimizers import Muon, learning_rate_at, make_optimizer, update_weights
from lineartime.training.ordered import own_rows, require_fitting
from lineartime.training.run import Run, Wanted
from lineartime.training.run_config import RunConfig
from lineartime.training.runtime import StopSignal, pick_device
from lineartime.training.shard import forget_shards
from lineartime.weights import checkpoint

logger = logging.getLogger(__name__)

SAVED = "the last step is saved; the same command evaluates"

First = Callable[[Wanted], dict[str, Tensor]]
"""Gives the weights with which a run begins, as far as this rank holds them."""


class Setup(NamedTuple):
    """What a run trains. For `extra_files` and `first` see `Run.save` and `Run.resume`."""

    model: LanguageModel
    objective: Objective
    extra_files: dict[str, str]
    first: First | None = None
    score_last: bool = True  # whether the last step is scored too, if it is a multiple of `eval_every`


@dataclass(frozen=True)
class Callbacks:
    """How a caller follows a run, and stops it."""

    stop: StopSignal = field(default_factory=StopSignal)
    on_step: Callable[[dict[str, Any]], None] | None = None
    """Called with each line of the metrics and "steps", the number of all steps."""
    on_micro_batch: Callable[[int, int], None] | None = None
    """Called before each micro-batch of this rank with the steps done and its number, from 0."""


def fit(run: Run, setup: Setup, device: torch.device, callbacks: Callbacks) -> LanguageModel:
    """Train a model to the last step, from the newest checkpoint if any; returns it, ready to
    evaluate.

    Each of several ranks computes a share of every step's micro-batches, see `training.ordered`,
    and with `context_parallel` its part of their rows, see `ops.context`; all stop at the same
    step. Raises Stopped after saving, NumericsError for what is not finite, ResourceError for the
    disk and, in a step, for memory or a failed compilation, and as `Run.resume` does."""
    config, loop = run.config.train, Loop(run, setup, device, callbacks)
    for step in range(loop.saved, config.steps + 1):  # so many steps are done
        is_last, is_due = step == config.steps, step > 0 and step % config.eval_every == 0
        loop.stop_if_asked(step)
        # Once in a while: score the model. A stop loses no step; a resume scores again.
        if is_due and (setup.score_last or not is_last):
            loop.score(step)
        if is_last:
            break
        # One training step, and once in a while a checkpoint.
        loop.step(step)
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            loop.save(step + 1)
    return loop.model.eval()


class Loop:
    """The state of `fit`: the model, its optimizers, and the last step that is saved."""

    def __init__(self, run: Run, setup: Setup, device: torch.device, callbacks: Callbacks):
        self.run, self.setup, self.device, self.callbacks = run, setup, device, callbacks
        self.config, self.ranks, self.model = run.config.train, run.ranks, setup.model
        # Layers are compiled before they are sharded: what gathers their weights is not compiled.
        self.model.activation_checkpointing = self.config.activation_checkpointing
        if self.config.compile:
            self.model.compile_layers()
        self.division = divide(self.model, self.config, self.ranks, device)
        self.optimizer = make_optimizer(self.division.parts, self.config)
        self.muon = Muon(self.model, self.division.parts, self.config, self.optimizer.state)
        # A sharded model gets what was loaded from the optimizer's copies, see `write_back`.
        self.saved = run.resume(self.model, self.division.parts, self.optimizer, setup.first)
        if self.config.shard:
            self.division.share_updates()
        if self.saved:  # a kill may have left the end of the last save undone
            run.save(self.saved, self.model, self.division.parts, self.optimizer, setup.extra_files)
        self.model.train()

    def step(self, step: int) -> None:
        """Update the weights once: the gradient, AdamW and Muon, and a line of metrics."""
        config, started, cpu_started = self.config, time.perf_counter(), time.process_time()
        batch = [torch.from_numpy(part).to(self.device) for part in self.setup.objective.batch(step)]
        rate = learning_rate_at(step, config)
        try:
            loss, norm = compute_gradient(self.model, self.setup.objective, batch, self.run.config.micro_batch_rows,
                                          config, division=self.division, between=partial(self.begin_micro_batch, step))
            update_weights(self.optimizer, self.muon, rate, config)
            self.division.share_updates()
        except NumericsError as e:
            raise NumericsError(e.what, f"step {step + 1}", self.advice()) from None
        except (RuntimeError, MemoryError) as e:
            if config.compile and type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise ResourceError("torch.compile failed", str(e).split("\n\n")[0], "set compile = false") from e
            if not out_of_memory(e):
                raise
            where = f"micro_batch_tokens = {config.micro_batch_tokens}, context = {self.run.config.model.context}"
            todo = "lower micro_batch_tokens or context, or switch activation_checkpointing on"
            raise ResourceError("out of memory", where, todo) from e
        clock = {"time": time.time(), "tokens_per_s": config.tokens_per_step / (time.perf_counter() - started),
                 "cpu_s": sum(gather(torch.tensor(time.process_time() - cpu_started), self.ranks).tolist())}
        self.log({"step": step + 1, "loss": loss, "learning_rate": rate, "grad_norm": norm,
                  "tokens": (step + 1) * config.tokens_per_step, "clock": clock})

    def begin_micro_batch(self, step: int, number: int) -> None:
        self.stop_if_asked(step)  # a step takes minutes
        if self.model.config.dropout > 0:
            # A function of seed, step and the micro-batch's first row: no resume and no number of
            # ranks changes what is drawn.
            rows, size = self.run.config.rows_per_step, self.run.config.micro_batch_rows
            first = int(own_rows(rows, size, self.config.shard, self.ranks)[number * size])
            torch.manual_seed(np.random.SeedSequence((self.config.seed, step, first)).generate_state(1, np.uint64)[0])
        if self.callbacks.on_micro_batch is not None:
            self.callbacks.on_micro_batch(step, number)

    def score(self, step: int) -> None:
        held_out = self.setup.objective.evaluate(self.model.eval(), lambda n_scored: self.stop_if_asked(step))
        self.model.train()
        self.log({"step": step, "clock": {"time": time.time()}, "held_out": held_out})

    def log(self, record: dict[str, Any]) -> None:
        self.run.log(record)
        if self.callbacks.on_step is not None:
            self.callbacks.on_step(record | {"steps": self.config.steps})

    def stop_if_asked(self, step: int) -> None:
        """Save and raise Stopped if a stop was asked of any rank."""
        if self.callbacks.stop.agree(self.ranks):
            self.save(step)
            self.callbacks.stop.check(f"saved at step {step} of {self.config.steps}; the same command goes on" if step
                                      else "before step 1")

    def save(self, step: int) -> None:
        """Write the step's checkpoint, unless it is there. Raises NumericsError if not finite."""
        if step == self.saved:
            return
        parts, state = self.division.parts, self.optimizer.state
        is_finite = all(tensor.isfinite().all() for part in parts
                        for tensor in (part.updated, *state[part.updated].values()))
        if not gather(torch.tensor(is_finite), self.ranks).all():
            raise NumericsError("the weights are not finite", f"step {step}", self.advice())
        self.run.save(step, self.model, parts, self.optimizer, self.setup.extra_files)
        self.saved = step

    def advice(self) -> str:
        """What to do about wrong numbers."""
        kept = f"the checkpoint of step {self.saved} is good" if self.saved else "there is no checkpoint yet"
        return f"{kept}; try a lower learning_rate (now {self.config.learning_rate:g})"


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; PyTorch's CPU allocator, CUDA and Triton raise RuntimeErrors."""
    texts = ("not enough memory", "can't allocate memory", "bad_alloc", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


def fit_once(config: RunConfig, facts: dict[str, Any], device: torch.device | str | None,
             begin: Callable[[Ranks], Setup], score: Callable[[Run, LanguageModel, Ranks], dict[str, Any]],
             callbacks: Callbacks, rank_timeout: float,
             plan: Callable[[torch.device, Ranks], RunConfig] | None = None) -> tuple[dict[str, Any], bool]:
    """Run or resume `fit` in the run's folder, then write the result file. Returns its content, and
    whether it was complete before; if so, nothing is trained.

    All ranks of `torchrun` call it; rank 0 holds the lock and writes. facts: see `Run`. begin
    returns what is trained; score the content of the result file but for "run"; plan the run to
    train, by default `config`. Raises as `pick_device`, `connected`, `require_same`,
    `require_fitting`, `Run`, `lock` and `fit` do."""
    out, stop = Path(config.out), callbacks.stop
    picked = pick_device(device, give_back=config.train.shard)
    n_micro_batches = config.rows_per_step // config.micro_batch_rows
    require_fitting(n_micro_batches, config.train.shard, in_rows(launched(), config.train.context_parallel))
    met = partial(stop.check, "before the ranks met")
    with (connected(picked.type, rank_timeout, config.train.context_parallel, met) as ranks,
          checkpoint.lock(out) if ranks.is_first else nullcontext()):
        require_same({**to_dict(config.model), **to_dict(config.train), "out": config.out, **facts,
                      "torch": torch.__version__}, ranks)
        config = config if plan is None else plan(picked, ranks)
        run = Run(out, config, facts, ranks)
        found = read_result(out) if ranks.is_first and (out / RESULT_FILE).exists() else None
        if (complete := gather_json(found, ranks)[0]) is not None:
            return complete, True
        logger.info(f"on {picked.type}")
        model = fit(run, begin(ranks), picked, callbacks)
        if stop.agree(ranks):
            stop.check(SAVED)
        result = {"run": run.id, **score(run, model, ranks)}
        if ranks.is_first:
            last = max(saved_steps(out))
            checkpoint.point(out / "latest", step_name(last))  # if the disk failed at the link of the last save
            write_result(out, result)
        wait_for_all(ranks)
    if config.train.shard:
        del model
        forget_shards()
    return result, False
