"""Recall for a person: a line for each run, and a table for each task."""

import statistics
from collections.abc import Sequence

from benchmarks import Row
from benchmarks.markdown import source_line
from benchmarks.recall.study import STUDY, best_rate
from benchmarks.recall.tasks import DIGITS, FORMS, TASKS, TEXT, Task, commonest
from lineartime.base.words import in_markdown, markdown

ABOUT = {name: (task.what, task.n_values) for name, task in TASKS.items()} | {TEXT: (FORMS[TEXT], len(DIGITS))}
"""What is asked, and how many values there are, of which a guess takes one."""
MADE_BY = {"command": "python -m benchmarks recall", "device": "cpu", "threads": 1}  # which no row says


def learning(rows: Sequence[Row], task: str) -> list[Row]:
    """The rows of models that learned a task; one that was only asked has no learning rate."""
    return [row for row in rows if row["task"] == task and row["learning_rate"] is not None]


def learned(rows: Sequence[Row], task: str) -> dict[str, list[Row]]:
    """By model, in the order of the study, the newest runs by seed at the learning rate that was
    best with the first. Runs that differ from the model's oldest in a setting are a model of
    another name."""
    oldest: dict[str, Row] = {}
    named: dict[str, dict[tuple[float, int], Row]] = {}
    for model in STUDY["models"]:
        for row in (row for row in learning(rows, task) if row["model"] == model):
            name = name_beside(row, oldest.setdefault(model, row))
            named.setdefault(name, {})[row["learning_rate"], row["seed"]] = row
    found = {}
    for name, newest in named.items():
        first = [row for (_, seed), row in newest.items() if seed == 0]
        if first:
            rate = best_rate(first)
            found[name] = sorted((row for row in newest.values() if row["learning_rate"] == rate),
                                 key=lambda row: row["seed"])
    return found


def name_beside(row: Row, oldest: Row) -> str:
    """A model's name, and behind it the settings in which a row differs from another."""
    own, other = (each["settings"] | each["training"] for each in (row, oldest))
    differ = [name for name in own | other if own.get(name) != other.get(name)]
    return ", ".join([row["model"], *(f"{name}={own.get(name, 'default')}" for name in differ)])


def accuracies(runs: Sequence[Row], length: int, n_facts: int | None = None) -> list[float]:
    """By seed, of one number of facts or the mean of all; none at a length that was refused."""
    told = [row["accuracy"][str(length)] for row in runs if str(length) in row.get("accuracy", {})]
    return [statistics.fmean(right.values()) if n_facts is None else right[str(n_facts)] for right in told]


def without_keys(task: str, n_facts: int) -> float:
    """The accuracy of who knows the values of a row, and not which belongs to which key."""
    distinct = task in TASKS and TASKS[task].distinct
    return 1 / n_facts if distinct else commonest(ABOUT[task][1], n_facts)


def sizes(rows: Sequence[Row], task: str) -> tuple[list[int], list[int]]:
    """The lengths and the numbers of facts that a task was asked at, the trained length first."""
    row = learning(rows, task)[0]
    return [times * row["length"] for times in Task.times], row["n_facts"]


def line(row: Row) -> str:
    right = "  ".join(f"{length}: {' '.join(f'{value:.2f}' for value in told.values())}"
                      for length, told in row.get("accuracy", {}).items())
    if row["learning_rate"] is None:  # a trained run, which was asked alone
        return f"{row['model']}, {row['task']}, {', '.join(map(str, row['n_facts']))} facts: {right}; a guess 0.1"
    begin = f"{row['model']}, {row['task']}, rate {row['learning_rate']:g}, seed {row['seed']}: "
    if "failed" in row:
        return begin + row["failed"]
    steps = row["curve"][-1][0]
    when = f"learned from step {row['passed']:,} on" if row["passed"] else f"not learned in {steps:,} steps"
    return f"{begin}{when}; {right}"


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """A mean, and from which to which seed where they differ: `.97 (.95-.99)`."""
    if not values:
        return "-"
    mean, least, most = (f"{value:.{digits}f}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean + (f" ({least}-{most})" if least != most else "")


def section(rows: Sequence[Row], task: str, pictures: Sequence[str] = ()) -> str:
    """A task's table and its pictures, in Markdown."""
    own = learning(rows, task)
    if not own:
        return "Not measured yet."
    (what, n_values), (lengths, n_facts) = ABOUT[task], sizes(rows, task)
    told = (f"Accuracy, {what}: by number of facts in rows of {lengths[0]} tokens, then in longer rows over all "
            f"numbers of facts. The mean of the seeds, and their range. A guess is right {1 / n_values:.2g} of the "
            "time.")
    head = ["model", "learned from step", *(f"{n} facts" for n in n_facts),
            *(f"{length} tokens" for length in lengths[1:])]
    lines = [[in_markdown(name), ", ".join(f"{run['passed']:,}" if run["passed"] else "never" for run in runs),
              *(spread_text(accuracies(runs, lengths[0], n)) for n in n_facts),
              *(spread_text(accuracies(runs, length)) for length in lengths[1:])]
             for name, runs in learned(rows, task).items()]
    return "\n\n".join([told, markdown(head, lines, 1), *pictures, source_line([row | MADE_BY for row in own])])
