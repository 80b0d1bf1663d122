"""Fine-tuning for labels: a pretrained model gets a head on the mean of a document's last hidden states.

A document that fits into a row is one row of training. Of a longer one each epoch reads one stretch, drawn anew in
proportion to their tokens; the held-out scores, and `lineartime classify`, read it whole."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lineartime.config_json import PROBLEMS, Head
from lineartime.distributed.ranks import ALONE, Ranks
from lineartime.documents import metrics
from lineartime.documents.classify import (
    NUMBER,
    ONE,
    classes_of,
    documents_of,
    label_losses,
    logits_of,
    targets_of,
)
from lineartime.documents.pooling import Reading, padded, row_means
from lineartime.documents.texts import (
    TokenizedTexts,
    epoch_rows,
    first_held_out,
    read_vectors,
    reading_of,
)
from lineartime.errors import DataError
from lineartime.finetune_config import Labels
from lineartime.model import DocumentClassifier, LanguageModel
from lineartime.run_config import RunConfig

logger = logging.getLogger(__name__)


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


def head_of(train: TokenizedTexts, kind: Labels, where: str) -> Head:
    """The head for the labels of the training documents; classes are in the order of their names, numbers by their
    size. Raises DataError if all documents have the same label, and for numbers that float32 has no room for."""
    if kind == "number":
        numbers = np.array(train.labels, np.float64)
        if numbers.min() == numbers.max():
            raise DataError("all documents have the same number", where, f"it is {numbers[0]:g}")
        with np.errstate(over="ignore", under="ignore"):
            mean, std = float(numbers.mean()), float(numbers.std())
            std_32, most_32 = np.array([std, np.abs(numbers).max()], np.float32)
        if not (std_32 > 0 and most_32 < np.inf):
            raise DataError("numbers too large, or too near each other, for float32", where,
                            f"from {numbers.min():g} to {numbers.max():g}; scale them")
        return Head(NUMBER, ("number",), mean, std)
    names = {name for label in train.labels for name in classes_of(label)}
    if len({frozenset(classes_of(label)) for label in train.labels}) < 2:
        raise DataError("one class only" if kind == "one" else "all documents have the same labels", where,
                        f"it is {', '.join(sorted(names)) or 'none'}; a classifier needs two")
    numeric = all(re.fullmatch(r"-?\d{1,18}", name) for name in names)
    return Head(PROBLEMS[kind], tuple(sorted(names, key=lambda name: (int(name) if numeric else 0, name))))


def require_known(head: Head, documents: TokenizedTexts) -> None:
    """Raise DataError for a class that no training document has."""
    for label, where in zip(documents.labels, documents.where, strict=True):
        for name in classes_of(label) if head.problem_type != NUMBER else ():
            if name not in head.labels:
                raise DataError("a label that no training document has", f"{where}: {name!r:.40}",
                                f"they have {', '.join(head.labels)[:200]}")


def class_weights(head: Head, targets: np.ndarray) -> list[float]:
    """Weights by which every class counts the same: of its documents, or of several classes of its being there. A
    class that all documents have, or none, keeps 1."""
    count_L = documents_of(head, targets)
    if head.problem_type == ONE:
        return (len(targets) / (len(head.labels) * count_L)).tolist()
    one_sided_L = (count_L == 0) | (count_L == len(targets))
    return np.where(one_sided_L, 1.0, (len(targets) - count_L) / count_L.clip(min=1)).tolist()
