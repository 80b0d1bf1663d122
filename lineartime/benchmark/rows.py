"""Rows of measurements, read and put in order: what may stand in one table, and what may be divided by what.

A ratio is made of two rows of one run (one call of `lineartime benchmark`), which measured them in turn. The newest run
that has both counts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lineartime.atomic_io import read_json_lines

NAMES = {"flash": "FLASH", "flash-quad": "FLASH-Quad", "transformer": "Transformer", "transformer+": "Transformer+",
         "transformer++": "Transformer++", "mc-tfm++": "MC-TFM++", "combiner": "Combiner", "performer": "Performer",
         "performer-matmul": "Performer-Matmul", "flash-pytorch": "FLASH-pytorch",
         "fla:retention": "retention of flash-linear-attention", "fla:gla": "GLA of flash-linear-attention"}
STEPS = ("step", "memory")
"""Benchmarks of whole training steps; "memory" takes one row, at growing contexts."""

SAME_SIZE = 1.3
"""Runs whose models' numbers of parameters are within this factor share a table; the models of one run always do."""


@dataclass(frozen=True)
class Spread:
    """Median, quartiles, least and most of repeated measurements."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """One median over another; `low` and `high` take each side's one quartile over the other's opposite one."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One row: what was measured and what came out."""

    benchmark: str
    name: str
    """Of the table that it was measured for, up to a slash; empty for one without a name."""
    run: str
    side: str
    """The model, "model/unfused" for attention that is not fused, and "model/reference" for our definitions where there
    are kernels: what is compared with what."""
    variant: str
    context: int
    dtype: str
    hardware: str
    threads: int
    n_parameters: int
    n_tokens: int
    """In a step; rows at once where something else than a step was timed."""
    ms: Spread | None
    """Milliseconds per token, of the clock that counts; None where it failed."""
    failed: str | None
    row: dict[str, Any]

    @property
    def text(self) -> str:
        return f"{side_name(self.side)}, {self.variant}, {self.dtype}"

    @property
    def tokens_per_s(self) -> float:
        return 1e3 / self.ms.median if self.ms else math.nan

    @property
    def peak_mib(self) -> float | None:
        """The most memory of a process of its own; decoding has all models in one."""
        return self.row.get("peak_mib") if self.ms and not self.decoding else None

    @property
    def decoding(self) -> bool:
        return self.benchmark.startswith("decode")


def side_name(side: str) -> str:
    """What a person calls a side: "Transformer++, unfused"."""
    model, _, attention = side.partition("/")
    words = {"": "", "unfused": ", unfused attention", "reference": " without kernels"}
    return NAMES.get(model, model) + words[attention]


def read_rows(path: Path) -> tuple[list[Cell], int]:
    """The cells of a file of JSON lines, and how many rows are older than runs and units and so left out.

    Raises DataError for a file that is not there or not of rows. The last line may be cut off: a benchmark may be
    writing it."""
    n_old = 0

    def parse(row: dict[str, Any]) -> Cell | None:
        nonlocal n_old
        if "run" in row and ("unit" in row or "failed" in row):
            return cell_of(row)
        if row["benchmark"] != "read":  # has a table of its own where it is measured
            n_old += 1
        return None

    parsed = read_json_lines(path, parse, "a row of a measurement")
    return [cell for cell in parsed if cell is not None], n_old


def cell_of(row: dict[str, Any]) -> Cell:
    """A row as `lineartime benchmark` writes it. Raises KeyError for what is missing."""
    side = row["model"] + (f"/{row['attention']}" if row.get("attention") in ("unfused", "reference") else "")
    tokens = row["tokens_per_step"] if row.get("unit") == "step" else 1
    ms = None
    if not row.get("failed"):
        ms = spread_of(row[f"{row['clock']}_ms"], tokens)
    # A decoding state may have been made up, and then what is long is its context and not what was read.
    benchmark = row["benchmark"] + ("-read" if row.get("context") == "read" else "")
    return Cell(benchmark=benchmark, name=(row.get("cell") or "").partition("/")[0], run=row["run"], side=side,
                variant=row.get("variant") or "eager", context=row["context_tokens"], dtype=row["dtype"],
                hardware=row["cpu"] if row["device"] == "cpu" else row["gpu"], threads=row["threads"],
                n_parameters=row["n_parameters"], n_tokens=row.get("tokens_per_step") or row.get("batch_size") or 1,
                ms=ms, failed=row.get("failed"), row=row)


def spread_of(times: dict[str, Any], tokens: int = 1) -> Spread:
    """Times as a row has them, over the tokens of what was timed."""
    return Spread(**{key: times[key] / tokens for key in ("median", "q1", "q3", "min", "max")}, n=times["n"])


@dataclass(frozen=True)
class Table:
    """Cells that stand together: one benchmark, name, machine, number of threads and size of model."""

    benchmark: str
    name: str
    hardware: str
    threads: int
    cells: tuple[Cell, ...]
    """In the order they were measured."""

    @cached_property
    def contexts(self) -> list[int]:
        return sorted({cell.context for cell in self.cells})

    @cached_property
    def dtypes(self) -> list[str]:
        return sorted({cell.dtype for cell in self.cells}, key=lambda dtype: (dtype != "float32", dtype))

    @cached_property
    def sides(self) -> list[str]:
        return list(dict.fromkeys(cell.side for cell in self.cells))

    @property
    def decoding(self) -> bool:
        return self.cells[0].decoding

    @property
    def on_cpu(self) -> bool:
        return self.cells[0].row["device"] == "cpu"

    @property
    def n_parameters(self) -> int:
        """FLASH's, else the first model's."""
        return next((cell for cell in self.cells if cell.side == "flash"), self.cells[0]).n_parameters

    def among(self, names: Sequence[str]) -> bool:
        """Whether its name or its benchmark is one of these; no names mean every table."""
        return not names or self.name in names or self.benchmark in names

    def newest(self, **wanted: Any) -> Cell | None:
        """The last measured cell with these fields; one that failed only where none went well."""
        found = [cell for cell in self.cells if all(getattr(cell, name) == value for name, value in wanted.items())]
        return next((cell for cell in reversed(found) if cell.ms), found[-1] if found else None)

    def pair(self, ours: str, rival: str, context: int, dtype: str | None, variant: str | None = None,
             rival_variant: str | None = None) -> tuple[Cell, Cell] | None:
        """The cells of two sides in the newest run that has both: of one variant, or each side's fastest.

        dtype None takes each side's fastest type too. rival_variant: the other side's alone. A side that failed in
        every way is there as it failed."""
        def fastest(side: str, run: str, variant: str | None) -> Cell | None:
            found = [cell for cell in self.cells if cell.side == side and cell.run == run and cell.context == context
                     and dtype in (None, cell.dtype) and variant in (None, cell.variant)]
            return min(found, key=lambda cell: cell.ms.median if cell.ms else math.inf, default=None)

        for run in reversed(list(dict.fromkeys(cell.run for cell in self.cells))):
            mine, theirs = fastest(ours, run, variant), fastest(rival, run, rival_variant or variant)
            if mine and theirs:
                return mine, theirs
        return None


    def unmatched(self, ours: Cell, rival: Cell) -> list[str]:
        """Variants that our side was measured in beside the rival, and the rival was not."""
        def variants(cell: Cell) -> dict[str, None]:
            return dict.fromkeys(other.variant for other in self.cells if (other.side, other.run, other.context)
                                 == (cell.side, cell.run, cell.context))

        theirs = variants(rival)
        return [variant for variant in variants(ours) if variant not in theirs]


def tables_of(cells: Sequence[Cell]) -> list[Table]:
    """Cells in tables. Where one context was measured with several numbers of tokens in a step, each number's rank
    makes a table: the largest ones stand together."""
    cells = sorted(cells, key=lambda cell: cell.row.get("time", ""))
    size_of_run: dict[str, int] = {}
    for cell in sorted(cells, key=lambda cell: cell.side != "flash"):
        size_of_run.setdefault(cell.run, cell.n_parameters)
    sizes = size_classes(size_of_run.values())
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        key = (cell.benchmark, cell.name, cell.hardware, cell.threads, sizes[size_of_run[cell.run]])
        groups.setdefault(key, []).append(cell)
    made = []
    for (benchmark, name, hardware, threads, _), together in groups.items():
        counts = {context: sorted({cell.n_tokens for cell in together if cell.context == context}, reverse=True)
                  for context in {cell.context for cell in together}}
        for rank in range(max(map(len, counts.values()))):
            mine = tuple(cell for cell in together if counts[cell.context].index(cell.n_tokens) == rank)
            made.append(Table(benchmark, name, hardware, threads, mine))
    order = {"step": 0, "memory": 1, "decode": 2, "decode-read": 3}
    return sorted(made, key=lambda table: (order.get(table.benchmark, 4), table.on_cpu, table.n_parameters, table.name,
                                           -max(cell.n_tokens for cell in table.cells)))


def size_classes(sizes: Iterable[int]) -> dict[int, int]:
    """By number of parameters: the class it is in, where neighbours within `SAME_SIZE` share one."""
    classes: dict[int, int] = {}
    before, number = 0, 0
    for size in sorted(set(sizes)):
        number += size > before * SAME_SIZE
        classes[size], before = number, size
    return classes


def ratio(rival: Cell, ours: Cell, of: Callable[[Cell], Spread | None] = lambda cell: cell.ms) -> Ratio | None:
    """How many times as fast ours is: the rival's time over ours."""
    a, b = of(rival), of(ours)
    return None if a is None or b is None else ratio_of(a, b)


def ratio_of(a: Spread, b: Spread) -> Ratio:
    return Ratio(a.median / b.median, a.q1 / b.q3, a.q3 / b.q1)
