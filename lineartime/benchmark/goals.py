"""Goals (`lineartime/benchmark/goals.toml`) beside what the rows say was reached."""

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.benchmark import Row
from lineartime.benchmark.markdown import kind_text, markdown, number, tokens, unique, without_repeats
from lineartime.benchmark.rows import OURS, STEPS, compare, size_of, tables_of
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
    parameters: tuple[float, float]
    first: int
    last: int | None
    limit: float
    at_least: bool
    dtype: str | None = None
    over: str | None = None
    variant: str | None = None
    over_variant: str | None = None
    tokens: int | None = None
    aim: float | None = None

    @property
    def where(self) -> str:
        if not self.last and not self.first:
            return "any"
        if self.first == self.last:
            return tokens(self.first)
        return f"from {tokens(self.first)}" + (f" to {tokens(self.last)}" if self.last else " on")

    def reached_by(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit


@dataclass(frozen=True)
class Reached:
    """The worst value of those that count, and where it was; where nothing was measured None, and what failed."""

    value: float | None
    at: str

    def verdict(self, goal: Goal) -> str:
        """By how much a goal was met or missed, or why that is not known."""
        if self.value is None:
            return self.at or "not measured"
        met = goal.reached_by(self.value, goal.limit)
        aim = ", and the aim" if goal.aim is not None and goal.reached_by(self.value, goal.aim) else ""
        by = (f"{abs(self.value - goal.limit):.3f}" if goal.measure in ("slope", "flat")
              else f"{abs(self.value / goal.limit - 1):.0%}")
        return f"{'met' if met else '**missed**'} by {by}{aim}"


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
    limits, aims = entry["at_least" if "at_least" in entry else "at_most"], entry.get("aim")
    if aims is not None and (aims.keys() if isinstance(aims, dict) else None) != (
            limits.keys() if isinstance(limits, dict) else None):
        raise ValueError(f"goal {entry['what']!r} needs an aim for each limit")
    spans = ([(int(context), int(context), limit, aims and aims[context]) for context, limit in limits.items()]
             if isinstance(limits, dict) else [(entry.get("from", 0), entry.get("to"), limits, aims)])
    low, high = entry.get("parameters", (0, math.inf))
    return [Goal(entry["what"], entry["measure"], entry["benchmark"], entry["device"], (low, high), first, last,
                 float(limit), "at_least" in entry, entry.get("type"), entry.get("over"), entry.get("variant"),
                 entry.get("over_variant"), entry.get("tokens"), aim if aim is None else float(aim))
            for first, last, limit, aim in spans]


def goals_table(goals: Sequence[Goal], rows: Sequence[Row]) -> str:
    """Each goal, what `read_rows`' measurements reached, and by how much the goal was met or missed; in a line below,
    the goals that nothing was measured of."""
    tables, lines, missing = tables_of(rows), [], []
    for goal in goals:
        reached = reach(goal, tables)
        if reached == Reached(None, ""):
            missing.append(goal)
            continue
        wanted = f"{'at least' if goal.at_least else 'at most'} {limit_text(goal.limit)}"
        wanted += "" if goal.aim is None else f", aim {limit_text(goal.aim)}"
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
    best = Reached(None, "")
    for table in sorted(tables, key=lambda table: table.time.max()):
        cells = table[table.n_tokens == goal.tokens] if goal.tokens else table
        same = {table.benchmark.iat[0], goal.benchmark}
        if len(cells) and (len(same) == 1 or same <= {*STEPS}) and (
                goal.parameters[0] <= size_of(cells) <= goal.parameters[1]) and (
                (table.device.iat[0] == "cpu") == (goal.device == "cpu")):
            chosen = (cells.context >= goal.first) & (cells.context <= (goal.last or math.inf)) & (
                True if goal.dtype is None else cells.dtype == goal.dtype)
            values, failed = MEASURES[goal.measure](goal, cells[chosen])
            values = values.dropna()
            if len(values):
                at = values.idxmin() if goal.at_least else values.idxmax()
                best = Reached(float(values[at]), tokens(at) if len(values) > 1 else "")
            elif failed and best.value is None:
                best = Reached(None, failed)
    return best


Measured = tuple["Series", str]
"""Values by context, and what failed in words."""


def compared(goal: Goal, cells: "DataFrame", of: "Callable[[DataFrame], Series]") -> Measured:
    """FLASH against `goal.over`, each in its fastest variant and type."""
    both = compare(cells, OURS, goal.over or "", by_type=False, rival_variant=goal.over_variant)
    failed = [f"{kind_text({name: pair[name + end] for name in ('side', 'variant', 'dtype')})} failed: "
              f"{pair['failed' + end]}" for pair in both.to_dict("records") for end in ("", "_rival")
              if pair["failed" + end]]
    return of(both.set_index("context")), failed[0] if failed else ""


def best_of(cells: "DataFrame", column: str, best: str) -> Measured:
    """The largest or least number of a row's column in each context's newest run of ours."""
    mine = cells[cells.side == OURS]
    mine = mine[mine.run == mine.groupby("context").run.transform("last")]
    numbers = mine.assign(number=[row.get(column) for row in mine.row])[mine.ms.notna()]
    failed = mine.failed[mine.failed != ""]
    return (numbers.astype({"number": float}).groupby("context").number.agg(best),
            f"failed: {failed.iat[-1]}" if len(failed) else "")


def share_of_copy(goal: Goal, cells: "DataFrame") -> Measured:
    """Of a copy's rate, at each context's newest row of the implementation `variant` of the op `over`."""
    part = goal.measure.removesuffix(" share")
    mine = cells[(cells.side == goal.over) & (cells.variant == goal.variant) & cells.ms.notna()]
    mine = mine.assign(share=[row.get(part, {}).get("copy_share", math.nan) for row in mine.row])
    return mine.dropna(subset="share").groupby("context").share.last(), ""


def part_over(goal: Goal, cells: "DataFrame") -> Measured:
    """Of the newest run with both implementations: time, or memory counted at many tokens, of `variant` over `over`."""
    ours, theirs = (cells[(cells.variant == variant) & cells.ms.notna()] for variant in (goal.variant, goal.over))
    both = ours.merge(theirs, on="run", suffixes=("", "_over")).tail(1).set_index("context")
    if goal.measure == "part time":
        return both.ms / both.ms_over, ""
    counted = (both[name].map(lambda row: row["many_tokens"]["counted_mib"]) for name in ("row", "row_over"))
    return next(counted) / next(counted), ""


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


def slope(goal: Goal, cells: "DataFrame") -> Measured:
    """Least squares of log time per token on log context."""
    import pandas

    times = times_in_one_run(goal, cells)
    x, y = (pandas.Series([math.log(n) for n in of], dtype=float) for of in (times.index, times))
    return (pandas.Series([x.cov(y) / x.var()] if len(times) > 1 else [], dtype=float)), ""


def flat(goal: Goal, cells: "DataFrame") -> Measured:
    """Our largest time over the smallest, less 1."""
    import pandas

    times = times_in_one_run(goal, cells)
    return pandas.Series([times.max() / times.min() - 1] if len(times) > 1 else [], dtype=float), ""


MEASURES: dict[str, "Callable[[Goal, DataFrame], Measured]"] = {
    "speed": lambda goal, cells: compared(goal, cells, lambda both: both.value),
    "memory": lambda goal, cells: compared(goal, cells, lambda both: both.peak_mib / both.peak_mib_rival),
    "memory_mib": lambda goal, cells: best_of(cells, "above_import_mib", "min"),
    "rate": lambda goal, cells: best_of(cells, "tokens_per_s", "max"),
    "slope": slope, "flat": flat, "part time": part_over, "part memory": part_over, "forward share": share_of_copy,
    "backward share": share_of_copy}
