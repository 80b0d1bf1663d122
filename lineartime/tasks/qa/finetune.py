"""Fine-tuning on questions: a model of masked language modelling learns to find answers as spans.

It is trained once per learning rate, and the best run is kept. `DIR/lr-1e-04`, ... are ordinary
runs. `DIR/result.json` names the best of them, `DIR/best` is a link to it."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime import folders
from lineartime.base.errors import DataError
from lineartime.base.files import json_sha256, write_json
from lineartime.base.ranks import ALONE, TIMEOUT_S, Ranks, connected, gather_json
from lineartime.base.settings import replace_fields, require
from lineartime.base.stores import hash_of
from lineartime.base.tensor_bytes import tensors_sha256
from lineartime.base.words import Progress
from lineartime.config import TRAIN_FIELDS, ModelConfig, TrainConfig, stored_config, to_dict
from lineartime.data.mixture import places_of_step
from lineartime.data.tokenizer import Tokenizer
from lineartime.model.language_model import LanguageModel, SpanModel
from lineartime.tasks.pooling import padded_rows
from lineartime.tasks.qa import spans
from lineartime.tasks.qa.finetune_config import FineTuning
from lineartime.tasks.qa.questions import Question, read_questions, score_answers
from lineartime.training.loop import Callbacks, Setup, fit_once
from lineartime.training.run import Run, different
from lineartime.training.run_config import RunConfig
from lineartime.training.runtime import StopSignal, pick_device
from lineartime.weights import checkpoint
from lineartime.weights.load import load_model
from lineartime.weights.transfer import copy_weights
from lineartime.weights.transformers_files import tokenizer_files

QUESTIONS_CONTEXT, ROWS_PER_STEP, WARMUP_SHARE, N_SCORINGS = 4096, 32, 0.1, 5
CHUNK_SIZE = 128
CHANGEABLE = ("chunk_size", "cls_softmax", "first_to_all", "attn_scale_len")
"""Fields of the pretrained model's configuration that fine-tuning may change."""
PREDICTIONS_FILE = "predictions.json"

logger = logging.getLogger(__name__)


def finetune(plan: FineTuning, *, device: torch.device | str | None = None, stop: StopSignal | None = None,
             on_step: Callable[[dict[str, Any]], None] | None = None, progress: Progress | None = None,
             rank_timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """Fine-tune once per learning rate, or resume. Returns the content of `DIR/result.json`: "best"
    (the best run's folder in `plan.out`), scores by learning rate, counts of the questions, and the
    settings; with "already" if the folder was complete before.

    device: by default cuda if available. stop: requests a save and an end. on_step is called with
    each line of the metrics and the number of "steps". progress counts questions and documents.
    rank_timeout: see `train`. Raises UsageError for a folder with another fine-tuning, Stopped
    after saving, and as `read_task`, `load_model` and `fit_once` do."""
    stop, out = stop or StopSignal(), plan.out
    require(out.is_dir() or not out.exists(), "not a folder", str(out), "give another --out")
    require(not (out / folders.RUN_FILE).exists(), "another run is here", str(out), "give another --out")
    picked = pick_device(device)
    task = read_task(plan, partial(stop.watch, "the same command goes on", progress))
    runs = runs_of(plan, task.config, len(task.train))
    settings = {**task.facts, "model": to_dict(task.config),
                "train": {name: to_dict(run.train) for name, run in runs.items()}}
    # One process at a time has the folder. A complete one is only compared; else its runs go on.
    with (connected(picked.type, rank_timeout, between=partial(stop.check, "before the ranks met")) as ranks,
          checkpoint.lock(out) if ranks.is_first else nullcontext()):
        found = folders.read_fine_tuning(out) if ranks.is_first and (out / folders.RESULT_FILE).exists() else None
        if (complete := gather_json(found, ranks)[0]) is not None:
            check_settings(complete["fine_tuning"], settings, out)
            if ranks.is_first:
                point_to_best(out, complete)
            return {**complete, "already": True}
        rates = {}
        for name, run in runs.items():
            logger.info(f"learning rate {name}")
            rates[name] = train_rate(task, run, picked, Callbacks(stop, on_step))
            logger.info(f"  EM {rates[name]['exact_match']:6.2f}  F1 {rates[name]['f1']:6.2f}, held out")
        best = max(rates, key=lambda name: (rates[name]["f1"], rates[name]["exact_match"]))
        result = {"best": f"lr-{best}", "learning_rates": rates, "train_questions": task.train.counts,
                  "fine_tuning": settings}
        if ranks.is_first:
            point_to_best(out, result)
            folders.write_result(out, result)
    return result


@dataclass(frozen=True)
class QuestionTask:
    """What all runs of a fine-tuning share."""

    pretrained: LanguageModel
    tokenizer: Tokenizer
    config: ModelConfig
    windows: spans.WindowConfig
    train: spans.TrainingWindows
    validation: list[Question]
    facts: dict[str, Any]  # what the runs read, by hashes
    watch: Callable[..., Callable[[int], None]]  # `StopSignal.watch` with its note and progress


def read_task(plan: FineTuning, watch: Callable[..., Callable[[int], None]]) -> QuestionTask:
    """Load the model, read the questions, and log their counts. Raises UsageError for a causal
    model, one without [SEP] and wrong settings; DataError for questions without an answer."""
    pretrained, tokenizer, loaded_from = load_model(plan.run)
    # Wrong settings, and weights that do not fit, are refused before the questions are read.
    separator = tokenizer.separator
    require(separator is not None and separator < pretrained.config.vocab_size, "the model has no [SEP]",
            str(plan.run), "questions need one: pretrain on data from `lineartime prepare --mlm`")
    context = QUESTIONS_CONTEXT if plan.context is None else plan.context
    windows = spans.WindowConfig(context, plan.stride, plan.max_answer_tokens)
    changes = {name: value for name, value in plan.settings.items() if name not in TRAIN_FIELDS}
    config = span_config(pretrained, context, changes)
    span_model(pretrained, config, 0)
    runs_of(plan, config, 1 << 40)

    validation = list(read_questions(plan.validation, plan.evidence))
    if not any(question.accepted for question in validation):
        raise DataError("no question has an answer to compare with", plan.validation[0], "validation needs labels")
    train = spans.training_windows(tokenizer, read_questions(plan.data, plan.evidence), windows, plan.negatives,
                                   plan.settings.get("seed", 0), watch("reading questions", None))
    counts = train.counts
    if not counts["windows_with_answer"]:
        raise DataError("no window holds an answer", ", ".join(map(str, plan.data)), "of {questions} questions "
                        "{unlabelled} have no label, {without_document} no document, {answer_not_found} an answer that "
                        "no document holds".format_map(counts))
    logger.info(f"questions {counts['questions']:,} to train on, {counts['windows']:,} windows of up to "
                f"{context:,} tokens, {counts['windows_with_answer']:,} with an answer; "
                f"{counts['answer_not_found']:,} answers not found in the evidence")
    weights = Path(loaded_from["checkpoint"]) / folders.WEIGHTS_FILE  # not there if they are in several files
    asked = [[q.id, q.text, q.accepted, [sha256(each.text().encode()).hexdigest() for each in q.documents]]
             for q in validation]
    facts = {"pretrained_sha256": (hash_of(weights)["sha256"] if weights.exists() else
                                   tensors_sha256(pretrained.state_dict())),
             "rows_sha256": train.sha256(), "tokenizer_sha256": tokenizer.sha256,
             "validation_sha256": json_sha256(asked), **asdict(windows)}
    return QuestionTask(pretrained, tokenizer, config, windows, train, validation, facts, watch)


def span_config(model: LanguageModel, context: int, changes: dict[str, Any]) -> ModelConfig:
    """The configuration for fine-tuning a pretrained model: the paper's, then `changes`.

    In the paper (Section 4.3) FLASH alone has a chunk size of 128 (at most the pretrained one's)
    and, if it has relu^2, softmax for [CLS]. Without chunks, n of relu(q k / n + b)^2 keeps its
    value. Raises UsageError for a causal model, a field that fine-tuning cannot change, and a
    context longer than the position tables allow."""
    config = model.config
    require(not config.causal, "questions need a model that sees both ways", "causal = true",
            "pretrain with causal = false (masked language modelling); a causal model goes on with `lineartime train "
            "--from RUN`")
    for name in changes:
        require(name != "context", "the context is an option, not a setting", name, "give --context")
        require(name in CHANGEABLE, "the pretrained model decides this", name,
                f"fine-tuning may change {', '.join(CHANGEABLE)}")
    fields: dict[str, Any] = {}
    if config.ffn == "gau" and config.chunk_size is not None:
        fields["chunk_size"] = min(CHUNK_SIZE, config.chunk_size)
        if config.attn_kernel == "relu2" and config.n_heads == 1 and config.chunk_parts != "global":
            fields |= {"cls_softmax": True, "document_grid": "row"}  # a window is one document
    model.check_length(context)
    return replace_fields(config, {"context": context, **config.kept_scale, **fields, **changes})


def span_model(pretrained: LanguageModel, config: ModelConfig, seed: int) -> SpanModel:
    """A `SpanModel` with a pretrained model's weights; its head is drawn from `seed`."""
    torch.manual_seed(seed)
    model = SpanModel(config)
    copy_weights(model, pretrained)
    return model


def runs_of(plan: FineTuning, config: ModelConfig, n_rows: int) -> dict[str, RunConfig]:
    """The runs by the names of their learning rates, to train on `n_rows` rows."""
    runs, data = {}, ", ".join(map(str, plan.data))
    for rate in plan.learning_rates:
        name = np.format_float_scientific(rate, trim="-", exp_digits=2)  # such as 1e-04
        train, out = config_at_rate(plan, rate, config, n_rows), plan.out / f"lr-{name}"
        runs[name] = RunConfig(config, train, "fine-tuned", "questions", data, str(out))
    return runs


def config_at_rate(plan: FineTuning, rate: float, config: ModelConfig, n_rows: int) -> TrainConfig:
    """The training at one learning rate. Unless the settings say otherwise, it has batches of 32
    rows, a tenth of the steps for warm-up, and a save after each tenth of the run and at least
    every 500 steps. FLASH is not clipped, as in the paper's fine-tuning (Section 4.3). n_rows: rows
    to train on. Raises UsageError for wrong values."""
    context = config.context
    given = {name: value for name, value in plan.settings.items() if name in TRAIN_FIELDS}
    tokens_per_step = given.get("tokens_per_step", ROWS_PER_STEP * context)
    require(tokens_per_step >= context and tokens_per_step % context == 0,
            "tokens_per_step must be a multiple of context",
            f"tokens_per_step = {tokens_per_step}, context = {context}")
    # The largest micro-batch of whole rows that divides a step, and no larger than in pretraining.
    rows = tokens_per_step // context
    most = max(TrainConfig().micro_batch_tokens // context, 1)
    micro_rows = max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)
    steps = given.get("steps", max(-(-round(n_rows * plan.epochs) // rows), 1))
    own = {"tokens_per_step": tokens_per_step, "micro_batch_tokens": micro_rows * context, "steps": steps,
           "warmup_steps": round(WARMUP_SHARE * steps), "keep": 1,
           "clip": None if config.ffn == "gau" and config.chunk_size is not None else TrainConfig().clip,
           "eval_every": max(steps // N_SCORINGS, 1), "save_every": min(max(steps // 10, 1), 500)}
    return replace_fields(TrainConfig(), {**own, **given, "learning_rate": rate})


def train_rate(task: QuestionTask, config: RunConfig, device: torch.device, callbacks: Callbacks) -> dict[str, Any]:
    """Train at one learning rate, or resume; returns the scores of its last step: EM, F1 and nats
    per window of all validation questions. The answers go into the run's folder."""
    def begin(ranks: Ranks) -> Setup:
        config_json = folders.model_config_json(task.config, folders.QUESTION_ANSWERING)
        return Setup(span_model(task.pretrained, task.config, config.train.seed), SpanObjective(config, task, ranks),
                     {**tokenizer_files(task.tokenizer), folders.CONFIG_FILE: config_json}, score_last=False)

    def score(run: Run, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        answers, loss, n_windows = spans.answer_questions(
            model, task.tokenizer, task.validation, task.windows, batch_rows=config.micro_batch_rows,
            precision=config.train.precision, progress=task.watch("answering", len(task.validation), ranks))
        if ranks.is_first:
            write_json(Path(config.out) / PREDICTIONS_FILE, answers, ascii_only=False)
        return {"steps": config.train.steps, **score_answers(task.validation, answers), "loss": loss,
                "n_windows": n_windows}

    result, _ = fit_once(config, task.facts, device, begin, score, callbacks, TIMEOUT_S)
    return {name: value for name, value in result.items() if name != "run"}


class SpanObjective:
    """The objective of `fit`: the first and the last token of each window's answer."""

    def __init__(self, config: RunConfig, task: QuestionTask, ranks: Ranks = ALONE):
        self.config, self.task, self.ranks = config, task, ranks

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """ids and roles `[R, T]`. An epoch has each window once, in an order drawn from (seed,
        epoch). Rows of a batch are sorted by length: micro-batches have little padding."""
        config, train = self.config, self.task.train
        places = places_of_step([len(train)], seed=config.train.seed, step=step, rows_per_step=config.rows_per_step)
        chosen = sorted((row for _, _, row in places), key=lambda row: -len(train.ids[row]))
        chosen = chosen[self.ranks.share(len(chosen))]
        return tuple(padded_rows([rows[i] for i in chosen], config.model.context, fill=0)
                     for rows in (train.ids, train.roles))

    def n_targets(self, *batch: Tensor) -> int:
        return 2 * len(batch[0])

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, roles_BT = batch
        return spans.span_losses(spans.span_logits(model, ids_BT, roles_BT), roles_BT)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """EM, F1 and nats per window of validation questions at about equal distances, up to
        `eval_tokens` tokens. Every rank answers all: a share would be rounded in another way."""
        task, train = self.task, self.config.train
        asked = spread_out([each for each in task.validation if each.accepted])
        answers, loss, _ = spans.answer_questions(model, task.tokenizer, asked, task.windows, precision=train.precision,
                                                  batch_rows=self.config.micro_batch_rows, max_tokens=train.eval_tokens,
                                                  progress=progress)
        scores = score_answers([each for each in asked if each.id in answers], answers)
        return {"loss": loss, "exact_match": scores["exact_match"], "f1": scores["f1"],
                "n_questions": len(answers), "of_questions": len(asked)}


def spread_out(questions: Sequence[Question]) -> list[Question]:
    """The questions in an order in which the first few, however many, lie at about equal distances:
    question i is sorted by the fraction of i times the golden section."""
    section = (math.sqrt(5) - 1) / 2
    return [questions[i] for i in sorted(range(len(questions)), key=lambda i: (i * section + 0.5) % 1)]


def point_to_best(out: Path, result: dict[str, Any]) -> None:
    """Point the links `best` and `predictions.json` in `out` at the best weights and answers."""
    best = result["best"]
    checkpoint.point(out / "best", Path(best) / "latest")
    checkpoint.point(out / PREDICTIONS_FILE, Path(best) / PREDICTIONS_FILE)


def check_settings(stored: dict[str, Any], settings: dict[str, Any], out: Path) -> None:
    """Raise UsageError if the completed fine-tuning in `out` had other settings."""
    known = {"model": to_dict(stored_config(ModelConfig(), stored["model"])),  # an older one has other fields
             "train": {name: to_dict(stored_config(TrainConfig(), each)) for name, each in stored["train"].items()}}
    changed = different(stored | known, json.loads(json.dumps(settings)))
    require(not changed, "another fine-tuning is here", str(out),
            f"{'; '.join(changed)}. Give another --out, or the same settings")
