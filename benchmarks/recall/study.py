"""The study of recall, from `study.toml`: models, sizes, learning rates and seeds; and its rows."""

import math
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import Row
from benchmarks.cells import shaped_config
from benchmarks.measure import add_missing
from benchmarks.peers import build_peer
from benchmarks.provenance import installed_version, provenance, rows_in
from benchmarks.recall.measure import Model, OnStep, ask_at_lengths, measure
from benchmarks.recall.tasks import FORMS, TASKS, Task, text_task
from lineartime.base.settings import require, require_name
from lineartime.config import MODEL_FIELDS, REMOVED, TRAIN_FIELDS, ModelConfig, TrainConfig, without_removed
from lineartime.model.language_model import LanguageModel
from lineartime.training.evaluation import load_with_split

STUDY: dict[str, Any] = tomllib.loads(Path(__file__).with_name("study.toml").read_text(encoding="utf-8"))
RATES, SEEDS = STUDY["study"]["learning_rates"], STUDY["study"]["seeds"]


def models_of(task: str) -> list[str]:
    """The models that learn a task, but for those that are gone."""
    name = STUDY["tasks"][task]
    names = list(STUDY["models"]) if name == "all" else STUDY["lists"][name]
    return [name for name in names if not STUDY["models"][name].keys() & REMOVED.keys()]


def task_of(name: str, data: Path | None) -> Task:
    """A task by its name. data: prepared text, for `FORMS` alone. Raises UsageError for another
    name and for missing or needless text, and as `text_task` does."""
    require_name("task", name, [*TASKS, *FORMS])
    require((name in FORMS) == (data is not None), f"{' and '.join(FORMS)} read prepared text, no other task does",
            f"task = {name}", "give --data what `lineartime prepare` made" if name in FORMS else "leave out --data")
    return TASKS[name] if data is None else text_task(data, name)


def config_of(model: str, task: Task, settings: Mapping[str, Any]) -> ModelConfig:
    """A model of the study with any field replaced; for a peer, the model of ours that it is as
    large as. Raises UsageError for an unknown one."""
    require_name("model", model, STUDY["models"])
    own = {name: value for name, value in without_removed(STUDY["models"][model]).items() if name != "peer"}
    of_task = {"vocab_size": task.vocab_size, "context": task.length, "end_of_document": task.end_of_document}
    return shaped_config(own.pop("preset"), shape=STUDY["sizes"], settings={**of_task, **own, **settings})


def peer_of(model: str) -> Row | None:
    """The configuration of a peer in transformers, but for width and vocabulary; or None."""
    return STUDY["models"][model].get("peer")


def new_model(model: str, config: ModelConfig, seed: int) -> Model:
    """A model of the study with new weights. Raises as `build_peer` does."""
    torch.manual_seed(seed)
    peer = peer_of(model)
    return LanguageModel(config) if peer is None else build_peer(model, config, peer)


def training(name: str, task: Task, settings: Mapping[str, Any]) -> TrainConfig:
    """The study's training on the task of this name, with any field replaced; settings of the model
    are left out. Raises UsageError for a batch that is not of whole rows."""
    given = {each: value for each, value in settings.items() if each in TRAIN_FIELDS}
    chosen = {**STUDY["train"], **STUDY["train_of"].get(name, {}), **given}
    train = TrainConfig(**{**chosen, "micro_batch_tokens": chosen["tokens_per_step"]})
    length = settings.get("context", task.length)
    require(length >= 1 and train.tokens_per_step % length == 0, "tokens_per_step must be a multiple of the length",
            f"{train.tokens_per_step} and {length}")
    return train


def key_of(model: str, task: str, config: ModelConfig, train: TrainConfig) -> Row:
    """The columns of a row by which a run is found again."""
    settings, own = ({each.name: getattr(given, each.name) for each in fields(given)
                      if getattr(given, each.name) != each.default and each.name not in ("learning_rate", "seed")}
                     for given in (config, train))
    if peer := peer_of(model):
        settings = {"peer": peer, "vocab_size": config.vocab_size, "context": config.context}
    return {"kind": "recall", "task": task, "model": model, "settings": settings, "training": own,
            "learning_rate": train.learning_rate, "seed": train.seed}


def read_rows(path: Path) -> list[Row]:
    def parse(row: Row) -> Row:
        for name in ("task", "model", "settings", "training", "learning_rate", "seed", "curve"):
            row[name]
        return row

    return rows_in(path, parse, "a row of recall")


def score(row: Row) -> float:
    """The mean accuracy at the trained length over all numbers of facts; 0 if it failed."""
    right = row.get("accuracy", {}).get(str(row["length"]), {})
    return sum(right.values()) / len(right) if right else 0.0


def best_rate(first: Sequence[Row]) -> float:
    """The learning rate that more seeds repeat: the one with the best `score` of a model's first
    rows, and of equally good ones the one that learned the task soonest."""
    return max(first, key=lambda row: (score(row), -(row["passed"] or math.inf)))["learning_rate"]


def check(model: str, name: str, task: Task, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings that a model cannot have, or rows too short for a task."""
    training(name, task, settings)
    config = config_of(model, task, {each: settings[each] for each in settings.keys() & MODEL_FIELDS})
    require(config.context >= task.least, "the row is too short for its facts", f"context = {config.context}",
            f"the task {name} takes {task.least} tokens or more")
    own = ", ".join(sorted(settings.keys() & {*MODEL_FIELDS} - {"context"}))
    require(not own or peer_of(model) is None, "a peer has sizes of its own", f"{model}: {own}", "leave out --set")
    new_model(model, config, 0)


def measure_model(model: str, name: str, task: Task, settings: Mapping[str, Any], path: Path,
                  on_step: OnStep) -> Iterator[Row]:
    """The rows of a model on a task: every rate with the first seed, and the `best_rate` with the
    others. What the file lacks is measured and appended. Raises as `measure` and `add_missing`."""
    config = config_of(model, task, {each: value for each, value in settings.items() if each in MODEL_FIELDS})
    train = training(name, task, settings)
    # Where a row comes from, without the folders of the machine.
    words = [word for each, value in settings.items() for word in ("--set", f"{each}={str(value).lower()}")]
    command = shlex.join(["python", "-m", "benchmarks", "recall", model, "--task", name, *words])
    versions = {"transformers": installed_version("transformers")} if peer_of(model) else {}

    def row_of(rate: float, seed: int) -> Row:
        chosen = replace(train, learning_rate=rate, seed=seed)
        return add_missing(path, key_of(model, name, config, chosen), command, lambda: versions | measure(
            new_model(model, config, seed), task, chosen, length=config.context, on_step=on_step))

    first = []
    for rate in [*STUDY["study"]["lower_rates"].get(model, []), *RATES]:
        first.append(row_of(rate, 0))
        yield first[-1]
    best = best_rate(first)
    for seed in range(1, SEEDS):
        yield row_of(best, seed)


def ask_run(run: Path, data: Path, name: str, length: int, progress: Callable[[int], None] | None = None) -> Row:
    """A trained model's accuracy on a task in text. Raises as `load_with_split` does."""
    model, stream, facts = load_with_split(run, data)
    require(model.config.causal, "only a causal model answers", f"{run}: causal = false")
    task = text_task(data, name)
    return {"kind": "recall", "task": name, "model": run.name, "settings": {}, "step": facts.get("step"),
            "data": stream.tokenizer_sha256, "training": {}, "learning_rate": None, "seed": 0, "length": length,
            "n_facts": list(task.n_facts), "curve": [], "passed": None,
            **ask_at_lengths(model, task, length, progress), **provenance(),
            "command": shlex.join(["python", "-m", "benchmarks", "recall", run.name, "--task", name])}
