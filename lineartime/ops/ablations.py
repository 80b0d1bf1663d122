"""Reference ops of the paper's ablations and variants. In training FLASH and FLASH-Quad do not use
this file; decoding (`decoding/extend.py`) takes its local attention from here.

The ablations are softmax in place of relu^2, overlapping chunks, [CLS] (Section 4.3), first-to-all
(Table 4), one half alone, learned chunk weights (Appendix A), and the paper's document mask, which
leaks (Code 7)."""

import torch
from torch import Tensor

from lineartime.ops import reference
from lineartime.ops.dtypes import at_least_float32


def score_scale(kernel: str, width: int, scale_len: int) -> float:
    """The divisor of q k^T: n for relu^2, the square root of the head width for softmax."""
    return float(scale_len) if kernel == "relu2" else width**0.5


def with_neighbour_chunks(x_BGC: Tensor, causal: bool, fill: int = 0) -> Tensor:
    """Each chunk with the previous one before it, and when not causal the next one: `[B, G, 2 C or
    3 C, ...]`.

    fill: value of the missing neighbours of the first and the last chunk."""
    empty = torch.full_like(x_BGC[:, :1], fill)
    parts = [torch.cat([empty, x_BGC[:, :-1]], dim=1), x_BGC]
    if not causal:
        parts.append(torch.cat([x_BGC[:, 1:], empty], dim=1))
    return torch.cat(parts, dim=2)


def ablated_quadratic_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, w: Tensor | None, *, scale_len: int,
                                causal: bool, segment_ids_BGC: Tensor | None = None, kernel: str = "relu2",
                                overlap: bool = False, cls_softmax: bool = False) -> Tensor:
    """`reference.quadratic_attention` with the ablations of its scores: `[B, G, C, E]`.

    kernel "softmax": softmax(q k^T / sqrt(S) + b) v. overlap: queries also see the keys of the
    previous chunk, and when not causal of the next; w is then `[4 C - 1]`. cls_softmax: the kernel
    of a row's first query is softmax. w: the position bias, or None."""
    n_queries, width, key_segment_ids_BGM, n_before = *q_BGCS.shape[-2:], None, 0
    if overlap:  # keys of the neighbouring chunks beside those of the own
        segment_ids_BGC = reference.ids_or_zeros(segment_ids_BGC, q_BGCS)
        k_BGCS, v_BGCE = with_neighbour_chunks(k_BGCS, causal), with_neighbour_chunks(v_BGCE, causal)
        key_segment_ids_BGM, n_before = with_neighbour_chunks(segment_ids_BGC, causal, fill=-1), n_queries
    visible = reference.visible_keys(q_BGCS, k_BGCS.shape[-2], causal, segment_ids_BGC, key_segment_ids_BGM, n_before)
    score_BGCM = reference.scores(q_BGCS, k_BGCS, score_scale(kernel, width, scale_len), w)
    a_BGCM = reference.attention_weights(score_BGCM, visible, kernel)
    if cls_softmax:  # replace the weights of the first query of the first chunk
        score_B11M = reference.scores(q_BGCS[:, :1, :1], k_BGCS[:, :1], score_scale("softmax", width, scale_len),
                                      None if w is None else w[n_queries - 1 :])
        cls_B11M = reference.attention_weights(score_B11M, None if visible is None else visible[:, :1, :1], "softmax")
        first_B1CM = torch.cat([cls_B11M, a_BGCM[:, :1, 1:]], dim=2)
        a_BGCM = torch.cat([first_B1CM, a_BGCM[:, 1:]], dim=1)
    return reference.weigh_values(a_BGCM, v_BGCE)


def first_to_all_attention(q_BGS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor) -> Tensor:
    """Softmax of each chunk's first token over its whole document (Section 4.3): `[B, G, E]`."""
    k_BTS, v_BTE = k_BGCS.flatten(1, 2), v_BGCE.flatten(1, 2)
    visible_BGT = reference.same_document(segment_ids_BGC[:, :, 0], segment_ids_BGC.flatten(1, 2))
    score_BGT = at_least_float32(reference.product("bgs,bts->bgt", q_BGS / q_BGS.shape[-1] ** 0.5, k_BTS))
    return reference.weigh_values(reference.attention_weights(score_BGT, visible_BGT, "softmax"), v_BTE)


def weighted_linear_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, a_BGG: Tensor, *,
                              segment_ids_BGC: Tensor) -> Tensor:
    """q_g [sum_h a_gh k_h^T v_h] (Appendix A), with k_h^T v_h divided by the number of the chunk's
    tokens as in Code 8: `[B, G, C, E]`. For rows of one document."""
    valid_BGC = segment_ids_BGC >= 0
    kv_BGSE = at_least_float32(reference.product("bgcs,bgce->bgse", k_BGCS * valid_BGC[..., None], v_BGCE))
    kv_BGSE = kv_BGSE / valid_BGC.sum(-1).clamp(min=1)[..., None, None]
    pooled_BGSE = reference.product("bgh,bhse->bgse", a_BGG.to(kv_BGSE.dtype), kv_BGSE)
    return reference.read_states(q_BGCS, pooled_BGSE, valid_BGC)


def paper_chunk_weights(segment_ids_BGC: Tensor, causal: bool) -> Tensor:
    """The weight of chunk h for chunk g, `[B, G, G]` (Code 7): 1 / n for each of the n chunks whose
    range of documents overlaps that of chunk g; when causal, of the earlier ones. The mask leaks:
    two documents that share a chunk with a third see each other."""
    low_BG, high_BG = segment_ids_BGC.amin(-1), segment_ids_BGC.amax(-1)
    overlap_BGG = (low_BG[:, :, None] <= high_BG[:, None, :]) & (high_BG[:, :, None] >= low_BG[:, None, :])
    if causal:
        overlap_BGG = overlap_BGG.tril(-1)
    return overlap_BGG.double() / overlap_BGG.sum(-1, keepdim=True).clamp(min=1)


def paper_linear_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, *, causal: bool,
                           segment_ids_BGC: Tensor) -> Tensor:
    """The linear half of Code 8 as printed, with its chunk-range mask: `[B, G, C, E]`.

    The listing has no padding. Here it counts in a chunk's length and not in sums."""
    # Padding takes the document before it, so that the ranges of documents of chunks stay in order.
    valid_BGC = segment_ids_BGC >= 0
    in_order = segment_ids_BGC.flatten(1).cummax(1).values.view_as(segment_ids_BGC)
    kv_BGSE = (at_least_float32(reference.product("bgcs,bgce->bgse", k_BGCS * valid_BGC[..., None], v_BGCE))
               / q_BGCS.shape[-2])
    w_BGG = paper_chunk_weights(in_order, causal).to(kv_BGSE.dtype)
    pooled_BGSE = reference.product("bhse,bgh->bgse", kv_BGSE, w_BGG)
    return reference.read_states(q_BGCS, pooled_BGSE, torch.ones_like(valid_BGC))
