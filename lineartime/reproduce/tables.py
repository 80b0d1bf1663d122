"""The paper's tables and figures as cells, read from `tables.toml`: a model of a row in a column, and which of them
each scale runs."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lineartime.config import TASKS

ScaleName = Literal["paper", "gpu", "cpu"]
SCALE_NAMES: tuple[ScaleName, ...] = ("paper", "gpu", "cpu")
Settings = dict[str, Any]
Cells = tuple[tuple[str, ...], tuple[str, ...]]
"""Rows and columns: every one of the first in every one of the second."""


@dataclass(frozen=True)
class Model:
    """A row: a preset with fields of the model or of its training replaced."""

    preset: str
    fields: Settings = field(default_factory=dict)
    """At every scale."""
    paper: Settings = field(default_factory=dict)
    cpu: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A column: a text, a context and what is learned."""

    task: Literal["wiki40b", "c4", "pg19", "triviaqa"]
    context: int
    tokens: int | None = None
    cpu_vocab_size: int | None = None


@dataclass(frozen=True)
class Table:
    """One table or figure; `tables.toml` says what its fields are."""

    name: str
    title: str
    models: dict[str, Model]
    columns: dict[str, Column]
    paper: tuple[Cells, ...]
    gpu: tuple[Cells, ...]
    cpu: tuple[Cells, ...]
    kind: Literal["train", "step"] = "train"
    reference: str | None = None
    measures: tuple[str, ...] = ()
    one_seed: tuple[str, ...] = ()
    cpu_caption: str = ""

    def cells(self, scale: ScaleName) -> list[tuple[str, str]]:
        """Row and column of each cell that is run, without repetition."""
        return list(dict.fromkeys((row, column) for rows, columns in getattr(self, scale)
                                  for column in columns for row in rows))


def read_tables() -> dict[str, Table]:
    """The tables of `tables.toml` by name, in its order."""
    tables = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
    presets = tables.pop("presets")
    return {name: table_of(name, entry, presets) for name, entry in tables.items()}


def table_of(name: str, entry: Settings, presets: Settings) -> Table:
    """An entry of `tables.toml` as a table."""
    every = {scale: entry.pop(f"{scale}_fields", {}) for scale in ("paper", "cpu")}
    models = {}
    for label, own in ({label: presets[label] for label in entry.pop("also", [])} | entry.pop("models", {})).items():
        own = dict(own) if isinstance(own, dict) else {"preset": own}
        preset, scaled = own.pop("preset"), {scale: fields | own.pop(scale, {}) for scale, fields in every.items()}
        models[label] = Model(preset, own, **scaled)
    columns = {label: Column(**own) for label, own in entry.pop("columns", {}).items()}
    columns |= {f"{each.get('prefix', '')}{length}": Column(each["task"], length)
                for each in entry.pop("contexts", []) for length in each["lengths"]}
    for scale in SCALE_NAMES:
        entry[scale] = tuple((tuple(part.get("models", models)), tuple(part.get("columns", columns)))
                             for part in entry.get(scale, [{}]))
    one_seed = entry.pop("one_seed", ())
    return Table(**{**entry, "name": name, "models": models, "columns": columns,
                    "measures": tuple(entry.get("measures", ())),
                    "one_seed": tuple(models if one_seed is True else one_seed)})


TABLES = read_tables()
assert {column.task for table in TABLES.values() for column in table.columns.values()} == {*TASKS, "triviaqa"}
