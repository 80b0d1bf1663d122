"""Attention of whole chunks behind a past: rows in parts are the rows, and kernels are held to the reference."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interpreter  # noqa: F401 - first, as it decides how kernels run
import kernel_law
from kernel_law import S, gated_heads, head_inputs, make_inputs, random, run, run_heads, tiny
from lineartime import ops
from lineartime.errors import UsageError
from lineartime.ops import mixed_chunk, reference
from lineartime.ops.reference import CarriedState
from tiny_models import random_ids

PARTS = {"one document that goes on": [0] * 256,
         "a document from before, one that goes on": [0] * 150 + [1] * 106,
         "a new document": [1] * 256,
         "documents that begin and end inside": [0] * 130 + [1] * 20 + [2] * 10 + [3] * 96,
         "a document from before, then padding": [0] * 150 + [-1] * 106,
         "padding": [-1] * 256}
"""Documents of two chunks of a part of a row, 0 that of the token before it."""


def run_part(op, inputs: dict[str, Tensor], ids_BT: Tensor, causal: bool) -> list[Tensor]:
    """The output of parts of rows, what they hand on, and the gradients of uvz, gamma, beta, w and of the states that
    enter: of 300 tokens before the part and, when not causal, of as many after it, unless it ends in padding."""
    leaves = {name: x.detach().requires_grad_(name in kernel_law.NAMES) for name, x in inputs.items()}
    dtype = torch.promote_types(inputs["uvz"].dtype, torch.float32)
    past_RBF = 100 * random(1 if causal else 2, len(ids_BT), S * 64, seed=8).bfloat16().to(dtype)
    entered_RB1 = torch.stack([torch.ones(len(ids_BT), 1), ids_BT[:, -1:] >= 0])[: len(past_RBF)].to(dtype)
    past_RBF.requires_grad_()
    handed = []

    def exchange(leaving_DBF: Tensor, passes_B: Tensor) -> Tensor:
        handed.extend([leaving_DBF, passes_B.double()])
        return torch.cat([entered_RB1 * past_RBF, 300 * entered_RB1], dim=-1)

    out = op(*leaves.values(), chunk_size=128, causal=causal, segment_ids_BT=ids_BT, exchange=exchange)
    given = [random(*x.shape, seed=seed).bfloat16().to(x.dtype) for seed, x in ((6, out), (9, handed[0]))]
    wanted = [*(leaves[name] for name in kernel_law.NAMES[1:]), past_RBF]
    gradients = torch.autograd.grad([out, handed[0]], wanted, given)
    return [x.detach() for x in (out, *handed, *gradients)]


@pytest.mark.parametrize("levels, causal", [
    (1, True), *(pytest.param(*case, marks=pytest.mark.rest) for case in ((2, False), (2, True), (1, False)))])
def test_a_state_that_enters_is_held_to_float64(levels: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows of every layout, with a past of 300 tokens: outputs, what is handed on, and all gradients."""
    monkeypatch.setattr(mixed_chunk, "MANY_CHUNKS", 32 if levels == 1 else 0)
    ids_BT = torch.tensor(list(PARTS.values()))
    inputs = make_inputs(*ids_BT.shape, torch.bfloat16)
    exact = run_part(reference.gated_chunk_attention, {name: x.double() for name, x in inputs.items()}, ids_BT, causal)
    ours, theirs = (run_part(op, inputs, ids_BT, causal)
                    for op in (mixed_chunk.gated_chunk_attention, reference.gated_chunk_attention))
    names = ["out", "handed on", "passes", "uvz", "gamma", "beta", "w", "past"]
    for name, a, b, x in zip(names, ours, theirs, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert kernel_law.error(a, x) <= 2 * kernel_law.error(b, x), name
    unread = exact[-1].abs().amax(-1) == 0
    assert unread.any() and (ours[-1][unread] == 0).all()  # a past that no token belongs to has no gradient


def run_part_of_heads(op, inputs: dict[str, Tensor], ids_BT: Tensor, causal: bool, pooling: str) -> dict[str, Tensor]:
    """As `run_part`, of made heads; what enters is of 300 tokens, or of gates whose sum is 0.4."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    heads, gate_BT = gated_heads(leaves)
    written, s = pooling == "written", heads[0].shape[-1]
    entered_RB1 = torch.stack([torch.ones(len(ids_BT), 1), ids_BT[:, -1:] >= 0])[: 1 if causal else 2].to(gate_BT.dtype)
    past_RBF = 100 * random(len(entered_RB1), len(ids_BT), s * 64, seed=8).bfloat16()
    leaves["past"] = past_RBF.to(gate_BT.dtype).requires_grad_()
    count_RB1 = torch.full_like(entered_RB1, 0.4 if written else 300.0).requires_grad_(written)
    leaves |= {"count": count_RB1} if written else {}
    handed = []

    def exchange(leaving_DBF: Tensor, passes_B: Tensor) -> Tensor:
        handed.append(leaving_DBF)
        return entered_RB1 * torch.cat([leaves["past"], count_RB1], dim=-1)

    out = op(leaves["uv"], heads, leaves["w"], chunk_size=128, causal=causal, segment_ids_BT=ids_BT, pooling=pooling,
             gate_BT=gate_BT if written else None, exchange=exchange)
    assert len(handed) == 1  # ranks wait for each other once
    made = {"out": out, "handed on": handed[0]}
    given = [random(*x.shape, seed=seed).bfloat16().to(x.dtype) for seed, x in enumerate(made.values())]
    gradients = torch.autograd.grad(list(made.values()), list(leaves.values()), given)
    return {name: x.detach() for name, x in (made | dict(zip(leaves, gradients, strict=True))).items()}


@pytest.mark.parametrize("pooling, s, causal", [("written", 64, True), *(
    pytest.param(*case, marks=pytest.mark.rest) for case in (
        ("written", 128, False), ("fixed", 64, False), ("mean", 128, True)))])
def test_a_state_that_enters_made_heads_is_held_to_float64(pooling: str, s: int, causal: bool) -> None:
    ids_BT = torch.tensor(list(PARTS.values())[1::2])
    inputs = head_inputs(*ids_BT.shape, s, torch.bfloat16)
    exact = run_part_of_heads(reference.gated_head_attention, {name: x.double() for name, x in inputs.items()}, ids_BT,
                              causal, pooling)
    assert_all_held(*(run_part_of_heads(op, inputs, ids_BT, causal, pooling)
                      for op in (mixed_chunk.gated_head_attention, reference.gated_head_attention)), exact)


def assert_all_held(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """At most twice as far from float64 as the reference, or in float32 a millionth."""
    assert ours.keys() == theirs.keys() == exact.keys()
    for name, x in exact.items():
        assert (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape), name
        at_the_limit = 1e-6 * float(x.norm()) if ours[name].dtype == torch.float32 else 0.0
        assert kernel_law.error(ours[name], x) <= max(2 * kernel_law.error(theirs[name], x), at_the_limit), name


def run_carried(op, inputs: dict[str, Tensor], ids_BT: Tensor | None) -> list[Tensor]:
    """The output of rows with a past of 300 tokens, the past of what follows, and the gradients of uvz, gamma, beta, w
    and of the sums that enter."""
    leaves = {name: x.detach().requires_grad_(name in kernel_law.NAMES) for name, x in inputs.items()}
    dtype, n_rows = torch.promote_types(inputs["uvz"].dtype, torch.float32), len(inputs["uvz"])
    kv_BSE = (100 * random(n_rows, S, 64, seed=8).bfloat16()).to(dtype).requires_grad_()
    state = CarriedState(kv_BSE, torch.full((n_rows,), 300.0, dtype=dtype))
    out = op(*leaves.values(), chunk_size=128, causal=True, segment_ids_BT=ids_BT, exchange=state)
    left_BSE, n_left_B = state.kv_BSE, state.count_B
    given = [random(*x.shape, seed=seed).bfloat16().to(x.dtype) for seed, x in ((6, out), (9, left_BSE))]
    wanted = [*(leaves[name] for name in kernel_law.NAMES[1:]), kv_BSE]
    return [x.detach() for x in (out, left_BSE, n_left_B, *torch.autograd.grad([out, left_BSE], wanted, given))]


WITHOUT_PADDING = torch.tensor([ids for ids in PARTS.values() if min(ids) >= 0])


@pytest.mark.parametrize("levels, ids_BT", [(1, WITHOUT_PADDING), *(
    pytest.param(*case, marks=pytest.mark.rest) for case in ((2, None), (2, WITHOUT_PADDING), (1, None)))])
def test_a_past_is_carried_as_in_float64(levels: int, ids_BT: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_chunk, "MANY_CHUNKS", 32 if levels == 1 else 0)
    inputs = make_inputs(2 if ids_BT is None else len(ids_BT), 256, torch.bfloat16)
    exact = run_carried(reference.gated_chunk_attention, {name: x.double() for name, x in inputs.items()}, ids_BT)
    ours, theirs = (run_carried(op, inputs, ids_BT)
                    for op in (mixed_chunk.gated_chunk_attention, reference.gated_chunk_attention))
    for name, a, b, x in zip(["out", "left", "number", "uvz", "gamma", "beta", "w", "past"], ours, theirs, exact,
                             strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert kernel_law.error(a, x) <= 2 * kernel_law.error(b, x), name
    assert torch.equal(ours[2].double(), exact[2])


def run_carried_heads(op, inputs: dict[str, Tensor], ids_BT: Tensor | None, pooling: str) -> dict[str, Tensor]:
    """The output of rows with a past of 300 tokens, or of gates whose sum is 0.4 or 90; the past of what follows; and
    the gradients of uv, heads, w, gates and of what enters."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    heads, gate_BT = gated_heads(leaves)
    written, n_rows, s = pooling == "written", len(gate_BT), heads[0].shape[-1]
    count_B = torch.where(torch.arange(n_rows) % 2 == 0, 0.4, 90.0) if written else torch.full((n_rows,), 300.0)
    leaves["past"] = (100 * random(n_rows, s, 64, seed=8).bfloat16()).to(gate_BT.dtype).requires_grad_()
    count_B = count_B.to(gate_BT.dtype).requires_grad_(written)
    state = CarriedState(leaves["past"], count_B)
    out = op(leaves["uv"], heads, leaves["w"], chunk_size=128, causal=True, segment_ids_BT=ids_BT, pooling=pooling,
             gate_BT=gate_BT if written else None, exchange=state)
    made = {"out": out, "left": state.kv_BSE, "number": state.count_B}
    with_gradient = [x for x in made.values() if x.requires_grad]
    given = [random(*x.shape, seed=seed).bfloat16().to(x.dtype) for seed, x in enumerate(with_gradient)]
    leaves |= {"count": count_B} if written else {}
    gradients = torch.autograd.grad(with_gradient, list(leaves.values()), given)
    return {name: x.detach() for name, x in (made | dict(zip(leaves, gradients, strict=True))).items()}


@pytest.mark.parametrize("pooling, s, ids_BT", [("written", 64, WITHOUT_PADDING), *(
    pytest.param(*case, marks=pytest.mark.rest) for case in (
        ("fixed", 128, None),
        ("written", 128, None), ("fixed", 64, WITHOUT_PADDING), ("mean", 128, WITHOUT_PADDING), ("mean", 64, None)))])
def test_a_past_of_made_heads_is_carried_as_in_float64(pooling: str, s: int, ids_BT: Tensor | None) -> None:
    inputs = head_inputs(2 if ids_BT is None else len(ids_BT), 256, s, torch.bfloat16)
    exact = run_carried_heads(reference.gated_head_attention, {name: x.double() for name, x in inputs.items()},
                              ids_BT, pooling)
    assert ("count" in exact) == (pooling == "written")
    assert_all_held(*(run_carried_heads(op, inputs, ids_BT, pooling)
                      for op in (mixed_chunk.gated_head_attention, reference.gated_head_attention)), exact)


LAYOUTS = [[0] * 50 + [1] * 300 + [2] * 34, None, [0] * 128 + [1] * 128 + [2] * 128]
CUTS = slice(0, 128), slice(128, 384)


def ids_of(ids_T: list[int] | None) -> list[Tensor | None]:
    """The documents of one row of 384 tokens, and those of its parts."""
    if ids_T is None:
        return [None] * (1 + len(CUTS))
    ids_BT = torch.tensor([ids_T])
    return [ids_BT, *(ids_BT[:, part] - (ids_T[part.start - 1] if part.start else 0) for part in CUTS)]


def assert_equal(made: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for a, b in zip(made, expected, strict=True):
        assert (a - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("op, dtype, limit, ids_T", [
    *((reference.gated_chunk_attention, torch.float64, 1e-14, ids_T) for ids_T in LAYOUTS),
    *(pytest.param(mixed_chunk.gated_chunk_attention, torch.float32, 1e-6, ids_T,
                   marks=pytest.mark.rest) for ids_T in LAYOUTS)])
def test_parts_of_a_row_are_the_row(op, dtype: torch.dtype, limit: float, ids_T: list[int] | None) -> None:
    """One after the other, each with the past of the one before: output and gradients of the whole rows."""
    inputs, (ids_BT, *ids_of_parts) = make_inputs(1, 384, dtype, parameters=dtype), ids_of(ids_T)
    whole = run(reference.gated_chunk_attention, inputs, chunk_size=128, causal=True, segment_ids_BT=ids_BT)

    def in_parts(*given: Tensor, **how: object) -> Tensor:
        state, outs = CarriedState(torch.zeros(1, S, 64, dtype=dtype), torch.zeros(1, dtype=dtype)), []
        uvz, gamma, beta, sin, cos, w = given
        for part, ids_of_part in zip(CUTS, ids_of_parts, strict=True):
            outs.append(op(uvz[:, part], gamma, beta, sin[:, part], cos[:, part], w, chunk_size=128, causal=True,
                           segment_ids_BT=ids_of_part, exchange=state))
        return torch.cat(outs, 1)

    assert_equal(run(in_parts, inputs), whole, limit)


@pytest.mark.parametrize("op, dtype, limit, pooling, ids_T", [
    *((reference.gated_head_attention, torch.float64, 1e-14, pooling, ids_T)
      for pooling in ("written", "fixed", "mean") for ids_T in LAYOUTS),
    *(pytest.param(mixed_chunk.gated_head_attention, torch.float32, 1e-6, "written", ids_T,
                   marks=pytest.mark.rest) for ids_T in LAYOUTS)])
def test_parts_of_a_row_of_made_heads_are_the_row(op, dtype: torch.dtype, limit: float, pooling: str,
                                                 ids_T: list[int] | None) -> None:
    """The sums of gates that are carried have gradients too."""
    inputs, (ids_BT, *ids_of_parts) = head_inputs(1, 384, S, dtype), ids_of(ids_T)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    how = {"pooling": pooling, "gated": pooling == "written"}
    whole = run_heads(reference.gated_head_attention, inputs, chunk_size=128, causal=True, segment_ids_BT=ids_BT, **how)

    def in_parts(uv: Tensor, heads: list[Tensor], w: Tensor, gate_BT: Tensor | None, pooling: str) -> Tensor:
        state, outs = CarriedState(torch.zeros(1, S, 64, dtype=dtype), torch.zeros(1, dtype=dtype)), []
        for part, ids_of_part in zip(CUTS, ids_of_parts, strict=True):
            outs.append(op(uv[:, part], [head[:, part] for head in heads], w, chunk_size=128, causal=True,
                           segment_ids_BT=ids_of_part, pooling=pooling, exchange=state,
                           gate_BT=None if gate_BT is None else gate_BT[:, part]))
        return torch.cat(outs, 1)

    assert_equal(run_heads(in_parts, inputs, **how), whole, limit)


def test_a_past_is_carried_over_whole_chunks() -> None:
    (uvz, *rest), how = make_inputs(1, 200, torch.float32).values(), {
        "chunk_size": 128, "exchange": CarriedState(torch.zeros(1, S, 64), torch.zeros(1))}
    words = "a state is carried over whole chunks of causal rows: "
    with pytest.raises(UsageError, match=f"{words}200 tokens in chunks of 128"):
        ops.gated_chunk_attention(uvz, *rest, causal=True, **how)
    with pytest.raises(UsageError, match=f"{words}200 tokens in chunks of 128"):
        ops.gated_head_attention(uvz[..., :-S], uvz[None, ..., :S].expand(4, 1, 200, S), rest[-1], causal=True, **how)
    with pytest.raises(UsageError, match=f"{words}causal = False"):
        ops.gated_chunk_attention(uvz, *rest, causal=False, **how)


FLASH_PLUS = {"key_conv": 3, "linear_rope": False, "linear_gate": True, "chunk_pooling": "written"}


@pytest.mark.parametrize("name, fields", [
    ("gated_chunk_attention", {}), *(
        pytest.param("gated_head_attention", fields, marks=pytest.mark.rest) for fields in (
            FLASH_PLUS, {"key_conv": 3, "chunk_pooling": "fixed", "linear_divisor": 64.0}, {"query_key_dim": 64},
            {**FLASH_PLUS, "n_heads": 2}))])
def test_the_chunks_of_a_prompt_are_read_by_kernels(name: str, fields: dict[str, object],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """With documents, in parts that end inside chunks and are shorter in the last row, which then goes on alone: the
    rows read at once."""
    model = tiny("flash", n_layers=1, end_of_document=0, linear_scale_init=1.0, **fields).eval()
    lengths, carried = [], getattr(mixed_chunk, name)
    ids_BT = random_ids(3, 310, vocab_size=63) + 1
    ids_BT[[0, 1, 2], [20, 200, 150]] = 0

    def spy(uvz_BTF: Tensor, *rest: object, **how: object) -> object:
        lengths.append(uvz_BTF.shape[1])
        return carried(uvz_BTF, *rest, **how)

    monkeypatch.setattr(mixed_chunk, name, spy)
    model.set_impl("triton")
    state, n_read, made = model.decoding_state(3), [0, 0, 0], torch.empty(3, 310, 64)
    with torch.no_grad():
        for n_new in ([37, 37, 37], [263, 263, 20], [0, 0, 243], [10, 10, 10]):
            parts = [slice(start, start + n) for start, n in zip(n_read, n_new, strict=True)]
            ids_BN = torch.stack([F.pad(ids_T[part], [0, max(n_new) - n])
                                  for ids_T, part, n in zip(ids_BT, parts, n_new, strict=True)])
            x_BND = model.extend(ids_BN, torch.tensor(n_new), state)
            for row, (part, n) in enumerate(zip(parts, n_new, strict=True)):
                made[row, part], n_read[row] = x_BND[row, :n], part.stop
        assert lengths == [128, 128]  # tokens 128 to 255, of the last row in the third part
        expected = model.set_impl("reference") or model.hidden(ids_BT)
    assert (made - expected).norm() <= 1e-5 * expected.norm()
