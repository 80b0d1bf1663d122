"""Goals (`lineartime/benchmark/goals.toml`) beside what the rows say was reached."""

import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.benchmark import Row
from lineartime.benchmark.markdown import kind_text, markdown, number, tokens, unique, without_repeats
from lineartime.benchmark.rows import KIND, OURS, STEPS, compare, size_of, tables_of
from lineartime.errors import DataError

if TYPE_CHECKING:
    from pandas import DataFrame, Series


@dataclass(frozen=True)
class Goal:
    """One number to reach; the fields are described in `lineartime/benchmark/goals.toml`."""

    what: str
    measure: str
    benchmark: str
    device: str
    limit: float
    at_least: bool
    aim: float | None = None
    first: int = 0
    last: int | None = None
    parameters: Sequence[float] = (0, math.inf)
    dtype: str | None = None
    over: str | None = None
    variant: str | None = None
    over_variant: str | None = None
    tokens: int | None = None

    @property
    def where(self) -> str:
        if not self.last and not self.first:
            return "any"
        if self.first == self.last:
            return tokens(self.first)
        return f"from {tokens(self.first)}" + (f" to {tokens(self.last)}" if self.last else " on")

    def reached_by(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit


FIELDS = {"type": "dtype", "from": "first", "to": "last"}
"""Fields of a goal that have another name in the file."""


@dataclass(frozen=True)
class Reached:
    """The worst value of those that count, and where it was; where nothing was measured None, and what failed."""

    value: float | None
    at: str

    def verdict(self, goal: Goal) -> str:
        """By how much a goal was met or missed, or why that is not known."""
        if self.value is None:
            return self.at or "not measured"
        met = "met" if goal.reached_by(self.value, goal.limit) else "**missed**"
        aim = ", and the aim" if goal.aim is not None and goal.reached_by(self.value, goal.aim) else ""
        if goal.measure in ("slope", "flat"):
            return f"{met} by {abs(self.value - goal.limit):.3f}{aim}"
        return f"{met} by {abs(self.value / goal.limit - 1):.0%}{aim}"


def read_goals(path: Path) -> list[Goal]:
    """The goals of a TOML file, one for each limit. Raises DataError."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["target"]
        return [goal for entry in entries for goal in goals_of(entry)]
    except OSError as e:
        raise DataError("cannot read the goals", path, e.strerror) from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError("not a file of goals", path, f"{type(e).__name__}: {e}") from None


def goals_of(entry: Row) -> list[Goal]:
    """A table of the file: one goal, or one for each context that has a limit of its own."""
    if entry["measure"] not in MEASURES or ("at_least" in entry) == ("at_most" in entry):
        raise ValueError(f"goal {entry['what']!r} needs a measure of {', '.join(MEASURES)} and one limit")
    limits, aims = (each if isinstance(each, dict) else {"": each}
                    for each in (entry["at_least" if "at_least" in entry else "at_most"], entry.get("aim")))
    if "aim" in entry and aims.keys() != limits.keys():
        raise ValueError(f"goal {entry['what']!r} needs an aim for each limit")
    fields = {FIELDS.get(name, name): value for name, value in entry.items()
              if name not in ("at_least", "at_most", "aim")}
    spans = ({"first": int(context), "last": int(context)} if context else {} for context in limits)
    return [Goal(**{**fields, **span}, limit=float(limit), at_least="at_least" in entry, aim=aims.get(context))
            for span, (context, limit) in zip(spans, limits.items(), strict=True)]


def goals_table(goals: Sequence[Goal], rows: Sequence[Row]) -> str:
    """Each goal, what `read_rows`' measurements reached, and by how much the goal was met or missed; in a line below,
    the goals that nothing was measured of."""
    tables, lines, missing = tables_of(rows), [], []
    for goal in goals:
        reached = reach(goal, tables)
        if reached == Reached(None, ""):
            missing.append(goal)
            continue
        aim = "" if goal.aim is None else f", aim {limit_text(goal.aim)}"
        wanted = f"at {'least' if goal.at_least else 'most'} {limit_text(goal.limit)}{aim}"
        value = "-" if reached.value is None else f"{limit_text(reached.value)}{reached.at and f' at {reached.at}'}"
        lines.append([goal.what, goal.dtype or "fastest of each", goal.where, wanted, value, reached.verdict(goal)])
    table = markdown(["what", "type", "context", "wanted", "reached", "so it is"], without_repeats(lines))
    return "\n\n".join([table] * bool(lines) + [not_measured(goals, missing)] * bool(missing)) + "\n"


def not_measured(goals: Sequence[Goal], missing: Sequence[Goal]) -> str:
    """In a line: the goals that nothing was measured of; where these are all of a device, only their number."""
    words = []
    for device, name in (("cuda", "a GPU"), ("cpu", "a processor")):
        every, mine = (sum(goal.device == device for goal in some) for some in (goals, missing))
        if mine and mine == every:
            words.append(f"all {mine} goals for {name}")
        else:
            words += unique(goal.what for goal in missing if goal.device == device)
    return f"Not measured: {'; '.join(words)}."


def limit_text(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else number(x)


def reach(goal: Goal, tables: "Sequence[DataFrame]") -> Reached:
    """What the rows say of a goal: of the tables of its machine and size, the one with the newest row that tells."""
    best, benchmarks = Reached(None, ""), STEPS if goal.benchmark in STEPS else [goal.benchmark]
    for table in sorted(tables, key=lambda table: table.time.max()):
        cells = table[table.benchmark.isin(benchmarks) & ((table.device == "cpu") == (goal.device == "cpu"))
                      & (table.n_tokens == (goal.tokens or table.n_tokens))]
        chosen = cells[cells.context.between(goal.first, goal.last or math.inf)
                       & (cells.dtype == (goal.dtype or cells.dtype))]
        if chosen.empty or not goal.parameters[0] <= size_of(cells) <= goal.parameters[1]:
            continue
        measured, failed = MEASURES[goal.measure](goal, chosen)
        values = {context: value for context, value in measured.items() if not math.isnan(value)}
        if values:
            at = (min if goal.at_least else max)(values, key=values.__getitem__)
            best = Reached(values[at], tokens(at) if len(values) > 1 else "")
        elif failed and best.value is None:
            best = Reached(None, failed)
    return best


Measured = tuple[dict[int, float], str]
"""Values by context, and what failed in words."""


def compared(goal: Goal, cells: "DataFrame", of: "Callable[[DataFrame], Series]") -> Measured:
    """FLASH against `goal.over`, each in its fastest variant and type; of a part, `variant` against `over`."""
    if goal.measure.startswith("part"):
        part = cells.side.iat[0]
        both = compare(cells, part, part, by_type=False, variant=goal.variant, rival_variant=goal.over)
    else:
        both = compare(cells, OURS, goal.over or "", by_type=False, rival_variant=goal.over_variant)
    failed = [f"{kind_text({name: pair[name + end] for name in KIND})} failed: {pair['failed' + end]}"
              for pair in both.to_dict("records") for end in ("", "_rival") if pair["failed" + end]]
    return of(both.set_index("context")).to_dict(), failed[0] if failed else ""


def in_newest_run(cells: "DataFrame", column: str, best: str) -> Measured:
    """The largest, least or last of a `number_in` the rows of each context's newest run."""
    newest = cells[cells.run == cells.groupby("context").run.transform("last")]
    numbers = newest.assign(number=number_in(newest.row, column))[newest.ms.notna()]
    failed = newest.failed[newest.failed != ""]
    return (numbers.groupby("context").number.agg(best).to_dict(),
            f"failed: {failed.iat[-1]}" if len(failed) else "")


def times_in_one_run(goal: Goal, cells: "DataFrame") -> "Series":
    """Our times by context in the newest run that has both ends: of the variant and type with the most contexts, and
    of these the fastest."""
    mine = cells[(cells.side == OURS) & cells.ms.notna()]
    for run in reversed(cells.run.unique()):
        kinds = [kind.groupby("context").ms.last() for _, kind in mine[mine.run == run].groupby(["variant", "dtype"])]
        whole = [times for times in kinds if {goal.first, goal.last or 0} <= {*times.index}]
        if whole:
            return min(whole, key=lambda times: (-len(times), times.sum()))
    return cells.ms.head(0)


def of_contexts(goal: Goal, cells: "DataFrame") -> Measured:
    """One number of all contexts. slope: least squares of log time per token on log context; flat: our largest time
    over the smallest, less 1."""
    times = times_in_one_run(goal, cells)
    if len(times) < 2:
        return {}, ""
    if goal.measure == "flat":
        return {goal.first: times.max() / times.min() - 1}, ""
    return {goal.first: statistics.linear_regression([*map(math.log, times.index)], [*map(math.log, times)]).slope}, ""


def share_of_copy(goal: Goal, cells: "DataFrame") -> Measured:
    """Of a copy's rate, at each context's newest row of the implementation `variant` of the op `over`."""
    mine = cells[(cells.side == goal.over) & (cells.variant == goal.variant)]
    return in_newest_run(mine, f"{goal.measure.removesuffix(' share')}.copy_share", "last")


def number_in(rows: "Series", name: str) -> "Series":
    """A number of each row as it was written, NaN where it has none; "many_tokens.counted_mib" is inside another."""
    outer, _, inner = name.rpartition(".")
    return rows.map(lambda row: ((row.get(outer) or {}) if outer else row).get(inner)).astype(float)


MEASURES: dict[str, "Callable[[Goal, DataFrame], Measured]"] = {
    "speed": lambda goal, cells: compared(goal, cells, lambda both: both.value),
    "memory": lambda goal, cells: compared(goal, cells, lambda both: both.peak_mib / both.peak_mib_rival),
    "part time": lambda goal, cells: compared(goal, cells, lambda both: both.ms / both.ms_rival),
    "part memory": lambda goal, cells: compared(goal, cells, lambda both: (
        number_in(both.row, "many_tokens.counted_mib") / number_in(both.row_rival, "many_tokens.counted_mib"))),
    "memory_mib": lambda goal, cells: in_newest_run(cells[cells.side == OURS], "above_import_mib", "min"),
    "rate": lambda goal, cells: in_newest_run(cells[cells.side == OURS], "tokens_per_s", "max"),
    "slope": of_contexts, "flat": of_contexts, "forward share": share_of_copy, "backward share": share_of_copy}
