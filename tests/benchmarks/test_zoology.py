"""studies/zoology.py trains on Zoology's sets in their proportion, asks its test sets, and fills the page."""

from collections import Counter

import pytest

from benchmarks import ROOT
from benchmarks.append import rows_in
from benchmarks.recall.study import training
from studies import rows_of, zoology


def mixed(seed):
    train = training("zoology", zoology.TASK, {**zoology.LENGTH_OF_TRAINING, "seed": seed, "context": zoology.LONGEST})
    return zoology.Mixed(zoology.TASK, zoology.LONGEST, (), train)


def test_a_step_has_one_set_as_often_as_its_tokens_are_many():
    sizes = Counter()
    for step in range(300):
        ids_BT, asked_BQ, answer_BQ = mixed(0).batch(step)
        assert ids_BT.size == 8192 and asked_BQ.shape == answer_BQ.shape
        sizes[ids_BT.shape[1], asked_BQ.shape[1]] += 1
    assert sizes.keys() == zoology.TRAINED.keys()
    assert sizes[64, 4] / 300 == pytest.approx(6.4 / 24.32, abs=0.08)
    assert sizes[128, 8] / 300 == pytest.approx(2.56 / 24.32, abs=0.06)


def test_the_page_shows_the_rows():
    """After new rows: python -m studies.zoology --into benchmarks/tables/memory.md."""
    rows = rows_in(rows_of("zoology"))
    assert zoology.table(rows) in (ROOT / "benchmarks/tables/memory.md").read_text(encoding="utf-8")
    for row in rows:
        assert row["test"].keys() == {f"{length}:{n_pairs}" for length, n_pairs in zoology.TESTED}
