"""The attention ops in einsum: the definition that every kernel is held to.

Mixed chunk attention is three named stages: attention inside a chunk, the sums of k v that chunks carry to one another,
and their reading by queries. A document is a run of equal `segment_ids`; -1 marks padding, which contributes nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.layers import at_least_float32, rope
from lineartime.ops.cross_entropy import product_type

SCAN_BLOCK = 32
"""Chunks whose sums are one matrix product."""


def toeplitz(w: Tensor, n_queries: int, n_keys: int | None = None) -> Tensor:
    """b[i, j] = w[j - i + n_queries - 1] as a matrix `[n_queries, n_keys]`, square by default."""
    n_keys = n_keys or n_queries
    return w[: n_queries - 1 + n_keys].unfold(0, n_keys, 1).flip(0)


def to_chunks(x_BT: Tensor, chunk_size: int, fill: int = 0) -> Tensor:
    """`[B, T, ...]` as `[B, G, C, ...]`, filled up at the end."""
    missing = -x_BT.shape[1] % chunk_size
    if missing:
        x_BT = F.pad(x_BT, [0, 0] * (x_BT.dim() - 2) + [0, missing], value=fill)
    return x_BT.unflatten(1, (-1, chunk_size))


def one_document(x_BGC: Tensor) -> Tensor:
    """Segment ids of rows that are one document and nothing else: segment_ids_BGC."""
    return torch.zeros(x_BGC.shape[:3], dtype=torch.long, device=x_BGC.device)


def same_document(segment_ids_BGC: Tensor, key_segment_ids_BGM: Tensor | None = None) -> Tensor:
    """True where query c and key m belong to one document: `[B, G, C, M]`. By default the keys are the queries."""
    keys = segment_ids_BGC if key_segment_ids_BGM is None else key_segment_ids_BGM
    return (segment_ids_BGC[..., :, None] == keys[..., None, :]) & (keys >= 0)[..., None, :]


def attention_weights(score: Tensor, visible: Tensor | None, kernel: str) -> Tensor:
    """relu^2 or softmax of scores over the last axis, exactly 0 where a key is not visible; all 0 where none is."""
    if kernel == "relu2":
        return torch.relu(score if visible is None else torch.where(visible, score, 0.0)).square()
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
        segment_ids_BGC = one_document(q_BGCS) if segment_ids_BGC is None else segment_ids_BGC
        k_BGMS, v_BGME = with_neighbours(k_BGMS, causal), with_neighbours(v_BGME, causal)
        key_segment_ids_BGM, n_before = with_neighbours(segment_ids_BGC, causal, fill=-1), n_queries
    n_keys = k_BGMS.shape[-2]
    visible = None
    if causal:
        key_M = torch.arange(n_keys, dtype=torch.int32, device=q_BGCS.device)  # torch.compile is slow with 64 bits
        visible = (key_M <= key_M[:n_queries, None] + n_before)[None, None]
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


def sum_states(kv_BGSE: Tensor, last_BG: Tensor, entering_BP: Tensor) -> Tensor:
    """Entry p: the sum of kv over the chunks g < p that end in the document entering_BP[p]. `[B, P, S, E]`.

    last_BG: the document each chunk ends with; numbers never fall along a row. Up to SCAN_BLOCK places are one product
    with a matrix of zeros and ones. More are cut into blocks, and what enters a block is the same sum over blocks, so
    that the work is linear in G."""
    def add_up(kept_BPG: Tensor, kv_BGSE: Tensor) -> Tensor:
        with torch.autocast(kv_BGSE.device.type, enabled=False):
            return torch.bmm(kept_BPG.to(kv_BGSE.dtype), kv_BGSE.flatten(2)).unflatten(2, kv_BGSE.shape[2:])

    def add_up_earlier(kv_BGSE: Tensor, last_BG: Tensor, entering_BP: Tensor) -> Tensor:
        size = (entering_BP.shape[1], last_BG.shape[1])
        earlier_PG = torch.ones(size, dtype=torch.bool, device=kv_BGSE.device).tril(-1)
        return add_up((entering_BP[..., None] == last_BG[:, None]) & earlier_PG, kv_BGSE)

    n_places, n_chunks = entering_BP.shape[1], last_BG.shape[1]
    if n_places <= SCAN_BLOCK:
        return add_up_earlier(kv_BGSE, last_BG, entering_BP)
    n_blocks = -(-n_places // SCAN_BLOCK)
    in_blocks = (n_blocks, SCAN_BLOCK)
    missing = n_blocks * SCAN_BLOCK - n_chunks
    if missing:
        kv_BGSE, last_BG = F.pad(kv_BGSE, [0, 0, 0, 0, 0, missing]), F.pad(last_BG, [0, missing], value=-2)
    entering_BP = F.pad(entering_BP, [0, n_blocks * SCAN_BLOCK - n_places], value=-3)
    kv, last, entering = (x.unflatten(1, in_blocks).flatten(0, 1) for x in (kv_BGSE, last_BG, entering_BP))
    within = add_up_earlier(kv, last, entering).unflatten(0, (-1, n_blocks))
    of_block = add_up((last == last[:, -1:])[:, None], kv).unflatten(0, (-1, n_blocks))[:, :, 0]
    first_BN = entering_BP[:, ::SCAN_BLOCK]
    entered = sum_states(of_block, last[:, -1].unflatten(0, (-1, n_blocks)), first_BN)
    still = entering_BP.unflatten(1, in_blocks) == first_BN[..., None]
    total = within + torch.where(still[..., None, None], entered[:, :, None], 0.0)
    return total.flatten(1, 2)[:, :n_places]


def chunk_states(k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of k v over the tokens of the document that each chunk ends with, their number, and that document:
    kv_BGSE and count_BG, in float32 at least, and last_BG."""
    last_BG = segment_ids_BGC.amax(-1)
    tail_BGC = (segment_ids_BGC == last_BG[..., None]) & (segment_ids_BGC >= 0)
    kv_BGSE = at_least_float32(torch.einsum("bgcs,bgce->bgse", k_BGCS * tail_BGC[..., None], v_BGCE))
    return kv_BGSE, tail_BGC.sum(-1).to(kv_BGSE.dtype), last_BG


def entering_states(k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What earlier chunks hand to each chunk: the sum of k v over the tokens so far of the document that is open when
    the chunk begins, their number, and that document: kv_BGSE and count_BG, in float32 at least, and entering_BG."""
    kv_BGSE, count_BG, last_BG = chunk_states(k_BGCS, v_BGCE, segment_ids_BGC)
    entering_BG = F.pad(last_BG[:, :-1], [1, 0])
    kv_in_BGSE = sum_states(kv_BGSE, last_BG, entering_BG)
    count_in_BG = sum_states(count_BG[..., None, None], last_BG, entering_BG)[..., 0, 0]
    return kv_in_BGSE, count_in_BG, entering_BG


def carried_states(k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor,
                   initial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """`entering_states` of rows that have a past, and what leaves the last chunk: kv_BPSE, count_BP, document_BP.

    initial: kv_BSE and count_B that document 0 brings along."""
    kv_BGSE, count_BG, last_BG = chunk_states(k_BGCS, v_BGCE, segment_ids_BGC)
    document_BP = F.pad(last_BG, [1, 0])
    kv_BSE, count_B = initial
    still_BP = document_BP == 0
    kv_BPSE = sum_states(kv_BGSE, last_BG, document_BP) + torch.where(still_BP[..., None, None], kv_BSE[:, None], 0.0)
    count_BP = sum_states(count_BG[..., None, None], last_BG, document_BP)[..., 0, 0]
    return kv_BPSE, count_BP + torch.where(still_BP, count_B[:, None], 0.0), document_BP


def read_states(q_BGCS: Tensor, kv_BGSE: Tensor, weight_BGC: Tensor) -> Tensor:
    """q times the state that enters its chunk, each query weighed: `[B, G, C, E]`. A weight of 0 sees nothing."""
    q_BGCS = (q_BGCS * weight_BGC[..., None]).to(q_BGCS.dtype)
    return torch.einsum("bgcs,bgse->bgce", q_BGCS, kv_BGSE.to(q_BGCS.dtype))


def linear_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, *, causal: bool,
                     segment_ids_BGC: Tensor | None = None, pooling: str = "mean") -> Tensor:
    """q sum(k^T v) over the visible tokens of the query's document (Eqs. 7-8): those of earlier chunks when causal, all
    of them when not. pooling: "mean" divides by their number (Codes 7-8), "sum" does not. Returns `[B, G, C, E]`."""
    if segment_ids_BGC is None and causal:  # one document: nothing to keep apart
        n_chunks, c = q_BGCS.shape[1:3]
        kv_BGSE = at_least_float32(torch.einsum("bgcs,bgce->bgse", k_BGCS, v_BGCE))
        none_BG = torch.zeros(q_BGCS.shape[:2], dtype=torch.long, device=q_BGCS.device)
        count_G = c * torch.arange(n_chunks, device=q_BGCS.device).to(kv_BGSE.dtype)
        weight_G = 1 / count_G.clamp(min=1) if pooling == "mean" else torch.ones_like(count_G)
        return read_states(q_BGCS, sum_states(kv_BGSE, none_BG, none_BG), weight_G[None, :, None])

    segment_ids_BGC = one_document(q_BGCS) if segment_ids_BGC is None else segment_ids_BGC
    kv_BGSE, count_BG, entering_BG = entering_states(k_BGCS, v_BGCE, segment_ids_BGC)
    seen_BGC = (segment_ids_BGC == entering_BG[..., None]) & (segment_ids_BGC >= 0)
    count_BGC = seen_BGC * count_BG[..., None]
    if causal:
        weight_BGC = seen_BGC / count_BGC.clamp(min=1) if pooling == "mean" else seen_BGC
        return read_states(q_BGCS, kv_BGSE, weight_BGC)

    # What later chunks hold is the same sum over the rows turned round; ids are turned too, so that they still rise.
    turned_BGC = torch.where(segment_ids_BGC >= 0, segment_ids_BGC.amax() - segment_ids_BGC, -1).flip(1, 2)
    after = entering_states(k_BGCS.flip(1, 2), v_BGCE.flip(1, 2), turned_BGC)
    kv_after_BGSE, count_after_BG, entering_after_BG = (x.flip(1) for x in after)
    seen_after_BGC = (turned_BGC.flip(1, 2) == entering_after_BG[..., None]) & (segment_ids_BGC >= 0)
    same_BGCM = same_document(segment_ids_BGC)
    count_BGC = count_BGC + seen_after_BGC * count_after_BG[..., None] + same_BGCM.sum(-1)
    each_BGC = 1 / count_BGC.clamp(min=1) if pooling == "mean" else torch.ones_like(count_BGC)
    own_BGCM = torch.einsum("bgcs,bgms->bgcm", (q_BGCS * each_BGC[..., None]).to(q_BGCS.dtype), k_BGCS) * same_BGCM
    own_BGCE = torch.einsum("bgcm,bgme->bgce", own_BGCM.to(v_BGCE.dtype), v_BGCE)
    before_BGCE = read_states(q_BGCS, kv_BGSE, each_BGC * seen_BGC)
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
                          v_BGCE: Tensor, w: Tensor | None, *, scale_len: int, causal: bool,
                          segment_ids_BGC: Tensor | None = None, document_mask: str = "exact",
                          pooling: str = "mean", parts: str = "both", kernel: str = "relu2", overlap: bool = False,
                          cls_softmax: bool = False, a_BGG: Tensor | None = None) -> Tensor:
    """Quadratic attention inside a chunk plus linear attention across chunks (Section 3.2, Code 8): `[B, G, C, E]`.

    w, kernel, overlap, cls_softmax: see `quadratic_attention`. document_mask: "exact" keeps documents apart in both
    halves, "paper" is the listing. parts: "local" or "global" keeps one half alone (the paper's LocalOnly and
    GlobalOnly). a_BGG: the weights of chunks, for pooling "attention"."""
    if segment_ids_BGC is None and (document_mask == "paper" or a_BGG is not None):
        segment_ids_BGC = one_document(v_BGCE)
    out_BGCE = None
    if parts != "global":
        within = segment_ids_BGC
        if segment_ids_BGC is not None and document_mask == "paper":
            within = (segment_ids_BGC >= 0).long() - 1
        out_BGCE = quadratic_attention(q_quad_BGCS, k_quad_BGCS, v_BGCE, w, scale_len=scale_len, causal=causal,
                                       segment_ids_BGC=within, kernel=kernel, overlap=overlap, cls_softmax=cls_softmax)
    if parts == "local":
        assert out_BGCE is not None
        return out_BGCE
    if a_BGG is not None:
        assert segment_ids_BGC is not None
        lin_BGCE = weighted_linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, a_BGG, segment_ids_BGC=segment_ids_BGC)
    elif document_mask == "exact":
        lin_BGCE = linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=causal, segment_ids_BGC=segment_ids_BGC,
                                    pooling=pooling)
    else:
        assert segment_ids_BGC is not None
        lin_BGCE = paper_linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=causal,
                                          segment_ids_BGC=segment_ids_BGC)
    return lin_BGCE if out_BGCE is None else out_BGCE + lin_BGCE


def make_heads(z_BTS: Tensor, gamma_NS: Tensor, beta_NS: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Heads from one base by scales and offsets (Eq. 5), each turned by its position (Code 3): heads_NBTS.

    sin, cos: `[1 or B, T, S / 2]`."""
    made_NBTS = z_BTS * gamma_NS[:, None, None] + beta_NS[:, None, None]
    return rope(made_NBTS, sin, cos).to(z_BTS.dtype)


def gated_quadratic_attention(uvz_BTF: Tensor, gamma_2S: Tensor, beta_2S: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
                              *, scale_len: int, causal: bool, segment_ids_BT: Tensor | None = None) -> Tensor:
    """A FLASH-Quad layer between its two projections (Code 6): silu, q and k from z, u * (relu(q k^T / n + b)^2 v).

    uvz_BTF: u, v and z side by side, as the projection gives them, F = 2 E + S. gamma_2S, beta_2S: scale and offset of
    q and of k. sin, cos: see `make_heads`. w: `[2 T - 1]`, see `toeplitz`. scale_len: n. Returns `[B, T, E]`."""
    s = gamma_2S.shape[-1]
    e = (uvz_BTF.shape[-1] - s) // 2
    u_BTE, v_BTE, z_BTS = F.silu(uvz_BTF).split([e, e, s], dim=-1)
    q_BTS, k_BTS = make_heads(z_BTS, gamma_2S, beta_2S, sin, cos)
    segment_ids_B1T = None if segment_ids_BT is None else segment_ids_BT[:, None]
    return u_BTE * quadratic_attention(q_BTS[:, None], k_BTS[:, None], v_BTE[:, None], w, scale_len=scale_len,
                                       causal=causal, segment_ids_BGC=segment_ids_B1T)[:, 0]


def gated_chunk_attention(uvz_BTF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin: Tensor, cos: Tensor, w: Tensor, *,
                          chunk_size: int, causal: bool, segment_ids_BT: Tensor | None = None,
                          pooling: str = "mean") -> Tensor:
    """A FLASH layer between its two projections (Code 8): silu, four heads from z, u * (mixed chunk attention of v).

    gamma_4S, beta_4S: scale and offset of q and k of the quadratic part, then of the linear part. w: `[2 C - 1]`, see
    `toeplitz`. The rest as in `gated_quadratic_attention`, n is the chunk size. Returns `[B, T, E]`."""
    s = gamma_4S.shape[-1]
    e = (uvz_BTF.shape[-1] - s) // 2
    u_BTE, v_BTE, z_BTS = F.silu(uvz_BTF).split([e, e, s], dim=-1)
    if segment_ids_BT is None:
        segment_ids_BT = torch.zeros(uvz_BTF.shape[:2], dtype=torch.long, device=uvz_BTF.device)
    heads = [to_chunks(head_BTS, chunk_size) for head_BTS in make_heads(z_BTS, gamma_4S, beta_4S, sin, cos)]
    q_quad_BGCS, k_quad_BGCS, q_lin_BGCS, k_lin_BGCS = heads
    out_BGCE = mixed_chunk_attention(
        q_quad_BGCS, k_quad_BGCS, q_lin_BGCS, k_lin_BGCS, to_chunks(v_BTE, chunk_size), w, scale_len=chunk_size,
        causal=causal, segment_ids_BGC=to_chunks(segment_ids_BT, chunk_size, fill=-1), pooling=pooling)
    return u_BTE * out_BGCE.flatten(1, 2)[:, : u_BTE.shape[1]]


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, *,
             eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """x + delta, or x itself without one, and the norm of it over its last axis (Code 5).

    x, delta: `[..., D]`. weight `[D]` with bias `[D]` is LayerNorm; a scalar weight without bias is `layers.ScaleNorm`.
    The sum has the type in which torch adds the two. The norm is taken in float32 at least and returned in the type of
    products: the sum's own, or that of autocast, to which a linear layer would cast it anyhow."""
    total = x if delta is None else x + delta
    kind = torch.promote_types(total.dtype, weight.dtype)
    if bias is not None:
        normed = F.layer_norm(total.to(kind), weight.shape, weight.to(kind), bias.to(kind), eps)
    else:
        wide = at_least_float32(total)
        normed = weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, normed.to(product_type(total))


def chunk_decode_step(uvz_BF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin_BR: Tensor, cos_BR: Tensor,
                      bias_C: Tensor, k_quad_BCS: Tensor, k_lin_BCS: Tensor, v_BCE: Tensor, kv_BSE: Tensor,
                      offset_B: Tensor, first_B: Tensor, weight_B: Tensor) -> Tensor:
    """`gated_chunk_attention`, causal, for one new token per row whose past is in buffers: out_BE.

    Writes the token's keys and value into the open chunk, k_quad_BCS, k_lin_BCS and v_BCE, at `offset_B`. It sees the
    slots from `first_B` on, where its document begins (below 0 if in an earlier chunk), to its own, and `weight_B`
    times kv_BSE, the sum of k v over closed chunks. bias_C: the position bias at key minus query position, C - 1
    before, ..., the same. sin_BR, cos_BR: of the tokens' positions, R = S / 2. A chunk that is full is not closed."""
    (c, s), e = k_quad_BCS.shape[1:], v_BCE.shape[-1]
    u_BE, v_BE, z_BS = F.silu(uvz_BF).split([e, e, s], dim=-1)
    heads_4B1S = make_heads(z_BS[:, None], gamma_4S, beta_4S, sin_BR[:, None], cos_BR[:, None])
    q_quad_B1S, k_quad_B1S, q_lin_B1S, k_lin_B1S = heads_4B1S
    rows, slot_C = torch.arange(len(uvz_BF), device=uvz_BF.device), torch.arange(c, device=uvz_BF.device)
    for buffer_BC, new_B in ((k_quad_BCS, k_quad_B1S[:, 0]), (k_lin_BCS, k_lin_B1S[:, 0]), (v_BCE, v_BE)):
        buffer_BC[rows, offset_B] = new_B
    distance_BC = slot_C - offset_B[:, None]
    visible_BC = (distance_BC <= 0) & (slot_C >= first_B[:, None])
    score_B1C = torch.add(bias_C[distance_BC.clamp(max=0) + c - 1][:, None], torch.bmm(q_quad_B1S, k_quad_BCS.mT),
                          alpha=1 / c)
    a_B1C = attention_weights(score_B1C, visible_BC[:, None], "relu2")
    quad_B1E = torch.bmm(a_B1C.to(v_BCE.dtype), v_BCE)
    linear_B1E = torch.bmm(q_lin_B1S * weight_B[:, None, None], kv_BSE)
    return u_BE * (linear_B1E + quad_B1E)[:, 0].to(u_BE.dtype)
