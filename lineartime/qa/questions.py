"""Questions with their documents and answers, read from SQuAD v1.1 JSON, TriviaQA JSON and TriviaQA parquet.

The field "Data" marks TriviaQA's JSON, "data" SQuAD's; a `.parquet` has the columns of `mandarjoshi/trivia_qa`. The
name `hub:rc.wikipedia/train` in place of a file is a configuration and a split of that data set on the hub."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lineartime.atomic_io import read_bytes
from lineartime.data.hub import hub_library, hub_records
from lineartime.data.read_text import BYTE_ORDER_MARK, check_text, parse_json, read_rows
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
    if str(path).startswith(ON_HUB) or path.suffix.lower() == ".parquet":
        return _parquet(str(path))
    content = read_json(path)
    if isinstance(content, dict) and "Data" in content:
        return _triviaqa(content, path, evidence or path.absolute().parent.parent / "evidence")
    if isinstance(content, dict) and "data" in content:
        return _squad(content, path)
    raise DataError("no field 'Data' (TriviaQA) or 'data' (SQuAD)", path)


NAMES: dict[type, str] = {str: "a string", int: "a whole number", list: "a list", dict: "a JSON object",
                          bool: "true or false", type(None): "null", float: "a number"}
PAGE: dict[str, Any] = {"Filename": str}
TRIVIAQA: dict[str, Any] = {"QuestionId": str, "Question": str, "EntityPages?": [PAGE], "SearchResults?": [PAGE],
            "Answer?": {"Value": str, "Aliases": [str], "NormalizedAliases": [str], "HumanAnswers?": [str]}}
SQUAD: dict[str, Any] = {"title?": str, "paragraphs": [{"context": str, "qas": [{
    "id": str, "question": str, "is_impossible?": bool, "answers?": [{"text": str, "answer_start": int}]}]}]}
PARQUET: dict[str, Any] = {"question": str, "question_id": str,
           "answer": {"value": str, "aliases": [str], "normalized_aliases": [str]},
           "entity_pages?": {"wiki_context": [str], "filename": [str]},
           "search_results?": {"search_context": [str], "url": [str]}}
"""The fields that are read of a record, and their types; those with a question mark may be missing."""
VERIFIED: dict[str, Any] = {"QuestionPartOfVerifiedEval": bool}
"""What else TRIVIAQA has in a file for the verified evaluation; its pages have `DocPartOfVerifiedEval`."""


def check_record(value: Any, kind: Any, where: str, name: str = "") -> None:
    """Raise DataError, with its place, unless a JSON value has the fields of a table such as TRIVIAQA, each of its
    type. There may be more. name: of the field that has the value. True and false are no whole numbers."""
    wanted: Any = kind if isinstance(kind, type) else type(kind)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise DataError(f"field {name!r} is not {NAMES[wanted]}" if name else f"not {NAMES[wanted]}", where,
                        f"it is {NAMES.get(type(value), type(value).__name__)}")
    inside = f"{where}.{name}" if name else where
    if isinstance(value, str):
        check_text(value, f"field {name!r}" if name else "it", where)
    elif isinstance(kind, list):
        for i, each in enumerate(value):
            check_record(each, kind[0], f"{inside}[{i}]")
    elif isinstance(kind, dict):
        for field, each in kind.items():
            key = field.removesuffix("?")
            if key in value:
                check_record(value[key], each, inside, key)
            elif key == field:  # it may not be missing
                there = ", ".join(map(repr, list(value)[:8])) or "none"
                raise DataError(f"no field {key!r}", inside, f"it has {there}")


def _triviaqa(content: dict[str, Any], path: Path, evidence: Path) -> Iterator[Question]:
    """The questions of a TriviaQA file. EntityPages are in `evidence/wikipedia`, SearchResults in `evidence/web`."""
    check_record(content, {"VerifiedEval?": bool, "Data": list}, str(path))
    verified = content.get("VerifiedEval", False)
    for i, record in enumerate(content["Data"]):
        where, documents = f"{path}, Data[{i}]", []
        check_record(record, TRIVIAQA | (VERIFIED if verified else {}), where)
        if verified and not record["QuestionPartOfVerifiedEval"]:
            continue
        for field, folder in (("EntityPages", "wikipedia"), ("SearchResults", "web")):
            for j, page in enumerate(record.get(field, [])):
                if verified:
                    check_record(page, {"DocPartOfVerifiedEval": bool}, f"{where}.{field}[{j}]")
                if not verified or page["DocPartOfVerifiedEval"]:
                    documents.append(_evidence(page["Filename"], evidence / folder, f"{where}.{field}[{j}]"))
        answer = record.get("Answer", {"Value": "", "Aliases": [], "NormalizedAliases": []})
        names = once([answer["Value"], *answer["Aliases"]]) if "Answer" in record else ()
        accepted = once([*answer["NormalizedAliases"], *answer.get("HumanAnswers", [])])
        yield Question(record["QuestionId"], record["Question"], tuple(documents), names, accepted or names)


def _evidence(name: str, folder: Path, where: str) -> Document:
    """A file of evidence, which may not be outside of its folder. Raises DataError."""
    relative = PurePosixPath(name)
    if not name or relative.is_absolute() or ".." in relative.parts:
        raise DataError("not the name of a file of evidence", f"{where}: {name!r}")
    if not (folder / relative).is_file():
        raise DataError("no such file of evidence", f"{folder / relative}, of {where}",
                        "name the folder that has wikipedia/ and web/ with --evidence")
    return Document(name, folder / relative)


def once(texts: Iterable[str]) -> tuple[str, ...]:
    """Texts without those that are there already."""
    return tuple(dict.fromkeys(texts))


def _squad(content: dict[str, Any], path: Path) -> Iterator[Question]:
    """The questions of SQuAD v1.1. Gold spans that do not match the text of their answer are left out."""
    check_record(content, {"data": list}, str(path))
    for i, article in enumerate(content["data"]):
        check_record(article, SQUAD, f"{path}, data[{i}]")
        for j, paragraph in enumerate(article["paragraphs"]):
            text = paragraph["context"]
            for k, record in enumerate(paragraph["qas"]):
                if record.get("is_impossible"):
                    raise DataError("a question without an answer (SQuAD v2)",
                                    f"{path}, data[{i}].paragraphs[{j}].qas[{k}]", "SQuAD v1.1 is read")
                found = [(answer["text"], answer["answer_start"]) for answer in record.get("answers", [])]
                spans = dict.fromkeys((start, start + len(answer)) for answer, start in found
                                      if start >= 0 and answer and text[start : start + len(answer)] == answer)
                answers = once(answer for answer, _ in found)
                yield Question(record["id"], record["question"], (Document(article.get("title", "untitled"), text),),
                               answers, answers, "squad", tuple(spans))


def _records(path: str) -> Iterator[tuple[str, Any]]:
    """The places and the records of a parquet file of `mandarjoshi/trivia_qa`, or of `hub:CONFIGURATION/SPLIT`, which
    is streamed. Raises UsageError for another name, and as `read_rows` and `hub_records` do."""
    if not path.startswith(ON_HUB):
        names = [name.removesuffix("?") for name in PARQUET]
        yield from ((row.where, row.fields) for row in read_rows(Path(path), [], optional=names))
        return
    config, _, split = path.removeprefix(ON_HUB).partition("/")
    if not config or split not in ("train", "validation", "test"):
        raise UsageError("no such questions on the hub", path, "say hub:rc.wikipedia/train, or validation or test")
    for row, (_, record) in enumerate(hub_records(hub_library(), HUB, config, [split])):
        yield f"{path}, question {row}", record


def _parquet(path: str) -> Iterator[Question]:
    """The questions of `_records`; documents without text ("nocontext") are left out."""
    for where, record in _records(path):
        if isinstance(record, dict) and not record.keys() & {"entity_pages", "search_results"}:
            raise DataError("no field 'entity_pages' or 'search_results'", where, f"it has {', '.join(record)}")
        check_record(record, PARQUET, where)
        documents: list[Document] = []
        for field, text, name in (("entity_pages", "wiki_context", "filename"), ("search_results", "search_context",
                                                                                 "url")):
            texts, names = (record[field][each] if field in record else [] for each in (text, name))
            if len(texts) != len(names):
                raise DataError("columns of different lengths", f"{where}.{field}",
                                f"{text} has {len(texts)}, {name} {len(names)}")
            documents += [Document(each, found) for each, found in zip(names, texts, strict=True) if found]
        answer = record["answer"]
        is_known = answer["aliases"] or answer["value"] not in ("", UNKNOWN)
        answers = once([answer["value"], *answer["aliases"]]) if is_known else ()
        accepted = once(answer["normalized_aliases"]) if is_known else ()
        yield Question(record["question_id"], record["question"], tuple(documents), answers, accepted or answers)
