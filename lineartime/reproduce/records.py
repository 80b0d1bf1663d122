"""The records of a table's runs: one JSON object per line, added when a run ends and never changed.

"kind" is "train", "finetune" or "step". A record holds the settings it was made with, so a cell finds its records by
them: `text` and `settings` are equal, but for the seed. What failed has "failed" and no results.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lineartime.atomic_io import read_json_lines
from lineartime.reproduce.scales import Cell, key_of

Record = dict[str, Any]
Kind = Literal["train", "finetune", "step"]
RECORDS = Path(__file__).parents[1] / "results" / "quality.jsonl"
"""Those that come with the package."""


def read_records(path: Path) -> list[Record]:
    """The records of a file; none where there is no file. A last line that a kill cut off is left out.

    Raises DataError for a file that holds something else."""
    def parse(record: Record) -> Record:
        if not {"kind", "text", "settings"} <= record.keys():
            raise ValueError("it has no kind, text or settings")
        return record

    return read_json_lines(path, parse, "a row of a run") if path.exists() else []


def records_of(cell: Cell, records: Sequence[Record], kind: Kind, seed: int | None = None) -> list[Record]:
    """A cell's records of one kind, in the order of the file; of all seeds where none is named."""
    key = cell.key
    questions = asdict(cell.questions) if kind == "finetune" and cell.questions else None
    return [record for record in records
            if record["kind"] == kind and seed in (None, record["settings"].get("seed"))
            and record.get("questions") == questions and key_of(record["text"], record["settings"]) == key]


def measured_together(cells: Sequence[Cell], records: Sequence[Record]) -> str | None:
    """The newest run of `lineartime benchmark` that timed a step of every one of these cells; None without one."""
    runs = [dict.fromkeys(record["run"] for record in records_of(cell, records, "step")) for cell in cells]
    return next((run for run in reversed(runs[0]) if all(run in each for each in runs)), None) if runs else None
