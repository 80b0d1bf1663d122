"""The study of recall, from `study.toml`: its models, its rows, and what they say: a line for each
run, and a table for each task."""

import math
import shlex
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import Row
from benchmarks.cells import shaped_config
from benchmarks.markdown import source_line
from benchmarks.measure import add_missing
from benchmarks.peers import build_peer
from benchmarks.provenance import installed_version, provenance, rows_in
from benchmarks.recall.measure import Model, OnStep, ask_at_lengths, measure
from benchmarks.recall.tasks import DIGITS, FORMS, TASKS, TEXT, Task, commonest, text_task
from lineartime.base.settings import field_text, require, require_name
from lineartime.base.words import in_markdown, markdown
from lineartime.config import MODEL_FIELDS, REMOVED, TRAIN_FIELDS, ModelConfig, TrainConfig, to_dict, without_removed
from lineartime.model.language_model import LanguageModel
from lineartime.training.evaluation import load_with_split

STUDY: dict[str, Any] = tomllib.loads(Path(__file__).with_name("study.toml").read_text(encoding="utf-8"))
RATES, SEEDS = STUDY["study"]["learning_rates"], STUDY["study"]["seeds"]
ABOUT = {name: (task.what, task.n_values, task.counted) for name, task in TASKS.items()} | {
    TEXT: (FORMS[TEXT], len(DIGITS), Task.counted)}
"""What is asked, how many values there are, and what `n_facts` counts."""
MADE_BY = {"command": "python -m benchmarks recall", "device": "cpu", "threads": 1}  # which no row says


def models_of(task: str) -> list[str]:
    """The models that learn a task, but for those that are gone."""
    names = STUDY["lists"].get(STUDY["tasks"][task], STUDY["models"])  # "all" is no list
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


CHOSEN = {"learning_rate", "seed", "compile", "micro_batch_tokens", "activation_checkpointing", "shard",
          "context_parallel", "eval_every", "eval_tokens", "save_every", "keep"}
"""Fields that the study chooses, or has no use for."""


def key_of(model: str, task: str, config: ModelConfig, train: TrainConfig) -> Row:
    """The columns of a row by which a run is found again."""
    settings, own = ({name: value for name, value in to_dict(given).items()
                      if getattr(given, name) != getattr(type(given), name) and name not in ("learning_rate", "seed")}
                     for given in (config, train))
    if peer := peer_of(model):
        settings = {"peer": peer, "vocab_size": config.vocab_size, "context": config.context}
    return {"kind": "recall", "task": task, "model": model, "settings": settings, "training": own,
            "learning_rate": train.learning_rate, "seed": train.seed}


def read_rows(path: Path) -> list[Row]:
    def parse(row: Row) -> Row:
        for name in ("task", "model", "settings", "training", "learning_rate", "seed", "curve", "length", "passed"):
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


def rates_to_try(first: Sequence[Row]) -> list[float]:
    """Learning rates that a model's first rows lack: the study's, then half or twice the best."""
    if not first:
        return RATES
    tried, best = [row["learning_rate"] for row in first], best_rate(first)
    return [best / 2] if best == min(tried) else [best * 2] if best == max(tried) else []


def check(model: str, name: str, task: Task, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings that a model cannot have, or rows too short for a task."""
    training(name, task, settings)
    config = config_of(model, task, {each: settings[each] for each in settings.keys() & MODEL_FIELDS})
    require(config.vocab_size >= task.vocab_size, "the vocabulary is too small for the task",
            f"vocab_size = {config.vocab_size}", f"the task {name} has {task.vocab_size} tokens")
    require(config.context >= task.least, "the row is too short for its facts", f"context = {config.context}",
            f"the task {name} takes {task.least} tokens or more")
    own = ", ".join(sorted(settings.keys() & {*MODEL_FIELDS} - {"context"}))
    require(not own or peer_of(model) is None, "a peer has sizes of its own", f"{model}: {own}", "leave out --set")
    new_model(model, config, 0)


def measure_model(model: str, name: str, task: Task, settings: Mapping[str, Any], path: Path,
                  on_step: OnStep) -> Iterator[Row]:
    """The rows of a model on a task: `rates_to_try` with the first seed, and the best with others.
    What the file lacks is measured and appended. Raises as `measure` and `add_missing`."""
    config = config_of(model, task, {each: value for each, value in settings.items() if each in MODEL_FIELDS})
    train = training(name, task, settings)
    # Where a row comes from, without the folders of the machine.
    words = [word for each, value in settings.items() for word in ("--set", f"{each}={field_text(value)}")]
    command = shlex.join(["python", "-m", "benchmarks", "recall", model, "--task", name, *words])
    versions = {"transformers": installed_version("transformers")} if peer_of(model) else {}

    def row_of(rate: float, seed: int) -> Row:
        chosen = replace(train, learning_rate=rate, seed=seed)
        return add_missing(path, key_of(model, name, config, chosen), command, lambda: versions | measure(
            new_model(model, config, seed), task, chosen, length=config.context, on_step=on_step))

    first: list[Row] = []
    while rates := rates_to_try(first):
        for rate in rates:
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


def learning(rows: Sequence[Row], task: str) -> list[Row]:
    """The rows of models that learned a task; one that was only asked has no learning rate."""
    return [row for row in rows if row["task"] == task and row["learning_rate"] is not None]


def learned(rows: Sequence[Row], task: str) -> dict[str, list[Row]]:
    """By model, in the study's order, the newest runs by seed at the learning rate that was best
    with the first. Runs with other settings than the model's oldest are another model."""
    oldest: dict[str, Row] = {}
    named: dict[str, dict[tuple[float, int], Row]] = {}
    for model in STUDY["models"]:
        for row in (row for row in learning(rows, task) if row["model"] == model):
            own, other = (each["settings"] | each["training"] for each in (row, oldest.setdefault(model, row)))
            differ = [name for name in own | other if own.get(name) != other.get(name)]
            name = ", ".join([model, *(f"{name}={own.get(name, 'default')}" for name in differ)])
            named.setdefault(name, {})[row["learning_rate"], row["seed"]] = row
    found = {}
    for name, newest in named.items():
        first = [row for (_, seed), row in newest.items() if seed == 0]
        if first:
            rate = best_rate(first)
            found[name] = sorted((row for row in newest.values() if row["learning_rate"] == rate),
                                 key=lambda row: row["seed"])
    return found


def accuracies(runs: Sequence[Row], length: int, n_facts: int | None = None) -> list[float]:
    """By seed, of one number of facts or the mean of all; none at a length that was refused."""
    told = [row["accuracy"][str(length)] for row in runs if str(length) in row.get("accuracy", {})]
    return [statistics.fmean(right.values()) if n_facts is None else right[str(n_facts)] for right in told]


def without_keys(task: str, n_facts: int) -> float:
    """The accuracy of who knows the values of a row, and not which belongs to which key."""
    return 1 / n_facts if task in TASKS and TASKS[task].distinct else commonest(ABOUT[task][1], n_facts)


def sizes(rows: Sequence[Row], task: str) -> tuple[list[int], list[int]]:
    """The lengths and the numbers of facts that a task was asked at, the trained length first."""
    row = learning(rows, task)[0]
    return [times * row["length"] for times in TASKS.get(task, Task).times], row["n_facts"]


def line(row: Row) -> str:
    right = "  ".join(f"{length}: {' '.join(f'{value:.2f}' for value in told.values())}"
                      for length, told in row.get("accuracy", {}).items())
    if row["learning_rate"] is None:  # a trained run, which was asked alone
        return f"{row['model']}, {row['task']}, {', '.join(map(str, row['n_facts']))} facts: {right}; a guess 0.1"
    begin = f"{row['model']}, {row['task']}, rate {row['learning_rate']:g}, seed {row['seed']}: "
    if "failed" in row:
        return begin + row["failed"]
    steps = row["curve"][-1][0]
    when = f"learned from step {row['passed']:,} on" if row["passed"] else f"not learned in {steps:,} steps"
    return f"{begin}{when}; {right}"


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """A mean, and from which to which seed where they differ: `.97 (.95-.99)`."""
    if not values:
        return "-"
    mean, least, most = (f"{value:.{digits}f}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean + (f" ({least}-{most})" if least != most else "")


def section(rows: Sequence[Row], task: str, pictures: Sequence[str] = ()) -> str:
    """A task's table and its pictures, in Markdown."""
    own = learning(rows, task)
    if not own:
        return "Not measured yet."
    (what, n_values, counted), (lengths, n_facts) = ABOUT[task], sizes(rows, task)
    told = (f"Accuracy, {what}: by number of {counted} in rows of {lengths[0]} tokens, then in longer rows over all "
            f"numbers of {counted}. The mean of the seeds, and their range. A guess is right {1 / n_values:.2g} of the "
            "time.")
    head = ["model", "learned from step", *(f"{n} {counted}" for n in n_facts),
            *(f"{length} tokens" for length in lengths[1:])]
    lines = [[in_markdown(name), ", ".join(f"{run['passed']:,}" if run["passed"] else "never" for run in runs),
              *(spread_text(accuracies(runs, lengths[0], n)) for n in n_facts),
              *(spread_text(accuracies(runs, length)) for length in lengths[1:])]
             for name, runs in learned(rows, task).items()]
    return "\n\n".join([told, markdown(head, lines, 1), *pictures, source_line([row | MADE_BY for row in own])])
