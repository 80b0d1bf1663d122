"""Scores of labels, by scikit-learn."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lineartime.config_json import Head
from lineartime.documents.classify import NUMBER, ONE, documents_of, label_losses, probabilities
from lineartime.errors import UsageError

N_BINS = 10
"""Bins of confidence in a calibration curve, of equal width."""


def scikit() -> Any:
    """The module `sklearn.metrics`. Raises UsageError if scikit-learn is not installed."""
    try:
        return importlib.import_module("sklearn.metrics")
    except ImportError as e:
        raise UsageError("a package is missing that scores labels", str(e), "pip install 'scikit-learn>=1.6'"
                         ) from None


def score_labels(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """The scores of N documents. "score" is what the best model has the most of: macro F1, or R^2 of numbers.

    "loss" is the mean of `classify.label_losses`. Of classes there are "accuracy" (all classes of a document right),
    "macro_f1", the mean over the classes that some document has or is said to have, and "calibration_error"; of numbers
    "r2", "mean_absolute_error" and "root_mean_squared_error". Raises UsageError as `scikit` does."""
    metrics = scikit()
    loss = label_losses(head, torch.from_numpy(logits_NL), torch.from_numpy(targets)).mean().item()
    if head.problem_type == NUMBER:
        found_N = logits_NL[:, 0]
        r2 = float(metrics.r2_score(targets, found_N)) if len(targets) > 1 else 0.0
        return {"loss": loss, "score": r2, "r2": r2,
                "mean_absolute_error": float(metrics.mean_absolute_error(targets, found_N)),
                "root_mean_squared_error": float(metrics.root_mean_squared_error(targets, found_N)),
                "n_documents": len(targets)}
    # A class that nobody has and that is never said would have an F1 of 0.
    true, found, _ = for_scikit(head, logits_NL, targets)
    seen_L = documents_of(head, targets) + documents_of(head, found_classes(head, logits_NL)) > 0
    f1_L = np.array([f1 for *_, f1, _ in by_class(head, logits_NL, targets)])
    f1 = float(f1_L[seen_L].mean()) if seen_L.any() else 0.0
    return {"loss": loss, "score": f1, "accuracy": float(metrics.accuracy_score(true, found)), "macro_f1": f1,
            "calibration_error": calibration_error(*confidences(head, logits_NL, targets)),
            "n_documents": len(targets)}


def in_words(scores: dict[str, Any]) -> str:
    """The most important scores, in words. One document has no R^2."""
    if "r2" in scores:
        r2 = "-" if scores["n_documents"] < 2 else f"{scores['r2']:.3f}"
        return f"R^2 {r2}, mean absolute error {scores['mean_absolute_error']:.3g}"
    return f"accuracy {scores['accuracy']:.3f}, macro F1 {scores['macro_f1']:.3f}"


def found_classes(head: Head, logits_NL: np.ndarray) -> np.ndarray:
    """The class that the model names, `[N]`, or which classes it names, zeros and ones `[N, L]`."""
    return logits_NL.argmax(1) if head.problem_type == ONE else (logits_NL > 0).astype(np.float64)


def for_scikit(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, Sequence[int]]:
    """The targets, what the model says, and the labels to score. scikit-learn reads `[N, 1]` as `[N]` of the labels 0
    and 1, of which 1 is the class."""
    found = found_classes(head, logits_NL)
    if head.problem_type != ONE and len(head.labels) == 1:
        return targets[:, 0], found[:, 0], [1]
    return targets, found, range(len(head.labels))


def by_class(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> list[tuple[str, float, float, float, int]]:
    """Of each class its name, precision, recall, F1 and number of documents."""
    true, found, names = for_scikit(head, logits_NL, targets)
    columns = scikit().precision_recall_fscore_support(true, found, zero_division=0, labels=names)
    return [(name, float(p), float(r), float(f), int(n))
            for name, p, r, f, n in zip(head.labels, *columns, strict=True)]


def confusion(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Documents of each class, from the top, by what the model calls them, `[L, L]`: of several classes a document,
    those that have the class of the row and are called the class of the column."""
    found = found_classes(head, logits_NL)
    if head.problem_type == ONE:
        return scikit().confusion_matrix(targets, found, labels=range(len(head.labels)))
    return targets.T @ found


def confidences(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How probable the model holds what it says, and whether that is right, 0 or 1: of the class that it names, or of
    each class's being there."""
    p_NL = probabilities(head, torch.from_numpy(logits_NL)).numpy()
    if head.problem_type == ONE:
        return p_NL.max(1), (logits_NL.argmax(1) == targets).astype(np.float64)
    return p_NL.flatten(), targets.flatten()


def calibration_error(p_N: np.ndarray, right_N: np.ndarray) -> float:
    """The expected calibration error: the difference of confidence and share that is right, over the bins of
    `sklearn.calibration.calibration_curve`."""
    bin_N = np.searchsorted(np.linspace(0, 1, N_BINS + 1)[1:-1], p_N)
    gaps = (abs((p_N - right_N)[bin_N == i].sum()) for i in range(N_BINS))
    return float(sum(gaps)) / len(p_N)


def simplest(head: Head, train: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """The scores without reading: what is most frequent in training, or its mean."""
    if head.problem_type == NUMBER:
        logits_L = train.mean(keepdims=True)
    elif head.problem_type == ONE:
        logits_L = np.log(documents_of(head, train) / len(train))
    else:
        share_L = train.mean(0).clip(1e-6, 1 - 1e-6)
        logits_L = np.log(share_L / (1 - share_L))
    return score_labels(head, np.tile(logits_L, (len(targets), 1)), targets)
