"""Losses by what was there before: every target's class against a double loop, the sums against `evaluate`."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import recurrence
from benchmarks.recurrence import frequent_bigrams, measure_recurrence, seen_before
from lineartime.config import ModelConfig, model_config
from lineartime.data.prepare import prepare
from lineartime.data.tokens import TokenStream, eval_rows, open_split
from lineartime.errors import NumericsError, UsageError
from lineartime.evaluation import evaluate
from lineartime.model import LanguageModel, token_losses


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStream]:
    """Documents of few letters, so that much recurs; some letters are rare in training."""
    root, random = tmp_path_factory.mktemp("recurrence"), np.random.default_rng(0)
    for split, lengths, letters in (("train", [700, 500], "abcdefg"), ("validation", [70, 9, 40, 101], "abcxyz")):
        (root / "text" / split).mkdir(parents=True)
        for i, length in enumerate(lengths):
            (root / "text" / split / f"{i}.txt").write_text("".join(random.choice(list(letters), length)))
    prepare([root / "text"], root / "data", tokenizer="bytes")
    return {split: open_split(root / "data", split) for split in ("train", "validation")}


def tiny(stream: TokenStream, preset: str = "flash") -> LanguageModel:
    torch.manual_seed(0)
    size = {"chunk_size": 8, "query_key_dim": 8} if preset == "flash" else {"n_heads": 2}
    config = model_config(preset, n_layers=2, d_model=16, context=32, vocab_size=stream.vocab_size,
                          end_of_document=stream.end_of_document, **size)
    model = LanguageModel(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def in_words(row: list[int], chunk: int, end: int) -> tuple[list[int], list[int]]:
    """The classes of a row's targets, as `Recurrence` says it."""
    document = np.cumsum(np.array(row) == end).tolist()
    tokens, bigrams = [], []
    for at in range(len(row) - 1):
        x, y, places, pairs = row[at], row[at + 1], [], []
        for j in range(at + 1):
            if document[j] == document[at]:
                places += [j] if row[j] == y else []
                pairs += [j] if j < at and document[j + 1] == document[at] and row[j:j + 2] == [x, y] else []
        for found, classes in ((places, tokens), (pairs, bigrams)):
            classes.append(2 if not found else int(not any(j // chunk == at // chunk for j in found)))
    return tokens, bigrams


@settings(max_examples=300)
@given(rows=st.integers(1, 40).flatmap(lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n + 1, max_size=n + 1),
                                                          min_size=1, max_size=4)),
       chunk=st.integers(1, 12) | st.just(2**70))
def test_classes_are_those_of_a_double_loop(rows: list[list[int]], chunk: int) -> None:
    """0 ends documents: there are several in a row, and empty ones."""
    token_BT, bigram_BT = seen_before(np.array(rows), chunk, 0)
    for row, token_T, bigram_T in zip(rows, token_BT, bigram_BT, strict=True):
        assert (token_T.tolist(), bigram_T.tolist()) == in_words(row, chunk, 0)


def test_frequent_bigrams_are_counted(streams: dict[str, TokenStream], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks that end inside the text."""
    stream = streams["train"]
    monkeypatch.setattr(recurrence, "BLOCK_TOKENS", 97)
    monkeypatch.setattr(recurrence, "RARE_PER_MILLION", 20_000)
    ids = stream.read(0, len(stream)).tolist()
    counts = Counter(itertools.pairwise(ids))
    expected = sorted(x * stream.vocab_size + y for (x, y), n in counts.items() if n / stream.n_tokens > 0.02)
    assert 5 < len(expected) < len(counts) - 5
    assert frequent_bigrams(stream).tolist() == expected


@pytest.mark.parametrize(("preset", "chunk", "context"), [("flash", None, None), ("flash", 5, 50),
                                                          ("transformer++", 8, 300)])
def test_sums_are_those_of_each_target(streams: dict[str, TokenStream], preset: str, chunk: int | None,
                                       context: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "RARE_PER_MILLION", 20_000)
    stream, training = streams["validation"], streams["train"]
    model = tiny(stream, preset).train()
    found = measure_recurrence(model, stream, training, chunk=chunk, context=context)
    assert model.training and (found.chunk, found.context) == (chunk or 8, context or 32)
    frequent = set(frequent_bigrams(training).tolist())
    n, nll = np.zeros((3, 3), int), np.zeros((3, 3))
    model.eval()
    for row in eval_rows(stream, found.context):
        losses = token_losses(model, torch.from_numpy(row)[None])[0].tolist()
        for x, y, loss, *seen in zip(row, row[1:], losses, *in_words(row.tolist(), found.chunk,
                                                                     stream.end_of_document), strict=False):
            kinds = [(0, seen[0]), (1, seen[1])]
            kinds += [(2, seen[1])] if x * stream.vocab_size + y not in frequent else []
            for place in kinds:
                n[place] += 1
                nll[place] += loss
    assert found.n_tokens == n.tolist() and (n > 0).all()
    assert np.array(found.nll) == pytest.approx(nll, rel=1e-10)
    scores = evaluate(model, stream, context=context)
    for kind in (0, 1):
        assert sum(found.n_tokens[kind]) == scores.n_tokens
        assert sum(found.nll[kind]) / scores.n_tokens == pytest.approx(scores.loss, rel=1e-12)
    assert sum(found.n_tokens[2]) < scores.n_tokens


def test_what_is_refused(streams: dict[str, TokenStream]) -> None:
    stream, training = streams["validation"], streams["train"]
    masked = LanguageModel(ModelConfig(causal=False, vocab_size=300, d_model=12))
    for words, model, options in [("no chunks", tiny(stream, "transformer++"), {}),
                                  ("context = 0", tiny(stream), {"context": 0}), ("causal", masked, {"chunk": 8})]:
        with pytest.raises(UsageError, match=words):
            measure_recurrence(model, stream, training, **options)
    damaged = tiny(stream)
    torch.nn.init.constant_(damaged.head_bias, math.nan)
    with pytest.raises(NumericsError, match="not finite"):
        measure_recurrence(damaged, stream, training)
