"""The settings of a fine-tuning on questions, for Python and for the shell."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from lineartime.base.settings import require
from lineartime.base.stores import is_address
from lineartime.config import check_bounds
from lineartime.folders import named_folder, shipped_models

Evidence = Annotated[Path | None, "Folder with wikipedia/ and web/ of TriviaQA; by default evidence/ beside the "
                     "questions' folder."]
Stride = Annotated[int | None, "Tokens from one window of a document to the next; by default three quarters of the "
                   "context."]
MaxAnswerTokens = Annotated[int, "Most tokens of an answer."]

MOST_EPOCHS = 10**6
OTHER_SETTINGS = {"learning_rate": "give --learning-rates", "minutes": "give --epochs", **dict.fromkeys(
    ("shard", "context_parallel"), "it is for language modelling")}
"""Settings of training that a fine-tuning does not take, and what to do."""


@dataclass(frozen=True)
class FineTuning:
    """The settings of a fine-tuning. Raises UsageError for wrong ones."""

    run: Annotated[Path | str, "The model to teach, of masked language modelling: a run, a checkpoint, or an exported "
                   "folder.", "RUN"]
    data: Annotated[tuple[Path | str, ...], "Questions to train on: TriviaQA's JSON or parquet, or "
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
        require(bool(self.data and self.validation), "options are missing", "finetune",
                "give --questions and --validation")
        require(len(self.learning_rates) > 0, "no learning rate", "learning_rates")
        require(len(set(self.learning_rates)) == len(self.learning_rates), "the same learning rate twice",
                ", ".join(f"{rate:g}" for rate in self.learning_rates))
        check_bounds(self)
        for rate in self.learning_rates:
            require(math.isfinite(rate) and rate > 0, "wrong value", f"learning_rate = {rate}",
                    "it takes numbers above 0")
        require(0 < self.epochs <= MOST_EPOCHS, "wrong value", f"epochs = {self.epochs}",
                f"it takes numbers above 0, up to {MOST_EPOCHS:,}")
        require(0 <= self.negatives <= 1, "negatives is a share", f"negatives = {self.negatives}",
                "it lies between 0 and 1")
        for name in self.settings:
            require(name not in OTHER_SETTINGS, "no setting of this fine-tuning", name, OTHER_SETTINGS.get(name))
