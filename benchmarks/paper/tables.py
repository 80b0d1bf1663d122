"""The paper's tables and figures as cells, read from `tables.toml`: a model of a row in a column, and which of them
each scale runs; and the paper's numbers, from `paper.toml`."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lineartime.config import TASKS

ScaleName = Literal["paper", "gpu", "cpu"]
SCALE_NAMES: tuple[ScaleName, ...] = ("paper", "gpu", "cpu")
Settings = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A row: a preset with fields of the model or of its training replaced, at every scale and at one."""

    preset: str
    fields: Settings
    at_scale: dict[str, Settings]


@dataclass(frozen=True)
class Column:
    """A column: a text, a context and what is learned."""

    task: Literal["wiki40b", "c4", "pg19", "triviaqa"]
    context: int
    tokens: int | None = None
    cpu_vocab_size: int | None = None
    cpu_folder: str | None = None


@dataclass(frozen=True)
class Table:
    """One table or figure; `tables.toml` says what its fields are."""

    name: str
    title: str
    models: dict[str, Model]
    columns: dict[str, Column]
    cells: dict[ScaleName, list[tuple[str, str]]]
    """Row and column of what each scale runs."""
    measures: list[str]
    kind: Literal["train", "step"] = "train"
    reference: str | None = None
    one_seed: list[str] | Literal["all"] = field(default_factory=list)
    cpu_caption: str = ""
    evaluations: dict[str, str] = field(default_factory=dict)
    """Options of `lineartime evaluate`, by what the row of a run calls its JSON."""


def table_of(name: str, entry: Settings, presets: Settings) -> Table:
    """An entry of `tables.toml` as a table."""
    every = {scale: entry.pop(f"{scale}_fields", {}) for scale in ("paper", "cpu")}
    models = {}
    for label, own in ({label: presets[label] for label in entry.pop("also", [])} | entry.pop("models", {})).items():
        own = dict(own) if isinstance(own, dict) else {"preset": own}
        at_scale = {scale: fields | own.pop(scale, {}) for scale, fields in every.items()}
        models[label] = Model(own.pop("preset"), own, at_scale)
    columns = {label: Column(**own) for label, own in entry.pop("columns", {}).items()}
    columns |= {f"{each.get('prefix', '')}{length}": Column(each["task"], length)
                for each in entry.pop("contexts", []) for length in each["lengths"]}
    cells = {scale: list(dict.fromkeys(
        (row, column) for part in entry.pop(scale, [{}]) for column in part.get("columns", columns)
        for row in part.get("models", models))) for scale in SCALE_NAMES}
    return Table(name, models=models, columns=columns, cells=cells, **entry)


CONTENT = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
TABLES = {name: table_of(name, entry, CONTENT["presets"]) for name, entry in CONTENT.items() if name != "presets"}
"""By name, in the order of `tables.toml`."""
assert {column.task for table in TABLES.values() for column in table.columns.values()} == {*TASKS, "triviaqa"}


PAPER: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"), parse_float=str)
"""By name of the table: numbers, with the digits they were printed with, by measure, row and column; perhaps "hardware"
and "note"."""


def printed(table: str, measure: str, row: str | None, column: str) -> str:
    """A number, "--" or "OOM"; "" where the paper prints nothing."""
    return str(PAPER[table].get(measure, {}).get(row, {}).get(column, ""))


def value(table: str, measure: str, row: str | None, column: str) -> float | None:
    """The number that the paper prints; None where it prints none."""
    text = printed(table, measure, row, column)
    return None if text in ("", "--", "OOM") else float(text)


def step_speedup(table: str, row: str, reference: str | None, column: str) -> float | None:
    """The reference's time of a step over the row's, worked out from the times that are printed."""
    theirs, ours = value(table, "step_ms", reference, column), value(table, "step_ms", row, column)
    return theirs / ours if theirs and ours else None
