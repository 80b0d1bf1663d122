"""float16 in the reference and in models: neither long sums nor large numbers overflow."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lineartime.model.attention.performer import performer_attention
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import LanguageModel
from lineartime.model.layers import ResidualLayer, sequence_info
from lineartime.model.mhsa import FeedForward
from lineartime.ops import ablations, reference
from lineartime.weights.generation.generate import decode_step, prefill
from lineartime.weights.load import load_model
from marks import rest
from tiny_models import BIDIRECTIONAL, CONFIGS, UNPACKED, random_ids, random_model

LONG, CHUNK = 65_536, 256


def random(*shape: int, scale: float, mean: float = 1.0, seed: int) -> Tensor:
    """Numbers that float16 has, as float64."""
    made = scale * (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean)
    return made.half().double()


def error(half: Tensor, exact: Tensor) -> float:
    assert half.dtype in (torch.float16, torch.float32) and half.isfinite().all()
    return float((half.double() - exact).norm() / exact.norm())


def ids_of(n_chunks: int, chunk: int) -> Tensor:
    """A short document, then a long one."""
    return (torch.arange(n_chunks * chunk) >= 40).long().view(1, n_chunks, chunk)


@pytest.mark.parametrize(("size", "documents", "causal"), [(0.005, False, True), (4.0, True, True), *rest(
    (0.005, True, False), (4.0, False, False))])
def test_linear_attention_over_a_long_row(causal: bool, documents: bool, size: float) -> None:
    """At the size of initial heads, and of heads whose sums of k v exceed 65,504."""
    q, k, v = (random(1, LONG // CHUNK, CHUNK, 16, scale=scale, seed=seed)
               for seed, scale in enumerate((size, size, 1.0 if size < 1 else 8.0)))
    ids = ids_of(LONG // CHUNK, CHUNK) if documents else None
    exact = reference.linear_attention(q, k, v, causal=causal, segment_ids_BGC=ids)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            half = reference.linear_attention(q.half(), k.half(), v.half(), causal=causal, segment_ids_BGC=ids)
        assert error(half, exact) < 1e-3


@pytest.mark.parametrize("causal", [True, False])
def test_other_sums_over_a_long_row(causal: bool) -> None:
    q, k, v = (random(1, LONG // CHUNK, CHUNK, 16, scale=scale, seed=seed)
               for seed, scale in enumerate((0.005, 0.005, 1.0)))
    paper = {"causal": causal, "segment_ids_BGC": ids_of(LONG // CHUNK, CHUNK)}
    exact = ablations.paper_linear_attention(q, k, v, **paper)
    assert error(ablations.paper_linear_attention(q.half(), k.half(), v.half(), **paper), exact) < 1e-3
    heads = [x.flatten(1, 2)[:, :, None] for x in (4000 * q, 4000 * k, v)]
    exact = performer_attention(*heads, causal=causal)
    with torch.autocast("cpu", torch.float16):
        assert error(performer_attention(*(x.half() for x in heads), causal=causal), exact) < 2e-3


@pytest.mark.parametrize("attention", [reference.quadratic_attention, *(
    partial(ablations.ablated_quadratic_attention, kernel=kernel) for kernel in ("relu2", "softmax"))])
def test_scores_whose_square_exceeds_float16(attention: Callable[..., Tensor]) -> None:
    """q k^T / n of about 1,000; the values are small enough for the result to be a float16."""
    q, k, v = (random(1, 2, CHUNK, 16, scale=scale, seed=seed) for seed, scale in enumerate((100.0, 100.0, 1e-5)))
    w = random(2 * CHUNK - 1, scale=1.0, seed=3)
    how = {"scale_len": CHUNK, "causal": True, "segment_ids_BGC": ids_of(2, CHUNK)}
    exact, half = (attention(*(x.to(dtype) for x in (q, k, v, w)), **how) for dtype in (torch.float64, torch.float16))
    assert error(half, exact) < 1e-3


@pytest.mark.parametrize("name", ["flash", "flash-quad", "flash sum", "flash overlap", "flash learned weights",
                                  "flash cls", "flash first to all", "transformer++ relu2", "mc-tfm++", "performer",
                                  "flash+"])
def test_a_model_of_large_heads(name: str) -> None:
    """All of it in float16, with scores above 256, at once and token by token."""
    config = (CONFIGS | UNPACKED | BIDIRECTIONAL)[name]
    exact = random_model(config)
    with torch.no_grad():
        for layer in exact.layers[::exact.layers_per_block]:  # those with attention
            if isinstance(layer, GatedAttentionUnit):
                layer.scale_offset.gamma.mul_(40)
                values = slice(config.d_inner, 2 * config.d_inner)
            else:
                layer.in_proj.weight[: 2 * config.d_model].mul_(12)
                values = slice(2 * config.d_model, 3 * config.d_model)
            layer.in_proj.weight[values].mul_(1e-3)
            layer.in_proj.bias[values].mul_(1e-3)
            layer.out_proj.weight.mul_(1e-2)
    half = LanguageModel(config).half().eval()
    half.load_state_dict({key: value.half() for key, value in exact.state_dict().items()})
    ids = random_ids(2, 11)
    with torch.no_grad():
        expected = exact(ids)
        assert error(half(ids), expected) < 3e-3
    if config.decodes:
        logits, state = prefill(half, ids[:, :6].tolist())
        for n in range(6, 11):
            assert error(logits, expected[:, n - 1]) < 3e-3
            logits = decode_step(half, ids[:, n], state)


def test_the_model_that_ships() -> None:
    """bfloat16 is ten times as far from float32."""
    exact, half = load_model("small")[0].eval(), load_model("small")[0].half().eval()
    ids = random_ids(1, 300, vocab_size=exact.config.vocab_size)
    with torch.no_grad():
        expected = exact(ids)
        assert error(half(ids), expected) < 2e-3
        assert (half(ids, targets=ids) - exact(ids, targets=ids)).abs().max() < 0.1
        with torch.autocast("cpu", torch.float16):
            assert error(exact(ids), expected) < 2e-3
        logits, state = prefill(half, ids[:, :245].tolist())
        next_BV = [decode_step(half, ids[:, n], state) for n in range(245, 270)]  # over the end of a chunk
        assert error(torch.stack([logits, *next_BV], 1), expected[:, 244:270]) < 2e-3


@pytest.mark.parametrize("kind", [FeedForward, GatedAttentionUnit])
def test_what_a_layer_adds_is_larger_than_float16(kind: type[ResidualLayer]) -> None:
    """The input of W_o too."""
    torch.manual_seed(0)
    layer, x = kind(d_model=8, init_std=1.0).double(), random(2, 5, 8, scale=1.0, seed=1)
    info = sequence_info(layer.config, torch.arange(5)[None], torch.float32)
    with torch.no_grad():
        layer.in_proj.weight.mul_(2000)
        layer.out_proj.bias.fill_(3.0)
        exact = layer.add(x, None, info)[1]
        assert exact.abs().max() > 1e6
        assert error(layer.half().add(x.half(), None, info)[1], exact) < 3e-3
