"""Questions with their documents and answers, read from SQuAD v1.1 JSON, TriviaQA JSON and TriviaQA parquet.

The field "Data" marks TriviaQA's JSON, "data" SQuAD's; a `.parquet` has the columns of `mandarjoshi/trivia_qa`. The
name `hub:rc.wikipedia/train` in place of a file is a configuration and a split of that data set on the hub."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lineartime.atomic_io import read_bytes
from lineartime.data.hub import hub_library, hub_records
from lineartime.data.read_text import BYTE_ORDER_MARK, check_text, parquet_records, parse_json
from lineartime.errors import DataError, UsageError

Rules = Literal["triviaqa", "squad"]
ON_HUB, HUB = "hub:", "mandarjoshi/trivia_qa"
UNKNOWN = "<unk>"
"""The answer's value in the parquet of the test split, which has no answers."""


@dataclass(frozen=True)
class Document:
    """One piece of evidence: its name, and its text or the file that holds it."""

    name: str
    source: str | Path

    def text(self) -> str:
        """The whole text. Raises DataError for a file that is missing or is not UTF-8."""
        return self.source if isinstance(self.source, str) else read_utf8(self.source)


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
    rules: Rules = "triviaqa"
    """The rules of its scores, see `metrics.normalize`."""
    spans: tuple[tuple[int, int], ...] | None = None
    """SQuAD's gold answers, characters [start, stop) of the document. None: every occurrence of an answer."""


def read_questions(paths: Iterable[Path], evidence: Path | None = None) -> Iterator[Question]:
    """The questions of all files, in order. TriviaQA's evidence is read later, by `Document.text`.

    evidence: the folder with `wikipedia/` and `web/`, by default `../evidence` beside the folder of a TriviaQA file.
    From files for the verified evaluation ("VerifiedEval") only the verified part is read. Raises DataError, with its
    place, for a field that is missing or of a wrong type, a missing file of evidence, and a repeated id."""
    seen: dict[str, Path] = {}
    for path in map(Path, paths):
        empty = True
        for question in _read_file(path, evidence):
            empty = False
            if question.id in seen:
                raise DataError("the same question id twice", f"{question.id} in {path}",
                                "predictions are kept by id" if seen[question.id] == path
                                else f"it is in {seen[question.id]} too")
            seen[question.id] = path
            yield question
        if empty:
            raise DataError("no questions in this file", path)


MAX_BYTES = 4 << 30
"""Largest file of questions, or document, in bytes."""


def read_utf8(path: Path) -> str:
    """A file's text without its byte order mark. Raises DataError for a file that cannot be read or is not UTF-8."""
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except OSError as e:
        raise DataError("cannot read", path, e.strerror) from None
    except UnicodeDecodeError as e:
        raise DataError("not valid UTF-8", f"{path}, byte {e.start}") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises DataError for a file that cannot be read or is not JSON."""
    return parse_json(read_utf8(path), path)


def _read_file(path: Path, evidence: Path | None) -> Iterator[Question]:
    if str(path).startswith(ON_HUB):
        return _hub(str(path))
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    content = read_json(path)
    if isinstance(content, dict) and "Data" in content:
        return _triviaqa(content, path, evidence or path.absolute().parent.parent / "evidence")
    if isinstance(content, dict) and "data" in content:
        return _squad(content, path)
    raise DataError("no field 'Data' (TriviaQA) or 'data' (SQuAD)", path)


def get(record: Any, name: str, kind: type, where: str, default: Any = None) -> Any:
    """A field of a JSON object. Raises DataError if it is of another type, or missing without a default."""
    if not isinstance(record, dict):
        raise DataError("not a JSON object", where)
    if name not in record:
        if default is not None:
            return default
        raise DataError(f"no field {name!r}", where, f"it has {', '.join(map(repr, list(record)[:8])) or 'none'}")
    value = record[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DataError(f"field {name!r} is not {NAMES[kind]}", where, f"it is {NAMES.get(type(value), 'a number')}")
    if isinstance(value, str):
        check_text(value, f"field {name!r}", where)
    return value


NAMES: dict[type, str] = {str: "a string", int: "a whole number", list: "a list", dict: "an object",
                          bool: "true or false", type(None): "null"}


def strings(record: Any, name: str, where: str, default: list[str] | None = None) -> list[str]:
    """A field that is a list of strings, read by `get`."""
    values = get(record, name, list, where, default)
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"field {name!r} is not a list of strings", where, f"entry {i} is {value!r:.40}")
        check_text(value, f"field {name!r}", where)
    return values


def _triviaqa(content: dict[str, Any], path: Path, evidence: Path) -> Iterator[Question]:
    """The questions of a TriviaQA file. EntityPages are in `evidence/wikipedia`, SearchResults in `evidence/web`."""
    verified = get(content, "VerifiedEval", bool, str(path), False)
    for i, record in enumerate(get(content, "Data", list, str(path))):
        where = f"{path}, Data[{i}]"
        if verified and not get(record, "QuestionPartOfVerifiedEval", bool, where):
            continue
        documents = []
        for field, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
            for j, page in enumerate(get(record, field, list, where, [])):
                place = f"{where}.{field}[{j}]"
                if verified and not get(page, "DocPartOfVerifiedEval", bool, place):
                    continue
                name = get(page, "Filename", str, place)
                relative = PurePosixPath(name)
                if not name or relative.is_absolute() or ".." in relative.parts:
                    raise DataError("not the name of a file of evidence", f"{place}: {name!r}")
                file = evidence / folder / relative
                if not file.is_file():
                    raise DataError("no such file of evidence", f"{file}, of {place}",
                                    "name the folder that has wikipedia/ and web/ with --evidence")
                documents.append(Document(name, file))
        answers: list[str] = []
        accepted: list[str] = []
        if "Answer" in record:
            place = f"{where}.Answer"
            answer = get(record, "Answer", dict, where)
            answers = [get(answer, "Value", str, place), *strings(answer, "Aliases", place)]
            accepted = [*strings(answer, "NormalizedAliases", place), *strings(answer, "HumanAnswers", place, [])]
        yield Question(get(record, "QuestionId", str, where), get(record, "Question", str, where), tuple(documents),
                       tuple(dict.fromkeys(answers)), tuple(dict.fromkeys(accepted or answers)))


def _squad(content: dict[str, Any], path: Path) -> Iterator[Question]:
    """The questions of SQuAD v1.1. Gold spans that do not match the text of their answer are left out."""
    for i, article in enumerate(get(content, "data", list, str(path))):
        title = get(article, "title", str, f"{path}, data[{i}]", "untitled")
        for j, paragraph in enumerate(get(article, "paragraphs", list, f"{path}, data[{i}]")):
            where = f"{path}, data[{i}].paragraphs[{j}]"
            document = Document(title, get(paragraph, "context", str, where))
            for k, record in enumerate(get(paragraph, "qas", list, where)):
                place = f"{where}.qas[{k}]"
                if get(record, "is_impossible", bool, place, False):
                    raise DataError("a question without an answer (SQuAD v2)", place, "SQuAD v1.1 is read")
                spans, texts = [], []
                for m, answer in enumerate(get(record, "answers", list, place, [])):
                    text = get(answer, "text", str, f"{place}.answers[{m}]")
                    start = get(answer, "answer_start", int, f"{place}.answers[{m}]")
                    texts.append(text)
                    if start >= 0 and text and document.text()[start : start + len(text)] == text:
                        spans.append((start, start + len(text)))
                texts, spans = list(dict.fromkeys(texts)), list(dict.fromkeys(spans))
                yield Question(get(record, "id", str, place), get(record, "question", str, place), (document,),
                               tuple(texts), tuple(texts), "squad", tuple(spans))


PAGES = (("entity_pages", "wiki_context", "filename"), ("search_results", "search_context", "url"))


def _parquet(path: Path) -> Iterator[Question]:
    """The questions of a parquet file of `mandarjoshi/trivia_qa`; documents without text ("nocontext") are left out."""
    pages: list[tuple[str, str, str]] = []
    needed = ["question", "question_id", "answer"]

    def chosen(schema: Any) -> list[str]:
        there = f"its columns are {', '.join(schema.names)}"
        for column in needed:
            if column not in schema.names:
                raise DataError(f"no column {column!r}", path, there)
        pages.extend(page for page in PAGES if page[0] in schema.names)
        if not pages:
            raise DataError("no column 'entity_pages' or 'search_results'", path, there)
        return needed + [page[0] for page in pages]

    for where, record in parquet_records(path, chosen):
        yield _parquet_question(record, pages, where)


def _hub(path: str) -> Iterator[Question]:
    """The questions of `hub:CONFIGURATION/SPLIT`, streamed."""
    config, _, split = path.removeprefix(ON_HUB).partition("/")
    if not config or split not in ("train", "validation", "test"):
        raise UsageError("no such questions on the hub", path, "say hub:rc.wikipedia/train, or validation or test")
    for row, (_, record) in enumerate(hub_records(hub_library(), HUB, config, [split])):
        where = f"{path}, question {row}"
        pages = [page for page in PAGES if isinstance(record, dict) and page[0] in record]
        if not pages:
            raise DataError("no field 'entity_pages' or 'search_results'", where)
        yield _parquet_question(record, pages, where)


def _parquet_question(record: dict[str, Any], pages: Iterable[tuple[str, str, str]], where: str) -> Question:
    documents = []
    for column, context, name in pages:
        place = f"{where}, {column}"
        texts, found = strings(record[column], context, place), strings(record[column], name, place)
        if len(texts) != len(found):
            raise DataError("columns of different lengths", place, f"{context} has {len(texts)}, {name} {len(found)}")
        documents += [Document(name, text) for name, text in zip(found, texts, strict=True) if text]
    answer = get(record, "answer", dict, where)
    value = get(answer, "value", str, f"{where}, answer")
    aliases = strings(answer, "aliases", f"{where}, answer")
    accepted = strings(answer, "normalized_aliases", f"{where}, answer")
    if value == UNKNOWN and not aliases:
        value, accepted = "", []
    answers = tuple(dict.fromkeys([value, *aliases])) if value or aliases else ()
    return Question(get(record, "question_id", str, where), get(record, "question", str, where), tuple(documents),
                    answers, tuple(dict.fromkeys(accepted)) or answers)
