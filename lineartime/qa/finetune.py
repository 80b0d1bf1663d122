"""Fine-tuning on questions: a model of masked language modelling gets a span head and learns to find answers.

`DIR/lr-1e-04`, ... are ordinary runs, one per learning rate. `DIR/result.json` names the best of them on the validation
questions."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime import checkpoint
from lineartime.atomic_io import hash_of, write_atomically, write_json
from lineartime.config import QUESTION_ANSWERING, TRAIN_FIELDS, ModelConfig, RunConfig, TrainConfig, model_config_json
from lineartime.config import to_dict as fields_of
from lineartime.data.run_settings import RESULT_FILE, RUN_FILE
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import places_of_step
from lineartime.distributed.ranks import ALONE, TIMEOUT_S, Ranks, connected, gather_json
from lineartime.errors import CheckpointError, DataError, UsageError
from lineartime.gau import GatedAttentionUnit
from lineartime.layers import RelPosBias
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
from lineartime.run import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Run,
    different,
    load_model,
    read_fine_tuning,
    result_or_none,
)
from lineartime.runtime import pick_device
from lineartime.settings import replace_fields, require
from lineartime.training import Progress, StopSignal, fit_once
from lineartime.weights.folder import tokenizer_files

LEARNING_RATES = (1e-4, 7e-5, 5e-5)
CONTEXT, CHUNK_SIZE = 4096, 128
ROWS_PER_STEP, EPOCHS, WARMUP_SHARE, NEGATIVES = 32, 5, 0.1, 0.25
CHANGEABLE = ("context", "chunk_size", "cls_softmax", "first_to_all", "attn_scale_len")
"""Fields of the pretrained model's configuration that fine-tuning may change."""
PREDICTIONS_FILE = "predictions.json"
BEST = "best"

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
        require(name in CHANGEABLE, "the pretrained model decides this", name,
                f"fine-tuning may change {', '.join(CHANGEABLE)}")
    model.check_length(context)
    fields: dict[str, Any] = {"context": context}
    if is_flash(config):
        assert config.chunk_size is not None
        fields["chunk_size"] = min(CHUNK_SIZE, config.chunk_size)
        if config.attn_kernel == "relu2" and config.n_heads == 1 and config.chunk_parts != "global":
            fields["cls_softmax"] = True
    elif config.chunk_size is None and config.has_bias:
        fields["attn_scale_len"] = config.scale_len
    return replace_fields(config, fields | changes)


def is_flash(config: ModelConfig) -> bool:
    """Whether a model has GAUs with chunks: the one that Section 4.3 fine-tunes with small chunks, softmax for [CLS]
    and no clipping."""
    return config.ffn == "gau" and config.chunk_size is not None


@torch.no_grad()
def span_model(pretrained: LanguageModel, config: ModelConfig, seed: int) -> SpanModel:
    """A `SpanModel` with a pretrained model's weights; new weights are drawn from `seed`.

    Weights of the same name and shape are copied. A position table is cut to a shorter context. A position bias for
    another chunk size keeps its values by distance; greater distances get the value of the greatest. A GAU's queries
    are scaled so that q k / n keeps its value. first_to_all adds heads. Raises CheckpointError with the names of
    weights that do not fit."""
    torch.manual_seed(seed)
    model = SpanModel(config)
    old = dict(pretrained.named_parameters())
    old_modules = dict(pretrained.named_modules())
    done: set[str] = set()
    for name, module in model.named_modules():
        before = old_modules.get(name)
        if isinstance(module, RelPosBias) and isinstance(before, RelPosBias) and hasattr(module, "weight"):
            reach = before.n - 1
            offset = torch.arange(1 - module.n, module.n)
            module.weight.copy_(before.at(offset.clamp(-reach, reach) if hasattr(before, "weight") else offset))
            done.add(f"{name}.weight")
    wrong = []
    for name, p in model.named_parameters():
        if name in done or (name.startswith("span_head.") and name not in old):
            continue
        if name not in old:
            wrong.append(f"{name} is missing")
        elif p.shape == old[name].shape:
            p.copy_(old[name])
        elif name == "abs_pos.weight" and p.shape[0] < old[name].shape[0]:
            p.copy_(old[name][: p.shape[0]])
        elif name.endswith((".scale_offset.gamma", ".scale_offset.beta")) and p.shape[0] > old[name].shape[0]:
            p[: old[name].shape[0]] = old[name]
        else:
            wrong.append(f"{name} is {list(old[name].shape)}, not {list(p.shape)}")
    if wrong:
        raise CheckpointError("the pretrained weights do not fit", checkpoint.first_five(wrong),
                              "keep more of the pretrained configuration")
    for name, module in model.named_modules():
        before = old_modules.get(name)
        if isinstance(module, GatedAttentionUnit) and isinstance(before, GatedAttentionUnit):
            if module.config.attn_kernel == "relu2":
                for part in (module.scale_offset.gamma, module.scale_offset.beta):
                    part[0] *= module.config.scale_len / before.config.scale_len
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
        require(len(self.learning_rates) > 0, "no learning rate", "learning_rates")
        require(len(set(self.learning_rates)) == len(self.learning_rates), "the same learning rate twice",
                ", ".join(f"{rate:g}" for rate in self.learning_rates))
        require(self.epochs > 0, "epochs must be positive", f"epochs = {self.epochs}")
        require(0 <= self.negatives <= 1, "negatives is a share", f"negatives = {self.negatives}",
                "it lies between 0 and 1")
        require(not self.settings.get("shard"), "a fine-tuning is not sharded", "shard = true", "leave it out")
        require("learning_rate" not in self.settings, "several learning rates are tried", "learning_rate",
                "give --learning-rates")
        for rate in self.learning_rates:
            self.train_config(1 << 40, rate, clip=None)

    @property
    def windows(self) -> Windows:
        return Windows(self.context, self.stride, self.max_answer_tokens)

    def train_config(self, n_windows: int, learning_rate: float, clip: float | None) -> TrainConfig:
        """`settings`, then batches of 32 windows, 5 epochs, a tenth of the steps for warm-up, and `clip`."""
        given = {name: value for name, value in self.settings.items() if name in TRAIN_FIELDS}
        tokens_per_step = given.get("tokens_per_step", ROWS_PER_STEP * self.windows.context)
        require(tokens_per_step >= self.context and tokens_per_step % self.context == 0,
                "tokens_per_step must be a multiple of context",
                f"tokens_per_step = {tokens_per_step}, context = {self.context}")
        rows = tokens_per_step // self.context
        most = max(TrainConfig().micro_batch_tokens // self.context, 1)
        micro_rows = max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)
        steps = given.get("steps", max(-(-round(n_windows * self.epochs) // rows), 1))
        defaults = {"tokens_per_step": tokens_per_step, "micro_batch_tokens": micro_rows * self.context, "steps": steps,
                    "warmup_steps": round(WARMUP_SHARE * steps), "clip": clip, "keep": 1,
                    "eval_every": max(steps // 5, 1), "save_every": min(max(steps // 10, 1), 500)}
        return replace_fields(TrainConfig(), {**defaults, **given, "learning_rate": learning_rate})


def name_of(rate: float) -> str:
    """A learning rate in the name of its run: `1e-04`, with as many digits as necessary."""
    return next(text for digits in range(17) if float(text := f"{rate:.{digits}e}") == rate)


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
    if not isinstance(device, torch.device):
        device = pick_device(device, tell=True)
    pretrained, tokenizer, facts = load_model(plan.run, strict=plan.strict)
    separator = separator_of(tokenizer)
    require(separator < pretrained.config.vocab_size, "[SEP] is outside the model's vocabulary", str(plan.run),
            "pretrain on data from `lineartime prepare --mlm`")
    changes = {name: value for name, value in plan.settings.items() if name not in TRAIN_FIELDS}
    for name in ("context_parallel", "row_tiles"):
        require(plan.settings.get(name) in (None, 1), f"{name} is for language modelling",
                f"{name} = {plan.settings.get(name)}", "leave it out")
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
    if (plan.out / RUN_FILE).exists():
        raise UsageError("another run is here", plan.out, "give another --out")

    def train_one(each: RunConfig) -> dict[str, Any]:
        """Run one learning rate, or resume it; returns its scores on all validation questions."""
        files = {**tokenizer_files(tokenizer), CONFIG_FILE: model_config_json(config, QUESTION_ANSWERING)}
        answered = stop.watch("what is trained is saved; the same command resumes", progress, "answering",
                              len(validation), ranks)

        def begin(ranks: Ranks) -> tuple[LanguageModel, Questions, dict[str, str]]:
            model = span_model(pretrained, config, each.train.seed)
            return model, Questions(each, rows, validation, tokenizer, plan.windows, ranks), files

        def scored(run: Run, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
            answers, loss, n_windows = answer_questions(
                model, tokenizer, validation, plan.windows, batch_rows=each.micro_batch_rows,
                precision=each.train.precision, progress=answered)
            if ranks.is_first:
                write_json(run.out / PREDICTIONS_FILE, answers, ascii_only=False)
            return {"steps": each.train.steps, **dataclasses.asdict(score(validation, answers)), "loss": loss,
                    "n_windows": n_windows}

        result, _ = fit_once(each, description, device, stop, begin, scored, on_step=on_step, score_last=False)
        return {name: value for name, value in result.items() if name != "run"}

    with connected(device.type, rank_timeout) as ranks, checkpoint.lock(plan.out) if ranks.is_first else nullcontext():
        found = result_or_none(plan.out, read_fine_tuning, "lr-*/step-*") if ranks.is_first else None
        complete = gather_json(found, ranks)[0]
        if complete is not None:
            check_settings(complete["fine_tuning"], whole, plan.out)
            return {**complete, "already": True}
        counts = dataclasses.asdict(rows.counts)
        logger.info(f"questions {counts['questions']:,} to train on, {counts['windows']:,} windows of up to "
                    f"{plan.context:,} tokens, {counts['windows_with_answer']:,} with an answer; "
                    f"{counts['answer_not_found']:,} answers not found in the evidence")
        rates = {}
        for name, each in configs.items():
            logger.info(f"learning rate {name}")
            rates[name] = train_one(each)
            logger.info(f"  EM {rates[name]['exact_match']:.2f}, F1 {rates[name]['f1']:.2f} on "
                        f"{rates[name]['n_questions']:,} validation questions")
        best = max(rates, key=lambda name: (rates[name]["f1"], rates[name]["exact_match"]))
        baseline = score(validation, {question.id: guess_by_overlap(question) for question in validation})
        result = {"best": f"lr-{best}", "learning_rates": rates, "word_overlap": dataclasses.asdict(baseline),
                  "train_questions": counts, "fine_tuning": whole}
        if ranks.is_first:
            answers = plan.out / f"lr-{best}" / PREDICTIONS_FILE
            write_atomically(plan.out / PREDICTIONS_FILE, answers.read_text(encoding="utf-8"))
            checkpoint.point(plan.out / BEST, Path(f"lr-{best}") / "latest")
            write_json(plan.out / RESULT_FILE, result)
    return result


def check_settings(stored: dict[str, Any], whole: dict[str, Any], out: Path) -> None:
    """Raise UsageError if the completed fine-tuning in `out` had other settings."""
    trained = {name: fields_of(replace_fields(TrainConfig(), each)) for name, each in stored["train"].items()}
    changed = different(stored | {"train": trained}, json.loads(json.dumps(whole)))  # older ones have fewer fields
    if changed:
        raise UsageError("another fine-tuning is here", out,
                         f"{'; '.join(changed)}. Give another --out, or the same settings")


def questions_sha256(questions: Sequence[Question]) -> str:
    """The hash of the questions' ids, texts, answers and document names."""
    lines = [[q.id, q.text, q.accepted, [document.name for document in q.documents]] for q in questions]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()
