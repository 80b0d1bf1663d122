"""What the records of `lineartime reproduce` say of a table at a scale, as data frames.

A record belongs to a cell when its scale, text and settings are the cell's, so two tables share records. The newest
record of a seed counts, and a failure only where nothing went well.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lineartime.errors import DataError
from lineartime.reproduce.records import Record, read_records
from lineartime.reproduce.scales import SCALES, Cell, Scale, key_of
from lineartime.reproduce.tables import TABLES, ScaleName, Table

CELL = ["row", "column"]


@dataclass(frozen=True)
class Results:
    """One table at one scale. Cells that have no records have no lines in the frames but `cells`."""

    table: Table
    scale: Scale
    rows: list[str]
    """Those of which anything was run."""
    columns: list[str]
    cells: pd.DataFrame
    """By row and column, in the order of columns, then rows: "cell"; "planned", whether the scale runs it (one that it
    does not run may be known from another table's run); "known", whether anything was run, even if it failed."""
    trained: pd.DataFrame
    """By row, column and seed: "loss" and "perplexity" per token of the whole held-out split at the end of training,
    "word_perplexity" where words are counted, "n_parameters", "steps", "tokens" and the "record"."""
    finetuned: pd.DataFrame
    """By row, column and seed: "f1" in percent, "step_ms" of a run measured alone, and the "record"."""
    timed: pd.DataFrame
    """By row and column, several lines each: "run", "median", "q1" and "q3" in milliseconds of a step of "tokens" (one
    micro-batch), "peak_mib" of a process that does nothing else, and the "record". Oldest first, but the run that timed
    most of a column is last: numbers in one column should be of one run."""
    failed: pd.DataFrame
    """What failed and never went well: "row", "column", "kind" and "said"."""

    @property
    def steps(self) -> pd.DataFrame:
        """The last line of every cell that was timed."""
        return self.timed.groupby(level=CELL, sort=False).tail(1)


def read_results(path: Path) -> list[Record]:
    """The records of a file that `lineartime reproduce` writes, oldest first.

    Raises DataError where there is no file or it holds something else."""
    if not path.is_file():
        raise DataError("no rows to report", path, "`lineartime reproduce` writes them")
    records = read_records(path)
    for number, record in enumerate(records, 1):
        try:
            for column in COLUMNS[record["kind"]].values() if not record.get("failed") else ():
                column(record)
            if record["kind"] != "step" and not isinstance(record["settings"]["seed"], int):
                raise TypeError("the seed is no number")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
            raise DataError("not a row of a run", f"{path}, row {number}", f"{type(e).__name__}: {e}") from None
    return records


COLUMNS: dict[str, dict[str, Callable[[Record], Any]]] = {
    "train": {
        "loss": lambda row: row["held_out"]["loss"],
        "perplexity": lambda row: math.exp(row["held_out"]["loss"]),
        "word_perplexity": lambda row: row["held_out"]["word_perplexity"] if row["held_out"].get("n_words") else None,
        "n_parameters": lambda row: row["n_parameters"],
        "steps": lambda row: row["curve"][-1][0],
        "tokens": lambda row: row["tokens"]},
    "finetune": {
        "f1": lambda row: row["f1"],
        "step_ms": lambda row: row["step_ms"]["cpu" if row["device"] == "cpu" else "wall"]["median"]},
    "step": {
        "run": lambda row: row["run"],
        "time": lambda row: row["time"],
        **{name: partial(lambda name, row: row[f"{row['clock']}_ms"][name], name) for name in ("median", "q1", "q3")},
        "tokens": lambda row: row["tokens_per_step"],
        "peak_mib": lambda row: row.get("peak_mib"),
        "n_parameters": lambda row: row.get("n_parameters")}}
"""Of a frame, by the kind of its records."""


def results_of(name: str, scale: ScaleName, records: Iterable[Record]) -> Results:
    """What records, oldest first, say of a table at a scale."""
    records = [record for record in records if record.get("scale") == scale]
    table = TABLES[name]
    planned = table.cells(scale)
    cells = pd.DataFrame([(row, column, Cell(table, row, column, SCALES[scale]), (row, column) in planned)
                          for column in table.columns for row in table.models], columns=[*CELL, "cell", "planned"])
    cells["key"] = [cell.key for cell in cells.cell] if records else ""  # which takes its time
    # Rows that a scale makes the same, such as sizes where it has but one, must not lend each other's runs.
    lenders = cells[cells.planned | ~cells.duplicated(["column", "key"], keep=False)]
    found = lenders.merge(pd.DataFrame({
        "key": [key_of(record["text"], record["settings"]) for record in records],
        "kind": [record["kind"] for record in records],
        "seed": [record["settings"].get("seed", -1) for record in records],
        "well": [not record.get("failed") for record in records], "record": records}), on="key")
    found = found.loc[[belongs(cell, record) for cell, record in zip(found.cell, found.record, strict=True)]]
    seed = [*CELL, "kind", "seed"]
    well = found.loc[found.well.astype(bool)]
    bad = found.merge(well[seed].drop_duplicates(), on=seed, how="left", indicator="at_last")
    bad = bad[bad.at_last == "left_only"]
    bad["said"] = [record["failed"] if seed < 0 else f"seed {seed}: {record['failed']}"
                   for seed, record in zip(bad.seed, bad.record, strict=True)]
    newest = well.drop_duplicates(seed, keep="last").sort_values("seed", kind="stable")
    cells = cells.set_index(CELL)
    cells["known"] = cells.index.isin(pd.MultiIndex.from_frame(found[CELL]))
    rows = [row for row in table.models if row in set(found["row"])]
    columns = [column for column in table.columns if column in set(found["column"])]
    return Results(table, SCALES[scale], rows, columns, cells, frame_of(newest, "train"), frame_of(newest, "finetune"),
                   timed_together(frame_of(well, "step")), bad[[*CELL, "kind", "said"]].drop_duplicates())


def belongs(cell: Cell, record: Record) -> bool:
    """Whether a record of a cell's settings is of the kind that the cell has."""
    if record["kind"] == "finetune":
        return cell.questions is not None and record.get("questions") == asdict(cell.questions)
    return record["kind"] == "step" or cell.table.kind == "train"


def frame_of(found: pd.DataFrame, kind: str) -> pd.DataFrame:
    """What records of a kind say, by row, column and seed; steps, which have no seed, by row and column."""
    found = found[found.kind == kind]
    columns = {name: [column(record) for record in found.record] for name, column in COLUMNS[kind].items()}
    return found.assign(**columns).set_index(CELL if kind == "step" else [*CELL, "seed"])[[*columns, "record"]]


def timed_together(timed: pd.DataFrame) -> pd.DataFrame:
    """The run of each column last that timed most of it, the newest of several."""
    runs = timed.groupby(["column", "run"]).time.agg(["size", "max"]).reset_index().sort_values(["size", "max", "run"])
    best = runs.groupby("column").run.last()
    in_best = timed.run == best.reindex(timed.index.get_level_values("column")).to_numpy()
    return pd.concat([timed[~in_best], timed[in_best]])


def of_cell(frame: Any, row: str, column: str | None = None) -> Any:
    """A cell's lines of a data frame or series, perhaps none; those of all columns where none is named."""
    lines = frame[frame.index.get_level_values("row") == row]
    return lines if column is None else lines[lines.index.get_level_values("column") == column]


def spread(values: pd.Series) -> pd.DataFrame:
    """Of each cell that has any: mean, least and most of its seeds, and their number."""
    return pd.DataFrame(values.dropna().groupby(level=CELL, sort=False).agg(["mean", "min", "max", "size"]))


def curve_of(results: Results, row: str, column: str) -> pd.DataFrame:
    """Held-out loss in nats per token, of a part of the split: a line for each step that all seeds have, a column for
    each seed."""
    records = of_cell(results.trained, row, column).record
    return pd.DataFrame({key[-1]: dict(record["curve"]) for key, record in records.items()}).dropna().sort_index()


def positions_of(results: Results, row: str, column: str) -> pd.DataFrame:
    """Loss in nats per token of the whole held-out split, at the end of training: a line for the tokens from a first to
    a last of a context, counted from 1, a column for each seed."""
    records = of_cell(results.trained, row, column).record
    spans = {key[-1]: {(span["first"], span["last"]): span["loss"]
                       for span in record["held_out"].get("loss_by_position") or ()} for key, record in records.items()}
    return pd.DataFrame(spans).dropna().sort_index()


def seconds_per_step(results: Results) -> pd.Series:
    """By row and column, what a step of training costs: its tokens times the time per token as measured side by side,
    for runs are not alone on their machine."""
    trained, steps = results.trained.groupby(level=CELL, sort=False).first(), results.steps
    return (trained.tokens / trained.steps * steps["median"] / steps.tokens / 1e3).dropna()


def paired(results: Results, ours: tuple[str, str], theirs: tuple[str, str], what: str) -> pd.Series:
    """What ours has more of than theirs, by seed: runs of one seed read the same text in the same order."""
    values = [of_cell(results.trained, *cell).droplevel(CELL)[what] for cell in (ours, theirs)]
    return (values[0] - values[1]).dropna()


def step_speedups(results: Results, reference: str) -> pd.DataFrame:
    """By row and column: the reference's time of a step over the row's ("value"), in the last run that measured both,
    and quartile over opposite quartile ("low", "high")."""
    times = results.timed[["median", "q1", "q3"]].div(results.timed.tokens, axis=0).assign(run=results.timed.run)
    theirs = times[times.index.get_level_values("row") == reference].reset_index()
    both = times.reset_index().merge(theirs.drop_duplicates(["column", "run"], keep="last"), on=["column", "run"],
                                     suffixes=("", "_theirs"))
    both = both.rename(columns={"row_x": "row"}).drop_duplicates(CELL, keep="last").set_index(CELL)
    return pd.DataFrame({"value": both["median_theirs"] / both["median"], "low": both.q1_theirs / both.q3,
                         "high": both.q3_theirs / both.q1})


def speedups(results: Results, reference: str) -> pd.DataFrame:
    """By row and column, as the paper defines it: the time the reference takes to its best mean loss over the time the
    row takes to the same loss. "value" is of the mean curve, "seeds" of each seed's own; NaN never gets there.

    There is no line where the training of one or the other is not known, or its step's time beside the other's."""
    found = {}
    for (row, column), by_step in step_speedups(results, reference).value.items():
        ours, theirs = curve_of(results, row, column), curve_of(results, reference, column).mean(axis=1)
        if not ours.empty and not theirs.empty:
            loss = theirs.min()
            cost = by_step * steps_to(loss, theirs)
            records = of_cell(results.trained, row, column).record
            own = [cost / steps_to(loss, pd.Series(dict(record["curve"]))) for record in records]
            found[row, column] = {"value": cost / steps_to(loss, ours.mean(axis=1)), "seeds": own}
    index = pd.MultiIndex.from_tuples(list(found), names=CELL)
    return pd.DataFrame(list(found.values()), index, ["value", "seeds"])


def steps_to(loss: float, curve: pd.Series) -> float:
    """Steps at which a curve, losses by step, first is down at a loss, linear between its points; NaN where it never
    is."""
    down = np.flatnonzero(curve <= loss)
    if not len(down):
        return math.nan
    last = down[0]
    steps, losses = curve.index[max(last - 1, 0):last + 1], curve.iloc[max(last - 1, 0):last + 1]
    return float(np.interp(-loss, -losses, steps))
