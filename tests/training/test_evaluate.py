"""Evaluation: every token scored once, whatever the batch; and the measures."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.base.errors import NumericsError, UsageError
from lineartime.data.prepare import prepare
from lineartime.data.tokens import Mixture, TokenStream, eval_rows, open_split
from lineartime.model.language_model import LanguageModel
from lineartime.training.evaluation import Evaluation, by_position, evaluate, evaluate_data, mixed
from text_files import make
from tiny_models import tiny_flash


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    root = tmp_path_factory.mktemp("evaluate")
    make(root, {"0.txt": "It was a dark night. " * 18, "1.txt": "The rain fell in torrents, " * 24, "2.txt": "Short."})
    prepare([root], root / "data", tokenizer="bytes", held_out=0.5)
    return open_split(root / "data", "validation")


@settings(max_examples=15)
@given(context=st.integers(1, 90), batch_rows=st.integers(1, 9))
def test_every_token_is_scored_once(stream: TokenStream, context: int, batch_rows: int) -> None:
    """The rows that a model is given, end to end, are the stream; all tokens are equally likely."""
    given_ids: list[int] = []

    class Spy(LanguageModel):
        def hidden(self, ids_BT: torch.Tensor, *_: object) -> torch.Tensor:
            given_ids.extend(ids_BT.flatten().tolist())
            return torch.zeros(*ids_BT.shape, self.config.d_model, dtype=torch.float64)

    result = evaluate(Spy(tiny_flash(stream).config).double(), stream, context=context, batch_rows=batch_rows)
    assert given_ids == stream.read(0, stream.n_tokens).tolist()
    assert result.n_tokens == stream.n_tokens
    assert result.nll == pytest.approx(stream.n_tokens * math.log(stream.vocab_size), rel=1e-12)


@pytest.mark.parametrize(("max_tokens", "spread"), [(256, False), (256, True), (960, True), (10**6, False)])
def test_a_part_has_the_words_and_bytes_of_its_tokens(tmp_path: Path, max_tokens: int, spread: bool) -> None:
    """English, of a byte a token here, then Russian, of two; rows at equal distances."""
    english, russian = "It was a dark night. ", "Съешь же ещё этих булок. "
    vocabulary = {character: i for i, character in enumerate(sorted({*english, *russian}))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(tmp_path / "characters.json"))
    text = 40 * english + 40 * russian
    make(tmp_path / "text", {"train.txt": english + russian, "validation.txt": text})
    prepare([tmp_path / "text"], tmp_path / "data", tokenizer=tmp_path / "characters.json")
    stream = open_split(tmp_path / "data", "validation")
    result = evaluate(tiny_flash(stream), stream, context=32, batch_rows=1, max_tokens=max_tokens, spread=spread)
    n_rows, n_read = -(-stream.n_tokens // 32), min(max_tokens // 32, -(-stream.n_tokens // 32))
    assert result.n_tokens == pytest.approx(min(max_tokens, stream.n_tokens), abs=31)  # the last row is shorter
    begins = {found.start() for found in re.finditer(r"\S+", text)}
    n_words = n_bytes = 0
    for place in range(n_read):
        first = 32 * (int((place + 0.5) * n_rows / n_read) if spread else place)
        n_bytes += len(text[first : first + 32].encode())
        n_words += len(begins & {*range(first, first + 32)})
    assert (result.n_words, result.n_bytes) == (n_words, n_bytes)
    assert n_read < n_rows or (n_words, n_bytes) == (stream.n_words, stream.n_bytes)
    assert result.bits_per_byte == result.nll / math.log(2) / n_bytes


def test_a_mixture_has_its_words_and_bytes_by_weight(stream: TokenStream) -> None:
    """Three of four tokens are the first's, with 4 bytes and 2 / 5 words; one has 2 and 1 / 3."""
    both = mixed([Evaluation(10, 20.0, 4, 40, []), Evaluation(30, 90.0, 10, 60, [])], (3, 1))
    assert both == Evaluation(40, pytest.approx(40 * 2.25), round(40 * (0.3 + 1 / 12)), 40 * 3.5, [])
    blocks = mixed([Evaluation(10, 20.0, 0, 0, [(1, 32, 1.0)], 50),
                    Evaluation(30, 90.0, 0, 0, [(1, 32, 5.0), (33, 64, 2.0)], 70)], (3, 1))
    assert blocks.loss_by_position == [(1, 32, 2.0), (33, 64, 2.0)] and blocks.n_read == 120
    nothing = Evaluation(0, 0.0, 0, 0, [], 5)  # so short a text may have no masked token
    assert mixed([nothing, Evaluation(9, 27.0, 0, 0, [], 60)], (1, 1)).loss == pytest.approx(3)
    assert Evaluation(1, 1e4, 0, 0, [], 9).to_dict()["perplexity"] is None  # JSON has no infinity
    assert both.bits_per_byte == pytest.approx(2.25 / math.log(2) / 3.5)
    model, twice, told = tiny_flash(stream), Mixture((stream, stream), (1, 1)), []
    evaluate_data(model, twice, max_tokens=256, batch_rows=1, progress=told.append)
    assert told == [*range(32, 257, 32)]


def test_the_loss_is_that_of_the_model(stream: TokenStream) -> None:
    """Against a loop over rows that knows nothing of batches; for any number of rows in a batch."""
    model, nll = tiny_flash(stream), 0.0
    for ids in map(torch.from_numpy, eval_rows(stream, 32)):
        log_p = model(ids[None, :-1])[0].log_softmax(-1)
        nll -= log_p[torch.arange(len(ids) - 1), ids[1:]].sum().item()
    with pytest.raises(UsageError, match="the data have more tokens than the model"):
        evaluate(LanguageModel(replace(model.config, vocab_size=9, end_of_document=None)), stream)
    with pytest.raises(UsageError, match="max_tokens = 0; it takes whole numbers from 1"):
        evaluate(model, stream, max_tokens=0)
    for batch_rows in (1, 3, 10**400):
        assert evaluate(model, stream, context=32, batch_rows=batch_rows).nll == pytest.approx(nll, rel=1e-12)


def test_loss_by_position_covers_the_context_once() -> None:
    blocks = by_position(np.arange(100.0), np.ones(100, dtype=np.int64))
    assert [(a, b) for a, b, _ in blocks] == [(1, 32), (33, 64), (65, 100)]
    assert sum(x * (b - a + 1) for a, b, x in blocks) == pytest.approx(99 * 50)


def test_a_loss_that_is_not_finite_is_refused(stream: TokenStream) -> None:
    model = tiny_flash(stream)
    model.head_bias.data[0] = math.nan
    with pytest.raises(NumericsError):
        evaluate(model, stream, context=32)
