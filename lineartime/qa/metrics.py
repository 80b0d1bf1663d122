"""Answers as text: the two official normalisations, exact match and F1, where an answer stands, and a guess by word
overlap."""

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from lineartime.data.read_text import check_text
from lineartime.errors import DataError
from lineartime.qa.questions import Question, Rules

ARTICLE = re.compile(r"\b(?:a|an|the)\b")
TO_SPACE = {ord(c): " " for c in string.punctuation + "\u2018\u2019\u00b4`"}
REMOVED = {ord(c): None for c in string.punctuation}


def normalize(text: str, rules: Rules) -> str:
    """An answer as the official evaluation of TriviaQA or of SQuAD v1.1 compares it.

    Both lower the case, drop the words a, an and the, and set single spaces. TriviaQA makes ASCII
    punctuation, curly single quotes (U+2018, U+2019) and the acute accent (U+00B4) a space: "well-known" is two words.
    SQuAD removes ASCII punctuation, "well-known" is "wellknown", and keeps the rest. Punctuation goes before articles
    in both, so that "A." is nothing."""
    text = text.lower().translate(TO_SPACE if rules == "triviaqa" else REMOVED)
    return " ".join(ARTICLE.sub(" ", text).split())


def exact_match(prediction: str, accepted: Iterable[str], rules: Rules) -> float:
    """1 where the prediction is an accepted answer after normalisation, else 0."""
    found = normalize(prediction, rules)
    return float(any(found == normalize(answer, rules) for answer in accepted))


def f1(prediction: str, accepted: Iterable[str], rules: Rules) -> float:
    """The harmonic mean of precision and recall of words, which count as often as they occur; the best over answers.

    0 where no word is shared: two empty answers match exactly and have an F1 of 0, as in the official scripts."""
    return max((_f1(normalize(prediction, rules).split(), normalize(answer, rules).split()) for answer in accepted),
               default=0.0)


def _f1(prediction: list[str], answer: list[str]) -> float:
    shared = sum((Counter(prediction) & Counter(answer)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True)
class Scores:
    """What predictions are worth, in percent of the questions that have an accepted answer."""

    exact_match: float
    f1: float
    n_questions: int
    n_missing: int
    """Questions without a prediction, each of which counts as 0."""


def score(questions: Iterable[Question], predictions: Mapping[str, str]) -> Scores:
    """EM and F1, every question by its own source's rules. Raises DataError where no question has an answer.

    A prediction for no question here changes nothing."""
    em = overlap = 0.0
    n_questions = n_missing = 0
    for question in questions:
        if not question.accepted:
            continue
        n_questions += 1
        if question.id not in predictions:
            n_missing += 1
            continue
        em += exact_match(predictions[question.id], question.accepted, question.rules)
        overlap += f1(predictions[question.id], question.accepted, question.rules)
    if not n_questions:
        raise DataError("no question has an answer to compare with", "the questions", "scores need labelled questions")
    return Scores(100 * em / n_questions, 100 * overlap / n_questions, n_questions, n_missing)


def score_answers(questions: Sequence[Question], answers: Mapping[str, str]) -> dict[str, Any]:
    """How many "questions" there are, how many of them "questions_without_document"; and where any has an accepted
    answer, the fields of `Scores` and under "word_overlap" those of `guess_by_overlap`."""
    counts = {"questions": len(questions), "questions_without_document": sum(not q.documents for q in questions)}
    if not any(question.accepted for question in questions):
        return counts
    guesses = {question.id: guess_by_overlap(question) for question in questions}
    return counts | asdict(score(questions, answers)) | {"word_overlap": asdict(score(questions, guesses))}


def check_predictions(content: object, where: str) -> dict[str, str]:
    """A predictions file's content, `{"question id": "answer"}`. Raises DataError where it is not that."""
    if not isinstance(content, dict):
        raise DataError("not a JSON object", where, 'predictions are {"question id": "answer", ...}')
    for id, answer in content.items():
        if not isinstance(answer, str):
            raise DataError("a prediction is not a string", f"{where}, {id!r:.60}")
        check_text(answer, f"the answer of {id!r:.60}", where)
    return content


class Word(NamedTuple):
    """A word of the normalised text and the characters [start, stop) of the text that it stands for."""

    text: str
    start: int
    stop: int


def words_of(text: str) -> list[Word]:
    """`normalize(text, "triviaqa").split()`, each word with its place in the text."""
    lowered = text.lower()
    if len(lowered) == len(text):
        place = np.arange(len(text))
    else:  # a few capital letters are two characters in lower case
        place = np.repeat(np.arange(len(text)), [len(c.lower()) for c in text])
    normal = ARTICLE.sub(lambda match: " " * len(match[0]), lowered.translate(TO_SPACE))
    return [Word(match[0], int(place[match.start()]), int(place[match.end() - 1]) + 1)
            for match in re.finditer(r"\S+", normal)]


def occurrences(words: Sequence[Word], answers: Iterable[str]) -> list[tuple[int, int]]:
    """Where a document's words are an answer after TriviaQA's normalisation: characters [start, stop), in order."""
    wanted = {tuple(normalize(answer, "triviaqa").split()) for answer in answers} - {()}
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


SENTENCE = re.compile(r"[^\n]+?(?:[.!?]+[\"\u201d\u2019)\]]*(?=\s)|\n|$)", re.MULTILINE)
CANDIDATE = re.compile(r"[^\W_](?:[^\W_]|[.,\u2019'&/-](?=[^\W_]))*", re.UNICODE)
ASKS_FOR_A_NUMBER = re.compile(
    r"\b(?:when|how (?:many|much|long|old|far|tall|big|large|high)|(?:what|which) (?:\w+ )?"
    r"(?:year|date|day|century|decade|number|percentage|percent|age|amount|population))\b", re.IGNORECASE)


def guess_by_overlap(question: Question) -> str:
    """A guess without a model, for a model's scores to stand beside.

    The sentence with the highest sum of idf over the words that it shares with the question (idf = ln(sentences /
    sentences with the word), over all the question's documents; the earliest of equals), and in it the best candidate.
    Candidates are the longest runs of words that are capitalised or hold a digit and are not in the question. A
    question for a number ("when", "how many", "which year", ...) takes runs with a digit first, any other those
    without; among those the rarest, by sum of idf, the earliest of equals. A sentence without a candidate offers its
    single words that are not in the question; one without these leaves it to the next sentence. "" only where all of
    them do."""
    sentences = [sentence for document in question.documents for sentence in _sentences(document.text())]
    words = [set(normalize(sentence, "triviaqa").split()) for sentence in sentences]
    asked = set(normalize(question.text, "triviaqa").split())
    counts = Counter(word for each in words for word in each)

    def idf(of: set[str]) -> float:
        return sum(math.log(len(sentences) / counts[word]) for word in sorted(of) if word in counts)

    number = bool(ASKS_FOR_A_NUMBER.search(question.text))
    for i in sorted(range(len(sentences)), key=lambda i: (-idf(asked & words[i]), i)):
        runs = list(_candidates(sentences[i], asked))
        if runs:
            fits = [any(c.isdigit() for c in run) == number for run in runs]
            rarity = [idf(set(normalize(run, "triviaqa").split())) for run in runs]
            return runs[max(range(len(runs)), key=lambda k: (fits[k], rarity[k], -k))]
    return ""


def _sentences(text: str) -> Iterator[str]:
    for match in SENTENCE.finditer(text):
        if match[0].strip():
            yield match[0]


def _candidates(sentence: str, asked: set[str]) -> Iterator[str]:
    """Runs of telling words, or where there is none the single words that are not in the question."""
    start = stop = None
    found = False
    for match in CANDIDATE.finditer(sentence):
        words = normalize(match[0], "triviaqa").split()
        telling = match[0][0].isupper() or any(c.isdigit() for c in match[0])
        if telling and words and not asked & set(words):
            if start is None or sentence[stop : match.start()].strip():
                if start is not None:
                    yield sentence[start:stop]
                start = match.start()
            stop, found = match.end(), True
        elif start is not None:
            yield sentence[start:stop]
            start = None
    if start is not None:
        yield sentence[start:stop]
    if not found:
        for match in CANDIDATE.finditer(sentence):
            words = normalize(match[0], "triviaqa").split()
            if words and not asked & set(words):
                yield match[0]
