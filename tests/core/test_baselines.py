"""Combiner and Performer: recorded values, a worked example of who sees whom, laws of their own.

The recorded values come from a numpy transcription of the two published layers, in float64, for the inputs below.
That the layers are the formulas, output and gradients, stands in test_ablations.py beside the other models."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lineartime.attention import performer
from lineartime.attention.combiner import rowmajor_axial_attention
from lineartime.attention.performer import performer_attention, relu_features
from lineartime.config import model_config
from lineartime.mhsa import MultiHeadAttention
from lineartime.model import LanguageModel
from lineartime.ops.reference import rope, rotary
from tiny_models import CHUNK, CONFIGS, random_ids, random_model

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


def rotated(x_BTHK: Tensor) -> Tensor:
    sin, cos = rotary(torch.arange(x_BTHK.shape[1])[None], x_BTHK.shape[-1], x_BTHK.dtype)
    return rope(x_BTHK, sin[:, :, None], cos[:, :, None])


def assert_recorded(out: Tensor, first: list[float], absolute_sum: float) -> None:
    assert out.flatten(2)[0, 5, :3].tolist() == pytest.approx(first, abs=6e-7)
    assert out.abs().sum().item() == pytest.approx(absolute_sum, abs=6e-7)


COMBINER = [
    (True, [-2.087505, -2.076001, -0.493421], 89.334666),
    (False, [-2.897515, -2.478174, -0.183400], 85.995995),
]


@pytest.mark.parametrize(("causal", "first", "absolute_sum"), COMBINER)
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
    out_BTD = layer(x_BTD) - x_BTD
    assert_recorded(out_BTD.detach(), first, absolute_sum)


PERFORMER = {
    "none": ([-0.814969, -0.096220, 0.763492], 25.792563, 21.461729),
    "pre": ([-0.712691, -0.152554, 0.631075], 28.145758, 19.904712),
}


@EVERY_PREFIX_SUM
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("where", PERFORMER)
def test_recorded_values_of_performer(where: str, causal: bool, prefix_sum: str,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE nowhere, and before the features, as the layer has it."""
    first, causal_sum, bidirectional_sum = PERFORMER[where]
    q, k, v = (waves(shift).unflatten(-1, (2, 4)) for shift in (0.1, 1.1, 2.1))
    if where == "pre":
        q, k = rotated(q), rotated(k)
    for block in (1, 2, 4, 128):
        monkeypatch.setattr(performer, "BLOCK", block)
        out = performer_attention(q, k, v, causal=causal, prefix_sum=prefix_sum)
        assert_recorded(out, first, causal_sum if causal else bidirectional_sum)


def combiner_weights(n_tokens: int, chunk_size: int, *, causal: bool, seed: int = 0) -> Tensor:
    """Entry [t, s]: the weight of token s for token t. The values are the tokens' numbers, one by one."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, n_tokens, 1, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    key_of = torch.randn(n_tokens, 4, dtype=torch.float64, generator=generator)
    one_hot = torch.eye(n_tokens, dtype=torch.float64)[None, :, None]
    out, _ = rowmajor_axial_attention(q, k, one_hot, lambda vs: vs @ key_of, chunk_size=chunk_size, causal=causal)
    return out[0, :, 0]


def test_who_sees_whom_in_combiner() -> None:
    """6 tokens in rows of 3. Token 4 sees 3 and 4, and tokens 0 to 2 through their row's summary for the place 1."""
    causal = combiner_weights(6, 3, causal=True)
    assert (causal > 0).int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
                                           [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert (causal[causal.triu(1) > 0] == 0).all() and (causal >= 0).all()
    assert (combiner_weights(6, 3, causal=False) > 0).all()


@pytest.mark.parametrize(("n_tokens", "chunk_size"), [(6, 3), (12, 3), (8, 4), (8, 8), (8, 1), (11, 4), (3, 5)])
def test_weights_of_combiner(n_tokens: int, chunk_size: int) -> None:
    """They sum to 1. Causal ones are above zero up to the token itself and zero behind it. Bidirectional ones are above
    zero everywhere, but that a short last row has no summary for the places that it does not reach."""
    place, row = torch.arange(n_tokens) % chunk_size, torch.arange(n_tokens) // chunk_size
    has_summary = (place[:, None] + row * chunk_size < n_tokens) | (row[:, None] == row)
    for causal in (True, False):
        a_TT = combiner_weights(n_tokens, chunk_size, causal=causal)
        assert (a_TT.sum(1) - 1).abs().max() < 1e-14
        seen = torch.ones_like(a_TT).tril() > 0 if causal else has_summary
        assert (a_TT[seen] > 0).all() and (a_TT[~seen] == 0).all()


def test_causality_needs_a_strict_mask_of_summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the laws would notice: with the own row's summary in sight, later tokens of the row leak into it."""
    model, ids_BT = random_model(CONFIGS["combiner"]), random_ids(1, 2 * CHUNK)
    other_BT = ids_BT.clone()
    other_BT[:, -1] = (ids_BT[:, -1] + 1) % 13
    assert torch.equal(model(ids_BT)[:, :-1], model(other_BT)[:, :-1])

    def not_strict(mask: Tensor, other: Tensor) -> Tensor:
        return mask <= other

    monkeypatch.setattr(Tensor, "__lt__", not_strict)  # `row_F < row_G`; where tokens end, rows are whole here
    assert (model(ids_BT)[:, CHUNK:-1] - model(other_BT)[:, CHUNK:-1]).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_one_row_of_combiner_is_the_transformer(causal: bool) -> None:
    """C = T. When not causal the row's own summary is the same mean of v again, so the result stays."""
    config = replace(CONFIGS["combiner"], chunk_size=24, causal=causal)
    combiner, plain = random_model(config), random_model(replace(config, attn_type="quadratic", chunk_size=None))
    plain.load_state_dict({name: w for name, w in combiner.state_dict().items() if "summary" not in name})
    for length in (1, 10, 24):
        ids_BT = random_ids(2, length)
        assert (combiner(ids_BT) - plain(ids_BT)).abs().max() < 1e-11


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@settings(max_examples=15)
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
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_negative_queries_and_keys_stay_finite(dtype: torch.dtype, causal: bool, prefix_sum: str) -> None:
    """All features are 10^-3, and the result is the mean of the values seen."""
    q = -torch.rand(1, 200, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype) - 0.5
    v = torch.randn(1, 200, 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = performer_attention(q, q, v, causal=causal, prefix_sum=prefix_sum)
    assert found.dtype == dtype
    mean = v.double().cumsum(1) / torch.arange(1, 201)[None, :, None, None] if causal else v.double().mean(
        1, keepdim=True).expand_as(v)
    assert (found.double() - mean).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-4)


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


@torch.no_grad()
def test_performer_decodes_from_a_float32_state() -> None:
    model = LanguageModel(replace(CONFIGS["performer"], n_layers=1)).to(torch.bfloat16).eval()
    ids_BT = random_ids(1, 700)
    by_one, at_once = model.decoding_state(1), model.decoding_state(1)
    for t in range(700):
        model.extend(ids_BT[:, t : t + 1], torch.tensor([1]), by_one)
    model.extend(ids_BT, torch.tensor([700]), at_once)
    a, b = (state.caches[0].kv_BHMK for state in (by_one, at_once))
    assert a.dtype == b.dtype == torch.float32
    assert (a - b).abs().max() / b.abs().max() < 1e-3


@pytest.mark.parametrize("task", ["c4", "wiki40b", "pg19"])
def test_what_combiner_adds(task: str) -> None:
    """2 d^2 + 2 d for the two projections of a layer, and the norm between them: 2 d, or 1 where it is ScaleNorm."""
    counts = []
    for model in ("combiner", "transformer+", "performer"):
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in LanguageModel(model_config(model, task)).parameters()))
    d, n_layers = (1024, 36) if task == "pg19" else (768, 12)
    assert counts[0] - counts[1] == n_layers * (2 * d**2 + 2 * d + (1 if task == "c4" else 2 * d))
    assert counts[2] == counts[1]
