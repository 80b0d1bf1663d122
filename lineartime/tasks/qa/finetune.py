"""Fine-tuning on questions: a model of masked language modelling gets a span head and learns to find answers."""

import dataclasses
import json
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime.base.errors import DataError
from lineartime.base.files import write_json
from lineartime.base.ranks import ALONE, Ranks
from lineartime.base.settings import require
from lineartime.base.stores import hash_of
from lineartime.base.tensor_bytes import tensors_sha256
from lineartime.config import TRAIN_FIELDS, ModelConfig
from lineartime.config_json import QUESTION_ANSWERING, model_config_json
from lineartime.data.mixture import places_of_step
from lineartime.data.tokenizer import Tokenizer
from lineartime.folders import CONFIG_FILE, WEIGHTS_FILE
from lineartime.model.language_model import LanguageModel, SpanModel
from lineartime.tasks.finetune_config import QUESTIONS_CONTEXT, FineTuning
from lineartime.tasks.pooling import padded
from lineartime.tasks.qa.metrics import score
from lineartime.tasks.qa.questions import read_questions
from lineartime.tasks.qa.spans import WindowConfig, answer_questions, span_logits, span_losses, training_windows
from lineartime.training.run_config import RunConfig
from lineartime.weights.transfer import copy_weights, is_flash, with_context
from lineartime.weights.transformers_files import tokenizer_files

CHUNK_SIZE = 128
CHANGEABLE = ("chunk_size", "cls_softmax", "first_to_all", "attn_scale_len")
"""Fields of the pretrained model's configuration that fine-tuning may change."""
PREDICTIONS_FILE = "predictions.json"

logger = logging.getLogger(__name__)


def span_config(model: LanguageModel, context: int, changes: dict[str, Any]) -> ModelConfig:
    """The configuration for fine-tuning a pretrained model: the paper's, then `changes`.

    In the paper (Section 4.3) FLASH alone has a chunk size of 128 (here at most that of pretraining) and, if it has
    relu^2, softmax for [CLS]. Without chunks, n of relu(q k / n + b)^2 keeps its value. Raises UsageError for a causal
    model, a field that fine-tuning cannot change, and a context longer than the position tables allow."""
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
            fields |= {"cls_softmax": True, "document_grid": "row"}  # a window is one document
    return with_context(model, context, fields | changes)


def span_model(pretrained: LanguageModel, config: ModelConfig, seed: int) -> SpanModel:
    """A `SpanModel` with a pretrained model's weights, see `copy_weights`; its head is drawn from `seed`."""
    torch.manual_seed(seed)
    model = SpanModel(config)
    copy_weights(model, pretrained, "span_head.")
    return model


class QuestionTask:
    """What `finetuning` trains: the data, the loss and the scores of questions. Raises UsageError for a model without
    [SEP] or that is causal, and for wrong settings."""

    def __init__(self, plan: FineTuning, loaded: tuple[LanguageModel, Tokenizer, dict[str, Any]],
                 watch: Callable[..., Callable[[int], None]]):
        self.plan, self.watch = plan, watch
        self.pretrained, self.tokenizer, self.loaded_from = loaded
        separator = self.tokenizer.separator
        require(separator is not None and separator < self.pretrained.config.vocab_size, "the model has no [SEP]",
                str(plan.run), "questions need one: pretrain on data from `lineartime prepare --mlm`")
        changes = {name: value for name, value in plan.settings.items() if name not in TRAIN_FIELDS}
        context = QUESTIONS_CONTEXT if plan.context is None else plan.context
        self.windows = WindowConfig(context, plan.stride, plan.max_answer_tokens)
        self.config = span_config(self.pretrained, context, changes)
        self.new_model(0)  # raises for weights that do not fit before questions are read

    def read(self) -> int:
        """Read the questions, and log their counts; returns the number of windows to train on. Raises DataError for
        questions without an answer."""
        plan = self.plan
        self.validation = list(read_questions(plan.validation, plan.evidence))
        if not any(question.accepted for question in self.validation):
            raise DataError("no question has an answer to compare with", plan.validation[0], "validation needs labels")
        self.train = training_windows(self.tokenizer, read_questions(plan.data, plan.evidence), self.windows,
                                      negatives=plan.negatives, seed=plan.settings.get("seed", 0),
                                      progress=self.watch("reading questions"))
        counts = self.train.counts
        if not counts["windows_with_answer"]:
            raise DataError("no window holds an answer", ", ".join(map(str, plan.data)),
                            f"of {counts['questions']} questions {counts['unlabelled']} have no label, "
                            f"{counts['without_document']} no document, {counts['answer_not_found']} an answer "
                            "that no document holds")
        logger.info(f"questions {counts['questions']:,} to train on, {counts['windows']:,} windows of up to "
                    f"{self.windows.context:,} tokens, {counts['windows_with_answer']:,} with an answer; "
                    f"{counts['answer_not_found']:,} answers not found in the evidence")
        weights = Path(self.loaded_from["checkpoint"]) / WEIGHTS_FILE  # not there if they are in several files
        asked = [[q.id, q.text, q.accepted, [sha256(each.text().encode()).hexdigest() for each in q.documents]]
                 for q in self.validation]
        self.facts: dict[str, Any] = {
            "pretrained_sha256": (hash_of(weights)["sha256"] if weights.exists() else
                                  tensors_sha256(self.pretrained.state_dict())),
            "rows_sha256": self.train.sha256(), "tokenizer_sha256": self.tokenizer.sha256,
            "validation_sha256": sha256(json.dumps(asked).encode()).hexdigest(), **dataclasses.asdict(self.windows)}
        return len(self.train)

    def new_model(self, seed: int) -> SpanModel:
        return span_model(self.pretrained, self.config, seed)

    def objective(self, run: RunConfig, ranks: Ranks) -> "SpanObjective":
        return SpanObjective(run, self, ranks)

    def files(self) -> dict[str, str]:
        return {**tokenizer_files(self.tokenizer), CONFIG_FILE: model_config_json(self.config, QUESTION_ANSWERING)}

    def score(self, run: RunConfig, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        """EM, F1 and nats per window of all validation questions; the answers go into the run's folder."""
        answers, loss, n_windows = answer_questions(
            model, self.tokenizer, self.validation, self.windows, batch_rows=run.micro_batch_rows,
            precision=run.train.precision, progress=self.watch("answering", len(self.validation), ranks))
        if ranks.is_first:
            write_json(Path(run.out) / PREDICTIONS_FILE, answers, ascii_only=False)
        return {**score(self.validation, answers), "loss": loss, "n_windows": n_windows}


class SpanObjective:
    """The objective of `fit` for questions: the first and the last token of the answer in each window."""

    def __init__(self, config: RunConfig, task: QuestionTask, ranks: Ranks = ALONE):
        self.config, self.task, self.ranks = config, task, ranks

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """ids and roles `[R, T]`. Every epoch takes each window once, in an order drawn from (seed, epoch). The rows of
        a batch are sorted by length, so that micro-batches have little padding."""
        config, train = self.config, self.task.train
        places = places_of_step([len(train)], seed=config.train.seed, step=step, rows_per_step=config.rows_per_step)
        chosen = sorted((row for _, _, row in places), key=lambda row: -len(train.ids[row]))
        chosen = chosen[self.ranks.share(len(chosen))]
        return tuple(padded([rows[i] for i in chosen], config.model.context, fill=0)
                     for rows in (train.ids, train.roles))

    def n_targets(self, *batch: Tensor) -> int:
        return 2 * len(batch[0])

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, roles_BT = batch
        return span_losses(span_logits(model, ids_BT, roles_BT), roles_BT)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """EM, F1 and nats per window of the first validation questions, up to `eval_tokens` tokens. Every rank answers
        all of them, for a share would be batched, and rounded, in another way."""
        task, train = self.task, self.config.train
        asked = [question for question in task.validation if question.accepted]
        answers, loss, _ = answer_questions(model, task.tokenizer, asked, task.windows, precision=train.precision,
                                            batch_rows=self.config.micro_batch_rows, max_tokens=train.eval_tokens,
                                            progress=progress)
        scores = score([question for question in asked if question.id in answers], answers)
        return {"loss": loss, "exact_match": scores["exact_match"], "f1": scores["f1"]}
