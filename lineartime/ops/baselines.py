"""The attention of the paper's linear-complexity baselines: Performer with a ReLU kernel, and Combiner-Axial.

Both take one document at a time, `[B, T, H, K]` with its first token at place 0; `mhsa.py` cuts rows into documents.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.layers import at_least_float32

KERNEL_EPSILON = 1e-3
"""Added to every feature, of queries and keys alike: it keeps the sum that is divided by above zero."""
BLOCK = 128
"""Tokens whose prefix sums are taken at once by "matmul" and "blocks"."""


def relu_features(x: Tensor) -> Tensor:
    """phi(x) = relu(x) + 1e-3, float32 at least: Performer's generalised attention without a random projection."""
    return torch.relu(at_least_float32(x)) + KERNEL_EPSILON


def with_ones(v_BTHK: Tensor) -> Tensor:
    """v with a column of ones behind it, float32 at least: one state then holds numerator and denominator."""
    v_BTHK = at_least_float32(v_BTHK)
    return torch.cat([v_BTHK, torch.ones_like(v_BTHK[..., :1])], dim=-1)


def performer_attention(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, *, causal: bool, prefix_sum: str = "blocks",
                        rotated: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """phi(q_t) sum_s phi(k_s) v_s / phi(q_t) sum_s phi(k_s), over s <= t when causal: `[B, T, H, K]`.

    q, k: rotated already, or not if `rotated` holds RoPE(phi(q)) and RoPE(phi(k)): then these make the numerator alone
    (RoFormer's Eq. 19). prefix_sum: how the causal sums are taken, see `prefix_read`; the results are equal up to
    rounding."""
    fq, fk, v1 = relu_features(q_BTHK), relu_features(k_BTHK), with_ones(v_BTHK)
    if rotated is None:
        y = read_sums(fq, fk, v1, causal, prefix_sum)
        return (y[..., :-1] / y[..., -1:]).to(v_BTHK.dtype)
    rq, rk = (at_least_float32(x) for x in rotated)
    numerator = read_sums(rq, rk, v1[..., :-1], causal, prefix_sum)
    return (numerator / read_sums(fq, fk, v1[..., -1:], causal, prefix_sum)).to(v_BTHK.dtype)


def read_sums(fq_BTHM: Tensor, fk_BTHM: Tensor, v_BTHK: Tensor, causal: bool, prefix_sum: str) -> Tensor:
    """q_t sum_s k_s^T v_s, over s <= t when causal."""
    if causal:
        return prefix_read(fq_BTHM, fk_BTHM, v_BTHK, prefix_sum)[0]
    return torch.einsum("bthm,bhmk->bthk", fq_BTHM, torch.einsum("bthm,bthk->bhmk", fk_BTHM, v_BTHK))


def prefix_read(fq_BTHM: Tensor, fk_BTHM: Tensor, v_BTHK: Tensor, prefix_sum: str,
                initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q_t (initial + sum_{s <= t} k_s^T v_s), `[B, T, H, K]`, and the last sum state_BHMK.

    prefix_sum "scan": a cumulative sum over T states of M x K. "matmul": the same states by products with triangles of
    ones, in blocks (the paper's Performer-Matmul). "blocks": no state per token, but one per block, and masked products
    inside a block. An exclusive sum is a shifted inclusive one: subtracting would let later tokens in by rounding."""
    n_rows, n_tokens, n_heads, width = fq_BTHM.shape
    if initial is None:
        initial = v_BTHK.new_zeros(n_rows, n_heads, width, v_BTHK.shape[-1])
    if prefix_sum == "scan":
        state_BTHMK = torch.einsum("bthm,bthk->bthmk", fk_BTHM, v_BTHK).cumsum(1) + initial[:, None]
        return torch.einsum("bthm,bthmk->bthk", fq_BTHM, state_BTHMK), state_BTHMK[:, -1]
    missing = -n_tokens % BLOCK
    fq, fk, v = (F.pad(x, [0, 0, 0, 0, 0, missing]).unflatten(1, (-1, BLOCK)) for x in (fq_BTHM, fk_BTHM, v_BTHK))
    ones_CC = torch.ones(BLOCK, BLOCK, dtype=v.dtype, device=v.device).tril()
    sum_BGHMK = at_least_float32(torch.einsum("bgchm,bgchk->bghmk", fk, v)).cumsum(1) + initial[:, None]
    before_BGHMK = torch.cat([initial[:, None], sum_BGHMK[:, :-1]], dim=1)
    if prefix_sum == "matmul":
        added = torch.einsum("bgchm,bgchk->bgchmk", fk, v)
        state = torch.einsum("cj,bgjhmk->bgchmk", ones_CC, added) + before_BGHMK[:, :, None]
        y = torch.einsum("bgchm,bgchmk->bgchk", fq, state)
    else:
        a_BGHCJ = torch.einsum("bgchm,bgjhm->bghcj", fq, fk) * ones_CC
        y = torch.einsum("bghcj,bgjhk->bgchk", a_BGHCJ, v) + torch.einsum("bgchm,bghmk->bgchk", fq, before_BGHMK)
    return y.flatten(1, 2)[:, :n_tokens], sum_BGHMK[:, -1]


def rowmajor_axial_attention(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor,
                             summarise: Callable[[Tensor], Tensor], *, chunk_size: int, causal: bool,
                             own_summary: bool = True, earlier: tuple[Tensor, Tensor] | None = None,
                             ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Combiner's rowmajor-axial attention (Ren et al. 2021): the document in rows of C tokens; a query sees the tokens
    of its row, and of every other row one summary, made for its own place in the row. Returns `[B, T, H, K]` and the
    summaries' keys and values, `[B, G, C, H, K]` each.

    q and k are rotated already. summarise: summary values `[B, G, C, H, K]` to summary keys. A causal query sees the
    summaries of earlier rows only; a summary is made from its whole row, later tokens too. When not causal the own row
    counts twice, as tokens and as a summary, unless `own_summary` is false. earlier: summaries of rows before these.

    | step | formula |
    |---|---|
    | tokens | a_ij = q_i k_j / sqrt(K) in a row |
    | summary | vs_i = sum_j softmax_j(a_ij) v_j, never masked; ks = summarise(vs) |
    | summaries | s_if = q_i ks_fi / sqrt(K), row f, the query's place i |
    | result | softmax over both, [a, s], times [v, vs] |

    In the last row only places that have a token have a summary."""
    n_tokens, width, missing = q_BTHK.shape[1], q_BTHK.shape[-1], -q_BTHK.shape[1] % chunk_size
    q, k, v = (F.pad(x, [0, 0, 0, 0, 0, missing]).unflatten(1, (-1, chunk_size)) for x in (q_BTHK, k_BTHK, v_BTHK))
    q = q / width**0.5
    there_GC = (torch.arange(n_tokens + missing, device=q.device) < n_tokens).view(-1, chunk_size)
    a_BGHCJ = at_least_float32(torch.einsum("bgihk,bgjhk->bghij", q, k))
    lowest = torch.finfo(a_BGHCJ.dtype).min
    a_BGHCJ = a_BGHCJ.masked_fill(~there_GC[:, None, None, :], lowest)
    vs_BGCHK = torch.einsum("bghij,bgjhk->bgihk", a_BGHCJ.softmax(-1).to(v.dtype), v)
    ks_BGCHK = summarise(vs_BGCHK)
    n_rows = q.shape[1]
    ks_BFCHK, vs_BFCHK, seen_CF = ks_BGCHK, vs_BGCHK, there_GC.T
    row_G, row_F = torch.arange(n_rows, device=q.device), torch.arange(n_rows, device=q.device)
    if earlier is not None:
        ks_BFCHK, vs_BFCHK = torch.cat([earlier[0], ks_BGCHK], dim=1), torch.cat([earlier[1], vs_BGCHK], dim=1)
        seen_CF = F.pad(seen_CF, [earlier[0].shape[1], 0], value=True)
        row_F = torch.arange(-earlier[0].shape[1], n_rows, device=q.device)
    seen_GCF = seen_CF.expand(n_rows, -1, -1)
    if causal:
        seen_GCF = seen_GCF & (row_F < row_G[:, None])[:, None, :]
        a_BGHCJ = a_BGHCJ.masked_fill(~torch.ones_like(a_BGHCJ[0, 0, 0], dtype=torch.bool).tril(), lowest)
    elif not own_summary:
        seen_GCF = seen_GCF & (row_F != row_G[:, None])[:, None, :]
    s_BGHCF = at_least_float32(torch.einsum("bgihk,bfihk->bghif", q, ks_BFCHK))
    s_BGHCF = s_BGHCF.masked_fill(~seen_GCF[:, None], lowest)
    w_BGHCW = torch.cat([a_BGHCJ, s_BGHCF], dim=-1).softmax(-1).to(v.dtype)
    direct, summed = w_BGHCW.split([chunk_size, s_BGHCF.shape[-1]], dim=-1)
    out = torch.einsum("bghij,bgjhk->bgihk", direct, v) + torch.einsum("bghif,bfihk->bgihk", summed, vs_BFCHK)
    return out.flatten(1, 2)[:, :n_tokens], (ks_BGCHK, vs_BGCHK)
