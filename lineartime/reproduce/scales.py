"""How large a table is made again: the paper's own size, one GPU, or two processor cores.

A run is what `lineartime train` is given: a flat table of settings, and a text. Both are worked out here from a cell of
`tables` and one of the three scales. Two cells with the same settings and text share a run.
"""

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lineartime.benchmark.cells import shaped_config
from lineartime.config import ModelConfig, model_config, run_config
from lineartime.reproduce.tables import TABLES, Column, Model, ScaleName, Table

Settings = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """What is read: a folder below the texts that the user names, or at the paper's scale the data set of the hub."""

    task: str
    vocab_size: int
    folder: str | None = None
    mlm: bool = False

    @property
    def name(self) -> str:
        parts = (self.folder or f"hub-{self.task}", str(self.vocab_size), *(["mlm"] if self.mlm else []))
        return "-".join(parts).replace("/", "-")


@dataclass(frozen=True)
class Questions:
    """What a model is fine-tuned on, and how."""

    train: str
    """Below the texts, or with `hub:` before it."""
    validation: str
    context: int
    options: Settings = field(default_factory=dict)
    """Other options of `lineartime finetune`, by their names."""
    settings: Settings = field(default_factory=dict)
    """What its --set takes."""


@dataclass(frozen=True)
class Scale:
    """Text, size and training of every run at one scale."""

    name: ScaleName
    caption: str
    """What was chosen and why, for the tables' captions."""
    texts: dict[str, Text]
    """By the task of a column."""
    questions: Questions
    seeds: int = 1
    shape: Settings = field(default_factory=dict)
    """Fields of all models, and in "gau" and "pairs" those of one family, as in lineartime/benchmark/cells.toml."""
    train: Settings = field(default_factory=dict)
    """Fields of TrainConfig of all runs, and in "gau" and "pairs" those of one family."""
    of_task: dict[str, Settings] = field(default_factory=dict)
    """Fields of either kind that one task's runs have in place of those."""


MINI_QUESTIONS = ("triviaqa_mini/qa/wikipedia-train.json", "triviaqa_mini/qa/wikipedia-dev.json")

PAPER = Scale(
    "paper", "the paper's settings on the published data sets",
    texts={"wiki40b": Text("wiki40b", 32_000), "c4": Text("c4", 32_000, mlm=True), "pg19": Text("pg19", 32_000),
           "triviaqa": Text("wiki40b", 32_000, mlm=True)},
    questions=Questions("hub:rc.wikipedia/train", "hub:rc.wikipedia/validation", 4096),
    train={"precision": "bfloat16", "compile": True, "eval_every": 2500, "eval_tokens": 2**21})

GPU = Scale(
    "gpu", "one GPU, at most nine minutes a run: the paper's 110 M models (for PG-19 too, where the paper has 500 M), "
    "one pass over 348 books (150 MB) for every table but TriviaQA, whose 230 articles are read once",
    texts={"wiki40b": Text("pg19", 32_000, "pg19_medium"), "c4": Text("pg19", 32_000, "pg19_medium", mlm=True),
           "pg19": Text("pg19", 32_000, "pg19_medium"),
           "triviaqa": Text("wiki40b", 32_000, "wiki40b_mini/en", mlm=True)},
    questions=Questions(*MINI_QUESTIONS, 4096),
    train={"precision": "bfloat16", "compile": True, "tokens_per_step": 2**16, "micro_batch_tokens": 2**14,
           "steps": 480, "warmup_steps": 48, "eval_every": 24, "eval_tokens": 2**17, "save_every": 240,
           "gau": {"learning_rate": 2e-3}, "pairs": {"learning_rate": 1e-3}},
    of_task={"pg19": {"d_model": 768, "gau": {"n_layers": 24}, "pairs": {"n_layers": 12, "n_heads": 12}},
             "triviaqa": {"steps": 32, "warmup_steps": 4, "eval_every": 4}})

CPU = Scale(
    "cpu", "two processor cores: a twelfth of the paper's width and a sixth of its layers, chunks of 64 where the "
    "paper has 256 (16 where it has 64), few contexts, small texts in the form of the published ones, vocabulary "
    "1,024, initial matrices as much larger as the width is smaller (0.07 where the paper has 0.02), 1,000 steps of "
    "4,096 tokens, a fifth of them warm-up, the learning rate that is best for each of three models (8e-3), GAU layers "
    "compiled and others not",
    texts={"wiki40b": Text("wiki40b", 1024, "wiki40b_mini/en"), "c4": Text("c4", 1024, "c4_mini/en", mlm=True),
           "pg19": Text("pg19", 1024, "pg19_mini"), "triviaqa": Text("wiki40b", 1024, "wiki40b_mini/en", mlm=True)},
    questions=Questions(*MINI_QUESTIONS, 512, {"learning_rates": "1e-3", "epochs": 1, "negatives": 0.1},
                        {"tokens_per_step": 8192, "micro_batch_tokens": 8192, "precision": "bfloat16"}),
    seeds=3,
    shape={"d_model": 64, "init_std": 0.07, "chunk_size": 64, "gau": {"n_layers": 4, "query_key_dim": 32},
           "pairs": {"n_layers": 2, "n_heads": 2}},
    train={"precision": "bfloat16", "tokens_per_step": 4096, "micro_batch_tokens": 4096, "steps": 1000,
           "warmup_steps": 200, "eval_every": 100, "eval_tokens": 2**16, "save_every": 500, "keep": 1,
           "learning_rate": 8e-3, "gau": {"compile": True}},
    of_task={"triviaqa": {"context": 512}})

SCALES: dict[ScaleName, Scale] = {scale.name: scale for scale in (PAPER, GPU, CPU)}
MODEL_FIELDS = tuple(each.name for each in fields(ModelConfig))


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
        text, own = self.scale.texts[self.where.task], self.where.cpu_vocab_size
        return replace(text, vocab_size=own) if own and self.scale.name == "cpu" else text

    @property
    def questions(self) -> Questions | None:
        """What the model is fine-tuned on after it was trained."""
        return self.scale.questions if self.where.task == "triviaqa" else None

    @property
    def seeds(self) -> range:
        return range(1 if self.row in self.table.one_seed else self.scale.seeds)

    def settings(self, seed: int | None = 0) -> Settings:
        """What `lineartime train` is given but for the folders; seed None leaves the seed out."""
        scale, model, column = self.scale, self.model, self.where
        task = "wiki40b" if column.task == "triviaqa" else column.task
        plain = model_config(model.preset, task)
        family = "gau" if plain.ffn == "gau" else "pairs"
        own = scale.of_task.get(column.task, {})
        shape = {**scale.shape, **{name: own[name] for name in own if name in (*MODEL_FIELDS, "gau", "pairs")}}
        shaped = shaped_config(model.preset, task, {name: shape[name] for name in shape if name != "context"})
        chosen = {name: getattr(shaped, name) for name in MODEL_FIELDS if getattr(shaped, name) != getattr(plain, name)}
        chosen["context"] = own.get("context", column.context)
        if column.task == "triviaqa":
            chosen["causal"] = False
        train = {**scale.train, **scale.train.get(family, {}),
                 **{name: value for name, value in own.items() if name not in shape}}
        chosen |= {name: value for name, value in train.items() if name not in ("gau", "pairs")}
        chosen |= {**(model.size if scale.name == "paper" else {}), **model.fields,
                   **(model.cpu if scale.name == "cpu" else {})}
        if column.tokens is not None:
            chosen |= {"tokens_per_step": column.tokens}
        micro = run_config({"model": model.preset, "data": "-", "out": "-"}).train.micro_batch_tokens
        micro = column.tokens or max(train.get("micro_batch_tokens", micro), chosen["context"])
        chosen["micro_batch_tokens"] = micro
        return {"model": model.preset, "task": task, **chosen, **({} if seed is None else {"seed": seed})}

    @property
    def key(self) -> str:
        """What two cells have in common that share their runs, and what a record has that is the cell's."""
        return key_of(self.text.name, self.settings(None))


def key_of(text: str, settings: Settings) -> str:
    """The same for runs of one text and of equal settings but for the seed."""
    return json.dumps([text, {name: value for name, value in settings.items() if name != "seed"}], sort_keys=True)


def cells_of(table: str, scale: ScaleName) -> list[Cell]:
    """The cells of a table that are run at a scale, in the order they are run."""
    return [Cell(TABLES[table], row, column, SCALES[scale]) for row, column in TABLES[table].cells(scale)]


def caption_of(table: Table, scale: Scale) -> str:
    """What was chosen for a table at a scale, and why."""
    return table.cpu_caption if table.cpu_caption and scale.name == "cpu" else scale.caption
