"""What the records of `python -m benchmarks reproduce` say of a table at a scale, as data frames.

A record is a line of JSON. It belongs to a cell when its scale, text, settings and questions are
the cell's, but for the seed; so two tables share records. The newest record of a seed counts. What
failed has "failed" and no results, and counts only where nothing went well."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.paper.tables import SCALES, TABLES, Cell, Kind, Scale, ScaleName, Table, key_of
from benchmarks.provenance import rows_in

Record = dict[str, Any]
COLUMNS: dict[Kind, list[str]] = {
    "train": ["seed", "loss", "perplexity", "word_perplexity", "n_parameters", "steps", "tokens", "minutes"],
    "finetune": ["seed", "f1", "step_ms"],
    "step": ["run", "time", "median", "q1", "q3", "tokens", "peak_mib", "n_parameters"]}
CELL = ["row", "column"]
GAPS = {"FLASH-Quad -> FLASH": ("FLASH-Quad", "FLASH"), "TFM++ -> MC-TFM++": ("TFM++", "MC-TFM++")}
"""Rows of Table 5: a model, and it with mixed chunks."""
Place = tuple[str, str, Kind, int | None]  # row, column, kind of record and seed


def numbers_of(row: Record) -> list[Any]:
    """What a record has in `COLUMNS`: losses in nats per token of the whole held-out split after
    training, F1 in percent, times in milliseconds of one micro-batch of "tokens"."""
    if row["kind"] == "train":
        held_out, curve = row["held_out"], dict(row["curve"])  # empty if the run was shorter than `eval_every`
        return [row["settings"]["seed"], held_out["loss"], math.exp(held_out["loss"]),
                held_out["word_perplexity"] if held_out.get("n_words") else None, row["n_parameters"],
                row["settings"].get("steps") or max(curve), row["tokens"], row["train_s"]["cpu"] / 60]
    if row["kind"] == "finetune":
        ms = row["step_ms"]["cpu" if row["device"] == "cpu" else "wall"]
        return [row["settings"]["seed"], row["f1"], ms["median"]]
    ms = row[f"{row['clock']}_ms"]
    return [row["run"], row["time"], ms["median"], ms["q1"], ms["q3"], row["tokens_per_step"], row.get("peak_mib"),
            row.get("n_parameters")]


def read_records(path: Path) -> list[Record]:
    """The records of a file, oldest first. Raises DataError for another file."""
    def parse(row: Record) -> Record:
        if not row.get("failed"):
            numbers_of(row)
        key_of(row["kind"], row["text"], row["settings"])
        return row

    return rows_in(path, parse, "a row of a run")


def by_key(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        key = key_of(record["kind"], record["text"], record["settings"], record.get("questions"))
        found.setdefault(key, []).append(record)
    return found


def records_of(cell: Cell, records: Mapping[str, list[Record]], kind: Kind, seed: int | None = None) -> list[Record]:
    """A cell's records of one kind, from `by_key`; of all seeds where none is named."""
    return [record for record in records.get(cell.key(kind), ()) if seed in (None, record["settings"].get("seed"))]


class Results(NamedTuple):
    """One table at one scale: rows and columns of which anything was run; frames with a "record"
    and its `COLUMNS` by row, column and seed (steps have none; those of a column are of one run);
    and what failed and never went well."""

    table: Table
    scale: Scale
    rows: list[str]
    columns: list[str]
    trained: pd.DataFrame
    finetuned: pd.DataFrame
    steps: pd.DataFrame
    failed: dict[Place, str]


def results_of(name: str, scale: ScaleName, records: Iterable[Record]) -> Results:
    """What records, oldest first, say of a table at a scale."""
    table, by_run = TABLES[name], by_key(record for record in records if record.get("scale") == scale)
    kinds: tuple[Kind, ...] = tuple(COLUMNS) if table.kind == "train" else ("step",)
    well: dict[Place, list[Record]] = {}
    failed: dict[Place, str] = {}
    for cell in cells_with_records(table, scale) if by_run else ():
        for kind in kinds:
            for record in records_of(cell, by_run, kind):
                place = (cell.row, cell.column, kind, record["settings"].get("seed"))
                if record.get("failed"):
                    failed[place] = record["failed"]
                else:
                    well.setdefault(place, []).append(record)
    known = {*well, *failed}
    return Results(table, SCALES[scale], [row for row in table.models if row in {place[0] for place in known}],
                   [column for column in table.columns if column in {place[1] for place in known}],
                   frame_of(well, "train"), frame_of(well, "finetune"), timed_together(frame_of(well, "step")),
                   {place: error for place, error in failed.items() if place not in well})


def cells_with_records(table: Table, scale: ScaleName) -> list[Cell]:
    """The cells whose records count, by column, then row: those that the scale runs, and others
    that runs of another table happen to fit, unless two of a column would share such a run."""
    cells = [Cell(table, row, column, SCALES[scale]) for column in table.columns for row in table.models]
    keys = [(cell.column, cell.key("step")) for cell in cells]
    planned, alike = table.cells[scale], Counter(keys)
    return [cell for cell, key in zip(cells, keys, strict=True)
            if (cell.row, cell.column) in planned or alike[key] == 1]


def frame_of(well: dict[Place, list[Record]], kind: Kind) -> pd.DataFrame:
    """The newest record of a seed; all of steps, which have no seed."""
    found = pd.DataFrame([(row, column, record, *numbers_of(record)) for (row, column, each, _), records in well.items()
                          if each == kind for record in (records if kind == "step" else records[-1:])],
                         columns=[*CELL, "record", *COLUMNS[kind]])
    return found.set_index(CELL) if kind == "step" else found.sort_values("seed", kind="stable").set_index(
        [*CELL, "seed"])


def timed_together(timed: pd.DataFrame) -> pd.DataFrame:
    """Of each column the run that timed most of it, of several the newest."""
    runs = timed.groupby(["column", "run"]).time.agg(["size", "max"]).reset_index().sort_values(["size", "max", "run"])
    best = runs.groupby("column").run.last()
    in_best = timed.run == best.reindex(timed.index.get_level_values("column")).to_numpy()
    return timed[in_best].groupby(level=CELL, sort=False).tail(1)


def of_cell(frame: Any, row: str | None, column: str | None = None) -> Any:
    """A cell's lines of a frame, perhaps none; by default of all columns."""
    lines = frame[frame.index.get_level_values("row") == row]
    return lines if column is None else lines[lines.index.get_level_values("column") == column]


def spread(values: pd.Series) -> pd.DataFrame:
    """By cell the mean of its seeds, with the least and the most of several."""
    found = pd.DataFrame(values.dropna().groupby(level=CELL, sort=False).agg(["mean", "min", "max", "size"]))
    return found[["mean"]].join(found[["min", "max"]].where(found["size"] > 1))


def curve_of(results: Results, row: str | None, column: str) -> pd.DataFrame:
    """Held-out losses of a part of the split: by step that all seeds have, and seed."""
    records = of_cell(results.trained, row, column).record
    return pd.DataFrame({key[-1]: dict(record["curve"]) for key, record in records.items()}).dropna().sort_index()


def costs(results: Results) -> pd.DataFrame:
    """By cell that was trained and timed: the steps of training; the seconds of one, by the time
    per token as measured side by side, for runs are not alone on their machine; the best of the
    reference's mean curve; and the steps after which the row's is there ("reached")."""
    trained, timed = results.trained.groupby(level=CELL, sort=False).first(), results.steps
    seconds = trained.tokens / trained.steps * timed["median"] / timed.tokens / 1e3
    found = pd.DataFrame({"steps": trained.steps, "seconds": seconds}).dropna()
    best = [curve_of(results, results.table.reference, column).mean(axis=1).min() for _, column in found.index]
    curves = [curve_of(results, row, column).mean(axis=1) for row, column in found.index]
    return found.assign(best=best, reached=list(map(steps_to, best, curves)))


def gaps(results: Results, what: str) -> pd.Series:
    """By row of Table 5, column and seed, whose runs read the same text: what mixed chunks add."""
    values = results.trained[what].unstack("row").reindex(columns=[row for pair in GAPS.values() for row in pair])
    found = {row: values[mixed] - values[plain] for row, (plain, mixed) in GAPS.items()}
    return pd.concat(found, names=["row"]).dropna()


def step_speedups(results: Results, reference: str | None) -> pd.DataFrame:
    """By cell the reference's time of a step over the row's; low, high: opposite quartiles."""
    ours = results.steps[["median", "q1", "q3"]].div(results.steps.tokens, axis=0)
    theirs = of_cell(ours, reference).droplevel("row").reindex(ours.index, level="column")
    return pd.DataFrame({"value": theirs["median"] / ours["median"], "low": theirs.q1 / ours.q3,
                         "high": theirs.q3 / ours.q1}).dropna()


def speedups(results: Results, reference: str | None) -> pd.DataFrame:
    """By cell whose and whose reference's training and times are known, as in row 75 of
    docs/paper.md: the time that the reference takes to its best mean loss over the time that the
    row takes to the same loss; of the mean curve and of each seed's own. NaN never gets there."""
    found = []
    for (row, column), by_step in step_speedups(results, reference).value.items():
        ours, theirs = curve_of(results, row, column), curve_of(results, reference, column).mean(axis=1)
        if not ours.empty and not theirs.empty:
            cost = by_step * steps_to(theirs.min(), theirs)
            seeds = [cost / steps_to(theirs.min(), pd.Series(dict(record["curve"])))
                     for record in of_cell(results.trained, row, column).record]
            found.append((row, column, cost / steps_to(theirs.min(), ours.mean(axis=1)), seeds))
    return pd.DataFrame(found, columns=[*CELL, "value", "seeds"]).set_index(CELL)


def steps_to(loss: float, curve: pd.Series) -> float:
    """Where a curve, losses by step, first is down at a loss, linear between its points; or NaN."""
    down = curve.index[curve <= loss]
    last = curve.loc[:down[0]].tail(2) if len(down) else None
    return math.nan if last is None else float(np.interp(-loss, -last, last.index))
