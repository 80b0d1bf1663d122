"""Rows cut into chunks, and heads folded into the batch: what GAU and multi-head attention share."""

import dataclasses

import torch
from torch import Tensor

from lineartime import ops
from lineartime.layers import RelPosBias
from lineartime.ops.reference import to_chunks


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How a layer attends in chunks: the fields of `ModelConfig` that matter to it."""

    chunk_size: int
    kernel: str
    causal: bool
    document_mask: str
    pooling: str
    parts: str
    overlap: bool


def fold_heads(x_BTF: Tensor, n_heads: int) -> Tensor:
    """`[B, T, ..., F]` as `[B H, T, ..., F / H]`: heads become entries of the batch."""
    if n_heads == 1:
        return x_BTF
    return x_BTF.unflatten(-1, (n_heads, -1)).movedim(-2, 1).flatten(0, 1)


def unfold_heads(x_BTF: Tensor, n_heads: int) -> Tensor:
    """The inverse of `fold_heads`, for `[B H, T, F / H]`."""
    if n_heads == 1:
        return x_BTF
    return x_BTF.unflatten(0, (-1, n_heads)).movedim(1, -2).flatten(-2)


def bias_reach(chunk_size: int, overlap: bool) -> int:
    """The n of the position bias: farther than any key that local attention sees."""
    return 2 * chunk_size if overlap else chunk_size


def chunk_ids(segment_ids_BT: Tensor | None, v_BTE: Tensor, chunk_size: int, causal: bool) -> Tensor | None:
    """The documents of a row's tokens in chunks, -1 where the last one is filled up. None: one document whose
    tokens cannot see what fills up its last chunk."""
    if segment_ids_BT is None:
        if causal:
            return None
        segment_ids_BT = torch.zeros(v_BTE.shape[:2], dtype=torch.long, device=v_BTE.device)
    return to_chunks(segment_ids_BT, chunk_size, fill=-1)


def attend_chunks(q_quad_BGCS: Tensor, k_quad_BGCS: Tensor, q_lin_BGCS: Tensor, k_lin_BGCS: Tensor, v_BGCE: Tensor,
                  segment_ids_BGC: Tensor | None, chunking: Chunking, rel_pos_bias: RelPosBias | None, *,
                  cls_softmax: bool = False, a_BGG: Tensor | None = None) -> Tensor:
    """`ops.mixed_chunk_attention` as a layer's `chunking` says: `[B, G, C, E]`."""
    return ops.mixed_chunk_attention(
        q_quad_BGCS, k_quad_BGCS, q_lin_BGCS, k_lin_BGCS, v_BGCE,
        None if rel_pos_bias is None else rel_pos_bias(rel_pos_bias.n), scale_len=chunking.chunk_size,
        causal=chunking.causal, segment_ids_BGC=segment_ids_BGC, document_mask=chunking.document_mask,
        pooling=chunking.pooling, parts=chunking.parts, kernel=chunking.kernel, overlap=chunking.overlap,
        cls_softmax=cls_softmax, a_BGG=a_BGG)
