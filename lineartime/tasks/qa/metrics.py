"""Answers as text: TriviaQA's official normalisation and scores, and occurrences in a document."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lineartime.base.errors import DataError
from lineartime.tasks.qa.questions import Question

ARTICLE = re.compile(r"\b(?:a|an|the)\b")
TO_SPACE = {ord(c): " " for c in string.punctuation + "\u2018\u2019\u00b4`"}


def normalize(text: str) -> str:
    """An answer normalised as in the official evaluation of TriviaQA.

    It is put into lower case. ASCII punctuation, backquotes, curly single quotes (U+2018, U+2019)
    and the acute accent (U+00B4) become spaces: "well-known" is two words. The words a, an and the
    go, and spaces are single."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(TO_SPACE)).split())


def exact_match(prediction: str, accepted: Iterable[str]) -> float:
    """1 if the prediction is an accepted answer after normalisation, else 0."""
    found = normalize(prediction)
    return float(any(found == normalize(answer) for answer in accepted))


def f1(prediction: str, accepted: Iterable[str]) -> float:
    """The harmonic mean of the precision and recall of words, as multisets; the best over the
    accepted answers.

    0 without a shared word, as in the official script, so two empty answers match exactly and have
    an F1 of 0."""
    said, best = normalize(prediction).split(), 0.0
    for answer in accepted:
        right = normalize(answer).split()
        shared = sum((Counter(said) & Counter(right)).values())
        if shared > 0:
            precision, recall = shared / len(said), shared / len(right)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def score_answers(questions: Iterable[Question], predictions: Mapping[str, str]) -> dict[str, Any]:
    """The scores of predictions by question id: "exact_match" and "f1" in percent over the
    "n_questions" that have an accepted answer. Those without a prediction, "n_missing", count as 0.
    Raises DataError if no question has an answer."""
    asked = [question for question in questions if question.accepted]
    if not asked:
        raise DataError("no question has an answer to compare with", "the questions", "scores need labelled questions")
    said = [(predictions[each.id], each.accepted) for each in asked if each.id in predictions]
    return {"exact_match": 100 * sum(exact_match(*each) for each in said) / len(asked),
            "f1": 100 * sum(f1(*each) for each in said) / len(asked), "n_questions": len(asked),
            "n_missing": len(asked) - len(said)}


class Word(NamedTuple):
    """A normalised word and its characters [start, stop) in the text."""

    text: str
    start: int
    stop: int


def words_of(text: str) -> list[Word]:
    """`normalize(text).split()`, each word with its place in the text."""
    lowered = text.lower()
    if len(lowered) == len(text):
        place = np.arange(len(text))
    else:  # some capital letters are two characters in lower case
        place = np.repeat(np.arange(len(text)), [len(c.lower()) for c in text])
    normal = ARTICLE.sub(lambda match: " " * len(match[0]), lowered.translate(TO_SPACE))
    return [Word(match[0], int(place[match.start()]), int(place[match.end() - 1]) + 1)
            for match in re.finditer(r"\S+", normal)]


def occurrences(words: Sequence[Word], answers: Iterable[str]) -> list[tuple[int, int]]:
    """The places of answers in a document after normalisation: characters [start, stop), in
    order."""
    wanted = {tuple(normalize(answer).split()) for answer in answers} - {()}
    # Answers by their first word, so that each word of the document is compared with few.
    by_first: dict[str, list[tuple[str, ...]]] = {}
    for answer in sorted(wanted):
        by_first.setdefault(answer[0], []).append(answer)
    found = set()
    for i, word in enumerate(words):
        for answer in by_first.get(word.text, ()):
            part = words[i : i + len(answer)]
            if tuple(each.text for each in part) == answer:
                found.add((word.start, part[-1].stop))
    return sorted(found)
