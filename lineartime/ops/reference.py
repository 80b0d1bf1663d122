"""The attention ops in einsum: the definition that every kernel is held to.

Mixed chunk attention is three named stages: attention inside a chunk, the sums of k v that chunks carry to one another,
and their reading by queries. A document is a run of equal `segment_ids`; -1 marks padding, which contributes nothing.
"""

import torch
from torch import Tensor

from lineartime.layers import at_least_float32


def toeplitz(w: Tensor, n_queries: int, n_keys: int | None = None) -> Tensor:
    """b[i, j] = w[j - i + n_queries - 1] as a matrix `[n_queries, n_keys]`, square by default."""
    n_keys = n_keys or n_queries
    return w[: n_queries - 1 + n_keys].unfold(0, n_keys, 1).flip(0)


def same_document(segment_ids_BGC: Tensor, key_segment_ids_BGM: Tensor | None = None) -> Tensor:
    """True where query c and key m belong to one document: `[B, G, C, M]`. By default the keys are the queries."""
    keys = segment_ids_BGC if key_segment_ids_BGM is None else key_segment_ids_BGM
    return (segment_ids_BGC[..., :, None] == keys[..., None, :]) & (keys >= 0)[..., None, :]


def attention_weights(score: Tensor, visible: Tensor | None, kernel: str) -> Tensor:
    """relu^2 or softmax of scores over the last axis, exactly 0 where a key is not visible; all 0 where none is."""
    if kernel == "relu2":
        return torch.relu(score if visible is None else score.masked_fill(~visible, 0.0)).square()
    if visible is None:
        return score.softmax(-1)
    return score.masked_fill(~visible, torch.finfo(score.dtype).min).softmax(-1).masked_fill(~visible, 0.0)


def score_scale(kernel: str, width: int, scale_len: int) -> float:
    """What q k is divided by: n for relu^2, the root of the head width for softmax."""
    return float(scale_len) if kernel == "relu2" else width**0.5


def quadratic_attention(q_BGCS: Tensor, k_BGMS: Tensor, v_BGME: Tensor, w: Tensor | None, *, scale_len: int,
                        causal: bool, segment_ids_BGC: Tensor | None = None, kernel: str = "relu2",
                        overlap: bool = False, cls_softmax: bool = False) -> Tensor:
    """relu(q k^T / n + b)^2 v, or softmax(q k^T / sqrt(S) + b) v, inside each chunk:
    FLASH's local attention, and with one chunk all of FLASH-Quad (Code 6).

    w: the position bias (see `toeplitz`), or none. scale_len: n. overlap: a chunk's keys are those of the chunk before
    it too, and when not causal of the chunk after; w is then made for 2 C. cls_softmax: the first query of a row has
    softmax for its kernel. Scores are in float32 at least. Returns `[B, G, C, E]`."""
    n_queries, key_segment_ids_BGM, n_before = q_BGCS.shape[-2], segment_ids_BGC, 0
    if overlap:
        if segment_ids_BGC is None:
            segment_ids_BGC = torch.zeros(q_BGCS.shape[:-1], dtype=torch.long, device=q_BGCS.device)
        k_BGMS, v_BGME = with_neighbours(k_BGMS, causal), with_neighbours(v_BGME, causal)
        key_segment_ids_BGM, n_before = with_neighbours(segment_ids_BGC, causal, fill=-1), n_queries
    n_keys = k_BGMS.shape[-2]
    visible = None
    if causal:
        visible = torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool, device=q_BGCS.device).tril(n_before)
    if segment_ids_BGC is not None:
        document_BGCM = same_document(segment_ids_BGC, key_segment_ids_BGM)
        visible = document_BGCM if visible is None else document_BGCM & visible

    def weights(q_BGQS: Tensor, k_BGMS: Tensor, kernel: str, visible: Tensor | None) -> Tensor:
        """Of the first Q queries of a chunk."""
        q_BGQS = q_BGQS / score_scale(kernel, q_BGQS.shape[-1], scale_len)
        score_BGQM = at_least_float32(torch.einsum("bgqs,bgms->bgqm", q_BGQS, k_BGMS))
        if w is not None:
            score_BGQM = score_BGQM + toeplitz(w, n_queries, n_keys)[: q_BGQS.shape[2]]
        return attention_weights(score_BGQM, visible, kernel)

    a_BGCM = weights(q_BGCS, k_BGMS, kernel, visible)
    if cls_softmax:
        cls_B11M = weights(q_BGCS[:, :1, :1], k_BGMS[:, :1], "softmax",
                           None if visible is None else visible[:, :1, :1])
        first_B1CM = torch.cat([cls_B11M, a_BGCM[:, :1, 1:]], dim=2)
        a_BGCM = torch.cat([first_B1CM, a_BGCM[:, 1:]], dim=1)
    return torch.einsum("bgcm,bgme->bgce", a_BGCM.to(v_BGME.dtype), v_BGME)


def with_neighbours(x_BGC: Tensor, causal: bool, fill: int = 0) -> Tensor:
    """Each chunk behind the one before it, and when not causal before the one after it: `[B, G, 2 C or 3 C, ...]`."""
    empty = torch.full_like(x_BGC[:, :1], fill)
    parts = [torch.cat([empty, x_BGC[:, :-1]], dim=1), x_BGC]
    if not causal:
        parts.append(torch.cat([x_BGC[:, 1:], empty], dim=1))
    return torch.cat(parts, dim=2)


def first_to_all_attention(q_BGS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor) -> Tensor:
    """The first token of each chunk attends to its whole document by softmax (Section 4.3): `[B, G, E]`."""
    k_BTS, v_BTE = k_BGCS.flatten(1, 2), v_BGCE.flatten(1, 2)
    visible_BGT = same_document(segment_ids_BGC[:, :, 0], segment_ids_BGC.flatten(1, 2))
    score_BGT = at_least_float32(torch.einsum("bgs,bts->bgt", q_BGS / q_BGS.shape[-1] ** 0.5, k_BTS))
    return torch.einsum("bgt,bte->bge", attention_weights(score_BGT, visible_BGT, "softmax").to(v_BTE.dtype), v_BTE)


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


def learned_chunk_weights(summary_q_BPS: Tensor, summary_k_BLS: Tensor, bias_BPL: Tensor, *, scale_len: int) -> Tensor:
    """a_gh = relu(q_g k_h^T / n + b)^2, the weight of chunk h for chunk g (Appendix A): `[B, P, L]`, float32 at least.

    scale_len: n, the number of chunks in a training row. What is visible is the caller's."""
    score_BPL = at_least_float32(torch.einsum("bps,bls->bpl", summary_q_BPS / scale_len, summary_k_BLS))
    return attention_weights(score_BPL + bias_BPL, None, "relu2")


def chunk_means(k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor) -> Tensor:
    """k^T v of each chunk divided by its number of tokens: kv_BGSE, float32 at least."""
    valid_BGC = segment_ids_BGC >= 0
    kv_BGSE = at_least_float32(torch.einsum("bgcs,bgce->bgse", k_BGCS * valid_BGC[..., None], v_BGCE))
    return kv_BGSE / valid_BGC.sum(-1).clamp(min=1)[..., None, None]


def weighted_linear_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, a_BGG: Tensor, *,
                              segment_ids_BGC: Tensor) -> Tensor:
    """q_g [sum_h a_gh k_h^T v_h] (Appendix A), with k_h^T v_h divided by the chunk's tokens as in Code 8:
    `[B, G, C, E]`. For rows that are one document."""
    kv_BGSE = chunk_means(k_BGCS, v_BGCE, segment_ids_BGC)
    pooled_BGSE = torch.einsum("bgh,bhse->bgse", a_BGG.to(kv_BGSE.dtype), kv_BGSE)
    return read_states(q_BGCS, pooled_BGSE, segment_ids_BGC >= 0)


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
                          v_BGCE: Tensor, w: Tensor | None, *, scale_len: int, causal: bool, segment_ids_BGC: Tensor,
                          document_mask: str = "exact", pooling: str = "mean", parts: str = "both",
                          kernel: str = "relu2", overlap: bool = False, cls_softmax: bool = False,
                          a_BGG: Tensor | None = None) -> Tensor:
    """Quadratic attention inside a chunk plus linear attention across chunks (Section 3.2, Code 8): `[B, G, C, E]`.

    w, kernel, overlap, cls_softmax: see `quadratic_attention`. document_mask: "exact" keeps documents apart in both
    halves, "paper" is the listing. parts: "local" or "global" keeps one half alone (the paper's LocalOnly and
    GlobalOnly). a_BGG: the weights of chunks, for pooling "attention"."""
    out_BGCE = torch.zeros_like(v_BGCE)
    if parts != "global":
        within = segment_ids_BGC if document_mask == "exact" else (segment_ids_BGC >= 0).long() - 1
        out_BGCE = out_BGCE + quadratic_attention(q_quad_BGCS, k_quad_BGCS, v_BGCE, w, scale_len=scale_len,
                                                  causal=causal, segment_ids_BGC=within, kernel=kernel,
                                                  overlap=overlap, cls_softmax=cls_softmax)
    if parts != "local":
        if a_BGG is not None:
            lin_BGCE = weighted_linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, a_BGG, segment_ids_BGC=segment_ids_BGC)
        elif document_mask == "exact":
            lin_BGCE = linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=causal, segment_ids_BGC=segment_ids_BGC,
                                        pooling=pooling)
        else:
            lin_BGCE = paper_linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=causal,
                                              segment_ids_BGC=segment_ids_BGC)
        out_BGCE = out_BGCE + lin_BGCE
    return out_BGCE
