"""What fine-tuning on documents has for labels and for vectors: its settings, the rows of an epoch, a run that ends
early."""

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

import torch
from torch import nn

from lineartime import checkpoint
from lineartime.config import TRAIN_FIELDS, ModelConfig, TrainConfig, to_dict
from lineartime.data.tokenizer import Tokenizer
from lineartime.distributed.ranks import Ranks
from lineartime.documents.examples import Fields, Labels, check_inputs
from lineartime.documents.pooling import Reading
from lineartime.documents.results import weights_sha256
from lineartime.finetuning import EPOCHS, ROWS_PER_STEP, check_rates, is_flash, name_of, train_config
from lineartime.model import LanguageModel
from lineartime.objectives import Objective
from lineartime.run import WEIGHTS, Run
from lineartime.run_config import RunConfig
from lineartime.settings import require, require_name
from lineartime.training import Callbacks, Progress, Setup, StopSignal, fit_once

Task = Literal["classify", "embed"]
LEARNING_RATES = (1e-3, 3e-4, 1e-4)
PATIENCE, SCORES = 3, 10
"""Held-out scorings without a better score or loss after which a run ends; scorings in a run."""

BEFORE = {"validation": "training", "test": "training or validation"}
"""What is read before a split, see `Splits.known`."""
SAVED = "what is trained is saved; the same command goes on"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DocumentTuning:
    """The settings of a fine-tuning on documents."""

    model: Path
    """The pretrained model, see `load_model`."""
    documents: tuple[Path | str, ...]
    """Documents to train on, see `read_examples`."""
    validation: tuple[Path | str, ...]
    """Those that the learning rate and the end of training are chosen on."""
    out: Path
    test: tuple[Path | str, ...] = ()
    """Those that the best model is scored on at the end."""
    task: Task = "classify"
    """"classify": labels. "embed": vectors that are near for the two texts of a pair."""
    labels: Labels = "one"
    fields: Fields = field(default_factory=Fields)
    learning_rates: tuple[float, ...] = LEARNING_RATES
    context: int | None = None
    """Tokens of a row of training; None: as in pretraining."""
    epochs: float = EPOCHS
    patience: int = PATIENCE
    """A run ends after so many held-out scorings without a better score or a lower loss."""
    balance: bool = False
    """Whether every class counts the same in training, however many documents it has."""
    max_tokens: int | None = None
    """Most tokens of a document; None: it is read whole."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainConfig."""
    strict: bool = False
    """Whether a damaged newer checkpoint of the pretrained run is an error, see `load_model`."""

    def __post_init__(self) -> None:
        for name in ("model", "out"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        for names in (self.documents, self.validation, self.test):
            check_inputs(names, self.out)
        check_rates(self.learning_rates, self.epochs, self.settings)
        require_name("task", self.task, get_args(Task))
        require_name("kind of labels", self.labels, get_args(Labels))
        require(self.patience >= 1, "wrong value", f"patience = {self.patience}", "it takes whole numbers from 1")
        require(not (self.balance and self.labels == "number"), "numbers have no classes to balance", "balance",
                "leave it out")
        require(self.context is None or self.context >= 2, "wrong value", f"context = {self.context}",
                "it takes 2 or more")
        Reading(self.max_tokens)
        for name in self.settings:
            require_name("setting of training", name, TRAIN_FIELDS)

    def run_config(self, config: ModelConfig, n_documents: int, n_held_out: int, rate: float) -> RunConfig:
        """The run of a learning rate. It is scored ten times, at its last step too unless `steps` or `eval_every` is
        given, on all of the validation. FLASH is not clipped, as in the paper's fine-tuning (Section 4.3). A
        micro-batch of pairs is a whole step, for its rows are each other's negatives."""
        def train(settings: dict[str, Any]) -> TrainConfig:
            return train_config(settings, rate, n_rows=n_documents, context=config.context, epochs=self.epochs,
                                clip=None if is_flash(config) else TrainConfig().clip)

        steps = train(self.settings).steps
        every = self.settings.get("eval_every", -(-steps // SCORES))
        rounded = {"steps": math.ceil(steps / every) * every, "eval_every": every, "eval_tokens": n_held_out}
        if self.task == "embed":
            rounded["micro_batch_tokens"] = self.settings.get("tokens_per_step", ROWS_PER_STEP * config.context)
        return RunConfig(config, train({**rounded, **self.settings}), "fine-tuned", self.task,
                         ", ".join(map(str, self.documents)), str(self.out / f"lr-{name_of(rate)}"))

    def runs(self, config: ModelConfig, n_documents: int, n_held_out: int) -> tuple[dict[str, RunConfig],
                                                                                     dict[str, Any]]:
        """The runs by the names of their learning rates; and the model and the training as tables of settings."""
        runs = {name_of(rate): self.run_config(config, n_documents, n_held_out, rate) for rate in self.learning_rates}
        return runs, {"model": to_dict(config), "train": {name: to_dict(each.train) for name, each in runs.items()}}


class Texts(Protocol):
    """Tokenised documents, or pairs of texts."""

    n_cut: int

    @property
    def n_tokens(self) -> int: ...
    def __len__(self) -> int: ...
    def keys(self) -> list[bytes]: ...
    def sha256(self) -> str: ...


Read = TypeVar("Read", bound=Texts)


@dataclass(frozen=True)
class Splits(Generic[Read]):
    """What is trained on, chosen on and tested on."""

    train: Read
    validation: Read
    test: Read | None

    @property
    def n_cut(self) -> int:
        """Texts that are longer than `max_tokens`."""
        return self.train.n_cut + self.validation.n_cut + (self.test.n_cut if self.test else 0)

    @property
    def counts(self) -> str:
        """"; 20 held out, 30 to test"."""
        return f"; {len(self.validation):,} held out" + (f", {len(self.test):,} to test" if self.test else "")

    def known(self) -> dict[str, int]:
        """How many texts of a split the model was trained on or, of the test, chosen on."""
        train = {*self.train.keys()}
        found = {"validation": sum(key in train for key in self.validation.keys())}
        if self.test is not None:
            seen = train.union(self.validation.keys())
            found["test"] = sum(key in seen for key in self.test.keys())
        return found

    def warn_of_known(self, what: str) -> None:
        """what: "documents" or "pairs"."""
        for name, n_known in self.known().items():
            if n_known:
                logger.warning(f"{n_known:,} of {len(getattr(self, name)):,} {name} {what} are also in {BEFORE[name]}")

    def facts(self, pretrained: LanguageModel, tokenizer: Tokenizer, plan: DocumentTuning) -> dict[str, Any]:
        """What a run of any learning rate depends on, beside its settings; not the test."""
        return {"pretrained_sha256": weights_sha256(pretrained), "tokenizer_sha256": tokenizer.sha256,
                "documents_sha256": self.train.sha256(), "validation_sha256": self.validation.sha256(),
                "patience": plan.patience}

    def test_facts(self) -> dict[str, Any]:
        """What the result depends on too."""
        return {"test_sha256": None if self.test is None else self.test.sha256()}


def read_splits(plan: DocumentTuning, stop: StopSignal, progress: Progress | None, what: str,
                read: Callable[[tuple[Path | str, ...], Callable[[int], None]], Read]) -> Splits[Read]:
    """Read all documents of a fine-tuning. what: "documents" or "pairs". read takes names of files and a function that
    is called with the number read so far."""
    note = "nothing is trained yet" if not plan.out.exists() else "what is trained is saved"

    def split(names: tuple[Path | str, ...], of: str) -> Read:
        return read(names, stop.watch(f"{note}; the same command goes on", progress, f"{of} {what}", None))

    return Splits(split(plan.documents, "training"), split(plan.validation, "validation"),
                  split(plan.test, "test") if plan.test else None)


def of_scores(result: dict[str, Any]) -> str:
    """What a report says of the documents, or pairs, that its scores are of. result: that of `finetune_documents`."""
    split = "test" if "test" in result else "validation"
    n_known = result["known"][split]
    also = f"{n_known:,} of them are also in {BEFORE[split]}"
    if split == "test":
        return f"{also}, so the scores are too good." if n_known else "No choice was made on these."
    return ("The learning rate and the step were chosen on these, so the scores are somewhat too good; `--test` names "
            "documents for a fair score." + (f" {also}." if n_known else ""))


def drawn_window(n_tokens: int, size: int, seed: int, epoch: int, row: int) -> slice:
    """The part of a document that an epoch trains on: all of it, or one of its windows of `size` tokens, drawn in
    proportion to its tokens from (seed, epoch, row)."""
    key = hashlib.sha256(f"{seed}/{epoch}/{row}".encode()).digest()
    first = int.from_bytes(key[:8], "little") % n_tokens // size * size
    return slice(first, min(first + size, n_tokens))


def train_best(config: RunConfig, facts: dict[str, Any], device: torch.device, stop: StopSignal,
               begin: Callable[[Ranks], tuple[LanguageModel, Objective, dict[str, str]]],
               score: Callable[[Run, LanguageModel, Ranks], dict[str, Any]], words: Callable[[dict[str, Any]], str],
               on_step: Callable[[dict[str, Any]], None] | None, patience: int) -> dict[str, Any]:
    """Run or resume one learning rate until no held-out score is better, and score the best checkpoint. Returns its
    scores. begin, on_step: those of `fit_once`. score gives the scores of the best model, words says them."""
    def scored(run: Run, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        step = config.train.steps if run.best is None else run.best
        load_step(run.out, step, model)
        scores = score(run, model, ranks)
        return {"steps": config.train.steps, "best_step": step, "score": scores["score"], "held_out": scores}

    result, _ = fit_once(config, facts, device, lambda ranks: Setup(*begin(ranks), patience=patience), scored,
                         Callbacks(stop, on_step))
    logger.info(f"  {words(result['held_out'])} on {result['held_out']['n_documents']:,} held-out documents, "
                f"step {result['best_step']:,} of {config.train.steps:,}")
    return {name: value for name, value in result.items() if name != "run"}


def reading_of(config: RunConfig) -> Reading:
    """How a run reads held-out documents: in batches as large as in training."""
    return Reading(batch_rows=config.micro_batch_rows, precision=config.train.precision)


def load_step(run: Path, step: int, model: nn.Module) -> None:
    """Give a model the weights of a run's checkpoint. Raises CheckpointError."""
    loaded = checkpoint.load(run / f"step-{step:08d}", WEIGHTS)
    model.load_state_dict(checkpoint.joined(loaded, WEIGHTS))
