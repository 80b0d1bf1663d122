"""The records of a table's runs: one JSON object per line, added when a run ends and never changed.

"kind" is "train", "finetune" or "step". A record holds the settings it was made with, so a cell finds its records by
them: text, settings and questions are equal, but for the seed. What failed has "failed" and no results.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.checks import require_provenance, require_times, require_types
from benchmarks.paper.scales import Cell, Kind, key_of
from lineartime.atomic_io import read_json_lines

Record = dict[str, Any]
COLUMNS: dict[Kind, list[str]] = {
    "train": ["seed", "loss", "perplexity", "word_perplexity", "n_parameters", "steps", "tokens"],
    "finetune": ["seed", "f1", "step_ms"],
    "step": ["run", "time", "median", "q1", "q3", "tokens", "peak_mib", "n_parameters"]}
TYPES: dict[Kind, dict[type, str]] = {
    "train": {float: "held_out.loss held_out.n_words? held_out.word_perplexity?", str: "data.sha256",
              int: "n_parameters tokens data.train_tokens data.validation_tokens data.vocab_size"},
    "finetune": {float: "f1 word_overlap.f1", int: "n_questions", dict: "questions"},
    "step": {str: "run clock", int: "tokens_per_step n_parameters?", float: "peak_mib?"}}
"""What `require_types` wants of a record that did not fail."""


def numbers_of(row: Record) -> list[Any]:
    """What a record that did not fail has in these columns. Losses are in nats per token of the whole held-out split
    after training, F1 in percent, a step's times in milliseconds of one micro-batch of "tokens"."""
    if row["kind"] == "train":
        held_out = row["held_out"]
        return [row["settings"]["seed"], held_out["loss"], math.exp(held_out["loss"]),
                held_out["word_perplexity"] if held_out.get("n_words") else None, row["n_parameters"],
                row["curve"][-1][0], row["tokens"]]
    if row["kind"] == "finetune":
        return [row["settings"]["seed"], row["f1"], times_of(row)["median"]]
    ms = times_of(row)
    return [row["run"], row["time"], ms["median"], ms["q1"], ms["q3"], row["tokens_per_step"], row.get("peak_mib"),
            row.get("n_parameters")]


def times_of(row: Record) -> Record:
    """A record's times of a step, by the clock that counts."""
    if row["kind"] == "step":
        return row[f"{row['clock']}_ms"]
    return row["step_ms"]["cpu" if row["device"] == "cpu" else "wall"]


def require_record(row: Record) -> Record:
    """The record; raises for one that no table can be made of."""
    kind = row["kind"]
    require_types(row, {str: "text scale failed?", dict: "settings"})
    require_types(row["settings"], {int: "seed?" if kind == "step" else "seed"})
    if not row.get("failed"):
        require_provenance(row)
        require_types(row, TYPES[kind])
        if kind != "train":
            require_times(times_of(row))
        numbers_of(row)
    return row


def read_records(path: Path) -> list[Record]:
    """The records of a file, oldest first; none where there is no file. A last line that a kill cut off is left out.

    Raises DataError for a file that holds something else."""
    return read_json_lines(path, require_record, "a row of a run") if path.exists() else []


def by_key(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records in their order, by `key_of`."""
    found: dict[str, list[Record]] = {}
    for record in records:
        key = key_of(record["kind"], record["text"], record["settings"], record.get("questions"))
        found.setdefault(key, []).append(record)
    return found


def records_of(cell: Cell, records: Mapping[str, list[Record]], kind: Kind, seed: int | None = None) -> list[Record]:
    """A cell's records of one kind, from those of `by_key`; of all seeds where none is named."""
    return [record for record in records.get(cell.key(kind), ()) if seed in (None, record["settings"].get("seed"))]
