"""What was wanted (`lineartime/benchmark/goals.toml`) beside what the rows say was reached."""

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lineartime.benchmark.markdown import markdown, number, tokens, without_repeats
from lineartime.benchmark.rows import STEPS, Cell, Table, ratio, tables_of
from lineartime.errors import DataError

OURS = "flash"


@dataclass(frozen=True)
class Target:
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


@dataclass(frozen=True)
class Reached:
    """The worst value of those that count, and where it was; None where nothing was measured."""

    value: float | None
    at: str

    def verdict(self, target: Target) -> str:
        if self.value is None:
            return self.at or "not measured"
        def reaches(limit: float) -> bool:
            return self.value >= limit if target.at_least else self.value <= limit  # type: ignore[operator]

        met = reaches(target.limit)
        aim = ", and the aim" if target.aim is not None and reaches(target.aim) else ""
        by = (f"{abs(self.value - target.limit):.3f}" if target.measure in ("slope", "flat")
              else f"{abs(self.value / target.limit - 1):.0%}")
        return f"{'met' if met else '**missed**'} by {by}{aim}"


def read_targets(path: Path) -> list[Target]:
    """The targets of a TOML file, one for each limit. Raises DataError."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["target"]
        return [target for entry in entries for target in targets_of(entry)]
    except OSError as e:
        raise DataError("cannot read the targets", path, e.strerror) from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError("not a file of targets", path, f"{type(e).__name__}: {e}") from None


def targets_of(entry: dict[str, Any]) -> list[Target]:
    """A table of the file: one target, or one for each context that has a limit of its own."""
    if entry["measure"] not in MEASURES or ("at_least" in entry) == ("at_most" in entry):
        raise ValueError(f"target {entry['what']!r} needs a measure of {', '.join(MEASURES)} and one limit")
    limits, aims = entry["at_least" if "at_least" in entry else "at_most"], entry.get("aim")
    if aims is not None and (aims.keys() if isinstance(aims, dict) else None) != (
            limits.keys() if isinstance(limits, dict) else None):
        raise ValueError(f"target {entry['what']!r} needs an aim for each limit")
    spans = ([(int(context), int(context), limit, aims and aims[context]) for context, limit in limits.items()]
             if isinstance(limits, dict) else [(entry.get("from", 0), entry.get("to"), limits, aims)])
    low, high = entry.get("parameters", (0, math.inf))
    return [Target(entry["what"], entry["measure"], entry["benchmark"], entry["device"], (low, high), first, last,
                   float(limit), "at_least" in entry, entry.get("type"), entry.get("over"), entry.get("variant"),
                   entry.get("over_variant"), entry.get("tokens"), aim if aim is None else float(aim))
            for first, last, limit, aim in spans]


def targets_table(targets: Sequence[Target], cells: Sequence[Cell]) -> str:
    """Each target, what was reached, and by how much it was met or missed."""
    tables = tables_of(cells)
    lines = []
    for target in targets:
        reached = reach(target, tables)
        wanted = f"{'at least' if target.at_least else 'at most'} {limit_text(target.limit)}"
        wanted += "" if target.aim is None else f", aim {limit_text(target.aim)}"
        value = "-" if reached.value is None else f"{limit_text(reached.value)}{reached.at and f' at {reached.at}'}"
        lines.append([target.what, target.dtype or "fastest of each", target.where, wanted, value,
                      reached.verdict(target)])
    return markdown(["what", "type", "context", "wanted", "reached", "so it is"], without_repeats(lines)) + "\n"


def limit_text(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else number(x)


def reach(target: Target, tables: Sequence[Table]) -> Reached:
    """What the rows say of a target: of the tables of its machine and size, the one with the newest row that tells."""
    best = Reached(None, "")
    if target.tokens:
        tables = [replace(table, cells=mine) for table in tables
                  if (mine := tuple(cell for cell in table.cells if cell.n_tokens == target.tokens))]
    for table in sorted(tables, key=lambda table: max(cell.row.get("time", "") for cell in table.cells)):
        size = target.parameters[0] <= table.n_parameters <= target.parameters[1]
        same = table.benchmark == target.benchmark or {table.benchmark, target.benchmark} <= {*STEPS}
        if same and size and table.on_cpu == (target.device == "cpu"):
            found = MEASURES[target.measure](target, table)
            if found.value is not None or best.value is None:
                best = found if found.value is not None or found.at else best
    return best


def contexts_of(target: Target, table: Table) -> list[int]:
    return [context for context in table.contexts if target.first <= context <= (target.last or math.inf)]


def worst(target: Target, found: Sequence[tuple[float, str]], missing: str = "") -> Reached:
    if not found:
        return Reached(None, missing)
    value, at = min(found) if target.at_least else max(found)
    return Reached(value, at if len(found) > 1 else "")


def reached_speed(target: Target, table: Table) -> Reached:
    found, missing = [], ""
    for context in contexts_of(target, table):
        if pair := table.pair(OURS, target.over or "", context, target.dtype, rival_variant=target.over_variant):
            both = ratio(pair[1], pair[0])
            if both:
                found.append((both.value, tokens(context)))
            missing = missing or failure(pair)
    return worst(target, found, missing)


def reached_memory(target: Target, table: Table) -> Reached:
    found, missing = [], ""
    for context in contexts_of(target, table):
        if pair := table.pair(OURS, target.over or "", context, target.dtype):
            if pair[0].peak_mib and pair[1].peak_mib:
                found.append((pair[0].peak_mib / pair[1].peak_mib, tokens(context)))
            missing = missing or failure(pair)
    return worst(target, found, missing)


def reached_rate(target: Target, table: Table) -> Reached:
    """Tokens per second in each context's newest run, of the fastest variant."""
    return reached_by_best(target, table, "tokens_per_s", max)


def reached_memory_mib(target: Target, table: Table) -> Reached:
    """Of each context's newest run the variant that takes least."""
    return reached_by_best(target, table, "above_import_mib", min)


def reached_by_best(target: Target, table: Table, column: str, best: Callable[[list[float]], float]) -> Reached:
    """The best number of a column in each context's newest run of ours."""
    found, missing = [], ""
    for context in contexts_of(target, table):
        mine = [cell for cell in table.cells if cell.side == OURS and cell.context == context
                and target.dtype in (None, cell.dtype)]
        numbers = [cell.row[column] for cell in mine if cell.ms and cell.row.get(column) and cell.run == mine[-1].run]
        if numbers:
            found.append((best(numbers), tokens(context)))
        elif mine:
            missing = f"failed: {mine[-1].failed}"
    return worst(target, found, missing)


def reached_share(target: Target, table: Table) -> Reached:
    """Of a copy's rate, at each context's newest row of the implementation `variant` of the op `over`."""
    part = target.measure.removesuffix(" share")
    shares = {cell.context: cell.row[part]["copy_share"] for cell in table.cells
              if (cell.side, cell.variant) == (target.over, target.variant) and cell.ms and part in cell.row
              and cell.context in contexts_of(target, table) and target.dtype in (None, cell.dtype)}
    return worst(target, [(share, tokens(context)) for context, share in shares.items()])


def reached_part(target: Target, table: Table) -> Reached:
    """Of the newest run with both implementations: time, or memory counted at many tokens, of `variant` over `over`."""
    value = None
    for theirs in table.cells:
        for mine in table.cells:
            if ((mine.run, mine.variant, theirs.variant) == (theirs.run, target.variant, target.over)
                    and target.dtype in (None, mine.dtype) and mine.ms and theirs.ms):
                if target.measure == "part time":
                    value = mine.ms.median / theirs.ms.median
                else:
                    value = mine.row["many_tokens"]["counted_mib"] / theirs.row["many_tokens"]["counted_mib"]
    return Reached(value, "")


def failure(pair: Sequence[Cell]) -> str:
    return next((f"{cell.text} failed: {cell.failed}" for cell in pair if cell.failed), "")


def times_in_one_run(target: Target, table: Table) -> list[tuple[int, float]]:
    """Contexts and our medians in the newest run that has both ends: of the variant and type that is fastest there."""
    wanted = contexts_of(target, table)
    if not wanted or target.first not in wanted or (target.last or target.first) not in wanted:
        return []
    for run in reversed(list(dict.fromkeys(cell.run for cell in table.cells))):
        by_kind: dict[tuple[str, str], dict[int, float]] = {}
        for cell in table.cells:
            if (cell.run == run and cell.side == OURS and cell.ms and cell.context in wanted
                    and target.dtype in (None, cell.dtype)):
                by_kind.setdefault((cell.variant, cell.dtype), {})[cell.context] = cell.ms.median
        whole = [times for times in by_kind.values() if target.first in times and (target.last or 0) in times]
        if whole:
            most = max(map(len, whole))
            return sorted(min((times for times in whole if len(times) == most), key=lambda times: sum(times.values()),
                              ).items())
    return []


def reached_slope(target: Target, table: Table) -> Reached:
    """Least squares of log time per token on log context."""
    times = times_in_one_run(target, table)
    if len(times) < 2:
        return Reached(None, "")
    x, y = [math.log(context) for context, _ in times], [math.log(ms) for _, ms in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return Reached(sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
                   / sum((a - mean_x) ** 2 for a in x), "")


def reached_flat(target: Target, table: Table) -> Reached:
    times = [ms for _, ms in times_in_one_run(target, table)]
    return Reached(max(times) / min(times) - 1 if len(times) > 1 else None, "")


MEASURES: dict[str, Callable[[Target, Table], Reached]] = {
    "speed": reached_speed, "memory": reached_memory, "memory_mib": reached_memory_mib, "slope": reached_slope,
    "flat": reached_flat, "part time": reached_part, "part memory": reached_part, "rate": reached_rate,
    "forward share": reached_share, "backward share": reached_share}
