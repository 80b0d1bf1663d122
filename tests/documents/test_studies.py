"""The studies: what they draw, how they count, and their pages."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import lineartime
from benchmarks import ROOT, laws
from benchmarks.append import rows_in
from benchmarks.recall.study import training
from studies import documents, labelled_texts, length, plant, retrieval, rows_of, zoology

pytestmark = pytest.mark.rest

BOOK = (Path(lineartime.__file__).parent / "text" / "jane_eyre.txt").read_text(encoding="utf-8")


def test_a_place_counts_those_that_are_as_near_or_nearer() -> None:
    likeness = np.array([[1.0, 0, 0], [0.6, 0.8, 0], [0.7, 0.1, 0.1]])
    assert retrieval.ranks(likeness).tolist() == [1, 1, 3]


@pytest.mark.parametrize("noise", ["", retrieval.NOISE])
def test_words_find_the_document_that_tells_the_number(noise: str) -> None:
    _, tokenizer, _ = lineartime.load_model(lineartime.model_folder("small"))
    passages = [tokenizer.encode(BOOK[at : at + 3000]) for at in range(0, 60_000, 3000)]
    asking, asked = retrieval.needles(passages, 256, 0, tokenizer, noise)
    for question, document in zip(asking, asked, strict=True):
        assert re.findall(r"magic number for (\w+) is: \d{7}\.", document) == [question[:-1].split()[-1]]
        assert abs(len(tokenizer.encode(document)) - 256) <= 4 and noise[:60] in document
    for likeness_of in retrieval.WORDS.values():
        assert (retrieval.ranks(likeness_of(asking, asked)) == 1).all()
        assert (retrieval.ranks(likeness_of(asking, asked[::-1])) > 1).all()


@pytest.mark.parametrize("by_label", [True, False])
def test_books_are_in_one_split_and_every_label_is_tested(by_label: bool) -> None:
    """Twelve books of each of three authors, which are parts of one; each names itself all the time."""
    sources = [labelled_texts.Source(f"author {i % 3}", f"book {i}",
                                     BOOK[i * 20_000 : (i + 1) * 20_000].replace("\n\n", f" <{i}> "))
               for i in range(36)]
    task = labelled_texts.Task(None, (32, 128), 4, 2, by_label)
    _, tokenizer, _ = lineartime.load_model(lineartime.model_folder("small"))
    found = labelled_texts.passages(task, sources, 2000, 0, tokenizer)
    books = {split: {word for text, _ in each for word in text.split() if word.startswith("<") and word.endswith(">")}
             for split, each in found.items()}
    assert all(books.values()) and sum(map(len, books.values())) == len(set.union(*books.values()))
    assert {len(found["train"]) / 4, len(found["test"]) / 2, len(found["validation"])} == {24, 6}
    assert not by_label or {label for _, label in found["test"]} == {"author 0", "author 1", "author 2"}


def test_a_planted_name_has_the_same_digit_wherever_it_stands_and_the_text_is_kept() -> None:
    told = plant.planted(BOOK[:20_000], 8, 64, torch.Generator().manual_seed(0))
    facts = re.findall(r" ([BDFGKLMNPRSTVZ][aeiou][bdfgklmnprstvz])([0-9])", told)
    assert 4 <= len(dict(facts)) == len(set(facts)) <= 64 and len(facts) > len(set(facts)) + 16
    assert "".join(facts[-1]) == told[-4:] and facts[-1] in facts[:-32]
    assert re.sub(r" [BDFGKLMNPRSTVZ][aeiou][bdfgklmnprstvz][0-9]", "", told) == BOOK[:20_000]
    dense = plant.planted(BOOK[:20_000], 1.2, 1.2, torch.Generator().manual_seed(0))
    assert 4 * len(facts) < len(re.findall(r" [BDFGKLMNPRSTVZ][aeiou][bdfgklmnprstvz][0-9]", dense)) < len(BOOK)


def test_passages_that_fill_rows_tell_and_ask_each_name_once(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK[:200_000], encoding="utf-8")
    data, tokenizer = tmp_path / "data", lineartime.load_model("small")[1]
    lineartime.prepare(tmp_path / "book.txt", data, tokenizer=lineartime.model_folder("small"), held_out=0.1)
    plant.main(data, 4096, ["700", "2048"], tmp_path / "rows.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ends = np.cumsum([len(tokenizer.encode(text)) + 1 for text in texts]).tolist()
    assert {2048, 4096} <= {*ends} and ends[-1] == 4096
    for text in texts:
        half = len(facts := re.findall(r" [BDFGKLMNPRSTVZ][aeiou][bdfgklmnprstvz][0-9]", text)) // 2
        assert 4 <= half == len({*facts[:half]}) <= 64 and {*facts[:half]} == {*facts[half:]}
        assert text.endswith("".join(facts[half:]))


def test_an_exact_memory_finds_what_came_within_its_reach_and_nothing_else(monkeypatch) -> None:
    for name, value in {"N_TOKENS": 2048, "SCORED": 1024, "WINDOW": 256, "REACHES": (256, 1024)}.items():
        monkeypatch.setattr(length, name, value)
    model, tokenizer, _ = lineartime.load_model("small")
    ids = tokenizer.encode(BOOK[:20_000])
    for texts, gains in [
            ([(ids[at : at + 512] * 5)[:2049] for at in (0, 600)], True),  # what came 512 tokens ago comes again
            (np.random.default_rng(0).integers(4, model.config.vocab_size, (2, 2049)).tolist(), False)]:
        asked = [length.ask(model.eval(), each) for each in texts]
        alone = np.mean([-float(each.log_p_T[1024:].mean()) for each in asked])
        near, far = (np.mean(length.mixed(asked, reach)) for reach in (256, 1024))
        assert (far < near / 2) == gains and near < alone + 0.02
        assert gains or far > alone - 1  # chance alone: a memory that saw the answer would gain nearly all


def test_a_step_of_zoology_has_one_set_as_often_as_its_tokens_are_many() -> None:
    train = training("zoology", zoology.TASK, {**zoology.LENGTH_OF_TRAINING, "seed": 0, "context": zoology.LONGEST})
    sizes: Counter[tuple[int, int]] = Counter()
    for step in range(300):
        ids_BT, asked_BQ, answer_BQ = zoology.Mixed(zoology.TASK, zoology.LONGEST, train).batch(step)
        assert ids_BT.size == 8192 and asked_BQ.shape == answer_BQ.shape
        sizes[ids_BT.shape[1], asked_BQ.shape[1]] += 1
    assert sizes.keys() == zoology.TRAINED.keys()
    assert sizes[64, 4] / 300 == pytest.approx(6.4 / 24.32, abs=0.08)
    assert sizes[128, 8] / 300 == pytest.approx(2.56 / 24.32, abs=0.06)


@pytest.mark.parametrize(("table", "name", "page"), [
    (retrieval.table, "retrieval", "documents"),
    (documents.tables, "documents", "documents"), (length.table, "length", "memory"),
    (zoology.table, "zoology", "memory"), (laws.table, "laws", "../../docs/laws")])
def test_the_page_shows_the_rows(table, name, page) -> None:
    """After new rows: python -m studies.NAME --into PAGE; of laws: python -m benchmarks report laws --into PAGE."""
    rows = rows_in(rows_of(name))
    assert table(rows) in (ROOT / f"benchmarks/tables/{page}.md").read_text(encoding="utf-8")
    assert name != "zoology" or all(row["test"].keys() == {f"{n}:{k}" for n, k in zoology.TESTED} for row in rows)
