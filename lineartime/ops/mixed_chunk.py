"""FLASH's attention in kernels: mixed chunk attention with all that stands around it, from a layer's first projection to
its second. The definition is `reference.gated_chunk_attention`; docs/kernels.md explains the kernels.

A row is walked in a direction R: forwards, and when not causal backwards too. What a chunk hands on in a direction is
the mean of k v over the tokens, so far, of the document that is open at the chunk's edge on that side.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.reference import to_chunks
from lineartime.ops.tiles import (
    HALF,
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

NOWHERE = tl.constexpr(-2)
"""The document beyond a row's ends."""


@triton.jit
def load_edges(edges_row, g, r, n_chunks):
    """The document at chunk g's far edge in direction r, and that at the edge by which direction r enters it."""
    previous = tl.where(r == 0, g - 1, g + 1)
    there = (previous >= 0) & (previous < n_chunks)
    return tl.load(edges_row + g), tl.load(edges_row + previous, mask=there, other=NOWHERE)


@triton.jit
def sum_chunk(x_row, x_stride, gate_row, x_out_row, z_row, sin_row, cos_row, document_row, wanted, gamma, beta, g,
              column, n_tokens, E, F, write, C: tl.constexpr, BC: tl.constexpr, BACKWARD: tl.constexpr,
              DOCUMENTS: tl.constexpr):
    """The sum of k v over the tokens of chunk g that belong to document `wanted`, or going back that of q do, by halves
    of k. x_out gets v = silu of what is in x, or do = dout silu(u)."""
    kind = x_out_row.dtype.element_ty
    sum1 = tl.zeros([HALF, column.shape[0]], tl.float32)
    sum2 = tl.zeros([HALF, column.shape[0]], tl.float32)
    for start in tl.static_range(0, C, BC):
        token = g * C + start + tl.arange(0, BC)
        x = load_rows(x_row, token, column, n_tokens, E, x_stride).to(tl.float32)
        if BACKWARD:
            x *= silu(load_rows(gate_row, token, column, n_tokens, E, F).to(tl.float32))
        else:
            x = silu(x)
        x = x.to(kind)
        if write:
            store_rows(x_out_row, token, column, n_tokens, E, E, x)
        z1, z2 = load_base(z_row, token, n_tokens, F)
        sin, cos = load_angles(sin_row, cos_row, token, n_tokens)
        head1, head2 = make_head(z1, z2, gamma, beta, 2 if BACKWARD else 3, sin, cos, kind)
        if DOCUMENTS:
            document = tl.load(document_row + token, mask=token < n_tokens, other=-1)[:, None]
            counts = (document == wanted) & (document >= 0)
            head1, head2 = tl.where(counts, head1, 0.0), tl.where(counts, head2, 0.0)
        sum1 = dot(tl.trans(head1), x, sum1)
        sum2 = dot(tl.trans(head2), x, sum2)
    return sum1, sum2


@triton.jit
def walk_states(x, x_stride, uvz, z, sin, cos, angles_stride, gamma, beta, documents, edges, scales,
                x_out, states, n_tokens, n_chunks, E, F, C: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
                BACKWARD: tl.constexpr, DOCUMENTS: tl.constexpr, WHOLE: tl.constexpr):
    """What enters each chunk: a program walks a row chunk by chunk, for BE columns of a state.

    Forward, states[r, b, g] is the mean of k v that enters chunk g in direction r. Going back, the walk is turned round
    and states[r, b, g] is the gradient of what chunk g adds to it. Not WHOLE: a program is one chunk, and its states
    are its own sum alone, in float32, for `scan_states`."""
    b, r = tl.program_id(1), tl.program_id(2)
    column = tl.program_id(0) * BE + tl.arange(0, BE)
    if not WHOLE:
        b = b // n_chunks
    first = b.to(tl.int64) * n_tokens
    sin_row, cos_row = sin + b.to(tl.int64) * angles_stride, cos + b.to(tl.int64) * angles_stride
    row = r * (tl.num_programs(1) if WHOLE else tl.num_programs(1) // n_chunks) + b
    edges_row, scales_row = edges + row * n_chunks if DOCUMENTS else edges, scales + row * n_chunks
    states_row = states + row.to(tl.int64) * n_chunks * 2 * HALF * E
    half = tl.arange(0, HALF)
    running1, running2 = tl.zeros([HALF, BE], tl.float32), tl.zeros([HALF, BE], tl.float32)
    for step in range(n_chunks if WHOLE else 1):
        if WHOLE:
            g = tl.where(r == (1 if BACKWARD else 0), step, n_chunks - 1 - step)
        else:
            g = tl.program_id(1) % n_chunks
        scale, edge, before = tl.load(scales_row + g), 0, 0
        if DOCUMENTS:
            edge, before = load_edges(edges_row, g, r, n_chunks)
        if WHOLE:
            state = states_row + g.to(tl.int64) * 2 * HALF * E
            at_store = 1.0 if BACKWARD else scale
            store_rows(state, half, column, HALF, E, E, running1 * at_store)
            store_rows(state + HALF * E, half, column, HALF, E, E, running2 * at_store)
            if DOCUMENTS:
                running1, running2 = tl.where(edge == before, running1, 0.0), tl.where(edge == before, running2, 0.0)
        sum1, sum2 = sum_chunk(
            x + first * x_stride, x_stride, uvz + first * F, x_out + first * E, z + first * F, sin_row, cos_row,
            documents + first if DOCUMENTS else documents, before if BACKWARD else edge, gamma, beta, g, column,
            n_tokens, E, F, r == 0, C, BC, BACKWARD, DOCUMENTS)
        at_sum = scale if BACKWARD else 1.0
        running1 += sum1 * at_sum
        running2 += sum2 * at_sum
    if not WHOLE:
        state = states_row + (tl.program_id(1) % n_chunks).to(tl.int64) * 2 * HALF * E
        store_rows(state, half, column, HALF, E, E, running1)
        store_rows(state + HALF * E, half, column, HALF, E, E, running2)


@triton.jit
def scan_states(sums, edges, scales, states, n_chunks, size, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
                DOCUMENTS: tl.constexpr):
    """The second level of `walk_states`, for rows of many chunks: from each chunk's own sum to what enters it. A program
    walks a row for BLOCK numbers of a state."""
    b, r = tl.program_id(1), tl.program_id(2)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = r * tl.num_programs(1) + b
    edges_row, scales_row = edges + row * n_chunks if DOCUMENTS else edges, scales + row * n_chunks
    first = row.to(tl.int64) * n_chunks * size
    running = tl.zeros([BLOCK], tl.float32)
    for step in range(n_chunks):
        g = tl.where(r == (1 if BACKWARD else 0), step, n_chunks - 1 - step)
        own = tl.load(sums + first + g.to(tl.int64) * size + at, mask=at < size)
        state = running if BACKWARD else running * tl.load(scales_row + g)
        tl.store(states + first + g.to(tl.int64) * size + at, state.to(states.dtype.element_ty), mask=at < size)
        if DOCUMENTS:
            edge, before = load_edges(edges_row, g, r, n_chunks)
            running = tl.where(edge == before, running, 0.0)
        running += own


@triton.jit
def reads(document_row, edges, row, n_rows, n_chunks, g, token, n_tokens, R: tl.constexpr, AT_FAR: tl.constexpr,
          DOCUMENTS: tl.constexpr):
    """True for the tokens of chunk g that belong to the document by which direction R enters it, or AT_FAR by which it
    leaves: a column."""
    there = (token < n_tokens)[:, None]
    if DOCUMENTS:
        edge, before = load_edges(edges + (R * n_rows + row) * n_chunks, g, R, n_chunks)
        document = tl.load(document_row + token, mask=token < n_tokens, other=-1)[:, None]
        there = (document == (edge if AT_FAR else before)) & (document >= 0)
    return there


@triton.jit
def attend_queries(uvz, v, states, gamma, beta, sin, cos, angles_stride, w, documents, edges, each, out, dout, duvz,
                   dq_lin, n_tokens, n_chunks, E, F, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   BE: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, BACKWARD: tl.constexpr):
    """BM queries of a chunk: out = u (P v + q_lin state), the weights P of all its keys made once and kept on the chip.
    Going back, dout to the gradients of u and of q_lin instead.

    How many tiles of keys there are must be known when the kernel is compiled: causality hides some."""
    n_before = (tl.program_id(0) % (C // BM) * BM + BM + BN - 1) // BN if CAUSAL else C // BN
    for n in tl.static_range(1 if CAUSAL else C // BN, C // BN + 1):
        if n_before == n:
            attend_queries_to(uvz, v, states, gamma, beta, sin, cos, angles_stride, w, documents, edges, each, out,
                              dout, duvz, dq_lin, n_tokens, n_chunks, E, F, n, C, BM, BN, BE, CAUSAL, DOCUMENTS,
                              BACKWARD)


@triton.jit
def attend_queries_to(uvz, v, states, gamma, beta, sin, cos, angles_stride, w, documents, edges, each, out, dout, duvz,
                      dq_lin, n_tokens, n_chunks, E, F, N: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr, BE: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
                      BACKWARD: tl.constexpr):
    """`attend_queries` to the first N tiles of keys."""
    kind = uvz.dtype.element_ty
    g, b, n_rows = tl.program_id(0) // (C // BM), tl.program_id(1), tl.num_programs(1)
    first, n_directions = b.to(tl.int64) * n_tokens, 1 if CAUSAL else 2
    z_row, document_row = uvz + first * F + 2 * E, documents + first if DOCUMENTS else documents
    sin_row, cos_row = sin + b.to(tl.int64) * angles_stride, cos + b.to(tl.int64) * angles_stride
    query = g * C + tl.program_id(0) % (C // BM) * BM + tl.arange(0, BM)
    z1, z2 = load_base(z_row, query, n_tokens, F)
    sin_q, cos_q = load_angles(sin_row, cos_row, query, n_tokens)
    q1, q2 = make_head(z1, z2, gamma, beta, 0, sin_q, cos_q, kind)
    q_lin1, q_lin2 = make_head(z1, z2, gamma, beta, 2, sin_q, cos_q, kind)
    query_document = tl.load(document_row + query, mask=query < n_tokens, other=-1) if DOCUMENTS else query
    weights = ()
    for j in tl.static_range(N):
        key = g * C + j * BN + tl.arange(0, BN)
        z1, z2 = load_base(z_row, key, n_tokens, F)
        sin_k, cos_k = load_angles(sin_row, cos_row, key, n_tokens)
        k1, k2 = make_head(z1, z2, gamma, beta, 1, sin_k, cos_k, kind)
        key_document = tl.load(document_row + key, mask=key < n_tokens, other=-1) if DOCUMENTS else key
        visible = visible_tile(query[:, None], key[None, :], query_document[:, None], key_document[None, :], n_tokens,
                               CAUSAL, DOCUMENTS)
        weight = relu_tile(q1, q2, k1, k2, w + C - 1, key[None, :] - query[:, None], visible, 1 / C)
        weight *= weight
        if not CAUSAL:
            k1, k2 = make_head(z1, z2, gamma, beta, 3, sin_k, cos_k, kind)
            linear = dot(q_lin2, tl.trans(k2), dot(q_lin1, tl.trans(k1), None))
            share = tl.load(each + first + query, mask=query < n_tokens, other=0.0)[:, None]
            weight += tl.where(visible, linear * share, 0.0)
        weights = weights + (weight.to(kind),)

    half = tl.arange(0, HALF)
    dq1, dq2 = tl.zeros([BM, HALF], tl.float32), tl.zeros([BM, HALF], tl.float32)
    for start in range(0, E, BE):
        column = start + tl.arange(0, BE)
        if BACKWARD:
            u = load_rows(uvz + first * F, query, column, n_tokens, E, F).to(tl.float32)
            dgated = load_rows(dout + first * E, query, column, n_tokens, E, E).to(tl.float32)
            do = (dgated * silu(u)).to(kind)
        acc = tl.zeros([BM, BE], tl.float32)
        for r in tl.static_range(n_directions):
            read = reads(document_row, edges, b, n_rows, n_chunks, g, query, n_tokens, r, False, DOCUMENTS)
            state = states + ((r * n_rows + b).to(tl.int64) * n_chunks + g) * 2 * HALF * E
            state1 = load_rows(state, half, column, HALF, E, E)
            state2 = load_rows(state + HALF * E, half, column, HALF, E, E)
            acc = dot(tl.where(read, q_lin1, 0.0), state1, acc)
            acc = dot(tl.where(read, q_lin2, 0.0), state2, acc)
            if BACKWARD:
                do_read = tl.where(read, do, 0.0)
                dq1, dq2 = dot(do_read, tl.trans(state1), dq1), dot(do_read, tl.trans(state2), dq2)
        for j in tl.static_range(N):
            key = g * C + j * BN + tl.arange(0, BN)
            acc = dot(weights[j], load_rows(v + first * E, key, column, n_tokens, E, E), acc)
        if BACKWARD:
            store_rows(duvz + first * F, query, column, n_tokens, E, F, dgated * acc * silu_slope(u))
        else:
            u = load_rows(uvz + first * F, query, column, n_tokens, E, F).to(tl.float32)
            store_rows(out + first * E, query, column, n_tokens, E, E, acc * silu(u))
    if BACKWARD:
        store_rows(dq_lin + first * 2 * HALF, query, half, n_tokens, HALF, 2 * HALF, dq1)
        store_rows(dq_lin + first * 2 * HALF + HALF, query, half, n_tokens, HALF, 2 * HALF, dq2)


@triton.jit
def differentiate_keys(uvz, v, do, dstates, gamma, beta, sin, cos, angles_stride, w, documents, edges, each, duvz,
                       dk_lin, n_tokens, n_chunks, E, F, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                       BE: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """BN keys of a chunk: the gradients of v and of k_lin. `attend_queries` turned on its side: here the weights of all
    queries are kept."""
    n_after = C // BM - (tl.program_id(0) % (C // BN) * BN // BM if CAUSAL else 0)
    for n in tl.static_range(1 if CAUSAL else C // BM, C // BM + 1):
        if n_after == n:
            differentiate_keys_of(uvz, v, do, dstates, gamma, beta, sin, cos, angles_stride, w, documents, edges, each,
                                  duvz, dk_lin, n_tokens, n_chunks, E, F, n, C, BM, BN, BE, CAUSAL, DOCUMENTS)


@triton.jit
def differentiate_keys_of(uvz, v, do, dstates, gamma, beta, sin, cos, angles_stride, w, documents, edges, each, duvz,
                          dk_lin, n_tokens, n_chunks, E, F, N: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                          BN: tl.constexpr, BE: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """`differentiate_keys` by the last N tiles of queries."""
    kind = uvz.dtype.element_ty
    g, b, n_rows = tl.program_id(0) // (C // BN), tl.program_id(1), tl.num_programs(1)
    first, n_directions = b.to(tl.int64) * n_tokens, 1 if CAUSAL else 2
    z_row, document_row = uvz + first * F + 2 * E, documents + first if DOCUMENTS else documents
    sin_row, cos_row = sin + b.to(tl.int64) * angles_stride, cos + b.to(tl.int64) * angles_stride
    key = g * C + tl.program_id(0) % (C // BN) * BN + tl.arange(0, BN)
    z1, z2 = load_base(z_row, key, n_tokens, F)
    sin_k, cos_k = load_angles(sin_row, cos_row, key, n_tokens)
    k1, k2 = make_head(z1, z2, gamma, beta, 1, sin_k, cos_k, kind)
    k_lin1, k_lin2 = make_head(z1, z2, gamma, beta, 3, sin_k, cos_k, kind)
    key_document = tl.load(document_row + key, mask=key < n_tokens, other=-1) if DOCUMENTS else key
    weights = ()
    for i in tl.static_range(C // BM - N, C // BM):
        query = g * C + i * BM + tl.arange(0, BM)
        z1, z2 = load_base(z_row, query, n_tokens, F)
        sin_q, cos_q = load_angles(sin_row, cos_row, query, n_tokens)
        q1, q2 = make_head(z1, z2, gamma, beta, 0, sin_q, cos_q, kind)
        query_document = tl.load(document_row + query, mask=query < n_tokens, other=-1) if DOCUMENTS else query
        visible = visible_tile(query[None, :], key[:, None], query_document[None, :], key_document[:, None], n_tokens,
                               CAUSAL, DOCUMENTS)
        weight = relu_tile(k1, k2, q1, q2, w + C - 1, key[:, None] - query[None, :], visible, 1 / C)
        weight *= weight
        if not CAUSAL:
            q1, q2 = make_head(z1, z2, gamma, beta, 2, sin_q, cos_q, kind)
            linear = dot(k_lin2, tl.trans(q2), dot(k_lin1, tl.trans(q1), None))
            share = tl.load(each + first + query, mask=query < n_tokens, other=0.0)[None, :]
            weight += tl.where(visible, linear * share, 0.0)
        weights = weights + (weight.to(kind),)

    half = tl.arange(0, HALF)
    dk1, dk2 = tl.zeros([BN, HALF], tl.float32), tl.zeros([BN, HALF], tl.float32)
    for start in range(0, E, BE):
        column = start + tl.arange(0, BE)
        v_tile = load_rows(v + first * E, key, column, n_tokens, E, E)
        acc = tl.zeros([BN, BE], tl.float32)
        for r in tl.static_range(n_directions):
            adds = reads(document_row, edges, b, n_rows, n_chunks, g, key, n_tokens, r, True, DOCUMENTS)
            state = dstates + ((r * n_rows + b).to(tl.int64) * n_chunks + g) * 2 * HALF * E
            state1 = load_rows(state, half, column, HALF, E, E)
            state2 = load_rows(state + HALF * E, half, column, HALF, E, E)
            acc = dot(tl.where(adds, k_lin1, 0.0), state1, acc)
            acc = dot(tl.where(adds, k_lin2, 0.0), state2, acc)
            v_added = tl.where(adds, v_tile, 0.0)
            dk1, dk2 = dot(v_added, tl.trans(state1), dk1), dot(v_added, tl.trans(state2), dk2)
        for i in tl.static_range(N):
            query = g * C + (C // BM - N + i) * BM + tl.arange(0, BM)
            acc = dot(weights[i], load_rows(do + first * E, query, column, n_tokens, E, E), acc)
        v_before = load_rows(uvz + first * F + E, key, column, n_tokens, E, F).to(tl.float32)
        store_rows(duvz + first * F + E, key, column, n_tokens, E, F, acc * silu_slope(v_before))
    store_rows(dk_lin + first * 2 * HALF, key, half, n_tokens, HALF, 2 * HALF, dk1)
    store_rows(dk_lin + first * 2 * HALF + HALF, key, half, n_tokens, HALF, 2 * HALF, dk2)


class Documents(NamedTuple):
    """What the kernels are told of the documents in rows."""

    ids_BT: Tensor | None
    """The document of each token, int32, -1 for padding; None where a row is one document."""
    edges_RBG: Tensor | None
    """The document at each chunk's far edge in each direction: its last one, and when not causal its first one."""
    scales_RBG: Tensor
    """1 / tokens that the mean which enters a chunk is taken over, 0 where there are none."""
    each_BT: Tensor | None
    """When not causal: 1 / tokens of each token's document."""


def lay_out_documents(segment_ids_BT: Tensor | None, n_rows: int, n_tokens: int, chunk_size: int, causal: bool,
                      pooling: str, device: torch.device) -> Documents:
    """The tables for rows of `n_tokens`. segment_ids_BT: as in `reference.gated_chunk_attention`."""
    n_chunks = -(-n_tokens // chunk_size)

    def share(count: Tensor) -> Tensor:
        return torch.where(count > 0, 1.0 if pooling == "sum" else 1.0 / count.clamp(min=1), 0.0).float()

    if segment_ids_BT is None:
        chunk_G = torch.arange(n_chunks, device=device)
        before_G, total = chunk_size * chunk_G, torch.full((), n_tokens, device=device)
        if causal:
            return Documents(None, None, share(before_G).expand(1, n_rows, n_chunks).contiguous(), None)
        seen_RG = torch.stack([chunk_G > 0, chunk_G < n_chunks - 1])
        scales_RBG = (seen_RG * share(total))[:, None].expand(2, n_rows, n_chunks).contiguous()
        return Documents(None, None, scales_RBG, share(total).expand(n_rows, n_tokens).contiguous())
    ids_BT = segment_ids_BT.int()
    ids_BGC = to_chunks(ids_BT, chunk_size, fill=-1)
    last_BG = ids_BGC.amax(-1)
    if causal:
        own_BG = ((ids_BGC == last_BG[..., None]) & (ids_BGC >= 0)).sum(-1)
        sum_BG = own_BG.cumsum(1)
        begins_BG = last_BG != F.pad(last_BG[:, :-1], [1, 0], value=-2)
        before_BG = torch.where(begins_BG, sum_BG - own_BG, 0).cummax(1).values
        count_BG = F.pad((sum_BG - before_BG)[:, :-1], [1, 0])
        return Documents(ids_BT, last_BG[None], share(count_BG)[None], None)
    beyond = torch.iinfo(torch.int32).max
    first_BG = torch.where(ids_BGC >= 0, ids_BGC, beyond).amin(-1)
    first_BG = torch.where(first_BG == beyond, -1, first_BG)
    number_BT = (ids_BT != F.pad(ids_BT[:, :-1], [1, 0], value=-2)).cumsum(1) - 1
    count_BT = torch.zeros_like(number_BT).scatter_add_(1, number_BT, (ids_BT >= 0).long()).gather(1, number_BT)
    each_BT = share(count_BT)
    before_BG = F.pad(each_BT[:, chunk_size - 1 :: chunk_size][:, : n_chunks - 1], [1, 0])
    after_BG = F.pad(each_BT[:, chunk_size::chunk_size], [0, 1])
    return Documents(ids_BT, torch.stack([last_BG, first_BG]), torch.stack([before_BG, after_BG]), each_BT)


class Tiles(NamedTuple):
    """The size of a kernel's tiles: queries, keys, columns of v; and how a program is run."""

    queries: int
    keys: int
    columns: int
    n_warps: int
    n_stages: int


STATE_TILES = {torch.float32: Tiles(64, 64, 32, 4, 1), torch.bfloat16: Tiles(64, 64, 64, 4, 2)}
"""Of `walk_states`, whose keys come by so many at a time."""
ATTENTION_TILES = {torch.float32: Tiles(64, 64, 32, 8, 1), torch.bfloat16: Tiles(128, 128, 64, 8, 2)}
"""Of `attend_queries` and `differentiate_keys`."""
SCAN_BLOCK = 1024
MANY_CHUNKS, FEW_PROGRAMS = 32, 264
"""Rows of more chunks have their states made in two levels, where one level gives the GPU fewer programs than this."""


def tiles_for(tiles: dict[torch.dtype, Tiles], dtype: torch.dtype) -> Tiles:
    """Types of 16 bits have the same."""
    return tiles[torch.float32 if dtype == torch.float32 else torch.bfloat16]


def make_states(uvz_BTF: Tensor, x_BTE: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin: Tensor, cos: Tensor,
                documents: Documents, chunk_size: int, backward: bool) -> tuple[Tensor, Tensor]:
    """v = silu(x), and the mean of k v that enters each chunk; or when going back do = x silu(u), and the gradient of
    what each chunk adds to it: x_out_BTE and states_RBGSE, in the type of uvz.

    x_BTE: v before silu, or the gradient of the output."""
    n_rows, n_tokens, f = uvz_BTF.shape
    s, e = gamma_4S.shape[-1], x_BTE.shape[-1]
    n_directions, _, n_chunks = documents.scales_RBG.shape
    x_out_BTE = uvz_BTF.new_empty(n_rows, n_tokens, e)
    states_RBGSE = uvz_BTF.new_empty(n_directions, n_rows, n_chunks, s, e)
    tiles = tiles_for(STATE_TILES, uvz_BTF.dtype)
    n_tiles = triton.cdiv(e, tiles.columns)
    whole = n_chunks <= MANY_CHUNKS or n_tiles * n_rows * n_directions >= FEW_PROGRAMS
    sums = states_RBGSE if whole else torch.empty_like(states_RBGSE, dtype=torch.float32)
    n_places = n_rows if whole else n_rows * n_chunks
    has_documents = documents.ids_BT is not None
    walk_states[n_tiles, n_places, n_directions](
        x_BTE, x_BTE.stride(1), uvz_BTF, uvz_BTF[..., 2 * e :], sin, cos, angles_stride(sin), gamma_4S, beta_4S,
        documents.ids_BT, documents.edges_RBG, documents.scales_RBG, x_out_BTE, sums, n_tokens, n_chunks, e, f,
        C=chunk_size, BE=tiles.columns, BC=tiles.keys, BACKWARD=backward, DOCUMENTS=has_documents, WHOLE=whole,
        num_warps=tiles.n_warps, num_stages=tiles.n_stages)
    if not whole:
        scan_states[triton.cdiv(s * e, SCAN_BLOCK), n_rows, n_directions](
            sums, documents.edges_RBG, documents.scales_RBG, states_RBGSE, n_chunks, s * e, BLOCK=SCAN_BLOCK,
            BACKWARD=backward, DOCUMENTS=has_documents)
    return x_out_BTE, states_RBGSE


def angles_stride(sin: Tensor) -> int:
    """From one row's angles to the next row's: 0 where all rows have the same."""
    return 0 if sin.shape[0] == 1 else sin.stride(0)


def widths(uvz_BTF: Tensor, gamma_NS: Tensor) -> tuple[int, int]:
    """E and S."""
    s = gamma_NS.shape[-1]
    return (uvz_BTF.shape[-1] - s) // 2, s


@torch.library.custom_op("lineartime::gated_chunk_attention", mutates_args=())
def forward(uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor, ids: Tensor | None,
            edges: Tensor | None, scales: Tensor, each: Tensor | None, chunk_size: int, causal: bool) -> Tensor:
    """`gated_chunk_attention` of contiguous tensors; ids to each: see `Documents`."""
    e, _ = widths(uvz, gamma)
    documents = Documents(ids, edges, scales, each)
    v, states = make_states(uvz, uvz[..., e : 2 * e], gamma, beta, sin, cos, documents, chunk_size, backward=False)
    out = uvz.new_empty(*uvz.shape[:2], e)
    queries(uvz, v, states, gamma, beta, sin, cos, w, documents, out, None, None, None, chunk_size, causal)
    return out


def queries(uvz: Tensor, v: Tensor, states: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
            documents: Documents, out: Tensor | None, dout: Tensor | None, duvz: Tensor | None, dq_lin: Tensor | None,
            chunk_size: int, causal: bool) -> None:
    """Run `attend_queries`: into `out`, or of `dout` into `duvz` and `dq_lin`."""
    tiles, n_chunks = tiles_for(ATTENTION_TILES, uvz.dtype), states.shape[2]
    attend_queries[n_chunks * (chunk_size // tiles.queries), uvz.shape[0]](
        uvz, v, states, gamma, beta, sin, cos, angles_stride(sin), w, documents.ids_BT, documents.edges_RBG,
        documents.each_BT, out, dout, duvz, dq_lin, uvz.shape[1], n_chunks, v.shape[-1], uvz.shape[-1], C=chunk_size,
        BM=tiles.queries, BN=tiles.keys, BE=tiles.columns, CAUSAL=causal, DOCUMENTS=documents.ids_BT is not None,
        BACKWARD=dout is not None, num_warps=tiles.n_warps, num_stages=tiles.n_stages)


@forward.register_fake
def _(uvz: Tensor, gamma: Tensor, *rest: object) -> Tensor:
    return uvz.new_empty(*uvz.shape[:2], widths(uvz, gamma)[0])


@torch.library.custom_op("lineartime::gated_chunk_attention_backward", mutates_args=())
def backward(dout: Tensor, uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
             ids: Tensor | None, edges: Tensor | None, scales: Tensor, each: Tensor | None, chunk_size: int,
             causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of uvz, gamma, beta and w. What the forward pass made is made again, but for its output."""
    from lineartime.ops.gradients import base_gradient, score_gradients
    e, s = widths(uvz, gamma)
    documents = Documents(ids, edges, scales, each)
    v, states = make_states(uvz, uvz[..., e : 2 * e], gamma, beta, sin, cos, documents, chunk_size, backward=False)
    do, dstates = make_states(uvz, dout, gamma, beta, sin, cos, documents, chunk_size, backward=True)
    duvz, dheads = torch.empty_like(uvz), uvz.new_empty(4, *uvz.shape[:2], s)
    queries(uvz, v, states, gamma, beta, sin, cos, w, documents, None, dout, duvz, dheads[2], chunk_size, causal)
    tiles, n_chunks = tiles_for(ATTENTION_TILES, uvz.dtype), states.shape[2]
    differentiate_keys[n_chunks * (chunk_size // tiles.keys), uvz.shape[0]](
        uvz, v, do, dstates, gamma, beta, sin, cos, angles_stride(sin), w, ids, edges, each, duvz, dheads[3],
        uvz.shape[1], n_chunks, e, uvz.shape[-1], C=chunk_size, BM=tiles.queries, BN=tiles.keys, BE=tiles.columns,
        CAUSAL=causal, DOCUMENTS=ids is not None, num_warps=tiles.n_warps, num_stages=tiles.n_stages)
    dw = score_gradients(uvz, v, do, gamma, beta, sin, cos, w, ids, each, dheads, row_len=chunk_size,
                         scale_len=chunk_size, causal=causal)
    return duvz, *base_gradient(uvz, dheads, gamma, beta, sin, cos, duvz), dw


@backward.register_fake
def _(dout: Tensor, uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
      *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(uvz), torch.empty_like(gamma), torch.empty_like(beta), torch.empty_like(w)


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk_size, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    uvz, gamma, beta, sin, cos, w, *documents = ctx.saved_tensors
    duvz, dgamma, dbeta, dw = backward(dout.contiguous(), uvz, gamma, beta, sin, cos, w, *documents, ctx.chunk_size,
                                       ctx.causal)
    return duvz, dgamma, dbeta, None, None, dw, *[None] * 6


forward.register_autograd(differentiate, setup_context=keep)


def gated_chunk_attention(uvz_BTF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin: Tensor, cos: Tensor, w: Tensor, *,
                          chunk_size: int, causal: bool, segment_ids_BT: Tensor | None = None,
                          pooling: str = "mean") -> Tensor:
    """`reference.gated_chunk_attention` in kernels, for what `ops.kernel_refuses` lets pass. Its first derivatives only.

    Sums are float32 and always in one order: the same inputs give the same bits. Of the forward pass nothing is kept
    but its inputs."""
    documents = lay_out_documents(segment_ids_BT, *uvz_BTF.shape[:2], chunk_size, causal, pooling, uvz_BTF.device)
    tensors = [x.contiguous() for x in (uvz_BTF, gamma_4S, beta_4S, sin, cos, w)]
    return forward(*tensors, *documents, chunk_size, causal)
