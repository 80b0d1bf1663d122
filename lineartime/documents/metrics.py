"""Scores of labels, by scikit-learn."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lineartime.config_json import Head
from lineartime.documents.classify import NUMBER, ONE, SEVERAL, label_losses
from lineartime.errors import UsageError


def scikit() -> Any:
    """The module `sklearn.metrics`. Raises UsageError if scikit-learn is not installed."""
    try:
        return importlib.import_module("sklearn.metrics")
    except ImportError as e:
        raise UsageError("a package is missing that scores labels", str(e), "pip install 'scikit-learn>=1.6'"
                         ) from None


def score_labels(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """The scores of N documents. The best model has the largest "score": macro F1, or R^2 of numbers.

    "loss" is the mean of `classify.label_losses`. Of classes "accuracy" is the share of documents with all classes
    right, and "macro_f1" the mean over the classes that some document has or is said to have. Of numbers there are
    "r2", which is 0 for a single document, and "mean_absolute_error". Raises UsageError as `scikit` does."""
    loss = label_losses(head, torch.from_numpy(logits_NL), torch.from_numpy(targets)).mean().item()
    if head.problem_type == NUMBER:
        r2 = float(scikit().r2_score(targets, logits_NL[:, 0])) if len(targets) > 1 else 0.0
        return {"loss": loss, "score": r2, "r2": r2, "n_documents": len(targets),
                "mean_absolute_error": float(scikit().mean_absolute_error(targets, logits_NL[:, 0]))}
    said = had_and_said(head, logits_NL, targets)
    # A class that nobody has and that is never said has no F1, and is left out of the mean.
    f1 = float(np.nan_to_num(scikit().f1_score(*said, average="macro", zero_division=np.nan)))
    return {"loss": loss, "score": f1, "accuracy": float(scikit().accuracy_score(*said)), "macro_f1": f1,
            "n_documents": len(targets)}


def had_and_said(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, ...]:
    """Which classes each document has, and which the model says it has, as scikit-learn takes them: bool `[N, L + 1]`
    each. The last column is empty, because a single one would be read as two classes, 0 and 1."""
    one_LL = np.eye(len(head.labels), dtype=bool)
    both = ((one_LL[targets], one_LL[logits_NL.argmax(1)]) if head.problem_type == ONE else
            (targets > 0, logits_NL > 0))
    return tuple(np.pad(each_NL, ((0, 0), (0, 1))) for each_NL in both)


def by_tf_idf(head: Head, train: Sequence[str], train_targets: np.ndarray, texts: Sequence[str],
              targets: np.ndarray) -> dict[str, Any]:
    """The scores of counted words, weighted by TF-IDF, with a ridge regression on the training documents; without
    "loss", as its output is no probability."""
    words = importlib.import_module("sklearn.feature_extraction.text").TfidfVectorizer(
        sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    had_NL = np.eye(len(head.labels))[train_targets] if head.problem_type == ONE else train_targets
    ridge = importlib.import_module("sklearn.linear_model").Ridge().fit(words.fit_transform(train), had_NL)
    said_NL = ridge.predict(words.transform(texts)).reshape(len(texts), len(head.labels))
    scores = score_labels(head, said_NL - 0.5 if head.problem_type == SEVERAL else said_NL, targets)
    return {name: value for name, value in scores.items() if name != "loss"}


def simplest(head: Head, train: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """The scores of a guess without reading: what is most frequent in training, or the mean there."""
    if head.problem_type == NUMBER:
        logits_L = train.mean(keepdims=True)
    elif head.problem_type == ONE:
        logits_L = np.log(np.bincount(train) / len(train))
    else:
        share_L = train.mean(0).clip(1e-6, 1 - 1e-6)
        logits_L = np.log(share_L / (1 - share_L))
    return score_labels(head, np.tile(logits_L, (len(targets), 1)), targets)
