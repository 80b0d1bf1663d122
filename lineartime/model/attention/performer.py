"""Performer's core: linear attention with a ReLU kernel, an op, a constant cache, and a core."""

import dataclasses

import torch
from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import SequenceInfo, by_document, rotate_heads
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import Exchange, from_chunks, product, to_chunks

KERNEL_EPSILON = 1e-3  # added to every feature of queries and keys; it keeps the denominator above zero
PREFIX_BLOCK = 128  # tokens per block of the prefix sums "matmul" and "blocks"


def relu_features(x: Tensor) -> Tensor:
    """phi(x) = relu(x) + 1e-3, float32 at least: without random projections."""
    return torch.relu(at_least_float32(x)) + KERNEL_EPSILON


def with_ones(v_BTHK: Tensor) -> Tensor:
    """v and a column of ones, float32 at least: a state has both sums."""
    v_BTHK = at_least_float32(v_BTHK)
    return torch.cat([v_BTHK, torch.ones_like(v_BTHK[..., :1])], dim=-1)


def performer_attention(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, *, causal: bool,
                        prefix_sum: str = "blocks", past_BHMK: Tensor | None = None) -> Tensor:
    """sum_s phi(q_t) phi(k_s) v_s / sum_s phi(q_t) phi(k_s), s <= t when causal: `[B, T, H, K]`.

    The rows are one document each; q and k are after RoPE. prefix_sum: see `prefix_read`.
    past_BHMK: the sum of phi(k_s) [v_s, 1] over the document's tokens that are not in the rows."""
    fq, fk, v1 = relu_features(q_BTHK), relu_features(k_BTHK), with_ones(v_BTHK)
    if causal:
        y = prefix_read(fq, fk, v1, prefix_sum, past_BHMK)[0]
    else:
        state_BHMK = product("bthm,bthk->bhmk", fk, v1)
        y = product("bthm,bhmk->bthk", fq, state_BHMK if past_BHMK is None else state_BHMK + past_BHMK)
    return (y[..., :-1] / y[..., -1:]).to(v_BTHK.dtype)


def prefix_read(fq_BTHM: Tensor, fk_BTHM: Tensor, v_BTHK: Tensor, prefix_sum: str,
                initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q_t (initial + sum_{s <= t} k_s^T v_s), `[B, T, H, K]`, and the last sum state_BHMK.

    prefix_sum "scan": a cumulative sum over T states of M x K, for M features. "matmul": the same
    states by matmuls with triangles of ones, in blocks (the paper's Performer-Matmul). "blocks":
    one state per block, and masked scores inside a block. They are equal up to rounding. No sum is
    a difference, whose rounding would leak."""
    n_rows, n_tokens, n_heads, width = fq_BTHM.shape
    if initial is None:
        initial = v_BTHK.new_zeros(n_rows, n_heads, width, v_BTHK.shape[-1])
    if n_tokens == 0:
        return v_BTHK, initial
    if prefix_sum == "scan":
        state_BTHMK = product("bthm,bthk->bthmk", fk_BTHM, v_BTHK).cumsum(1) + initial[:, None]
        return product("bthm,bthmk->bthk", fq_BTHM, state_BTHMK), state_BTHMK[:, -1]
    # In blocks: the state behind each block, and before it, by a cumulative sum over blocks.
    fq, fk, v = (to_chunks(x, PREFIX_BLOCK) for x in (fq_BTHM, fk_BTHM, v_BTHK))
    ones_CC = torch.ones(PREFIX_BLOCK, PREFIX_BLOCK, dtype=v.dtype, device=v.device).tril()
    sum_BGHMK = at_least_float32(product("bgchm,bgchk->bghmk", fk, v)).cumsum(1) + initial[:, None]
    before_BGHMK = torch.cat([initial[:, None], sum_BGHMK[:, :-1]], dim=1)
    if prefix_sum == "matmul":  # a state per token, by a triangle of ones
        added = product("bgchm,bgchk->bgchmk", fk, v)
        state = product("cj,bgjhmk->bgchmk", ones_CC, added) + before_BGHMK[:, :, None]
        y = product("bgchm,bgchmk->bgchk", fq, state)
    else:  # masked scores in the block, and the state before it
        a_BGHCJ = product("bgchm,bgjhm->bghcj", fq, fk) * ones_CC
        y = product("bghcj,bgjhk->bgchk", a_BGHCJ, v) + product("bgchm,bghmk->bgchk", fq, before_BGHMK)
    return from_chunks(y, n_tokens), sum_BGHMK[:, -1]


@dataclasses.dataclass
class PrefixState(Cache):
    """The cache of one layer: the sum of phi(k) [v, 1] over the current document."""

    kv_BHMK: Tensor


@dataclasses.dataclass
class Performer:
    """`performer_attention` of each document."""

    config: ModelConfig

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo,
               cache: Cache | None = None) -> Tensor:
        q_BTHK, k_BTHK = rotate_heads(q_BTHK, info, self.config), rotate_heads(k_BTHK, info, self.config)
        if isinstance(cache, PrefixState) and info.inputs is not None:
            return self.extend(q_BTHK, k_BTHK, v_BTHK, info.inputs, cache)
        heads = (q_BTHK, k_BTHK, v_BTHK)
        documents, exchange = by_document(heads, info), info.exchange
        pasts = [None] * len(documents) if exchange is None else self.pasts(*heads[1:], info, exchange)
        parts = [performer_attention(*qkv, causal=self.config.causal, prefix_sum=self.config.prefix_sum or "blocks",
                                     past_BHMK=past) for qkv, past in zip(documents, pasts, strict=True)]
        return torch.cat(parts, dim=1).view_as(v_BTHK).flatten(2)

    def pasts(self, k_BTHK: Tensor, v_BTHK: Tensor, info: SequenceInfo, exchange: Exchange) -> list[Tensor | None]:
        """past_BHMK of each document of `by_document`: what other parts of its row have."""
        ids_BT, n_tokens = info.segment_ids_BT, k_BTHK.shape[1]
        assert ids_BT is not None and info.cu_seqlens is not None
        # What this part hands on: the sum of its last document, if not causal also of document 0.
        last_B = ids_BT.amax(1)
        handed_on = [last_B] if self.config.causal else [last_B, torch.zeros_like(last_B)]
        fk, v1 = relu_features(k_BTHK), with_ones(v_BTHK)
        leaving = [at_least_float32(product("bthm,bthk->bhmk", fk * of_BT[..., None, None], v1))
                   for of_BT in ((ids_BT == document_B[:, None]) & (ids_BT >= 0) for document_B in handed_on)]
        entering_DBF = exchange(torch.stack(leaving).flatten(2), last_B == 0)
        # 0 where nothing enters, and not left out: else this part would skip its backward pass.
        entering = [torch.where(enters_B[:, None], entering_BF, 0.0).view_as(leaving[0]) for enters_B, entering_BF in
                    zip((ids_BT[:, 0] == 0, last_B >= 0), entering_DBF, strict=False)]
        # The first document of a row goes on from before, and if not causal the last one after it.
        starts, last = info.cu_seqlens[:-1], last_B.tolist()
        pasts: list[Tensor | None] = []
        for start, document in zip(starts, ids_BT.flatten()[starts].tolist(), strict=True):
            row = start // n_tokens
            takes = [start % n_tokens == 0, document == last[row]]
            parts = [part[row, None] for part, does in zip(entering, takes, strict=False) if does]
            pasts.append(sum(parts[1:], parts[0]) if parts else None)
        return pasts

    def empty_cache(self, n_rows: int, weight: Tensor) -> Cache:
        k = self.config.qk_width
        return PrefixState(at_least_float32(weight.new_zeros(n_rows, self.config.n_heads, k, k + 1)))

    def extend(self, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, inputs: DecodeInputs,
               cache: PrefixState) -> Tensor:
        # A step is one update, one read and one division.
        fq, fk, v1 = relu_features(q_BNHK), relu_features(k_BNHK), with_ones(v_BNHK)
        if inputs.single_token:
            if cache.wants_gradient([fq, fk, v1]):
                cache.kv_BHMK = cache.kv_BHMK.clone()
            if inputs.any_begins:
                cache.kv_BHMK.masked_fill_(inputs.begins_BN[:, :1, None, None], 0.0)
            cache.kv_BHMK += product("bnhm,bnhk->bhmk", fk, v1)
            y = product("bnhm,bhmk->bnhk", fq, cache.kv_BHMK)
            return (y[..., :-1] / y[..., -1:]).to(v_BNHK.dtype).flatten(2)
        # Several tokens: each row's documents in turn, a new document from an empty sum.
        out = torch.zeros_like(v_BNHK)
        states = list(cache.kv_BHMK.split(1))
        for row in range(len(v_BNHK)):
            for start, stop, begins in inputs.documents(row):
                q, k, v = (x[row : row + 1, start:stop] for x in (fq, fk, v1))
                y, states[row] = prefix_read(q, k, v, "blocks", None if begins else states[row])
                out[row, start:stop] = (y[0, ..., :-1] / y[0, ..., -1:]).to(out.dtype)
        cache.kv_BHMK = torch.cat(states)
        return out.flatten(2)
