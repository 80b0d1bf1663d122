"""The studies of studies/listops.py and studies/retrieval.py: what they draw and how they count."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import ROOT
from benchmarks.append import rows_in
from lineartime.config import model_config
from lineartime.config_json import Head
from lineartime.documents.classify import ONE, targets_of
from lineartime.model import DocumentClassifier
from studies import expressions, listops, retrieval, rows_of

pytestmark = pytest.mark.rest


def value_of(symbols: list[str]) -> int:
    """An expression's value, by a stack: another way than that of the study."""
    stack: list[list] = [[]]
    for symbol in symbols:
        if symbol.isdigit():
            stack[-1].append(int(symbol))
        elif symbol != "]":
            stack.append([symbol])
        else:
            name, *values = stack.pop()
            values.sort()
            middle = len(values) // 2
            median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2
            stack[-1].append({"MIN": values[0], "MAX": values[-1], "SM": sum(values) % 10, "MED": median}[name])
    (value,), = stack
    return value


def test_expressions_have_their_values_and_the_published_bounds() -> None:
    """Tay et al.: 2 to 10 arguments, depth 10, the four operators alike; three of four arguments are digits."""
    draw, seen, n_arguments = random.Random(0), {name: 0 for name in expressions.OPERATORS}, []
    for _ in range(400):
        symbols, value = expressions.expression(draw)
        assert value == value_of(symbols) and 0 <= value <= 9
        counts, deepest = [0], 0
        for symbol in symbols:
            if symbol == "]":
                n_arguments.append(counts.pop())
            else:
                counts[-1] += 1
                if symbol in seen:
                    seen[symbol] += 1
                    counts.append(0)
            deepest = max(deepest, len(counts))
        assert deepest <= expressions.MAX_DEPTH and len(counts) == 1
    assert {min(n_arguments), max(n_arguments)} == {2, 10}
    assert all(abs(count / sum(seen.values()) - 1 / 4) < 0.05 for count in seen.values())


def test_the_value_is_read_from_the_first_symbol_of_each_row() -> None:
    """In batches with padding as alone, in the order of the documents."""
    documents, head = expressions.documents(3, 7), Head(ONE, tuple("0123456789"))
    model = DocumentClassifier(model_config("flash", **listops.SIZES, **listops.MODELS["flash"]), head)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    scores, logits = expressions.scores_of(model, documents), []
    for ids in documents.ids:
        with torch.autocast("cpu", torch.bfloat16):
            logits.append(model.label_logits(model.hidden(torch.from_numpy(ids)[None])[:, 0]))
    targets = targets_of(head, documents.labels)
    alone = torch.nn.functional.cross_entropy(torch.cat(logits), torch.from_numpy(targets))
    assert scores["loss"] == pytest.approx(alone.item(), abs=2e-2) and model.training


def test_a_place_counts_those_that_are_as_near_or_nearer() -> None:
    asked = np.eye(3)
    asking = np.array([[1.0, 0, 0], [0.6, 0.8, 0], [0.7, 0.1, 0.1]])
    assert retrieval.ranks(asking, asked).tolist() == [1, 1, 3]


def test_an_error_of_a_study_is_one_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "studies.listops", "--into", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, f"error: cannot read the page: {page}; No such file or directory\n")


@pytest.mark.parametrize(("study", "name"), [(listops, "listops"), (retrieval, "retrieval")])
def test_the_page_shows_the_rows(study, name) -> None:
    """After new rows: python -m studies.listops --into benchmarks/tables/documents.md, and so for the others."""
    page = (ROOT / "benchmarks/tables/documents.md").read_text(encoding="utf-8")
    assert study.table(rows_in(rows_of(name))) in page
