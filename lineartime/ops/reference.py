"""The attention ops in einsum: the definition that every kernel is held to.

Mixed chunk attention is three named stages: attention inside a chunk, the sums of k v that chunks carry to one another,
and their reading by queries. A document is a run of equal `segment_ids`; -1 marks padding, which contributes nothing.
"""

import torch
from torch import Tensor

from lineartime.layers import at_least_float32


def toeplitz(w: Tensor, length: int) -> Tensor:
    """b[i, j] = w[j - i + length - 1] as a matrix `[length, length]` from w `[2 length - 1]`."""
    return w.unfold(0, length, 1).flip(0)


def same_document(segment_ids_BGC: Tensor) -> Tensor:
    """True where query c and key m of a chunk belong to one document: `[B, G, C, M]`."""
    ids = segment_ids_BGC
    return (ids[..., :, None] == ids[..., None, :]) & (ids >= 0)[..., None, :]


def quadratic_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, w: Tensor, *, scale_len: int, causal: bool,
                        segment_ids_BGC: Tensor | None = None) -> Tensor:
    """relu(q k^T / n + b)^2 v inside each chunk:
    FLASH's local attention, and with one chunk all of FLASH-Quad (Code 6).

    w: the position bias as `[2 C - 1]` (see `toeplitz`). scale_len: n. Scores are in float32 at least.
    Returns `[B, G, C, E]`."""
    length = q_BGCS.shape[-2]
    score_BGCM = at_least_float32(torch.einsum("bgcs,bgms->bgcm", q_BGCS / scale_len, k_BGCS)) + toeplitz(w, length)
    if causal:
        visible = torch.ones(length, length, dtype=torch.bool, device=q_BGCS.device).tril()
        score_BGCM = score_BGCM.masked_fill(~visible, 0.0)
    if segment_ids_BGC is not None:
        score_BGCM = score_BGCM.masked_fill(~same_document(segment_ids_BGC), 0.0)
    a_BGCM = torch.relu(score_BGCM).square()
    return torch.einsum("bgcm,bgme->bgce", a_BGCM.to(v_BGCE.dtype), v_BGCE)


def carried_states(k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor,
                   initial: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What each chunk hands on: the sum of k v over the tokens so far of the document it ends with.

    Entry g of the results is what enters chunk g, entry G what leaves the last one: kv_BPSE and the
    number of tokens in it count_BP, in float32 at least, and its document document_BP. initial: kv_BSE and count_B
    that document 0 brings along. A document reaches a later chunk only if the chunks between hold nothing else, so one
    pass over the chunks is enough: the sum is kept while the chunk ends in the same document, else it starts again."""
    last_BG = segment_ids_BGC.amax(-1)
    tail_BGC = (segment_ids_BGC == last_BG[..., None]) & (segment_ids_BGC >= 0)
    kv_BGSE = at_least_float32(torch.einsum("bgcs,bgce->bgse", k_BGCS * tail_BGC[..., None], v_BGCE))
    count_BG = tail_BGC.sum(-1).to(kv_BGSE.dtype)
    kv_BSE, count_B = initial or (torch.zeros_like(kv_BGSE[:, 0]), torch.zeros_like(count_BG[:, 0]))
    document_B = torch.zeros_like(last_BG[:, 0])
    kvs, counts, documents = [kv_BSE], [count_B], [document_B]
    # unbind, because the gradient of an index is as large as what it indexes: G of them would cost G^2.
    for last_B, added_BSE, n_added_B in zip(last_BG.unbind(1), kv_BGSE.unbind(1), count_BG.unbind(1), strict=True):
        continues_B = last_B == document_B
        kv_BSE = torch.where(continues_B[:, None, None], kv_BSE, 0.0) + added_BSE
        count_B = torch.where(continues_B, count_B, 0.0) + n_added_B
        document_B = last_B
        kvs.append(kv_BSE)
        counts.append(count_B)
        documents.append(document_B)
    return torch.stack(kvs, 1), torch.stack(counts, 1), torch.stack(documents, 1)


def read_states(q_BGCS: Tensor, kv_BGSE: Tensor, weight_BGC: Tensor) -> Tensor:
    """q times the state that enters its chunk, each query weighed: `[B, G, C, E]`. A weight of 0 sees nothing."""
    q_BGCS = (q_BGCS * weight_BGC[..., None]).to(q_BGCS.dtype)
    return torch.einsum("bgcs,bgse->bgce", q_BGCS, kv_BGSE.to(q_BGCS.dtype))


def linear_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, *, causal: bool, segment_ids_BGC: Tensor,
                     pooling: str = "mean") -> Tensor:
    """q sum(k^T v) over the visible tokens of the query's document (Eqs. 7-8): those of earlier chunks when causal, all
    of them when not. pooling: "mean" divides by their number (Codes 7-8), "sum" does not. Returns `[B, G, C, E]`."""
    kv_BPSE, count_BP, document_BP = carried_states(k_BGCS, v_BGCE, segment_ids_BGC)
    seen_BGC = (segment_ids_BGC == document_BP[:, :-1, None]) & (segment_ids_BGC >= 0)
    count_BGC = seen_BGC * count_BP[:, :-1, None]
    if causal:
        weight_BGC = seen_BGC / count_BGC.clamp(min=1) if pooling == "mean" else seen_BGC
        return read_states(q_BGCS, kv_BPSE[:, :-1], weight_BGC)

    # What later chunks hold is the same sum over the rows turned round; ids are turned too, so that they still rise.
    turned_BGC = torch.where(segment_ids_BGC >= 0, segment_ids_BGC.amax() - segment_ids_BGC, -1).flip(1, 2)
    kv_after_BPSE, count_after_BP, document_after_BP = carried_states(k_BGCS.flip(1, 2), v_BGCE.flip(1, 2), turned_BGC)
    kv_after_BGSE, count_after_BG = kv_after_BPSE[:, :-1].flip(1), count_after_BP[:, :-1].flip(1)
    seen_after_BGC = ((turned_BGC == document_after_BP[:, :-1, None]) & (turned_BGC >= 0)).flip(1, 2)
    same_BGCM = same_document(segment_ids_BGC)
    count_BGC = count_BGC + seen_after_BGC * count_after_BG[..., None] + same_BGCM.sum(-1)
    each_BGC = 1 / count_BGC.clamp(min=1) if pooling == "mean" else torch.ones_like(count_BGC)
    own_BGCM = torch.einsum("bgcs,bgms->bgcm", (q_BGCS * each_BGC[..., None]).to(q_BGCS.dtype), k_BGCS) * same_BGCM
    own_BGCE = torch.einsum("bgcm,bgme->bgce", own_BGCM.to(v_BGCE.dtype), v_BGCE)
    before_BGCE = read_states(q_BGCS, kv_BPSE[:, :-1], each_BGC * seen_BGC)
    return before_BGCE + own_BGCE + read_states(q_BGCS, kv_after_BGSE, each_BGC * seen_after_BGC)


def chunk_weights(segment_ids_BGC: Tensor, causal: bool) -> Tensor:
    """The weight of chunk h for chunk g, `[B, G, G]` (Code 7): 1 / their number over the chunks whose range of
    documents overlaps, earlier ones only when causal.
    It leaks: two documents that share a chunk with a third see each other."""
    low_BG, high_BG = segment_ids_BGC.amin(-1), segment_ids_BGC.amax(-1)
    overlap_BGG = (low_BG[:, :, None] <= high_BG[:, None, :]) & (high_BG[:, :, None] >= low_BG[:, None, :])
    if causal:
        overlap_BGG = overlap_BGG.tril(-1)
    return overlap_BGG.double() / overlap_BGG.sum(-1, keepdim=True).clamp(min=1)


def paper_linear_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, *, causal: bool,
                           segment_ids_BGC: Tensor) -> Tensor:
    """The linear half of Code 8 as printed, chunk-range mask and all. Returns `[B, G, C, E]`.

    The listing knows no padding: here padded tokens count for their chunk's length and contribute nothing."""
    valid_BGC = segment_ids_BGC >= 0
    in_order = segment_ids_BGC.flatten(1).cummax(1).values.view_as(segment_ids_BGC)
    kv_BGSE = (at_least_float32(torch.einsum("bgcs,bgce->bgse", k_BGCS * valid_BGC[..., None], v_BGCE))
               / q_BGCS.shape[-2])
    w_BGG = chunk_weights(in_order, causal).to(kv_BGSE.dtype)
    pooled_BGSE = torch.einsum("bhse,bgh->bgse", kv_BGSE, w_BGG)
    return torch.einsum("bgcs,bgse->bgce", q_BGCS, pooled_BGSE.to(q_BGCS.dtype))


def mixed_chunk_attention(q_quad_BGCS: Tensor, k_quad_BGCS: Tensor, q_lin_BGCS: Tensor, k_lin_BGCS: Tensor,
                          v_BGCE: Tensor, w: Tensor, *, scale_len: int, causal: bool, segment_ids_BGC: Tensor,
                          document_mask: str = "exact", pooling: str = "mean", parts: str = "both") -> Tensor:
    """Quadratic attention inside a chunk plus linear attention across chunks (Section 3.2, Code 8): `[B, G, C, E]`.

    w: the position bias as `[2 C - 1]`. document_mask: "exact" keeps documents apart in both halves, "paper" is the
    listing. parts: "local" or "global" keeps one half alone (the paper's LocalOnly and GlobalOnly)."""
    out_BGCE = torch.zeros_like(v_BGCE)
    if parts != "global":
        within = segment_ids_BGC if document_mask == "exact" else (segment_ids_BGC >= 0).long() - 1
        out_BGCE = out_BGCE + quadratic_attention(q_quad_BGCS, k_quad_BGCS, v_BGCE, w, scale_len=scale_len,
                                                  causal=causal, segment_ids_BGC=within)
    if parts != "local":
        if document_mask == "exact":
            out_BGCE = out_BGCE + linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=causal,
                                                   segment_ids_BGC=segment_ids_BGC, pooling=pooling)
        else:
            out_BGCE = out_BGCE + paper_linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=causal,
                                                         segment_ids_BGC=segment_ids_BGC)
    return out_BGCE
