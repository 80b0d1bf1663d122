"""The studies of text, the tables `memory` and `memory_texts`: what a long memory is worth in nats per token, compared
seed by seed.

A difference is a model's loss less another's, of runs of one seed, which read the same text in the same order: below 0
the model is better.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks.markdown import listed, tokens
from benchmarks.paper.records import Record
from benchmarks.paper.results import Results, of_cell, step_speedups
from benchmarks.paper.scales import Cell
from lineartime.markdown import markdown

LOCAL = "FLASH (LocalOnly)"
OWN_REFERENCE = dict.fromkeys(("Transformer++, width 256", "FLASH+, width 256"), "FLASH, width 256")
"""Rows that are not compared with the table's reference, and the row of their width that they are compared with."""
KINDS = ("token", "bigram", "rare bigram")
"""Kinds of `benchmarks.recurrence` that are shown."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of a 95 % interval for 2, 3, ... seeds; for more than 10 the last is a little too wide."""
DIFFERENCES = ("**Differences to FLASH, whole split.** Nats per token, paired by seed: the model's loss less FLASH's, "
               "below 0 the model is better. Here and below ± is the 95 % interval of the mean over the seeds "
               "(Student's t), bold where it leaves 0 out; chance alone makes one in twenty bold.")
NOT_YET, ONE_SEED = "Not measured yet.", "one seed, no claim"
BySeed = Mapping[int, float]
Losses = Mapping[str, BySeed]
"""Nats per token by row and seed."""


def of_whole_split(record: Record) -> dict[str, float]:
    """The loss at the end of training."""
    return {"": record["held_out"]["loss"]}


def by_context(record: Record) -> dict[int, float]:
    """Losses of the same tokens at each context, in tokens."""
    use = record.get("context_use", {"contexts": (), "losses": ()})
    return dict(zip(use["contexts"], use["losses"], strict=True))


def by_class(record: Record) -> dict[tuple[str, str], float]:
    """Losses by the kind of what recurs and where it was seen before; none of a class without tokens."""
    classes = record.get("recurrence", {"classes": ()})["classes"]
    return {(each["kind"], each["seen"]): each["loss"] for each in classes
            if each["kind"] in KINDS and each["loss"] is not None}


def by_tokens(record: Record) -> dict[int, float]:
    """Losses of a part of the split by the tokens trained on."""
    tokens_per_step = record["tokens"] / record["curve"][-1][0]
    return {round(step * tokens_per_step): loss for step, loss in record["curve"]}


def losses_at(results: Results, told: Callable[[Record], Mapping[Any, float]]) -> dict[Any, Losses]:
    """Losses at each place that records tell of."""
    found: dict[Any, dict[str, dict[int, float]]] = {}
    for (row, _, seed), record in results.trained.record.items():
        for place, loss in told(record).items():
            found.setdefault(place, {}).setdefault(row, {})[seed] = loss
    return {**found}


def compared(results: Results) -> list[tuple[str, str]]:
    """Rows, each with the one it is compared with: the table's reference, or that of its width."""
    references = (results.table.reference, *OWN_REFERENCE.values())
    return [(row, OWN_REFERENCE.get(row, str(results.table.reference))) for row in results.rows
            if row not in references]


def compared_with_local(results: Results) -> list[tuple[str, str]]:
    """Rows, each with FLASH's local half alone, but for those of another width."""
    others = (LOCAL, *OWN_REFERENCE, *OWN_REFERENCE.values())
    return [(row, LOCAL) for row in results.rows if row not in others]


def differences(ours: BySeed, theirs: BySeed) -> dict[int, float]:
    """Ours less theirs, of the seeds that both have."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def paired(losses: Losses, row: str, base: str) -> dict[int, float]:
    """A row's losses less those of its base."""
    return differences(losses.get(row, {}), losses.get(base, {}))


def half_width(values: Iterable[float]) -> float:
    """Half of the 95 % interval of a mean (Student's t); infinite for a single value."""
    each = list(values)
    return T_95[min(len(each), 10) - 2] * stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf


def told_apart(values: BySeed) -> bool:
    """Whether the interval of the mean leaves 0 out."""
    return abs(fmean(values.values())) > half_width(values.values())


def verdict(found: BySeed) -> str:
    """What the seeds say of a difference."""
    side = "ahead" if fmean(found.values()) < 0 else "behind"
    if len(found) < 2:
        return ONE_SEED
    if told_apart(found):
        return side
    agree = all((each < 0) == (side == "ahead") for each in found.values())
    return "cannot be told apart" + f", all {len(found)} seeds {side}" * agree


def change(first: BySeed, moved: BySeed) -> str:
    """What the seeds say of a difference that was `first` and has moved since."""
    if len(moved) < 2:
        return ONE_SEED
    if not told_apart(moved):
        return "cannot be told"
    return "grows" if (fmean(first.values()) < 0) == (fmean(moved.values()) < 0) else "fades"


def difference_text(found: BySeed) -> str:
    """"-0.130 ± 0.140": the mean and its 95 % interval, bold where that leaves 0 out; without one for one seed."""
    if not found:
        return "-"
    text = signed(fmean(found.values()))
    if len(found) > 1:
        text += f" ± {half_width(found.values()):.3f}"
    return f"**{text}**" if told_apart(found) else text


def signed(nats: float) -> str:
    return f"{nats:+.3f}"


def mean_text(losses: BySeed) -> str:
    return f"{fmean(losses.values()):.3f}" if losses else "-"


def label(results: Results, row: str, base: str) -> str:
    """The row, and its base where that is not the table's reference."""
    return row if base in (results.table.reference, LOCAL) else f"{row}, to {base}"


def read_at(step: float, curves: Mapping[int, Sequence[Sequence[float]]]) -> dict[int, float]:
    """Losses at a step by seed, linear between two evaluations; none before the first."""
    found = {}
    for seed, curve in curves.items():
        steps, losses = zip(*curve, strict=True)
        if steps[0] <= step:
            found[seed] = float(np.interp(step, steps, losses))
    return found


def at_equal_time(results: Results, row: str, base: str) -> tuple[float, float, BySeed, BySeed]:
    """The steps that a row and its base have made when the first of them ends, and their losses there; no losses where
    steps were not timed side by side.

    The time of a run is its steps times the median time of one."""
    speeds = {name: speed for (name, _), speed in step_speedups(results, base).value.items()}
    speed = speeds.get(row, math.nan)  # the base's time of a step over the row's
    ours, theirs = ({key[-1]: record["curve"] for key, record in of_cell(results.trained, name).record.items()}
                    for name in (row, base))
    last, base_last = (max((curve[-1][0] for curve in each.values()), default=0) for each in (ours, theirs))
    base_step = min(last / speed, base_last)
    return base_step * speed, base_step, read_at(base_step * speed, ours), read_at(base_step, theirs)


def grid(head: Sequence[str], lines: Sequence[Sequence[str]], n_words: int = 1) -> str:
    return markdown(head, lines, n_words) if lines else NOT_YET


def whole_part(results: Results) -> str:
    """Differences of the whole split: verdict, interval and seeds."""
    losses, lines = losses_at(results, of_whole_split).get("", {}), []
    for row, base in compared(results):
        if found := paired(losses, row, base):
            lines.append([label(results, row, base), verdict(found), difference_text(found),
                          ", ".join(map(signed, found.values()))])
    return grid(["model", "to FLASH", "difference", "each seed"], lines, 2)


def time_part(results: Results) -> str:
    """Losses of the scored part at equal time, and differences at equal time and at equal steps."""
    curves, lines = losses_at(results, by_tokens), []
    for row, base in compared(results):
        steps, base_steps, ours, theirs = at_equal_time(results, row, base)
        if found := differences(ours, theirs):
            both = [mean_text({seed: each[seed] for seed in found}) for each in (ours, theirs)]
            lines.append([label(results, row, base), f"{steps:,.0f}", f"{base_steps:,.0f}", *both,
                          difference_text(found), difference_text(paired(curves[max(curves)], row, base))])
    return grid(["model", "its steps", "FLASH's", "its loss", "FLASH's", "difference, equal time",
                 "difference, equal steps"], lines)


def difference_part(results: Results, found: Mapping[Any, Losses], head: Mapping[Any, str],
                    rows: Sequence[tuple[str, str]]) -> str:
    """Of each base a line with its losses, and below it the rows' differences; places as `head` names them."""
    lines = []
    for base in dict.fromkeys(base for _, base in rows):
        below = [(row, [paired(found[place], row, base) for place in head]) for row, own in rows if own == base]
        if any(any(each) for _, each in below):
            lines.append([f"*{base}, its loss*", *(mean_text(found[place].get(base, {})) for place in head)])
            lines += [[label(results, row, base), *map(difference_text, each)] for row, each in below if any(each)]
    return grid(["model", *head.values()], lines)


def columns_part(results: Results) -> str:
    """Differences of the whole split in each column."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for (row, column, seed), loss in results.trained.loss.items():
        found.setdefault(column, {}).setdefault(row, {})[seed] = loss
    return difference_part(results, found, {column: column for column in results.columns if column in found},
                           compared(results))


def context_part(results: Results) -> str:
    """Differences by context."""
    found = losses_at(results, by_context)
    return difference_part(results, found, {context: tokens(context) for context in sorted(found)}, compared(results))


def gain_part(results: Results) -> str:
    """What each model gains over its own loss at the shortest context."""
    found, lines = losses_at(results, by_context), []
    shortest, *longer = sorted(found) or [0]
    for row in results.rows:
        gains = [differences(found[shortest].get(row, {}), found[context].get(row, {})) for context in longer]
        if any(gains):
            lines.append([row, *map(difference_text, gains)])
    return grid(["model", *map(tokens, longer)], lines)


def class_part(results: Results, rows: Sequence[tuple[str, str]]) -> str:
    """Differences by recurrence class."""
    found = losses_at(results, by_class)
    return difference_part(results, found, {place: f"{place[0]}, {place[1]}" for place in found}, rows)


def tokens_part(results: Results) -> str:
    """Differences of the scored part by tokens trained on, and how far the second half of training moved them."""
    found = losses_at(results, by_tokens)
    points, lines = sorted(found) or [0], []
    half = max((point for point in points if 2 * point <= points[-1]), default=points[0])
    shown = points[::-1][::max(1, len(points) // 5)][::-1]
    for row, base in compared(results):
        first, last = (paired(found.get(point, {}), row, base) for point in (half, points[-1]))
        if moved := differences(last, first):
            lines.append([label(results, row, base), change(first, moved),
                          *(difference_text(paired(found[point], row, base)) for point in shown),
                          difference_text(moved)])
    return grid(["model", "second half", *(f"{point / 1e6:.1f} M" for point in shown),
                 f"from {half / 1e6:.1f} M to the end"], lines, 2)


def missing(results: Results) -> list[str]:
    """The runs of the scale that have no row with all evaluations: "FLASH, seed 1, 2"."""
    records, lines = dict(results.trained.record.items()), []
    for row, column in results.table.cells[results.scale.name]:
        seeds = [str(seed) for seed in Cell(results.table, row, column, results.scale).seeds
                 if not results.table.evaluations.keys() <= records.get((row, column, seed), {}).keys()]
        lines += [f"{row}, seed {', '.join(seeds)}"] if seeds else []
    return lines


def scored_words(results: Results) -> str:
    """What was scored at every context, and the context of training."""
    uses = [record["context_use"] for record in results.trained.record if "context_use" in record]
    of = listed(f"{use['n_tokens']:,} tokens of {len(use['documents'])} documents" for use in uses) or "tokens"
    trained = listed(f"{column.context:,}" for column in results.table.columns.values())
    return f"The same {of} at each context, of models trained at {trained}"


def parts(results: Results) -> list[str]:
    """The study's tables in Markdown, each under what it is."""
    left = missing(results)
    return [
        *([f"Not measured yet, or not evaluated: {'; '.join(left)}."] if left else []),
        f"{DIFFERENCES} One seed has no interval and claims nothing.",
        whole_part(results),
        "**Equal time.** Losses of the part of the split that is scored during training. The time of a run is its "
        "steps times the median time of one, timed side by side. A model that is slower than FLASH is read at the step "
        "it has reached when FLASH ends; where it is faster, FLASH is read at the step it has reached when the model "
        "ends; between two evaluations on a straight line. What is read before its end has a learning rate that is "
        "still high: trained for that time alone it would be better.",
        time_part(results),
        f"**Loss by context, differences to FLASH.** {scored_words(results)}.",
        context_part(results),
        "**Gain from context.** The same losses: each model's at the shortest context less its own at a longer one, "
        "above 0 the longer context helps.",
        gain_part(results),
        "**Loss by recurrence, differences to FLASH.** A token, or two neighbouring ones (a bigram), that were in "
        "their document before: in the same chunk, in earlier chunks of the row only, or not. What a long memory "
        "holds must show under \"in earlier chunks only\". A rare bigram makes up at most 10 of a million in the "
        "training split.",
        class_part(results, compared(results)),
        "**Loss by recurrence, differences to FLASH (LocalOnly), which has no linear half.**",
        class_part(results, compared_with_local(results)),
        "**Does the difference to FLASH fade?** By tokens trained on, of the part of the split that is scored during "
        "training. It fades, or grows, where the interval of what the second half of training added leaves 0 out.",
        tokens_part(results)]
