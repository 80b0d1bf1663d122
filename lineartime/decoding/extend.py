"""Attention in decoding: the next tokens of rows whose past is in a cache, for every kind of attention.

A row's heads are entries of the batch side by side (B counts them), but in Performer and Combiner. Each function gives
what the parallel form gives, at any split of the rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime import ops
from lineartime.chunks import Chunking
from lineartime.decoding.cache import ChunkState, Feed, KeyValueCache, NewToken, PrefixState, RowCache, with_room
from lineartime.layers import RelPosBias, at_least_float32
from lineartime.ops.baselines import prefix_read, relu_features, with_ones
from lineartime.ops.reference import (
    attention_weights,
    carried_states,
    chunk_means,
    read_states,
    score_scale,
    to_chunks,
)

WeighChunks = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The learned weight of chunks: summaries of queries `[B, P, S]` and keys `[B, L, S]` and the distance from the one to
the other, in chunks, `[B, P, L]`, to weights `[B, P, L]`."""

Attend = Callable[[tuple[Tensor, ...], int, tuple[Tensor, Tensor]], tuple[Tensor, tuple[Tensor, Tensor]]]
"""A Combiner layer's attention to one document: x, q, k and v of its open row and new tokens, the position of the
first, and the summaries of its full rows, to the result and the summaries of these rows."""


def extend_row(q_BNS: Tensor, k_BNS: Tensor, v_BNE: Tensor, feed: Feed, cache: KeyValueCache,
               rel_pos_bias: RelPosBias, kernel: str, scale_len: int) -> Tensor:
    """`quadratic_attention` over the whole row, for the next tokens of rows whose keys are in `cache`: out_BNE."""
    k_BLS, v_BLE = cache.append(k_BNS, v_BNE, feed)
    bias = cache.bias(rel_pos_bias, feed.longest)
    if feed.bias_index is not None:
        bias = bias[feed.bias_index]
    score_BNL = scores(q_BNS, k_BLS, bias, kernel, scale_len)
    return torch.bmm(attention_weights(score_BNL, feed.visible, kernel).to(v_BLE.dtype), v_BLE)


def extend_softmax(q_BNK: Tensor, k_BNK: Tensor, v_BNK: Tensor, feed: Feed, cache: KeyValueCache) -> Tensor:
    """Softmax attention, fused, of the next tokens to all before them: out_BNK. Rows in `feed`, in the rest heads."""
    k_BLK, v_BLK = cache.append(k_BNK, v_BNK, feed.for_heads(cache.n_heads))
    q, k, v = (x_BLK.unflatten(0, (-1, cache.n_heads)) for x_BLK in (q_BNK, k_BLK, v_BLK))
    mask_B1NL = None if feed.visible is None else feed.visible[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1NL).flatten(0, 1)


def scores(q_BNS: Tensor, k_BLS: Tensor, bias: Tensor | None, kernel: str, scale_len: int) -> Tensor:
    """q k^T scaled as the kernel asks, and the bias: score_BNL, float32 at least."""
    score_BNL, scale = torch.bmm(q_BNS, k_BLS.mT), 1 / score_scale(kernel, q_BNS.shape[-1], scale_len)
    return at_least_float32(score_BNL) * scale if bias is None else torch.add(bias, score_BNL, alpha=scale)


def empty_chunk_state(n: int, s: int, e: int, n_heads: int, chunking: Chunking, weight: Tensor) -> ChunkState:
    """The memory of `n` entries (rows times heads) that have had no token, of `weight`'s type and device."""
    c = chunking.chunk_size

    def zeros(*shape: int) -> Tensor:
        return weight.new_zeros(n, *shape)

    state = ChunkState(n_heads, zeros(c, s), zeros(c, s), zeros(c, e), at_least_float32(zeros(s, e)))
    if chunking.overlap:
        state.k_before_BCS, state.v_before_BCE = zeros(c, s), zeros(c, e)
    if chunking.pooling == "attention":
        state.z_sum_BS = at_least_float32(zeros(s))
        state.kv_BLSE, state.summary_BLS = at_least_float32(zeros(0, s, e)), at_least_float32(zeros(0, s))
    return state


def extend_chunks(heads_HBNS: Tensor, v_BNE: Tensor, feed: Feed, cache: ChunkState, chunking: Chunking,
                  rel_pos_bias: RelPosBias | None, z_BNS: Tensor | None = None,
                  weigh: WeighChunks | None = None) -> Tensor:
    """Mixed chunk attention of the next tokens of rows whose past is in `cache`: out_BNE. Causal only.

    heads_HBNS: q and k of the quadratic part, then of the linear part. z_BNS, weigh: for learned chunk weights."""
    extend = extend_by_one if feed.one_each else extend_by_many
    return extend(heads_HBNS, v_BNE, feed, cache, chunking, rel_pos_bias, z_BNS, weigh)


def extend_by_one(heads_HBNS: Tensor, v_BNE: Tensor, feed: Feed, cache: ChunkState, chunking: Chunking,
                  rel_pos_bias: RelPosBias | None, z_BNS: Tensor | None, weigh: WeighChunks | None) -> Tensor:
    """One token per row: it attends to the open chunk, reads the state, and closes the chunk if it fills it."""
    at = feed.at_new_token(chunking, cache.kv_BSE.dtype)
    q_quad_BNS, k_quad_BNS, q_lin_BNS, k_lin_BNS = heads_HBNS
    for buffer, new_BN in ((cache.k_quad_BCS, k_quad_BNS), (cache.k_lin_BCS, k_lin_BNS), (cache.v_BCE, v_BNE)):
        buffer[at.place] = new_BN[:, 0]
    if cache.z_sum_BS is not None:
        assert z_BNS is not None
        cache.z_sum_BS += z_BNS[:, 0]

    out_BNE = None
    if chunking.parts != "global":
        k_BMS, v_BME = cache.k_quad_BCS[:, : at.n_open], cache.v_BCE[:, : at.n_open]
        if cache.k_before_BCS is not None and cache.v_before_BCE is not None:
            k_BMS = torch.cat([cache.k_before_BCS, k_BMS], dim=1)
            v_BME = torch.cat([cache.v_before_BCE, v_BME], dim=1)
        bias = None if rel_pos_bias is None else cache.bias(rel_pos_bias)[at.bias_index]
        score_BNM = scores(q_quad_BNS, k_BMS, bias, chunking.kernel, chunking.chunk_size)
        out_BNE = torch.bmm(attention_weights(score_BNM, at.visible_B1M, chunking.kernel).to(v_BME.dtype), v_BME)
    if chunking.parts != "local":
        linear_BNE = torch.bmm(q_lin_BNS * at.weight_B11, cache.kv_BSE)
        out_BNE = linear_BNE if out_BNE is None else linear_BNE + out_BNE
    assert out_BNE is not None
    if at.full is not None:
        cache.step_back(at.full)
        if weigh is None:
            cache.close(at)
        else:
            close_weighted(cache, at, weigh)
    return out_BNE.to(v_BNE.dtype)


def close_weighted(cache: ChunkState, at: NewToken, weigh: WeighChunks) -> None:
    """Close the open chunk where it is full, and weigh all closed ones for the next."""
    assert cache.z_sum_BS is not None and cache.kv_BLSE is not None and cache.summary_BLS is not None
    c = cache.k_lin_BCS.shape[1]
    rows = torch.arange(len(at.number_B), device=at.number_B.device)[at.full]
    one_document_B1C = torch.zeros(len(rows), 1, c, dtype=torch.long, device=rows.device)
    kv_B1SE = chunk_means(cache.k_lin_BCS[rows, None], cache.v_BCE[rows, None], one_document_B1C)
    write_closed(cache, rows[:, None], at.number_B[rows, None], kv_B1SE, (cache.z_sum_BS[rows] / c)[:, None])
    cache.z_sum_BS[rows] = 0.0
    cache.kv_BSE[rows] = pool_closed(cache, (at.number_B + 1)[:, None], weigh)[rows, 0]


def write_closed(cache: ChunkState, row_BP: Tensor, number_BP: Tensor, kv_BPSE: Tensor, summary_BPS: Tensor) -> None:
    """Keep k v and the summary of closed chunks by their numbers; a number of -1 is left out."""
    assert cache.kv_BLSE is not None and cache.summary_BLS is not None
    length = int(number_BP.max()) + 1
    if length > cache.kv_BLSE.shape[1]:
        cache.kv_BLSE, cache.summary_BLS = with_room(cache.kv_BLSE, length), with_room(cache.summary_BLS, length)
    kept_BP = number_BP >= 0
    row = row_BP.expand_as(number_BP)[kept_BP]
    cache.kv_BLSE[row, number_BP[kept_BP]] = kv_BPSE[kept_BP]
    cache.summary_BLS[row, number_BP[kept_BP]] = summary_BPS[kept_BP].to(cache.summary_BLS.dtype)


def pool_closed(cache: ChunkState, number_BP: Tensor, weigh: WeighChunks) -> Tensor:
    """What enters the chunks of these numbers: the weighted sum of k v over the closed chunks before each, BPSE."""
    assert cache.kv_BLSE is not None and cache.summary_BLS is not None
    rows, chunk_L = torch.arange(len(number_BP), device=number_BP.device), torch.arange(
        cache.kv_BLSE.shape[1], device=number_BP.device)
    last_BPS = cache.summary_BLS[rows[:, None], (number_BP - 1).clamp(min=0, max=len(chunk_L) - 1)]
    distance_BPL = chunk_L - number_BP[..., None]
    a_BPL = weigh(last_BPS, cache.summary_BLS, distance_BPL).masked_fill(distance_BPL >= 0, 0.0)
    return torch.einsum("bpl,blse->bpse", a_BPL.to(cache.kv_BLSE.dtype), cache.kv_BLSE)


def extend_by_many(heads_HBNS: Tensor, v_BNE: Tensor, feed: Feed, cache: ChunkState, chunking: Chunking,
                   rel_pos_bias: RelPosBias | None, z_BNS: Tensor | None, weigh: WeighChunks | None) -> Tensor:
    """Many tokens per row:
    the open chunk and the new tokens together are whole chunks that begin where it begins."""
    c = chunking.chunk_size
    offset_B = feed.length_B % c
    place_BN = torch.where(feed.valid_BN, offset_B[:, None] + torch.arange(v_BNE.shape[1], device=v_BNE.device), -1)
    n_slots = max(-(-(int(place_BN.max()) + 1) // c), 1) * c

    def in_place(new_BN: Tensor, open_BC: Tensor | None = None, fill: int = 0) -> Tensor:
        """New tokens behind those of the open chunk, as chunks. Slot -1, the last, takes what is not valid."""
        all_BT = new_BN.new_full((len(new_BN), n_slots + 1, *new_BN.shape[2:]), fill)
        if open_BC is not None:
            all_BT[:, :c] = open_BC
        index = (place_BN % (n_slots + 1)).view(*place_BN.shape, *[1] * (new_BN.dim() - 2)).expand_as(new_BN)
        return to_chunks(all_BT.scatter(1, index, new_BN)[:, :-1], c)

    slot_C, open_start_B = torch.arange(c, device=v_BNE.device), feed.length_B - offset_B
    first_B = feed.start_B - open_start_B
    open_ids_BC = torch.where((slot_C < offset_B[:, None]) & (slot_C >= first_B[:, None]), 0, -1)
    segment_ids_BGC = in_place(feed.segment_ids_BN, open_ids_BC, fill=-1)
    q_quad_BNS, k_quad_BNS, q_lin_BNS, k_lin_BNS = heads_HBNS
    k_lin_BGCS, k_quad_BGCS = in_place(k_lin_BNS, cache.k_lin_BCS), in_place(k_quad_BNS, cache.k_quad_BCS)
    v_BGCE = in_place(v_BNE, cache.v_BCE)
    out_BGCE = torch.zeros_like(v_BGCE)
    rows, n_closed_B = torch.arange(len(v_BNE), device=v_BNE.device), (offset_B + feed.n_new_B) // c

    if chunking.parts != "global":
        q_quad, k_quad, v, ids = in_place(q_quad_BNS), k_quad_BGCS, v_BGCE, segment_ids_BGC
        if cache.k_before_BCS is not None and cache.v_before_BCE is not None:
            # The chunk before the open one stands in front; nobody asks for its own output.
            behind_BC = (slot_C - c >= first_B[:, None]) & (open_start_B[:, None] >= c)
            q_quad = F.pad(q_quad, [0, 0, 0, 0, 1, 0])
            k_quad = torch.cat([cache.k_before_BCS[:, None], k_quad], dim=1)
            v = torch.cat([cache.v_before_BCE[:, None], v], dim=1)
            ids = torch.cat([torch.where(behind_BC, 0, -1)[:, None], ids], dim=1)
        w = None if rel_pos_bias is None else rel_pos_bias(rel_pos_bias.n)
        quad_BGCE = ops.quadratic_attention(q_quad, k_quad, v, w, scale_len=c, causal=True, segment_ids_BGC=ids,
                                            kernel=chunking.kernel, overlap=chunking.overlap)
        out_BGCE = out_BGCE + quad_BGCE[:, -segment_ids_BGC.shape[1]:]
        if cache.k_before_BCS is not None:
            cache.k_before_BCS, cache.v_before_BCE = k_quad[rows, n_closed_B], v[rows, n_closed_B]

    q_lin_BGCS = in_place(q_lin_BNS)
    if weigh is not None:
        assert z_BNS is not None
        z_BGCS = in_place(torch.where(feed.valid_BN[..., None], z_BNS, 0.0))
        out_BGCE = out_BGCE + extend_weighted(q_lin_BGCS, k_lin_BGCS, v_BGCE, z_BGCS, segment_ids_BGC,
                                              open_start_B // c, n_closed_B, cache, weigh)
    else:
        n_carried_B = feed.n_carried_B(c).to(cache.kv_BSE.dtype)
        entering_BSE = torch.where(n_carried_B[:, None, None] > 0, cache.kv_BSE, 0.0)
        kv_BPSE, count_BP, document_BP = carried_states(k_lin_BGCS, v_BGCE, segment_ids_BGC,
                                                        (entering_BSE, n_carried_B))
        if chunking.parts != "local":
            seen_BGC = (segment_ids_BGC == document_BP[:, :-1, None]) & (segment_ids_BGC >= 0)
            count_BGC = count_BP[:, :-1, None].clamp(min=1) if chunking.pooling == "mean" else 1.0
            out_BGCE = out_BGCE + read_states(q_lin_BGCS, kv_BPSE[:, :-1], seen_BGC / count_BGC)
        cache.kv_BSE = kv_BPSE[rows, n_closed_B]
    for name, all_BGC in (("k_quad_BCS", k_quad_BGCS), ("k_lin_BCS", k_lin_BGCS), ("v_BCE", v_BGCE)):
        setattr(cache, name, F.pad(all_BGC, [0, 0, 0, 0, 0, 1])[rows, n_closed_B])
    return out_BGCE.flatten(1, 2).gather(1, place_BN.clamp(min=0)[..., None].expand_as(v_BNE))


def extend_weighted(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, z_BGCS: Tensor, segment_ids_BGC: Tensor,
                    number_B: Tensor, n_closed_B: Tensor, cache: ChunkState, weigh: WeighChunks) -> Tensor:
    """The linear part with learned chunk weights; the first chunk has the number `number_B` in its row."""
    assert cache.z_sum_BS is not None
    n_chunks, c = q_BGCS.shape[1:3]
    rows, index_G = torch.arange(len(q_BGCS), device=q_BGCS.device), torch.arange(n_chunks, device=q_BGCS.device)
    z_BGS = at_least_float32(z_BGCS).sum(2)
    z_BGS = torch.cat([z_BGS[:, :1] + cache.z_sum_BS[:, None], z_BGS[:, 1:]], dim=1)
    closed_BG = index_G < n_closed_B[:, None]
    number_BG = number_B[:, None] + index_G
    if closed_BG.any():
        write_closed(cache, rows[:, None], torch.where(closed_BG, number_BG, -1),
                     chunk_means(k_BGCS, v_BGCE, segment_ids_BGC), z_BGS / c)
    cache.z_sum_BS = F.pad(z_BGS, [0, 0, 0, 1])[rows, n_closed_B]
    assert cache.kv_BLSE is not None
    if cache.kv_BLSE.shape[1] == 0:
        return torch.zeros_like(v_BGCE)
    pooled_BPSE = pool_closed(cache, torch.cat([number_BG, number_BG[:, -1:] + 1], dim=1), weigh)
    cache.kv_BSE = pooled_BPSE[rows, n_closed_B]
    return read_states(q_BGCS, pooled_BPSE[:, :-1], segment_ids_BGC >= 0)


def extend_linear(q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, feed: Feed, cache: PrefixState) -> Tensor:
    """Performer for the next tokens: a state per head, which begins again with each document. Returns `[B, N, D]`."""
    fq, fk, v1 = relu_features(q_BNHK), relu_features(k_BNHK), with_ones(v_BNHK)
    if feed.one_each:
        if feed.any_begins:
            cache.kv_BHMK.masked_fill_(feed.begins_BN[:, :1, None, None], 0.0)
        cache.kv_BHMK += torch.einsum("bnhm,bnhk->bhmk", fk, v1)
        y = torch.einsum("bnhm,bhmk->bnhk", fq, cache.kv_BHMK)
        return (y[..., :-1] / y[..., -1:]).to(v_BNHK.dtype).flatten(2)
    out = torch.zeros_like(v_BNHK)
    states = list(cache.kv_BHMK.split(1))
    for row in range(len(v_BNHK)):
        for start, stop, begins in feed.documents(row):
            q, k, v = (x[row : row + 1, start:stop] for x in (fq, fk, v1))
            y, states[row] = prefix_read(q, k, v, "blocks", None if begins else states[row])
            out[row, start:stop] = (y[0, ..., :-1] / y[0, ..., -1:]).to(out.dtype)
    cache.kv_BHMK = torch.cat(states)
    return out.flatten(2)


def extend_rowmajor_axial(x_BND: Tensor, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, feed: Feed, cache: RowCache,
                          attend: Attend) -> Tensor:
    """Combiner for the next tokens: the open row and they together, behind the summaries of the document's full rows.
    Returns `[B, N, D]`.

    attend: see `Attend`."""
    out, c = torch.zeros_like(v_BNHK), cache.x_BCD.shape[1]
    for row in range(len(v_BNHK)):
        for start, stop, begins in feed.documents(row):
            n_open, n_full = (0, 0) if begins else (int(cache.n_open_B[row]), int(cache.n_full_B[row]))
            new = (x_BND, q_BNHK, k_BNHK, v_BNHK)
            buffers = (cache.x_BCD, cache.q_BCHK, cache.k_BCHK, cache.v_BCHK)
            x, q, k, v = (torch.cat([old[row, :n_open], part[row, start:stop]])[None]
                          for old, part in zip(buffers, new, strict=True))
            earlier = (cache.ks_BLCHK[row : row + 1, :n_full], cache.vs_BLCHK[row : row + 1, :n_full])
            attended, (ks, vs) = attend((x, q, k, v), int(feed.position_BN[row, start]) - n_open, earlier)
            out[row, start:stop] = attended[0, n_open:]
            n_new_full = x.shape[1] // c
            cache.keep(row, n_full, ks[0, :n_new_full], vs[0, :n_new_full])
            n_open = x.shape[1] - n_new_full * c
            for buffer, part in zip(buffers, (x, q, k, v), strict=True):
                buffer[row, :n_open] = part[0, n_new_full * c :]
            cache.n_open_B[row], cache.n_full_B[row] = n_open, n_full + n_new_full
    return out.flatten(2)
