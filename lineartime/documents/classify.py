"""Labels of documents: one class, several, or a number, read from the mean of a document's last hidden states."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.config_json import PROBLEMS, Head
from lineartime.data.tokenizer import Tokenizer
from lineartime.documents.examples import Label, text_examples
from lineartime.documents.pooling import Mean, Reading, named_means
from lineartime.documents.texts import TokenizedTexts
from lineartime.errors import DataError
from lineartime.finetune_config import Labels
from lineartime.model import DocumentClassifier
from lineartime.settings import require

ONE, SEVERAL, NUMBER = PROBLEMS["one"], PROBLEMS["several"], PROBLEMS["number"]


class LabelPrediction(NamedTuple):
    """What a model says of a document."""

    label: Label
    """The likeliest class, the classes that are likelier than not, or a number."""
    scores: dict[str, float]
    """The probability of each class; empty for a number."""


def classify(model: DocumentClassifier, tokenizer: Tokenizer, texts: Iterable[str | tuple[str, str]], *,
             max_tokens: int | None = None, batch_rows: int = 8, precision: str = "float32",
             progress: Callable[[int], None] | None = None) -> list[LabelPrediction]:
    """The labels of texts, or of pairs of texts, of any length.

    model, tokenizer: of `load_classifier`. max_tokens: cut longer documents to this many. batch_rows: rows read at
    once, which changes only rounding. precision: "float32" or "bfloat16". progress is called with the number of tokens
    read. Raises UsageError for wrong values, another model, and one text for a model of pairs; DataError for a text
    that is white space or that the tokenizer lacks."""
    require(isinstance(model, DocumentClassifier), "this model has no labels", type(model).__name__,
            "see load_classifier")
    reading = Reading(max_tokens, batch_rows, precision)
    examples = text_examples(texts, in_pairs=model.head.pairs)
    means = named_means(model, tokenizer, examples, reading, progress=progress)
    return [prediction_of(model.head, logits_of(model, mean.vector_D[None])[0]) for _, mean in means]


@torch.inference_mode()
def logits_of(model: DocumentClassifier, means_ND: np.ndarray) -> np.ndarray:
    """The logits, or the number, for the means of documents: float64 `[N, L]`."""
    return model.label_logits(torch.from_numpy(means_ND).to(model.score.weight)).double().cpu().numpy()


def prediction_of(head: Head, logits_L: np.ndarray) -> LabelPrediction:
    """The label and the probabilities that logits mean."""
    if head.problem_type == NUMBER:
        return LabelPrediction(float(logits_L[0]), {})
    logits = torch.from_numpy(logits_L)
    p_L = logits.softmax(0) if head.problem_type == ONE else logits.sigmoid()
    scores = dict(zip(head.labels, p_L.tolist(), strict=True))
    if head.problem_type == SEVERAL:
        return LabelPrediction(tuple(name for name, p in scores.items() if p > 0.5), scores)
    return LabelPrediction(head.labels[int(logits_L.argmax())], scores)


def targets_of(head: Head, labels: Iterable[Label]) -> np.ndarray:
    """Labels as the model learns them: class numbers `[N]`, zeros and ones `[N, L]`, or numbers `[N]`, float64."""
    if head.problem_type == NUMBER:
        return np.array([*labels], np.float64)
    number = {name: i for i, name in enumerate(head.labels)}
    if head.problem_type == ONE:
        return np.array([number[str(label)] for label in labels], np.int64)
    rows = [classes_of(label) for label in labels]
    targets_NL = np.zeros((len(rows), len(number)))
    for row, names in enumerate(rows):
        targets_NL[row, [number[name] for name in names]] = 1
    return targets_NL


def classes_of(label: Label) -> tuple[str, ...]:
    """The classes of a label that is one or several."""
    return label if isinstance(label, tuple) else (str(label),)


def label_losses(head: Head, logits_BL: Tensor, targets: Tensor) -> Tensor:
    """A loss for each target: -ln p of the class, `[B]`, or of each class's being there or not, `[B, L]`; of numbers
    the squared error in standard deviations, `[B]`."""
    if head.problem_type == NUMBER:
        return ((logits_BL[:, 0] - targets.to(logits_BL)) / head.label_std).square()
    if head.problem_type == ONE:
        return F.cross_entropy(logits_BL, targets, reduction="none")
    return F.binary_cross_entropy_with_logits(logits_BL, targets.to(logits_BL), reduction="none")


def found_label(model: DocumentClassifier, mean: Mean) -> dict[str, Any]:
    """What `lineartime classify` writes of a document: its label and its scores."""
    label, scores = prediction_of(model.head, logits_of(model, mean.vector_D[None])[0])
    return {"label": label, **({"scores": scores} if scores else {})}


def head_of(train: TokenizedTexts, kind: Labels, where: str) -> Head:
    """The head for the labels of the training documents; classes are in the order of their names. Raises DataError if
    all documents have the same label."""
    names = {name for label in train.labels for name in classes_of(label)}
    if len({frozenset(classes_of(label)) for label in train.labels}) < 2:
        raise DataError("all documents have the same label", where,
                        f"it is {', '.join(sorted(names)) or 'none'}; give others too")
    if kind == "number":
        numbers = np.array(train.labels, np.float64)
        return Head(NUMBER, ("number",), float(numbers.mean()), float(numbers.std()))
    return Head(PROBLEMS[kind], tuple(sorted(names)))


def require_known(head: Head, documents: TokenizedTexts) -> None:
    """Raise DataError for a class that no training document has."""
    for label, where in zip(documents.labels, documents.where, strict=True):
        for name in classes_of(label) if head.problem_type != NUMBER else ():
            if name not in head.labels:
                raise DataError("a label that no training document has", f"{where}: {name!r:.40}",
                                f"they have {', '.join(head.labels)[:200]}")
