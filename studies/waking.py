"""Does training with a local half that is missing, or with chunks of other sizes, wake FLASH's linear half further?

    python studies/waking.py recall                  tasks of recall; half an hour of one core
    python studies/waking.py articles --texts TEXTS  language modelling; half an hour
    python studies/waking.py --into docs/memory.md   writes the table

"dropout": in a quarter of the steps the local half says nothing, in all layers. "chunks": a step's chunks have the
size of the model, a half or a quarter of it. Models are asked, and scored, whole. What has a row is left out."""

import argparse
import contextlib
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import lineartime  # noqa: E402
import lineartime.ops  # noqa: E402
from benchmarks.markdown import markdown  # noqa: E402
from benchmarks.measure import add_missing  # noqa: E402
from benchmarks.pages import fill_place  # noqa: E402
from benchmarks.paper.records import by_key, read_records, records_of  # noqa: E402
from benchmarks.paper.scales import Cell, cells_of  # noqa: E402
from benchmarks.recall.measure import OnStep, Row  # noqa: E402
from benchmarks.recall.measure import measure as measured  # noqa: E402
from benchmarks.recall.report import spread_text  # noqa: E402
from benchmarks.recall.study import config_of, training  # noqa: E402
from benchmarks.recall.tasks import TASKS  # noqa: E402
from lineartime.atomic_io import read_json_lines  # noqa: E402
from lineartime.cli.exits import exit_code  # noqa: E402
from lineartime.cli.terminal import Terminal, say_stopping  # noqa: E402
from lineartime.data.prepare import prepare  # noqa: E402
from lineartime.run import read_result  # noqa: E402
from lineartime.settings import require, require_name  # noqa: E402
from lineartime.training import StopSignal  # noqa: E402

ROWS, QUALITY, RECALL = (ROOT / "benchmarks" / "rows" / f"{name}.jsonl" for name in ("waking", "quality", "recall"))
COMMAND = "python studies/waking.py"
SEEDS = (0, 1, 2)
DROPPED_SHARE, SIZES = 0.25, (1, 2, 4)
"""Of steps without the local half; what a step's chunk size is divided by."""
ABSENT = -1e4
"""A position bias that relu makes 0 of every score."""
ASKED = (("flash", "pairs", ((1.5e-3, 0), (3e-3, 0), (6e-3, 0))),
         ("flash+", "copying", tuple((6e-3, seed) for seed in SEEDS)))
"""Models, tasks of recall, learning rates and seeds: FLASH learns pairs at none of the study's rates, `flash+` learns
copying best at 6e-3."""
ARTICLES = {"flash": "FLASH", "flash+": "FLASH+"}
"""Models, and their names in the table `memory_texts`."""


def dropout(draw: random.Random, w: Tensor, chunk_size: int) -> tuple[Tensor, int]:
    """The position bias and the chunk size of a step's layer: with no local half in a quarter of the steps."""
    return (torch.full_like(w, ABSENT) if draw.random() < DROPPED_SHARE else w), chunk_size


def chunks(draw: random.Random, w: Tensor, chunk_size: int) -> tuple[Tensor, int]:
    """The same with chunks of one of three sizes; b[i, j] of two tokens stays."""
    size = chunk_size // draw.choice(SIZES)
    return w[chunk_size - size : chunk_size + size - 1], size


VARIANTS = {"dropout": dropout, "chunks": chunks}


@contextlib.contextmanager
def waking(variant: str, seed: int, on_step: OnStep) -> Iterator[OnStep]:
    """Changes every step with gradients as a variant says, in all layers alike; yields what is to be called with each
    line of the metrics, and calls on_step."""
    n_steps, ops = 0, lineartime.ops

    def after_step(record: Row) -> None:
        nonlocal n_steps
        n_steps += "loss" in record
        on_step(record)

    def changed(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(*tensors: Any, chunk_size: int, **named: Any) -> Tensor:
            if torch.is_grad_enabled():
                w, chunk_size = VARIANTS[variant](random.Random(f"{seed}/{n_steps}"), tensors[-1], chunk_size)
                tensors = (*tensors[:-1], w)
            return attention(*tensors, chunk_size=chunk_size, **named)
        return attend

    with mock.patch.object(ops, "gated_chunk_attention", changed(ops.gated_chunk_attention)), \
            mock.patch.object(ops, "gated_head_attention", changed(ops.gated_head_attention)):
        yield after_step


def recall(model: str, name: str, variant: str, rate: float, seed: int, on_step: OnStep) -> Row:
    """A model that learns a task, as `python -m benchmarks recall` measures it."""
    task = TASKS[name]
    train = training(name, task, {"learning_rate": rate, "seed": seed})
    with waking(variant, seed, on_step) as step:
        return measured(config_of(model, task, {}), task, train, length=task.length, n_facts=task.n_facts, on_step=step)


def cell_of(model: str) -> Cell:
    """The cell of `memory_texts` that reads articles."""
    (cell,) = [each for each in cells_of("memory_texts", "cpu") if (each.row, each.column) == (ARTICLES[model], "LM")]
    return cell


def articles(model: str, variant: str, seed: int, texts: Path, out: Path, stop: StopSignal, on_step: OnStep) -> Row:
    """A model that reads the articles of `memory_texts`, with its settings but for the compiler."""
    cell = cell_of(model)
    assert cell.text.folder is not None
    data, run = out / cell.text.name, out / f"{model}-{variant}-{seed}"
    if not data.exists():
        prepare([texts / cell.text.folder], data, task=cell.text.task, vocab_size=cell.text.vocab_size)
    settings = {**cell.settings(seed), "compile": False, "size": "paper", "data": str(data), "out": str(run)}
    shutil.rmtree(run, ignore_errors=True)  # a step's change depends on the steps of this process

    with waking(variant, seed, on_step) as step:
        lineartime.train(settings, device="cpu", stop=stop, on_step=step)
    held_out = read_result(run)["held_out"]
    shutil.rmtree(run)
    return {"held_out": held_out}


def measure(parts: Sequence[str], texts: Path | None, out: Path, rows: Path, stop: StopSignal) -> None:
    """What has no row yet."""
    with Terminal() as terminal:
        def on_step(record: Row) -> None:
            stop.check("what is measured is in the rows; the same command goes on")
            terminal.step(record)

        if "recall" in parts:
            for model, task, tried in ASKED:
                for variant in VARIANTS:
                    for rate, seed in tried:
                        key = {"task": task, "model": model, "variant": variant, "learning_rate": rate, "seed": seed}
                        add_missing(rows, key, f"{COMMAND} recall", partial(recall, model, task, variant, rate, seed,
                                                                            on_step))
        if "articles" in parts:
            require(texts is not None, "no texts are named", "articles", "give --texts the folder of wiki40b_mini")
            for seed in SEEDS:
                for model in ARTICLES:
                    for variant in VARIANTS:
                        key = {"task": "articles", "model": model, "variant": variant, "seed": seed}
                        add_missing(rows, key, f"{COMMAND} articles --texts TEXTS", partial(
                            articles, model, variant, seed, texts, out, stop, on_step))


def as_it_is() -> list[Row]:
    """The rows of the same models without a change: of `python -m benchmarks recall`, and of `memory_texts`."""
    tried = {(model, task): seeds for model, task, seeds in ASKED}
    found = [row | {"variant": "as it is"} for row in read_json_lines(RECALL, dict, "a row")
             if (row["learning_rate"], row["seed"]) in tried.get((row["model"], row["task"]), ())]
    records = by_key(read_records(QUALITY))
    for model in ARTICLES:
        found += [{"task": "articles", "model": model, "variant": "as it is", "seed": seed,
                   "held_out": records_of(cell_of(model), records, "train", seed)[-1]["held_out"]} for seed in SEEDS]
    return found


def table(rows: Sequence[Row]) -> str:
    """A line for each task, model and way of training."""
    lines, rows = [], [*as_it_is(), *rows]
    for task, model in [(task, model) for model, task, _ in ASKED] + [("articles", model) for model in ARTICLES]:
        for variant in ("as it is", *VARIANTS):
            own = [row for row in rows if (row["task"], row["model"], row["variant"]) == (task, model, variant)]
            if not own:
                continue
            if task == "articles":
                told = ["", "", "", spread_text([row["held_out"]["loss"] for row in own], 3)]
            else:
                at = [[statistics.fmean(row["accuracy"][str(times * row["length"])].values()) for row in own]
                      for times in (1, 8)]
                told = [", ".join(f"{row['passed']:,}" if row["passed"] else "never" for row in own),
                        *map(spread_text, at), ""]
            lines.append([task, model, variant, str(len(own)), *told])
    return markdown(["task", "model", "training", "runs", "learned from step", "accuracy, trained length",
                     "eight times the length", "nats per token"], lines, 5)


PARTS = ("recall", "articles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"what is measured: {', '.join(PARTS)}")
    parser.add_argument("--texts", type=Path, help="the folder of wiki40b_mini, for articles")
    parser.add_argument("--out", type=Path, default=Path("out/waking"), help="folder of text and unfinished runs")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--into", type=Path, help="write the table into this page")
    given = parser.parse_args()
    for part in given.parts:
        require_name("part", part, PARTS)
    if given.parts:
        with StopSignal().listening(say_stopping) as stop:
            measure(given.parts, given.texts, given.out, given.rows, stop)
    if given.into:
        fill_place(given.into, "waking", table(read_json_lines(given.rows, dict, "a row")))


if __name__ == "__main__":
    sys.exit(exit_code(main))
