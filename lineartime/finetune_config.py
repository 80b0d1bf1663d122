"""The settings of a fine-tuning, for Python and for the shell."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from lineartime.config import TRAIN_FIELDS, TrainConfig
from lineartime.data.files import is_address
from lineartime.data.read_text import require_encoding
from lineartime.data.rows import UTF8
from lineartime.model_names import named_folder, shipped_models
from lineartime.settings import replace_fields, require, require_name

TaskName = Literal["questions", "classify", "embed"]
Labels = Literal["one", "several", "number"]
"""What a document's label is: one of the classes, any number of them, or a number."""

TextField = Annotated[str, "Field or column that holds the text.", "--text-field"]
PairField = Annotated[str | None, "Field or column of a second text, if a document is a pair of texts.", "--pair-field"]
Encoding = Annotated[str, "Encoding of the text, such as latin-1."]
Stdin = Annotated[Literal["text", "jsonl"], "What `-` reads: text (one document), or jsonl (one in each line)."]
MaxTokens = Annotated[int | None, "Cut documents to so many tokens; by default each is read whole, however long."]
Evidence = Annotated[Path | None, "Folder with wikipedia/ and web/ of TriviaQA; by default evidence/ beside the "
                     "questions' folder."]
Stride = Annotated[int | None, "Tokens from one window of a document to the next; by default three quarters of the "
                   "context."]
MaxAnswerTokens = Annotated[int, "Most tokens of an answer."]

LEARNING_RATES: dict[str, tuple[float, ...]] = {"questions": (1e-4, 7e-5, 5e-5), "classify": (1e-3, 3e-4, 1e-4),
                                                "embed": (1e-3, 3e-4, 1e-4)}
QUESTIONS_CONTEXT = 4096
ROWS_PER_STEP, WARMUP_SHARE = 32, 0.1
N_SCORINGS = {"questions": 5, "classify": 10, "embed": 10}
"""Held-out scorings in a run."""
MOST_EPOCHS = 10**6
OTHER_SETTINGS = {"learning_rate": "give --learning-rates", **dict.fromkeys(
    ("shard", "context_parallel", "window_tokens"), "it is for language modelling")}
"""Settings of training that a fine-tuning does not take, and what to do."""


@dataclass(frozen=True)
class Fields:
    """How documents are read: the names of a record's fields, which are JSON fields or columns of a table, the encoding
    of text, and what stdin has. Raises UsageError for an unknown encoding or kind of stdin."""

    text: TextField = "text"
    pair: PairField = None
    label: Annotated[str, "For classify: field or column of the label.", "--label-field"] = "label"
    encoding: Encoding = UTF8
    stdin: Stdin = "text"

    def __post_init__(self) -> None:
        require_encoding(self.encoding)
        require_name("kind of stdin", self.stdin, get_args(get_args(Stdin)[0]))


@dataclass(frozen=True)
class FineTuning:
    """The settings of a fine-tuning. Raises UsageError for wrong ones.

    `data` are questions, or documents for the other tasks."""

    run: Annotated[Path | str, "The model to teach: a run, a checkpoint, an exported folder or `small`. For questions "
                   "a model of masked language modelling.", "RUN"]
    data: Annotated[tuple[Path | str, ...], "Questions to train on: SQuAD or TriviaQA JSON, TriviaQA parquet, or "
                    "hub:mandarjoshi/trivia_qa:rc.wikipedia/train; may be given again.", "--questions"]
    validation: Annotated[tuple[Path | str, ...], "Questions or documents that the learning rate is chosen on; may be "
                          "given again."]
    out: Annotated[Path, "Folder for the runs; unfinished runs there are continued."]
    task: Annotated[TaskName, "What the model learns: questions (find answers in documents), classify (label documents)"
                    " or embed (give texts vectors that are near for the two texts of a pair)."] = "questions"
    test: Annotated[tuple[Path | str, ...], "For classify and embed: documents that the best model is scored on; may "
                    "be given again."] = ()
    evidence: Evidence = None
    learning_rates: Annotated[tuple[float, ...] | None, "Rates to try, each in a run of its own, with commas; by "
                              "default 1e-4,7e-5,5e-5 for questions, else 1e-3,3e-4,1e-4."] = None
    context: Annotated[int | None, "Tokens in a window; by default 4096 for questions, else as in pretraining."] = None
    epochs: Annotated[float, "How often each window, or document, is read."] = 5
    labels: Annotated[Labels, "For classify, what a document has: one label, several (a list, or text with `;`), or "
                      "a number."] = "one"
    fields: Annotated[Fields, "How documents are read."] = field(default_factory=Fields)
    patience: Annotated[int, "For classify and embed: end a run after so many scorings without a better score or a "
                        "lower loss."] = 3
    max_tokens: MaxTokens = None
    negatives: Annotated[float, "For questions: share of the windows without an answer that is trained on."] = 0.25
    stride: Stride = None
    max_answer_tokens: MaxAnswerTokens = 30
    settings: Annotated[dict[str, Any], "Set a field of the training, for questions also some of the model; most of "
                        "what `lineartime config` lists is taken. May be given again.", "--set NAME=VALUE"
                        ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.run, str) and (self.run in shipped_models() or is_address(self.run)):
            object.__setattr__(self, "run", named_folder(self.run))
        for name in ("run", "out", "evidence"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        for name in ("data", "validation", "test"):  # one file or several
            object.__setattr__(self, name, (given,) if isinstance(given := getattr(self, name), str | Path) else given)
        require_name("task", self.task, get_args(TaskName))
        require_name("kind of labels", self.labels, get_args(Labels))
        require(len(self.rates) > 0, "no learning rate", "learning_rates")
        require(len(set(self.rates)) == len(self.rates), "the same learning rate twice",
                ", ".join(f"{rate:g}" for rate in self.rates))
        for rate in self.rates:
            require(math.isfinite(rate) and rate > 0, "wrong value", f"learning_rate = {rate}",
                    "it takes numbers above 0")
        require(0 < self.epochs <= MOST_EPOCHS, "wrong value", f"epochs = {self.epochs}",
                f"it takes numbers above 0, up to {MOST_EPOCHS:,}")
        for name, least in (("patience", 1), ("max_tokens", 1), ("context", 1 if self.task == "questions" else 2)):
            value = getattr(self, name)
            require(value is None or value >= least, "wrong value", f"{name} = {value}",
                    f"it takes whole numbers from {least}")
        require(0 <= self.negatives <= 1, "negatives is a share", f"negatives = {self.negatives}",
                "it lies between 0 and 1")
        for name in self.settings:
            if self.task != "questions":  # those of questions depend on the model
                require_name("setting of training", name, TRAIN_FIELDS)
            require(name not in OTHER_SETTINGS and (name != "eval_tokens" or self.task == "questions"),
                    "no setting of this fine-tuning", name, OTHER_SETTINGS.get(name, "all held-out texts are scored"))

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates to try."""
        return LEARNING_RATES[self.task] if self.learning_rates is None else self.learning_rates

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
        if self.task == "embed":
            micro_rows = rows  # they are each other's negatives
        # So many epochs, rounded up to whole steps and, where the best step is chosen, to a whole number of scorings.
        steps = max(-(-round(n_rows * self.epochs) // rows), 1)
        if self.task == "questions":
            steps = given.get("steps", steps)
            every = max(steps // N_SCORINGS[self.task], 1)
        else:  # the last step is scored too, so that the best can be chosen
            every = given.get("eval_every", -(-given.get("steps", steps) // N_SCORINGS[self.task]))
            steps = given.get("steps", -(-steps // max(every, 1)) * max(every, 1))
        own = {"tokens_per_step": tokens_per_step, "micro_batch_tokens": micro_rows * context, "steps": steps,
               "warmup_steps": round(WARMUP_SHARE * steps), "clip": clip, "keep": 1, "eval_every": every,
               "save_every": min(max(steps // 10, 1), 500)}
        made = replace_fields(TrainConfig(), {**own, **given, "learning_rate": rate})
        require(self.task != "embed" or made.micro_batch_tokens > context, "a micro-batch has no negatives",
                f"one row of {context} tokens", "raise tokens_per_step, or micro_batch_tokens")
        return made


def in_words(scores: dict[str, Any]) -> str:
    """The most important scores of a fine-tuned model, in words."""
    if "exact_match" in scores:
        return f"EM {scores['exact_match']:6.2f}  F1 {scores['f1']:6.2f}"
    if "mrr" in scores:
        return (f"found first {scores['recall_at_1']:.3f}, among ten {scores['recall_at_10']:.3f}, mean 1 / rank "
                f"{scores['mrr']:.3f}")
    if "r2" in scores:
        return f"R^2 {scores['r2']:.3f}, mean absolute error {scores['mean_absolute_error']:.3g}"
    return f"accuracy {scores['accuracy']:.3f}, macro F1 {scores['macro_f1']:.3f}"


def name_of(rate: float) -> str:
    """A learning rate in the name of its run: `1e-04`, with as many digits as necessary."""
    return next(text for digits in range(17) if float(text := f"{rate:.{digits}e}") == rate)
