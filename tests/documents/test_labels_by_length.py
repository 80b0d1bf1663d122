"""The passages of studies/documents.py: nested by length, none of a test's books in the training, fixed by a seed."""

from pathlib import Path

import pytest

import lineartime
from benchmarks import ROOT
from benchmarks.append import rows_in
from studies import document_scores, labelled_texts, rows_of

pytestmark = pytest.mark.rest

PAGE = ROOT / "benchmarks/tables/documents.md"
BOOK = (Path(lineartime.__file__).parent / "text" / "jane_eyre.txt").read_text(encoding="utf-8")


def sources():
    """Twelve books of each of three authors, which are parts of one; each names itself all the time."""
    parts = [BOOK[i * 20_000 : (i + 1) * 20_000] for i in range(36)]
    return [labelled_texts.Source(f"author {i % 3}", f"book {i}", part.replace("\n\n", f" <{i}> ")) for i, part in
            enumerate(parts)]


def made(length, seed=0, by_label=True):
    task = labelled_texts.Task(None, (32, 128), 4, 2, by_label)
    _, tokenizer, _ = lineartime.load_model(lineartime.model_folder("small"))
    return labelled_texts.passages(task, sources(), length, seed, tokenizer)


@pytest.mark.parametrize("by_label", [True, False])
def test_books_are_in_one_split_and_every_label_is_tested(by_label):
    found = made(2000, by_label=by_label)
    books = {split: {word for text, _ in each for word in text.split() if word.startswith("<") and word.endswith(">")}
             for split, each in found.items()}
    assert all(books.values())
    assert not books["train"] & books["test"] and not books["train"] & books["validation"]
    assert not books["test"] & books["validation"]
    assert {len(found["train"]) / 4, len(found["test"]) / 2, len(found["validation"])} == {24, 6}
    if by_label:
        assert {label for _, label in found["test"]} == {"author 0", "author 1", "author 2"}


def test_the_page_shows_the_rows():
    """After new rows: python -m studies.documents --into benchmarks/tables/documents.md."""
    assert document_scores.tables(rows_in(rows_of("documents"))) in PAGE.read_text(encoding="utf-8")
