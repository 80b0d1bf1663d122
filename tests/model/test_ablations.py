"""The paper's other models and its ablations are their definitions: each layer against the same
token by token. And what Performer's three sums have to keep."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lineartime.config import PRESETS
from lineartime.model.attention import performer
from lineartime.model.attention.performer import performer_attention, relu_features
from lineartime.model.gau_options import WriteGate
from lineartime.model.language_model import LanguageModel
from tiny_models import BIDIRECTIONAL, CONFIGS, FLASH, UNPACKED, random_ids, random_model, same
from token_by_token import layer_output

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def rows_of_documents(draw: st.DrawFn, packed: bool = True) -> list[list[int]]:
    """One or two rows of one to three documents, the shorter with padding at its end."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        row: list[int] = []
        for document in range(draw(st.integers(1, 3)) if packed else 1):
            row += [2 * document] * draw(st.integers(1, 6 if packed else 13))
        rows.append(row)
    length = max(map(len, rows)) + draw(st.integers(0, 2))
    return [row + [-1] * (length - len(row)) for row in rows]


SINGLE_HEAD = {"transformer++ single head": replace(CONFIGS["transformer++"], n_heads=1),
               "mc-tfm++ sum": replace(CONFIGS["mc-tfm++"], chunk_pooling="sum"),
               "mc-tfm++ relu2": replace(CONFIGS["mc-tfm++"], attn_kernel="relu2"),
               "mc-tfm++ gate": replace(CONFIGS["mc-tfm++"], gate=True, norm="scale_norm"),
               "combiner scale_norm": replace(CONFIGS["combiner"], norm="scale_norm"),
               "flash softmax heads": replace(FLASH, attn_kernel="softmax", n_heads=2, gate=False, overlap=True)}
DEFINED = CONFIGS | UNPACKED | BIDIRECTIONAL | SINGLE_HEAD
BOTH_WAYS = [(name, causal) for name in DEFINED for causal in (True, False) if not (causal and name in BIDIRECTIONAL)
             and name not in ("flash rotated bias", "performer-matmul", "flash-quad in flash+", "hybrid")]


@pytest.mark.parametrize(("name", "causal"), BOTH_WAYS)
@settings(max_examples=4)
@given(data=st.data(), seed=SEEDS, chunk_size=st.sampled_from([1, 2, 3, 4, 5]))
def test_a_layer_is_its_definition(name: str, causal: bool, data: st.DataObject, seed: int, chunk_size: int) -> None:
    """The first layer's output and the gradient in every weight and in x; padding is not asked."""
    config = replace(DEFINED[name], causal=causal)
    if config.chunk_size is not None:
        config = replace(config, chunk_size=chunk_size)
    rows = data.draw(rows_of_documents(packed=name not in UNPACKED))
    model = random_model(replace(config, n_layers=1), seed)
    layer = model.layers[0]
    w = dict(layer.named_parameters())
    if "rel_pos_bias.weight" in w:
        with torch.no_grad():
            w["rel_pos_bias.weight"].add_(0.3)  # more of relu^2 is open
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.tensor(rows)
    x_BTD = torch.randn(*ids_BT.shape, config.d_model, dtype=torch.float64, generator=generator, requires_grad=True)
    cotangent = torch.randn(x_BTD.shape, dtype=torch.float64, generator=generator) * (ids_BT >= 0)[..., None]
    wanted = torch.stack([layer_output(config, w, x_TD, row) for x_TD, row in zip(x_BTD, rows, strict=True)])
    leaves = {"x": x_BTD} | w

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * cotangent).sum(), list(leaves.values()), materialize_grads=True)

    wanted_by = gradients(wanted)
    for impl in (None, "reference"):  # by default FLASH trains in windows
        model.set_impl(impl)
        found = layer(x_BTD, ids_BT)
        assert same(found[ids_BT >= 0], wanted[ids_BT >= 0])
        for leaf, a, b in zip(leaves, gradients(found), wanted_by, strict=True):
            assert same(a, b), leaf


def test_gates_of_short_types_are_made_in_float32() -> None:
    """The sums of thousands of them divide what is read."""
    gate, generator = WriteGate(CONFIGS["flash+ heads"]), torch.Generator().manual_seed(0)
    x_BTS, *values = (torch.randn(shape, generator=generator).bfloat16()
                      for shape in ((1, 1024, len(gate.weight)), gate.weight.shape, gate.bias.shape))
    gate.weight.data, gate.bias.data = values
    gate_BTH, exact_BTH = gate(x_BTS), gate.double()(x_BTS.double())
    assert gate_BTH.dtype == torch.float32 and (gate_BTH - exact_BTH).abs().max() < 1e-6


@pytest.mark.parametrize("name", [*PRESETS, "transformer++ relu2", "flash softmax", "flash heads",
                                  "flash learned weights", "flash cls", "flash first to all"])
def test_bfloat16_is_near(name: str) -> None:
    """Under autocast, as in training and evaluation: the loss and every gradient are near those of
    float32, and with bfloat16 weights the output too."""
    torch.manual_seed(0)
    config = replace(DEFINED[name], d_model=32, query_key_dim=16, context=64)
    model, ids_BT = LanguageModel(config), random_ids(2, 50)
    segment_ids_BT = torch.zeros_like(ids_BT) if name in UNPACKED else torch.arange(50).expand(2, -1) // 17
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(model(ids_BT, segment_ids_BT).float().flatten(0, 1), ids_BT.roll(-1, 1).flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    full, low = found
    assert low.dtype == torch.float32 and (low - full).norm() / full.norm() < 0.05
    with torch.no_grad():
        wanted_BTV = model(ids_BT, segment_ids_BT)
        found_BTV = model.bfloat16()(ids_BT, segment_ids_BT)
        assert found_BTV.dtype == torch.bfloat16
        assert (found_BTV.float() - wanted_BTV).norm() / wanted_BTV.norm() < 0.05
        if config.decodes:
            state = model.decoding_state(2)
            whole = model.hidden(ids_BT)
            pieces = [model.extend(ids_BT[:, :21], torch.tensor([21, 21]), state)[0]]
            pieces += [model.extend(ids_BT[:, t : t + 1], torch.tensor([1, 1]), state)[0] for t in range(21, 50)]
            assert (torch.cat(pieces, 1).float() - whole.float()).norm() / whole.float().norm() < 0.05


PREFIX_SUMS = ["scan", "matmul", "blocks"]
EVERY_PREFIX_SUM = pytest.mark.parametrize("prefix_sum", PREFIX_SUMS)


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
    fq, fk = relu_features(q), relu_features(k)
    for prefix_sum, later_sum in itertools.product(PREFIX_SUMS, repeat=2):
        whole, last = performer.prefix_read(fq, fk, v, prefix_sum)
        state = performer.prefix_read(fq[:, :cut], fk[:, :cut], v[:, :cut], prefix_sum)[1] if cut else None
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
    monkeypatch.setattr(performer, "PREFIX_BLOCK", 8)
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
