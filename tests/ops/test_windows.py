"""FLASH's attention on a processor, which keeps little, held to the reference."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from kernel_law import (
    S,
    assert_held,
    assert_near,
    documents,
    flat,
    head_inputs,
    make_inputs,
    random,
    run,
    run_heads,
    without_bias,
)
from lineartime import ops
from lineartime.base.errors import UsageError
from lineartime.config import model_config
from lineartime.model.language_model import LanguageModel
from lineartime.ops import compiled, dispatch, reference, windows
from tiny_models import random_ids

LAYOUTS = {"one document": None,
           "documents and padding": [[0] * 50 + [1] + [2] * 200 + [3] * 49, [0] * 128 + [1] * 100 + [-1] * 72,
                                     [0] * 300],
           "begins at chunks": [[0] * 64 + [1] * 64 + [2] * 172, [0] * 299 + [1], [-1] * 300]}
pytestmark = [pytest.mark.skipif(compiled.library() is None, reason=compiled.in_words()),
              pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")]  # TensorBoard traces


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("chunk", "window", "pooling", "layout"), [
    (128, 4096, "mean", "documents and padding"), (128, 256, "written", "documents and padding"),
    (64, 128, "written", "begins at chunks"), (50, 50, "sum", "documents and padding"),
    (300, 1, "mean", "begins at chunks"), (128, 256, "mean", "one document")])
def test_output_and_gradients_are_those_of_the_reference(chunk: int, window: int, pooling: str, layout: str,
                                                         causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in one window, windows of single rows, of single chunks; uneven chunks."""
    monkeypatch.setattr(windows, "WINDOW_TOKENS", window)
    ids_BT = None if LAYOUTS[layout] is None else torch.tensor(LAYOUTS[layout])
    inputs = {name: x.double() for name, x in head_inputs(3, 300, 16, torch.float64, chunk).items()}
    how = {"chunk_size": chunk, "causal": causal, "segment_ids_BT": ids_BT, "pooling": pooling}
    for op in (lambda module: module.gated_chunk_attention, lambda module: without_bias(module.chunk_attention)):
        ours, theirs = (run_heads(op(module), inputs, pooling == "written", **how) for module in (windows, reference))
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).norm() <= 2e-15 * max(float(b.norm()), 1.0)
    if pooling != "written":
        inputs = make_inputs(3, 300, torch.float64, chunk=chunk, parameters=None)
        assert_held(windows.gated_chunk_attention, reference.gated_chunk_attention, inputs, chunk_size=chunk,
                    causal=causal, segment_ids_BT=ids_BT, pooling=pooling, floor=2e-15)
        position_BT = torch.arange(300) + torch.tensor([[0], [7], [1000]])  # each row has its own angles
        inputs["sin"], inputs["cos"] = reference.rotary(position_BT, S, torch.float64)
        assert_held(windows.gated_chunk_attention, reference.gated_chunk_attention, inputs, chunk_size=chunk,
                    causal=causal, floor=2e-15)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("n_tokens", [1, 31, 64, 65, 129, 192])
def test_rows_of_any_length_are_those_of_the_reference(n_tokens: int, causal: bool,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than a chunk, whole chunks, one token more; several rows to a window and cut rows."""
    inputs = make_inputs(5, n_tokens, torch.float64, chunk=64, parameters=None)
    for window in (256, 64):
        monkeypatch.setattr(windows, "WINDOW_TOKENS", window)
        for ids_BT in (None, documents(5, n_tokens)):
            assert_held(windows.gated_chunk_attention, reference.gated_chunk_attention, inputs, chunk_size=64,
                        causal=causal, segment_ids_BT=ids_BT, floor=2e-15)
    wide = {name: x.float() if name == "uvz" else x for name, x in inputs.items()}  # parameters of another type
    assert (run(windows.gated_chunk_attention, wide, chunk_size=64, causal=causal)[0]
            - run(reference.gated_chunk_attention, inputs, chunk_size=64, causal=causal)[0]).norm() < 1e-4


@pytest.mark.parametrize("n_chunks", [1, 2, 3])
def test_no_product_is_of_zeros_or_thrown_away(n_chunks: int) -> None:
    """A short chunk costs what its tokens cost. The first reads no state, the last makes none."""
    c, e = 40 if n_chunks == 1 else 128, 64

    def added(_: object, a: tuple[int, ...], b: tuple[int, ...], **how: object) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: added}) as counter:
        run(windows.gated_chunk_attention, make_inputs(3, c * n_chunks, torch.bfloat16), chunk_size=128, causal=True)
    # Inside a chunk scores twice, dq, dk; out, da, dv. Across: out, dq, dstate; the state, dk, dv.
    inside, across = c * c * (4 * S + 3 * e), 6 * c * S * e
    assert counter.get_total_flops() == 3 * 2 * (n_chunks * inside + (n_chunks - 1) * across)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_the_order_of_threads_and_rows_counts_nothing(dtype: torch.dtype, causal: bool,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of output and gradients by rows; sums over rows but for their rounding."""
    monkeypatch.setattr(windows, "WINDOW_TOKENS", 256)
    inputs, ids_BT, given = make_inputs(4, 300, dtype), documents(4, 300), random(4, 300, 64, seed=6).to(dtype)
    found, in_order = [], torch.arange(4)
    for n_threads, rows in ((1, in_order), (3, in_order), (3, torch.tensor([2, 0, 3, 1]))):
        torch.set_num_threads(n_threads)
        leaves = {name: (x[rows] if name == "uvz" else x).clone().requires_grad_(name not in ("sin", "cos"))
                  for name, x in inputs.items()}
        out = flat(windows.gated_chunk_attention)(*leaves.values(), segment_ids_BT=ids_BT[rows], chunk_size=128,
                                                  causal=causal)
        duvz, *sums = torch.autograd.grad(out, [x for x in leaves.values() if x.requires_grad], given[rows])
        found.append([out[rows.argsort()], duvz[rows.argsort()], *sums])
    torch.set_num_threads(1)
    one, three, shuffled = found
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[:2], shuffled, strict=False))
    assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(one[2:], shuffled[2:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["one document", "documents and padding"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_it_is_as_near_to_float64_as_the_reference(dtype: torch.dtype, layout: str, causal: bool) -> None:
    """With parameters of float32, as in training, and of the same type, as in a cast model."""
    ids_BT = None if LAYOUTS[layout] is None else torch.tensor(LAYOUTS[layout])
    for parameters in (torch.float32, dtype):
        assert_held(windows.gated_chunk_attention, reference.gated_chunk_attention,
                    make_inputs(3, 300, dtype, chunk=64, parameters=parameters), chunk_size=64, causal=causal,
                    segment_ids_BT=ids_BT)
    inputs = head_inputs(3, 300, 16, dtype, 64)
    exact, ours, theirs = (run_heads(module.gated_chunk_attention, given, True, chunk_size=64, causal=causal,
                                     segment_ids_BT=ids_BT, pooling="written")
                           for module, given in ((reference, {name: x.double() for name, x in inputs.items()}),
                                                 (windows, inputs), (reference, inputs)))
    assert_near(ours, theirs, exact, 1e-6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("n_tokens", "length"), [(1 << 15, None), (1 << 12, 120)])
def test_sums_and_shares_in_bfloat16_are_made_in_float32(n_tokens: int, length: int | None, causal: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """One document, whose sums would stand still, and many, whose 1 / count would be 0.4 % off: the
    size of the linear half, which the rounding of single numbers does not change."""
    monkeypatch.setattr(windows, "WINDOW_TOKENS", 60)
    uvz = torch.rand(1, n_tokens, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    scales_4S, found = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 8), []
    ids_BT = length and torch.arange(n_tokens)[None] // length
    for module, dtype in ((windows, torch.bfloat16), (reference, torch.float64)):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (uvz, scales_4S, scales_4S)]
        angles = (made(1, n_tokens, 4, dtype=dtype) for made in (torch.zeros, torch.ones))
        out = flat(module.gated_chunk_attention)(*leaves, *angles, torch.zeros(119, dtype=dtype), chunk_size=60,
                                                 causal=causal, segment_ids_BT=ids_BT)
        found.append([x.double() for x in (out, *torch.autograd.grad(out.sum(), leaves))])
    for ours, exact in zip(*found, strict=True):
        assert abs((ours * exact).sum() / exact.square().sum() - 1) < 2e-3


def kept_bytes(config, dtype: torch.dtype, impl: str | None) -> int:
    """What a layer's attention keeps for the backward pass beyond its parameters."""
    torch.manual_seed(0)
    model, kept = LanguageModel(config), {}
    model.set_impl(impl)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", dtype=dtype,
                                                                                    enabled=dtype != torch.float32):
        losses = model(random_ids(2, 1024))
    losses.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("preset", "most"), [("flash", 0.5), ("flash+", 0.75)])
def test_little_is_kept_for_the_backward_pass(preset: str, most: float, dtype: torch.dtype) -> None:
    """The bytes of layers: those of one model less those of a model with fewer layers."""
    config = {n: model_config(preset, n_layers=n, d_model=64, query_key_dim=32, chunk_size=128, context=1024,
                              vocab_size=50) for n in (1, 3)}
    ours, theirs = (kept_bytes(config[3], dtype, impl) - kept_bytes(config[1], dtype, impl)
                    for impl in (None, "reference"))
    assert 0 < ours < most * theirs


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager models on a processor, also masked; all else takes the reference."""
    ran, ids_BT = [], torch.ones(1, 20, dtype=torch.long)
    plain = windows.gated_chunk_attention
    monkeypatch.setattr(windows, "gated_chunk_attention", lambda *args, **how: ran.append(1) or plain(*args, **how))
    for preset, task, made, wanted in (
            ("flash", "wiki40b", lambda model: model, 1), ("flash+", "wiki40b", lambda model: model, 1),
            ("flash", "c4", torch.no_grad(), 1), ("flash-quad", "wiki40b", lambda model: model, 0),
            ("flash", "wiki40b", LanguageModel.bfloat16, 1), ("flash+", "wiki40b", LanguageModel.half, 0),
            ("flash", "wiki40b", lambda model: torch.jit.trace(model, ids_BT, check_trace=False), 0),
            ("flash", "wiki40b", lambda model: torch.compile(model, backend="eager"), 0)):
        chunk = {} if preset == "flash-quad" else {"chunk_size": 8}
        model = LanguageModel(model_config(preset, task, n_layers=1, d_model=16, query_key_dim=16, vocab_size=20,
                                           context=32, **chunk))
        made(model)(ids_BT)
        assert bool(ran) == wanted, (preset, task, made)
        model.set_impl("reference")
        model(ids_BT)
        assert len(ran) == wanted
        ran.clear()
    assert not dispatch.use_windows(None, False, torch.empty(0, 5, 3, requires_grad=True))
    assert dispatch.use_windows(None, False, torch.empty(1, 5, 3))
    with monkeypatch.context() as patch:  # no compiler
        patch.setenv(compiled.NO_C, "1")
        assert not dispatch.use_windows(None, False, torch.empty(1, 5, 3))
    for mode in (FakeTensorMode(), FlopCounterMode(display=False)):  # they see no op of C
        with mode:
            assert not dispatch.use_windows(None, False, torch.empty(1, 5, 3))
    with torch.inference_mode(), mode:
        LanguageModel(model_config("flash", n_layers=1, d_model=16, query_key_dim=16, vocab_size=20))(ids_BT)
    with torch.autocast("cpu", torch.bfloat16):  # whose matmuls are in another dtype than their inputs
        assert not dispatch.use_windows(None, False, torch.empty(1, 5, 3))
    model.set_impl("windows")
    with pytest.raises(UsageError, match="it is reference or triton"):
        model(ids_BT)


def test_other_derivatives() -> None:
    """Transforms of `torch.func` and forward mode take the reference. Second ones:
    test_second_derivatives.py."""
    inputs = make_inputs(2, 70, torch.float64, chunk=32, parameters=None)
    uvz, *rest = inputs.values()

    def total(x: Tensor) -> Tensor:
        return flat(ops.gated_chunk_attention)(x, *rest, chunk_size=32, causal=True).square().sum()

    (first,) = torch.autograd.grad(total(leaf := uvz.clone().requires_grad_()), leaf)
    each = torch.func.vmap(torch.func.grad(total))(uvz[:, None])[:, 0]
    assert (each - first).norm() <= 1e-14 * first.norm()
    _, along = torch.func.jvp(total, (uvz,), (uvz,))
    assert math.isclose(float(along), float((first * uvz).sum()), rel_tol=1e-12)
    with forward_ad.dual_level():  # of one parameter alone
        rest[-1] = forward_ad.make_dual(rest[-1], rest[-1])
        assert forward_ad.unpack_dual(total(uvz)).tangent > 0
        gate_BT = forward_ad.make_dual(uvz[..., 0].sigmoid(), uvz[..., 0])  # or of the gate
        out_BTE = ops.chunk_attention(uvz, [uvz[..., :8]] * 4, chunk_size=32, causal=True, pooling="written",
                                      gate_BT=gate_BT)
        assert forward_ad.unpack_dual(out_BTE).tangent is not None
