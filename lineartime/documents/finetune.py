"""Fine-tuning on documents: for labels, and by `contrast` for vectors.

For labels a pretrained model gets a head on the mean of a document's last hidden states. A document that fits into a
row is one row of training. Of a longer one each epoch reads one window, drawn anew in proportion to the windows'
tokens; the held-out scores, and `lineartime classify`, read it whole."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime.config import ModelConfig
from lineartime.config_json import CLASSIFICATION, Head, model_config_json
from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import epoch_order, places_of_step
from lineartime.distributed.ranks import ALONE, TIMEOUT_S, Ranks
from lineartime.documents import contrast, metrics, report
from lineartime.documents.classify import NUMBER, label_losses, logits_of, targets_of
from lineartime.documents.examples import read_examples
from lineartime.documents.labelled import Documents, class_weights, documents_of, head_of, read_documents, require_known
from lineartime.documents.pooling import Reading, padded, read_means, row_means
from lineartime.documents.tuning import (
    SAVED,
    DocumentTuning,
    drawn_window,
    load_step,
    read_splits,
    reading_of,
    train_best,
)
from lineartime.finetuning import copy_weights, require_folder, try_rates, with_context
from lineartime.load import load_model
from lineartime.model import DocumentClassifier, DocumentEncoder, LanguageModel
from lineartime.run import CONFIG_FILE, Run
from lineartime.run_config import RunConfig
from lineartime.runtime import is_picked, pick_device
from lineartime.settings import require
from lineartime.training import Progress, StopSignal
from lineartime.weights.folder import tokenizer_files

logger = logging.getLogger(__name__)


class LabelledDocuments:
    """The objective of `fit` for labels of documents."""

    def __init__(self, config: RunConfig, head: Head, train: Documents, validation: Documents,
                 weights: Sequence[float] | None, ranks: Ranks = ALONE):
        self.config, self.head, self.train, self.validation, self.ranks = config, head, train, validation, ranks
        self.targets = targets_of(head, train.labels)
        self.weights = None if weights is None else torch.tensor(weights)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """ids_BT, -1 for padding, and targets. Every epoch takes each document once, in an order drawn from
        (seed, epoch). The rows of a batch are sorted by length, so that micro-batches have little padding."""
        config, size = self.config, self.config.model.context
        seed = config.train.seed
        places = places_of_step(len(self.train), seed=seed, step=step, rows_per_step=config.rows_per_step)
        rows = [(row, self.train.ids[row][drawn_window(len(self.train.ids[row]), size, seed, epoch, row)])
                for epoch, row in places]
        rows.sort(key=lambda pair: -len(pair[1]))
        rows = rows[self.ranks.share(len(rows))]
        return padded([ids.tolist() for _, ids in rows], size), self.targets[[row for row, _ in rows]]

    def n_targets(self, *batch: Tensor) -> int:
        return batch[1].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, targets = batch
        assert isinstance(model, DocumentClassifier)
        weights = None if self.weights is None else self.weights.to(ids_BT.device)
        return label_losses(self.head, model.label_logits(row_means(model, ids_BT)), targets, weights)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """The scores of held-out documents, read whole, in a drawn order up to `eval_tokens` tokens. Every rank reads
        all of them, for a share would be batched, and rounded, in another way."""
        train = self.config.train
        order = epoch_order(train.seed, 0, len(self.validation))
        before = np.cumsum([0, *(len(self.validation.ids[i]) for i in order)])[:-1]
        chosen = order[before < train.eval_tokens]
        logits_NL = read_logits(model, [self.validation.ids[i] for i in chosen], reading_of(self.config), progress)
        return metrics.score_labels(self.head, logits_NL,
                                    targets_of(self.head, [self.validation.labels[i] for i in chosen]))


def read_logits(model: nn.Module, ids: Sequence[np.ndarray], reading: Reading,
                progress: Callable[[int], None] | None = None) -> np.ndarray:
    """The logits of documents read whole, float64 `[N, L]`. progress is called with the number of tokens read."""
    assert isinstance(model, DocumentClassifier)
    was_training = model.training
    model.eval()
    rows = [logits_of(model, mean.vector_D)
            for mean in read_means(model, ([each.tolist()] for each in ids), reading, progress=progress)]
    model.train(was_training)
    return np.array(rows)


def finetune_documents(plan: DocumentTuning, *, device: torch.device | str | None = None,
                       stop: StopSignal | None = None, on_step: Callable[[dict[str, Any]], None] | None = None,
                       progress: Progress | None = None, rank_timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """Fine-tune once per learning rate, or resume, and write a report of the best. Returns the content of
    `DIR/result.json`: "best" (the best run's folder in `plan.out`), scores by learning rate, the scores without
    training, those of the test documents, and counts; with "already" if the folder was complete before.

    device, stop, on_step, progress, rank_timeout: as in `qa.finetune.finetune`; progress counts documents and tokens.
    Raises UsageError for wrong settings, a model with a head, a folder with another fine-tuning and, for labels,
    without scikit-learn; DataError for wrong documents; Stopped after saving, and as `fit` does."""
    stop = stop or StopSignal()
    require_folder(plan.out)
    if plan.task == "classify":
        metrics.scikit()
    if not is_picked(device):
        device = pick_device(device, tell=True)
    pretrained, tokenizer, _ = load_model(plan.model, strict=plan.strict)
    require(isinstance(pretrained, DocumentEncoder) or type(pretrained) is LanguageModel,
            "this model has a head already", str(plan.model), "begin with a language model")
    config = with_context(pretrained, plan.context or pretrained.config.context, {})
    plan.runs(config, 1 << 20, 1)  # wrong settings are refused before documents are read
    finetune = contrast.finetune_encoder if plan.task == "embed" else finetune_classifier
    return finetune(plan, pretrained, config, tokenizer, device, stop, on_step, progress, rank_timeout)


def finetune_classifier(plan: DocumentTuning, pretrained: LanguageModel, config: ModelConfig, tokenizer: Tokenizer,
                        device: torch.device, stop: StopSignal, on_step: Callable[[dict[str, Any]], None] | None,
                        progress: Progress | None, rank_timeout: float) -> dict[str, Any]:
    """`finetune_documents` for labels, with the pretrained model. config: that of the new one."""
    texts = read_splits(plan, stop, progress, "documents", lambda names, counted: read_documents(
        tokenizer, read_examples(names, plan.fields, plan.labels), plan.max_tokens, counted))
    train, validation, test = texts.train, texts.validation, texts.test
    head = replace(head_of(train, plan.labels, ", ".join(map(str, plan.documents))), pairs=plan.fields.pair is not None,
                   max_tokens=plan.max_tokens)
    for each in (validation, *([] if test is None else [test])):
        require_known(head, each)
    targets = targets_of(head, train.labels)
    weights = class_weights(head, targets) if plan.balance else None
    description = {**texts.facts(pretrained, tokenizer, plan), "balance": plan.balance, **head.fields()}
    configs, trained = plan.runs(config, len(train), validation.n_tokens)
    longer = sum(len(ids) > config.context for ids in train.ids)
    logger.info(f"documents {len(train):,} to train on, {train.n_tokens:,} tokens, {len(head.labels)} "
                f"{'classes' if head.problem_type != NUMBER else 'number'}{texts.counts}")
    if longer:
        logger.info(f"          {longer:,} are longer than a row of {config.context:,} tokens: an epoch trains on one "
                    "window of each, held-out ones are read whole")
    if texts.n_cut:
        logger.info(f"cut       {texts.n_cut:,} documents to {plan.max_tokens:,} tokens")
    texts.warn_of_known("documents")
    rare = [name for name, n in zip(head.labels, documents_of(head, targets), strict=True) if n == 1]
    if rare:
        logger.warning(f"one training document only: {len(rare):,} of {len(head.labels):,} classes, "
                       f"{', '.join(rare)[:200]}")

    def train_one(each: RunConfig, ranks: Ranks) -> dict[str, Any]:
        """Run one learning rate, or resume it; returns its scores on all held-out documents."""
        files = {**tokenizer_files(tokenizer), CONFIG_FILE: model_config_json(config, CLASSIFICATION, **head.fields())}

        def begin(ranks: Ranks) -> tuple[LanguageModel, LabelledDocuments, dict[str, str]]:
            torch.manual_seed(each.train.seed)
            model = DocumentClassifier(config, head)
            copy_weights(model, pretrained, "score.")
            return model, LabelledDocuments(each, head, train, validation, weights, ranks), files

        def scored(run: Run, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
            watched = stop.watch(SAVED, progress, "scoring", validation.n_tokens, ranks)
            logits_NL = read_logits(model, validation.ids, reading_of(each), watched)
            if ranks.is_first:
                report.write_predictions(run.out, head, validation, logits_NL)
            return metrics.score_labels(head, logits_NL, targets_of(head, validation.labels))

        return train_best(each, description, device, stop, begin, scored, report.words, on_step, plan.patience)

    def finish(best: str, rates: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
        step, each = rates[best.removeprefix("lr-")]["best_step"], configs[best.removeprefix("lr-")]
        held_out_targets = targets_of(head, validation.labels)
        found = {"task": "classify", "without_reading": metrics.simplest(head, targets, held_out_targets),
                 "documents": {"train": len(train), "validation": len(validation), "tokens": train.n_tokens,
                               "cut": texts.n_cut, "longer_than_a_row": longer}, "known": texts.known()}
        scored, logits_NL = validation, report.read_predictions(plan.out / best, validation, head)
        if test is not None:
            model = DocumentClassifier(config, head)
            load_step(plan.out / best, step, model)
            counted = stop.watch(SAVED, progress, "testing", test.n_tokens, ranks)
            scored, logits_NL = test, read_logits(model.to(device), test.ids, reading_of(each), counted)
            found["test"] = metrics.score_labels(head, logits_NL, targets_of(head, test.labels))
        if ranks.is_first:
            report.write_predictions(plan.out, head, scored, logits_NL)
            report.write_report(plan.out, head, scored, logits_NL, {"best": best, "learning_rates": rates, **found})
        return found

    whole = {**description, **texts.test_facts(), **trained}
    return try_rates(plan.out, configs, whole, device, rank_timeout, stop, train_one,
                     lambda scores: (scores["score"], -scores["held_out"]["loss"]), finish)


