"""Labelled documents in memory: their tokens, their labels, and the head that learns these."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lineartime.config_json import PROBLEMS, Head
from lineartime.data.tokenizer import Tokenizer
from lineartime.documents.classify import NUMBER, ONE, classes_of
from lineartime.documents.examples import Example, Label, Labels
from lineartime.documents.pooling import document_ids, windows_of
from lineartime.errors import DataError

EXCERPT = 300
"""Characters of a document that a report may show."""


@dataclass
class Documents:
    """Tokenised documents with their labels, in order."""

    ids: list[np.ndarray] = field(default_factory=list)
    """Each begins with the end-of-document token."""
    labels: list[Label] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    """The places of the documents, for people."""
    excerpts: list[str] = field(default_factory=list)
    n_cut: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.ids))

    def keys(self) -> list[bytes]:
        """Equal for documents of equal tokens."""
        return [hashlib.sha256(ids.astype("<u4").tobytes()).digest() for ids in self.ids]

    def sha256(self) -> str:
        """The hash of all ids and labels."""
        digest = hashlib.sha256(json.dumps(self.labels).encode())
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<u4").tobytes())
        return digest.hexdigest()


def read_documents(tokenizer: Tokenizer, examples: Iterable[Example], max_tokens: int | None = None,
                   progress: Callable[[int], None] | None = None) -> Documents:
    """Tokenise labelled documents. max_tokens: cut longer ones; it is counted how many. progress is called with the
    number of documents read."""
    found = Documents()
    small = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    for example in examples:
        assert example.label is not None
        begun: list[str] = []
        text = noting(example.text, begun)
        windows = windows_of(document_ids(tokenizer, text, example.second), 1 << 16, max_tokens)
        parts = [(np.array(window.ids, small), window.is_cut) for window in windows]
        found.ids.append(np.concatenate([ids for ids, _ in parts]))
        found.n_cut += parts[-1][1]
        found.labels.append(example.label)
        found.where.append(example.where)
        shown = [" ".join(each[: 2 * EXCERPT].split())[:EXCERPT] for each in (*begun, example.second or "") if each]
        found.excerpts.append(" | ".join(shown))
        if progress is not None:
            progress(len(found))
    return found


def noting(text: Iterable[str], begun: list[str]) -> Iterator[str]:
    """The pieces of a text, of which the first is put into `begun`."""
    for piece in text:
        if not begun:
            begun.append(piece)
        yield piece


def head_of(train: Documents, kind: Labels, where: str) -> Head:
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


def require_known(head: Head, documents: Documents) -> None:
    """Raise DataError for a class that no training document has."""
    for label, where in zip(documents.labels, documents.where, strict=True):
        for name in classes_of(label) if head.problem_type != NUMBER else ():
            if name not in head.labels:
                raise DataError("a label that no training document has", f"{where}: {name!r:.40}",
                                f"they have {', '.join(head.labels)[:200]}")


def documents_of(head: Head, targets: np.ndarray) -> np.ndarray:
    """The number of documents of each class, `[L]`; none for a number."""
    if head.problem_type == NUMBER:
        return np.zeros(1)
    return np.bincount(targets, minlength=len(head.labels)) if head.problem_type == ONE else targets.sum(0)


def class_weights(head: Head, targets: np.ndarray) -> list[float]:
    """Weights by which every class counts the same: of its documents, or of several classes of its being there. A
    class that all documents have, or none, keeps 1."""
    count_L = documents_of(head, targets)
    if head.problem_type == ONE:
        return (len(targets) / (len(head.labels) * count_L)).tolist()
    one_sided_L = (count_L == 0) | (count_L == len(targets))
    return np.where(one_sided_L, 1.0, (len(targets) - count_L) / count_L.clip(min=1)).tolist()
