"""Questions with their documents and answers, read from TriviaQA in its published forms.

These are JSON beside a folder of evidence, and parquet with the columns of `mandarjoshi/trivia_qa`.
Files may be packed, in a store, or named by a pattern, see `data.read_text` and `base.stores`. In
place of a file `hub:mandarjoshi/trivia_qa:rc.wikipedia/train` names a configuration and a split of
that data set on the hub."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lineartime.base.errors import DataError
from lineartime.base.stores import Name, expanded
from lineartime.data.read_text import ending_of, read_rows, read_small
from lineartime.data.rows import checked, parse_json
from lineartime.data.streams import ON_HUB, hub_rows

QUESTION_COLUMNS, EVIDENCE_COLUMNS = ("question", "question_id", "answer"), ("entity_pages", "search_results")
MOST_BYTES = 1 << 30
"""Largest file of questions, and largest document."""
UNKNOWN = "<unk>"
"""The answer's value in the parquet of the test split, which has no answers."""


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
    """A question, its answers, and the documents in which the answer is searched."""

    id: str
    text: str
    documents: tuple[Document, ...]
    answers: tuple[str, ...]
    """Names of the answer that may occur in a document; empty for a question without a label."""
    accepted: tuple[str, ...]
    """The answers that exact match and F1 compare a prediction with."""


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
        if empty:
            raise DataError("no questions in this file", path)


def _read_file(path: str, evidence: Path | None) -> Iterator[tuple[str, Question]]:
    """The questions of a file, each with the place of its record."""
    if path.startswith(ON_HUB) or ending_of(path) == ".parquet":
        rows = (hub_rows(path) if path.startswith(ON_HUB) else
                read_rows(path, QUESTION_COLUMNS, optional=EVIDENCE_COLUMNS))
        for where, record in rows:
            with _form_of("a row of mandarjoshi/trivia_qa", where):
                question = _of_parquet(record, where)
            yield where, question
        return
    content = parse_json(read_small(path, MOST_BYTES), path)
    with _form_of("TriviaQA's JSON", path):
        records, only_verified = list(content["Data"]), content.get("VerifiedEval", False)
    folder = evidence or Path(path).absolute().parent.parent / "evidence"
    for number, record in enumerate(records):
        where = f"{path}, Data[{number}]"
        with _form_of("TriviaQA's JSON", where):
            found = _of_json(record, folder, where, only_verified)
        if found is not None:
            yield where, found


@contextlib.contextmanager
def _form_of(what: str, where: str) -> Iterator[None]:
    """Inside the block a field that is missing, or of a wrong type, is a DataError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as e:
        raise DataError(f"not {what}", where, f"{type(e).__name__}: {e}") from None


def once(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts in order, each once."""
    return tuple(dict.fromkeys(texts))


def _of_json(record: dict[str, Any], evidence: Path, where: str, verified: bool) -> Question | None:
    """The question of a record of JSON; None if only verified ones are read, and it is none.
    EntityPages are in `evidence/wikipedia`, SearchResults in `evidence/web`."""
    if verified and not record["QuestionPartOfVerifiedEval"]:
        return None
    documents = [_evidence(page["Filename"], evidence / folder, where)
                 for field, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web"))
                 for page in record.get(field, []) if not verified or page["DocPartOfVerifiedEval"]]
    names: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    if "Answer" in record:
        answer = record["Answer"]
        names = once([answer["Value"]] + answer["Aliases"])
        accepted = once(answer["NormalizedAliases"] + answer.get("HumanAnswers", []))
    return Question(record["QuestionId"], record["Question"], tuple(documents), names, accepted or names)


def _evidence(name: str, folder: Path, where: str) -> Document:
    """A file of evidence, which may not be outside of its folder. Raises DataError."""
    relative = PurePosixPath(name)
    if not name or relative.is_absolute() or ".." in relative.parts:
        raise DataError("not the name of a file of evidence", f"{where}: {name!r}")
    if not (folder / relative).is_file():
        raise DataError("no such file of evidence", f"{folder / relative}, of {where}",
                        "name the folder that has wikipedia/ and web/ with --evidence")
    return Document(name, folder / relative)


def _of_parquet(record: dict[str, Any], where: str) -> Question:
    """The question of a row of parquet; documents without text ("nocontext") are left out."""
    documents: list[Document] = []
    for field, text, name in (("entity_pages", "wiki_context", "filename"),
                              ("search_results", "search_context", "url")):
        pages = record.get(field, {text: [], name: []})
        if len(pages[text]) != len(pages[name]):
            raise DataError("columns of different lengths", f"{where}.{field}",
                            f"{text} has {len(pages[text])}, {name} {len(pages[name])}")
        documents += [Document(each, found) for each, found in zip(pages[name], pages[text], strict=True) if found]
    answer = record["answer"]
    is_known = answer["aliases"] or answer["value"] not in ("", UNKNOWN)
    answers = once([answer["value"], *answer["aliases"]]) if is_known else ()
    accepted = once(answer["normalized_aliases"]) if is_known else ()
    return Question(record["question_id"], record["question"], tuple(documents), answers, accepted or answers)
