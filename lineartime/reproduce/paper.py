"""The paper's numbers, from `paper.toml` beside this file."""

import tomllib
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from pathlib import Path

PAPER = Path(__file__).with_name("paper.toml")
Printed = Decimal | int | str
"""A number with the digits it was printed with, or "--" or "OOM"."""


@dataclass(frozen=True)
class Paper:
    """What the paper says in one table or figure."""

    numbers: dict[str, dict[str, dict[str, Printed]]] = field(default_factory=dict)
    """By measure, row and column."""
    hardware: str | None = None
    """What times were measured on."""
    note: str | None = None

    def printed(self, measure: str, row: str, column: str) -> Printed | None:
        """None where it prints nothing."""
        return self.numbers.get(measure, {}).get(row, {}).get(column)

    def value(self, measure: str, row: str, column: str) -> float | None:
        """None where it prints no number."""
        printed = self.printed(measure, row, column)
        return None if printed is None or isinstance(printed, str) else float(printed)

    def step_speedup(self, row: str, reference: str, column: str) -> float | None:
        """The reference's time of a step over the row's: where it is not printed, worked out from what is."""
        printed = self.value("step_speedup", row, column)
        theirs, ours = self.value("step_ms", reference, column), self.value("step_ms", row, column)
        return theirs / ours if printed is None and theirs and ours else printed


@cache
def read_paper() -> dict[str, Paper]:
    """By name of the table."""
    tables = tomllib.loads(PAPER.read_text(encoding="utf-8"), parse_float=Decimal)
    return {name: Paper({measure: rows for measure, rows in entry.items() if isinstance(rows, dict)},
                        entry.get("hardware"), entry.get("note")) for name, entry in tables.items()}
