"""Multi-query associative recall at the sizes that Zoology publishes (Arora et al., 2023).

    python -m studies.zoology                                     asks what has no row; hours
    python -m studies.zoology --into benchmarks/tables/memory.md  writes the table

Each step has one of its five training sets, drawn in proportion to their tokens. Models and
training are those of `python -m benchmarks recall`, but there are far fewer steps: 12 M tokens,
none read twice, where Zoology reads 24 M up to 32 times. A run that was stopped begins anew."""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import ROOT, Row
from benchmarks.measure import add_missing
from benchmarks.pages import with_places
from benchmarks.provenance import rows_in
from benchmarks.recall.measure import Model, OnStep, Recall, asked, learn, passed
from benchmarks.recall.study import best_rate, config_of, new_model, spread_text, training
from benchmarks.recall.tasks import TASKS
from benchmarks.verbs import check_and_show
from lineartime.base.files import write_atomically
from lineartime.base.words import markdown
from lineartime.cli.terminal import Terminal, exit_code, note, say_stopping
from lineartime.training.runtime import StopSignal

TASK, ROWS = TASKS["zoology"], ROOT / "benchmarks" / "rows" / "zoology.jsonl"
TRAINED = {(64, 4): 100_000, (128, 8): 20_000, (256, 16): 20_000, (256, 32): 20_000, (256, 64): 20_000}
"""Rows of each set of Zoology's, by tokens in a row and pairs in it."""
TESTED = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
N_TEST, N_HELD_OUT, TEST_SEED = 1000, 16, 1 << 31
LONGEST = max(length for length, _ in TRAINED)
MODELS = ("flash", "flash+", "flash+ but near", "transformer++", "transformer++, conv", "gated-deltanet", "mamba2")
RATES, SEEDS = (3e-3, 6e-3), (0, 1, 2)
LENGTH_OF_TRAINING = {"steps": 1500, "tokens_per_step": 8192}


class Mixed(Recall):
    """The objective with a set of Zoology's in each step."""

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        generator = torch.Generator().manual_seed(self.config.steps * self.config.seed + step)
        n_tokens = torch.tensor([length * n_rows for (length, _), n_rows in TRAINED.items()]).double()
        length, n_pairs = [*TRAINED][int(torch.multinomial(n_tokens, 1, generator=generator))]
        rows = self.task.draw(self.config.tokens_per_step // length, n_pairs, length, generator)
        return rows.ids_BT.numpy(), rows.asked_BQ.contiguous().numpy(), rows.answer_BQ.contiguous().numpy()

    def evaluate(self, model: Model, progress: Callable[[int], None] | None = None) -> Row:
        """The mean accuracy over the training sets' sizes, of few rows that no training has."""
        right = [accuracy(model, size, N_HELD_OUT) for size in TRAINED]
        return {"accuracy": sum(right) / len(right)}


def accuracy(model: Model, size: tuple[int, int], n_rows: int) -> float:
    """The share of right answers in test rows of so many tokens and pairs."""
    return asked(model, TASK, size[1], size[0], n_rows, seed=TEST_SEED)[0].double().mean().item()


def learned(model: str, rate: float, seed: int, on_step: OnStep, check: Callable[[], None]) -> Row:
    """A model that has read the training sets, asked the test sets."""
    note(f"{model}, rate {rate:g}, seed {seed}")
    train = training("zoology", TASK, {**LENGTH_OF_TRAINING, "learning_rate": rate, "seed": seed, "context": LONGEST})
    trained = new_model(model, config_of(model, TASK, {"context": LONGEST}), seed)
    curve = [[step, round(loss, 4), round(right, 4)]
             for step, loss, right in learn(trained, Mixed(TASK, LONGEST, train), on_step)]
    trained.eval()
    test = {}
    for size in TESTED:
        check()
        test[f"{size[0]}:{size[1]}"] = round(accuracy(trained, size, N_TEST), 4)
    return {"length": LONGEST, "steps": train.steps, "tokens": train.steps * train.tokens_per_step, "curve": curve,
            "passed": passed(curve), "accuracy": {str(LONGEST): {"all": curve[-1][2]}}, "test": test}


def measure(path: Path) -> None:
    """Every learning rate with the first seed, the best with the others: what has no row yet."""
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        on_step = partial(check_and_show, stop, terminal)
        for model, (rate, seed) in itertools.product(MODELS, [*((rate, SEEDS[0]) for rate in RATES),
                                                              *((None, seed) for seed in SEEDS[1:])]):
            rate = rate or rate_of(model, rows_in(path))
            add_missing(path, {"model": model, "learning_rate": rate, "seed": seed}, "python -m studies.zoology",
                        partial(learned, model, rate, seed, on_step, lambda: stop.check("the same command goes on")))


def rate_of(model: str, rows: Sequence[Row]) -> float:
    return best_rate([row for row in rows if (row["model"], row["seed"]) == (model, SEEDS[0])])


def table(rows: Sequence[Row]) -> str:
    """A line for each model: when it has learned, and accuracies."""
    lines = []
    for model in (each for each in MODELS if each in {row["model"] for row in rows}):
        rate = rate_of(model, rows)
        own = [row for row in rows if (row["model"], row["learning_rate"]) == (model, rate)]
        steps = ", ".join(f"{row['passed']:,}" if row["passed"] else "never" for row in own)
        lines.append([model, f"{rate:g}", steps, *(spread_text([row["test"][f"{length}:{n_pairs}"] for row in own])
                                                  for length, n_pairs in TESTED)])
    head = ["model", "rate", "learned from step", *(f"{length:,}: {n_pairs}" for length, n_pairs in TESTED)]
    return markdown(head, lines, 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, help="do not measure; write the table of the rows into this page")
    given = parser.parse_args()
    if given.into:
        made = table(rows_in(ROWS))
        write_atomically(given.into, with_places(given.into, "zoology sizes", lambda _: f"{made}\n"))
    else:
        sys.exit(exit_code(lambda: measure(ROWS)))
