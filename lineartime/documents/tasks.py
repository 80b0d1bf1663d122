"""Fine-tuning on documents, for labels or for vectors, see `finetuning.FINE_TUNINGS`.

A document that fits into a row is one row of training. Of a longer one each epoch reads one stretch, drawn anew in
proportion to their tokens; held-out documents are read whole, as `classify` and `embed` do."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime.checkpoint import tensors_sha256
from lineartime.config_json import CLASSIFICATION, ENCODER, Head, model_config_json
from lineartime.data.tokenizer import Tokenizer
from lineartime.distributed.ranks import ALONE, Ranks, launched
from lineartime.documents import metrics, report, vectors
from lineartime.documents.classify import head_of, label_losses, logits_of, require_known, targets_of
from lineartime.documents.examples import read_examples
from lineartime.documents.pooling import padded, row_means
from lineartime.documents.texts import TokenizedTexts, epoch_rows, read_texts, read_vectors, reading_of
from lineartime.documents.vectors import TEMPERATURE, contrastive_losses, same_texts, score_texts
from lineartime.finetune_config import FineTuning, in_words
from lineartime.model import DocumentClassifier, DocumentEncoder, LanguageModel
from lineartime.run_config import RunConfig
from lineartime.run_files import CONFIG_FILE
from lineartime.settings import require
from lineartime.weights.transfer import copy_weights, load_step, with_context
from lineartime.weights.transformers_files import tokenizer_files

logger = logging.getLogger(__name__)

Count = Callable[[int], None]
"""Is called with the number of tokens read."""


class LabelObjective:
    """The objective of `fit` for labels of documents."""

    def __init__(self, config: RunConfig, head: Head, train: TokenizedTexts, validation: TokenizedTexts,
                 ranks: Ranks = ALONE):
        self.config, self.head, self.train, self.validation, self.ranks = config, head, train, validation, ranks
        self.targets = targets_of(head, train.labels)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """ids_BT, -1 for padding, and targets, see `epoch_rows`. The rows of a batch are sorted by length, so that
        micro-batches have little padding."""
        rows = sorted(epoch_rows(self.train, self.config, step), key=lambda row: -len(row[1]))
        rows = rows[self.ranks.share(len(rows))]
        return padded([ids for _, ids in rows], self.config.model.context), self.targets[[i for i, _ in rows]]

    def n_targets(self, *batch: Tensor) -> int:
        return batch[1].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, targets = batch
        assert isinstance(model, DocumentClassifier)
        return label_losses(self.head, model.label_logits(row_means(model, ids_BT)), targets)

    def evaluate(self, model: LanguageModel, progress: Count | None = None) -> dict[str, Any]:
        """The scores of the held-out documents, which are read whole. Every rank reads all of them, for a share would
        be batched, and rounded, in another way."""
        assert isinstance(model, DocumentClassifier)
        logits_NL = logits_of(model, read_vectors(model, self.validation.ids, reading_of(self.config), progress))
        return metrics.score_labels(self.head, logits_NL, targets_of(self.head, self.validation.labels))


class PairObjective:
    """The objective of `fit` for pairs of documents."""

    def __init__(self, config: RunConfig, train: TokenizedTexts, validation: TokenizedTexts, ranks: Ranks = ALONE):
        self.config, self.train, self.validation, self.ranks = config, train, validation, ranks
        self.same_N2 = same_texts(train)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """The first and the second texts, ids `[R, T]` with -1 for padding, see `epoch_rows`, and `same_texts`."""
        sides = [epoch_rows(self.train, self.config, step, side) for side in (0, 1)]
        own = self.ranks.share(len(sides[0]))
        first_RT, second_RT = (padded([ids for _, ids in rows[own]], self.config.model.context)
                               for rows in sides)
        return first_RT, second_RT, self.same_N2[[row for row, _ in sides[0][own]]]

    def n_targets(self, *batch: Tensor) -> int:
        return batch[2].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        first_BT, second_BT, same_B2 = batch
        assert isinstance(model, DocumentEncoder)
        return contrastive_losses(row_means(model, first_BT), row_means(model, second_BT), same_B2)

    def evaluate(self, model: LanguageModel, progress: Count | None = None) -> dict[str, Any]:
        """The scores of the held-out pairs; every rank reads all of them, as of labels."""
        return score_texts(model, self.validation, reading_of(self.config), progress)


class DocumentTask:
    """Fine-tuning on documents: a head on the mean of a document's last hidden states learns its label; or that mean
    becomes a vector that is near for the two texts of a pair. The best step is the one of the highest score."""

    def __init__(self, plan: FineTuning, loaded: tuple[LanguageModel, Tokenizer, dict[str, Any]],
                 watch: Callable[..., Count]):
        """Raises UsageError for a pretrained model that labels or answers."""
        self.plan, self.watch, self.learns_labels = plan, watch, plan.task == "classify"
        self.patience: int | None = plan.patience
        if self.learns_labels:
            metrics.scikit()  # raises before anything is trained
        self.pretrained, self.tokenizer, _ = loaded
        require(isinstance(self.pretrained, DocumentEncoder) or type(self.pretrained) is LanguageModel,
                "this model has a head already", str(plan.run), "begin with a language model")
        self.config = with_context(self.pretrained, plan.context or self.pretrained.config.context, {})

    def read(self) -> int:
        """Read the training, validation and perhaps test documents, and log their counts; returns that of training.
        Raises DataError for wrong documents, UsageError for stdin under torchrun."""
        plan, self.splits = self.plan, dict[str, TokenizedTexts]()
        self.unit = "documents" if self.learns_labels else "pairs"
        for name, files in (("training", plan.data), ("validation", plan.validation), ("test", plan.test)):
            if files:
                require("-" not in files or launched().size == 1, "stdin is read by one process", "-", "name a file")
                examples = read_examples(files, plan.fields, plan.labels if self.learns_labels else None)
                self.splits[name] = read_texts(self.tokenizer, examples, plan.max_tokens,
                                               self.watch(f"{name} {self.unit}"), in_pairs=not self.learns_labels)
        self.train, self.validation = self.splits["training"], self.splits["validation"]
        self.facts: dict[str, Any] = {
            "pretrained_sha256": tensors_sha256(self.pretrained.state_dict()),
            "tokenizer_sha256": self.tokenizer.sha256,
            "documents_sha256": self.train.sha256(), "validation_sha256": self.validation.sha256(),
            "patience": plan.patience}
        self.result_facts: dict[str, Any] = {
            "test_sha256": self.splits["test"].sha256() if "test" in self.splits else None}
        if self.learns_labels:
            self.head = replace(head_of(self.train, plan.labels, ", ".join(map(str, plan.data))),
                                pairs=plan.fields.pair is not None, max_tokens=plan.max_tokens)
            for texts in self.splits.values():
                require_known(self.head, texts)
            self.targets = targets_of(self.head, self.train.labels)
            self.facts |= self.head.fields()
        else:
            self.facts |= {"temperature": TEMPERATURE}
        self.say_splits()
        return len(self.train)

    def say_splits(self) -> None:
        """Log how many documents there are, and what is not read of them."""
        n_test = f", {len(self.splits['test']):,} to test" if "test" in self.splits else ""
        more = (", halves of documents" if not self.learns_labels and self.plan.fields.pair is None else
                f", {len(self.head.labels)} classes" if self.learns_labels and self.plan.labels != "number" else "")
        logger.info(f"{self.unit:<9} {len(self.train):,} to train on, {self.train.n_tokens:,} tokens{more}; "
                    f"{len(self.validation):,} held out{n_test}")
        n_longer = sum(len(ids) > self.config.context for ids in self.train.ids)
        if n_longer:
            logger.info(f"          {n_longer:,} are longer than a row of {self.config.context:,} tokens: an "
                        "epoch trains on one stretch of each, held-out ones are read whole")
        n_cut = sum(texts.n_cut for texts in self.splits.values())
        if n_cut:
            logger.info(f"cut       {n_cut:,} documents to {self.plan.max_tokens:,} tokens")

    def new_model(self, seed: int) -> LanguageModel:
        torch.manual_seed(seed)
        model = DocumentClassifier(self.config, self.head) if self.learns_labels else DocumentEncoder(self.config)
        copy_weights(model, self.pretrained, "score.")
        return model

    def objective(self, run: RunConfig, ranks: Ranks) -> LabelObjective | PairObjective:
        if self.learns_labels:
            return LabelObjective(run, self.head, self.train, self.validation, ranks)
        return PairObjective(run, self.train, self.validation, ranks)

    def files(self) -> dict[str, str]:
        config = (model_config_json(self.config, CLASSIFICATION, **self.head.fields()) if self.learns_labels else
                  model_config_json(self.config, "LineartimeModel", **ENCODER))
        return {**tokenizer_files(self.tokenizer), CONFIG_FILE: config}

    def score(self, run: RunConfig, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        """The scores of all held-out documents."""
        counted = self.watch("scoring", self.validation.n_tokens, ranks)
        return self.objective(run, ranks).evaluate(model, counted)

    def rank(self, scores: dict[str, Any]) -> tuple[float, ...]:
        return scores["score"], -scores["held_out"]["loss"]

    def finish(self, best: RunConfig, rates: dict[str, Any], device: torch.device, ranks: Ranks) -> dict[str, Any]:
        """Score the best model, and beside it what it is compared with, on the test, or without one on the validation;
        write the report."""
        out, name, texts = self.plan.out, Path(best.out).name, self.splits.get("test", self.validation)
        # The best step of the best run: a run that has no better score goes on for a while, so it is not the last one.
        model = self.new_model(best.train.seed)
        load_step(Path(best.out), rates[name.removeprefix("lr-")]["best_step"], model)
        model.to(device).eval()
        reading, counted = reading_of(best), self.watch("scoring the best", texts.n_tokens, ranks)
        if self.learns_labels:
            assert isinstance(model, DocumentClassifier)
            targets = targets_of(self.head, texts.labels)
            logits_NL = logits_of(model, read_vectors(model, texts.ids, reading, counted))
            scores = metrics.score_labels(self.head, logits_NL, targets)
            baselines = {"without_reading": metrics.simplest(self.head, self.targets, targets)}
            if ranks.is_first:
                special = self.tokenizer.special
                train, held_out = ([self.tokenizer.decode(ids[~np.isin(ids, special)]) for ids in each.ids]
                                   for each in (self.train, texts))
                baselines["TF-IDF"] = metrics.by_tf_idf(self.head, train, self.targets, held_out, targets)
            lines = report.class_lines(self.head, targets, logits_NL)
        else:
            scores, lines = score_texts(model, texts, reading, counted), [vectors.HOW]
            counted = self.watch("scoring without training", texts.n_tokens, ranks)
            baselines = {"without_training": score_texts(self.pretrained.to(device), texts, reading, counted)}
        found = {"task": self.plan.task, **baselines, **({"test": scores} if "test" in self.splits else {})}
        if ranks.is_first:
            words = f"{in_words(scores)} on {len(texts):,} {'test' if 'test' in found else 'validation'} {self.unit}"
            result = {"best": name, "learning_rates": rates, **found}
            report.write_report(out, words, result, scores, [*baselines], lines)
        return found
