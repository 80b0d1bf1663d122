"""What the rows of `lineartime reproduce` say of each cell of a table: quality over seeds, time, memory, speed-ups.

A row belongs to a cell when its scale, text and settings are the cell's, so two tables share rows. The newest row of a
seed counts, and one that failed only where none went well.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lineartime.benchmark.rows import Ratio, Spread, ratio_of, spread_of
from lineartime.errors import DataError
from lineartime.reproduce.rows import Row, read_rows, rows_of
from lineartime.reproduce.scales import SCALES, Cell, Scale, cells_of
from lineartime.reproduce.tables import TABLES, ScaleName, Table


@dataclass(frozen=True)
class Seeds:
    """One number of each seed that was run; at least one."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def most(self) -> float:
        return max(self.values)

    @property
    def n(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Point:
    """Held-out loss in nats per token after so many steps."""

    step: int
    loss: Seeds


@dataclass(frozen=True)
class Positions:
    """Loss in nats per token of the tokens from `first` to `last` of a context, counted from 1."""

    first: int
    last: int
    loss: Seeds


@dataclass(frozen=True)
class SpeedUp:
    """How many times as cheap it is to reach the reference's best loss: steps times time per step, theirs over ours."""

    value: float | None
    """Of the mean curve; None where it never gets there."""
    seeds: tuple[float | None, ...]
    """Of each seed's own curve, to the same loss."""


@dataclass(frozen=True)
class Outcome:
    """What is known of one cell. Whatever was not measured is None or empty."""

    cell: Cell
    planned: bool
    """Whether the scale runs the cell. One that it does not may be known from another table's run."""
    trained: dict[int, Row]
    """Rows that went well, by seed."""
    finetuned: dict[int, Row]
    timed: tuple[Row, ...]
    """Steps that were measured side by side with others of their "run": oldest first, but for the run that most cells
    of the column have, which is last."""
    failures: dict[str, str]
    """What failed and never went well, by kind of row."""

    @property
    def known(self) -> bool:
        """Whether anything was run, even if it failed."""
        return bool(self.trained or self.finetuned or self.timed or self.failures)

    @property
    def missing_seeds(self) -> tuple[int, ...]:
        """Seeds that the cell wants and whose training has not gone well."""
        return tuple(seed for seed in self.cell.seeds if seed not in self.trained)

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that the outcome is made of."""
        return (*self.trained.values(), *self.finetuned.values(), *self.timed)

    @cached_property
    def loss(self) -> Seeds | None:
        """The best on validation, in nats per token."""
        return seeds_of(best_loss(row) for row in self.trained.values())

    @cached_property
    def perplexity(self) -> Seeds | None:
        """Per token."""
        return seeds_of(perplexity_of(row) for row in self.trained.values())

    @cached_property
    def word_perplexity(self) -> Seeds | None:
        """Per word; None for text whose words are not counted, as that of masked models."""
        counted = [row for row in self.trained.values() if row["held_out"].get("n_words")]
        return seeds_of(word_perplexity(row) for row in counted)

    @cached_property
    def curve(self) -> tuple[Point, ...]:
        """Held-out loss in the course of training, at the steps that all seeds have."""
        curves = [dict(row["curve"]) for row in self.trained.values()]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        return tuple(Point(step, Seeds(tuple(curve[step] for curve in curves))) for step in steps)

    @cached_property
    def loss_by_position(self) -> tuple[Positions, ...]:
        """Of the whole validation split, at the end of training."""
        spans = [{(span["first"], span["last"]): span["loss"] for span in row["held_out"].get("loss_by_position") or ()}
                 for row in self.trained.values()]
        shared = sorted(set.intersection(*map(set, spans))) if spans else []
        return tuple(Positions(*span, Seeds(tuple(each[span] for each in spans))) for span in shared)

    @property
    def step_tokens(self) -> int | None:
        """Tokens of the step that was timed: those of one micro-batch, where a step of training has several."""
        return self.timed[-1]["tokens_per_step"] if self.timed else None

    @property
    def step_ms(self) -> Spread | None:
        """Time of such a step, in the last run that measured it."""
        return spread_of(self.timed[-1][f"{self.timed[-1]['clock']}_ms"]) if self.timed else None

    @property
    def ms_per_token(self) -> Spread | None:
        return ms_per_token(self.timed[-1]) if self.timed else None

    def cost_s(self, step: float) -> float | None:
        """Seconds that training takes up to a step: its tokens times the time per token as measured side by side, for
        runs are not alone on their machine. None where either is not known."""
        if not self.trained or not self.timed:
            return None
        row = next(iter(self.trained.values()))
        return step * row["tokens"] / row["curve"][-1][0] * ms_per_token(self.timed[-1]).median / 1e3

    @property
    def peak_mib(self) -> float | None:
        """The most memory of a process that does nothing but such steps."""
        return self.timed[-1].get("peak_mib") if self.timed else None

    @cached_property
    def f1(self) -> Seeds | None:
        """Of the answers after fine-tuning, in percent."""
        return seeds_of(row["f1"] for row in self.finetuned.values())

    @cached_property
    def finetune_ms(self) -> Seeds | None:
        """Median time of a fine-tuning step in each run, measured alone."""
        return seeds_of(finetune_ms(row) for row in self.finetuned.values())

    @property
    def n_parameters(self) -> int | None:
        return next((row["n_parameters"] for row in self.rows if "n_parameters" in row), None)


@dataclass(frozen=True)
class Outcomes:
    """One table at one scale: every cell of it, by row and column, whether run or not."""

    table: Table
    scale: Scale
    cells: dict[tuple[str, str], Outcome]

    @property
    def known(self) -> list[Outcome]:
        """In the order of columns, then rows."""
        return [self.cells[row, column] for column in self.table.columns for row in self.table.models
                if self.cells[row, column].known]

    @property
    def known_columns(self) -> list[str]:
        return [column for column in self.table.columns
                if any(self.cells[row, column].known for row in self.table.models)]

    @property
    def known_rows(self) -> list[str]:
        return [row for row in self.table.models
                if any(self.cells[row, column].known for column in self.table.columns)]


def read_results(path: Path) -> list[Row]:
    """The rows of a file that `lineartime reproduce` writes, oldest first.

    Raises DataError where there is no file or it holds something else."""
    if not path.is_file():
        raise DataError("no rows to report", path, "`lineartime reproduce` writes them")
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        try:
            check(row)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise DataError("not a row of a run", f"{path}, row {number}", f"{type(e).__name__}: {e}") from None
    return rows


def check(row: Row) -> None:
    """Raise KeyError and the like for a row that lacks what an outcome is made of."""
    needed: dict[str, Callable[[Row], object]] = {
        "train": lambda row: (best_loss(row), row["held_out"].get("n_words"), row["tokens"]),
        "finetune": lambda row: (row["f1"], finetune_ms(row)),
        "step": lambda row: (row["run"], row["time"], ms_per_token(row))}
    look_at = needed[row["kind"]]
    if not row.get("failed"):
        look_at(row)
    if row["kind"] != "step" and not isinstance(row["settings"]["seed"], int):
        raise TypeError("the seed is no number")


def outcomes_of(table: str, scale: ScaleName, rows: Iterable[Row]) -> Outcomes:
    """What rows, oldest first, say of a table at a scale."""
    rows = [row for row in rows if row.get("scale") == scale]
    declared, planned = TABLES[table], {(cell.row, cell.column) for cell in cells_of(table, scale)}
    outcomes = {}
    for column in declared.columns:
        cells = [Cell(declared, label, column, SCALES[scale]) for label in declared.models]
        keys = [cell.key for cell in cells] if rows else []  # which takes its time
        found = []
        for number, cell in enumerate(cells):
            runs = (cell.row, column) in planned
            # Rows that a scale makes the same, such as sizes where it has but one, must not lend each other's runs.
            shares = rows and (runs or keys.count(keys[number]) == 1)
            found.append(outcome_of(cell, runs, rows) if shares else Outcome(cell, runs, {}, {}, (), {}))
        outcomes.update({(outcome.cell.row, column): outcome for outcome in timed_together(found)})
    return Outcomes(declared, SCALES[scale], outcomes)


def timed_together(column: Sequence[Outcome]) -> list[Outcome]:
    """The cells of a column with the run last that timed most of them, the newest of several: what stands in one column
    should have been measured in one run."""
    rows = [row for outcome in column for row in outcome.timed]
    runs = [row["run"] for row in rows]
    _, _, best = max(((runs.count(row["run"]), row["time"], row["run"]) for row in rows), default=(0, "", ""))
    return [replace(outcome, timed=tuple(sorted(outcome.timed, key=lambda row: row["run"] == best)))
            for outcome in column]


def outcome_of(cell: Cell, planned: bool, rows: Sequence[Row]) -> Outcome:
    """What rows, oldest first, say of a cell."""
    found = {"train": rows_of(cell, rows, "train") if cell.table.kind == "train" else [],
             "finetune": rows_of(cell, rows, "finetune") if cell.questions else [], "step": rows_of(cell, rows, "step")}
    well = {kind: [row for row in of_kind if not row.get("failed")] for kind, of_kind in found.items()}
    by_seed = {kind: {row["settings"].get("seed"): row for row in of_kind} for kind, of_kind in well.items()}
    failures = {kind: "; ".join(dict.fromkeys(failure(row) for row in of_kind if row.get("failed")
                                              and row["settings"].get("seed") not in by_seed[kind]))
                for kind, of_kind in found.items()}
    return Outcome(cell, planned, dict(sorted(by_seed["train"].items())), dict(sorted(by_seed["finetune"].items())),
                   tuple(well["step"]), {kind: said for kind, said in failures.items() if said})


def failure(row: Row) -> str:
    """"seed 1: the loss is not finite"; of a step, which has no seed, only what it said."""
    seed = row["settings"].get("seed")
    return row["failed"] if seed is None else f"seed {seed}: {row['failed']}"


def best_loss(row: Row) -> float:
    """The least held-out loss of a training run, in nats per token."""
    return min(loss for _, loss in row["curve"])


def perplexity_of(row: Row) -> float:
    """Per token, of the best loss."""
    return math.exp(best_loss(row))


def word_perplexity(row: Row) -> float:
    """Of the whole split at the end of training, where that is the best; else of the best loss of the curve."""
    held_out = row["held_out"]
    if best_loss(row) == row["curve"][-1][1]:
        return held_out["word_perplexity"]
    return math.exp(best_loss(row) * held_out["n_tokens"] / held_out["n_words"])


def ms_per_token(row: Row) -> Spread:
    """Of a step that was measured side by side, by the clock that counts."""
    return spread_of(row[f"{row['clock']}_ms"], row["tokens_per_step"])


def finetune_ms(row: Row) -> float:
    """Median of a step of a fine-tuning run: the processor's time, or on a GPU as time passes."""
    return row["step_ms"]["cpu" if row["device"] == "cpu" else "wall"]["median"]


def seeds_of(values: Iterable[float]) -> Seeds | None:
    found = tuple(values)
    return Seeds(found) if found else None


def paired(ours: Outcome, theirs: Outcome, of: Callable[[Row], float]) -> Seeds | None:
    """What ours has more of than theirs, seed by seed: runs of one seed read the same text in the same order."""
    return seeds_of(of(row) - of(theirs.trained[seed]) for seed, row in ours.trained.items() if seed in theirs.trained)


def step_speedup(ours: Outcome, reference: Outcome) -> Ratio | None:
    """The reference's time of a step over ours, in the last run that measured both."""
    theirs = {row["run"]: row for row in reference.timed}
    return next((ratio_of(ms_per_token(theirs[row["run"]]), ms_per_token(row)) for row in reversed(ours.timed)
                 if row["run"] in theirs), None)


def speedup(ours: Outcome, reference: Outcome) -> SpeedUp | None:
    """As the paper defines it: the time the reference takes to its best mean loss over the time ours takes to it.

    None where the training of one or the other is not known, or its step's time beside the other's."""
    by_step = step_speedup(ours, reference)
    if not ours.curve or not reference.curve or by_step is None:
        return None
    loss = min(point.loss.mean for point in reference.curve)
    reference_steps = steps_to(loss, [(point.step, point.loss.mean) for point in reference.curve])
    assert reference_steps is not None

    def times(curve: Sequence[tuple[int, float]]) -> float | None:
        steps = steps_to(loss, curve)
        return None if steps is None else by_step.value * reference_steps / steps

    return SpeedUp(times([(point.step, point.loss.mean) for point in ours.curve]),
                   tuple(times(row["curve"]) for row in ours.trained.values()))


def steps_to(loss: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Steps at which a curve first is down at a loss, linear between its points; None where it never is."""
    if curve and curve[0][1] <= loss:
        return curve[0][0]
    for (step, above), (later, below) in itertools.pairwise(curve):
        if below <= loss:
            return step + (later - step) * (above - loss) / (above - below)
    return None
