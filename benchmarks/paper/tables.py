"""The paper's tables and figures as cells, each a model in a row and a column, from `tables.toml`;
and the paper's numbers, from `paper.toml`. At a scale of `scales.toml` a cell is a run: settings
for `lineartime train`, and a text. Two cells with the same settings and text share a run."""

import json
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks import cells
from lineartime.config import REMOVED, ModelConfig, TrainConfig, model_config

ScaleName = Literal["paper", "gpu", "cpu"]
SCALE_NAMES: tuple[ScaleName, ...] = ("paper", "gpu", "cpu")
Settings = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A row: a preset with fields replaced, at every scale and at one."""

    preset: str
    fields: Settings
    at_scale: dict[str, Settings]


@dataclass(frozen=True)
class Column:
    """A text, a context and what is learned."""

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
    """What each scale runs: not models with an option that is gone, whose records stay."""
    measures: list[str]
    kind: Literal["train", "step"] = "train"
    timed: bool = True
    reference: str | None = None
    one_seed: list[str] | Literal["all"] = field(default_factory=list)
    cpu_caption: str = ""
    evaluations: dict[str, str] = field(default_factory=dict)  # of `benchmarks.context_use`, by their names in a row
    own: dict[str, dict[str, Settings]] = field(default_factory=dict)  # by column and row


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
    planned = {scale: list(dict.fromkeys(
        (row, column) for part in entry.pop(scale, [{}]) for column in part.get("columns", columns)
        for row in part.get("models", models) if not models[row].fields.keys() & REMOVED.keys()))
        for scale in SCALE_NAMES}
    return Table(name, models=models, columns=columns, cells=planned, **entry)


def read_toml(name: str, **options: Any) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"), **options)


CONTENT = read_toml("tables")
PEERS: dict[str, Settings] = cells.PEERS | CONTENT.pop("peers")
"""Configurations of transformers, but for width and vocabulary, by what settings call "peer"."""
PRESETS = CONTENT.pop("presets")
TABLES = {name: table_of(name, entry, PRESETS) for name, entry in CONTENT.items()}

NOT_THEIRS = {"note": "The paper has no such table."}
PAPER: dict[str, dict[str, Any]] = dict.fromkeys(TABLES, NOT_THEIRS) | read_toml("paper", parse_float=str)
"""By table, measure, row and column, as printed; perhaps a table's "hardware" and "note"."""


def printed(table: str, measure: str, row: str | None, column: str) -> str:
    """A number, "--" or "OOM"; "" where the paper prints nothing."""
    return str(PAPER[table].get(measure, {}).get(row, {}).get(column, ""))


def value(table: str, measure: str, row: str | None, column: str) -> float | None:
    text = printed(table, measure, row, column)
    return None if text in ("", "--", "OOM") else float(text)


def step_speedup(table: str, row: str, reference: str | None, column: str) -> float | None:
    """The reference's time of a step over the row's, as printed."""
    theirs, ours = value(table, "step_ms", reference, column), value(table, "step_ms", row, column)
    return theirs / ours if theirs and ours else None


Kind = Literal["train", "finetune", "step"]


@dataclass(frozen=True)
class Text:
    """What is read and tokenised for a task."""

    task: str
    vocab_size: int
    folder: str  # below the texts that the user names, or a data set of the hub
    mlm: bool = False

    @property
    def name(self) -> str:
        parts = (self.folder, str(self.vocab_size), *(["mlm"] if self.mlm else []))
        return "-".join(parts).replace("/", "-").replace(":", "-")


@dataclass(frozen=True)
class Scale:
    """Text, size and training of every run at one scale; `scales.toml` says what its fields are."""

    name: ScaleName
    caption: str
    texts: dict[str, Text]
    questions: Settings
    seeds: int = 1
    shape: Settings = field(default_factory=dict)
    train: Settings = field(default_factory=dict)
    of_task: dict[str, Settings] = field(default_factory=dict)


OF_SCALE = read_toml("scales")
SCALES = {name: Scale(name, texts={task: Text(**text) for task, text in OF_SCALE[name].pop("texts").items()},
                      **OF_SCALE[name]) for name in SCALE_NAMES}


@dataclass(frozen=True)
class Cell:
    """One model in one column of one table at one scale."""

    table: Table
    row: str
    column: str
    scale: Scale

    @property
    def model(self) -> Model:
        return self.table.models[self.row]

    @property
    def where(self) -> Column:
        return self.table.columns[self.column]

    @property
    def text(self) -> Text:
        text, own = self.scale.texts[self.where.task], self.where
        return text if self.scale.name != "cpu" else replace(
            text, vocab_size=own.cpu_vocab_size or text.vocab_size, folder=own.cpu_folder or text.folder)

    @property
    def questions(self) -> Settings | None:
        """What the model is fine-tuned on after it was trained, and how."""
        return self.scale.questions if self.where.task == "triviaqa" else None

    @property
    def seeds(self) -> range:
        return range(1 if self.table.one_seed == "all" or self.row in self.table.one_seed else self.scale.seeds)

    def settings(self, seed: int | None = 0) -> Settings:
        """What `lineartime train` is given but for the folders; seed None leaves the seed out."""
        scale, model, column = self.scale, self.model, self.where
        own, task = scale.of_task.get(column.task, {}), "wiki40b" if column.task == "triviaqa" else column.task
        plain = model_config(model.preset, task)
        shaped = cells.shaped_config(model.preset, task, {**scale.shape, **own.get("shape", {})})
        family = scale.train.get("gau" if plain.ffn == "gau" else "pairs", {})
        # First what the scale's shape changes in the model; later lines win over earlier ones.
        chosen = {each.name: getattr(shaped, each.name) for each in fields(ModelConfig)
                  if getattr(shaped, each.name) != getattr(plain, each.name)}
        chosen |= {"context": own.get("context", column.context), **({"causal": False} if self.questions else {})}
        chosen |= {**scale.train, **family, **own.get("train", {}), **model.fields,
                   **model.at_scale.get(scale.name, {}), **self.table.own.get(self.column, {}).get(self.row, {})}
        chosen |= {"tokens_per_step": column.tokens} if column.tokens else {}
        micro = chosen.get("micro_batch_tokens", TrainConfig.micro_batch_tokens)
        chosen["micro_batch_tokens"] = column.tokens or max(micro, chosen["context"])
        chosen |= {"model": model.preset, "task": task, **({} if seed is None else {"seed": seed})}
        return {name: value for name, value in chosen.items() if name not in ("gau", "pairs")}

    def key(self, kind: Kind) -> str:
        """What cells that share a run have in common, and their records of this kind."""
        return key_of(kind, self.text.name, self.settings(None), self.questions if kind == "finetune" else None)


def key_of(kind: str, text: str, settings: Settings, questions: Settings | None = None) -> str:
    """The same for runs of one kind on one text, of equal settings but for the seed."""
    settings = {name: value for name, value in settings.items() if name != "seed"}
    return json.dumps([kind, text, settings, questions], sort_keys=True)


def cells_of(table: str, scale: ScaleName) -> list[Cell]:
    """The cells of a table that are run at a scale, in the order they are run."""
    return [Cell(TABLES[table], row, column, SCALES[scale]) for row, column in TABLES[table].cells[scale]]
