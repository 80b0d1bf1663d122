"""Scores of labels."""

from typing import Any

import numpy as np
import torch

from lineartime.config_json import Head
from lineartime.documents.classify import ONE, label_losses


def score_labels(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """The scores of N documents. "score" is what the best model has the most of: macro F1.

    "loss" is the mean of `classify.label_losses`, "accuracy" the share of documents with all classes right, and
    "macro_f1" the mean over the classes that some document has or is said to have."""
    loss = label_losses(head, torch.from_numpy(logits_NL), torch.from_numpy(targets)).mean().item()
    true_NL, said_NL = had_and_said(head, logits_NL, targets)
    seen_L = (true_NL | said_NL).any(0)  # a class that nobody has and that is never said would have an F1 of 0
    f1 = float(by_class(true_NL, said_NL)[2][seen_L].mean()) if seen_L.any() else 0.0
    return {"loss": loss, "score": f1, "accuracy": float((true_NL == said_NL).all(1).mean()), "macro_f1": f1,
            "n_documents": len(targets)}


def in_words(scores: dict[str, Any]) -> str:
    """The most important scores, in words."""
    return f"accuracy {scores['accuracy']:.3f}, macro F1 {scores['macro_f1']:.3f}"


def had_and_said(head: Head, logits_NL: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which classes each document has, and which the model says it has: bool `[N, L]` each."""
    if head.problem_type == ONE:
        one_LL = np.eye(len(head.labels), dtype=bool)
        return one_LL[targets], one_LL[logits_NL.argmax(1)]
    return targets > 0, logits_NL > 0


def by_class(true_NL: np.ndarray, said_NL: np.ndarray) -> tuple[np.ndarray, ...]:
    """The precision, recall, F1 and number of documents of each class, `[L]` each; a score of no documents is 0."""
    right_L, said_L, true_L = (each_NL.sum(0) for each_NL in (true_NL & said_NL, said_NL, true_NL))
    return (right_L / said_L.clip(min=1), right_L / true_L.clip(min=1), 2 * right_L / (said_L + true_L).clip(min=1),
            true_L)


def simplest(head: Head, train: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """The scores without reading: what is most frequent in training."""
    if head.problem_type == ONE:
        logits_L = np.log(np.bincount(train) / len(train))
    else:
        share_L = train.mean(0).clip(1e-6, 1 - 1e-6)
        logits_L = np.log(share_L / (1 - share_L))
    return score_labels(head, np.tile(logits_L, (len(targets), 1)), targets)
