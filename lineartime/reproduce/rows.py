"""The rows of a table's runs: one JSON object per line, added when a run ends and never changed.

"kind" is "train", "finetune" or "step". A row holds the settings it was made with, so a cell finds its rows by them:
`text` and `settings` are equal, but for the seed. What failed has "failed" and no results.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lineartime.atomic_io import read_json_lines
from lineartime.reproduce.scales import Cell

Row = dict[str, Any]
Kind = Literal["train", "finetune", "step"]
ROWS = Path(__file__).parents[1] / "results" / "quality.jsonl"
"""Those that the checkout has."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file. A last line that a kill cut off is left out.

    Raises DataError for a file that holds something else."""
    def parse(row: Row) -> Row:
        if not {"kind", "text", "settings"} <= row.keys():
            raise ValueError("it has no kind, text or settings")
        return row

    return read_json_lines(path, parse, "a row of a run") if path.exists() else []


def rows_of(cell: Cell, rows: Sequence[Row], kind: Kind, seed: int | None = None) -> list[Row]:
    """A cell's rows of one kind, in the order of the file; of all seeds where none is named."""
    settings = cell.settings(None)
    questions = asdict(cell.questions) if kind == "finetune" and cell.questions else None

    def belongs(row: Row) -> bool:
        given = dict(row["settings"])
        its_seed = given.pop("seed", None)
        return (row["kind"] == kind and row["text"] == cell.text.name and given == settings
                and seed in (None, its_seed) and row.get("questions") == questions)

    return [row for row in rows if belongs(row)]


def measured_together(cells: Sequence[Cell], rows: Sequence[Row]) -> str | None:
    """The newest run of `lineartime benchmark` that timed a step of every one of these cells; None without one."""
    runs = [dict.fromkeys(row["run"] for row in rows_of(cell, rows, "step")) for cell in cells]
    return next((run for run in reversed(runs[0]) if all(run in each for each in runs)), None) if runs else None
