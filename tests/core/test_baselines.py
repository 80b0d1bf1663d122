"""Combiner and Performer: recorded values, and what Performer's three sums have to keep.

The recorded values come from a numpy transcription of the published layer, in float64, for the inputs below.
That the layers are the formulas, output and gradients, stands in test_ablations.py beside the other models."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lineartime.attention import performer
from lineartime.attention.performer import performer_attention, relu_features
from lineartime.mhsa import MultiHeadAttention

PREFIX_SUMS = ["scan", "matmul", "blocks"]
EVERY_PREFIX_SUM = pytest.mark.parametrize("prefix_sum", PREFIX_SUMS)
SEEDS = st.integers(0, 2**32 - 1)


def waves(shift: float) -> Tensor:
    """sin(0.7 t + 1.3 c + shift), 6 tokens of 8 features."""
    t, c = torch.arange(6, dtype=torch.float64), torch.arange(8, dtype=torch.float64)
    return torch.sin(0.7 * t[:, None] + 1.3 * c + shift)[None]


def matrix(n: int) -> Tensor:
    """cos(1.1 a - 0.9 b + n) / 2, from feature a to feature b."""
    a = torch.arange(8, dtype=torch.float64)
    return torch.cos(1.1 * a[:, None] - 0.9 * a + n) / 2


@pytest.mark.parametrize(("causal", "first", "absolute_sum"), [
    (True, [-2.087505, -2.076001, -0.493421], 89.334666), (False, [-2.897515, -2.478174, -0.183400], 85.995995)])
def test_recorded_values_of_combiner(causal: bool, first: list[float], absolute_sum: float) -> None:
    """d = 8, 2 heads, rows of 3, no biases. x is what the norm leaves: the layer's own is taken out."""
    layer = MultiHeadAttention(d_model=8, n_heads=2, attn_type="rowmajor_axial", chunk_size=3, causal=causal).double()
    x_BTD = waves(0.1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(1.0 if name == "summary_norm.weight" else 0.0)
        layer.in_proj.weight.copy_(torch.cat([matrix(n).T for n in range(3)]))
        for part, n in ((layer.out_proj, 3), (layer.summary_proj, 4), (layer.summary_key, 5)):
            part.weight.copy_(matrix(n).T)
    layer.add_norm = lambda x_BTD, delta_BTD: (x_BTD, x_BTD)
    out_BTD = (layer(x_BTD) - x_BTD).detach()
    assert out_BTD[0, 5, :3].tolist() == pytest.approx(first, abs=6e-7)
    assert out_BTD.abs().sum().item() == pytest.approx(absolute_sum, abs=6e-7)


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
    """In float32, bit for bit: a sum that is taken back by subtraction would keep the rounding of 10^4."""
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
    """A running sum in bfloat16 stops growing after some hundred terms: the mean of later values would be lost."""
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
