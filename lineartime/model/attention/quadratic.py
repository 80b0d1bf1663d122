"""The cores of quadratic attention: softmax, by PyTorch's fused kernels, and relu^2 of a GAU."""

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache, KeyValueCache
from lineartime.model.decoding.extend import extend_row
from lineartime.model.gau_options import ablated_attention
from lineartime.model.layers import RelPosBias, SequenceInfo, by_document, fold_heads, rotate_heads, unfold_heads


@dataclasses.dataclass
class Softmax:
    """softmax(q k^T / sqrt(K)) v of each document, so that no T x T mask is needed. On CUDA in
    bfloat16 and float16 all documents run in one call."""

    config: ModelConfig
    query_norm: nn.RMSNorm | None
    key_norm: nn.RMSNorm | None

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo,
               cache: Cache | None = None) -> Tensor:
        q_BTHK, k_BTHK = self.positioned(q_BTHK, k_BTHK, info)
        if isinstance(cache, KeyValueCache) and info.inputs is not None:
            # The new keys and values join those of the cache; a mask hides others.
            h, visible_BNL = self.config.n_heads, info.inputs.visible()
            q_BNK, k_BNK, v_BNK = (fold_heads(x.flatten(2), h) for x in (q_BTHK, k_BTHK, v_BTHK))
            k_BLK, v_BLK = cache.append(k_BNK, v_BNK, info.inputs.for_heads(h), [q_BNK])
            q, k, v = (x_BLK.unflatten(0, (-1, h)) for x_BLK in (q_BNK, k_BLK, v_BLK))
            mask_B1NL = None if visible_BNL is None else visible_BNL[:, None]
            return unfold_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1NL).flatten(0, 1), h)
        if info.cu_seqlens is not None and q_BTHK.is_cuda and q_BTHK.dtype in (torch.bfloat16, torch.float16):
            return attend_varlen(q_BTHK, k_BTHK, v_BTHK, info.cu_seqlens, self.config.causal).flatten(2)
        # Otherwise a call for each document. Compiled code makes one, with a mask.
        how: dict[str, Any] = {"is_causal": self.config.causal}
        if info.cu_seqlens is None and info.segment_ids_BT is not None:
            seen_B1TT = (info.segment_ids_BT[:, :, None] == info.segment_ids_BT[:, None])[:, None]
            how = {"attn_mask": seen_B1TT.tril() if self.config.causal else seen_B1TT}
        parts = []
        for qkv in by_document((q_BTHK, k_BTHK, v_BTHK), info):
            q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in qkv)
            parts.append(F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, **how).transpose(1, 2))
        return torch.cat(parts, dim=1).view_as(v_BTHK).flatten(2)

    def positioned(self, q_BTHK: Tensor, k_BTHK: Tensor, info: SequenceInfo) -> tuple[Tensor, ...]:
        """Queries and keys after their norm, if there is one, in the gain's dtype, and RoPE."""
        return tuple(rotate_heads(x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype), info, self.config)
                     for x, norm in ((q_BTHK, self.query_norm), (k_BTHK, self.key_norm)))


def attend_varlen(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, cu_seqlens: list[int], causal: bool) -> Tensor:
    """Softmax attention within each document of the flattened rows, by one call of PyTorch's
    variable-length kernel: `[B, T, H, K]`. cu_seqlens: document boundaries, `[0, ..., B T]`."""
    from torch.nn.attention.varlen import varlen_attn

    cumulative = torch.tensor(cu_seqlens, dtype=torch.int32, device=q_BTHK.device)
    longest = max(stop - start for start, stop in itertools.pairwise(cu_seqlens))
    q_THK, k_THK, v_THK = (x.flatten(0, 1) for x in (q_BTHK, k_BTHK, v_BTHK))
    window = (-1, 0) if causal else (-1, -1)
    out_THK = varlen_attn(q_THK, k_THK, v_THK, cumulative, cumulative, longest, longest, window_size=window)
    assert isinstance(out_THK, Tensor)
    return out_THK.view_as(q_BTHK)


@dataclasses.dataclass
class ReluSquared:
    """relu(q k^T / n + b)^2 v, an ablation, with one bias for all heads, folded into the batch."""

    config: ModelConfig
    rel_pos_bias: RelPosBias | None

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo,
               cache: Cache | None = None) -> Tensor:
        h, ids_BT = self.config.n_heads, info.segment_ids_BT
        q_BTK, k_BTK, v_BTK = (fold_heads(x.flatten(2), h) for x in (
            rotate_heads(q_BTHK, info, self.config), rotate_heads(k_BTHK, info, self.config), v_BTHK))
        if isinstance(cache, KeyValueCache) and info.inputs is not None:
            inputs = info.inputs.for_heads(h)
            return unfold_heads(extend_row(q_BTK, k_BTK, v_BTK, inputs, cache, self.rel_pos_bias, self.config), h)
        ids_BT = None if ids_BT is None else ids_BT.repeat_interleave(h, 0)
        return unfold_heads(ablated_attention(self.config, (q_BTK, k_BTK), v_BTK, self.rel_pos_bias, ids_BT), h)
