"""The paper's data sets in their published form, from files and from the hub."""

import itertools
import json
import logging
import math
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lineartime.data.corpora
from command_line import Call, assert_refused
from fake_hub import Hub
from lineartime.base.errors import UsageError
from lineartime.data.corpora import PG19, published_words, wiki40b_text
from lineartime.data.prepare import prepare
from lineartime.data.tokens import Manifest, open_split
from text_files import documents_of, make
from tiny_runs import command

ARTICLE = ("\n_START_ARTICLE_\nTide pool\n_START_PARAGRAPH_\nA tide pool is left by the sea._NEWLINE_It is shallow."
           "\n_START_SECTION_\nLife\n_START_PARAGRAPH_\nSea anemones, naïve crabs._NEWLINE_Starfish."
           "\n_START_SECTION_\nZones\n_START_SECTION_\nSplash zone\n_START_PARAGRAPH_\nSeldom wet.")
PLAIN = """Tide pool

A tide pool is left by the sea.
It is shallow.

Life
Sea anemones, naïve crabs.
Starfish.

Zones

Splash zone
Seldom wet."""
SPLITS = ("train", "validation", "test")


def test_an_article_as_text() -> None:
    assert wiki40b_text(ARTICLE) == PLAIN
    assert wiki40b_text("\n_START_ARTICLE_\nTitle\n_START_PARAGRAPH_\n") == "Title"
    assert wiki40b_text("_START_PARAGRAPH_ One. _START_PARAGRAPH_ Two.") == "One.\n\nTwo."
    assert wiki40b_text("Before _START_SECTION_ _START_PARAGRAPH_ After") == "Before\n\nAfter"
    assert wiki40b_text("\n_START_SECTION_\nH\n_START_PARAGRAPH_\n_NEWLINE_\n_START_PARAGRAPH_\nx") == "H\nx"
    assert wiki40b_text("") == wiki40b_text(" \n") == ""


WORD = st.text(st.characters(codec="utf-8", exclude_characters="_"), max_size=8)
MARK = st.sampled_from(["_START_ARTICLE_", "_START_SECTION_", "_START_PARAGRAPH_", "_NEWLINE_", "\n", "_", "START_",
                        "_START_", "ARTICLE_", "NEWLINE", "__"])
MARKED = st.lists(MARK | WORD, max_size=25).map("".join).map(lambda text: "\n_START_ARTICLE_\n" + text)


@given(MARKED)
@settings(max_examples=300)
def test_no_marker_survives_and_no_word_is_lost(text: str) -> None:
    plain = wiki40b_text(text)
    assert not any(f"_START_{part}_" in plain for part in ("ARTICLE", "SECTION", "PARAGRAPH"))
    assert "_NEWLINE_" not in plain
    assert plain.split() == re.sub("_START_(?:ARTICLE|SECTION|PARAGRAPH)_|_NEWLINE_", " ", text).split()
    assert plain == plain.strip() == wiki40b_text(repr(text.encode()))


def test_a_text_without_markers_is_refused() -> None:
    for text in ("An ordinary text.", "_NEWLINE_ alone", "START_ARTICLE", "b'bytes'", "b'caf\\xe9'"):
        with pytest.raises(ValueError):
            wiki40b_text(text)


def test_a_split_is_the_published_one_by_its_books_and_about_its_words() -> None:
    for books, official in PG19:
        for share in (0.9801, 1, 1.0199):
            assert published_words(books, round(official * share)) == official
        for share in (0.9799, 1.0201):
            assert published_words(books, round(official * share)) is None
        for other in (books - 1, books + 1):
            assert published_words(other, official) is None
    assert PG19 == ((28602, 1973136207), (50, 3007061), (100, 6966499))
    assert published_words(50, PG19[2][1]) is None and published_words(0, 0) is None


def test_evaluate_divides_by_the_published_words(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PG-19's validation split had been published with 2 books and 101 words."""
    monkeypatch.setattr(lineartime.data.corpora, "PG19", ((2, 101),))
    texts = {"train": ["some words of a book " * 60], "validation": ["a " * 60, "b " * 40], "test": ["a " * 100]}
    data, run = tmp_path / "data", tmp_path / "run"
    make(tmp_path / "pg19", {f"{split}.parquet": column for split, column in texts.items()})
    prepare(tmp_path / "pg19", data, tokenizer="bytes", task="pg19")
    code, _, err = call(*command(data, run, steps=1, warmup_steps=1))
    assert code == 0, err
    for split, n_words, counted in (("validation", 101, "published"), ("test", 100, "counted")):
        scores = json.loads(call("evaluate", run, "--data", data, "--split", split, "--json")[1])
        out = call("evaluate", run, "--data", data, "--split", split)[1]
        assert f" {scores['word_perplexity']:.1f} per word " in out and f"{n_words} {counted} words)" in out
        assert scores["n_words"] == n_words
        assert scores["word_perplexity"] == pytest.approx(math.exp(scores["loss"] * scores["n_tokens"] / n_words))


def test_faults_are_one_line_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    make(Path(), {"plain.parquet": [ARTICLE, "No article."], "book.txt": "A book.", "book.md.gz": "A book."})
    before = sorted(Path().iterdir())
    for expected_code, arguments, words in (
            (3, ["--task", "wiki40b", "plain.parquet"],
             ["not a Wiki-40B article", "plain.parquet, row 2", "_START_ARTICLE_"]),
            (2, ["--task", "wiki40b", "book.md.gz"], ["Wiki-40B is not .txt or .md", "book.md.gz"]),
            (2, ["--task", "pg18", "book.txt"], ["unknown task", "did you mean pg19?"]),
            (2, ["hub:pg19"], ["no such name on the hub: hub:pg19", "hub:allenai/c4:en/train[:1000]"]),
            (2, ["book.txt", "--test", "hub:emozilla/pg19/train[5:9]"], ["no such name on the hub"]),
            (2, ["hub:emozilla/pg19/train"], ["datasets", "pip install datasets"])):
        code, out, err = call("prepare", *arguments, "--out", "new/data", "--tokenizer", "bytes")
        assert_refused(code, err, expected_code, *words)
        assert out == "" and sorted(Path().iterdir()) == before


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    pages = [{"text": f"Page {i}.", "timestamp": None} for i in range(9)]
    books = [{"publication_date": 1900 + i, "text": f"Book\u2028 {i}.\n\n"} for i in range(4)]
    fake = Hub({"allenai/c4": {"train": pages[:6], "validation": pages[6:]},
                "google/wiki40b": {split: [{"text": f"{ARTICLE} {split}"}, {"text": " "}] for split in SPLITS},
                "emozilla/pg19": {"test": books[:1], "train": books[1:3], "validation": books[3:]}})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


@pytest.mark.parametrize("task, name, config, texts", [
    ("c4", "allenai/c4", "en", {"train": [f"Page {i}." for i in range(6)],
                                "validation": [f"Page {i}." for i in range(6, 9)]}),
    ("wiki40b", "google/wiki40b", "en", {split: [f"{PLAIN} {split}"] for split in SPLITS}),
    ("pg19", "emozilla/pg19", None, {"train": ["Book\u2028 1.\n\n", "Book\u2028 2.\n\n"],
                                     "validation": ["Book\u2028 3.\n\n"], "test": ["Book\u2028 0.\n\n"]}),
])
def test_the_hub_gives_the_same_text(tmp_path: Path, hub: Hub, task: str, name: str, config: str | None,
                                     texts: dict[str, list[str]]) -> None:
    data, on_hub = tmp_path / "new" / "data", f"hub:{name}:{config}" if config else f"hub:{name}"
    named = [f"{on_hub}/{split}" for split in texts]
    manifest = prepare(named, data, tokenizer="bytes", task=task)
    assert hub.asked == [(name, config)] * len(texts) and hub.bars
    assert (open_split(data, "train").mask is not None) == (task == "c4")
    assert {split: documents_of(data, split) for split in manifest.splits} == texts
    assert manifest.settings["hub"] == " ".join(named)
    assert [source["name"] for source in manifest.sources] == [f"{split}.jsonl" for split in texts]
    assert [path.name for path in data.parent.iterdir()] == ["data"]
    again = prepare(named, data, tokenizer="bytes", task=task)
    assert again.already_prepared and again.sha256 == manifest.sha256 and len(hub.asked) == len(texts)
    with pytest.raises(UsageError, match=r"hub hub:.*/train .* -> hub:.*/train\[:1\] "):
        prepare([f"{named[0]}[:1]", *named[1:]], data, tokenizer="bytes", task=task)


def test_the_hub_gives_validation_and_test(tmp_path: Path, hub: Hub) -> None:
    """Beside a file, which is compared when the same is asked for again."""
    make(tmp_path, {"book.txt": "A book."})
    data, pg19 = tmp_path / "data", "hub:emozilla/pg19"

    def prepared() -> Manifest:
        return prepare(tmp_path / "book.txt", data, tokenizer="bytes", validation=f"{pg19}/validation",
                       test=f"{pg19}/train[:1]")

    manifest = prepared()
    assert {split: documents_of(data, split) for split in SPLITS} == {
        "train": ["A book."], "validation": ["Book\u2028 3.\n\n"], "test": ["Book\u2028 1.\n\n"]}
    assert manifest.settings["hub"] == f"--validation {pg19}/validation --test {pg19}/train[:1]"
    assert prepared().already_prepared
    (tmp_path / "book.txt").write_text("Another book.")
    with pytest.raises(UsageError, match="prepared differently"):
        prepared()


def test_no_more_is_read_than_asked_for(tmp_path: Path, hub: Hub, call: Call) -> None:
    pages = itertools.chain(({"text": 1, "body": f"Page {i}."} for i in range(3)), (1 / 0 for _ in "x"))
    hub.data["allenai/c4"] = {"train": pages, "validation": [{"body": "V"}]}
    code, out, err = call("prepare", "hub:allenai/c4:en/train[:3]", "--validation", "hub:allenai/c4:en/validation",
                          "--task", "c4", "--text-field", "body", "--out", tmp_path / "data", "--tokenizer", "bytes")
    assert code == 0 and "--task c4" in out, err
    assert documents_of(tmp_path / "data") == ["Page 0.", "Page 1.", "Page 2."]


def test_what_fails_on_the_hub_is_one_line(tmp_path: Path, hub: Hub, call: Call,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.INFO)
    name = "hub:allenai/c4:en/train"
    for data, message in (
            ({}, f"cannot read from the hub: {name}; ConnectionError: Couldn't reach 'allenai/c4' on the Hub"),
            ({"train": (1 / 0 for _ in "x")}, f"cannot read from the hub: {name}; ZeroDivisionError"),
            ({"train": [{"text": "x"}, {"txt": "x", "u": ""}]}, f"no field 'text': {name}, row 2; it has 'txt', 'u'")):
        hub.data = {"allenai/c4": data} if data else {}
        code, out, err = call("prepare", name, "--task", "c4", "--out", tmp_path / "new/data", "--tokenizer", "bytes")
        assert_refused(code, err, 3, message)
        assert out == "" and not list(tmp_path.iterdir()) and hub.bars
        assert [logger.level for logger in loggers] == [logging.INFO] * 2
