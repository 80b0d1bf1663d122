"""Recall for a person: a line for each run, a table and a picture for each task."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.recall.measure import N_DEPTHS, TIMES_LONGER, Row
from benchmarks.recall.study import TEXT, best_rate, read_study
from benchmarks.recall.tasks import TASKS, commonest
from benchmarks.recall.text import CHANCE, DIGITS, WHAT
from lineartime.markdown import in_markdown
from lineartime.plot import COLOURS, Line, Panel, Picture, draw

ABOUT = {name: (task.what, task.chance) for name, task in TASKS.items()} | {TEXT: (WHAT, CHANCE)}
"""What is asked, and the accuracy of a guess."""
DRAWN = len(COLOURS)
"""Models in one picture of curves. Where more have rows, those of the study's list `drawn` are."""
ANYWHERE = ("needle", "induction", TEXT)
"""Tasks whose facts may stand anywhere in a row."""


class Learned(NamedTuple):
    """A model on a task: its runs at the learning rate that was best with the first seed."""

    model: str
    rows: list[Row]

    def accuracy(self, length: int, n_facts: int | None = None) -> list[float]:
        """By seed: of one number of facts, or the mean of all; none where the model takes no row of this length."""
        told = [row["accuracy"][str(length)] for row in self.rows if str(length) in row.get("accuracy", {})]
        return [statistics.fmean(right.values()) if n_facts is None else right[str(n_facts)] for right in told]

    @property
    def passed(self) -> list[int | None]:
        """By seed: the step from which on the task was learned."""
        return [row["passed"] for row in self.rows]


def learned(rows: Sequence[Row], task: str) -> list[Learned]:
    """The models that have rows of a task, in the order of the study; a later row takes the place of an earlier one."""
    newest = {(row["model"], row["learning_rate"], row["seed"]): row for row in rows if row["task"] == task}
    found = []
    for model in read_study()["models"]:
        own = [row for (name, _, _), row in newest.items() if name == model]
        first = [row for row in own if row["seed"] == 0]
        if first:
            rate = best_rate(first)
            best = [row for row in own if row["learning_rate"] == rate]
            found.append(Learned(model, sorted(best, key=lambda row: row["seed"])))
    return found


def without_keys(task: str, n_facts: int) -> float:
    """The accuracy of who knows the values of a row, and not which belongs to which key."""
    if task == TEXT:
        return commonest(len(DIGITS), n_facts)
    return 1 / n_facts if TASKS[task].distinct else commonest(TASKS[task].n_values, n_facts)


def sizes(rows: Sequence[Row], task: str) -> tuple[list[int], list[int]]:
    """The lengths and the numbers of facts that a task was asked at, the trained length first."""
    row = next(row for row in rows if row["task"] == task)
    return [times * row["length"] for times in TIMES_LONGER], row["n_facts"]


def line(row: Row) -> str:
    """A run in a line."""
    right = "  ".join(f"{length}: {' '.join(f'{value:.2f}' for value in told.values())}"
                      for length, told in row.get("accuracy", {}).items())
    if row["learning_rate"] is None:  # a trained run, which was asked alone
        return f"{row['model']}, {row['task']}: {right}"
    begin = f"{row['model']}, {row['task']}, rate {row['learning_rate']:g}, seed {row['seed']}: "
    if "failed" in row:
        return begin + row["failed"]
    steps = row["curve"][-1][0]
    when = f"learned from step {row['passed']:,} on" if row["passed"] else f"not learned in {steps:,} steps"
    return f"{begin}{when}; {right}"


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """A mean, and from which to which seed where they differ: `.97 (.95-.99)`."""
    def text(value: float) -> str:
        return f"{value:.{digits}f}"

    if not values:
        return "-"
    least, most = text(min(values)), text(max(values))
    return text(statistics.fmean(values)) + (f" ({least}-{most})" if least != most else "")


def grid(rows: Sequence[Row], task: str) -> list[list[str]]:
    """A task's table: its heading, and a line for each model."""
    lengths, n_facts = sizes(rows, task)
    lines = [["model", "learned from step", *(f"{n} facts" for n in n_facts),
              *(f"{length} tokens" for length in lengths[1:])]]
    for each in learned(rows, task):
        lines.append([each.model, ", ".join("never" if step is None else f"{step:,}" for step in each.passed),
                      *(spread_text(each.accuracy(lengths[0], n)) for n in n_facts),
                      *(spread_text(each.accuracy(length)) for length in lengths[1:])])
    return lines


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The tables of all tasks that have rows, as aligned text."""
    lines = []
    for task, (what, chance) in ABOUT.items():
        if any(row["task"] == task for row in rows):
            table = grid(rows, task)
            widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
            lines += ["", f"{task}: {what}; chance {chance:.2g}. Accuracy after training on rows of "
                          f"{sizes(rows, task)[0][0]} tokens, and in longer ones"]
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
                      for cells in table]
    return lines


def markdown(rows: Sequence[Row], task: str) -> str:
    """A task's table in Markdown."""
    head, *lines = grid(rows, task)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *lines))


def picture_of(rows: Sequence[Row], task: str) -> Picture:
    """Accuracy by number of facts, by length, and by step, each model's mean over its seeds with the range."""
    (what, chance), models, (lengths, n_facts) = ABOUT[task], learned(rows, task), sizes(rows, task)

    names = [each.model for each in models]
    if len(names) > DRAWN:
        names = read_study()["lists"]["drawn"]
    models = sorted((each for each in models if each.model in names), key=lambda each: names.index(each.model))

    def point(place: float, values: Sequence[float]) -> tuple[float, ...]:
        return (place, statistics.fmean(values), min(values), max(values))

    by_number, by_length, by_step = [], [], []
    for each in models:
        style = {"color": COLOURS[names.index(each.model)]}
        by_number.append(Line(each.model, tuple(point(n, values) for n in n_facts
                                                if (values := each.accuracy(lengths[0], n))), style))
        by_length.append(Line(each.model, tuple(point(length, values) for length in lengths
                                                if (values := each.accuracy(length))), style))
        by_step.append(Line(each.model, tuple((step, right) for step, _, right in each.rows[0]["curve"]), style))

    known = [without_keys(task, n) for n in n_facts]
    steps = [step for line in by_step for step, _ in line.points] or [0]

    def without(places: Sequence[float], heights: Sequence[float]) -> Line:
        """Of who knows the values and not their keys; above the models, which often end there."""
        name = "1/n" if task in TASKS and TASKS[task].distinct else "the row's commonest value"
        return Line(name, tuple(zip(places, heights, strict=True)),
                    {"color": "black", "linewidth": 1.6, "marker": "", "linestyle": (0, (1, 2)), "zorder": 3})

    mean = statistics.fmean(known)
    panels = (
        Panel(f"in rows of {lengths[0]} tokens", "facts in the row (n)", "accuracy",
              (*by_number, without(n_facts, known)), contexts=tuple((n, str(n)) for n in n_facts)),
        Panel("in longer rows, all numbers", "tokens in the row", "accuracy",
              (*by_length, without(lengths, [mean] * len(lengths))),
              contexts=tuple((length, f"{length:,}") for length in lengths)),
        Panel("while it learns, all numbers", "step", "accuracy",
              (*by_step, without([min(steps), max(steps)], [mean, mean]))))
    return Picture(
        f"Recall, {what}. Mean accuracy of the answers over the seeds at the best learning rate, with the "
        "range of the seeds; the curves over steps are of the first seed.",
        tuple(replace(panel, level=chance, level_name="a guess") for panel in panels))


def section(rows: Sequence[Row], task: str, show: Callable[[str, Picture], str]) -> str:
    """A task's table and pictures in Markdown. show: draws a picture under a file name, and returns the link to it."""
    own = [row for row in rows if row["task"] == task]
    if not own:
        return "Not measured yet."
    what, chance = ABOUT[task]
    lengths, _ = sizes(rows, task)
    pictures = {f"recall-{task}.png": picture_of(rows, task)}
    if task in ANYWHERE:
        pictures[f"recall-{task}-by-place.png"] = depth_picture_of(rows, task)
    commits = ", ".join(dict.fromkeys(str(row["commit"])[:10] for row in own))
    told = (f"Accuracy, {what}: of rows of {lengths[0]} tokens by number of facts, and of longer ones with all "
            f"numbers; mean of the seeds and their range. A guess has {chance:.2g}.")
    return "\n\n".join([told, markdown(rows, task), *(f"![{picture.caption}]({show(name, picture)})"
                                                     for name, picture in pictures.items()),
                        f"<sub>`python -m benchmarks reproduce recall`; {len(own)} runs; commits "
                        f"{in_markdown(commits)}.</sub>"])


def depth_picture_of(rows: Sequence[Row], task: str) -> Picture:
    """Accuracy by length of the row and place of the fact in it, a heat map for each model: the mean of its seeds."""
    lengths, _ = sizes(rows, task)
    panels = []
    for each in learned(rows, task):
        told = [row["depth"] for row in each.rows if "depth" in row]
        heat = []
        for length in map(str, lengths):
            by_seed = [depth[length] for depth in told if length in depth] or [[None] * N_DEPTHS]
            columns = [[share for share in column if share is not None] for column in zip(*by_seed, strict=True)]
            heat.append((length, tuple(statistics.fmean(column) if column else None for column in columns)))
        panels.append(Panel(each.model, "place of the fact", "tokens in the row", heat=tuple(heat)))
    what, chance = ABOUT[task]
    return Picture(f"Recall, {what}, by length of the row and place of the fact in it, all numbers of facts. A guess "
                   f"has {chance:.2g}. White: no fact stands there, or the model takes no row of this length.",
                   tuple(panels))


def draw_pictures(rows: Sequence[Row], path: Path) -> list[Path]:
    """Draw the curves of the first task that has rows, and by place where facts may be anywhere, in a second file named
    after the first; returns the files. Raises ResourceError."""
    task = next(name for name in ABOUT if any(row["task"] == name for row in rows))
    draw(picture_of(rows, task), path)
    if task not in ANYWHERE:
        return [path]
    by_place = path.with_name(f"{path.stem}-by-place.png")
    draw(depth_picture_of(rows, task), by_place)
    return [path, by_place]
