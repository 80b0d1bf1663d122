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
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.gau_options import ablated_attention
from lineartime.model.layers import RelPosBias, SequenceInfo, by_document, fold_heads, rotate_heads, unfold_heads


@dataclasses.dataclass
class Softmax:
    """softmax(q k^T / sqrt(K)) v of each document, so that no T x T mask is needed. On CUDA in
    bfloat16 and float16 all documents run in one call."""

    config: ModelConfig
    query_norm: nn.RMSNorm | None
    key_norm: nn.RMSNorm | None

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo) -> Tensor:
        q_BTHK, k_BTHK = self.positioned(q_BTHK, k_BTHK, info)
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

    def positioned(self, q_BTHK: Tensor, k_BTHK: Tensor, info: SequenceInfo) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norm, if there is one, and RoPE."""
        q_BTHK, k_BTHK = (x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)  # in the gain's dtype
                          for x, norm in ((q_BTHK, self.query_norm), (k_BTHK, self.key_norm)))
        return rotate_heads(q_BTHK, info, self.config), rotate_heads(k_BTHK, info, self.config)

    def extend(self, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, x_BND: Tensor, info: SequenceInfo,
               inputs: DecodeInputs, cache: Cache) -> Tensor:
        assert isinstance(cache, KeyValueCache)
        h = self.config.n_heads
        q_BNK, k_BNK, v_BNK = (fold_heads(x.flatten(2), h) for x in (*self.positioned(q_BNHK, k_BNHK, info), v_BNHK))
        # The new keys and values join those of the cache; a mask hides others.
        k_BLK, v_BLK = cache.append(k_BNK, v_BNK, inputs.for_heads(h), [q_BNK])
        q, k, v = (x_BLK.unflatten(0, (-1, h)) for x_BLK in (q_BNK, k_BLK, v_BLK))
        visible_BNL = inputs.visible()
        mask_B1NL = None if visible_BNL is None else visible_BNL[:, None]
        return unfold_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1NL).flatten(0, 1), h)


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

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo) -> Tensor:
        h, ids_BT = self.config.n_heads, info.segment_ids_BT
        *qk, v_BTK = self.fold(q_BTHK, k_BTHK, v_BTHK, info)
        ids_BT = None if ids_BT is None else ids_BT.repeat_interleave(h, 0)
        return unfold_heads(ablated_attention(self.config, qk, v_BTK, self.rel_pos_bias, ids_BT), h)

    def fold(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, info: SequenceInfo) -> tuple[Tensor, ...]:
        """q and k after RoPE, and v: `[B H, T, K]` each."""
        heads = (rotate_heads(q_BTHK, info, self.config), rotate_heads(k_BTHK, info, self.config), v_BTHK)
        return tuple(fold_heads(x.flatten(2), self.config.n_heads) for x in heads)

    def extend(self, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, x_BND: Tensor, info: SequenceInfo,
               inputs: DecodeInputs, cache: Cache) -> Tensor:
        assert isinstance(cache, KeyValueCache)
        q, k, v = self.fold(q_BNHK, k_BNHK, v_BNHK, info)
        h = self.config.n_heads
        return unfold_heads(extend_row(q, k, v, inputs.for_heads(h), cache, self.rel_pos_bias, self.config), h)
