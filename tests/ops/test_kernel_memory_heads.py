"""Heads with the options beyond the paper, made in kernels: held to the reference in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import interpreter  # noqa: F401 - first, as it decides how kernels run
from kernel_law import DTYPES, S, documents, error, make_inputs, random, tiny
from lineartime import ops
from lineartime.ops import memory, memory_heads, mixed_chunk, reference
from lineartime.ops.memory import HeadOptions
from tiny_models import random_ids

PLUS = {"key_conv": 3, "gate": True, "linear_rope": False, "pooling": "written"}
"""`flash+`."""
CASES = {"flash+": PLUS, "three": {"key_conv": 3, "linear_rope": False},
         "both halves": {**PLUS, "local": True},
         "fixed": {"key_conv": 3, "gate": True, "pooling": "fixed", "divisor": 48.0},
         "a gate alone": {"gate": True, "pooling": "written"}, "no RoPE alone": {"linear_rope": False},
         "five tokens, both halves": {"key_conv": 5, "local": True}}
LEAVES = ("uvz", "gamma", "beta", "w", "taps", "gate", "gate_bias")


def inputs_of(n_rows: int, n_tokens: int, dtype: torch.dtype, key_conv: int = 0, gate: bool = False,
              **rest: object) -> dict[str, Tensor]:
    """What the op takes: short tensors and float32 parameters, as under autocast."""
    made = make_inputs(n_rows, n_tokens, dtype)
    if key_conv:
        made["taps"] = 0.6 * random(key_conv, S, seed=11)
    if gate:
        made |= {"gate": random(S, seed=12) / 8, "gate_bias": random(1, seed=13)}
    return made


def run(op, inputs: dict[str, Tensor], *, key_conv: int = 0, gate: bool = False, local: bool = False,
        linear_rope: bool = True, divisor: float | None = None, pooling: str = "mean", causal: bool = True,
        segment_ids_BT: Tensor | None = None) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs but the angles."""
    leaves = {name: x.detach().requires_grad_(name in LEAVES) for name, x in inputs.items()}
    near = () if not key_conv else (1, 3) if local else (3,)
    options = HeadOptions(leaves.get("taps"), 0 if causal else key_conv // 2, near, leaves.get("gate"),
                          leaves.get("gate_bias"), linear_rope, divisor)
    out = op(*(leaves[name] for name in ("uvz", "gamma", "beta", "sin", "cos", "w")), options, chunk_size=128,
             causal=causal, segment_ids_BT=segment_ids_BT, pooling=pooling)
    given = random(*out.shape, seed=6).bfloat16().to(out.dtype)
    wanted = [name for name in LEAVES if name in leaves]
    made = dict(zip(wanted, torch.autograd.grad(out, [leaves[name] for name in wanted], given), strict=True))
    if gate:  # a bias of one number may be near 0 by chance
        made["gate"] = torch.cat([made["gate"], made.pop("gate_bias")])
    return {"out": out.detach(), **made}


def assert_held(inputs: dict[str, Tensor], **how) -> None:
    """The reference's dtypes and shapes, and at most twice as far from float64 as the reference is."""
    exact = run(memory.gated_memory_attention, {name: x.double() for name, x in inputs.items()}, **how)
    ours, theirs = (run(op, inputs, **how)
                    for op in (memory_heads.gated_memory_attention, memory.gated_memory_attention))
    floor = 1e-6 if inputs["uvz"].dtype == torch.float32 else 0.0
    for name, x in exact.items():
        a, b = ours[name], theirs[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert x.norm() > 0 and error(a, x) <= max(2 * error(b, x), floor * float(x.norm())), name


EVERY = [(name, causal, with_documents) for name in CASES for causal in (True, False)
         for with_documents in (True, False)]
ON_PUSH = {("flash+", True, True), ("flash+", False, True), ("both halves", True, False), ("fixed", False, True),
           ("a gate alone", True, False), ("five tokens, both halves", False, True), ("no RoPE alone", True, True)}


@pytest.mark.parametrize(("name", "causal", "with_documents"), [
    pytest.param(*case, marks=() if case in ON_PUSH else pytest.mark.campaign) for case in EVERY])
def test_held_to_float64(name: str, causal: bool, with_documents: bool) -> None:
    """Two chunks and part of a third; documents of one token and of more than a chunk, and padding."""
    n_rows = 2 if with_documents else 1
    assert_held(inputs_of(n_rows, 261, torch.bfloat16, **CASES[name]), **CASES[name], causal=causal,
                segment_ids_BT=documents(n_rows, 261) if with_documents else None)


@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(DTYPES[2], marks=pytest.mark.campaign)])
def test_held_in_other_types(dtype: torch.dtype) -> None:
    case = CASES["both halves"] if dtype == torch.float32 else CASES["three"]  # sums do not fit float16
    assert_held(inputs_of(1, 163, dtype, **case), **case, segment_ids_BT=(torch.arange(163)[None] > 40).int())


@pytest.mark.parametrize("causal", [True, False])
def test_the_gates_that_are_read_have_their_transpose(causal: bool) -> None:
    """<read(a), b> = <a, transposed(b)> in float64, and by autograd."""
    ids_BT, (a, b) = documents(3, 389), random(2, 3, 389, seed=1).double()
    a.requires_grad_()
    for ids in (ids_BT, None):
        read = reference.gates_read(ids, a, 128, causal)
        expected, = torch.autograd.grad(read, a, b)
        assert expected.abs().sum() > 0
        assert (memory_heads.gates_read_transposed(ids, b, 128, causal) - expected).abs().max() < 1e-12


def test_a_key_has_nothing_from_another_document() -> None:
    """Exactly: the gradient of z by the output at one token, of its document and of no later token."""
    inputs, case = inputs_of(1, 300, torch.bfloat16, **PLUS), CASES["both halves"]
    ids_1T = (torch.arange(300)[None] >= 100).long() + (torch.arange(300)[None] >= 200)
    uvz = inputs["uvz"].requires_grad_()
    options = HeadOptions(inputs["taps"], 0, (1, 3), inputs["gate"], inputs["gate_bias"], case["linear_rope"])
    out = memory_heads.gated_memory_attention(
        *(inputs[name] for name in ("uvz", "gamma", "beta", "sin", "cos", "w")), options, chunk_size=128, causal=True,
        segment_ids_BT=ids_1T, pooling="written")
    gradient_T = torch.autograd.grad(out[0, 150].sum(), uvz)[0][0].abs().sum(-1)
    found = set(gradient_T.nonzero().flatten().tolist())
    assert found <= set(range(100, 151)) and {100, 127, 148, 150} <= found


def test_pytorch_makes_the_heads_that_kernels_do_not() -> None:
    """Narrow heads, and inputs of kernels without them: the same by the op."""
    for s, impl in ((64, "triton"), (S, "reference"), (S, None)):
        inputs = inputs_of(1, 140, torch.float32, **PLUS)
        inputs |= {name: inputs[name][..., : s if name not in ("sin", "cos") else s // 2]
                   for name in ("gamma", "beta", "taps", "gate", "sin", "cos")}
        inputs["uvz"] = inputs["uvz"][..., : 128 + s]
        made, expected = (run(op, inputs, **PLUS)
                          for op in (partial(ops.gated_memory_attention, impl=impl), memory.gated_memory_attention))
        for name, x in expected.items():
            assert (made[name] - x).norm() <= 1e-5 * x.norm(), name


@pytest.mark.parametrize("name", CASES)
def test_a_layer_of_them_is_made_in_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    fields = {"linear_scale_init": 1.0, "key_conv": case.get("key_conv", 0), "linear_gate": case.get("gate", False),
              "linear_rope": case.get("linear_rope", True), "chunk_pooling": case.get("pooling", "mean"),
              "linear_divisor": case.get("divisor"), "local_key_conv": case.get("local", False)}
    model, called, made = tiny("flash", n_layers=1, **fields), [], []
    inner = memory_heads.gated_memory_attention
    monkeypatch.setattr(memory_heads, "gated_memory_attention",
                        lambda *a, **how: called.append(1) or inner(*a, **how))
    ids_BT = random_ids(1, 140, vocab_size=64)
    for impl in ("reference", "triton"):
        model.set_impl(impl)
        made.append(model(ids_BT))
    assert called == [1]
    assert 0 < (made[0] - made[1]).norm() <= 1e-5 * made[0].norm()


def test_what_the_ops_return_is_what_they_say() -> None:
    """As `torch.compile` sees them, with a gate and without."""
    kinds, ids_BT = ("test_schema", "test_faketensor"), documents(2, 133)
    tables = mixed_chunk.lay_out_documents(ids_BT, 2, 133, 128, True, "sum", torch.device("cpu"))
    for gate in (True, False):
        inputs = inputs_of(2, 133, torch.bfloat16, key_conv=3, gate=gate)
        names = ("uvz", "gamma", "beta", "sin", "cos", "w", "taps", "gate", "gate_bias")
        given = (*(inputs.get(name) for name in names), *tables, 128, True, 0, False, False, 1.0, gate)
        torch.library.opcheck(memory_heads.forward, given, test_utils=kinds)
        dout, kept = random(2, 133, 64, seed=2).bfloat16(), memory_heads.forward(*given)[1:]
        torch.library.opcheck(memory_heads.backward, (dout, *kept, *given), test_utils=kinds)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, where forward mode begins
def test_there_is_no_forward_mode_derivative() -> None:
    inputs = inputs_of(1, 5, torch.float32, **PLUS)
    with pytest.raises(RuntimeError, match="forward-mode"), forward_ad.dual_level():
        taps_KS = forward_ad.make_dual(inputs["taps"], inputs["taps"])
        memory_heads.gated_memory_attention(
            *(inputs[name] for name in ("uvz", "gamma", "beta", "sin", "cos", "w")), HeadOptions(taps_KS, 0, (3,)),
            chunk_size=128, causal=True)
