"""The relu^2 core: a GAU's attention in a Transformer (an ablation of the paper)."""

import dataclasses

from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache, KeyValueCache
from lineartime.model.decoding.extend import empty_cache, extend_row
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import RelPosBias, SequenceInfo, fold_heads, rotate_heads, unfold_heads
from lineartime.ops.reference import quadratic_attention


@dataclasses.dataclass
class ReluSquared:
    """relu(q k^T / n + b)^2 v, with one bias for all heads, which are folded into the batch."""

    config: ModelConfig
    rel_pos_bias: RelPosBias

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo) -> Tensor:
        """The heads concatenated: `[B, T, D]`. x_BTD is unused."""
        config, h, ids_BT = self.config, self.config.n_heads, info.segment_ids_BT
        q, k, v = (x_BTK[:, None] for x_BTK in self.fold(q_BTHK, k_BTHK, v_BTHK, info))
        ids_BGC = None if ids_BT is None else ids_BT.repeat_interleave(h, 0)[:, None]
        out = quadratic_attention(q, k, v, self.rel_pos_bias(q.shape[2]), scale_len=config.scale_len,
                                  causal=config.causal, segment_ids_BGC=ids_BGC)
        return unfold_heads(out[:, 0], h)

    def fold(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, info: SequenceInfo) -> tuple[Tensor, ...]:
        """q and k after RoPE, and v: `[B H, T, K]` each."""
        heads = (rotate_heads(q_BTHK, info), rotate_heads(k_BTHK, info), v_BTHK)
        return tuple(fold_heads(x.flatten(2), self.config.n_heads) for x in heads)

    def empty_cache(self, n_rows: int, weight: Tensor) -> Cache:
        """The cache of `n_rows` rows that have no token yet, of `weight`'s dtype and device."""
        return empty_cache(n_rows, self.config, weight, None)

    def extend(self, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, x_BND: Tensor, info: SequenceInfo,
               inputs: DecodeInputs, cache: Cache) -> Tensor:
        """`attend` for the next tokens whose past is in `cache`, which is updated. Causal alone."""
        assert isinstance(cache, KeyValueCache)
        q, k, v = self.fold(q_BNHK, k_BNHK, v_BNHK, info)
        h = self.config.n_heads
        return unfold_heads(extend_row(q, k, v, inputs.for_heads(h), cache, self.rel_pos_bias, self.config), h)
