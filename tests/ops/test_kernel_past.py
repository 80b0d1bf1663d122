"""Attention of whole chunks behind a past: kernels are held to the reference."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_law import S, assert_near, flat, gated_heads, head_inputs, make_inputs, random, tiny
from lineartime import ops
from lineartime.base.errors import UsageError
from lineartime.ops import mixed_chunk, reference
from lineartime.ops.reference import CarriedState, HeadsFromZ
from marks import rest
from tiny_models import LONG_MEMORY, random_ids

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
        flat(ops.gated_chunk_attention)(uvz, *rest, causal=True, **how)
    with pytest.raises(UsageError, match=f"{words}200 tokens in chunks of 128"):
        ops.gated_chunk_attention(uvz[..., :-S], [uvz[..., :S]] * 4, rest[-1], causal=True, **how)
    with pytest.raises(UsageError, match=f"{words}causal = false"):
        flat(ops.gated_chunk_attention)(uvz, *rest, causal=False, **how)
    with pytest.raises(UsageError, match="gates are for heads that are made"):
        flat(ops.gated_chunk_attention)(uvz, *rest, causal=True, chunk_size=128, gate_BT=uvz[..., 0])


@pytest.mark.parametrize("fields", [{}, *rest(LONG_MEMORY, {"query_key_dim": 64})], ids=str)
def test_the_chunks_of_a_prompt_are_read_by_kernels(fields: dict[str, object],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
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
            x_BND = model.extend(ids_BN, torch.tensor(n_new), state)
            for row, (part, n) in enumerate(zip(parts, n_new, strict=True)):
                made[row, part], n_read[row] = x_BND[row, :n], part.stop
        assert lengths == [128, 128]  # tokens 128 to 255, of the last row in the third part
        expected = model.set_impl("reference") or model.hidden(ids_BT)
    assert (made - expected).norm() <= 1e-5 * expected.norm()
