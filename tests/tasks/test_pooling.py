"""The vector of a text is the mean of its last hidden states, whatever windows and batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import lineartime
from lineartime.base.errors import UsageError
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.tasks.pooling import document_means
from tiny_models import CONFIGS, CONTEXT, random_model

TEXTS = ["once", "upon a time there was a row of more than a window", "", "x" * (2 * CONTEXT), "end"]


def mean_of(model, ids):
    with torch.no_grad():
        return model.hidden(torch.tensor([ids]))[0].mean(0).numpy()


@pytest.mark.parametrize("causal", [True, False])
def test_embed_is_the_mean_of_the_last_states(causal):
    """A causal model reads any length as one row, another in windows that count by their tokens."""
    model = random_model(replace(CONFIGS["flash"], causal=causal, vocab_size=257, end_of_document=256))
    vectors_ND = lineartime.embed(model, byte_tokenizer(), TEXTS * 5, batch_rows=2)
    assert vectors_ND.shape == (25, 8) and vectors_ND.dtype == np.float64
    for text, vector_D in zip(TEXTS * 5, vectors_ND, strict=True):
        ids = [256, *text.encode()]
        size = len(ids) if causal else CONTEXT
        parts = [ids[first : first + size] for first in range(0, len(ids), size)]
        wanted_D = sum(mean_of(model, part) * len(part) for part in parts) / len(ids)
        assert np.abs(vector_D - wanted_D).max() <= 1e-12 * max(1, np.abs(wanted_D).max())


def test_embed_cuts_counts_and_refuses():
    model, seen = random_model(replace(CONFIGS["flash"], vocab_size=257, end_of_document=256)), []
    cut_ND = lineartime.embed(model, byte_tokenizer(), TEXTS, max_tokens=30, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 5 + 30 + 1 + 30 + 4
    assert np.allclose(cut_ND[1], mean_of(model, [256, *TEXTS[1][:29].encode()]), atol=1e-12)
    assert lineartime.embed(model, byte_tokenizer(), []).shape == (0, 8)
    for name, wrong in (("batch_rows", 0), ("max_tokens", 1.5), ("precision", "int8")):
        with pytest.raises(UsageError, match=name):
            lineartime.embed(model, byte_tokenizer(), ["a"], **{name: wrong})
    with pytest.raises(UsageError, match="the letters of one text"):
        lineartime.embed(model, byte_tokenizer(), "abc")


def test_means_count_tokens_of_each_document_only():
    x_BTD = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    segment_ids_BT = torch.tensor([[0, 0, 1, 1, 1, 3, -1], [-1, -1, 0, 0, 0, 0, 0]])
    means_BND = document_means(x_BTD, segment_ids_BT)
    assert means_BND.shape == (2, 4, 3)
    for row, n, places in ((0, 0, [0, 1]), (0, 1, [2, 3, 4]), (0, 3, [5]), (1, 0, [2, 3, 4, 5, 6])):
        assert torch.allclose(means_BND[row, n], x_BTD[row, places].mean(0), atol=1e-15)
    assert (means_BND[0, 2] == 0).all() and (means_BND[1, 1:] == 0).all()
    assert (document_means(x_BTD, torch.full((2, 7), -1)) == 0).all()
    x_BTD = torch.ones(1, 3000, 1)
    x_BTD[0, 0] += 0.375  # which moves the mean by less than bfloat16 has, whose sum of ones is 256
    with torch.autocast("cpu", torch.bfloat16):
        means = [document_means(given, torch.zeros(1, 3000, dtype=torch.long)) for given in (x_BTD, x_BTD.bfloat16())]
    assert [mean.item() for mean in means] == [pytest.approx(1.000125, abs=1e-6), 1]
