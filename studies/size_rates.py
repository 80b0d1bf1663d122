"""The learning rate, warm-up, clipping and initial values that suit each model at `--size tiny`: a first search.

    lineartime prepare BOOKS --vocab-size 4096 --held-out 0.05 --out DATA     BOOKS: four novels, pg19's validation ones
    python studies/size_rates.py --measure DATA     trains what has no row; about 70 minutes of one core
    python studies/size_rates.py --into docs/results.md     writes the table

One seed, 120 steps of 4,096 tokens, about one epoch; the score is of 65,536 held-out tokens. One thing after another is
varied, each time from the best so far. Models that are alike begin with the best of one of them. A run that was
stopped begins anew."""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.markdown import markdown  # noqa: E402
from benchmarks.measure import Row, add_missing  # noqa: E402
from benchmarks.pages import fill_place  # noqa: E402
from lineartime.atomic_io import read_json_lines  # noqa: E402
from lineartime.cli.exits import exit_code  # noqa: E402
from lineartime.data.run_settings import config_for_data  # noqa: E402
from lineartime.data.tokens import open_data  # noqa: E402
from lineartime.distributed.ordered import parts_of  # noqa: E402
from lineartime.objectives import NextToken  # noqa: E402
from lineartime.training import compute_gradient, learning_rate_at, make_optimizer, new_model  # noqa: E402

ROWS = Path(__file__).with_suffix(".jsonl")
STEPS, SCORED = 120, 65_536
LOCAL = {"clip": 0.1, "clip_scope": "local", "adam_beta2": 0.999}
GLOBAL = {"clip": 1.0, "clip_scope": "global", "adam_beta2": 0.95}
LOWER = {**GLOBAL, "learning_rate": 4e-3}
SHORT, LONG = {"warmup_steps": STEPS // 20}, {"warmup_steps": STEPS // 5}
SMALL, SCALED = {"init_std": 0.02}, {"init_std": 0.04}
Recipe = dict[str, float | str]
Stage = list[Recipe]
FLASH: Recipe = {"learning_rate": 4e-3, **SHORT, **LOCAL, **SCALED}
TRANSFORMER: Recipe = {"learning_rate": 4e-3, **LONG, **LOCAL, **SCALED}
SEARCHES: dict[str, tuple[str | Recipe, list[Stage | tuple[float, ...]]]] = {
    "transformer++": (TRANSFORMER, [[SHORT, LONG], (0.25, 0.5, 1, 2), [GLOBAL, LOWER], (0.5, 2), [SHORT], [SMALL]]),
    "flash": (FLASH, [(0.5, 1, 2), (2,), [LONG], [GLOBAL, LOWER], [SMALL]]),
    "flash+": ("flash", [(0.5, 1, 2)]),
    "flash-quad": ("flash", [(0.5, 1)]),
    "transformer+": ("transformer++", [(1, 2)]),
    "transformer": ("transformer++", [(1, 2)]),
    "combiner": ("transformer++", [(0.5, 1, 2)]),
    "mc-tfm++": ("transformer++", [(0.5, 1, 2), (2,), [SHORT]]),
    "performer": ("transformer++", [(0.5, 1, 2), (2,), [SHORT]])}
"""Models in the order of the search: the recipe that each begins with, or the model whose best one it is; then the
stages. Numbers are factors of the learning rate."""


def learned(model: str, recipe: Recipe, data: str) -> Row:
    """The loss of a model that was trained by a recipe, in nats per held-out token."""
    config = config_for_data({"model": model, "size": "tiny", "data": data, "out": "-", "steps": STEPS,
                              "eval_tokens": SCORED, "seed": 0, **recipe})
    train, net = config.train, new_model(config)
    objective = NextToken(config, open_data(data, "train"), open_data(data, "validation"))
    optimizer, losses = make_optimizer(parts_of(net), train), []
    for step in range(train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, train)
        batch = [torch.from_numpy(part) for part in objective.batch(step)]
        losses.append(compute_gradient(net, objective, batch, config.micro_batch_rows, train)[0])
        optimizer.step()
    n_parameters = sum(p.numel() for p in net.parameters())
    return {"loss": round(objective.evaluate(net)["loss"], 4), "train_loss": round(sum(losses[-10:]) / 10, 4),
            "n_parameters": n_parameters}


def best(model: str, among: list[Recipe] | None = None) -> Row:
    """The row of a model with the lowest loss, of all its rows or of those with some recipes."""
    return min((row for row in read_json_lines(ROWS, dict, "a row")
                if row["model"] == model and (among is None or recipe_of(row) in among)), key=lambda row: row["loss"])


def recipe_of(row: Row) -> Recipe:
    return {name: row[name] for name in FLASH}


def measure(data: str) -> None:
    """Train what has no row."""
    for model, (first, stages) in SEARCHES.items():
        recipe, tried = recipe_of(best(first)) if isinstance(first, str) else first, list[Recipe]()
        for stage in stages:
            rate = float(recipe["learning_rate"])
            for change in stage:
                each = recipe | ({"learning_rate": rate * change} if isinstance(change, int | float) else change)
                add_missing(ROWS, {"model": model, **each}, "python studies/size_rates.py --measure DATA",
                            partial(learned, model, each, data))
                tried.append(each)
            recipe = recipe_of(best(model, tried))


def table() -> str:
    """A line for each model: its best recipe and its loss."""
    lines = []
    for model in SEARCHES:
        row, n_tried = best(model), sum(other["model"] == model for other in read_json_lines(ROWS, dict, "a row"))
        lines.append([model, *(f"{row[name]:g}" for name in ("learning_rate", "warmup_steps", "clip")),
                      row["clip_scope"], f"{row['adam_beta2']:g}", f"{row['init_std']:g}", str(n_tried),
                      f"{row['loss']:.2f}"])
    head = ["model", "rate", "warm-up", "clip", "of", "beta2", "initial std", "recipes tried", "loss"]
    return markdown(head, lines, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", metavar="DATA", help="train what has no row, on this prepared text")
    parser.add_argument("--into", type=Path, help="write the table into this page")
    given = parser.parse_args()
    if given.measure:
        measure(given.measure)
    if given.into:
        fill_place(given.into, "size rates", table())


if __name__ == "__main__":
    sys.exit(exit_code(main))
