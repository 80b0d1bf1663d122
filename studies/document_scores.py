"""The scores of `documents.py`, and their tables."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score

from benchmarks import Row
from benchmarks.paper.memory import difference_text
from benchmarks.recall.report import spread_text
from lineartime.markdown import markdown
from studies.labelled_texts import TASKS, Passages

FROZEN = ", frozen"
"""Behind the name of a model whose vectors are not trained."""
MEASURES = {"accuracy": "accuracy", "macro_f1": "macro F1"}
"""The scores of a row and their names in tables."""
EQUAL_SIZES = ("FLASH of 1.2 M, frozen", "Transformer++ of 1.1 M, frozen")
SECOND_READS = {512: "whole", 2048: "whole", 8192: "windows of 512", 32768: "windows of 512"}
"""Two models that a table compares, of which the first reads whole passages; and how the second reads, by length."""
INTERVAL = "mean over the seeds with its 95 % interval"


def classified(features: dict[str, Any], found: Passages, strengths: Sequence[float], max_iter: int) -> Row:
    """Scores on the test, and the strength of the regularisation, which is chosen on the validation."""
    truth = {split: [label for _, label in each] for split, each in found.items()}
    models = [LogisticRegression(C=c, max_iter=max_iter).fit(features["train"], truth["train"]) for c in strengths]
    best = max(models, key=lambda model: model.score(features["validation"], truth["validation"]))
    said = best.predict(features["test"]).tolist()
    return {"accuracy": float(accuracy_score(truth["test"], said)), "n_test": len(said), "regularisation": best.C,
            "macro_f1": float(f1_score(truth["test"], said, average="macro", zero_division=0)),
            "n_features": features["train"].shape[1]}


def tables(rows: Sequence[Row]) -> str:
    """For each task a table of accuracies, and one of both scores' differences from TF-IDF, paired by seed; then one of
    FLASH's from the Transformer++ of its size."""
    parts = []
    for name, task in TASKS.items():
        own = [row for row in rows if row["task"] == name]
        if not own:
            continue
        sides = sorted(dict.fromkeys((row["model"], row.get("reading", "whole")) for row in own),
                       key=lambda side: (side[0] != "TF-IDF", side))
        accuracies = [[*side, *(spread_text([*by_seed(own, *side, length).values()]) for length in task.lengths)]
                      for side in sides]
        less = [[*side, label, *(less_text(own, side, sides[0], length, score) for length in task.lengths)]
                for score, label in MEASURES.items() for side in sides[1:]]
        lengths = [f"{length:,} tokens" for length in task.lengths]
        parts += [f"**{name.capitalize()}**, {own[0]['n_labels']} labels, {counts(own, 'n_train')} passages to train "
                  f"on, {counts(own, 'n_test')} to test; accuracy, mean and range of the seeds.",
                  markdown(["model", "how it reads", *lengths], accuracies)]
        if less:
            parts += [f"Less the score of TF-IDF on the same passages, {INTERVAL}; bold where that leaves 0 out.",
                      markdown(["model", "how it reads", "score", *lengths], less)]
    first, second = EQUAL_SIZES
    if {*EQUAL_SIZES} <= {row["model"] for row in rows}:
        less = [[name, label, *(less_text([row for row in rows if row["task"] == name], (first, "whole"),
                                          (second, reading), length, score)
                                for length, reading in SECOND_READS.items())]
                for name in TASKS for score, label in MEASURES.items()]
        lengths = [f"{length:,} tokens" + ("" if reading == "whole" else f", {reading}")
                   for length, reading in SECOND_READS.items()]
        parts += [f"**{first.removesuffix(FROZEN)} less {second.removesuffix(FROZEN)}**, both frozen, on the same "
                  f"passages; windows are those of the Transformer++. {INTERVAL.capitalize()}.",
                  markdown(["task", "score", *lengths], less)]
    return "\n\n".join(parts)


def less_text(rows: Sequence[Row], side: tuple[str, str], other: tuple[str, str], length: int, score: str) -> str:
    """A score of one side less the other's, paired by seed. A side is a model and how it reads."""
    ours, theirs = (pd.Series(by_seed(rows, *each, length, score), dtype=float) for each in (side, other))
    return difference_text(ours - theirs)


def by_seed(rows: Sequence[Row], model: str, reading: str, length: int, score: str = "accuracy") -> dict[int, float]:
    """A score of one task by the seed that has drawn its passages."""
    return {row["seed"]: row[score] for row in rows
            if (row["model"], row.get("reading", "whole"), row["tokens"]) == (model, reading, length)}


def counts(rows: Sequence[Row], field: str) -> str:
    """The least and the most of the seeds."""
    values = sorted({row[field] for row in rows})
    return f"{values[0]:,}" + (f" to {values[-1]:,}" if values[1:] else "")
