"""MC-TFM++'s core: mixed chunk attention with the softmax heads of a Transformer."""

import dataclasses

import torch
from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache, ChunkState
from lineartime.model.decoding.extend import empty_cache, extend_chunks
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import RelPosBias, ScaleOffset, SequenceInfo, fold_heads, rotate_heads, unfold_heads
from lineartime.model.memory import KeyConv, WriteGate, gated_keys
from lineartime.ops.ablations import ablated_quadratic_attention, paper_linear_attention, weighted_linear_attention
from lineartime.ops.reference import Exchange, chunk_ids, from_chunks, ids_or_zeros, linear_attention, to_chunks


@dataclasses.dataclass
class MixedChunk:
    """Attention inside a chunk plus linear attention across chunks. q and k of the linear half are q and k of the
    quadratic half with a scale and an offset per dimension. Heads are folded into the batch."""

    config: ModelConfig
    scale_offset: ScaleOffset
    rel_pos_bias: RelPosBias | None
    key_conv: KeyConv | None
    linear_gate: WriteGate | None

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo) -> Tensor:
        """The heads concatenated: `[B, T, D]`. x_BTD is unused."""
        config, n_tokens, h = self.config, v_BTHK.shape[1], self.config.n_heads
        assert config.chunk_size is not None
        c = config.chunk_size
        # The keys as they are, or with `key_conv` mixed with those of the tokens around them.
        k_BTD, ids_BT = k_BTHK.flatten(2), info.segment_ids_BT
        conv_BTD = k_BTD if self.key_conv is None else self.key_conv(k_BTD, ids_BT, info.ranks)
        heads_4BTK, gate_BT = self.make_heads(q_BTHK, k_BTHK, conv_BTD, info)
        # Rows are cut into chunks; each attention head is an entry of the batch.
        q_quad, k_quad, q_lin, k_lin = (to_chunks(x, c) for x in heads_4BTK)
        v_BTK = fold_heads(v_BTHK.flatten(2), h)
        ids_BT = None if ids_BT is None else ids_BT.repeat_interleave(h, 0)
        out_BGCK = attend_in_chunks(config, q_quad, k_quad, q_lin, k_lin, to_chunks(v_BTK, c), self.rel_pos_bias,
                                    chunk_ids(ids_BT, v_BTK, c, config.causal), None, gate_BT, info.exchange)
        return unfold_heads(from_chunks(out_BGCK, n_tokens), h)

    def make_heads(self, q_BTHK: Tensor, k_BTHK: Tensor, conv_BTD: Tensor,
                   info: SequenceInfo) -> tuple[Tensor, Tensor | None]:
        """q and k of the quadratic half, then of the linear half, after RoPE: `[4, B H, T, K]`; and the gates that
        chunk_pooling "written" divides by, gate_BT, else None. conv_BTD: k, or with `key_conv` its convolution."""
        config, gamma, beta = self.config, self.scale_offset.gamma, self.scale_offset.beta
        # The linear half: scale and offset, RoPE, then the gate.
        q_lin_BTD, k_lin_BTD = q_BTHK.flatten(2) * gamma[0] + beta[0], conv_BTD * gamma[1] + beta[1]
        q_lin_BTHK, k_lin_BTHK = q_lin_BTD.view_as(q_BTHK), k_lin_BTD.view_as(k_BTHK)
        if config.linear_rope:
            q_lin_BTHK, k_lin_BTHK = rotate_heads(q_lin_BTHK, info), rotate_heads(k_lin_BTHK, info)
        k_lin_BTHK, gate_BT = gated_keys(config, k_lin_BTHK, conv_BTD, self.linear_gate)
        k_quad_BTHK = conv_BTD.view_as(k_BTHK) if config.local_key_conv else k_BTHK
        heads = (rotate_heads(q_BTHK, info), rotate_heads(k_quad_BTHK, info), q_lin_BTHK, k_lin_BTHK)
        return torch.stack([fold_heads(x.flatten(2), config.n_heads) for x in heads]), gate_BT

    def empty_cache(self, n_rows: int, weight: Tensor) -> Cache:
        """The cache of `n_rows` rows that have no token yet, see `decoding.extend.empty_cache`."""
        return empty_cache(n_rows, self.config, weight, self.rel_pos_bias)

    def extend(self, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, x_BND: Tensor, info: SequenceInfo,
               inputs: DecodeInputs, cache: Cache) -> Tensor:
        """`attend` for the next tokens of rows whose past is in `cache`, which is updated. For causal models."""
        assert isinstance(cache, ChunkState)
        h, conv_BND = self.config.n_heads, k_BNHK.flatten(2)
        if self.key_conv is not None:
            conv_BND = self.key_conv.extend(conv_BND, inputs, cache)
        heads_4BNK, gate_BN = self.make_heads(q_BNHK, k_BNHK, conv_BND, info)
        out = extend_chunks(heads_4BNK, fold_heads(v_BNHK.flatten(2), h), inputs.for_heads(h), cache, self.config,
                            self.rel_pos_bias, gate_BN)
        return unfold_heads(out, h)


def attend_in_chunks(config: ModelConfig, q_quad_BGCS: Tensor, k_quad_BGCS: Tensor, q_lin_BGCS: Tensor,
                     k_lin_BGCS: Tensor, v_BGCE: Tensor, rel_pos_bias: RelPosBias | None,
                     segment_ids_BGC: Tensor | None, a_BGG: Tensor | None, gate_BT: Tensor | None,
                     exchange: Exchange | None) -> Tensor:
    """`reference.mixed_chunk_attention` with the ablations of both halves that a configuration has: `[B, G, C, E]`.

    a_BGG: the learned chunk weights, or None. gate_BT: the gates of the linear keys, which chunk_pooling "written"
    divides by. exchange: see `reference.linear_attention`."""
    is_paper_mask = config.document_mask == "paper"
    if is_paper_mask or a_BGG is not None:
        segment_ids_BGC = ids_or_zeros(segment_ids_BGC, v_BGCE)
    # The quadratic half. The paper's mask keeps out padding alone: documents of a chunk see each other.
    out_BGCE = None
    if config.chunk_parts != "global":
        within = (segment_ids_BGC >= 0).long() - 1 if is_paper_mask and segment_ids_BGC is not None else segment_ids_BGC
        out_BGCE = ablated_quadratic_attention(
            q_quad_BGCS, k_quad_BGCS, v_BGCE, None if rel_pos_bias is None else rel_pos_bias(rel_pos_bias.n),
            scale_len=config.scale_len, causal=config.causal, segment_ids_BGC=within, kernel=config.attn_kernel,
            overlap=config.overlap, cls_softmax=config.cls_softmax)
        if config.chunk_parts == "local":
            return out_BGCE
    # The linear half: by learned weights, as the listing has it, or with the exact mask.
    if a_BGG is not None:
        assert segment_ids_BGC is not None
        lin_BGCE = weighted_linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, a_BGG, segment_ids_BGC=segment_ids_BGC)
    elif is_paper_mask:
        assert segment_ids_BGC is not None
        lin_BGCE = paper_linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=config.causal,
                                          segment_ids_BGC=segment_ids_BGC)
    else:
        gate_BGC = None if gate_BT is None else to_chunks(gate_BT, v_BGCE.shape[2])
        lin_BGCE = linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=config.causal,
                                    segment_ids_BGC=segment_ids_BGC, pooling=config.chunk_pooling, gate_BGC=gate_BGC,
                                    exchange=exchange)
    return lin_BGCE if out_BGCE is None else out_BGCE + lin_BGCE
