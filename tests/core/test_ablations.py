"""The paper's other models and its ablations are their definitions: each layer against the same token by token."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lineartime.config import ModelConfig, model_config
from lineartime.errors import UsageError
from lineartime.layers import SequenceInfo, cu_seqlens, sequence_info
from lineartime.memory import ReadNorm
from lineartime.model import LanguageModel
from lineartime.ops.memory import write_gate
from lineartime.ops.reference import make_heads, rotary, split_uvz
from marks import rest
from tiny_models import BIDIRECTIONAL, CHUNK, CONFIGS, FLASH, FLASH_QUAD, UNPACKED, case_of, random_ids, random_model
from token_by_token import layer_output

EXACT = 1e-12
SEEDS = st.integers(0, 2**32 - 1)


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def info_of(config: ModelConfig, segment_ids_BT: Tensor) -> SequenceInfo:
    angles = rotary(torch.arange(segment_ids_BT.shape[1])[None], config.qk_width, torch.float64, config.rope_base)
    info = SequenceInfo(angles if config.rel_pos else None, segment_ids_BT)
    if config.by_document:
        info.cu_seqlens = cu_seqlens(segment_ids_BT)
    return info


def agree_with_definition(config: ModelConfig, rows: list[list[int]], seed: int) -> None:
    """The first layer's output and the gradient in every weight and in x. rows: documents, and -1 at the end for
    padding, which neither is asked nor gets a gradient."""
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
    read: list[Tensor] = []
    for norm in (module for module in layer.modules() if isinstance(module, ReadNorm)):
        norm.register_forward_hook(lambda norm, inputs, out: read.append(inputs[0].detach().square().mean(-1)))
    found = layer(x_BTD, ids_BT)
    # The norm divides by the size of what is read, and multiplies rounding so: no example reads nearly nothing.
    assume(all(bool(((square == 0) | (square > 1e-5)).all()) for square in read))
    wanted = torch.stack([layer_output(config, w, x_TD, row) for x_TD, row in zip(x_BTD, rows, strict=True)])
    assert error(found[ids_BT >= 0], wanted[ids_BT >= 0]) <= EXACT
    leaves = {"x": x_BTD} | w
    found_by, wanted_by = (torch.autograd.grad((out * cotangent).sum(), list(leaves.values()), materialize_grads=True)
                           for out in (found, wanted))
    for name, a, b in zip(leaves, found_by, wanted_by, strict=True):
        assert error(a, b) <= EXACT, name


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
BOTH_WAYS = [(name, causal) for name in DEFINED for causal in (True, False)
             if not (causal and name in BIDIRECTIONAL) and name not in ("flash rotated bias", "performer-matmul")]


@pytest.mark.parametrize(("name", "causal"), [
    case_of(name, causal, rest=name in SINGLE_HEAD and not causal) for name, causal in BOTH_WAYS])
@settings(max_examples=4)
@given(data=st.data(), seed=SEEDS, chunk_size=st.sampled_from([1, 2, 3, 4, 5]))
def test_a_layer_is_its_definition(name: str, causal: bool, data: st.DataObject, seed: int, chunk_size: int) -> None:
    config = replace(DEFINED[name], causal=causal)
    if config.chunk_size is not None:
        config = replace(config, chunk_size=chunk_size)
    agree_with_definition(config, data.draw(rows_of_documents(packed=name not in UNPACKED)), seed)


@pytest.mark.parametrize("name", ["flash", "flash-quad", "transformer++", "performer", "combiner", "mc-tfm++"])
@torch.no_grad()
def test_the_base_of_rope(name: str) -> None:
    """A model and a layer by itself turn by the angles of their base."""
    config = replace(CONFIGS[name], rope_base=50.0, n_layers=1)
    model, x_BTD = random_model(config), random_x(11)
    info = info_of(config, torch.zeros(2, 11, dtype=torch.long))
    assert all(map(torch.equal, sequence_info(config, torch.arange(11)[None], torch.float64).rotary, info.rotary))
    slowest_T = torch.arange(11, dtype=torch.float64) * 50.0 ** -(1 - 2 / config.qk_width)
    assert error(info.rotary[0][0, :, -1], slowest_T.sin()) <= EXACT
    layer = model.layers[0]
    assert error(layer(x_BTD), sum(layer.add(x_BTD, None, info))) <= EXACT
    other = info_of(replace(config, rope_base=10_000.0), torch.zeros(2, 11, dtype=torch.long))
    assert error(layer(x_BTD), sum(layer.add(x_BTD, None, other))) > 1e-3


def first_layer_output(config: ModelConfig, x_BTD: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
    layer = random_model(replace(config, n_layers=1)).layers[0]
    if weights is not None:
        layer.load_state_dict(weights)
    return layer(x_BTD, torch.zeros(x_BTD.shape[:2], dtype=torch.long)) - x_BTD


def random_x(length: int) -> Tensor:
    return torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("chunk_size", "parts", "causal"), [
    (64, "local", True), (128, "global", True), (256, "both", True), (512, "both", False), (600, "both", True),
    *rest(*itertools.product((64, 128, 512, 600), ("both", "local", "global"), (True, False)))])
@torch.no_grad()
def test_chunk_sizes_of_the_paper(chunk_size: int, parts: str, causal: bool) -> None:
    """64 to 512 and C = T, whole and as LocalOnly and GlobalOnly: the layer is one matrix A over the row, relu^2 where
    a chunk is shared and q k / number of tokens before it in other chunks."""
    config = replace(FLASH, chunk_size=chunk_size, chunk_parts=parts, causal=causal, n_layers=1, context=600)
    layer = random_model(config).layers[0]
    x_BTD, length = random_x(600), 600
    position = torch.arange(length)
    info = info_of(config, torch.zeros(2, length, dtype=torch.long))
    u_BTE, v_BTE, z_BTS = split_uvz(layer.in_proj(layer.norm(x_BTD)), config.query_key_dim)
    gamma, beta = layer.scale_offset.gamma, layer.scale_offset.beta
    q_quad, k_quad, q_lin, k_lin = make_heads(z_BTS, gamma, beta, *info.rotary)
    offset, chunk = position - position[:, None], position // chunk_size
    bias = layer.rel_pos_bias.at(offset.clamp(1 - chunk_size, chunk_size - 1))
    local = F.relu(q_quad @ k_quad.mT / chunk_size + bias).square()
    local = local * (chunk == chunk[:, None]) * ((offset <= 0) | (not causal))
    earlier = (chunk < chunk[:, None]) | (not causal)
    across = q_lin @ k_lin.mT * earlier / earlier.sum(-1, keepdim=True).clamp(min=1)
    a_BTT = {"both": local + across, "local": local, "global": across}[parts]
    wanted = x_BTD + layer.out_proj(u_BTE * (a_BTT @ v_BTE))
    assert error(layer(x_BTD), wanted) <= EXACT


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_overlap_with_one_chunk_is_none(causal: bool) -> None:
    """Where there is no other chunk; the table of position biases is longer, its middle is the one without overlap."""
    config = replace(FLASH, chunk_size=11, causal=causal, n_layers=1)
    weights = random_model(replace(config, overlap=True)).layers[0].state_dict()
    cut = weights | {"rel_pos_bias.weight": weights["rel_pos_bias.weight"][11:-11]}
    for length in (1, 7, 11):
        x_BTD = random_x(length)
        overlapping = first_layer_output(replace(config, overlap=True), x_BTD, weights)
        assert error(overlapping, first_layer_output(config, x_BTD, cut)) <= EXACT
    longer_BTD = random_x(13)
    assert error(first_layer_output(replace(config, overlap=True), longer_BTD, weights),
                 first_layer_output(config, longer_BTD, cut)) > 1e-3


@pytest.mark.parametrize("preset", ["flash", "flash-quad"])
def test_softmax_for_cls_changes_the_first_token_alone(preset: str) -> None:
    config = replace(FLASH if preset == "flash" else FLASH_QUAD, causal=False)
    x_BTD = random_x(3 * CHUNK + 1)
    plain, cls = (first_layer_output(replace(config, cls_softmax=on), x_BTD) for on in (False, True))
    assert torch.equal(plain[:, 1:], cls[:, 1:])
    assert error(plain[:, :1], cls[:, :1]) > 1e-3
    with pytest.raises(UsageError, match="bidirectional"):
        replace(config, cls_softmax=True, causal=True)


def test_first_to_all_changes_the_first_tokens_of_chunks() -> None:
    """Each of them, and no other token; the softmax's share is a mean of v over the row: it sees the last token too."""
    config = replace(FLASH, causal=False, chunk_parts="local")
    weights = random_model(replace(config, first_to_all=True, n_layers=1)).layers[0].state_dict()
    cut = weights | {name: weights[name][:4] for name in ("scale_offset.gamma", "scale_offset.beta")}
    x_BTD = random_x(3 * CHUNK + 1)
    first = torch.arange(x_BTD.shape[1]) % CHUNK == 0
    plain, more = first_layer_output(config, x_BTD, cut), first_layer_output(
        replace(config, first_to_all=True), x_BTD, weights)
    assert error(plain[:, ~first], more[:, ~first]) <= EXACT
    assert ((plain - more)[:, first].abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_mixed_chunks_without_a_linear_part_are_the_transformer(causal: bool) -> None:
    """MC-TFM++ with one chunk, and its linear part scaled to nothing, is Transformer++ with the same weights."""
    config = model_config("mc-tfm++", n_layers=2, d_model=8, n_heads=2, vocab_size=13, context=24, chunk_size=24,
                          causal=causal)
    mixed = random_model(config)
    plain = random_model(replace(config, attn_type="quadratic", chunk_size=None))
    weights = mixed.state_dict()
    for name in [name for name in weights if "scale_offset" in name]:
        weights[name].zero_()
        del weights[name]
    plain.load_state_dict(weights)
    ids_BT = random_ids(2, 24)
    assert error(mixed(ids_BT), plain(ids_BT)) <= EXACT
    extra = sum(p.numel() for p in mixed.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == 2 * 4 * 8  # a layer has scales and offsets for q and k, d_model each


def test_learned_weights_read_the_chunks_before() -> None:
    """Uniform weights of 1 / their number are the mean of FLASH: what is learned is only how chunks are weighed."""
    config = replace(FLASH, n_layers=1, chunk_parts="global", context=4 * CHUNK)
    weights = random_model(replace(config, chunk_pooling="attention")).layers[0].state_dict()
    for name in ("gamma", "beta"):
        weights[f"chunk_scale_offset.{name}"].zero_()
    for name in ("a", "b"):
        weights[f"chunk_bias.{name}"].zero_()
    x_BTD = random_x(4 * CHUNK)
    plain = {name: value for name, value in weights.items() if not name.startswith("chunk_")}
    nothing = first_layer_output(replace(config, chunk_pooling="attention"), x_BTD, weights)
    assert error(nothing, weights["out_proj.bias"].expand_as(nothing)) <= EXACT
    weights["chunk_scale_offset.beta"].fill_(2 / 4**0.5)  # q k = 4, divided by n = 4 chunks: relu(1)^2 = 1
    found = first_layer_output(replace(config, chunk_pooling="attention"), x_BTD, weights)
    wanted = first_layer_output(config, x_BTD, plain)
    bias = weights["out_proj.bias"]
    n_before = torch.arange(4 * CHUNK) // CHUNK
    assert error(found - bias, (wanted - bias) * n_before[:, None]) <= EXACT


def test_gates_of_short_types_are_made_in_float32() -> None:
    """The sums of thousands of them divide what is read."""
    made = torch.randn(1026, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate_BTH, exact_BTH = (write_gate(x[None, :1024], x[1024], x[1025, :2]) for x in (made, made.double()))
    assert gate_BTH.dtype == torch.float32 and (gate_BTH - exact_BTH).abs().max() < 1e-6


def test_what_is_read_has_the_size_of_its_gain_however_small_it_was() -> None:
    """In float32, and so has its gradient; 0 stays 0."""
    norm = ReadNorm(replace(FLASH, linear_norm=True))
    norm.init_weights()
    generator = torch.Generator().manual_seed(0)
    x, cotangent = torch.randn(2, 3, 5, norm.gain.shape[1], generator=generator)
    x[0, 0] = 0
    (whole, by_x), (small, by_small) = (
        (norm(leaf), torch.autograd.grad(norm(leaf), leaf, cotangent)[0])
        for leaf in (x.requires_grad_(), (x.detach() * 2.0**-27).requires_grad_()))
    assert not small[0, 0].any() and not by_small[0, 0].any() and small.square().mean(-1)[1, 0] > 0.08
    torch.testing.assert_close(small, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(by_small * 2.0**-27, by_x, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [case_of(name) for name in DEFINED if name != "flash rotated bias"])
def test_bfloat16_is_near(name: str) -> None:
    """Under autocast, as in training and evaluation: the loss and every gradient are near those of float32, and with
    bfloat16 weights the output too."""
    torch.manual_seed(0)
    config = replace(DEFINED[name], d_model=32, query_key_dim=16, context=64)
    model, ids_BT = LanguageModel(config), random_ids(2, 50)
    segment_ids_BT = torch.zeros_like(ids_BT) if name in UNPACKED else torch.arange(50).expand(2, -1) // 17
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(model(ids_BT, segment_ids_BT).float().flatten(0, 1), ids_BT.roll(-1, 1).flatten())
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()),
                                                                             materialize_grads=True)]))
    full, low = gradients
    assert low.dtype == torch.float32
    # The norm divides by the size of what is read, which may be near 0: then it amplifies bfloat16's rounding.
    assert (low - full).norm() / full.norm() < (0.2 if config.linear_norm else 0.05)
    with torch.no_grad():
        wanted_BTV = model(ids_BT, segment_ids_BT)
        found_BTV = model.bfloat16()(ids_BT, segment_ids_BT)
        assert found_BTV.dtype == torch.bfloat16
        assert (found_BTV.float() - wanted_BTV).norm() / wanted_BTV.norm() < 0.05
        if config.decodes:
            state = model.decoding_state(2)
            whole = model.hidden(ids_BT)
            pieces = [model.extend(ids_BT[:, :21], torch.tensor([21, 21]), state)]
            pieces += [model.extend(ids_BT[:, t : t + 1], torch.tensor([1, 1]), state) for t in range(21, 50)]
            assert (torch.cat(pieces, 1).float() - whole.float()).norm() / whole.float().norm() < 0.05
