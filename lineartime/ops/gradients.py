"""Gradients that both gated attentions share: of the scores' q and k, of the bias, and of z.

relu^2 has no sum over keys in a denominator, so the gradient of a score is that of its weight times
2 relu(score). Tiles of scores are therefore independent of one another."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops import tiles
from lineartime.ops.reference import add_shifted
from lineartime.ops.tiles import HALF, SIZE, dot, head_product, load_tile, silu, store_tile

BASE_TILE = 16  # Tokens per program for heads or dz. A multiprocessor holds one program of 32, three of 16.
SCORES_AT_ONCE = 2**28  # scores whose gradients, or in FLASH-Quad weights, are in memory at a time


def score_tile(dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """For a tile of dscores: queries, keys, columns of v at a time, warps, stages of the loop."""
    return (64, 64, 32, 8, 2) if dtype == torch.float32 else (128, 128, 64, 8, 3)


@triton.jit
def make_heads_kernel(uvz, gamma, beta, sin, cos, heads, T, E, F, angles_stride, N: tl.constexpr, BT: tl.constexpr):
    """All heads of BT tokens, after RoPE."""
    # z is loaded once, and every head is made from it in registers.
    start, batch = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    token, column, left = tl.arange(0, BT), tl.arange(0, HALF), T - start
    angles = batch * angles_stride + start * HALF
    z1, z2 = tiles.load_base(uvz + (batch * T + start) * F + 2 * E, token, left, F)
    sin_tile, cos_tile = tiles.load_angles(sin + angles, cos + angles, token, left)
    for head in tl.static_range(N):
        made1, made2 = tiles.make_head(z1, z2, gamma, beta, head, sin_tile, cos_tile, heads.dtype.element_ty)
        row = heads + ((head * tl.num_programs(1) + batch) * T + start) * SIZE
        store_tile(row, token, column, left, SIZE, made1)
        store_tile(row + HALF, token, column, left, SIZE, made2)


@triton.jit
def differentiate_scores(q, k, v, do, w, documents, each, dscores, dlinear, sums, T, E, row_len, first_row, first_tile,
                         n_query_tiles, scale, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, LINEAR: tl.constexpr,
                         BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr):
    """The gradients of the scores of BM queries and BN keys, 0 where masked, and their sums along
    diagonals. A tile that the causal mask hides entirely is not written."""
    # The tile: queries from m on and keys from n on of a row of `row_len` tokens, or fewer.
    dtype = q.dtype.element_ty
    n_key_tiles = tl.cdiv(row_len, BN)
    n_tile, m_tile = tl.program_id(0) % n_key_tiles, tl.program_id(0) // n_key_tiles
    row = first_row + m_tile // n_query_tiles
    m, n = (first_tile + m_tile % n_query_tiles) * BM, n_tile * BN
    n_rows = tl.cdiv(T, row_len)
    start = row % n_rows * row_len
    n_tokens = tl.minimum(T - start, row_len)
    if (m >= n_tokens) | (n >= n_tokens) | (CAUSAL & (n >= m + BM)):
        return
    first = (row // n_rows).to(tl.int64) * T + start
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    query, key = (m + i)[:, None], (n + j)[None, :]
    # The score as in the forward pass, on top of the bias.
    visible = tiles.visible_tile(query, key, documents, first, n_tokens, CAUSAL, DOCUMENTS)
    score = head_product(q + (first + m) * SIZE, i, n_tokens - m, k + (first + n) * SIZE, j, n_tokens - n,
                         tl.load(w + (key - query)), BE)
    # The derivative of relu(s)^2 is 2 relu(s), times the derivative of the scaled score.
    slope = tl.where(visible, 2.0 * scale * tl.maximum(score, 0.0), 0.0)

    # The gradient of the weights, do v^T, by BE columns at a time.
    dweight = tl.zeros([BM, BN], tl.float32)
    for e in range(0, E, BE):
        column = e + tl.arange(0, BE)
        x = load_tile(do + (first + m) * E, i, column, n_tokens - m, E, E)
        y = load_tile(v + (first + n) * E, j, column, n_tokens - n, E, E)
        dweight = dot(x, tl.trans(y), dweight)
    # The gradient of the score, of the linear term if not causal; diagonals are the bias's.
    into = m_tile.to(tl.int64) * BM * n_key_tiles * BN + n
    at = i[:, None] * (n_key_tiles * BN) + j[None, :]
    dscore = slope * dweight
    tl.store(dscores + into + at, dscore.to(dtype))
    if LINEAR:
        share = tl.load(each + first + query, mask=query < n_tokens, other=0.0)
        tl.store(dlinear + into + at, tl.where(visible, dweight * share, 0.0).to(dtype))
    store_diagonal_sums(sums, m_tile.to(tl.int64) * n_key_tiles + n_tile, dscore, BM, BN)


@triton.jit
def store_diagonal_sums(sums, line, tile, BM: tl.constexpr, BN: tl.constexpr):
    """Sums along the diagonals of a tile: of n BN entries d sums column - row = d - (n - 1) BN.

    Row i is rotated left by i, which turns diagonals into columns. An entry that wraps around p
    times belongs to the diagonal p BN further down."""
    n: tl.constexpr = (BM + 2 * BN - 2) // BN
    i, d = tl.arange(0, BM)[:, None], tl.arange(0, BN)
    turned = tl.gather(tile, (i + d[None, :]) % BN, 1)
    for p in tl.static_range(n):
        total = tl.sum(tl.where((i + d[None, :]) // BN == p, turned, 0.0), 0)
        tl.store(sums + line * n * BN + (n - 1 - p) * BN + d, total)


@triton.jit
def differentiate_head(dscores, other_heads, dhead, T, row_len, first_row, first_query, n_queries, stride, scale,
                       OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr,
                       BK: tl.constexpr):
    """The gradient of BM queries, dscores times the keys, or else that of BM keys, from queries."""
    n_rows, n_tiles = tl.cdiv(T, row_len), tl.cdiv(n_queries if OF_QUERIES else row_len, BM)
    row = tl.program_id(0) // n_tiles
    own = tl.program_id(0) % n_tiles * BM
    start = (first_row + row) % n_rows * row_len
    n_tokens = tl.minimum(T - start, row_len)
    first = ((first_row + row) // n_rows).to(tl.int64) * T + start
    # The other side: all keys for queries, the part's queries for keys; less what causality hides.
    begin, end = 0, n_tokens
    if OF_QUERIES:
        own += first_query
    else:
        begin, end = first_query, tl.minimum(first_query + n_queries, n_tokens)
    if CAUSAL:
        if OF_QUERIES:
            end = tl.minimum(end, own + BM)
        else:
            begin = tl.maximum(begin, own // BK * BK)
    if own >= n_tokens:
        return
    # dscores, for keys transposed, times the other head; then the scale, and earlier parts.
    i, j, column = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, SIZE)
    dscores += row.to(tl.int64) * n_queries * stride
    total = tl.zeros([BM, SIZE], tl.float32)
    for other in range(begin, end, BK):
        if OF_QUERIES:
            x = tl.load(dscores + (own - first_query).to(tl.int64) * stride + other + i[:, None] * stride + j[None, :])
        else:
            x = tl.trans(tl.load(dscores + (other - first_query).to(tl.int64) * stride + own
                                 + j[:, None] * stride + i[None, :]))
        total = dot(x, load_tile(other_heads + (first + other) * SIZE, j, column, n_tokens - other, SIZE), total)
    total *= scale
    into = dhead + (first + own) * SIZE
    if ADD:
        total += load_tile(into, i, column, n_tokens - own, SIZE).to(tl.float32)
    store_tile(into, i, column, n_tokens - own, SIZE, total)


def launch_make_heads(uvz_BTF: Tensor, gamma_NS: Tensor, beta_NS: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """`reference.make_heads` of z before silu: heads_NBTS."""
    n_batch, n_tokens, f = uvz_BTF.shape
    n_heads, s = gamma_NS.shape
    heads_NBTS = torch.empty(n_heads, n_batch, n_tokens, s, dtype=uvz_BTF.dtype, device=uvz_BTF.device)
    make_heads_kernel[triton.cdiv(n_tokens, BASE_TILE), n_batch](
        uvz_BTF, gamma_NS, beta_NS, sin, cos, heads_NBTS, n_tokens, (f - s) // 2, f,
        0 if len(sin) == 1 else n_tokens * s // 2, N=n_heads, BT=BASE_TILE, num_warps=8)
    return heads_NBTS


class Part(NamedTuple):
    """The scores that are in memory at a time: whole rows, or some tiles of queries of one."""

    first_row: int
    n_rows: int
    first_tile: int
    n_tiles: int
    n_keys: int  # keys of a row, in whole tiles


def score_parts(n_rows: int, row_len: int, bm: int, bn: int) -> list[Part]:
    """All scores of `n_rows` rows in tiles, SCORES_AT_ONCE each; the first part is the largest."""
    # As many tiles of queries as fit: of several whole rows, or of a part of one.
    n_tiles, n_keys = triton.cdiv(row_len, bm), triton.cdiv(row_len, bn) * bn
    at_once = max(SCORES_AT_ONCE // (bm * n_keys), 1)
    rows_at_once, tiles_at_once = max(at_once // n_tiles, 1), min(at_once, n_tiles)
    return [Part(row, min(rows_at_once, n_rows - row), tile, min(tiles_at_once, n_tiles - tile), n_keys)
            for row in range(0, n_rows, rows_at_once) for tile in range(0, n_tiles, tiles_at_once)]


def score_gradients(heads_NBTS: Tensor, v_BTE: Tensor, do_BTE: Tensor, w: Tensor, documents_BT: Tensor | None,
                    each_BT: Tensor | None, dheads_NBTS: Tensor, *, row_len: int, scale_len: float,
                    causal: bool) -> Tensor:
    """The gradients of relu(q k^T / n + b)^2 v, within rows of `row_len` tokens: returns dw,
    float32 `[2 row_len - 1]`, and writes those of q and k after RoPE to dheads_NBTS[0] and [1].

    v_BTE: after silu. do_BTE: the gradient of the attention output before the gate. row_len: C, or
    T; the last row may be shorter. each_BT, float32: if given, the weights also have the term
    each[i] q_lin[i] k_lin[j] for all j that i sees; the gradients of this term are added to
    dheads_NBTS[2] and [3].

    The gradient of a score is a sum over E and is read twice, for q and for k. So the scores'
    gradients are written to memory, a `Part` at a time."""
    n_batch, n_tokens, e = v_BTE.shape
    bm, bn, be, warps, stages = score_tile(v_BTE.dtype)
    parts = score_parts(n_batch * triton.cdiv(n_tokens, row_len), row_len, bm, bn)
    w_padded = F.pad(w.float() * scale_len, [bm, bn])[bm + row_len - 1:]
    dw = torch.zeros(2 * row_len - 1, dtype=torch.float32, device=w.device)
    # With a row's queries in several parts dk is a sum, in float32 until the last.
    dk_BTS, in_parts = dheads_NBTS[1], parts[-1].first_tile > 0
    if in_parts:
        dk_BTS = torch.zeros_like(dk_BTS, dtype=torch.float32)

    for part in parts:
        # Gradients of the part's scores and of the linear term, and sums of each tile's diagonals.
        n_key_tiles = part.n_keys // bn
        dscores = v_BTE.new_empty(part.n_rows, part.n_tiles * bm, part.n_keys)
        dlinear = None if each_BT is None else torch.empty_like(dscores)
        sums = v_BTE.new_zeros(part.n_rows, part.n_tiles, n_key_tiles, (bm + 2 * bn - 2) // bn, bn, dtype=torch.float32)
        differentiate_scores[part.n_rows * part.n_tiles * n_key_tiles,](
            heads_NBTS[0], heads_NBTS[1], v_BTE, do_BTE, w_padded, documents_BT, each_BT, dscores, dlinear, sums,
            n_tokens, e, row_len, part.first_row, part.first_tile, part.n_tiles, 1 / scale_len, CAUSAL=causal,
            DOCUMENTS=documents_BT is not None, LINEAR=each_BT is not None, BM=bm, BN=bn, BE=be, num_warps=warps,
            num_stages=stages)
        dw += add_diagonals(sums.sum(0), bm, part.first_tile, row_len)
        how = part, n_tokens, row_len, causal
        add_head_gradient(dscores, heads_NBTS[1], dheads_NBTS[0], 1 / scale_len, *how, of_queries=True, add=False)
        add_head_gradient(dscores, heads_NBTS[0], dk_BTS, 1 / scale_len, *how, of_queries=False, add=in_parts)
        if dlinear is not None:
            add_head_gradient(dlinear, heads_NBTS[3], dheads_NBTS[2], 1.0, *how, of_queries=True, add=True)
            add_head_gradient(dlinear, heads_NBTS[2], dheads_NBTS[3], 1.0, *how, of_queries=False, add=True)
    if in_parts:
        dheads_NBTS[1] = dk_BTS
    return dw


def add_head_gradient(dscores: Tensor, other_head_BTS: Tensor, dhead_BTS: Tensor, scale: float, part: Part,
                      n_tokens: int, row_len: int, causal: bool, *, of_queries: bool, add: bool) -> None:
    """Run `differentiate_head`: dscores times the other head into dhead_BTS, or added to it."""
    bm, *_ = score_tile(dscores.dtype)
    # A head's tile: its tokens, and those of the other side at a time; both divide a `score_tile`.
    own, others, warps, stages = (64, 32, 8, 3) if dscores.dtype == torch.float32 else (128, 64, 8, 3)
    n_queries = part.n_tiles * bm
    n_own = triton.cdiv(n_queries if of_queries else row_len, own)
    differentiate_head[part.n_rows * n_own,](
        dscores, other_head_BTS, dhead_BTS, n_tokens, row_len, part.first_row, part.first_tile * bm, n_queries,
        part.n_keys, scale, OF_QUERIES=of_queries, CAUSAL=causal, ADD=add, BM=own, BK=others, num_warps=warps,
        num_stages=stages)


def add_diagonals(sums_QKND: Tensor, bm: int, first_tile: int, row_len: int) -> Tensor:
    """dw, `[2 row_len - 1]`: sums along the diagonals of a row, from those of its tiles."""
    # One tile further right distances are larger by bn, one further down smaller by bm.
    n_query_tiles, _, n, bn = sums_QKND.shape
    of_queries = add_shifted(sums_QKND.permute(2, 0, 1, 3).flatten(2), bn)
    total = add_shifted(of_queries.flip(0), bm)
    before = (n - 1) * bn + (first_tile + n_query_tiles - 1) * bm + 1 - row_len  # entries before those of dw
    return F.pad(total, [-before, before + 2 * row_len - 1 - len(total)])


@triton.jit
def base_gradient_kernel(uvz, dheads, gamma, sin, cos, duvz, sums, T, E, F, angles_stride, N: tl.constexpr,
                         BT: tl.constexpr):
    """The gradient of z for BT tokens, and their sums for the gradients of scales and offsets."""
    start, batch = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    token, column, left = tl.arange(0, BT), tl.arange(0, HALF), T - start
    first, angles = batch * T + start, batch * angles_stride + start * HALF
    z_row = uvz + first * F + 2 * E
    z1 = load_tile(z_row, token, column, left, F).to(tl.float32)
    z2 = load_tile(z_row + HALF, token, column, left, F).to(tl.float32)
    sin_tile, cos_tile = tiles.load_angles(sin + angles, cos + angles, token, left)
    dz1, dz2 = tl.zeros([BT, HALF], tl.float32), tl.zeros([BT, HALF], tl.float32)
    sums_row = sums + (batch * tl.num_programs(0) + tl.program_id(0)) * N * 4 * HALF
    # Back through RoPE. dz is a sum over heads, dgamma and dbeta are sums over tokens.
    for head in tl.static_range(N):
        dhead = dheads + (head * tl.num_programs(1).to(tl.int64) * T + first) * SIZE
        turned1 = load_tile(dhead, token, column, left, SIZE).to(tl.float32)
        turned2 = load_tile(dhead + HALF, token, column, left, SIZE).to(tl.float32)
        d1, d2 = tiles.rotate_back(turned1, turned2, sin_tile, cos_tile)
        at = head * 2 * HALF + column
        dz1 += d1 * tl.load(gamma + at).to(tl.float32)[None, :]
        dz2 += d2 * tl.load(gamma + at + HALF).to(tl.float32)[None, :]
        tl.store(sums_row + at, tl.sum(d1 * silu(z1), 0))
        tl.store(sums_row + at + HALF, tl.sum(d2 * silu(z2), 0))
        tl.store(sums_row + N * 2 * HALF + at, tl.sum(d1, 0))
        tl.store(sums_row + N * 2 * HALF + at + HALF, tl.sum(d2, 0))
    dz_row = duvz + first * F + 2 * E
    store_tile(dz_row, token, column, left, F, dz1 * tiles.silu_slope(z1))
    store_tile(dz_row + HALF, token, column, left, F, dz2 * tiles.silu_slope(z2))


def base_gradient(uvz_BTF: Tensor, dheads_NBTS: Tensor, gamma_NS: Tensor, sin: Tensor, cos: Tensor,
                  duvz_BTF: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass of `launch_make_heads`: writes the gradient of z before silu to its columns
    of duvz_BTF, and returns dgamma_NS and dbeta_NS in float32."""
    n_heads, n_batch, n_tokens, s = dheads_NBTS.shape
    f = uvz_BTF.shape[2]
    grid = triton.cdiv(n_tokens, BASE_TILE), n_batch
    sums = torch.empty(grid[0] * grid[1], 2, n_heads, s, dtype=torch.float32, device=uvz_BTF.device)
    base_gradient_kernel[grid](uvz_BTF, dheads_NBTS, gamma_NS, sin, cos, duvz_BTF, sums, n_tokens, (f - s) // 2, f,
                               0 if len(sin) == 1 else n_tokens * s // 2, N=n_heads, BT=BASE_TILE, num_warps=8)
    return sums[:, 0].sum(0), sums[:, 1].sum(0)
