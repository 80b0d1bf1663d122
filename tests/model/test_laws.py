"""The laws of the layers, in float64: what a position sees, what changes nothing, what stays
accurate and cheap.

`influence` is the Jacobian of the hidden states by the embeddings, one number per pair of
positions. `reachable` says of every pair whether that number must be zero or must not be: a model
that sees nothing fails too."""

import itertools
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal, localcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lineartime.base.errors import UsageError
from lineartime.config import PRESETS, ModelConfig, model_config
from lineartime.model.language_model import LanguageModel
from lineartime.model.layers import RelPosBias, ScaledSin, sequence_info
from lineartime.ops import reference
from lineartime.ops.reference import toeplitz
from marks import rest
from tiny_models import (
    BIDIRECTIONAL,
    BOTH_GRIDS,
    CHUNK,
    CONFIGS,
    CONTEXT,
    UNPACKED,
    random_ids,
    random_model,
    same,
    with_end,
)
from token_by_token import add_up_states, turned

SEEDS = st.integers(0, 2**32 - 1)
FLASH = CONFIGS["flash"]
EVERY = CONFIGS | UNPACKED | BIDIRECTIONAL
CAUSAL_ONES = [*PRESETS, "performer blocks", "transformer++ relu2", "flash softmax", "flash heads", "flash overlap",
               "flash local", "flash global", "flash key conv", "flash local key conv", "flash rope base",
               "flash learned weights"]
TURNED = ["transformer++", "performer", "combiner", "mc-tfm++", "flash-quad", "flash", "flash+", "flash overlap",
          "flash key conv", "flash local key conv", "flash learned weights", "flash cls", "flash-quad cls",
          "flash first to all"]
"""Models that the laws ask as bidirectional ones too: each kind of attention, each option that
looks ahead or behind. The combinations of options are held to their definition in
test_ablations.py."""
BOTH_WAYS = [(name, True) for name in CAUSAL_ONES] + [(name, False) for name in TURNED]
EVERY_MODEL = pytest.mark.parametrize(
    ("name", "causal"), BOTH_WAYS, ids=[f"{name}-{'causal' if c else 'bidirectional'}" for name, c in BOTH_WAYS])


def influence(config: ModelConfig, seed: int, segment_ids_T: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Entry [i, j]: the largest derivative of hidden state i, along a random direction, by a
    component of embedding j.

    The rows of the batch are equal and row i is asked about position i, so one backward pass fills
    the table. Every place of every row reads its own line of the embeddings. Position biases are
    made positive: relu hides no pair."""
    length = len(segment_ids_T)
    model = random_model(replace(config, vocab_size=length * length), seed)
    with torch.no_grad():
        model.embed.weight.copy_(model.embed.weight[:length].repeat(length, 1))
        for bias in (module for module in model.modules() if isinstance(module, RelPosBias)):
            if bias.n < 512:
                bias.weight.abs_().add_(10.0)
            else:  # the cosine that turns slowest, once in 50,000 positions
                bias.a[63], bias.b[63] = 10.0, 10.0
    ids_TT = torch.arange(length * length).view(length, length)
    token_mask_TT = None if valid_T is None else valid_T.expand(length, length)
    hidden_TTD = model.hidden(ids_TT, segment_ids_T.expand(length, length), token_mask_TT)
    direction_D = torch.randn(config.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    asked = (hidden_TTD.diagonal().T @ direction_D).sum()
    by_embedding, = torch.autograd.grad(asked, model.embed.weight)
    return by_embedding.view(length, length, -1).abs().amax(-1)


def reachable(config: ModelConfig, segment_ids_T: Tensor) -> Tensor:
    """Entry [i, j]: whether position j reaches position i through `n_layers` layers."""
    position = torch.arange(len(segment_ids_T))
    document = segment_ids_T[:, None] == segment_ids_T
    before = position[:, None] >= position if config.causal else torch.ones_like(document)
    one_layer = document & before
    if config.chunk_size is not None:
        chunk = position // config.chunk_size
        if config.chunk_parts == "local":
            one_layer &= (chunk[:, None] - chunk).abs() <= config.overlap
        if config.chunk_parts == "local" and config.local_key_conv:  # a key has been made from others too
            distance = position[:, None] - position if config.causal else 2 * (position[:, None] - position).abs()
            window = document & (distance >= 0) & (distance < config.key_conv)
            one_layer = one_layer.double() @ window.double() > 0
        if config.chunk_parts == "global" and config.causal:
            one_layer &= (chunk[:, None] > chunk) | (position[:, None] == position)
        if config.first_to_all:
            one_layer |= document & (position % config.chunk_size == 0)[:, None]
    return torch.linalg.matrix_power(one_layer.double(), config.n_layers) > 0


@pytest.mark.parametrize("chunk_size", [1, 7, 512])
def test_one_chunk_is_flash_quad(chunk_size: int) -> None:
    flash = random_model(replace(FLASH, chunk_size=chunk_size, end_of_document=0))
    quad = random_model(replace(CONFIGS["flash-quad"], attn_scale_len=chunk_size, end_of_document=0))
    # FLASH's first two heads are those of the quadratic half.
    quad.load_state_dict({name: weight[:2] if "scale_offset" in name else weight
                          for name, weight in flash.state_dict().items()})
    for length in {1, min(chunk_size, CONTEXT)}:
        ids_BT = random_ids(2, length, vocab_size=6)
        assert same(flash(ids_BT), quad(ids_BT))


@st.composite
def packings(draw: st.DrawFn, longest: int = CONTEXT) -> Tensor:
    """Segment ids of documents of one token to three chunks, numbered from anywhere with gaps."""
    ids, document = [], draw(st.integers(0, 3))
    lengths = st.one_of(st.integers(1, 3 * CHUNK), st.sampled_from([1, CHUNK, 2 * CHUNK]))
    for length in draw(st.lists(lengths, min_size=1, max_size=8)):
        ids += [document] * length
        document += draw(st.integers(1, 3))
    return torch.tensor(ids[:longest])


@st.composite
def padded(draw: st.DrawFn, longest: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Segment ids with padding anywhere, whose ids are a neighbour's, and where tokens are."""
    segment_ids_T = draw(packings(longest - 6))
    valid, documents = [], []
    for document in segment_ids_T.tolist():
        n_padding = draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2])) if valid.count(False) < 4 else 0
        valid += [False] * n_padding + [True]
        documents += [document] * (n_padding + 1)
    n_padding = draw(st.integers(0, longest - len(valid)))
    return torch.tensor(documents + documents[-1:] * n_padding), torch.tensor(valid + [False] * n_padding)


@EVERY_MODEL
@settings(max_examples=6)
@given(packing=padded(), seed=SEEDS)
def test_no_document_sees_another(name: str, causal: bool, packing: tuple[Tensor, Tensor], seed: int) -> None:
    """Exact zeros between documents and from padding, and nowhere else."""
    segment_ids_T, valid_T = packing[0] * (name not in UNPACKED), packing[1]
    config = replace(EVERY[name], causal=causal)
    table = influence(config, seed, segment_ids_T, valid_T)
    seen, expected = table[valid_T][:, valid_T], reachable(config, segment_ids_T[valid_T])
    assert (seen[~expected] == 0).all(), "a position sees what it must not"
    assert (seen[expected] > 0).all(), "a position does not see what it must"
    assert (table[valid_T][:, ~valid_T] == 0).all(), "padding is seen"
    assert (table[~valid_T][:, valid_T] == 0).all(), "padding sees"


@pytest.mark.parametrize("block", [2, 8])
@settings(max_examples=20)
@given(last=st.lists(st.lists(st.integers(0, 4), min_size=20, max_size=20).map(sorted), min_size=1, max_size=3),
       n_chunks=st.integers(1, 20), leaving=st.booleans(), seed=st.integers(0, 9))
def test_states_of_chunks_are_sums(last: list[list[int]], n_chunks: int, leaving: bool, seed: int, block: int) -> None:
    """Blocks of any size, blocks of blocks too: what enters and leaves chunks, and gradients."""
    last_BG = torch.tensor(last)[:, :n_chunks]
    entering_BP = F.pad(last_BG if leaving else last_BG[:, :-1], [1, 0])
    generator = torch.Generator().manual_seed(seed)
    kv_BGSE = torch.randn(*last_BG.shape, 2, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(*entering_BP.shape, 2, 3, dtype=torch.float64, generator=generator)
    with mock.patch.object(reference, "SCAN_BLOCK", block):
        states = reference.sum_states(kv_BGSE, last_BG, entering_BP)
    wanted = add_up_states(kv_BGSE, last_BG, entering_BP) + 0 * kv_BGSE.sum()  # for a gradient where nothing enters
    assert same(states, wanted)
    assert same(*(torch.autograd.grad((x * weight).sum(), kv_BGSE)[0] for x in (states, wanted)))


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_one_document_needs_no_ids(pooling: str) -> None:
    """More chunks than a block of the scan has."""
    q, k = torch.randn(2, 2, reference.SCAN_BLOCK + 3, 4, 3, dtype=torch.float64)
    v = torch.randn(2, reference.SCAN_BLOCK + 3, 4, 5, dtype=torch.float64)
    ids = torch.zeros(q.shape[:3], dtype=torch.long)
    wanted = reference.linear_attention(q, k, v, causal=True, segment_ids_BGC=ids, pooling=pooling)
    assert same(reference.linear_attention(q, k, v, causal=True, pooling=pooling), wanted)


@pytest.mark.parametrize("name", ["flash", "flash-quad", "transformer++", "performer", "combiner", "mc-tfm++",
                                  "flash softmax"])
def test_wrong_segment_ids_and_shapes_are_refused(name: str) -> None:
    """Documents of such ids would see each other. A mask may call any id padding."""
    model, ids_BT = random_model(CONFIGS[name]), random_ids(2, 6)
    layer, first = model.layers[0], [0, 0, 0, 1, 1, -1]
    for wrong in ([0, 0, 1, 1, 0, 0], [2, 2, 2, 1, 1, 1], [0, 0, -1, 0, 0, 0], [-1] + [0] * 5, [0, 0, 0, 0, -2, -2],
                  [0] * 5 + [2**31], [2**31] + [-1] * 5):
        wrong_BT = torch.tensor([first, wrong])
        with pytest.raises(UsageError, match=r"wrong segment_ids: row 1: .* at token \d; number"):
            model(ids_BT, wrong_BT)
        with pytest.raises(UsageError, match="wrong segment_ids"):
            layer(model.embed(ids_BT), wrong_BT)
        valid_BT = torch.tensor([[True] * 5 + [False], [False] * 5 + [True]]) & (wrong_BT >= 0)
        model(ids_BT, wrong_BT.to(torch.uint16), token_mask_BT=valid_BT)
    for right_BT in (torch.tensor([first, [3] * 6]), torch.tensor([[0] * 6, [3] * 6], dtype=torch.uint8)):
        assert torch.equal(model(ids_BT, right_BT), model(ids_BT, right_BT.long()))
        layer(model.embed(ids_BT), right_BT)
    ids_BT = ids_BT[:1, :2]
    for wrong in ({"targets": ids_BT.T}, {"targets": ids_BT[0]}, {"segment_ids_BT": torch.zeros_like(ids_BT.T)},
                  {"token_mask_BT": torch.ones(2, 1, dtype=torch.bool)}):
        with pytest.raises(UsageError, match="wrong shape"):
            model(ids_BT, **wrong)
    with pytest.raises(UsageError, match="wrong shape of ids"):
        model(ids_BT[0])
    for wrong in ({"segment_ids": ids_BT.T}, {"token_mask": ids_BT[0]}):
        with pytest.raises(UsageError, match="wrong shape"):
            layer(model.embed(ids_BT), **wrong)


@pytest.mark.parametrize("given", ["segment_ids", "token_mask"])
@pytest.mark.parametrize("name", ["flash", "flash-quad", "flash, own grid", "performer", "combiner"])
def test_documents_and_padding_under_vmap_and_torch_export(name: str, given: str) -> None:
    """As for gradients of single examples. Where documents are read one by one both are refused."""
    layer, number_BT = random_model(BOTH_GRIDS[name]).layers[0], (torch.rand(3, 9) < 0.5).long().sort(1).values
    x_BTD = torch.randn(3, 9, 8, dtype=torch.float64)

    def gradient(x_TD: Tensor, number_T: Tensor) -> Tensor:
        return (layer(x_TD[None], **{given: number_T[None]})[0] * number_T[:, None]).sum()

    by_example, words = torch.func.vmap(torch.func.grad(gradient)), f"vmap, traces and exports hide.*: {given}; call it"
    if name in ("flash", "flash-quad"):
        assert same(by_example(x_BTD, number_BT), torch.stack([*map(torch.func.grad(gradient), x_BTD, number_BT)]))
        words = f"wrong {given}: under vmap; "
    else:
        with pytest.raises(UsageError, match=words):
            torch.export.export(layer, (x_BTD,), {given: number_BT})
    with pytest.raises(UsageError, match=words):
        by_example(x_BTD, number_BT - 2)


@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.float32).min, -10000, -1, 0.5, 2, math.nan, 0.0])
def test_a_mask_is_of_0_and_1(number: float) -> None:
    """A mask that PyTorch's attention adds to scores has 0 for a token."""
    model, valid_BT = random_model(CONFIGS["flash"]), torch.tensor([[True, True], [True, False]])
    x_BTD = model.embed(random_ids(2, 2))
    for kind in (torch.uint8, torch.long, torch.bfloat16, torch.float64):
        assert torch.equal(*(model.layers[0](x_BTD, token_mask=mask_BT) for mask_BT in (valid_BT.to(kind), valid_BT)))
    wrong_BT = torch.zeros(2, 2, dtype=torch.tensor(number).dtype).masked_fill(~valid_BT, number)
    for call in (partial(model, random_ids(2, 2), token_mask_BT=wrong_BT),
                 partial(model.layers[0], x_BTD, token_mask=wrong_BT)):
        with pytest.raises(UsageError, match=r"wrong token_mask: row .* at token .; 1 or True is for a token"):
            call()


def test_learned_chunk_weights_are_for_one_document() -> None:
    with pytest.raises(UsageError, match="learned chunk weights are for rows of one document"):
        random_model(UNPACKED["flash learned weights"]).hidden(random_ids(1, 2), torch.tensor([[0, 1]]))


@EVERY_MODEL
def test_no_rows_and_no_tokens(name: str, causal: bool) -> None:
    """Empty results of the right shape, and zero gradients for the weights that are used."""
    model = random_model(replace(EVERY[name], causal=causal))
    parameters = list(model.parameters())
    used = torch.autograd.grad(model(random_ids(1, 9)).sum(), parameters, allow_unused=True)
    for n_rows, n_tokens in ((1, 0), (0, 3)):
        ids_BT = torch.zeros(n_rows, n_tokens, dtype=torch.long)
        made = [model(ids_BT, **more) for more in (
            {}, {"token_mask_BT": torch.ones_like(ids_BT).bool()}, {"segment_ids_BT": ids_BT})]
        made += [random_model(with_end(model.config))(ids_BT)]
        assert all(logits_BTV.shape == (n_rows, n_tokens, 13) for logits_BTV in made)
        made += [layer(model.embed(ids_BT)) for layer in model.layers] + [model(ids_BT, targets=ids_BT)]
        loss = sum(out.sum() for out in made)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        assert loss == 0 and [g is None for g in found] == [g is None for g in used]
        assert all((g == 0).all() for g in found if g is not None)
    no_numbers = torch.zeros(1, 9, dtype=torch.long, device="meta")
    assert model.to("meta")(no_numbers, targets=no_numbers).shape == (1, 9)


@EVERY_MODEL
@settings(max_examples=6)
@given(rows=st.lists(padded(), min_size=1, max_size=3), seed=SEEDS, data=st.data())
def test_padding_and_batch_change_nothing(name: str, causal: bool, rows: list[tuple[Tensor, Tensor]], seed: int,
                                          data: st.DataObject) -> None:
    """Rows of different lengths with padding at the left, at the right and in the middle, in a
    batch of any order: each real token's logits are those of its row alone, whose documents are
    given by number. Padding may hold any token, the end of a document too. A row of padding alone
    stays finite."""
    config = replace(EVERY[name], causal=causal)
    by_number, model = random_model(config, seed), random_model(with_end(config), seed)
    width = max(len(valid_T) for _, valid_T in rows)
    valid_BT = torch.stack([F.pad(valid_T, (0, width - len(valid_T)), value=False) for _, valid_T in rows]
                           + [torch.zeros(width, dtype=torch.bool)])
    ids_BT = random_ids(*valid_BT.shape, seed=seed, vocab_size=5)
    logits_BTV = model(ids_BT, token_mask_BT=valid_BT)
    assert logits_BTV.isfinite().all()
    for row, valid_T in enumerate(valid_BT[:-1]):
        alone_1T = ids_BT[row, valid_T][None]
        documents_1T = (alone_1T == 0).cumsum(1) + 3  # which number it is means nothing
        alone_TV = by_number(alone_1T, None if name in UNPACKED else documents_1T)[0]
        assert same(logits_BTV[row, valid_T], alone_TV)
    order_B = torch.tensor(data.draw(st.permutations(range(len(valid_BT)))))
    assert same(model(ids_BT[order_B], token_mask_BT=valid_BT[order_B]), logits_BTV[order_B])


@EVERY_MODEL
@settings(max_examples=2)
@given(packing=padded(), seed=SEEDS)
def test_layers_take_documents_and_padding_as_the_model_does(name: str, causal: bool, packing: tuple[Tensor, Tensor],
                                                             seed: int) -> None:
    """The layers one after another are the model, in value and gradient. Padding may be NaN."""
    segment_ids_T, valid_T = packing
    segment_ids_BT, valid_BT = segment_ids_T[None] * (name not in UNPACKED), valid_T[None]
    model = random_model(replace(EVERY[name], causal=causal), seed)
    ids_BT, generator = random_ids(1, len(valid_T), seed=seed), torch.Generator().manual_seed(seed)
    cotangent_ND = torch.randn(int(valid_T.sum()), 8, dtype=torch.float64, generator=generator)

    def by_layers(padding: float) -> Tensor:
        x_BTD = model.embed(ids_BT) + model.abs_pos((valid_BT.cumsum(1) - 1).clamp(min=0))
        x_BTD = x_BTD.masked_fill(~valid_BT[..., None], padding)
        for layer in model.layers:
            x_BTD = layer(x_BTD, segment_ids=segment_ids_BT, token_mask=valid_BT)
            assert x_BTD.isfinite().all()
        return model.norm(x_BTD[:, valid_T])[0]

    def gradients(out_ND: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out_ND * cotangent_ND).sum(), [*model.parameters()], materialize_grads=True)

    found_ND, wanted_ND = by_layers(math.nan), model.hidden(ids_BT, segment_ids_BT, valid_BT)[0, valid_T]
    assert torch.equal(found_ND, by_layers(1e3))
    assert same(found_ND, wanted_ND) and all(map(same, gradients(found_ND), gradients(wanted_ND)))


@EVERY_MODEL
def test_longer_than_a_table(name: str, causal: bool) -> None:
    """A learned position table ends at the context, a table of position biases at n."""
    model = random_model(replace(EVERY[name], causal=causal))
    limited = name in ("transformer", "transformer++ relu2", "flash-quad", "flash-quad cls")
    assert model.config.max_len == (CONTEXT if limited else None)
    assert model(random_ids(1, CONTEXT if limited else 100)).isfinite().all()
    with pytest.raises(UsageError, match="25 tokens, the table has 24") if limited else nullcontext():
        model(random_ids(1, CONTEXT + 1))


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


def exact_sin_cos(position: int, i: int, half: int) -> tuple[float, float]:
    """sin and cos of position x 10000^(-i / half), with the angle in 60 digits."""
    with localcontext(prec=60):
        angle = float(Decimal(position) * Decimal(10000) ** (Decimal(-i) / Decimal(half)) % (2 * PI))
    return math.sin(angle), math.cos(angle)


FAR = [0, 1, 511, 65_535, 999_983, 1_000_000, 1_048_575]


@pytest.mark.parametrize("width", [64, 768])
def test_angles_far_out(width: int) -> None:
    half = width // 2
    exact = torch.tensor([[exact_sin_cos(p, i, half) for i in range(half)] for p in FAR], dtype=torch.float64)
    scaled_sin = ScaledSin(width)
    torch.nn.init.ones_(scaled_sin.scalar)
    config, position = replace(FLASH, query_key_dim=width), torch.tensor(FAR)
    for precision in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", precision):
            rotary_angles = sequence_info(config, position, torch.float32).angles[config.qk_width]
            embedding = scaled_sin(position)
        for found in (torch.stack(rotary_angles, -1), torch.stack(embedding.chunk(2, -1), -1)):
            assert found.dtype == torch.float32
            assert (found - exact).abs().max() < 1e-6


def test_bias_far_out() -> None:
    """The bias between positions around 10^6 is that of the same positions at the start."""
    bias = RelPosBias(512)
    for vector in bias.parameters():
        torch.nn.init.normal_(vector, 0, 0.5, torch.Generator().manual_seed(0))
    far = torch.tensor([999_999, -1_048_575])
    sin, cos = (torch.tensor([[exact_sin_cos(int(-p), i, 64)[k] for i in range(64)] for p in far]) for k in (0, 1))
    (a1, a2), (b1, b2) = bias.a.double().chunk(2), bias.b.double().chunk(2)
    assert (bias.at(far) - (cos.double() @ (a1 * b1 + a2 * b2) + sin.double() @ (a1 * b2 - a2 * b1))).abs().max() < 1e-5


@settings(max_examples=30)
@given(n=st.sampled_from([1, 2, 24, 511, 512, 700]), length=st.integers(1, 600), seed=SEEDS, data=st.data())
def test_position_bias_is_its_definition(n: int, length: int, seed: int, data: st.DataObject) -> None:
    """b[i, j] = w[j - i + n - 1] below 512, rope(a, i) . rope(b, j) from there on, for any row."""
    length = min(length, n) if n < 512 else length
    bias = RelPosBias(n).double()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5, torch.Generator().manual_seed(seed))
    square = toeplitz(bias(length), length)
    assert square.shape == (length, length)
    for i, j in data.draw(st.lists(st.tuples(*[st.integers(0, length - 1)] * 2), min_size=1, max_size=5)):
        expected = bias.weight[j - i + n - 1] if n < 512 else turned(bias.a, i) @ turned(bias.b, j)
        assert (square[i, j] - expected).abs() < 1e-11
        assert (bias.at(torch.tensor(j - i)) - expected).abs() < 1e-11


@pytest.mark.parametrize("n", [64, 512])
def test_position_bias_is_not_rounded_under_autocast(n: int) -> None:
    """Nor its gradients: the rotated form is a sum of terms that nearly cancel."""
    bias = RelPosBias(n)
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5, torch.Generator().manual_seed(1))
    found = []
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            w = bias(n)
        found.append([w, *torch.autograd.grad((w * torch.linspace(-1, 1, len(w))).sum(), list(bias.parameters()))])
    assert found[1][0].dtype == torch.float32 and all(map(torch.equal, *found))
    assert (bias.bfloat16()(n) == bias.float()(n)).all()


@pytest.mark.rest
def test_state_after_a_million_tokens() -> None:
    """The float32 sum over 2^20 tokens of one document against float64, and what is read."""
    config = replace(FLASH, n_layers=1, chunk_size=64, end_of_document=None)
    model64 = random_model(config)
    model32 = random_model(config).float()
    states = [model.decoding_state(1) for model in (model32, model64)]
    piece, n_tokens, worst = 2**16, 2**20, 0.0
    with torch.no_grad():
        for start in range(0, n_tokens, piece):
            ids_BN = random_ids(1, piece, seed=start)
            x32, x64 = (model.extend(ids_BN, torch.tensor([piece]), state)[0]
                        for model, state in zip((model32, model64), states, strict=True))
            worst = max(worst, float((x32 - x64).abs().max() / x64.abs().max()))
    kv32, kv64 = (state.caches[0].kv_BSE for state in states)
    assert states[0].seq_lens_B.tolist() == [n_tokens]
    assert (kv32 - kv64).abs().max() / kv64.abs().max() < 5e-5
    assert worst < 1e-5


def test_a_longer_context_costs_flash_nothing_per_token() -> None:
    """FLOPs of matrix products, per token; attention of FLASH-Quad has 2 T (s + e)."""
    flops = {}
    for preset, context in itertools.product(("flash", "flash-quad"), (512, 5120)):
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            model = LanguageModel(model_config(preset, context=context, n_layers=1))
            model.set_impl("reference")
            model(torch.zeros(1, context, dtype=torch.long))
        flops[preset, context] = counter.get_total_flops() / context
    assert flops["flash", 5120] == pytest.approx(flops["flash", 512], rel=0.01)
    assert flops["flash-quad", 5120] - flops["flash-quad", 512] == pytest.approx(2 * (5120 - 512) * (128 + 1536))


@pytest.mark.parametrize("causal", [True, *rest(False)])
def test_linear_cost(causal: bool) -> None:
    """A layer's CPU time per token within 20% from 1K to 64K tokens, with documents of about 700:
    best of at most nine. As many tokens are cut into fewer rows: memory stays the same. Masked from
    4K: rows longer than `windows.WINDOW_TOKENS` are opened twice, which is 15% by itself."""
    config = replace(FLASH, d_model=32, query_key_dim=32, chunk_size=256, causal=causal, n_layers=1)
    lengths = (2**10, 2**13, 2**16) if causal else (2**12, 2**14, 2**16)
    layer, seconds = LanguageModel(config).layers[0], dict.fromkeys(lengths, math.inf)
    for _ in range(9):
        for length, least in seconds.items():
            x_BTD = torch.randn(2**16 // length, length, 32, requires_grad=True)
            segment_ids_BT = (torch.rand(x_BTD.shape[:2]) < 1 / 700).cumsum(1)
            start = time.process_time()
            layer(x_BTD, segment_ids_BT).sum().backward()
            seconds[length] = min(time.process_time() - start, least)
        if max(seconds.values()) <= 1.2 * min(seconds.values()):
            return
    pytest.fail(f"{seconds}")
