"""MC-TFM++'s core: mixed chunk attention with the softmax heads of a Transformer."""

import dataclasses

import torch
from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache, ChunkState
from lineartime.model.decoding.extend import extend_chunks
from lineartime.model.decoding.inputs import DecodeInputs
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

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo) -> Tensor:
        config, ids_BT = self.config, info.segment_ids_BT
        # The keys as they are, or with `key_conv` mixed with those of the tokens around them.
        k_BTD = k_BTHK.flatten(2)
        conv_BTD = k_BTD if self.key_conv is None else self.key_conv(k_BTD, ids_BT, info.ranks)
        heads_4BTK, gate_BT = self.make_heads(q_BTHK, k_BTHK, conv_BTD, info)
        # Each attention head is an entry of the batch.
        ids_BT = None if ids_BT is None else ids_BT.repeat_interleave(config.n_heads, 0)
        out_BTK = ablated_attention(
            config, heads_4BTK.unbind(), fold_heads(v_BTHK.flatten(2), config.n_heads), self.rel_pos_bias, ids_BT,
            gate_BT=gate_BT, exchange=info.exchange)
        return unfold_heads(out_BTK, config.n_heads)

    def make_heads(self, q_BTHK: Tensor, k_BTHK: Tensor, conv_BTD: Tensor,
                   info: SequenceInfo) -> tuple[Tensor, Tensor | None]:
        """q and k of the quadratic half, then of the linear half, after RoPE: `[4, B H, T, K]`; and
        gate_BT of `gated_keys`. conv_BTD: k, or its convolution."""
        config, gamma, beta = self.config, self.scale_offset.gamma, self.scale_offset.beta
        # The linear half: scale and offset, RoPE, then the gate.
        q_lin_BTD, k_lin_BTD = q_BTHK.flatten(2) * gamma[0] + beta[0], conv_BTD * gamma[1] + beta[1]
        q_lin_BTHK, k_lin_BTHK = q_lin_BTD.view_as(q_BTHK), k_lin_BTD.view_as(k_BTHK)
        if config.linear_rope:
            q_lin_BTHK, k_lin_BTHK = (rotate_heads(x, info, config) for x in (q_lin_BTHK, k_lin_BTHK))
        k_quad_BTHK = conv_BTD.view_as(k_BTHK) if config.local_key_conv else k_BTHK
        made = (*(rotate_heads(x, info, config) for x in (q_BTHK, k_quad_BTHK)), q_lin_BTHK, k_lin_BTHK)
        *heads, k_lin_BTK = (fold_heads(x.flatten(2), config.n_heads) for x in made)
        k_lin_BTK, gate_BT = gated_keys(config, k_lin_BTK, conv_BTD, self.linear_gate)
        return torch.stack([*heads, k_lin_BTK]), gate_BT

    def extend(self, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, x_BND: Tensor, info: SequenceInfo,
               inputs: DecodeInputs, cache: Cache) -> Tensor:
        assert isinstance(cache, ChunkState)
        h, conv_BND = self.config.n_heads, k_BNHK.flatten(2)
        if self.key_conv is not None:
            conv_BND = self.key_conv.extend(conv_BND, inputs, cache)
        heads_4BNK, gate_BN = self.make_heads(q_BNHK, k_BNHK, conv_BND, info)
        out = extend_chunks(heads_4BNK, fold_heads(v_BNHK.flatten(2), h), inputs.for_heads(h), cache, self.config,
                            self.rel_pos_bias, gate_BN)
        return unfold_heads(out, h)
