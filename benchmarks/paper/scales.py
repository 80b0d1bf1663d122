"""A cell of a table at a scale of `scales.toml` as a run: what `lineartime train` is given, a flat table of settings,
and a text. Two cells with the same settings and text share a run.
"""

import json
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from benchmarks.cells import shaped_config
from benchmarks.paper.tables import SCALE_NAMES, TABLES, Column, Model, ScaleName, Settings, Table
from lineartime.config import ModelConfig, TrainConfig, model_config

Kind = Literal["train", "finetune", "step"]


@dataclass(frozen=True)
class Text:
    """What is read: a folder below the texts that the user names, or without one the data set of the hub."""

    task: str
    vocab_size: int
    folder: str | None = None
    mlm: bool = False

    @property
    def name(self) -> str:
        parts = (self.folder or f"hub-{self.task}", str(self.vocab_size), *(["mlm"] if self.mlm else []))
        return "-".join(parts).replace("/", "-")


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


CONTENT = tomllib.loads(Path(__file__).with_name("scales.toml").read_text(encoding="utf-8"))
TEXTS = {name: {task: Text(**text) for task, text in CONTENT[name].pop("texts").items()} for name in SCALE_NAMES}
SCALES = {name: Scale(name, texts=TEXTS[name], **CONTENT[name]) for name in SCALE_NAMES}


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
        shaped = shaped_config(model.preset, task, {**scale.shape, **own.get("shape", {})})
        family = scale.train.get("gau" if plain.ffn == "gau" else "pairs", {})
        chosen = {each.name: getattr(shaped, each.name) for each in fields(ModelConfig)
                  if getattr(shaped, each.name) != getattr(plain, each.name)}
        chosen |= {"context": own.get("context", column.context), **({"causal": False} if self.questions else {})}
        chosen |= {**scale.train, **family, **own.get("train", {}), **model.fields,
                   **model.at_scale.get(scale.name, {})}
        chosen |= {"tokens_per_step": column.tokens} if column.tokens else {}
        micro = chosen.get("micro_batch_tokens", TrainConfig.micro_batch_tokens)
        chosen["micro_batch_tokens"] = column.tokens or max(micro, chosen["context"])
        chosen |= {"model": model.preset, "task": task, **({} if seed is None else {"seed": seed})}
        return {name: value for name, value in chosen.items() if name not in ("gau", "pairs")}

    def key(self, kind: Kind) -> str:
        """What cells have in common that share their runs, and what a record of this kind has that is the cell's."""
        return key_of(kind, self.text.name, self.settings(None), self.questions if kind == "finetune" else None)


def key_of(kind: str, text: str, settings: Settings, questions: Settings | None = None) -> str:
    """The same for runs of one kind on one text, of equal settings but for the seed."""
    settings = {name: value for name, value in settings.items() if name != "seed"}
    return json.dumps([kind, text, settings, questions], sort_keys=True)


def cells_of(table: str, scale: ScaleName) -> list[Cell]:
    """The cells of a table that are run at a scale, in the order they are run."""
    return [Cell(TABLES[table], row, column, SCALES[scale]) for row, column in TABLES[table].cells[scale]]


def caption_of(table: Table, scale: Scale) -> str:
    """What was chosen for a table at a scale, and why."""
    return table.cpu_caption if table.cpu_caption and scale.name == "cpu" else scale.caption
