"""FLASH's kernels in Triton's interpreter, held to the reference; and layers and models."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import kernel_law
from kernel_law import S, assert_near, documents, flat, head_inputs, make_inputs, random, run_heads, tiny
from lineartime.base.errors import UsageError
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import token_losses
from lineartime.ops import dispatch, gated_chunk_attention, gated_quadratic_attention, mixed_chunk, reference, windows
from lineartime.ops.reference import HeadsFromZ
from marks import rest
from tiny_models import LONG_MEMORY, random_ids

assert_held = partial(kernel_law.assert_held, mixed_chunk.gated_chunk_attention, reference.gated_chunk_attention)


@pytest.mark.parametrize(("dtype", "n_rows", "n_tokens", "chunk", "causal", "pooling", "with_documents"), [
    (torch.bfloat16, 1, 261, 128, True, "mean", True), (torch.bfloat16, 1, 261, 128, False, "mean", True),
    (torch.float32, 1, 133, 128, True, "mean", False), (torch.float16, 1, 261, 128, False, "mean", True),
    (torch.bfloat16, 3, 40, 128, True, "mean", True), (torch.bfloat16, 1, 1, 128, True, "mean", True),
    (torch.bfloat16, 1, 267, 128, True, "sum", True), (torch.bfloat16, 1, 277, 256, True, "mean", True), *rest(
        (torch.float32, 1, 133, 128, False, "mean", True), (torch.float16, 1, 261, 128, True, "mean", False),
        (torch.bfloat16, 1, 277, 256, False, "mean", True), (torch.bfloat16, 1, 533, 512, True, "mean", True),
        (torch.bfloat16, 1, 533, 512, False, "mean", True))])
def test_held_to_float64(dtype: torch.dtype, n_rows: int, n_tokens: int, chunk: int, causal: bool, pooling: str,
                         with_documents: bool) -> None:
    """Chunks and part of one more; short rows, an odd number of them; chunks in rounds."""
    assert_held(make_inputs(n_rows, n_tokens, dtype, chunk=chunk), chunk_size=chunk, causal=causal, pooling=pooling,
                segment_ids_BT=documents(n_rows, n_tokens) if with_documents else None)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["hopper", "small"])
@pytest.mark.parametrize("causal", [True, False])
def test_more_columns_and_parameters_of_the_same_type(kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiles of the other kinds of GPU."""
    monkeypatch.setattr(mixed_chunk, "tile_class", lambda device: kind)
    assert_held(make_inputs(1, 140, torch.bfloat16, d_inner=192, chunk=256, parameters=None), chunk_size=256,
                causal=causal)


@pytest.mark.parametrize("causal", [True, *rest(False)])
def test_states_in_two_levels_are_those_of_one(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, how = make_inputs(2, 645, torch.float32), {"chunk_size": 128, "causal": causal,
                                                       "segment_ids_BT": documents(2, 645)}
    tables = mixed_chunk.make_document_tables(how["segment_ids_BT"], 2, 645, 128, causal, "mean", torch.device("cpu"))
    heads, uvz = random(4, 2, 645, S, seed=7), inputs["uvz"]
    made = []
    for many in (32, 0):
        monkeypatch.setattr(mixed_chunk, "MANY_CHUNKS", many)
        made.append([mixed_chunk.make_states(uvz, uvz[..., 64:128], heads, tables, 128, backward)[1]
                     for backward in (False, True)])
    for one, two in zip(*made, strict=True):
        assert one.abs().sum() > 0 and (one - two).norm() <= 1e-6 * one.norm()


@pytest.mark.parametrize(("preset", "norm"), [("flash", "layer_norm"), *rest(("flash-quad", "scale_norm"))])
def test_a_model_in_kernels_trains_as_the_definition_does(preset: str, norm: str) -> None:
    """Under autocast, with checkpointing, and wrapped for data parallel training."""
    model = tiny(preset, n_layers=1, norm=norm, end_of_document=0).train()
    ids_1T = random_ids(1, 132, vocab_size=63) + 1
    ids_1T[0, 50] = 0

    def step(impl: str, module: torch.nn.Module) -> Tensor:
        model.set_impl(impl)
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            token_losses(module, ids_1T).mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected, made = (step(impl, model) for impl in ("reference", "triton"))
    assert not torch.equal(made, expected)  # so kernels ran
    assert (made - expected).norm() <= 1e-2 * expected.norm()
    model.activation_checkpointing = True
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert torch.equal(step("triton", DistributedDataParallel(model)), made)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("pooling", "s", "causal", "with_documents"), [
    ("written", 128, True, True), ("written", 64, False, True), *rest(
        ("sum", 128, False, False), ("mean", 64, True, True))])
def test_heads_that_are_made_outside_are_held_to_float64(pooling: str, s: int, causal: bool,
                                                        with_documents: bool) -> None:
    inputs = head_inputs(2, 270, s, torch.bfloat16)
    how = {"chunk_size": 128, "causal": causal, "pooling": pooling, "gated": pooling == "written",
           "segment_ids_BT": documents(2, 270) if with_documents else None}
    exact = run_heads(reference.gated_chunk_attention, {name: x.double() for name, x in inputs.items()}, **how)
    ours, theirs = (run_heads(op, inputs, **how)
                    for op in (mixed_chunk.gated_chunk_attention, reference.gated_chunk_attention))
    assert_near(ours, theirs, exact, names=("out", *inputs))


@pytest.mark.parametrize("fields", [LONG_MEMORY, *rest({"query_key_dim": 64}, {"n_heads": 2, **LONG_MEMORY})], ids=str)
def test_heads_that_pytorch_makes_are_attended_in_kernels(fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = tiny("flash", n_layers=1, **fields), []
    inner = mixed_chunk.gated_chunk_attention
    monkeypatch.setattr(mixed_chunk, "gated_chunk_attention", lambda *a, **how: called.append(1) or inner(*a, **how))
    ids_BT, made = random_ids(1, 140, vocab_size=64), []
    for impl in ("reference", "triton"):
        model.set_impl(impl)
        made.append(model(ids_BT))
    assert len(called) == len(model.layers)
    assert 0 < (made[0] - made[1]).norm() <= 1e-5 * made[0].norm()


def test_layers_that_kernels_do_not_have() -> None:
    """Sizes that they do not have: test_kernel_devices.py."""
    x_BTD = torch.randn(1, 5, 64)
    for what, fields in (("chunk_size 64", {"chunk_size": 64}), ("query_key_dim 64", {"query_key_dim": 64}),
                         *(("ablations", each) for each in (
                             {"n_heads": 2}, {"attn_kernel": "softmax"}, {"overlap": True, "chunk_size": 128},
                             {"document_mask": "paper", "chunk_size": 128}))):
        layer = GatedAttentionUnit(d_model=64, **fields)
        expected = layer(x_BTD)
        layer.impl = "triton"
        with pytest.raises(UsageError, match=what):
            layer(x_BTD)
        layer.impl = "reference"
        assert torch.equal(layer(x_BTD), expected)
    with pytest.raises(UsageError, match="unknown implementation"):
        dispatch.use_kernels("cuda", torch.device("cpu"), lambda: None)


def test_what_runs_by_default(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels on CUDA; the reference elsewhere, and for unsupported inputs: with one line, once."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    dispatch.log_once.cache_clear()
    assert dispatch.use_kernels(None, cuda, lambda: None) and not dispatch.use_kernels(None, cpu, lambda: None)
    assert not dispatch.use_kernels("reference", cuda, lambda: None) and caplog.messages == []
    for _ in range(2):
        assert not dispatch.use_kernels(None, cuda, lambda: "chunk_size 64")
    assert caplog.messages == ["the PyTorch reference runs in place of kernels: chunk_size 64"]
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    assert "not for cpu" in dispatch.unsupported_device(cpu, torch.float32)
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert dispatch.unsupported_device(cuda, torch.float32) == "Triton is not installed"


@pytest.mark.parametrize(("op", "n_heads", "how"), [
    (gated_chunk_attention, 4, {"chunk_size": 128}), (gated_quadratic_attention, 2, {"scale_len": 140})])
def test_an_op_is_its_reference_or_its_kernel(op, n_heads: int, how: dict[str, int]) -> None:
    """And rows without a token have an empty result, and gradients of zero."""
    inputs = make_inputs(1, 140, torch.float32, chunk=how.get("chunk_size"))
    by_default, kernel, definition = (flat(op)(*inputs.values(), causal=True, impl=impl, **how)
                                      for impl in (None, "triton", "reference"))
    default = windows if n_heads == 4 else reference
    assert torch.equal(by_default, flat(getattr(default, op.__name__))(*inputs.values(), causal=True, **how))
    assert not torch.equal(kernel, definition)
    assert (kernel - definition).norm() <= 1e-6 * definition.norm()
    for (n_rows, n_tokens), causal in (((1, 0), True), ((0, 5), True), ((1, 0), False), ((0, 5), False)):
        uvz = torch.zeros(n_rows, n_tokens, 2 * 64 + S)
        heads, angles = torch.ones(2, n_heads, S, requires_grad=True), torch.zeros(1, n_tokens, S // 2)
        w = torch.zeros(255 if n_heads == 4 else max(2 * n_tokens - 1, 0))
        out = op(uvz, HeadsFromZ(*heads, angles, angles), w, causal=causal, impl="triton", **how)
        assert out.shape == (n_rows, n_tokens, 64)
        out.sum().backward()
        assert (heads.grad == 0).all()
