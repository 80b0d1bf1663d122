"""Rows cut into chunks, and heads folded into the batch: what GAU and multi-head attention share."""

import dataclasses

import torch.nn.functional as F
from torch import Tensor


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


def to_chunks(x_BT: Tensor, chunk_size: int, fill: int = 0) -> Tensor:
    """`[B, T, ...]` as `[B, G, C, ...]`, filled up at the end."""
    missing = -x_BT.shape[1] % chunk_size
    if missing:
        x_BT = F.pad(x_BT, [0, 0] * (x_BT.dim() - 2) + [0, missing], value=fill)
    return x_BT.unflatten(1, (-1, chunk_size))


def bias_reach(chunk_size: int, overlap: bool) -> int:
    """The n of the position bias: farther than any key that local attention sees."""
    return 2 * chunk_size if overlap else chunk_size
