"""FLASH's attention in kernels: with its heads and its gate. The reference is
`reference.gated_chunk_attention`; docs/kernels.md explains the kernels.

Chunks of a row are visited in a direction R: forwards (0), and when not causal also backwards (1).
A chunk passes on the sum of k v over the tokens visited so far of the document that crosses the
chunk's far edge. The state that enters a chunk is this sum times a scale, see `DocumentTables`."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops import reference
from lineartime.ops.dispatch import QUERY_KEY_DIM, TileClass, on_own_device, refuse_forward_mode, schema_of, tile_class
from lineartime.ops.dtypes import wide_dtype
from lineartime.ops.gradients import base_gradient, launch_make_heads, score_gradients
from lineartime.ops.reference import CarriedState, Exchange, Heads, HeadsFromZ
from lineartime.ops.tiles import SIZE, dot, head_product, load_tile, silu, silu_slope, store_tile


@triton.jit
def crosses_edge(begins, ends, here, token, n_tokens, start, C: tl.constexpr, R: tl.constexpr, DOCUMENTS: tl.constexpr):
    """True, as a column, for the tokens of a chunk whose document crosses the chunk's far edge in
    direction R. They add to the state that is passed on. With 1 - R: those that read the state
    entering in R."""
    if DOCUMENTS:  # forwards the document ends behind the chunk, backwards it begins before the chunk
        if R == 0:
            mask = tl.load(ends + here + token, mask=token < n_tokens, other=0) > start + C
        else:
            mask = tl.load(begins + here + token, mask=token < n_tokens, other=start) < start
    else:
        mask = token < n_tokens
    return mask[:, None]


@triton.jit
def crosses_chunk(begins, ends, here, start, C: tl.constexpr):
    """True if the document that enters a chunk is also the document that leaves it."""
    return (tl.load(begins + here) < start) & (tl.load(ends + here) > start + C)


@triton.jit
def visible_range(begins, ends, here, token, n_tokens, start, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
                  DOCUMENTS: tl.constexpr):
    """OF_QUERIES: the first and the last key of its chunk that each query sees. Otherwise the first
    and the last query that see each key. Columns of indices in the chunk."""
    # The chunk, then its part of the document, then what causality leaves of that.
    first, last = tl.zeros_like(token), tl.zeros_like(token) + n_tokens - 1
    if DOCUMENTS:
        first = tl.load(begins + here + token, mask=token < n_tokens, other=0) - start
        last = tl.load(ends + here + token, mask=token < n_tokens, other=0) - start - 1
    if CAUSAL and OF_QUERIES:
        last = tl.minimum(token, last)
    elif CAUSAL:
        first = token
    return first[:, None], last[:, None]


@triton.jit
def walk_states(x, x_stride, uvz, heads, begins, ends, scales, first, last, x_out, states, n_tokens, n_chunks, E, F,
                C: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BACKWARD: tl.constexpr,
                DOCUMENTS: tl.constexpr, WHOLE: tl.constexpr, GATED: tl.constexpr):
    """The state that enters each chunk in direction R. A program visits a row, for BE columns.

    Forward, states[b, g] is the scaled sum of k v entering chunk g, x is v before silu, x_out is v.
    Not GATED there is no silu and no gate, and x_out is x.
    BACKWARD reverses the direction: states[b, g] is the gradient of the sum that chunk g adds, x is
    the gradient of the output, and x_out is that of the attention output before the gate. Without
    WHOLE, a program takes one chunk, and states[b, g] is the sum of this chunk alone, in float32,
    for `scan_states`. first: the sum that the walk begins with, or None for 0. last: where the sum
    at its end is stored, or None. Backward `first` is the gradient of `last`, and the reverse."""
    # Which columns of a state, and of which row or chunk. `head` is k, or backwards q.
    dtype = x_out.dtype.element_ty
    n_tiles = tl.cdiv(E, BE)
    column, size = tl.program_id(0) % n_tiles * BE + tl.arange(0, BE), tl.arange(0, SIZE)
    place, n_places = tl.program_id(0) // n_tiles, tl.num_programs(0) // n_tiles
    b, n_rows = (place, n_places) if WHOLE else (place // n_chunks, n_places // n_chunks)
    head = heads + (2 if BACKWARD else 3) * n_rows.to(tl.int64) * n_tokens * SIZE
    running = tl.zeros([SIZE, BE], tl.float32)
    if WHOLE and first is not None:
        running = load_tile(first + b.to(tl.int64) * SIZE * E, size, column, SIZE, E)
    for step in range(n_chunks if WHOLE else 1):
        # The gradient walks the other way.
        g = (step if R == BACKWARD else n_chunks - 1 - step) if WHOLE else place % n_chunks
        here, n_here = b.to(tl.int64) * n_tokens + g * C, tl.minimum(n_tokens - g * C, C)
        scale = tl.load(scales + b * n_chunks + g)
        if WHOLE:  # the chunk reads the state as it is before its own tokens are added
            state = states + (b.to(tl.int64) * n_chunks + g) * SIZE * E
            store_tile(state, size, column, SIZE, E, running if BACKWARD else running * scale)
            if DOCUMENTS:
                running = tl.where(crosses_chunk(begins, ends, here, g * C, C), running, 0.0)
        own = tl.zeros([SIZE, BE], tl.float32)
        for start in range(0, C, BC):  # add k v of the tokens whose document leaves the chunk
            token = start + tl.arange(0, BC)
            x_tile = load_tile(x + here * x_stride, token, column, n_here, x_stride).to(tl.float32)
            if GATED and BACKWARD:  # dout times the gate
                x_tile *= silu(load_tile(uvz + here * F, token, column, n_here, F).to(tl.float32))
            elif GATED:
                x_tile = silu(x_tile)
            if R == 0:
                store_tile(x_out + here * E, token, column, n_here, E, x_tile)
            head_tile = load_tile(head + here * SIZE, token, size, n_here, SIZE)
            counts = crosses_edge(begins, ends, here, token, n_here, g * C, C, 1 - R if BACKWARD else R, DOCUMENTS)
            head_tile = tl.where(counts, head_tile, 0.0)
            own = dot(tl.trans(head_tile), x_tile.to(dtype), own)
        running += own * scale if BACKWARD else own
    if not WHOLE:
        store_tile(states + place.to(tl.int64) * SIZE * E, size, column, SIZE, E, running)
    elif last is not None:
        store_tile(last + b.to(tl.int64) * SIZE * E, size, column, SIZE, E, running)


@triton.jit
def scan_states(sums, begins, ends, scales, first, last, states, n_tokens, n_chunks, size, C: tl.constexpr,
                BLOCK: tl.constexpr, R: tl.constexpr, BACKWARD: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The second level of `walk_states`, for rows of many chunks: from the chunks' own sums to the
    states that enter them. A program visits a row for BLOCK entries of a state."""
    b, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    running = tl.zeros([BLOCK], tl.float32)
    if first is not None:
        running = tl.load(first + b * size + at, mask=at < size)
    # As in `walk_states`: store what enters, drop it where the document ends, add the own sum.
    for step in range(n_chunks):
        g = step if R == BACKWARD else n_chunks - 1 - step
        here = (b * n_chunks + g) * size
        own = tl.load(sums + here + at, mask=at < size)
        state = running if BACKWARD else running * tl.load(scales + b * n_chunks + g)
        tl.store(states + here + at, state.to(states.dtype.element_ty), mask=at < size)
        if DOCUMENTS:
            running = tl.where(crosses_chunk(begins, ends, b * n_tokens + g * C, g * C, C), running, 0.0)
        running += own
    if last is not None:
        tl.store(last + b * size + at, running, mask=at < size)


@triton.jit
def read_state(a, state_tile, a_rows, row, n_rows, state, column, E, acc, BS: tl.constexpr):
    """acc + a state, for rows of a head and columns of a state. With BS == SIZE, the operands are
    the tiles a and state_tile; otherwise BS dimensions of both at a time are loaded again."""
    if BS == SIZE:
        return dot(a, state_tile, acc)
    for part in range(0, SIZE, BS):
        size = part + tl.arange(0, BS)
        acc = dot(load_tile(a_rows, row, size, n_rows, SIZE), load_tile(state, size, column, SIZE, E), acc)
    return acc


@triton.jit
def weigh_tile(own_rows, own, n_here, other_rows, other, at, first, last, w, each, here, per_head, C: tl.constexpr,
               BS: tl.constexpr, OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr):
    """The weights of a tile of a chunk, exactly 0 where not visible. OF_QUERIES: of queries, one a
    row of the tile, for the keys from index `at` on. Otherwise of keys, one a row, for queries.
    When not causal a weight has the linear half of the own chunk too: + share q_lin k_lin^T.

    own_rows, other_rows: pointers to row 0 of both heads of the quadratic half; those of the linear
    half are two heads further. first, last: the range that each row sees. each: each query's share,
    from `here` on."""
    # The quadratic half: relu(score)^2 where visible.
    index = at + other[None, :]
    visible = (index >= first) & (index <= last)
    distance = index - own[:, None] if OF_QUERIES else own[:, None] - index  # key minus query
    bias = tl.load(w + C - 1 + distance).to(tl.float32)
    # q k^T is added onto the bias, which is multiplied by n = C for that.
    score = head_product(own_rows, own, n_here, other_rows, other, n_here - at, bias * C, BS) * (1 / C)
    weight = tl.where(visible, tl.maximum(score, 0.0), 0.0)
    weight *= weight
    if not CAUSAL:
        if OF_QUERIES:
            share = tl.load(each + here + own, mask=own < n_here, other=1.0)[:, None]
        else:
            share = tl.load(each + here + index, mask=index < n_here, other=1.0)
        # The product is added onto weight / share, and the sum is multiplied by share.
        weight = head_product(own_rows + 2 * per_head, own, n_here, other_rows + 2 * per_head, other, n_here - at,
                              weight / share, BS)
        weight = tl.where(visible, weight * share, 0.0)
    return weight


@triton.jit
def attend_queries(uvz, heads, v, states, w, begins, ends, each, out, dout, duvz, dq_lin, n_tokens, n_chunks, E, F,
                   C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
                   KEPT: tl.constexpr, ROUND: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
                   BACKWARD: tl.constexpr, GATED: tl.constexpr):
    """out = u (P v + q_lin state) for BM queries of a chunk, with the weights P computed once and
    kept in registers. BACKWARD: the gradients of u and of q_lin from dout. Not GATED there is no u.

    Registers hold the weights of KEPT tiles of keys. More keys need another ROUND, which adds to
    the partial result of the previous round in memory. Each of the first rounds reads the state of
    one direction. The number of tiles is a constant at compile time but depends on the mask, hence
    the loop."""
    # Tiles of keys up to the program's last query. The gate comes when all have been added.
    n_tiles = (tl.program_id(0) % (C // BM) * BM + BM + BN - 1) // BN if CAUSAL else C // BN
    finish = (n_tiles <= ROUND * KEPT + KEPT) & (CAUSAL or ROUND > 0)
    for n in tl.static_range(1 if CAUSAL else 0, KEPT + 1):
        if n == tl.maximum(tl.minimum(n_tiles - ROUND * KEPT, KEPT), 0):
            attend_n_tiles(uvz, heads, v, states, w, begins, ends, each, out, dout, duvz, dq_lin, n_tokens, n_chunks,
                           E, F, finish, n, C, BM, BN, BE, BS, KEPT, ROUND, CAUSAL, DOCUMENTS, BACKWARD, GATED)


@triton.jit
def attend_n_tiles(uvz, heads, v, states, w, begins, ends, each, out, dout, duvz, dq_lin, n_tokens, n_chunks, E, F,
                   finish, N: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
                   BS: tl.constexpr, KEPT: tl.constexpr, ROUND: tl.constexpr, CAUSAL: tl.constexpr,
                   DOCUMENTS: tl.constexpr, BACKWARD: tl.constexpr, GATED: tl.constexpr):
    """`attend_queries` with N tiles of keys. query and key are indices in the chunk."""
    # Chunk g of row b: its first token in the row (start) and the batch (here), and its tokens.
    dtype = uvz.dtype.element_ty
    g, b, n_rows = tl.program_id(0) // (C // BM), tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    start, n_here, here = g * C, tl.minimum(n_tokens - g * C, C), b * n_tokens + g * C
    per_head, size, other = n_rows * n_tokens * SIZE, tl.arange(0, SIZE), tl.arange(0, BN)
    head = heads + here * SIZE
    query = tl.program_id(0) % (C // BM) * BM + tl.arange(0, BM)
    first, last = visible_range(begins, ends, here, query, n_here, start, True, CAUSAL, DOCUMENTS)
    # The weights of all tiles of keys of this round, in registers.
    weights = ()
    for j in tl.static_range(ROUND * KEPT, ROUND * KEPT + N):
        weight = weigh_tile(head, query, n_here, head + per_head + j * BN * SIZE, other, j * BN, first, last, w,
                            each, here, per_head, C, BS, True, CAUSAL)
        weights = weights + (weight.to(dtype),)  # type: ignore[assignment]  # noqa: RUF005

    # The first rounds also read the linear half's state, a direction each.
    DIRECTED: tl.constexpr = ROUND < (1 if CAUSAL else 2)
    if DIRECTED:
        q_lin = load_tile(head + 2 * per_head, query, tl.arange(0, BS), n_here, SIZE)
        read = crosses_edge(begins, ends, here, query, n_here, start, C, 1 - ROUND, DOCUMENTS)
        state = states + ((ROUND * n_rows + b) * n_chunks + g) * SIZE * E
        dq = tl.zeros([BM, SIZE], tl.float32)
    # A loop over columns of v: state, earlier rounds, weights times v, at last the gate.
    result, width = (duvz, F) if BACKWARD else (out, E)
    for at in range(0, E, BE):
        column = at + tl.arange(0, BE)
        acc = tl.zeros([BM, BE], tl.float32)
        if DIRECTED:
            state_tile = load_tile(state, size, column, SIZE, E)
            if BACKWARD:  # the gradient of q_lin is that of what attention returns, times the state
                do = load_tile(dout + here * E, query, column, n_here, E, AGAIN=True).to(tl.float32)
                if GATED:
                    do *= silu(load_tile(uvz + here * F, query, column, n_here, F, AGAIN=True).to(tl.float32))
                dq = dot(do.to(dtype), tl.trans(state_tile), dq)
            acc = read_state(q_lin, state_tile, head + 2 * per_head, query, n_here, state, column, E, acc, BS)
            acc = tl.where(read, acc, 0.0)
        if ROUND > 0:
            acc += load_tile(result + here * width, query, column, n_here, width).to(tl.float32)
        for j in tl.static_range(N):
            tile = (ROUND * KEPT + j) * BN
            acc = dot(weights[j], load_tile(v + (here + tile) * E, other, column, n_here - tile, E), acc)
        if GATED:  # u and dout are loaded again: keeping them would take too many registers
            u = load_tile(uvz + here * F, query, column, n_here, F).to(tl.float32)
            if BACKWARD:
                by = load_tile(dout + here * E, query, column, n_here, E).to(tl.float32) * silu_slope(u)
            else:
                by = silu(u)
            acc = tl.where(finish, acc * by, acc)
        if GATED or not BACKWARD:
            store_tile(result + here * width, query, column, n_here, width, acc)
    # Only queries whose document crosses the edge read the state. Directions add up.
    if BACKWARD and DIRECTED:
        dq = tl.where(read, dq, 0.0)
        if ROUND > 0:
            dq += load_tile(dq_lin + here * SIZE, query, size, n_here, SIZE).to(tl.float32)
        store_tile(dq_lin + here * SIZE, query, size, n_here, SIZE, dq)


@triton.jit
def differentiate_keys(uvz, heads, v, do, dstates, w, begins, ends, each, duvz, dk_lin, n_tokens, n_chunks, E, F,
                       C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
                       KEPT: tl.constexpr, ROUND: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
                       GATED: tl.constexpr):
    """The gradients of v and of k_lin for BM keys of a chunk: `attend_queries` turned round."""
    n_tiles = C // BN - (tl.program_id(0) % (C // BM) * BM // BN if CAUSAL else 0)
    finish = (n_tiles <= ROUND * KEPT + KEPT) & (CAUSAL or ROUND > 0)
    for n in tl.static_range(1 if CAUSAL else 0, KEPT + 1):
        if n == tl.maximum(tl.minimum(n_tiles - ROUND * KEPT, KEPT), 0):
            differentiate_n_tiles(uvz, heads, v, do, dstates, w, begins, ends, each, duvz, dk_lin, n_tokens, n_chunks,
                                  E, F, finish, n, C, BM, BN, BE, BS, KEPT, ROUND, CAUSAL, DOCUMENTS, GATED)


@triton.jit
def differentiate_n_tiles(uvz, heads, v, do, dstates, w, begins, ends, each, duvz, dk_lin, n_tokens, n_chunks, E, F,
                          finish, N: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                          BE: tl.constexpr, BS: tl.constexpr, KEPT: tl.constexpr, ROUND: tl.constexpr,
                          CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, GATED: tl.constexpr):
    """`differentiate_keys` with N tiles of queries; see `attend_n_tiles`."""
    # The chunk as there, with a tile of keys. AT: this round's first tile of queries.
    dtype = uvz.dtype.element_ty
    g, b, n_rows = tl.program_id(0) // (C // BM), tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    start, n_here, here = g * C, tl.minimum(n_tokens - g * C, C), b * n_tokens + g * C
    per_head, size, other = n_rows * n_tokens * SIZE, tl.arange(0, SIZE), tl.arange(0, BN)
    head = heads + here * SIZE
    key = tl.program_id(0) % (C // BM) * BM + tl.arange(0, BM)
    first, last = visible_range(begins, ends, here, key, n_here, start, False, CAUSAL, DOCUMENTS)
    AT: tl.constexpr = C // BN - ROUND * KEPT - N
    of_v = here * F + (E if GATED else 0)
    # The weights of all tiles of queries of this round, in registers.
    weights = ()
    for i in tl.static_range(AT, AT + N):
        weight = weigh_tile(head + per_head, key, n_here, head + i * BN * SIZE, other, i * BN, first, last, w,
                            each, here, per_head, C, BS, False, CAUSAL)
        weights = weights + (weight.to(dtype),)  # type: ignore[assignment]  # noqa: RUF005

    # The first rounds also read the gradient of the linear half's state, a direction each.
    DIRECTED: tl.constexpr = ROUND < (1 if CAUSAL else 2)
    if DIRECTED:
        k_lin = load_tile(head + 3 * per_head, key, tl.arange(0, BS), n_here, SIZE)
        adds = crosses_edge(begins, ends, here, key, n_here, start, C, ROUND, DOCUMENTS)
        state = dstates + ((ROUND * n_rows + b) * n_chunks + g) * SIZE * E
        dk = tl.zeros([BM, SIZE], tl.float32)
    # A loop over columns of v: dv by the state, earlier rounds and weights, at last silu.
    for at in range(0, E, BE):
        column = at + tl.arange(0, BE)
        acc = tl.zeros([BM, BE], tl.float32)
        if DIRECTED:
            state_tile = load_tile(state, size, column, SIZE, E)
            dk = dot(load_tile(v + here * E, key, column, n_here, E), tl.trans(state_tile), dk)
            acc = read_state(k_lin, state_tile, head + 3 * per_head, key, n_here, state, column, E, acc, BS)
            acc = tl.where(adds, acc, 0.0)
        if ROUND > 0:
            acc += load_tile(duvz + of_v, key, column, n_here, F).to(tl.float32)
        for i in tl.static_range(N):
            tile = (AT + i) * BN
            acc = dot(weights[i], load_tile(do + (here + tile) * E, other, column, n_here - tile, E), acc)
        if GATED:
            by = silu_slope(load_tile(uvz + of_v, key, column, n_here, F).to(tl.float32))
            acc = tl.where(finish, acc * by, acc)
        store_tile(duvz + of_v, key, column, n_here, F, acc)
    if DIRECTED:
        dk = tl.where(adds, dk, 0.0)
        if ROUND > 0:
            dk += load_tile(dk_lin + here * SIZE, key, size, n_here, SIZE).to(tl.float32)
        store_tile(dk_lin + here * SIZE, key, size, n_here, SIZE, dk)


class DocumentTables(NamedTuple):
    """The documents of rows, as the kernels read them."""

    ids_BT: Tensor | None
    begins_BT: Tensor | None
    """Document boundaries: the first index of each token's document, and the last index + 1
    (`ends_BT`); int32. Padding is a document without tokens. A document that begins before the row,
    or ends after it, has an index outside of it. None: every row is one document."""
    ends_BT: Tensor | None
    scales_RBG: Tensor  # factor of the sum entering each chunk: 1 / its tokens ("sum": 1) or `each_BT`; 0 for none
    each_BT: Tensor | None  # when not causal: 1 / number of tokens of each token's document, or 1 for "sum"


def make_document_tables(segment_ids_BT: Tensor | None, n_rows: int, n_tokens: int, chunk_size: int, causal: bool,
                         pooling: str, device: torch.device, outside_RB: Tensor | None = None,
                         goes_on: bool = False) -> DocumentTables:
    """The `DocumentTables` of rows. segment_ids_BT, pooling: as in `ops.gated_chunk_attention`.

    outside_RB: of parts of rows, the number of tokens that document 0 has before the part, and when
    not causal that of the last token has after it. None: 0. goes_on: whether the last token's
    document goes on behind a causal row, by a number of tokens that does not matter."""
    chunk_G = torch.arange(0, n_tokens, chunk_size, device=device)  # the first token of each chunk
    last_G = (chunk_G + chunk_size - 1).clamp(max=n_tokens - 1)

    def share(count: Tensor) -> Tensor:
        return torch.where(count > 0, 1.0 if pooling == "sum" else 1.0 / count.clamp(min=1), 0.0).float()

    # Rows of one document need no tables: only where the document begins and ends.
    if segment_ids_BT is None:
        ids_BT, begins_BT, ends_BT = None, None, None
        begin_BG, end_BG = (chunk_G.new_full((n_rows, len(chunk_G)), at) for at in (0, n_tokens))
        begin_BG = begin_BG if outside_RB is None else begin_BG - outside_RB[0].int()[:, None]
        count_BT = chunk_G.new_full((n_rows, n_tokens), n_tokens)
    else:
        # A document begins and ends where ids differ.
        ids_BT, token_T = segment_ids_BT.int(), torch.arange(n_tokens, dtype=torch.int32, device=device)
        changes_BT = ids_BT[:, 1:] != ids_BT[:, :-1]
        begins_BT = torch.where(F.pad(changes_BT, [1, 0], value=True), token_T, 0).cummax(1).values
        ends_BT = torch.where(F.pad(changes_BT, [0, 1], value=True), token_T + 1, n_tokens)
        ends_BT = ends_BT.flip(1).cummin(1).values.flip(1)
        if outside_RB is not None:  # documents that cross the ends of the rows reach as far as they have tokens
            begins_BT = begins_BT - torch.where(ids_BT == 0, outside_RB[0].int()[:, None], 0)
            if not causal:
                ends_BT = ends_BT + torch.where(ids_BT == ids_BT[:, -1:], outside_RB[1].int()[:, None], 0)
        if goes_on:
            ends_BT = ends_BT + (ids_BT == ids_BT[:, -1:]).int()
        # Padding begins and ends at itself: a document without tokens.
        begins_BT, ends_BT = (torch.where(ids_BT >= 0, x, token_T).contiguous() for x in (begins_BT, ends_BT))
        begin_BG, end_BG, count_BT = begins_BT[:, ::chunk_size], ends_BT[:, last_G], ends_BT - begins_BT
    if causal:
        return DocumentTables(ids_BT, begins_BT, ends_BT, share(chunk_G - begin_BG)[None], None)
    # Not causal: the tokens of a document share one divisor, in whichever direction they are read.
    each_BT = share(count_BT.clamp(min=1))
    before_BG = torch.where(begin_BG < chunk_G, each_BT[:, ::chunk_size], 0.0)
    after_BG = torch.where(end_BG > last_G + 1, each_BT[:, last_G], 0.0)
    return DocumentTables(ids_BT, begins_BT, ends_BT, torch.stack([before_BG, after_BG]), each_BT)


class FlashInputs(NamedTuple):
    """What the custom op takes, contiguous. Heads are made from z; or `heads` of 128 dimensions are
    given, then uvz has no z, and gamma, beta, sin and cos are None. Not gated, uvz is v."""

    uvz: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    sin: Tensor | None
    cos: Tensor | None
    heads: Tensor | None
    w: Tensor
    past: Tensor | None  # the sums that enter the rows, past_RBSE, float32
    ids: Tensor | None  # this and the next four: `DocumentTables`
    begins: Tensor | None
    ends: Tensor | None
    scales: Tensor
    each: Tensor | None
    chunk_size: int
    causal: bool
    carries: bool  # whether the sums that leave the rows are wanted
    gated: bool

    @property
    def made_by(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What makes heads from z."""
        assert self.gamma is not None and self.beta is not None and self.sin is not None and self.cos is not None
        return self.gamma, self.beta, self.sin, self.cos

    @property
    def width_of_v(self) -> int:
        """E: columns of u and of v in the projection."""
        return (self.uvz.shape[-1] - (0 if self.gamma is None else self.gamma.shape[-1])) // (2 if self.gated else 1)


class Tiles(NamedTuple):
    """Tile sizes of a kernel, its warps and its pipeline stages.

    A program has `rows` queries, keys or dimensions of a state. It takes `keys` rows of the other
    operand and `columns` of v at a time, `kept` tiles of weights in registers, and in a matmul
    `inner` dimensions of a head."""

    rows: int
    keys: int
    columns: int
    n_warps: int
    n_stages: int
    kept: int = 1
    inner: int = 128


SCAN_COLUMNS = 1024
MANY_CHUNKS, FEW_PROGRAMS = 8, 264  # a row of more than MANY_CHUNKS has two levels if one has fewer than FEW_PROGRAMS


def attention_tiles(dtype: torch.dtype, causal: bool, of: Literal["out", "queries", "keys"], kind: TileClass) -> Tiles:
    """Tiles of `attend_queries`, for its output or for the gradients of queries, and of
    `differentiate_keys`: the largest that do not spill registers with three stages, in which a tile
    is copied while another is multiplied."""
    # Float32 has twice the bytes and no tensor cores: small tiles, and heads in pieces.
    if dtype == torch.float32:
        return Tiles(32, 32, 16, 4, 2, 1, 16)
    if kind == "small":
        return Tiles(64, 128, 16, 4, 3, 1) if causal else Tiles(64, 128, 32, 8, 3, 1)
    if kind == "large" and causal:
        return Tiles(128, 128, 32, 8, 3, 2)
    if kind == "hopper" and of == "out":
        return Tiles(128, 128, 64, 8, 3, 2)
    if not causal:
        return Tiles(128, 64, 32, 8, 3, 2)
    return Tiles(64, 128, 16 if of == "queries" else 32, 4, 3, 2)


def make_states(given: FlashInputs, x_BTE: Tensor, heads_4BTS: Tensor, first_RBSE: Tensor | None,
                last_RBSE: Tensor | None, *, backward: bool) -> tuple[Tensor, Tensor]:
    """v = silu(x) and the state that enters each chunk, or backward do = x silu(u) and the gradient
    of the sum that each chunk adds: x_out_BTE and states_RBGSE, in the dtype of uvz. Not gated v
    and do are x.

    x_BTE: v before silu, or backward dout. first_RBSE, last_RBSE: see `walk_states`; float32."""
    uvz_BTF, (n_rows, n_tokens, f) = given.uvz, given.uvz.shape
    s, e = heads_4BTS.shape[-1], x_BTE.shape[-1]
    n_directions, _, n_chunks = given.scales.shape
    x_out_BTE = uvz_BTF.new_empty(n_rows, n_tokens, e)
    states_RBGSE = uvz_BTF.new_empty(n_directions, n_rows, n_chunks, s, e)
    few = 16 if tile_class(uvz_BTF.device) == "small" else 32
    tiles = Tiles(s, 32, 32, 4, 2) if uvz_BTF.dtype == torch.float32 else Tiles(s, few, 64, 4, 3)
    n_tiles = triton.cdiv(e, tiles.columns)
    # One level walks a row. Few rows of many chunks would leave a GPU idle, so they get two.
    whole = n_chunks <= MANY_CHUNKS or n_tiles * n_rows >= FEW_PROGRAMS
    n_places = n_rows if whole else n_rows * n_chunks
    for r in range(n_directions):
        scales, states = given.scales[r], states_RBGSE[r]
        sums = states if whole else torch.empty_like(states, dtype=torch.float32)
        first, last = (None if x is None else x[r] for x in (first_RBSE, last_RBSE))
        walk_states[(n_tiles * n_places,)](
            x_BTE, x_BTE.stride(1), uvz_BTF, heads_4BTS, given.begins, given.ends, scales, first, last, x_out_BTE, sums,
            n_tokens, n_chunks, e, f, C=given.chunk_size, BE=tiles.columns, BC=tiles.keys, R=r, BACKWARD=backward,
            DOCUMENTS=given.ends is not None, WHOLE=whole, GATED=given.gated, num_warps=tiles.n_warps,
            num_stages=tiles.n_stages)
        if not whole:
            scan_states[triton.cdiv(s * e, SCAN_COLUMNS), n_rows](
                sums, given.begins, given.ends, scales, first, last, states, n_tokens, n_chunks, s * e,
                C=given.chunk_size, BLOCK=SCAN_COLUMNS, R=r, BACKWARD=backward, DOCUMENTS=given.ends is not None)
    return x_out_BTE, states_RBGSE


def run_rounds(kernel: triton.JITFunction, of: Literal["out", "queries", "keys"], given: FlashInputs,
               read: Sequence[Tensor], written: Sequence[Tensor | None], **flags: bool) -> None:
    """Launch `attend_queries` or `differentiate_keys`, once for each round.

    read, written: their arguments between uvz and w, and behind the tables of documents."""
    uvz, c, causal, (n_rows, n_tokens, f) = given.uvz, given.chunk_size, given.causal, given.uvz.shape
    tiles, n_chunks = attention_tiles(uvz.dtype, causal, of, tile_class(uvz.device)), given.scales.shape[-1]
    # Enough rounds for the weights of all tiles, and at least one per direction.
    for number in range(max(triton.cdiv(c // tiles.keys, tiles.kept), 1 if causal else 2)):
        kernel[n_chunks * (c // tiles.rows), n_rows](
            uvz, *read, given.w, given.begins, given.ends, given.each, *written, n_tokens, n_chunks,
            given.width_of_v, f, C=c, BM=tiles.rows, BN=tiles.keys, BE=tiles.columns, BS=tiles.inner,
            KEPT=tiles.kept, ROUND=number, CAUSAL=causal, DOCUMENTS=given.ends is not None, GATED=given.gated,
            num_warps=tiles.n_warps, num_stages=tiles.n_stages, **flags)


@on_own_device
def flash_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """FLASH's attention of `FlashInputs`.

    Returns the output; the sums that leave the rows, left_RBSE, empty without `carries`; and what
    the backward pass reads again: the heads made here, v after silu, and the states that enter each
    chunk. In bfloat16 they take 5.6 KB per token and layer at 110 M, and save 9.2 KB of traffic."""
    given = FlashInputs(*inputs)
    uvz, heads, e = given.uvz, given.heads, given.width_of_v
    made = uvz.new_empty(0)
    if heads is None:
        made = heads = launch_make_heads(uvz, *given.made_by)
    left = torch.empty_like(given.past) if given.carries and given.past is not None else None
    before = uvz[..., e : 2 * e] if given.gated else uvz
    v, states = make_states(given, before, heads, given.past, left, backward=False)
    out = uvz.new_empty(*uvz.shape[:2], e, dtype=wide_dtype(uvz))
    run_rounds(attend_queries, "out", given, (heads, v, states), (out, None, None, None), BACKWARD=False)
    return out, out.new_empty(0, dtype=torch.float32) if left is None else left, made, v, states


def empty_flash_outputs(*inputs: Any) -> tuple[Tensor, ...]:
    """Tensors of the shapes that `flash_forward` returns."""
    given = FlashInputs(*inputs)
    uvz, scales, (n_rows, n_tokens, _), e = given.uvz, given.scales, given.uvz.shape, given.width_of_v
    left = torch.empty_like(given.past) if given.carries and given.past is not None else scales.new_empty(0)
    made = uvz.new_empty(4, n_rows, n_tokens, QUERY_KEY_DIM) if given.heads is None else uvz.new_empty(0)
    states = uvz.new_empty(scales.shape[0], n_rows, scales.shape[-1], QUERY_KEY_DIM, e)
    out = uvz.new_empty(n_rows, n_tokens, e, dtype=wide_dtype(uvz))
    return out, left, made, uvz.new_empty(n_rows, n_tokens, e), states


@on_own_device
def flash_backward(dout: Tensor, dleft: Tensor | None, heads: Tensor, v: Tensor, states: Tensor,
                   *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of uvz, gamma, beta, heads, w and past, in this order: an empty tensor for what
    was not given. dleft: the gradient of the sums that leave the rows. heads, v, states: from
    `flash_forward`."""
    given = FlashInputs(*inputs)
    uvz, w, c = given.uvz, given.w, given.chunk_size
    # The gradients of states, of u and q_lin, of v and k_lin, of q, k and the bias, of z.
    dpast = None if given.past is None else torch.empty_like(given.past)
    do, dstates = make_states(given, dout, heads, dleft, dpast, backward=True)
    duvz, dheads, none = torch.empty_like(uvz), torch.empty_like(heads), given.scales.new_empty(0)
    run_rounds(attend_queries, "queries", given, (heads, v, states), (None, dout, duvz, dheads[2]), BACKWARD=True)
    run_rounds(differentiate_keys, "keys", given, (heads, v, do, dstates), (duvz, dheads[3]))
    dw = score_gradients(heads, v, do, w, given.ids, given.each, dheads, row_len=c, scale_len=c, causal=given.causal)
    dpast = none.clone() if dpast is None else dpast
    if given.heads is not None:
        return duvz, none, none.clone(), dheads, dw.to(w.dtype), dpast
    gamma, beta, sin, cos = given.made_by
    dgamma, dbeta = base_gradient(uvz, dheads, gamma, sin, cos, duvz)
    return duvz, dgamma.to(gamma.dtype), dbeta.to(beta.dtype), none, dw.to(w.dtype), dpast


def empty_flash_gradients(dout: Tensor, dleft: Tensor | None, heads: Tensor, v: Tensor, states: Tensor,
                    *inputs: Any) -> tuple[Tensor, ...]:
    """Tensors of the shapes that `flash_backward` returns."""
    given = FlashInputs(*inputs)
    wanted = (given.uvz, given.gamma, given.beta, heads if given.gamma is None else None, given.w, given.past)
    return tuple(given.scales.new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


def save_for_flash_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the tensors given and what `flash_forward` made for the backward pass."""
    _, _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # no zeros for the gradients of what is kept
    ctx.how = inputs[-4:]  # what is no tensor
    ctx.save_for_backward(*kept, *inputs[:-4])


def flash_gradients(ctx: Any, dout: Tensor | None, dleft: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    made, v, states, *tensors = ctx.saved_tensors
    given = FlashInputs(*tensors, *ctx.how)
    # A result that nothing was made of has no gradient.
    dout = torch.zeros_like(v) if dout is None else dout.contiguous()
    duvz, dgamma, dbeta, dheads, dw, dpast = flash_backward_op(
        dout, None if dleft is None else dleft.contiguous(), made if given.heads is None else given.heads, v, states,
        *given)
    dscales = (dgamma, dbeta, None, None, None) if given.heads is None else (None, None, None, None, dheads)
    return duvz, *dscales, dw, None if given.past is None else dpast, *[None] * 9


flash_op = torch.library.custom_op(
    "lineartime::gated_chunk_attention", flash_forward, mutates_args=(),
    schema=f"({schema_of(FlashInputs)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
flash_op.register_fake(empty_flash_outputs)
flash_op.register_autograd(flash_gradients, setup_context=save_for_flash_backward)
flash_backward_op = torch.library.custom_op(
    "lineartime::gated_chunk_attention_backward", flash_backward, mutates_args=(),
    schema=f"(Tensor dout, Tensor? dleft, Tensor made, Tensor v, Tensor states, {schema_of(FlashInputs)}) -> "
           "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
flash_backward_op.register_fake(empty_flash_gradients)


def attention_in_kernels(uvz_BTF: Tensor, heads: Heads, w: Tensor | None = None, *, gated: bool, chunk_size: int,
                         causal: bool, segment_ids_BT: Tensor | None = None, pooling: str = "mean",
                         gate_BT: Tensor | None = None, exchange: Exchange | None = None) -> Tensor:
    """`reference.gated_chunk_attention`, or not gated `reference.chunk_attention`, in kernels, for
    inputs that `dispatch.unsupported_chunks` allows. Given heads of fewer than 128 dimensions get
    zeros. With "written" q is divided here.

    First derivatives only, and none of sin and cos. Sums are float32 and deterministic. Raises
    RuntimeError in forward-mode differentiation."""
    if isinstance(heads, HeadsFromZ) and (s := heads.gamma_NS.shape[-1]) < QUERY_KEY_DIM:
        uvz_BTF, z_BTS = uvz_BTF.split([uvz_BTF.shape[-1] - s, s], dim=-1)  # PyTorch makes narrow heads
        heads = reference.make_heads(F.silu(z_BTS), *heads).unbind()
    # What enters the rows: from the part before, or from other ranks, which get what leaves.
    # "written" also needs the sum of the gates before them: the same exchange of gates alone.
    past: tuple[Tensor, Tensor] | None = None
    of_gates: Exchange | None = None
    if isinstance(exchange, CarriedState):
        past, count_B = (exchange.kv_BSE[None], exchange.count_B[None]), exchange.count_B
        of_gates = CarriedState(count_B.new_empty(len(count_B), 0, 0), count_B)
    elif exchange is not None:
        segment_ids_BT = reference.ids_or_zeros(segment_ids_BT, uvz_BTF)
        past = _, count_RB = past_of_rows(uvz_BTF, heads, gate_BT, segment_ids_BT, causal, exchange, gated)
        of_gates = lambda *_: count_RB[..., None]  # noqa: E731
    made_by: Sequence[Tensor | None] = heads
    heads_4BTS: Tensor | None = None
    if not isinstance(heads, HeadsFromZ):
        heads = reference.divided_by_gates(heads, gate_BT, segment_ids_BT, chunk_size, causal, of_gates)
        made_by, heads_4BTS = [None] * 4, with_zeros(torch.stack(list(heads)), -1)
        if past is not None and gate_BT is not None:  # the tables only need to know that there may be tokens outside
            past = past[0], torch.ones_like(past[1])
    # The tables of documents, contiguous tensors, and the kernels.
    w, (n_rows, n_tokens, _) = reference.bias_or_zeros(w, uvz_BTF, chunk_size), uvz_BTF.shape
    kv_RBSE, before_RB = (None, None) if past is None else past
    refuse_forward_mode(uvz_BTF, *made_by, heads_4BTS, w, kv_RBSE, before_RB)
    carries = isinstance(exchange, CarriedState)
    documents = make_document_tables(segment_ids_BT, n_rows, n_tokens, chunk_size, causal,
                                     "mean" if pooling == "mean" else "sum", uvz_BTF.device, before_RB, goes_on=carries)
    past_RBSE = None if kv_RBSE is None else with_zeros(kv_RBSE.float(), -2).contiguous()
    tensors = [None if x is None else x.contiguous() for x in (uvz_BTF, *made_by, heads_4BTS, w)]
    out_BTE, left_RBSE, *_ = flash_op(*tensors, past_RBSE, *documents, chunk_size, causal, carries, gated)
    # The next part gets the last document's sums, without added zeros, and its tokens or gates.
    if isinstance(exchange, CarriedState):
        kv_BSE, count_B, begins_BT = exchange.kv_BSE, exchange.count_B, documents.begins_BT
        exchange.kv_BSE = left_RBSE[0, :, : kv_BSE.shape[1]].to(kv_BSE.dtype)
        n_left_B = n_tokens + count_B if begins_BT is None else n_tokens - begins_BT[:, -1]
        if gate_BT is not None and isinstance(of_gates, CarriedState):
            n_left_B = of_gates.count_B
        exchange.count_B = n_left_B.to(count_B.dtype)
    return out_BTE


gated_chunk_attention = partial(attention_in_kernels, gated=True)
chunk_attention = partial(attention_in_kernels, gated=False)


def with_zeros(x: Tensor, axis: int) -> Tensor:
    """x with zeros behind the fewer than 128 dimensions of its heads, which are along an axis."""
    missing = QUERY_KEY_DIM - x.shape[axis]
    return F.pad(x, [0, 0] * (-axis - 1) + [0, missing]) if missing else x


def past_of_rows(uvz_BTF: Tensor, heads: Heads, gate_BT: Tensor | None, segment_ids_BT: Tensor, causal: bool,
                 exchange: Exchange, gated: bool) -> tuple[Tensor, Tensor]:
    """What enters parts of rows: sums of k v, past_RBSE, and their tokens or gates, count_RB."""
    # Of heads that are made in the kernels the linear half's keys alone are needed here.
    if isinstance(heads, HeadsFromZ):
        gamma_4S, beta_4S, *angles = heads
        heads = HeadsFromZ(gamma_4S[3:], beta_4S[3:], *angles)
    _, v_BTE, (*_, k_lin_BTS) = reference.split_projection(uvz_BTF, heads) if gated else (None, uvz_BTF, heads)
    # The part is one chunk of the reference, so that one matmul makes what it hands on.
    states = reference.states_of_rows(k_lin_BTS[:, None], v_BTE[:, None], segment_ids_BT[:, None],
                                      None if gate_BT is None else gate_BT[:, None], causal=causal, exchange=exchange)
    kv_RBSE, count_RB = (torch.stack([state[i][:, 0] for state in states]) for i in (0, 1))
    return kv_RBSE.float(), count_RB
