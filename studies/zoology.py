"""Multi-query associative recall at the sizes that Zoology publishes (Arora et al., 2023).

    python studies/zoology.py --measure              trains and asks what has no row; an hour and a half of one core
    python studies/zoology.py --into benchmarks/tables/memory.md  writes the table

Its five training sets, each step of one of them, drawn as often as their tokens are many there; its seven test sets of
1,000 rows. Models, and training but for the length of it, are those of `python -m benchmarks recall`. There are far
fewer steps: 12 M tokens, none of them read twice, where Zoology reads 24 M tokens up to 32 times. A run that was
stopped begins anew."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import add_missing  # noqa: E402
from benchmarks.pages import fill_place  # noqa: E402
from benchmarks.recall.measure import OnStep, Recall, Row, asked, learn, passed  # noqa: E402
from benchmarks.recall.report import spread_text  # noqa: E402
from benchmarks.recall.study import best_rate, config_of, training  # noqa: E402
from benchmarks.recall.tasks import TASKS  # noqa: E402
from lineartime.atomic_io import read_json_lines  # noqa: E402
from lineartime.cli.exits import exit_code  # noqa: E402
from lineartime.cli.terminal import Terminal, say_stopping  # noqa: E402
from lineartime.markdown import markdown  # noqa: E402
from lineartime.model import LanguageModel  # noqa: E402
from lineartime.training import StopSignal  # noqa: E402

ROWS = ROOT / "benchmarks" / "rows" / "zoology.jsonl"
COMMAND = "python studies/zoology.py --measure"
TASK = TASKS["zoology"]
TRAINED = {(64, 4): 100_000, (128, 8): 20_000, (256, 16): 20_000, (256, 32): 20_000, (256, 64): 20_000}
"""Rows of each set of Zoology's, by tokens in a row and pairs in it."""
TESTED = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
N_TEST, N_HELD_OUT, TEST_SEED = 1000, 16, 1 << 31
LONGEST = max(length for length, _ in TRAINED)
MODELS = ("flash", "flash+", "transformer++", "transformer++, conv")
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

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> Row:
        """The mean accuracy over the training sets' sizes, of few rows that no training has."""
        right = [accuracy(model, size, N_HELD_OUT) for size in TRAINED]
        return {"accuracy": sum(right) / len(right)}


def accuracy(model: LanguageModel, size: tuple[int, int], n_rows: int) -> float:
    """The share of right answers in test rows of so many tokens and pairs."""
    return asked(model, TASK, size[1], size[0], n_rows, seed=TEST_SEED)[0].double().mean().item()


def learned(model: str, rate: float, seed: int, on_step: OnStep, check: Callable[[], None]) -> Row:
    """A model that has read the training sets, asked the test sets."""
    train = training("zoology", TASK, {**LENGTH_OF_TRAINING, "learning_rate": rate, "seed": seed, "context": LONGEST})
    told = list(learn(config_of(model, TASK, {"context": LONGEST}), Mixed(TASK, LONGEST, (), train), on_step))
    curve, trained = [[step, round(loss, 4), round(right, 4)] for step, loss, right, _ in told], told[-1][-1].eval()
    test = {}
    for size in TESTED:
        check()
        test[f"{size[0]}:{size[1]}"] = round(accuracy(trained, size, N_TEST), 4)
    return {"length": LONGEST, "steps": train.steps, "tokens": train.steps * train.tokens_per_step, "curve": curve,
            "passed": passed(curve), "accuracy": {str(LONGEST): {"all": curve[-1][2]}}, "test": test}


def measure(rows: Path, stop: StopSignal) -> None:
    """Every learning rate with the first seed, the best with the others: what has no row yet."""
    def check() -> None:
        stop.check("what is measured is in the rows; the same command goes on")

    with Terminal() as terminal:
        def on_step(record: Row) -> None:
            check()
            terminal.step(record)

        def add(model: str, rate: float, seed: int) -> None:
            add_missing(rows, {"model": model, "learning_rate": rate, "seed": seed}, COMMAND,
                        partial(learned, model, rate, seed, on_step, check))

        for model in MODELS:
            for rate in RATES:
                add(model, rate, SEEDS[0])
            for seed in SEEDS[1:]:
                add(model, rate_of(model, read_json_lines(rows, dict, "a row")), seed)


def rate_of(model: str, rows: Sequence[Row]) -> float:
    """The learning rate that was best with the first seed."""
    return best_rate([row for row in rows if (row["model"], row["seed"]) == (model, SEEDS[0])])


def table(rows: Sequence[Row]) -> str:
    """A line for each model: the step from which it has learned, and accuracies at the test sizes."""
    lines = []
    for model in MODELS:
        rate = rate_of(model, rows)
        own = [row for row in rows if (row["model"], row["learning_rate"]) == (model, rate)]
        steps = ", ".join(f"{row['passed']:,}" if row["passed"] else "never" for row in own)
        lines.append([model, f"{rate:g}", steps, *(spread_text([row["test"][f"{length}:{n_pairs}"] for row in own])
                                                  for length, n_pairs in TESTED)])
    head = ["model", "rate", "learned from step", *(f"{length:,}: {n_pairs}" for length, n_pairs in TESTED)]
    return markdown(head, lines, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="train and ask what has no row")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--into", type=Path, help="write the table into this page")
    given = parser.parse_args()
    if given.measure:
        with StopSignal().listening(say_stopping) as stop:
            measure(given.rows, stop)
    if given.into:
        fill_place(given.into, "zoology sizes", table(read_json_lines(given.rows, dict, "a row")))


if __name__ == "__main__":
    sys.exit(exit_code(main))
