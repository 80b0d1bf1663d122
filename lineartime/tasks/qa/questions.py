"""Questions with their documents and answers, read from TriviaQA as published; its official scores.

The forms are JSON beside a folder of evidence, and parquet with the columns of
`mandarjoshi/trivia_qa`. Files may be packed, in a store, or named by a pattern, see
`data.read_text` and `base.stores`. In place of a file
`hub:mandarjoshi/trivia_qa:rc.wikipedia/train` names a configuration and a split on the hub."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lineartime.base.errors import DataError, raised_as
from lineartime.base.settings import require
from lineartime.base.stores import Name, expanded
from lineartime.data.read_text import checked, ending_of, parse_json, read_rows, read_small
from lineartime.data.sources import ON_HUB, hub_rows

QUESTION_COLUMNS, EVIDENCE_COLUMNS = ("question", "question_id", "answer"), ("entity_pages", "search_results")
MOST_BYTES = 1 << 30  # largest file of questions, and largest document
UNKNOWN = "<unk>"  # the answer's value in the parquet of the test split, which has no answers
NO_JSON_OF_TRIVIAQA, WRONG_FORM = "not TriviaQA's JSON", (KeyError, TypeError, AttributeError)
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
TO_SPACE = {ord(c): " " for c in string.punctuation + "\u2018\u2019\u00b4`"}


@dataclass(frozen=True)
class Document:
    """One piece of evidence: its name, and its text or the file that holds it."""

    name: str
    source: str | Path

    def text(self) -> str:
        """The whole text. Raises DataError for a file that is missing or is not UTF-8."""
        return self.source if isinstance(self.source, str) else read_small(self.source, MOST_BYTES)


@dataclass(frozen=True)
class Question:
    """A question, and the documents in which its answer is searched. answers: names of the answer
    that may occur in a document; empty without a label. accepted: the answers that exact match and
    F1 compare a prediction with."""

    id: str
    text: str
    documents: tuple[Document, ...]
    answers: tuple[str, ...]
    accepted: tuple[str, ...]


def read_questions(names: Iterable[Name], evidence: Path | None = None) -> Iterator[Question]:
    """The questions of all files, in order. Evidence is read later, by `Document.text`.

    evidence: the folder with `wikipedia/` and `web/`, by default `evidence/` beside the folder of a
    file. From files for the verified evaluation ("VerifiedEval") only the verified part is read.
    Raises DataError, with its place, for a record of another form, a missing file of evidence, and
    a repeated id."""
    seen: dict[str, str] = {}
    names = [names] if isinstance(names, Name) else names
    for path in [path for name in names for path in expanded(name)]:
        empty = True
        for where, question in _read_file(path, evidence):
            empty = False
            for text in (question.id, question.text, *question.answers, *question.accepted):
                checked(text, "a text", where)
            if question.id in seen:
                raise DataError("the same question id twice", f"{question.id} in {path}",
                                f"it was in {seen[question.id]} before")
            seen[question.id] = path
            yield question
        require(not empty, "no questions in this file", path, kind=DataError)


def _read_file(path: str, evidence: Path | None) -> Iterator[tuple[str, Question]]:
    """The questions of a file, each with the place of its record."""
    if path.startswith(ON_HUB) or ending_of(path) == ".parquet":
        rows = (hub_rows(path) if path.startswith(ON_HUB) else
                read_rows(path, QUESTION_COLUMNS, optional=EVIDENCE_COLUMNS))
        for where, record in rows:
            with raised_as(DataError, "not a row of mandarjoshi/trivia_qa", where, *WRONG_FORM):
                question = _of_parquet(record, where)
            yield where, question
        return
    content = parse_json(read_small(path, MOST_BYTES), path)
    with raised_as(DataError, NO_JSON_OF_TRIVIAQA, path, *WRONG_FORM):
        records, only_verified = list(content["Data"]), content.get("VerifiedEval", False)
    folder = evidence or Path(path).absolute().parent.parent / "evidence"
    for number, record in enumerate(records):
        where = f"{path}, Data[{number}]"
        with raised_as(DataError, NO_JSON_OF_TRIVIAQA, where, *WRONG_FORM):
            if only_verified and not record["QuestionPartOfVerifiedEval"]:
                continue
            question = _of_json(record, folder, where, only_verified)
        yield where, question


def once(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts in order, each once."""
    return tuple(dict.fromkeys(texts))


def _of_json(record: dict[str, Any], evidence: Path, where: str, verified: bool) -> Question:
    """The question of a record of JSON. EntityPages are in `evidence/wikipedia`, SearchResults in
    `evidence/web`. verified: with the verified documents alone."""
    documents = [_evidence(page["Filename"], evidence / folder, where)
                 for field, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web"))
                 for page in record.get(field, []) if not verified or page["DocPartOfVerifiedEval"]]
    names, accepted = tuple[str, ...](), tuple[str, ...]()
    if "Answer" in record:
        answer = record["Answer"]
        names = once([answer["Value"]] * (answer["Value"] not in ("", UNKNOWN)) + answer["Aliases"])
        accepted = once(answer["NormalizedAliases"] + answer.get("HumanAnswers", []))
    return Question(record["QuestionId"], record["Question"], tuple(documents), names, accepted or names)


def _evidence(name: str, folder: Path, where: str) -> Document:
    """A file of evidence, which may not be outside of its folder. Raises DataError."""
    relative = PurePosixPath(name)
    is_outside = not name or relative.is_absolute() or ".." in relative.parts
    require(not is_outside, "not the name of a file of evidence", f"{where}: {name!r}", kind=DataError)
    require((folder / relative).is_file(), "no such file of evidence", f"{folder / relative}, of {where}",
            "name the folder that has wikipedia/ and web/ with --evidence", DataError)
    return Document(name, folder / relative)


def _of_parquet(record: dict[str, Any], where: str) -> Question:
    """The question of a row of parquet; documents without text ("nocontext") are left out."""
    documents: list[Document] = []
    for field, text, name in (("entity_pages", "wiki_context", "filename"),
                              ("search_results", "search_context", "url")):
        pages = record.get(field, {text: [], name: []})
        with raised_as(DataError, "columns of different lengths", f"{where}.{field}", ValueError,
                       todo=f"{name} and {text}"):
            pairs = list(zip(pages[name], pages[text], strict=True))
        documents += [Document(each, found) for each, found in pairs if found]
    answer = record["answer"]
    is_known = answer["aliases"] or answer["value"] not in ("", UNKNOWN)
    answers = once([answer["value"], *answer["aliases"]]) if is_known else ()
    accepted = once(answer["normalized_aliases"]) if is_known else ()
    return Question(record["question_id"], record["question"], tuple(documents), answers, accepted or answers)


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
    """The harmonic mean of precision and recall of words, as multisets; the best over the accepted
    answers. As in the official script 0 without a shared word, also for two empty answers."""
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
    n, em, best = len(asked), sum(exact_match(*each) for each in said), sum(f1(*each) for each in said)
    return {"exact_match": 100 * em / n, "f1": 100 * best / n, "n_questions": n, "n_missing": n - len(said)}


class Word(NamedTuple):
    """A normalised word and its characters [start, stop) in the text."""

    text: str
    start: int
    stop: int


def words_of(text: str) -> list[Word]:
    """`normalize(text).split()`, each word with its place in the text."""
    lowered = text.lower()
    place: Sequence[int] = range(len(text))
    if len(lowered) != len(text):  # some capital letters are two characters in lower case
        place = [i for i, c in enumerate(text) for _ in c.lower()]
    normal = ARTICLE.sub(lambda match: " " * len(match[0]), lowered.translate(TO_SPACE))
    return [Word(found[0], place[found.start()], place[found.end() - 1] + 1) for found in re.finditer(r"\S+", normal)]


def occurrences(words: Sequence[Word], answers: Iterable[str]) -> list[tuple[int, int]]:
    """The places of answers in a document after normalisation: characters [start, stop)."""
    # Answers by their first word, so that each word of the document is compared with few.
    by_first: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for answer in answers:
        if parts := tuple(normalize(answer).split()):
            by_first[parts[0]].add(parts)
    found = set()
    for i, word in enumerate(words):
        for parts in by_first.get(word.text, ()):
            here = words[i : i + len(parts)]
            if tuple(each.text for each in here) == parts:
                found.add((word.start, here[-1].stop))
    return sorted(found)
