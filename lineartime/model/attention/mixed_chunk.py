"""MC-TFM++'s core: mixed chunk attention with the softmax heads of a Transformer."""

import dataclasses

from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache, ChunkState
from lineartime.model.decoding.extend import extend_chunks
from lineartime.model.gau_options import KeyConv, WriteGate, ablated_attention, gated_keys
from lineartime.model.layers import RelPosBias, ScaleOffset, SequenceInfo, fold_heads, rotate_heads, unfold_heads


@dataclasses.dataclass
class MixedChunk:
    """Attention inside a chunk plus linear attention across chunks. q and k of the linear half are
    q and k of the quadratic half scaled and offset. Heads are folded into the batch."""

    config: ModelConfig
    scale_offset: ScaleOffset
    rel_pos_bias: RelPosBias | None
    key_conv: KeyConv | None
    linear_gate: WriteGate | None

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo,
               cache: Cache | None = None) -> Tensor:
        config, h = self.config, self.config.n_heads
        # The keys as they are, or with `key_conv` mixed with those of the tokens around them.
        conv_BTD = k_BTHK.flatten(2) if self.key_conv is None else self.key_conv(k_BTHK.flatten(2), info, cache)
        # q and k of the quadratic half; those of the linear half by scale and offset, RoPE, gate.
        gamma, beta = self.scale_offset.gamma, self.scale_offset.beta
        q_lin_BTHK = (q_BTHK.flatten(2) * gamma[0] + beta[0]).view_as(q_BTHK)
        k_lin_BTHK = (conv_BTD * gamma[1] + beta[1]).view_as(k_BTHK)
        if config.linear_rope:
            q_lin_BTHK, k_lin_BTHK = (rotate_heads(x, info, config) for x in (q_lin_BTHK, k_lin_BTHK))
        k_quad_BTHK = conv_BTD.view_as(k_BTHK) if config.local_key_conv else k_BTHK
        made = (*(rotate_heads(x, info, config) for x in (q_BTHK, k_quad_BTHK)), q_lin_BTHK, k_lin_BTHK, v_BTHK)
        *heads, k_lin_BTK, v_BTK = (fold_heads(x.flatten(2), h) for x in made)
        k_lin_BTK, gate_BT = gated_keys(config, k_lin_BTK, conv_BTD, self.linear_gate)
        heads.append(k_lin_BTK)
        if isinstance(cache, ChunkState) and info.inputs is not None:
            inputs = info.inputs.for_heads(h)
            return unfold_heads(extend_chunks(heads, v_BTK, inputs, cache, config, self.rel_pos_bias, gate_BT), h)
        # Each attention head is an entry of the batch.
        ids_BT = None if info.segment_ids_BT is None else info.segment_ids_BT.repeat_interleave(h, 0)
        return unfold_heads(ablated_attention(config, heads, v_BTK, self.rel_pos_bias, ids_BT, gate_BT=gate_BT,
                                              exchange=info.exchange), h)
