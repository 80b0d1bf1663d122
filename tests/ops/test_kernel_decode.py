"""The kernel of a decode step, in Triton's interpreter, held to the layer's reference."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernel_law import assert_near, error, random
from lineartime.config import ModelConfig, model_config
from lineartime.model.decoding.cache import ChunkState
from lineartime.model.decoding.extend import extend_by_one
from lineartime.model.decoding.state import DecodingState
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import LanguageModel
from lineartime.ops import decode_step, reference
from lineartime.ops.reference import Heads, HeadsFromZ, rotary
from lineartime.weights.generation import generate
from lineartime.weights.generation.step import DecodeStep
from marks import rest
from tiny_models import CHUNK, CONFIGS, FLASH, random_ids, random_model, with_end

S, C, END = 128, 128, 0
BUFFERS = ("k_quad_BCS", "k_lin_BCS", "v_BCE")
MADE_BY = ("gamma_4S", "beta_4S", "sin_B1R", "cos_B1R")


@pytest.mark.parametrize("config", [with_end(FLASH, END), with_end(CONFIGS["flash+ heads"], END)])
@pytest.mark.parametrize("lengths", [(1, CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1), (CHUNK + 1, CHUNK + 1)])
def test_the_definition_is_the_layers(config: ModelConfig, lengths: tuple[int, ...],
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place in a chunk, with documents, as `decode_step` and as `DecodeStep`."""
    model = random_model(config)
    prompts = [random_ids(length, seed=length, vocab_size=6).tolist() for length in lengths]
    tokens_NB = [random_ids(len(prompts), seed=seed, vocab_size=6) for seed in range(2 * CHUNK + 2)]

    def logits(one_graph: bool) -> Tensor:
        _, state = generate.prefill(model, prompts)
        if one_graph:
            return logits_in_a_graph(model, state, tokens_NB)
        return torch.stack([generate.decode_step(model, ids_B, state) for ids_B in tokens_NB])

    expected = logits(one_graph=False)
    monkeypatch.setattr(GatedAttentionUnit, "can_step_in_kernel", lambda _, uvz, inputs, cache: inputs.single_token)
    called: list[int] = []
    monkeypatch.setattr(decode_step, "chunk_decode_step", lambda *given: called.append(1) or by_the_layer(*given))
    for one_graph in (False, True):
        assert float((logits(one_graph) - expected).abs().max() / expected.abs().max()) <= 1e-12
    assert len(called) >= 2 * len(tokens_NB) * len(model.layers)


def by_the_layer(uvz_B1F: Tensor, heads: Heads, bias_C: Tensor, k_quad_BCS: Tensor, k_lin_BCS: Tensor, v_BCE: Tensor,
                 kv_BSE: Tensor, offset_B: Tensor, first_B: Tensor, weight_B: Tensor) -> Tensor:
    """The layer's step in PyTorch, of what the kernel takes."""
    c, slot_C = len(bias_C), torch.arange(len(bias_C))
    distance_BC = slot_C - offset_B[:, None]
    at = SimpleNamespace(place=(torch.arange(len(offset_B))[:, None], offset_B[:, None]), n_open=c, full=None,
                         bias_index=(distance_BC.clamp(max=0) + c - 1)[:, None], weight_B11=weight_B[:, None, None],
                         visible_B1M=((distance_BC <= 0) & (slot_C >= first_B[:, None]))[:, None])
    u_B1E, v_B1E, made = reference.split_projection(uvz_B1F, heads)
    cache = ChunkState(k_quad_BCS, k_lin_BCS, v_BCE, kv_BSE, bias_M=bias_C)
    return u_B1E * extend_by_one(made, v_B1E, SimpleNamespace(token_position=lambda *_: at), cache,
                                 replace(FLASH, chunk_size=c), None)


@torch.no_grad()
def logits_in_a_graph(model: LanguageModel, state: DecodingState, tokens_NB: list[Tensor]) -> Tensor:
    """The logits after each token by `DecodeStep`."""
    step = DecodeStep(model)
    tensors = step.to_tensors(state)  # which each step changes
    return torch.stack([step(ids_B, tensors)[0] for ids_B in tokens_NB])


def make_inputs(dtype: torch.dtype, rows: list[tuple[int, int]], e: int, c: int = C, *, pooling: str = "mean",
                heads: bool = False) -> dict[str, Tensor]:
    """Rows given by the new token's position and its document's first. heads: made already."""
    position_B, start_B = torch.tensor(rows).T
    n, offset_B = len(rows), position_B % c
    n_carried_B = (position_B - offset_B - start_B).clamp(min=0)
    each_B = 1 / n_carried_B.clamp(min=1) if pooling == "mean" else torch.ones(n)
    sin_B1R, cos_B1R = rotary(position_B[:, None], S, dtype)
    made_by = {"gamma_4S": (random(4, S, seed=1) + 1).to(dtype), "beta_4S": random(4, S, seed=2).to(dtype),
               "sin_B1R": sin_B1R, "cos_B1R": cos_B1R}
    return {
        "uvz_B1F": random(n, 1, 2 * e + S * (not heads), seed=0).to(dtype),
        **({"heads": random(4, n, 1, S, seed=8).to(dtype)} if heads else made_by), "bias_C": random(c, seed=3) + 1,
        "k_quad_BCS": random(n, c, S, seed=4).to(dtype), "k_lin_BCS": random(n, c, S, seed=5).to(dtype),
        "v_BCE": random(n, c, e, seed=6).to(dtype), "kv_BSE": random(n, S, e, seed=7),
        "offset_B": offset_B, "first_B": start_B - position_B + offset_B,
        "weight_B": torch.where(n_carried_B > 0, each_B, 0.0)}


def call(op, inputs: dict[str, Tensor]) -> Tensor:
    """What `op` returns, of made heads or of what makes them."""
    given = {name: x for name, x in inputs.items() if name not in MADE_BY}
    return op(**({} if "heads" in given else {"heads": HeadsFromZ(*(inputs[name] for name in MADE_BY))}), **given)


def run(op, inputs: dict[str, Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """What `op` returns, and the buffers afterwards."""
    copies = {name: x.to(dtype) if dtype and x.is_floating_point() else x.clone() for name, x in inputs.items()}
    return call(op, copies), {name: copies[name] for name in BUFFERS}


def assert_held(inputs: dict[str, Tensor]) -> None:
    """The output and what is written have at most twice the reference's error; nothing else is
    written, and nothing is read where a row has nothing to see."""
    (theirs, their_buffers), (exact, exact_buffers) = (run(by_the_layer, inputs, dtype)
                                                       for dtype in (None, torch.float64))
    hidden = {name: x.clone() for name, x in inputs.items()}
    for row, (offset, first, weight) in enumerate(zip(inputs["offset_B"], inputs["first_B"], inputs["weight_B"],
                                                      strict=True)):
        for name in BUFFERS:
            hidden[name][row, offset:] = torch.nan
            hidden[name][row, : max(int(first), 0)] = torch.nan
        if weight == 0:
            hidden["kv_BSE"][row] = torch.nan
    ours, our_buffers = run(decode_step.chunk_decode_step, hidden)
    # Float32 is at its rounding in both, where twice is a matter of luck.
    floor = 1e-6 if ours.dtype == torch.float32 else 0.0
    assert_near([ours], [theirs], [exact], floor)
    rows = torch.arange(len(ours))
    for name in BUFFERS:
        written, before = our_buffers[name], hidden[name]
        new, their_new, exact_new = (x[rows, inputs["offset_B"]] for x in (
            written, their_buffers[name], exact_buffers[name]))
        assert_near([new], [their_new], [exact_new], floor, (name,))
        before[rows, inputs["offset_B"]] = new
        assert torch.equal(written.nan_to_num(7.0), before.nan_to_num(7.0)), name


ROWS = [(0, 0), (C - 1, 0), (2 * C + 33, 0), (3 * C, 2 * C + 9), (3 * C + 77, 3 * C + 45), (C + 33, C + 33)]
"""A first token, a last slot, a third chunk, documents begun before the chunk, in it, just now."""


@pytest.mark.parametrize(("dtype", "rows", "e", "columns", "more"), [
    (torch.bfloat16, ROWS[:3], 48, 32, {}), (torch.float32, ROWS[3:], 16, 32, {"pooling": "sum"}),
    (torch.float16, ROWS[3:], 16, 32, {"pooling": "sum"}), (torch.bfloat16, ROWS, 48, 32, {"heads": True}),
    (torch.bfloat16, [(2 * 256 + 128, 256 - 9)], 16, 32, {"c": 256}), (torch.bfloat16, ROWS[1:3], 112, 64, {}),
    *rest((torch.bfloat16, [(2 * 512 + 256, 512 - 9)], 16, 32, {"c": 512}), (torch.bfloat16, ROWS[1:3], 240, 128, {}))])
def test_held_to_float64(dtype: torch.dtype, rows: list[tuple[int, int]], e: int, columns: int, more: dict,
                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of heads that are made already, of longer chunks, and in the wider programs of many
    rows, whose last one has columns to spare."""
    monkeypatch.setattr(decode_step, "MANY_PROGRAMS", 4 if columns > 32 else 256)
    assert decode_step.columns_for(len(rows), e) == columns
    assert_held(make_inputs(dtype, rows, e, **more))


def test_float32_parameters_and_strides() -> None:
    """Parameters of a type of their own; inputs, but not buffers, that are not contiguous."""
    inputs = make_inputs(torch.bfloat16, ROWS[2:4], 16)
    for name in ("gamma_4S", "beta_4S", "sin_B1R", "cos_B1R"):
        inputs[name] = inputs[name].float()
    plain, buffers = run(decode_step.chunk_decode_step, inputs)
    exact = run(by_the_layer, inputs, torch.float64)[0]
    assert error(plain, exact) <= 1e-2 * float(exact.norm())
    spread = {name: x if name in BUFFERS else torch.stack([x, x], -1)[..., 0] for name, x in inputs.items()}
    assert not any(x.is_contiguous() for name, x in spread.items() if name not in BUFFERS)
    assert torch.equal(call(decode_step.chunk_decode_step, spread), plain)
    assert all(torch.equal(spread[name], buffers[name]) for name in BUFFERS)


@pytest.mark.parametrize(("dtype", "base"), [(torch.bfloat16, FLASH), (torch.float32, CONFIGS["flash+"])], ids=str)
def test_a_model_decodes_by_it(dtype: torch.dtype, base: ModelConfig) -> None:
    """Across the end of a chunk."""
    config = replace(base, n_layers=1, d_model=32, chunk_size=C, query_key_dim=S, context=2 * C, end_of_document=END)
    model = random_model(config).to(dtype)
    prompts = [random_ids(length, seed=length, vocab_size=6).tolist() for length in (C - 2, C - 1)]

    def logits() -> Tensor:
        _, state = generate.prefill(model, prompts)
        return logits_in_a_graph(model, state, [torch.tensor(ids) for ids in ([3, 1], [2, END], [5, 4])])

    expected = logits()
    model.set_impl("triton")
    assert error(logits(), expected.double()) <= (1e-5 if dtype == torch.float32 else 2e-2) * float(expected.norm())


def test_no_derivative_and_wrong_buffers_are_refused() -> None:
    inputs = make_inputs(torch.float32, ROWS[:2], 16)
    with pytest.raises(RuntimeError, match="no gradient"):
        call(decode_step.chunk_decode_step, inputs | {"kv_BSE": inputs["kv_BSE"].clone().requires_grad_()})
    with torch.no_grad():
        call(decode_step.chunk_decode_step, inputs | {"gamma_4S": inputs["gamma_4S"].clone().requires_grad_()})
    with pytest.raises(ValueError, match="buffers"):
        call(decode_step.chunk_decode_step, inputs | {"v_BCE": inputs["v_BCE"].bfloat16()})


def test_a_layer_that_trains_only_its_scales_steps_by_the_reference() -> None:
    """The kernel has no gradient: where any parameter wants one, the reference runs."""
    torch.manual_seed(0)
    model = LanguageModel(model_config("flash", n_layers=1, d_model=64, vocab_size=16, context=256, chunk_size=128))
    model.set_impl("triton")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("scale_offset" in name)
    x_BND = model.extend(torch.tensor([[3]]), torch.tensor([1]), model.decoding_state(1))[0]
    x_BND.sum().backward()
    assert model.layers[0].scale_offset.gamma.grad is not None
    embeds_BND = torch.zeros(1, 1, 64, requires_grad=True)  # as of a prompt that is learned
    x_BND = model.requires_grad_(False).extend(torch.tensor([[3]]), torch.tensor([1]), model.decoding_state(1),
                                               embeds_BND=embeds_BND)[0]
    x_BND.sum().backward()
    assert embeds_BND.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # whose buffers have another type than uvz
        assert model.extend(torch.tensor([[3]]), torch.tensor([1]), model.decoding_state(1))[0].isfinite().all()
