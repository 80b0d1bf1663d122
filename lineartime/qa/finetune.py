"""Fine-tuning on questions: a model of masked language modelling gets a span head and learns to find answers.

`DIR/lr-1e-04`, ... are ordinary runs, one per learning rate. `DIR/result.json` names the best of them on the validation
questions."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime.atomic_io import MAX_LINES_BYTES, hash_of, read_bytes, replaced, write_json
from lineartime.config import TRAIN_FIELDS, ModelConfig, TrainConfig
from lineartime.config import to_dict as fields_of
from lineartime.config_json import QUESTION_ANSWERING, model_config_json
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import places_of_step
from lineartime.distributed.ranks import ALONE, TIMEOUT_S, Ranks
from lineartime.errors import CheckpointError, DataError
from lineartime.finetuning import (
    EPOCHS,
    LEARNING_RATES,
    check_rates,
    copy_weights,
    is_flash,
    name_of,
    require_folder,
    train_config,
    try_rates,
    with_context,
)
from lineartime.load import load_model
from lineartime.model import LanguageModel, SpanModel
from lineartime.qa.metrics import guess_by_overlap, score
from lineartime.qa.questions import Question, read_questions
from lineartime.qa.spans import (
    Rows,
    Windows,
    answer_questions,
    separator_of,
    span_logits,
    span_losses,
    stack_rows,
    training_rows,
)
from lineartime.run import CONFIG_FILE, WEIGHTS_FILE, Run
from lineartime.run_config import RunConfig
from lineartime.runtime import is_picked, pick_device
from lineartime.settings import require
from lineartime.training import Callbacks, Progress, Setup, StopSignal, fit_once
from lineartime.weights.folder import tokenizer_files

CONTEXT, CHUNK_SIZE = 4096, 128
NEGATIVES = 0.25
CHANGEABLE = ("chunk_size", "cls_softmax", "first_to_all", "attn_scale_len")
"""Fields of the pretrained model's configuration that fine-tuning may change."""
PREDICTIONS_FILE = "predictions.json"

logger = logging.getLogger(__name__)


def span_config(model: LanguageModel, context: int, changes: dict[str, Any]) -> ModelConfig:
    """The configuration for fine-tuning a pretrained model: the paper's, then `changes`.

    In the paper (Section 4.3) FLASH alone has a chunk size of 128 (here at most that of pretraining), and with relu^2
    softmax for [CLS]. Without chunks, n of relu(q k / n + b)^2 keeps its value. Raises UsageError for a causal model, a
    field that fine-tuning cannot change, and a context longer than the position tables allow."""
    config = model.config
    require(not config.causal, "questions need a model that sees both ways", "causal = true",
            "pretrain with causal = false (masked language modelling); a causal model goes on with `lineartime train "
            "--from RUN`")
    for name in changes:
        require(name != "context", "the context is an option, not a setting", name, "give --context")
        require(name in CHANGEABLE, "the pretrained model decides this", name,
                f"fine-tuning may change {', '.join(CHANGEABLE)}")
    fields: dict[str, Any] = {}
    if is_flash(config):
        assert config.chunk_size is not None
        fields["chunk_size"] = min(CHUNK_SIZE, config.chunk_size)
        if config.attn_kernel == "relu2" and config.n_heads == 1 and config.chunk_parts != "global":
            fields["cls_softmax"] = True
    return with_context(model, context, fields | changes)


def span_model(pretrained: LanguageModel, config: ModelConfig, seed: int) -> SpanModel:
    """A `SpanModel` with a pretrained model's weights, see `copy_weights`; its head is drawn from `seed`."""
    torch.manual_seed(seed)
    model = SpanModel(config)
    copy_weights(model, pretrained, "span_head.")
    return model


class Questions:
    """The objective of `fit` for questions: the first and the last token of the answer in each window."""

    def __init__(self, config: RunConfig, rows: Rows, validation: Sequence[Question], tokenizer: Tokenizer,
                 windows: Windows, ranks: Ranks = ALONE):
        self.config, self.rows, self.validation = config, rows, validation
        self.tokenizer, self.windows, self.ranks = tokenizer, windows, ranks

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """ids and roles `[R, T]`. Every epoch takes each window once, in an order drawn from (seed, epoch). The rows of
        a batch are sorted by length, so that micro-batches have little padding."""
        config = self.config
        places = places_of_step(len(self.rows), seed=config.train.seed, step=step, rows_per_step=config.rows_per_step)
        chosen = sorted((row for _, row in places), key=lambda row: -len(self.rows.ids[row]))
        chosen = chosen[self.ranks.share(len(chosen))]
        return stack_rows([self.rows.ids[i] for i in chosen], [self.rows.roles[i] for i in chosen],
                          config.model.context)

    def n_targets(self, *batch: Tensor) -> int:
        return 2 * len(batch[0])

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, roles_BT = batch
        return span_losses(span_logits(model, ids_BT, roles_BT), roles_BT)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """EM, F1 and nats per window of the first validation questions, up to `eval_tokens` tokens. Every rank answers
        all of them, for a share would be batched, and rounded, in another way."""
        train, asked = self.config.train, [question for question in self.validation if question.accepted]
        answers, loss, _ = answer_questions(model, self.tokenizer, asked, self.windows, precision=train.precision,
                                            batch_rows=self.config.micro_batch_rows, max_tokens=train.eval_tokens,
                                            progress=progress)
        scores = score([question for question in asked if question.id in answers], answers)
        return {"loss": loss, "exact_match": scores.exact_match, "f1": scores.f1}


@dataclass(frozen=True)
class FineTuning:
    """The settings of a fine-tuning."""

    run: Path
    """The pretrained run, or one of its checkpoints."""
    questions: tuple[Path, ...]
    validation: tuple[Path, ...]
    out: Path
    evidence: Path | None = None
    learning_rates: tuple[float, ...] = LEARNING_RATES
    context: int = CONTEXT
    stride: int | None = None
    max_answer_tokens: int = 30
    negatives: float = NEGATIVES
    """The share of the windows without an answer to train on."""
    epochs: float = EPOCHS
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig (see CHANGEABLE) and of TrainConfig."""
    strict: bool = False
    """Whether a damaged newer checkpoint of the pretrained run is an error, see `load_model`."""

    def __post_init__(self) -> None:
        for name in ("run", "out", "evidence"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        check_rates(self.learning_rates, self.epochs, self.settings)
        require(0 <= self.negatives <= 1, "negatives is a share", f"negatives = {self.negatives}",
                "it lies between 0 and 1")
        for rate in self.learning_rates:
            self.train_config(1 << 40, rate, clip=None)

    @property
    def windows(self) -> Windows:
        return Windows(self.context, self.stride, self.max_answer_tokens)

    def train_config(self, n_windows: int, learning_rate: float, clip: float | None) -> TrainConfig:
        """See `finetuning.train_config`."""
        return train_config(self.settings, learning_rate, n_rows=n_windows, context=self.context, epochs=self.epochs,
                            clip=clip)


def finetune(plan: FineTuning, *, device: torch.device | str | None = None, stop: StopSignal | None = None,
             on_step: Callable[[dict[str, Any]], None] | None = None,
             progress: Progress | None = None, rank_timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """Fine-tune once per learning rate, or resume. Returns the content of `DIR/result.json`: "best" (the best run's
    folder in `plan.out`), scores by learning rate, those of word overlap, and counts of questions; with "already" if
    the folder was complete before.

    device: by default cuda if available. stop: requests a save and an end, see `StopSignal.listening`. on_step is
    called with each line of the metrics and the number of "steps". progress counts questions read and answered.
    rank_timeout: see `train`. Raises UsageError for a wrong pretrained run, wrong settings or a folder with another
    fine-tuning, DataError for wrong questions, Stopped after saving, and as `fit` does."""
    stop = stop or StopSignal()
    require_folder(plan.out)
    if not is_picked(device):
        device = pick_device(device, tell=True)
    pretrained, tokenizer, facts = load_model(plan.run, strict=plan.strict)
    separator = separator_of(tokenizer)
    require(separator < pretrained.config.vocab_size, "[SEP] is outside the model's vocabulary", str(plan.run),
            "pretrain on data from `lineartime prepare --mlm`")
    changes = {name: value for name, value in plan.settings.items() if name not in TRAIN_FIELDS}
    config = span_config(pretrained, plan.context, changes)
    span_model(pretrained, config, 0)  # raises for weights that do not fit before questions are read
    note = "nothing is trained yet" if not plan.out.exists() else "what is trained is saved"
    validation = list(read_questions(plan.validation, plan.evidence))
    if not any(question.accepted for question in validation):
        raise DataError("no question has an answer to compare with", plan.validation[0], "validation needs labels")
    rows = training_rows(tokenizer, read_questions(plan.questions, plan.evidence), plan.windows,
                         negatives=plan.negatives, seed=plan.settings.get("seed", 0),
                         progress=stop.watch(f"{note}; the same command goes on", progress, "reading questions", None))
    if not rows.counts.windows_with_answer:
        raise DataError("no window holds an answer", ", ".join(map(str, plan.questions)),
                        f"of {rows.counts.questions} questions {rows.counts.unlabelled} have no label, "
                        f"{rows.counts.without_document} no document, {rows.counts.answer_not_found} an answer "
                        "that no document holds")
    description = {"pretrained_sha256": hash_of(Path(facts["checkpoint"]) / WEIGHTS_FILE)["sha256"],
                   "rows_sha256": rows.sha256(), "tokenizer_sha256": tokenizer.sha256,
                   "validation_sha256": questions_sha256(validation), **dataclasses.asdict(plan.windows)}
    clip = None if is_flash(config) else TrainConfig().clip
    configs = {name_of(rate): RunConfig(config, plan.train_config(len(rows), rate, clip), "fine-tuned", "questions",
                                        ", ".join(map(str, plan.questions)), str(plan.out / f"lr-{name_of(rate)}"))
               for rate in plan.learning_rates}
    whole = {**description, "model": fields_of(config),
             "train": {name: fields_of(each.train) for name, each in configs.items()}}
    counts = dataclasses.asdict(rows.counts)

    def train_one(each: RunConfig, ranks: Ranks) -> dict[str, Any]:
        """Run one learning rate, or resume it; returns its scores on all validation questions."""
        files = {**tokenizer_files(tokenizer), CONFIG_FILE: model_config_json(config, QUESTION_ANSWERING)}
        answered = stop.watch("what is trained is saved; the same command goes on", progress, "answering",
                              len(validation), ranks)

        def begin(ranks: Ranks) -> Setup:
            questions = Questions(each, rows, validation, tokenizer, plan.windows, ranks)
            return Setup(span_model(pretrained, config, each.train.seed), questions, files, score_last=False)

        def scored(run: Run, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
            answers, loss, n_windows = answer_questions(
                model, tokenizer, validation, plan.windows, batch_rows=each.micro_batch_rows,
                precision=each.train.precision, progress=answered)
            if ranks.is_first:
                write_json(run.out / PREDICTIONS_FILE, answers, ascii_only=False)
            return {"steps": each.train.steps, **dataclasses.asdict(score(validation, answers)), "loss": loss,
                    "n_windows": n_windows}

        result, _ = fit_once(each, description, device, begin, scored, Callbacks(stop, on_step))
        logger.info(f"  EM {result['exact_match']:.2f}, F1 {result['f1']:.2f} on {result['n_questions']:,} validation "
                    "questions")
        return {name: value for name, value in result.items() if name != "run"}

    def finish(best: str, rates: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        if ranks.is_first:
            answers = plan.out / best / PREDICTIONS_FILE
            try:
                content = read_bytes(answers, MAX_LINES_BYTES)
            except OSError as e:
                raise CheckpointError("cannot read", answers, f"{e.strerror}; delete {plan.out / best} and run the "
                                      "same command again") from None
            with replaced(plan.out / PREDICTIONS_FILE) as file:
                file.write(content)
        baseline = score(validation, {question.id: guess_by_overlap(question) for question in validation})
        return {"word_overlap": dataclasses.asdict(baseline), "train_questions": counts}

    logger.info(f"questions {counts['questions']:,} to train on, {counts['windows']:,} windows of up to "
                f"{plan.context:,} tokens, {counts['windows_with_answer']:,} with an answer; "
                f"{counts['answer_not_found']:,} answers not found in the evidence")
    return try_rates(plan.out, configs, whole, device, rank_timeout, stop, train_one,
                     lambda scores: (scores["f1"], scores["exact_match"]), finish)


def questions_sha256(questions: Sequence[Question]) -> str:
    """The hash of the questions' ids, texts, answers and document names."""
    lines = [[q.id, q.text, q.accepted, [document.name for document in q.documents]] for q in questions]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()
