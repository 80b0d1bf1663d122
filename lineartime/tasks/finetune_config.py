"""The settings of a fine-tuning on questions, for Python and for the shell."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from lineartime.base.settings import replace_fields, require
from lineartime.base.stores import is_address
from lineartime.config import TRAIN_FIELDS, TrainConfig
from lineartime.folders import named_folder, shipped_models

Encoding = Annotated[str, "Encoding of the text, such as latin-1."]
Evidence = Annotated[Path | None, "Folder with wikipedia/ and web/ of TriviaQA; by default evidence/ beside the "
                     "questions' folder."]
Stride = Annotated[int | None, "Tokens from one window of a document to the next; by default three quarters of the "
                   "context."]
MaxAnswerTokens = Annotated[int, "Most tokens of an answer."]

QUESTIONS_CONTEXT, ROWS_PER_STEP, WARMUP_SHARE, N_SCORINGS, MOST_EPOCHS = 4096, 32, 0.1, 5, 10**6
OTHER_SETTINGS = {"learning_rate": "give --learning-rates", **dict.fromkeys(
    ("shard", "context_parallel"), "it is for language modelling")}
"""Settings of training that a fine-tuning does not take, and what to do."""


@dataclass(frozen=True)
class FineTuning:
    """The settings of a fine-tuning. Raises UsageError for wrong ones."""

    run: Annotated[Path | str, "The model to teach, of masked language modelling: a run, a checkpoint, or an exported "
                   "folder.", "RUN"]
    data: Annotated[tuple[Path | str, ...], "Questions to train on: SQuAD or TriviaQA JSON, TriviaQA parquet, or "
                    "hub:mandarjoshi/trivia_qa:rc.wikipedia/train; may be given again.", "--questions"]
    validation: Annotated[tuple[Path | str, ...], "Questions that the learning rate is chosen on; may be given again."]
    out: Annotated[Path, "Folder for the runs; unfinished runs there are continued."]
    evidence: Evidence = None
    learning_rates: Annotated[tuple[float, ...], "Rates to try, each in a run of its own, with commas."
                              ] = (1e-4, 7e-5, 5e-5)
    context: Annotated[int | None, "Tokens in a window; by default 4096."] = None
    epochs: Annotated[float, "How often each window is read."] = 5
    negatives: Annotated[float, "Share of the windows without an answer that is trained on."] = 0.25
    stride: Stride = None
    max_answer_tokens: MaxAnswerTokens = 30
    settings: Annotated[dict[str, Any], "Set a field of the training, or some of the model; most of what `lineartime "
                        "config` lists is taken. May be given again.", "--set NAME=VALUE"
                        ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.run, str) and (self.run in shipped_models() or is_address(self.run)):
            object.__setattr__(self, "run", named_folder(self.run))
        for name in ("run", "out", "evidence"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        for name in ("data", "validation"):  # one file or several
            object.__setattr__(self, name, (given,) if isinstance(given := getattr(self, name), str | Path) else given)
        require(len(self.learning_rates) > 0, "no learning rate", "learning_rates")
        require(len(set(self.learning_rates)) == len(self.learning_rates), "the same learning rate twice",
                ", ".join(f"{rate:g}" for rate in self.learning_rates))
        for rate in self.learning_rates:
            require(math.isfinite(rate) and rate > 0, "wrong value", f"learning_rate = {rate}",
                    "it takes numbers above 0")
        require(0 < self.epochs <= MOST_EPOCHS, "wrong value", f"epochs = {self.epochs}",
                f"it takes numbers above 0, up to {MOST_EPOCHS:,}")
        require(0 <= self.negatives <= 1, "negatives is a share", f"negatives = {self.negatives}",
                "it lies between 0 and 1")
        for name in self.settings:
            require(name not in OTHER_SETTINGS, "no setting of this fine-tuning", name, OTHER_SETTINGS.get(name))

    def train_config(self, rate: float, context: int, n_rows: int, clip: float | None) -> TrainConfig:
        """The training at one learning rate, in rows of `context` tokens. Unless `settings` say otherwise, it has
        batches of 32 rows, a tenth of the steps for warm-up, a save after each tenth of the run and at least every 500
        steps, and `clip`. n_rows: rows to train on. Raises UsageError for wrong values."""
        given = {name: value for name, value in self.settings.items() if name in TRAIN_FIELDS}
        tokens_per_step = given.get("tokens_per_step", ROWS_PER_STEP * context)
        require(tokens_per_step >= context and tokens_per_step % context == 0,
                "tokens_per_step must be a multiple of context",
                f"tokens_per_step = {tokens_per_step}, context = {context}")
        # The largest micro-batch of whole rows that divides a step and has no more tokens than in pretraining.
        rows = tokens_per_step // context
        most = max(TrainConfig().micro_batch_tokens // context, 1)
        micro_rows = max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)
        steps = given.get("steps", max(-(-round(n_rows * self.epochs) // rows), 1))
        own = {"tokens_per_step": tokens_per_step, "micro_batch_tokens": micro_rows * context, "steps": steps,
               "warmup_steps": round(WARMUP_SHARE * steps), "clip": clip, "keep": 1,
               "eval_every": max(steps // N_SCORINGS, 1), "save_every": min(max(steps // 10, 1), 500)}
        return replace_fields(TrainConfig(), {**own, **given, "learning_rate": rate})


def name_of(rate: float) -> str:
    """A learning rate in the name of its run: `1e-04`, with as many digits as necessary."""
    return next(text for digits in range(17) if float(text := f"{rate:.{digits}e}") == rate)
