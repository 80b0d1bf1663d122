"""The two tasks of fine-tuning on documents, see `finetuning.DownstreamTask`: labels, and vectors.

A document that fits into a row is one row of training. Of a longer one each epoch reads one stretch, drawn anew in
proportion to their tokens; held-out documents are read whole, as `classify` and `embed` do."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime.config_json import CLASSIFICATION, ENCODER, Head, model_config_json
from lineartime.data.tokenizer import Tokenizer
from lineartime.distributed.ranks import ALONE, Ranks
from lineartime.documents import metrics, report, vectors
from lineartime.documents.classify import (
    NUMBER,
    class_weights,
    documents_of,
    head_of,
    label_losses,
    logits_of,
    require_known,
    targets_of,
)
from lineartime.documents.examples import check_inputs, read_examples
from lineartime.documents.pooling import Reading, padded, row_means
from lineartime.documents.results import weights_sha256
from lineartime.documents.texts import (
    BEFORE,
    TokenizedTexts,
    epoch_rows,
    first_held_out,
    known_texts,
    read_texts,
    read_vectors,
    reading_of,
)
from lineartime.documents.vectors import TEMPERATURE, contrastive_losses, same_texts, score_texts
from lineartime.finetune_config import FineTuning
from lineartime.model import DocumentClassifier, DocumentEncoder, LanguageModel
from lineartime.run import CONFIG_FILE
from lineartime.run_config import RunConfig
from lineartime.settings import require
from lineartime.weights.transfer import copy_weights, load_step, with_context
from lineartime.weights.transformers_files import tokenizer_files

logger = logging.getLogger(__name__)


class DocumentTask:
    """What both tasks have: documents are read into `splits`, and the best step is the one of the highest score."""

    unit = "documents"

    def __init__(self, plan: FineTuning, loaded: tuple[LanguageModel, Tokenizer, dict[str, Any]],
                 watch: Callable[..., Callable[[int], None]]):
        """Raises UsageError for files that are named twice, and for a pretrained model that labels or answers."""
        self.plan, self.watch = plan, watch
        self.patience: int | None = plan.patience
        self.pretrained, self.tokenizer, _ = loaded
        for names in (plan.data, plan.validation, plan.test):
            check_inputs(names, plan.out)
        require(isinstance(self.pretrained, DocumentEncoder) or type(self.pretrained) is LanguageModel,
                "this model has a head already", str(plan.run), "begin with a language model")
        self.config = with_context(self.pretrained, plan.context or self.pretrained.config.context, {})

    def read_splits(self, *, in_pairs: bool) -> None:
        """Read what is trained on, chosen on and perhaps tested on."""
        plan, self.splits = self.plan, {}
        for name, files in (("training", plan.data), ("validation", plan.validation), ("test", plan.test)):
            if files:
                examples = read_examples(files, plan.fields, None if in_pairs else plan.labels)
                self.splits[name] = read_texts(self.tokenizer, examples, plan.max_tokens,
                                               self.watch(f"{name} {self.unit}"), in_pairs=in_pairs)
        self.train, self.validation = self.splits["training"], self.splits["validation"]
        self.n_cut, self.known = sum(texts.n_cut for texts in self.splits.values()), known_texts(self.splits)
        self.facts: dict[str, Any] = {
            "pretrained_sha256": weights_sha256(self.pretrained), "tokenizer_sha256": self.tokenizer.sha256,
            "documents_sha256": self.train.sha256(), "validation_sha256": self.validation.sha256(),
            "patience": plan.patience}
        self.result_facts: dict[str, Any] = {
            "test_sha256": self.splits["test"].sha256() if "test" in self.splits else None}

    def say_splits(self, more: str) -> None:
        """Log how many documents there are, how many are cut, and how many the model knows already."""
        n_test = f", {len(self.splits['test']):,} to test" if "test" in self.splits else ""
        logger.info(f"{self.unit:<9} {len(self.train):,} to train on, {self.train.n_tokens:,} tokens{more}; "
                    f"{len(self.validation):,} held out{n_test}")
        if self.n_cut:
            logger.info(f"cut       {self.n_cut:,} documents to {self.plan.max_tokens:,} tokens")
        for name, n_known in self.known.items():
            if n_known:
                logger.warning(f"{n_known:,} of {len(self.splits[name]):,} {name} {self.unit} are also in "
                               f"{BEFORE[name]}")

    def rank(self, scores: dict[str, Any]) -> tuple[float, ...]:
        return scores["score"], -scores["held_out"]["loss"]


class LabelTask(DocumentTask):
    """A head on the mean of a document's last hidden states learns its label."""

    def read(self) -> tuple[int, int]:
        metrics.scikit()  # a missing library is said before documents are read
        plan = self.plan
        self.read_splits(in_pairs=False)
        self.head = replace(head_of(self.train, plan.labels, ", ".join(map(str, plan.data))),
                            pairs=plan.fields.pair is not None, max_tokens=plan.max_tokens)
        for texts in self.splits.values():
            require_known(self.head, texts)
        self.targets = targets_of(self.head, self.train.labels)
        self.weights = class_weights(self.head, self.targets) if plan.balance else None
        self.facts |= {"balance": plan.balance, **self.head.fields()}
        self.say_splits("" if self.head.problem_type == NUMBER else f", {len(self.head.labels)} classes")
        self.n_longer = sum(len(ids) > self.config.context for ids in self.train.ids)
        if self.n_longer:
            logger.info(f"          {self.n_longer:,} are longer than a row of {self.config.context:,} tokens: an "
                        "epoch trains on one stretch of each, held-out ones are read whole")
        count_L = documents_of(self.head, self.targets)
        rare = [name for name, n in zip(self.head.labels, count_L, strict=True) if n == 1]
        if rare:
            logger.warning(f"one training document only: {len(rare):,} of {len(self.head.labels):,} classes, "
                           f"{', '.join(rare)[:200]}")
        return len(self.train), self.validation.n_tokens

    def new_model(self, seed: int) -> DocumentClassifier:
        torch.manual_seed(seed)
        model = DocumentClassifier(self.config, self.head)
        copy_weights(model, self.pretrained, "score.")
        return model

    def objective(self, run: RunConfig, ranks: Ranks) -> "LabelObjective":
        return LabelObjective(run, self.head, self.train, self.validation, self.weights, ranks)

    def files(self) -> dict[str, str]:
        return {**tokenizer_files(self.tokenizer),
                CONFIG_FILE: model_config_json(self.config, CLASSIFICATION, **self.head.fields())}

    def score(self, run: RunConfig, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        """The scores of all held-out documents; what the model says of each goes into the run's folder."""
        texts = self.validation
        logits_NL = read_logits(model, texts.ids, reading_of(run), self.watch("scoring", texts.n_tokens, ranks))
        if ranks.is_first:
            report.write_predictions(Path(run.out), self.head, texts, logits_NL)
        return metrics.score_labels(self.head, logits_NL, targets_of(self.head, texts.labels))

    def words(self, scores: dict[str, Any]) -> str:
        return metrics.in_words(scores)

    def finish(self, best: RunConfig, rates: dict[str, Any], device: torch.device, ranks: Ranks) -> dict[str, Any]:
        """Score the best model on the test documents, if there are any, and write the report."""
        plan, head, texts, name = self.plan, self.head, self.validation, Path(best.out).name
        found: dict[str, Any] = {
            "task": "classify",
            "without_reading": metrics.simplest(head, self.targets, targets_of(head, texts.labels)),
            "documents": {"train": len(self.train), "validation": len(texts), "tokens": self.train.n_tokens,
                          "cut": self.n_cut, "longer_than_a_row": self.n_longer},
            "known": self.known}
        logits_NL = report.read_predictions(Path(best.out), texts, head)
        if "test" in self.splits:
            texts, model = self.splits["test"], DocumentClassifier(self.config, head)
            load_step(Path(best.out), rates[name.removeprefix("lr-")]["best_step"], model)
            counted = self.watch("testing", texts.n_tokens, ranks)
            logits_NL = read_logits(model.to(device), texts.ids, reading_of(best), counted)
            found["test"] = metrics.score_labels(head, logits_NL, targets_of(head, texts.labels))
        if ranks.is_first:
            report.write_predictions(plan.out, head, texts, logits_NL)
            report.write_labels_report(plan.out, head, texts, logits_NL,
                                       {"best": name, "learning_rates": rates, **found})
        return found


class VectorTask(DocumentTask):
    """The mean of a document's last hidden states becomes a vector that is near for the two texts of a pair."""

    unit = "pairs"

    def read(self) -> tuple[int, int]:
        self.read_splits(in_pairs=True)
        self.facts |= {"temperature": TEMPERATURE}
        self.say_splits(", halves of documents" if self.plan.fields.pair is None else "")
        return len(self.train), self.validation.n_tokens

    def new_model(self, seed: int) -> DocumentEncoder:
        torch.manual_seed(seed)
        model = DocumentEncoder(self.config)
        copy_weights(model, self.pretrained, "score.")
        return model

    def objective(self, run: RunConfig, ranks: Ranks) -> "PairObjective":
        return PairObjective(run, self.train, self.validation, ranks)

    def files(self) -> dict[str, str]:
        return {**tokenizer_files(self.tokenizer),
                CONFIG_FILE: model_config_json(self.config, "LineartimeModel", **ENCODER)}

    def score(self, run: RunConfig, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        """The scores of all held-out pairs."""
        counted = self.watch("scoring", self.validation.n_tokens, ranks)
        return score_texts(model, self.validation, reading_of(run), counted)[0]

    def words(self, scores: dict[str, Any]) -> str:
        return vectors.in_words(scores)

    def finish(self, best: RunConfig, rates: dict[str, Any], device: torch.device, ranks: Ranks) -> dict[str, Any]:
        """Score the best model, and the pretrained one, on the test or else the held-out pairs; write the report."""
        texts, name, reading = self.splits.get("test", self.validation), Path(best.out).name, reading_of(best)
        counted = self.watch("scoring without training", texts.n_tokens, ranks)
        before, _ = score_texts(self.pretrained.to(device), texts, reading, counted)
        model = DocumentEncoder(self.config)
        load_step(Path(best.out), rates[name.removeprefix("lr-")]["best_step"], model)
        counted = self.watch("scoring", texts.n_tokens, ranks)
        scores, places = score_texts(model.to(device), texts, reading, counted)
        pairs = {"train": len(self.train), "validation": len(self.validation), "tokens": self.train.n_tokens,
                 "cut": self.n_cut, "halves": self.plan.fields.pair is None}
        found = {"task": "embed", "without_training": before, "pairs": pairs, "known": self.known,
                 **({"test": scores} if "test" in self.splits else {})}
        if ranks.is_first:
            report.write_vectors_report(self.plan.out, texts, self.words(scores), scores, places,
                                        {"best": name, "learning_rates": rates, **found})
        return found


class LabelObjective:
    """The objective of `fit` for labels of documents."""

    def __init__(self, config: RunConfig, head: Head, train: TokenizedTexts, validation: TokenizedTexts,
                 weights: Sequence[float] | None, ranks: Ranks = ALONE):
        self.config, self.head, self.train, self.validation, self.ranks = config, head, train, validation, ranks
        self.targets = targets_of(head, train.labels)
        self.weights = None if weights is None else torch.tensor(weights)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """ids_BT, -1 for padding, and targets, see `epoch_rows`. The rows of a batch are sorted by length, so that
        micro-batches have little padding."""
        rows = sorted(epoch_rows(self.train, self.config, step), key=lambda row: -len(row[1]))
        rows = rows[self.ranks.share(len(rows))]
        return padded([ids.tolist() for _, ids in rows], self.config.model.context), self.targets[[i for i, _ in rows]]

    def n_targets(self, *batch: Tensor) -> int:
        return batch[1].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, targets = batch
        assert isinstance(model, DocumentClassifier)
        weights = None if self.weights is None else self.weights.to(ids_BT.device)
        return label_losses(self.head, model.label_logits(row_means(model, ids_BT)), targets, weights)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """The scores of held-out documents, read whole, see `first_held_out`. Every rank reads all of them, for a share
        would be batched, and rounded, in another way."""
        part = first_held_out(self.validation, self.config)
        logits_NL = read_logits(model, part.ids, reading_of(self.config), progress)
        return metrics.score_labels(self.head, logits_NL, targets_of(self.head, part.labels))


def read_logits(model: nn.Module, ids: Sequence[np.ndarray], reading: Reading,
                progress: Callable[[int], None] | None = None) -> np.ndarray:
    """The logits of documents read whole, float64 `[N, L]`. progress is called with the number of tokens read."""
    assert isinstance(model, DocumentClassifier)
    return np.array([logits_of(model, vector_D) for vector_D in read_vectors(model, ids, reading, progress)])


class PairObjective:
    """The objective of `fit` for pairs of documents."""

    def __init__(self, config: RunConfig, train: TokenizedTexts, validation: TokenizedTexts, ranks: Ranks = ALONE):
        self.config, self.train, self.validation, self.ranks = config, train, validation, ranks
        self.same_N2 = same_texts(train)

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """The first and the second texts, ids `[R, T]` with -1 for padding, see `epoch_rows`, and `same_texts`."""
        sides = [epoch_rows(self.train, self.config, step, side) for side in (0, 1)]
        own = self.ranks.share(len(sides[0]))
        first_RT, second_RT = (padded([ids.tolist() for _, ids in rows[own]], self.config.model.context)
                               for rows in sides)
        return first_RT, second_RT, self.same_N2[[row for row, _ in sides[0][own]]]

    def n_targets(self, *batch: Tensor) -> int:
        return batch[2].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        first_BT, second_BT, same_B2 = batch
        assert isinstance(model, DocumentEncoder)
        return contrastive_losses(row_means(model, first_BT), row_means(model, second_BT), same_B2)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """The scores of held-out pairs, read whole, see `first_held_out`. Every rank reads all of them, for a share
        would be batched, and rounded, in another way."""
        part = first_held_out(self.validation, self.config, least=2)
        return score_texts(model, part, reading_of(self.config), progress)[0]
