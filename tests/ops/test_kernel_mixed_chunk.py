"""FLASH's kernels in Triton's interpreter, held to the reference, also behind a past; layers and
models; and on which devices kernels run, with which tiles, and what is too large for them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import kernel_law
from kernel_law import S, assert_near, documents, flat, gated_heads, head_inputs, make_inputs, random, run_heads, tiny
from lineartime import ops
from lineartime.base.errors import UsageError
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import token_losses
from lineartime.ops import dispatch, gated_chunk_attention, gated_quadratic_attention, mixed_chunk, reference, windows
from lineartime.ops.reference import CarriedState, HeadsFromZ
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
    given = mixed_chunk.FlashInputs(uvz, *[None] * 4, heads, torch.zeros(255), None, *tables, 128, causal, False, True)
    made = []
    for many in (32, 0):
        monkeypatch.setattr(mixed_chunk, "MANY_CHUNKS", many)
        made.append([mixed_chunk.make_states(given, uvz[..., 64:128], heads, None, None, backward=backward)[1]
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


@pytest.mark.parametrize(("dtype", "s", "chunk", "causal", "pooling", "with_documents"), [
    (torch.bfloat16, 128, 128, True, "sum", True), (torch.bfloat16, 64, 128, False, "mean", True), *rest(
        (torch.bfloat16, 128, 128, False, "written", True), (torch.float16, 128, 128, True, "mean", False),
        (torch.bfloat16, 128, 256, False, "mean", False), (torch.bfloat16, 64, 512, True, "written", True))])
def test_values_as_they_are_are_held_to_float64(dtype: torch.dtype, s: int, chunk: int, causal: bool, pooling: str,
                                                with_documents: bool) -> None:
    """With a position bias and without one; chunks in rounds."""
    n_tokens, gated = chunk + 142, pooling == "written"
    inputs = head_inputs(2, n_tokens, s, dtype, chunk)
    how = {"chunk_size": chunk, "causal": causal, "pooling": pooling,
           "segment_ids_BT": documents(2, n_tokens) if with_documents else None}
    for wrap in (kernel_law.without_bias, lambda op: op):
        exact = run_heads(wrap(reference.chunk_attention), {name: x.double() for name, x in inputs.items()}, gated,
                          **how)
        ours, theirs = (run_heads(wrap(module.chunk_attention), inputs, gated, **how)
                        for module in (mixed_chunk, reference))
        assert_near(ours, theirs, exact, 1e-3 if dtype == torch.float16 else 1e-6, names=("out", *inputs))


def test_values_as_they_are_in_parts() -> None:
    """By kernels with a carried state: the whole rows of the reference, and their gradients."""
    v_BTE, *heads = (random(1, 256, 64, seed=n) / 3 for n in range(5))
    made = []
    for impl, spans in (("reference", [slice(0, 256)]), ("triton", [slice(0, 128), slice(128, 256)])):
        leaves = [x.detach().requires_grad_() for x in (v_BTE, *heads)]
        state = CarriedState(torch.zeros(1, 64, 64), torch.zeros(1))
        parts = [[x[:, span] for x in leaves] for span in spans]
        out = torch.cat([ops.chunk_attention(v, heads, chunk_size=128, causal=True, exchange=state, impl=impl)
                         for v, *heads in parts], 1)
        made.append([out, state.kv_BSE, *torch.autograd.grad(out.square().sum() + state.kv_BSE.sum(), leaves)])
    for whole, cut in zip(*made, strict=True):
        assert 0 < (whole - cut).norm() <= 1e-6 * whole.norm()


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


PARTS = {"one document that goes on": [0] * 256,
         "a document from before, one that goes on": [0] * 150 + [1] * 106,
         "a new document": [1] * 256,
         "documents that begin and end inside": [0] * 130 + [1] * 20 + [2] * 10 + [3] * 96,
         "a document from before, then padding": [0] * 150 + [-1] * 106,
         "padding": [-1] * 256}
"""Documents of two chunks of a part of a row, 0 that of the token before it."""


def run_part(op, inputs: dict[str, Tensor], ids_BT: Tensor | None, *, causal: bool, carried: bool,
             pooling: str = "mean") -> dict[str, Tensor]:
    """The output of parts of rows, what they hand on, and all gradients, also of what enters: sums
    of k v of 300 tokens before the part and, when not causal, of as many after it, unless it ends
    in padding; with pooling "written" of gates whose sum is .4 or 90. carried: a `CarriedState`;
    otherwise what ranks exchange."""
    leaves = {name: x.detach().requires_grad_(name not in ("sin", "cos")) for name, x in inputs.items()}
    how = {"chunk_size": 128, "causal": causal, "segment_ids_BT": ids_BT}
    if "heads" in inputs:
        heads, gate_BT = gated_heads(leaves)
        given = [leaves["uv"], heads, leaves["w"]]
        how |= {"pooling": pooling, "gate_BT": gate_BT if pooling == "written" else None}
    else:
        uvz_BTF, *made_by, w = leaves.values()
        given = [uvz_BTF, HeadsFromZ(*made_by), w]
    first_BTF = next(iter(inputs.values()))
    n_rows, dtype = len(first_BTF), torch.promote_types(first_BTF.dtype, torch.float32)
    s = heads[0].shape[-1] if "heads" in inputs else S
    entered_RB = torch.ones(1 if causal else 2, n_rows, dtype=dtype)
    if not causal:
        entered_RB[1] = (ids_BT[:, -1] >= 0).to(dtype)
    leaves["past"] = (100 * random(*entered_RB.shape, s * 64, seed=8).bfloat16()).to(dtype).requires_grad_()
    count_RB = torch.full_like(entered_RB, 300.0)
    if pooling == "written":
        count_RB = torch.full_like(entered_RB, 0.4)
        if carried:
            count_RB[:, 1::2] = 90.0
        leaves["count"] = count_RB.requires_grad_()
    handed = []

    def exchange(leaving_DBF: Tensor, passes_B: Tensor) -> Tensor:
        handed.extend([leaving_DBF, passes_B.to(dtype)])
        return entered_RB[..., None] * torch.cat([leaves["past"], count_RB[..., None]], dim=-1)

    if carried:
        state = CarriedState(leaves["past"][0].unflatten(1, (s, 64)), count_RB[0])
        made = {"out": op(*given, exchange=state, **how), "handed on": state.kv_BSE, "number": state.count_B}
    else:
        out = op(*given, exchange=exchange, **how)
        made = {"out": out, "handed on": handed[0], "passes": handed[1]}
        assert len(handed) == 2  # ranks wait for each other once
    with_gradient = [x for x in made.values() if x.requires_grad]
    cotangents = [random(*x.shape, seed=n).bfloat16().to(x.dtype) for n, x in enumerate(with_gradient)]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(with_gradient, list(wanted.values()), cotangents)
    return {name: x.detach() for name, x in (made | dict(zip(wanted, gradients, strict=True))).items()}


WITHOUT_PADDING = torch.tensor([ids for ids in PARTS.values() if min(ids) >= 0])
EVERY_PART = torch.tensor(list(PARTS.values()))


@pytest.mark.parametrize(("of_heads", "how", "ids_BT"), [
    (False, {"causal": True, "carried": False}, EVERY_PART[1::2]),
    (True, {"causal": True, "carried": True, "pooling": "written"}, WITHOUT_PADDING[1::2]),
    (False, {"causal": True, "carried": True}, None), *rest((False, {"causal": True, "carried": False}, EVERY_PART),
          (False, {"causal": True, "carried": True}, WITHOUT_PADDING),
          (True, {"causal": True, "carried": False, "pooling": "written"}, EVERY_PART[1::2]),
          (True, {"causal": True, "carried": True, "pooling": "written"}, WITHOUT_PADDING),
          (False, {"causal": False, "carried": False}, EVERY_PART),
          (True, {"causal": False, "carried": False, "pooling": "sum"}, EVERY_PART[1::2]),
          (True, {"causal": True, "carried": True, "pooling": "sum"}, None))])
def test_a_state_that_enters_is_held_to_float64(of_heads: bool, how: dict, ids_BT: Tensor | None,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows of every layout, the chunks' states in one level or two."""
    monkeypatch.setattr(mixed_chunk, "MANY_CHUNKS", 0 if of_heads else 32)
    shape = (2, 256) if ids_BT is None else ids_BT.shape
    inputs = head_inputs(*shape, 64, torch.bfloat16) if of_heads else make_inputs(*shape, torch.bfloat16)
    exact = run_part(reference.gated_chunk_attention, {key: x.double() for key, x in inputs.items()}, ids_BT, **how)
    ours, theirs = (run_part(op, inputs, ids_BT, **how)
                    for op in (mixed_chunk.gated_chunk_attention, reference.gated_chunk_attention))
    assert_near([*ours.values()], [*theirs.values()], [*exact.values()], 1e-6 if of_heads else 0.0, tuple(exact))
    if not how["carried"]:  # a past that no token belongs to has no gradient
        unread = exact["past"].abs().amax(-1) == 0
        assert unread.any() and (ours["past"][unread] == 0).all()


def test_a_past_is_carried_over_whole_chunks() -> None:
    (uvz, *rest), how = make_inputs(1, 200, torch.float32).values(), {
        "chunk_size": 128, "exchange": CarriedState(torch.zeros(1, S, 64), torch.zeros(1))}
    words = "a state is carried over whole chunks of causal rows: "
    with pytest.raises(UsageError, match=f"{words}200 tokens in chunks of 128"):
        flat(gated_chunk_attention)(uvz, *rest, causal=True, **how)
    with pytest.raises(UsageError, match=f"{words}200 tokens in chunks of 128"):
        gated_chunk_attention(uvz[..., :-S], [uvz[..., :S]] * 4, rest[-1], causal=True, **how)
    with pytest.raises(UsageError, match=f"{words}causal = false"):
        flat(gated_chunk_attention)(uvz, *rest, causal=False, **how)
    for pooling, gate_BT in (("mean", uvz[..., 0]), ("written", None), ("max", None)):
        with pytest.raises(UsageError, match=f"pooling and gates do not agree: pooling = {pooling}"):
            ops.chunk_attention(uvz, [uvz[..., :S]] * 4, causal=True, chunk_size=128, pooling=pooling, gate_BT=gate_BT)
    with pytest.raises(UsageError, match="gates are for heads that are made"):
        flat(gated_chunk_attention)(uvz, *rest, causal=True, chunk_size=128, gate_BT=uvz[..., 0])


@pytest.mark.parametrize("fields", [{}, *rest(LONG_MEMORY, {"query_key_dim": 64})], ids=str)
def test_the_chunks_of_a_prompt_are_read_by_kernels(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """With documents, in parts that end inside chunks: the rows read at once."""
    model = tiny("flash", n_layers=1, end_of_document=0, **fields).eval()
    torch.nn.init.ones_(model.layers[0].scale_offset.gamma)  # so that the state counts
    lengths, carried = [], mixed_chunk.gated_chunk_attention
    ids_BT = random_ids(2, 310, vocab_size=63) + 1
    ids_BT[[0, 1], [20, 150]] = 0

    def spy(uvz_BTF: Tensor, *rest: object, **how: object) -> object:
        lengths.append(uvz_BTF.shape[1])
        return carried(uvz_BTF, *rest, **how)

    monkeypatch.setattr(mixed_chunk, "gated_chunk_attention", spy)
    model.set_impl("triton")
    state, n_read, made = model.decoding_state(2), [0, 0], torch.empty(2, 310, 64)
    with torch.no_grad():
        for n_new in ([37, 37], [263, 20], [0, 243], [10, 10]):
            parts = [slice(start, start + n) for start, n in zip(n_read, n_new, strict=True)]
            ids_BN = torch.stack([F.pad(ids_T[part], [0, max(n_new) - n])
                                  for ids_T, part, n in zip(ids_BT, parts, n_new, strict=True)])
            x_BND = model.extend(ids_BN, torch.tensor(n_new), state)[0]
            for row, (part, n) in enumerate(zip(parts, n_new, strict=True)):
                made[row, part], n_read[row] = x_BND[row, :n], part.stop
        assert lengths == [128, 128]  # tokens 128 to 255, of the last row in the third part
        expected = model.set_impl("reference") or model.hidden(ids_BT)
    assert (made - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("major", "kib", "kind"), [
    (8, 163, "small"), (8, 99, "small"), (12, 99, "small"), (9, 227, "hopper"), (10, 227, "large"), (9, 164, "small")])
def test_tiles_are_those_of_the_shared_memory(major, kib, kind, monkeypatch):
    """First of all: compute capability 12.0 has 99 KiB, 10.0 has 227."""
    properties = SimpleNamespace(shared_memory_per_block_optin=kib * 1024, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert dispatch.tile_class(torch.device("cuda")) == kind
    assert dispatch.tile_class(torch.device("cpu")) == "large"


def test_rocm_runs_the_reference(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch.unsupported_device(torch.device("cuda"), torch.float32) == "kernels are for CUDA, not for ROCm"


def test_what_is_too_large_for_kernels_or_of_another_width():
    """Sizes that do not fit a grid or an offset of 32 bits, widths and chunks of no kernel."""
    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, device="meta", dtype=dtype)

    def heads(s):
        return HeadsFromZ(*[empty(4, s)] * 4)

    for shape, words in (
            ((65_536, 1, 256), "65,536 rows, kernels have 65,535"),
            ((1, 2**24, 256), "16,777,216 tokens in a row, kernels have 16,777,215"),
            ((1, 1, 2**22 + 128), "4,194,432 columns, kernels have 4,194,303"),
            ((65_535, 1, 256), None), ((1, 2**24 - 1, 256), None), ((1, 1, 2**22 - 128), None)):
        for reason in (dispatch.unsupported_rows(empty(*shape), heads(S)),
                       dispatch.unsupported_chunks(empty(*shape), heads(S), 256, "mean")):
            assert reason == words
    for (n, c, e), width, words in (
            ((65_535, 256, 64), S, None), ((65_536, 256, 64), S, "65,536 rows, kernels have 65,535"),
            ((1, 256, 64), 64, "keys of width 64, a decode step in a kernel has 128"),
            ((1, 256, 96), S, "d_inner 96, kernels have multiples of 64"),
            ((1, 64, 64), S, "chunk_size 64, kernels have 128, 256, 512")):
        assert dispatch.unsupported_step(empty(n, c, width), empty(n, c, e)) == words
    for s, dtype, pooling, words in (
            (64, torch.bfloat16, "written", None), (128, torch.float16, "mean", None),
            (256, torch.bfloat16, "mean", "query_key_dim 256, kernels have at most 128"),
            (64, torch.float16, "written", 'sums of chunk_pooling "written" do not fit float16')):
        made = [empty(2, 300, s, dtype=dtype)] * 4
        assert dispatch.unsupported_chunks(empty(2, 300, 2 * 64, dtype=dtype), made, 256, pooling) == words
    assert dispatch.unsupported_rows(empty(1, 5, 256), heads(64)) == "query_key_dim 64, kernels have 128"
    assert dispatch.unsupported_chunks(empty(2, 300, 64), [empty(2, 300, S)] * 4, 256, "sum", gated=False) is None
