"""What Performer's three sums have to keep. That Combiner and Performer are their formulas, output
and gradients, is in test_ablations.py beside the other models."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.model.attention import performer
from lineartime.model.attention.performer import performer_attention, relu_features

PREFIX_SUMS = ["scan", "matmul", "blocks"]
EVERY_PREFIX_SUM = pytest.mark.parametrize("prefix_sum", PREFIX_SUMS)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@settings(max_examples=6)
@given(seed=SEEDS, n_tokens=st.integers(1, 300), data=st.data())
def test_three_ways_to_sum_are_one(causal: bool, seed: int, n_tokens: int, data: st.DataObject) -> None:
    """Against the T x T matrix, and behind a state that a first part left."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n_tokens, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = torch.ones(n_tokens, n_tokens, dtype=torch.float64).tril() if causal else 1.0
    a_BHTS = torch.einsum("bthm,bshm->bhts", relu_features(q), relu_features(k)) * mask
    wanted = torch.einsum("bhts,bshk->bthk", a_BHTS / a_BHTS.sum(-1, keepdim=True), v)
    for prefix_sum in PREFIX_SUMS:
        found = performer_attention(q, k, v, causal=causal, prefix_sum=prefix_sum)
        assert (found - wanted).abs().max() < 1e-11
    cut = data.draw(st.integers(0, n_tokens - 1))
    for prefix_sum, later_sum in itertools.product(PREFIX_SUMS, repeat=2):
        fq, fk = relu_features(q), relu_features(k)
        whole, last = performer.prefix_read(fq, fk, v, prefix_sum)
        state = None
        if cut:
            state = performer.prefix_read(fq[:, :cut], fk[:, :cut], v[:, :cut], prefix_sum)[1]
        found, found_last = performer.prefix_read(fq[:, cut:], fk[:, cut:], v[:, cut:], later_sum, state)
        assert (found - whole[:, cut:]).abs().max() < 1e-10
        assert (found_last - last).abs().max() < 1e-10


@EVERY_PREFIX_SUM
def test_a_large_entry_changes_nothing_before_it(prefix_sum: str) -> None:
    """In float32, bit for bit: a sum that is taken back by subtraction would keep rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 4, generator=generator) for _ in range(3))
    small = performer_attention(q, k, v, causal=True, prefix_sum=prefix_sum)
    wanted = performer_attention(q.double(), k.double(), v.double(), causal=True, prefix_sum="scan")
    assert (small - wanted).abs().max() < 1e-5
    for at in (100, 200, 299):
        k2, v2 = k.clone(), v.clone()
        k2[:, at], v2[:, at] = 1e4, 1e4
        large = performer_attention(q, k2, v2, causal=True, prefix_sum=prefix_sum)
        assert torch.equal(large[:, :at], small[:, :at])
        assert (large[:, at:] != small[:, at:]).any()


@EVERY_PREFIX_SUM
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16 weights", "autocast"])
def test_sums_over_thousands_of_tokens_in_bfloat16(prefix_sum: str, autocast: bool,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum in bfloat16 stops growing after some hundred terms: the mean of later values
    would be lost."""
    monkeypatch.setattr(performer, "BLOCK", 8)
    generator = torch.Generator().manual_seed(0)
    n_tokens = 4096
    q, k = (torch.rand(1, n_tokens, 1, 4, generator=generator).bfloat16() for _ in range(2))
    v = torch.linspace(-1, 1, n_tokens)[None, :, None, None].expand_as(q).bfloat16()
    wanted = performer_attention(q.double(), k.double(), v.double(), causal=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = performer_attention(q, k, v, causal=True, prefix_sum=prefix_sum)
        state = performer.prefix_read(q.float(), k.float(), torch.ones(1, n_tokens, 1, 1), prefix_sum)[1]
    counted = k.double().sum(1)[0, 0]
    assert state.dtype == torch.float32
    assert (state.flatten() / counted - 1).abs().max() < 1e-4  # a bfloat16 is off by up to 4e-3
    assert (found.double() - wanted).abs().max() < 2e-2
