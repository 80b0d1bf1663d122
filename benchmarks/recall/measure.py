"""A model learns a task of recall, and is asked at the trained length and beyond it."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import Row
from benchmarks.peers import Peer, state_size
from benchmarks.recall.tasks import Rows, Task
from lineartime.base.errors import NumericsError
from lineartime.base.ranks import ALONE, Ranks
from lineartime.config import TrainConfig
from lineartime.model.language_model import LanguageModel
from lineartime.training.gradient import compute_gradient
from lineartime.training.optimizers import Muon, learning_rate_at, make_optimizer, update_weights
from lineartime.training.ordered import parameter_parts

OnStep = Callable[[Row], None]
Model = LanguageModel | Peer
TEST_ROWS = 48  # rows for each number of facts; at n times the trained length an n-th, see `n_test_rows`
N_SCORES = 24  # times that a model is asked during its training
LEARNED = 0.9  # mean accuracy over all numbers of facts at which a task counts as learned


class Recall:
    """The objective of `compute_gradient`: the loss of the answers alone. In the first half of the
    training the numbers of facts are added one after another, the fewest first. All seeds read the
    same rows: a seed draws the initial values alone."""

    def __init__(self, task: Task, length: int, config: TrainConfig):
        self.task, self.length, self.config = task, length, config

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """ids `[B, T]`, places of the questions and answers `[B, Q]`."""
        generator = torch.Generator().manual_seed(step)
        n_facts = self.task.n_facts
        n_known = 1 + min(len(n_facts) - 1, 2 * len(n_facts) * step // self.config.steps)
        n = n_facts[int(torch.randint(n_known, (1,), generator=generator))]
        rows = self.task.draw(self.config.tokens_per_step // self.length, n, self.length, generator)
        return rows.ids_BT.numpy(), rows.asked_BQ.contiguous().numpy(), rows.answer_BQ.contiguous().numpy()

    def n_targets(self, *batch: Tensor) -> int:
        return batch[2].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, asked_BQ, answer_BQ = batch
        return model(ids_BT, at_K=in_flat(ids_BT, asked_BQ), targets=answer_BQ.flatten())

    def evaluate(self, model: Model, progress: Callable[[int], None] | None = None) -> Row:
        """The mean accuracy over all numbers of facts, of few rows."""
        right = [asked(model, self.task, n, self.length, 16)[0].double().mean().item() for n in self.task.n_facts]
        return {"accuracy": sum(right) / len(right)}


def in_flat(ids_BT: Tensor, asked_BQ: Tensor) -> Tensor:
    """Places in rows as places in the flattened rows, `[B * Q]`."""
    return (torch.arange(len(ids_BT))[:, None] * ids_BT.shape[1] + asked_BQ).flatten()


def n_test_rows(task: Task, times: int) -> int:
    return max(task.test_rows, TEST_ROWS // times)


def n_asked(task: Task, length: int) -> int:
    """Tokens of all test rows."""
    return sum(times * length * n_test_rows(task, times) for times in task.times) * len(task.n_facts)


@torch.inference_mode()
def asked(model: Model, task: Task, n_facts: int, length: int, n_rows: int,
          seed: int = 7) -> tuple[Tensor, Rows]:
    """Whether each answer is right, `[B, Q]`, and the rows, which no training has: drawn from
    `seed` at once, where a step's batch is drawn after its number of facts."""
    rows = (task.test or task.draw)(n_rows, n_facts, length, torch.Generator().manual_seed(seed))
    right = []
    for first in range(0, n_rows, at_once := max(1, 2048 // length)):
        ids_BT, asked_BQ, answer_BQ = (each[first : first + at_once] for each in rows)
        logits_BQV = model(ids_BT, at_K=in_flat(ids_BT, asked_BQ)).view(*answer_BQ.shape, -1)
        answers = torch.arange(logits_BQV.shape[-1]) if task.answers is None else torch.tensor(task.answers)
        right.append(answers[logits_BQV[..., answers].argmax(-1)] == answer_BQ)
    return torch.cat(right), rows


def learn(model: Model, objective: Recall, on_step: OnStep = lambda _: None) -> Iterator[tuple[int, float, float]]:
    """Train a model; yields step, mean loss since the last time in nats and accuracy, `N_SCORES`
    times. on_step: see `measure`. Raises NumericsError for a loss that is not finite."""
    train, losses = objective.config, []
    began = time.perf_counter()
    parts = parameter_parts(model, muon=train.optimizer == "muon")
    adamw = make_optimizer(parts, train)
    muon = Muon(cast(Any, model), parts, train, adamw.state)
    for step in range(train.steps):
        batch = [torch.from_numpy(part) for part in objective.batch(step)]
        losses.append(compute_gradient(model, objective, batch, len(batch[0]), train)[0])
        update_weights(adamw, muon, learning_rate_at(step, train), train)
        on_step({"step": step + 1, "steps": train.steps, "loss": losses[-1], "clock": {
            "time": time.time(), "tokens_per_s": (step + 1) * train.tokens_per_step / (time.perf_counter() - began)}})
        if (step + 1) * N_SCORES // train.steps > step * N_SCORES // train.steps:
            yield step + 1, sum(losses) / len(losses), objective.evaluate(model)["accuracy"]
            losses.clear()


def measure(model: Model, task: Task, train: TrainConfig, *, length: int, on_step: OnStep = lambda _: None) -> Row:
    """Train a new model on a task and ask it: the columns of a row but for who and where.

    "curve" has step, loss in nats and mean accuracy; "passed" is of `passed`; "accuracy" is by
    length and number of facts. A model that diverges has "failed". on_step is called after every
    step as `training.train` calls it, and may raise."""
    began, curve = time.process_time(), []
    row: Row = {"n_parameters": sum(p.numel() for p in model.parameters()), "state_size": state_size(model),
                "length": length, "n_facts": list(task.n_facts)}
    try:
        for step, loss, right in learn(model, Recall(task, length, train), on_step):
            curve.append([step, round(loss, 4), round(right, 4)])
    except NumericsError as e:
        row["failed"] = str(e)
    row |= {"curve": curve, "passed": passed(curve), "train_s": round(time.process_time() - began, 1)}
    return row if "failed" in row else row | ask_at_lengths(model, task, length)


def ask_at_lengths(model: Model, task: Task, length: int, progress: Callable[[int], None] | None = None) -> Row:
    """The "accuracy" of `measure` at the lengths that the model's position tables allow. progress
    is called with the number of tokens read, of `n_asked`, and may raise."""
    model.eval()
    accuracy: Row = {}
    limit, n_read = model.config.max_len or math.inf, 0
    for times in (times for times in task.times if times * length <= limit):
        told, n_rows = accuracy.setdefault(str(times * length), {}), n_test_rows(task, times)
        for n in task.n_facts:
            told[str(n)] = round(asked(model, task, n, times * length, n_rows)[0].double().mean().item(), 4)
            n_read += times * length * n_rows
            if progress is not None:
                progress(n_read)
    return {"accuracy": accuracy}


def passed(curve: Sequence[Sequence[float]]) -> int | None:
    """The step from which on every accuracy of a curve is at least `LEARNED`; or None."""
    first = None
    for step, _, right in curve:
        first = (first or int(step)) if right >= LEARNED else None
    return first
