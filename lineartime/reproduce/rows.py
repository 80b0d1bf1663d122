"""The rows of a table's runs: one JSON object per line, added when a run ends and never changed.

"kind" is "train", "finetune" or "step". A row holds the settings it was made with, so a cell finds its rows by them:
`text` and `settings` are equal, but for the seed. What failed has "failed" and no results.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lineartime.errors import DataError, ResourceError
from lineartime.reproduce.scales import Cell

Row = dict[str, Any]
Kind = Literal["train", "finetune", "step"]
ROWS = Path(__file__).resolve().parents[2] / "runs" / "rows.jsonl"
"""Those that the checkout has."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file. A last line that a kill cut off is left out.

    Raises DataError for a file that holds something else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as e:
        raise DataError("cannot read the rows", path, getattr(e, "strerror", None) or str(e)) from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not {"kind", "text", "settings"} <= row.keys():
                raise ValueError("it has no kind, text or settings")
            rows.append(row)
        except (ValueError, AttributeError, RecursionError) as e:
            if number < len(lines):
                raise DataError("not a row of a run", f"{path}, line {number}", str(e)) from None
    return rows


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows and see them to the disk; a line that a kill cut off is taken out before. Raises ResourceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            if whole < size:
                file.truncate(whole)
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise ResourceError("cannot write", path, e.strerror) from None


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
