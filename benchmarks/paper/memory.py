"""The tables `memory` and `memory_texts`: what a long memory is worth in nats per token.

A difference is a model's loss less another's, of runs of one seed, which read the same text in the
same order: below 0 the model is better. Losses are a data frame by row and seed, with a column for
each place that is compared: a context, or a number of tokens trained on."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.markdown import listed, tokens
from benchmarks.paper.results import COLUMNS, Record, Results, numbers_of, of_cell, step_speedups
from benchmarks.paper.tables import read_toml
from lineartime.base.words import markdown

OWN_REFERENCE = dict.fromkeys(("Transformer++, width 256", "FLASH+ without local_key_conv, width 256"),
                              "FLASH, width 256")
"""Rows that are compared with another row than the table's reference."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of a 95 % interval for 2, 3, ... seeds; for more than 10 a little too wide."""
WORDS = read_toml("words")["memory"]
NOT_YET, ONE_SEED = "Not measured yet.", "one seed, no claim"
Pairs = Sequence[tuple[str, str]]  # rows, each with the one it is compared with


def by_context(record: Record) -> dict[int, float]:
    """Losses of the same tokens at each context, in tokens."""
    use = record.get("context_use", {"contexts": (), "losses": ()})
    return dict(zip(use["contexts"], use["losses"], strict=True))


def by_tokens(record: Record) -> dict[int, float]:
    """Losses of a part of the split by the tokens trained on."""
    tokens_per_step = record["tokens"] / numbers_of(record)[COLUMNS["train"].index("steps")]
    return {round(step * tokens_per_step): loss for step, loss in record["curve"]}


def losses_of(results: Results, told: Callable[[Record], Mapping[Any, float]]) -> pd.DataFrame:
    """What records tell, by row and seed, with the places in order."""
    found = {(row, seed): told(record) for (row, _, seed), record in results.trained.record.items()}
    places = sorted({place for each in found.values() for place in each})
    index = pd.MultiIndex.from_arrays([*zip(*found, strict=True)] or [(), ()], names=["row", "seed"])
    return pd.DataFrame(list(found.values()), index=index, columns=places, dtype=float)


def paired(losses: pd.DataFrame, row: str, base: str) -> pd.DataFrame:
    """A row's losses less those of its base, of the seeds that both have."""
    ours, theirs = (of_cell(losses, name).droplevel("row") for name in (row, base))
    return (ours - theirs).dropna(how="all")


def compared(results: Results) -> Pairs:
    """Rows, each with the table's reference, or with that of its width."""
    references = (results.table.reference, *OWN_REFERENCE.values())
    return [(row, OWN_REFERENCE.get(row, str(results.table.reference))) for row in results.rows
            if row not in references]


def half_width(values: "pd.Series[float]") -> float:
    """Half of the 95 % interval of a mean (Student's t); infinite for a single value."""
    n = len(values)
    return T_95[min(n, 10) - 2] * float(values.std()) / math.sqrt(n) if n > 1 else math.inf


def told_apart(values: "pd.Series[float]") -> bool:
    """Whether the interval of the mean leaves 0 out."""
    return abs(values.mean()) > half_width(values)


def difference_text(by_seed: Any) -> str:
    """"-0.130 ± 0.140": the mean and its 95 % interval, bold where that leaves 0 out."""
    values = pd.Series(by_seed, dtype=float).dropna()
    if values.empty:
        return "-"
    text = f"{values.mean():+.3f}" + (f" ± {half_width(values):.3f}" if len(values) > 1 else "")
    return f"**{text}**" if told_apart(values) else text


def mean_text(values: "pd.Series[float]") -> str:
    return f"{values.mean():.3f}" if values.notna().any() else "-"


def verdict(values: "pd.Series[float]") -> str:
    side = "ahead" if values.mean() < 0 else "behind"
    if len(values) < 2:
        return ONE_SEED
    if told_apart(values):
        return side
    agree = ((values < 0) == (side == "ahead")).all()
    return "cannot be told apart" + (f", all {len(values)} seeds {side}" if agree else "")


def change(first: "pd.Series[float]", moved: "pd.Series[float]") -> str:
    """What the seeds say of a difference that was `first` and has moved since."""
    if len(moved) < 2:
        return ONE_SEED
    if not told_apart(moved):
        return "cannot be told"
    return "grows" if (first.mean() < 0) == (moved.mean() < 0) else "fades"


def label(results: Results, row: str, base: str) -> str:
    return row if base == results.table.reference else f"{row}, to {base}"


def grid(head: Sequence[str], lines: Sequence[Sequence[str]], n_words: int = 1) -> str:
    return markdown(head, lines, n_words) if lines else NOT_YET


def whole_part(results: Results) -> str:
    losses, lines = losses_of(results, lambda record: {"": record["held_out"]["loss"]}), []
    for row, base in compared(results):
        found = paired(losses, row, base).get("", pd.Series(dtype=float))
        if len(found):
            lines.append([label(results, row, base), verdict(found), difference_text(found),
                          ", ".join(f"{each:+.3f}" for each in found)])
    return grid(["model", "to FLASH", "difference", "each seed"], lines, 2)


def at_equal_time(results: Results, row: str, base: str) -> tuple[float, float, "pd.Series[float]", "pd.Series[float]"]:
    """The steps that a row and its base have made when the first of the two ends, by the median
    time of a step, and their losses there by seed, interpolated between evaluations; no losses
    before a curve's first point, or where steps were not timed side by side."""
    # The base's time of a step over the row's.
    speed = {name: speed for (name, _), speed in step_speedups(results, base).value.items()}.get(row, math.nan)
    ours, theirs = ({key[-1]: record["curve"] for key, record in of_cell(results.trained, name).record.items()}
                    for name in (row, base))
    last, base_last = (max((curve[-1][0] for curve in each.values()), default=0) for each in (ours, theirs))
    base_step = min(last / speed, base_last)
    steps = base_step * speed, base_step
    read = []
    for step, curves in zip(steps, (ours, theirs), strict=True):
        points = {seed: np.array(curve).T for seed, curve in curves.items() if curve[0][0] <= step}
        read.append(pd.Series({seed: float(np.interp(step, *each)) for seed, each in points.items()}, dtype=float))
    return *steps, *read


def time_part(results: Results) -> str:
    """Losses of the scored part at equal time, and differences at equal time and at equal steps."""
    curves, lines = losses_of(results, by_tokens), []
    for row, base in compared(results):
        steps, base_steps, ours, theirs = at_equal_time(results, row, base)
        found = (ours - theirs).dropna()
        if len(found):
            lines.append([label(results, row, base), f"{steps:,.0f}", f"{base_steps:,.0f}",
                          mean_text(ours[found.index]), mean_text(theirs[found.index]), difference_text(found),
                          difference_text(paired(curves, row, base).iloc[:, -1])])
    return grid(["model", "its steps", "FLASH's", "its loss", "FLASH's", "difference, equal time",
                 "difference, equal steps"], lines)


def difference_part(results: Results, losses: pd.DataFrame, head: Sequence[str], rows: Pairs) -> str:
    """Of each base a line with its losses, and below it the rows' differences, at every place."""
    lines = []
    for base in dict.fromkeys(base for _, base in rows):
        below = [(row, paired(losses, row, base)) for row, own in rows if own == base]
        below = [(row, found) for row, found in below if found.notna().any(axis=None)]
        if below:
            own = of_cell(losses, base)
            lines.append([f"*{base}, its loss*", *(mean_text(own[place]) for place in losses)])
            lines += [[label(results, row, base), *(difference_text(found[place]) for place in losses)]
                      for row, found in below]
    return grid(["model", *head], lines)


def columns_part(results: Results) -> str:
    losses = results.trained.loss.unstack("column").reindex(columns=results.columns)
    return difference_part(results, losses, list(losses), compared(results))


def gains(results: Results) -> str:
    """What each model gains over its own loss at the shortest context."""
    losses = losses_of(results, by_context)
    lines = [[row, *(difference_text(own.iloc[:, 0] - own[context]) for context in list(losses)[1:])]
             for row in results.rows for own in [of_cell(losses, row)] if own.notna().any(axis=None)]
    return f"{WORDS['gains']}\n\n{grid(['model', *map(tokens, list(losses)[1:])], lines)}"


def tokens_part(results: Results) -> str:
    """Differences of the scored part by tokens trained on, and what the second half moved."""
    losses, lines = losses_of(results, by_tokens), []
    points = list(losses) or [0]
    half = max((point for point in points if 2 * point <= points[-1]), default=points[0])
    shown = points[::-1][::max(1, len(points) // 5)][::-1]
    for row, base in compared(results):
        found = paired(losses, row, base)
        if len(found):
            moved = (found[points[-1]] - found[half]).dropna()
            lines.append([label(results, row, base), change(found[half], moved),
                          *(difference_text(found[point]) for point in shown), difference_text(moved)])
    return grid(["model", "second half", *(f"{point / 1e6:.1f} M" for point in shown),
                 f"from {half / 1e6:.1f} M to the end"], lines, 2)


def parts(results: Results) -> list[str]:
    """The study's tables in Markdown, each under what it is."""
    contexts = losses_of(results, by_context)
    uses = [record["context_use"] for record in results.trained.record if "context_use" in record]
    scored = listed(f"{use['n_tokens']:,} tokens of {len(use['documents'])} documents" for use in uses) or "tokens"
    trained = listed(f"{column.context:,}" for column in results.table.columns.values())
    about_contexts = WORDS["contexts"].format(scored=scored, trained=trained)
    return [f"{WORDS['differences']} {WORDS['one_seed']}", whole_part(results),
            WORDS["equal_time"], time_part(results),
            about_contexts, difference_part(results, contexts, [*map(tokens, contexts)], compared(results)),
            gains(results),
            WORDS["fades"], tokens_part(results)]
