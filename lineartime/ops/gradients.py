"""Gradients that both gated attentions have in common: of the scores' two heads, of the position bias, of the base z.

relu^2 divides by no sum over keys, so the gradient of a score is that of its weight times 2 relu(score), and every tile
of scores adds its own share to the rest.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.tiles import (
    HALF,
    diagonal_sums,
    dot,
    load_angles,
    load_base,
    load_rows,
    make_head,
    relu_tile,
    silu,
    silu_slope,
    store_rows,
    visible_tile,
)

BASE_TILE = 64
"""Tokens of a program that makes z's gradient."""


def score_tile(kind: torch.dtype, linear: bool) -> tuple[int, int, int, int, int]:
    """Own rows, others and columns of v of a tile of the scores' gradients, its warps, and stages of its loop."""
    if kind == torch.float32:
        return 32, 32, 32, 4, 2
    return (64, 128, 64, 8, 2) if linear else (128, 128, 64, 8, 2)


@triton.jit
def score_gradients_kernel(uvz, own_values, other_values, gamma, beta, sin, cos, w, documents, each, dheads, dw, T, E,
                           F, row_len, angles_stride, scale, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
                           DOCUMENTS: tl.constexpr, LINEAR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                           BE: tl.constexpr, N_SUMS: tl.constexpr):
    """The gradient of the q of BM queries, from all the keys that they see, or with the sides changed of the k of BM
    keys. values: of queries the gradient of the output, of keys v, so that their product is the weights' gradient."""
    kind = uvz.dtype.element_ty
    n_tiles = tl.cdiv(row_len, BM)
    row, tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    if OF_QUERIES:
        tile = n_tiles - 1 - tile  # those with the most keys begin first
    start = row * row_len
    n_tokens = tl.minimum(T - start, row_len)
    if tile * BM >= n_tokens:
        return
    first = tl.program_id(1).to(tl.int64) * T + start
    z_row = uvz + first * F + 2 * E
    angles = tl.program_id(1).to(tl.int64) * angles_stride + start.to(tl.int64) * HALF
    sin_row, cos_row = sin + angles, cos + angles
    own_row, other_row = own_values + first * E, other_values + first * E
    own = tile * BM + tl.arange(0, BM)
    own_head: tl.constexpr = 0 if OF_QUERIES else 1

    z1, z2 = load_base(z_row, own, n_tokens, F)
    sin_tile, cos_tile = load_angles(sin_row, cos_row, own, n_tokens)
    own1, own2 = make_head(z1, z2, gamma, beta, own_head, sin_tile, cos_tile, kind)
    own_document = own
    if DOCUMENTS:
        own_document = tl.load(documents + first + own, mask=own < n_tokens, other=-1)
    d1 = tl.zeros([BM, HALF], tl.float32)
    d2 = tl.zeros([BM, HALF], tl.float32)
    if LINEAR:
        l1 = tl.zeros([BM, HALF], tl.float32)
        l2 = tl.zeros([BM, HALF], tl.float32)

    begin, end = 0, n_tokens
    if CAUSAL:
        if OF_QUERIES:
            end = tl.minimum(tile * BM + BM, n_tokens)
        else:
            begin = tile * BM // BN * BN
    for at in range(begin, end, BN):
        other = at + tl.arange(0, BN)
        dweight = tl.zeros([BM, BN], tl.float32)
        for e in range(0, E, BE):
            column = e + tl.arange(0, BE)
            x = load_rows(own_row, own, column, n_tokens, E, E)
            dweight = dot(x, tl.trans(load_rows(other_row, other, column, n_tokens, E, E)), dweight)
        y1, y2 = load_base(z_row, other, n_tokens, F)
        other_sin, other_cos = load_angles(sin_row, cos_row, other, n_tokens)
        other1, other2 = make_head(y1, y2, gamma, beta, 1 - own_head, other_sin, other_cos, kind)
        other_document = other
        if DOCUMENTS:
            other_document = tl.load(documents + first + other, mask=other < n_tokens, other=-1)
        query, key = (own[:, None], other[None, :]) if OF_QUERIES else (other[None, :], own[:, None])
        query_document = own_document[:, None] if OF_QUERIES else other_document[None, :]
        key_document = other_document[None, :] if OF_QUERIES else own_document[:, None]
        visible = visible_tile(query, key, query_document, key_document, n_tokens, CAUSAL, DOCUMENTS)
        relu = relu_tile(own1, own2, other1, other2, w + row_len - 1, key - query, visible, scale)
        dscore = 2.0 * relu * dweight
        if OF_QUERIES:
            n_others = tl.cdiv(row_len, BN)
            line = ((tl.program_id(1) * tl.cdiv(T, row_len) + row) * n_tiles + tile).to(tl.int64) * n_others + at // BN
            tl.store(dw + line * N_SUMS + tl.arange(0, N_SUMS), diagonal_sums(dscore, BM, BN, N_SUMS))
        d1 = dot(dscore.to(kind), other1, d1)
        d2 = dot(dscore.to(kind), other2, d2)
        if LINEAR:
            share = tl.load(each + first + query, mask=query < n_tokens, other=0.0)
            dlinear = tl.where(visible, dweight * share, 0.0).to(kind)
            linear1, linear2 = make_head(y1, y2, gamma, beta, 3 - own_head, other_sin, other_cos, kind)
            l1 = dot(dlinear, linear1, l1)
            l2 = dot(dlinear, linear2, l2)

    column = tl.arange(0, HALF)
    per_head = tl.num_programs(1).to(tl.int64) * T * 2 * HALF
    dhead = dheads + own_head * per_head + first * 2 * HALF
    store_rows(dhead, own, column, n_tokens, HALF, 2 * HALF, d1 * scale)
    store_rows(dhead + HALF, own, column, n_tokens, HALF, 2 * HALF, d2 * scale)
    if LINEAR:
        dhead += 2 * per_head
        l1 += load_rows(dhead, own, column, n_tokens, HALF, 2 * HALF).to(tl.float32)
        l2 += load_rows(dhead + HALF, own, column, n_tokens, HALF, 2 * HALF).to(tl.float32)
        store_rows(dhead, own, column, n_tokens, HALF, 2 * HALF, l1)
        store_rows(dhead + HALF, own, column, n_tokens, HALF, 2 * HALF, l2)


def score_gradients(uvz_BTF: Tensor, v_BTE: Tensor, do_BTE: Tensor, gamma_NS: Tensor, beta_NS: Tensor, sin: Tensor,
                    cos: Tensor, w: Tensor, documents_BT: Tensor | None, each_BT: Tensor | None, dheads_NBTS: Tensor, *,
                    row_len: int, scale_len: int, causal: bool) -> Tensor:
    """The gradients of relu(q k^T / n + b)^2 v, within rows of `row_len` tokens: returns dw, and writes those of the
    rotated q and k to dheads_NBTS[0] and [1].

    v_BTE: activated. do_BTE: the gradient of the product, before the gate. row_len: a chunk, or T; the last may be
    short. each_BT: where the weights also hold each[i] q_lin[i] k_lin[j] for all that i sees (float32); this part's
    gradient is added to dheads_NBTS[2] and [3]. dw: float32 `[2 row_len - 1]`, from one line of sums along diagonals
    for each tile of scores: row_len / 16 bytes a token with tiles of 128, as much as uvz itself for rows of 100K."""
    n_batch, n_tokens, e = v_BTE.shape
    bm, bn, be, warps, stages = score_tile(uvz_BTF.dtype, each_BT is not None)
    n_sums = triton.next_power_of_2(bm + bn - 1)
    n_rows, n_own, n_others = triton.cdiv(n_tokens, row_len), triton.cdiv(row_len, bm), triton.cdiv(row_len, bn)
    sums = torch.zeros(n_batch * n_rows, n_own, n_others, n_sums, dtype=torch.float32, device=uvz_BTF.device)
    for of_queries in (True, False):
        score_gradients_kernel[n_rows * n_own, n_batch](
            uvz_BTF, do_BTE if of_queries else v_BTE, v_BTE if of_queries else do_BTE, gamma_NS, beta_NS, sin, cos, w,
            documents_BT, each_BT, dheads_NBTS, sums, n_tokens, e, uvz_BTF.shape[2], row_len,
            0 if len(sin) == 1 else n_tokens * 64, 1 / scale_len, OF_QUERIES=of_queries, CAUSAL=causal,
            DOCUMENTS=documents_BT is not None, LINEAR=each_BT is not None, BM=bm, BN=bn, BE=be, N_SUMS=n_sums,
            num_warps=warps, num_stages=stages)
    return add_diagonals(sums.sum(0), bm, bn, row_len)


def add_diagonals(sums_QKD: Tensor, bm: int, bn: int, row_len: int) -> Tensor:
    """The sum of the scores' gradients along each diagonal of a row, from those of its tiles: dw."""
    parts = sums_QKD.unflatten(2, (-1, bn)).transpose(1, 2).flatten(2)  # neighbours overlap by whole tiles
    of_queries = add_shifted(parts.transpose(0, 1), bn)
    total = add_shifted(of_queries.flip(0), bm)
    return total[len(sums_QKD) * bm - row_len:][: 2 * row_len - 1]


def add_shifted(lines: Tensor, step: int) -> Tensor:
    """The sum over the first axis of lines along the last, of which each begins `step` later than the one before."""
    n_lines, length = lines.shape[0], lines.shape[-1]
    blocks = F.pad(lines, [0, -length % step]).unflatten(-1, (-1, step)).movedim(-2, 1)
    n_blocks = blocks.shape[1]
    padded = F.pad(blocks, [0, 0] * (blocks.dim() - 2) + [0, n_lines]).flatten(0, 1)
    shifted = padded[: n_lines * (n_blocks + n_lines - 1)].unflatten(0, (n_lines, -1))
    return shifted.sum(0).movedim(0, -2).flatten(-2)


@triton.jit
def base_gradient_kernel(uvz, dheads, gamma, beta, sin, cos, duvz, sums, T, E, F, angles_stride, N: tl.constexpr,
                         BT: tl.constexpr):
    """z's gradient for BT tokens of a row, and their sums for the gradients of scales and offsets."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.arange(0, HALF)
    batch = tl.program_id(1).to(tl.int64)
    first, angles = batch * T, batch * angles_stride
    z_row = uvz + first * F + 2 * E
    z1 = load_rows(z_row, token, column, T, HALF, F).to(tl.float32)
    z2 = load_rows(z_row + HALF, token, column, T, HALF, F).to(tl.float32)
    sin_tile, cos_tile = load_angles(sin + angles, cos + angles, token, T)
    dz1 = tl.zeros([BT, HALF], tl.float32)
    dz2 = tl.zeros([BT, HALF], tl.float32)
    program = batch * tl.num_programs(0) + tl.program_id(0)
    for head in tl.static_range(N):
        dhead = dheads + (head * tl.num_programs(1).to(tl.int64) * T + first) * 2 * HALF
        turned1 = load_rows(dhead, token, column, T, HALF, 2 * HALF).to(tl.float32)
        turned2 = load_rows(dhead + HALF, token, column, T, HALF, 2 * HALF).to(tl.float32)
        d1 = turned1 * cos_tile + turned2 * sin_tile
        d2 = turned2 * cos_tile - turned1 * sin_tile
        at = head * 2 * HALF + column
        dz1 += d1 * tl.load(gamma + at).to(tl.float32)[None, :]
        dz2 += d2 * tl.load(gamma + at + HALF).to(tl.float32)[None, :]
        sums_of = sums + (program * 2 * N + head) * 2 * HALF + column
        tl.store(sums_of, tl.sum(d1 * silu(z1), 0))
        tl.store(sums_of + HALF, tl.sum(d2 * silu(z2), 0))
        tl.store(sums_of + N * 2 * HALF, tl.sum(d1, 0))
        tl.store(sums_of + (2 * N + 1) * HALF, tl.sum(d2, 0))
    dz_row = duvz + first * F + 2 * E
    store_rows(dz_row, token, column, T, HALF, F, dz1 * silu_slope(z1))
    store_rows(dz_row + HALF, token, column, T, HALF, F, dz2 * silu_slope(z2))


def base_gradient(uvz_BTF: Tensor, dheads_NBTS: Tensor, gamma_NS: Tensor, beta_NS: Tensor, sin: Tensor, cos: Tensor,
                  duvz_BTF: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradients of all heads made of z (`make_heads`) that of z before its silu, written to its columns of
    duvz_BTF, and those of scales and offsets: dgamma_NS and dbeta_NS in float32."""
    n_heads, n_batch, n_tokens, s = dheads_NBTS.shape
    f = uvz_BTF.shape[2]
    grid = triton.cdiv(n_tokens, BASE_TILE), n_batch
    sums = torch.empty(grid[0] * grid[1], 2, n_heads, s, dtype=torch.float32, device=uvz_BTF.device)
    base_gradient_kernel[grid](uvz_BTF, dheads_NBTS, gamma_NS, beta_NS, sin, cos, duvz_BTF, sums, n_tokens,
                               (f - s) // 2, f, 0 if len(sin) == 1 else n_tokens * s // 2, N=n_heads, BT=BASE_TILE,
                               num_warps=8)
    dgamma_NS, dbeta_NS = sums.sum(0)
    return dgamma_NS, dbeta_NS
