"""The paper's ablations and variants of a GAU, and the options beyond the paper (`memory.py`). FLASH and FLASH-Quad do
not use this file.

The ablations are several heads, softmax, another activation, no gate, one half of mixed chunk attention, overlapping
chunks, learned chunk weights (Appendix A), first-to-all and softmax for [CLS] (Section 4.3), and the paper's document
mask, which leaks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime import ops
from lineartime.config import ModelConfig
from lineartime.model.attention.mixed_chunk import attend_in_chunks
from lineartime.model.decoding.cache import Cache, ChunkState, KeyValueCache
from lineartime.model.decoding.extend import extend_chunks, extend_row
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.layers import (
    ACTIVATIONS,
    RelPosBias,
    ResidualLayer,
    ScaleOffset,
    SequenceInfo,
    fold_heads,
    unfold_heads,
)
from lineartime.model.memory import KeyConv, WriteGate, gated_keys
from lineartime.ops.ablations import (
    ablated_quadratic_attention,
    first_to_all_attention,
    learned_chunk_weights,
)
from lineartime.ops.dispatch import unsupported_variant, use_kernels
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import CarriedState, Exchange, chunk_ids, from_chunks, rope, to_chunks

CHUNK_BIAS_LEN = 512
"""n of the position bias between chunks. It selects the rotated form, which has no limit on the distance."""


class AblatedGatedAttentionUnit(GatedAttentionUnit):
    """A `GatedAttentionUnit` with any of the ablations and options in `ModelConfig`. Kernels run those with chunks that
    attend as FLASH does (`ModelConfig.attends_as_flash`).

    With several heads, each head is a slice of z and of v. Without the gate, W_o takes [u, A v]. A layer with learned
    chunk weights trains and does not decode. Raises UsageError for the configuration of a model without GAUs."""

    def __init__(self, config: ModelConfig):
        self.check_kind(config)
        # Not the constructor of the GAU, which refuses ablations.
        ResidualLayer.__init__(self, config)
        self.make_parameters(n_made=2 if config.chunk_size is None else 6 if config.first_to_all else 4,
                             out_width=config.d_inner if config.gate else 2 * config.d_inner)
        if config.chunk_pooling == "attention":
            self.chunk_scale_offset = ScaleOffset(2, config.query_key_dim)
            self.chunk_bias = RelPosBias(CHUNK_BIAS_LEN)
        self.key_conv = KeyConv(config) if config.key_conv else None
        self.linear_gate = WriteGate(config) if config.linear_gate else None
        self.init_weights(config.init_std)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo) -> Tensor:
        config = self.config
        if config.attends_as_flash and config.chunk_size is not None:
            return self.attend_as_flash(normed_BTD, info)
        use_kernels(self.impl, normed_BTD.device, unsupported_variant)  # raises for impl "triton", or notes the reason
        u_BTE, v_BTE, z_BTS = self.split(self.in_proj(normed_BTD))
        heads, gate_BT, segment_ids_BT = self.heads_of_rows(z_BTS, info)
        if config.chunk_size is None:
            out_BTE = self.attend_row(heads, v_BTE, segment_ids_BT)
        else:
            out_BTE = self.attend_chunks(heads, v_BTE, z_BTS, segment_ids_BT, gate_BT, info.exchange)
        return self.out_proj(self.gated(u_BTE, out_BTE))

    def attend_as_flash(self, normed_BTD: Tensor, info: SequenceInfo) -> Tensor:
        """`branch` of a layer that differs from FLASH in its heads alone, by the op that kernels have. Attention heads
        are entries of the batch."""
        config = self.config
        assert config.chunk_size is not None
        uv_BTF, z_BTS = self.split_uv(self.in_proj(normed_BTD))
        heads, gate_BT, segment_ids_BT = self.heads_of_rows(z_BTS, info)
        out_BTE = ops.gated_head_attention(
            uv_BTF, heads, self.rel_pos_bias(self.rel_pos_bias.n), chunk_size=config.chunk_size, causal=config.causal,
            segment_ids_BT=segment_ids_BT, pooling=config.chunk_pooling, gate_BT=gate_BT, exchange=info.exchange,
            impl=self.impl)
        return self.out_proj(unfold_heads(out_BTE, config.n_heads))

    def split_uv(self, uvz_BTF: Tensor) -> tuple[Tensor, Tensor]:
        """u and v concatenated, before silu, and z_BTS, after it. In uv_BTF B counts rows times attention heads."""
        h, e, s = self.config.n_heads, self.config.d_inner, self.config.query_key_dim
        uv_BTF, z_BTS = uvz_BTF.split([2 * e, s], dim=-1)
        if h > 1:
            # A head takes its columns of u and its columns of v, so each is cut on its own.
            uv_BTF = torch.cat([fold_heads(part_BTE, h) for part_BTE in uv_BTF.chunk(2, dim=-1)], dim=-1)
        return uv_BTF, F.silu(z_BTS)

    def split(self, uvz_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u_BTE, v_BTE and z_BTS, after the activation. In v B counts rows times attention heads."""
        config = self.config
        activation, e, s = ACTIVATIONS[config.activation], config.d_inner, config.query_key_dim
        u_BTE, v_BTE, z_BTS = (activation(part) for part in uvz_BTF.split([e, e, s], dim=-1))
        return u_BTE, fold_heads(v_BTE, config.n_heads), z_BTS

    def heads_of_rows(self, z_BTS: Tensor, info: SequenceInfo) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """`make_heads` of rows, and segment_ids_BT. In all of them B counts rows times attention heads."""
        ids_BT = info.segment_ids_BT
        conv_BTS = z_BTS if self.key_conv is None else self.key_conv(z_BTS, ids_BT, info.ranks)
        heads, gate_BT = self.make_heads(z_BTS, conv_BTS, info)
        return heads, gate_BT, None if ids_BT is None else ids_BT.repeat_interleave(self.config.n_heads, 0)

    def make_heads(self, z_BTS: Tensor, conv_BTS: Tensor, info: SequenceInfo) -> tuple[list[Tensor], Tensor | None]:
        """Heads made from z, each `[B, T, S]`: q and k of the quadratic half, then with chunks those of the linear
        half, then those of first-to-all; and the gates that chunk_pooling "written" divides by, gate_BT, else None.
        B counts rows times attention heads. conv_BTS: z, or with `key_conv` its convolution."""
        assert info.rotary is not None
        config, gamma, beta = self.config, self.scale_offset.gamma, self.scale_offset.beta
        (sin, cos), heads, gate_BT = (angle[..., None, :] for angle in info.rotary), [], None
        # Heads 2 and 3 are the linear half's, 1 and 3 are keys. These are made from the convolution:
        from_conv = (1,) if config.chunk_size is None else (1, 3) if config.local_key_conv else (3,)
        wide_BTS = at_least_float32(z_BTS)
        wide_conv_BTS = wide_BTS if self.key_conv is None else at_least_float32(conv_BTS)
        for n in range(len(gamma)):
            made_BTS = (wide_conv_BTS if n in from_conv else wide_BTS) * gamma[n] + beta[n]
            head_BTHS = made_BTS.unflatten(-1, (config.n_heads, -1))
            heads.append(rope(head_BTHS, sin, cos) if config.linear_rope or n not in (2, 3) else head_BTHS)
        if config.chunk_size is not None:
            heads[3], gate_BT = gated_keys(config, heads[3], conv_BTS, self.linear_gate)
        return [fold_heads(head.to(z_BTS.dtype).flatten(-2), config.n_heads) for head in heads], gate_BT

    def gated(self, u_BTE: Tensor, out_BTE: Tensor) -> Tensor:
        """u * A v (Eq. 3), or without the gate [u, A v]: what W_o takes."""
        out_BTE = unfold_heads(out_BTE, self.config.n_heads)
        return u_BTE * out_BTE if self.config.gate else torch.cat([u_BTE, out_BTE], dim=-1)

    def attend_row(self, heads: list[Tensor], v_BTE: Tensor, segment_ids_BT: Tensor | None) -> Tensor:
        """A v over the whole row: out_BTE."""
        config, (q_BTS, k_BTS) = self.config, heads
        return ablated_quadratic_attention(
            q_BTS[:, None], k_BTS[:, None], v_BTE[:, None], self.rel_pos_bias(v_BTE.shape[1]),
            kernel=config.attn_kernel, scale_len=config.scale_len, causal=config.causal,
            segment_ids_BGC=None if segment_ids_BT is None else segment_ids_BT[:, None],
            cls_softmax=config.cls_softmax)[:, 0]

    def attend_chunks(self, heads: list[Tensor], v_BTE: Tensor, z_BTS: Tensor, segment_ids_BT: Tensor | None,
                      gate_BT: Tensor | None, exchange: Exchange | None) -> Tensor:
        """A v of mixed chunk attention: out_BTE."""
        config, n_tokens, learned = self.config, v_BTE.shape[1], self.config.chunk_pooling == "attention"
        assert config.chunk_size is not None
        c = config.chunk_size
        # Rows are cut into chunks; where rows end inside a chunk, ids of -1 mark what is missing.
        segment_ids_BGC = chunk_ids(segment_ids_BT, v_BTE, c, config.causal and not learned)
        q_quad, k_quad, q_lin, k_lin, *first = (to_chunks(head_BTS, c) for head_BTS in heads)
        v_BGCE, a_BGG = to_chunks(v_BTE, c), None
        # Appendix A: the weight of chunk h for the queries of chunk g is learned.
        if learned:
            assert segment_ids_BGC is not None
            a_BGG = self.chunk_weights(to_chunks(z_BTS, c), segment_ids_BGC)
        out_BGCE = attend_in_chunks(config, q_quad, k_quad, q_lin, k_lin, v_BGCE, self.rel_pos_bias, segment_ids_BGC,
                                    a_BGG, gate_BT, exchange)
        if first:  # each chunk's first token also attends to its whole document
            assert segment_ids_BGC is not None
            q_all, k_all = first
            first_BGE = first_to_all_attention(q_all[:, :, 0], k_all, v_BGCE, segment_ids_BGC)
            out_BGCE = torch.cat([out_BGCE[:, :, :1] + first_BGE[:, :, None], out_BGCE[:, :, 1:]], dim=2)
        return from_chunks(out_BGCE, n_tokens)

    def chunk_weights(self, z_BGCS: Tensor, segment_ids_BGC: Tensor) -> Tensor:
        """The learned weight of chunk h for chunk g (Appendix A), `[B, G, G]`, from the mean z of each chunk.

        When causal, the query of chunk g is the mean of chunk g - 1: its own mean has tokens that some of its queries
        must not see."""
        valid_BGC = segment_ids_BGC >= 0
        z_BGS = (at_least_float32(z_BGCS) * valid_BGC[..., None]).sum(2) / valid_BGC.sum(-1, keepdim=True).clamp(min=1)
        chunk_G = torch.arange(z_BGS.shape[1], device=z_BGS.device)
        distance_GG = chunk_G - chunk_G[:, None]
        # When causal only earlier chunks are read, so what the first chunk asks with does not matter.
        asking_BGS = torch.cat([z_BGS[:, :1], z_BGS[:, :-1]], dim=1) if self.config.causal else z_BGS
        hidden_BGG = ~valid_BGC.any(-1)[:, None, :] | (self.config.causal & (distance_GG >= 0))
        gamma_2S, beta_2S = self.chunk_scale_offset.gamma, self.chunk_scale_offset.beta
        # Query and key of a summary are two more cheap transforms of z.
        q_BGS, k_BGS = asking_BGS * gamma_2S[0] + beta_2S[0], z_BGS * gamma_2S[1] + beta_2S[1]
        a_BGG = learned_chunk_weights(q_BGS, k_BGS, self.chunk_bias.at(distance_GG[None]),
                                      scale_len=self.config.n_chunks)
        return a_BGG.masked_fill(hidden_BGG, 0.0)

    def empty_cache(self, n_rows: int) -> Cache:
        """See `GatedAttentionUnit.empty_cache`."""
        cache = super().empty_cache(n_rows)
        if self.key_conv is not None:
            self.key_conv.add_to(cache)
        return cache

    def heads_next(self, z_BNS: Tensor, info: SequenceInfo, inputs: DecodeInputs,
                   cache: Cache) -> tuple[list[Tensor], Tensor | None]:
        """`make_heads` of the next tokens."""
        conv_BNS = z_BNS if self.key_conv is None else self.key_conv.extend(z_BNS, inputs, cache)
        return self.make_heads(z_BNS, conv_BNS, info)

    def step_in_kernel(self, uvz_B1F: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: ChunkState) -> Tensor:
        uv_B1F, z_B1S = self.split_uv(uvz_B1F)
        heads, gate_B1 = self.heads_next(z_B1S, info, inputs, cache)
        at = inputs.for_heads(self.config.n_heads).token_position(self.config, cache.kv_BSE.dtype)
        assert cache.bias_M is not None
        # The same kernel as FLASH's, with heads that are made here.
        out_BE = ops.chunk_decode_step(
            uv_B1F[:, 0], torch.stack(heads)[:, :, 0], cache.bias_M, cache.k_quad_BCS, cache.k_lin_BCS,
            cache.v_BCE, cache.kv_BSE, at.offset_B, at.first_B, cache.factor(at, gate_B1)[:, 0, 0], impl=self.impl)
        if at.full is not None:
            cache.close(at)
        return unfold_heads(out_BE[:, None], self.config.n_heads)

    def attend_chunks_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs,
                           cache: ChunkState) -> Tensor:
        c = cache.chunk_size
        uv_BNF, z_BNS = self.split_uv(uvz_BNF)
        heads, gate_BN = self.heads_next(z_BNS, info, inputs, cache)
        inputs = inputs.for_heads(self.config.n_heads)
        state = CarriedState(*cache.past(inputs))
        out_BNE = ops.gated_head_attention(
            inputs.without_padding(uv_BNF), heads, self.rel_pos_bias(c), chunk_size=c, causal=True,
            segment_ids_BT=inputs.document_BN if inputs.any_begins else None, pooling=self.config.chunk_pooling,
            gate_BT=None if gate_BN is None else inputs.without_padding(gate_BN), exchange=state, impl=self.impl)
        cache.kv_BSE = state.kv_BSE
        if cache.written_B is not None:
            cache.written_B = state.count_B
        return unfold_heads(out_BNE, self.config.n_heads)

    def attend_tokens_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: Cache) -> Tensor:
        u_BNE, v_BNE, z_BNS = self.split(uvz_BNF)
        heads, gate_BN = self.heads_next(z_BNS, info, inputs, cache)
        inputs = inputs.for_heads(self.config.n_heads)
        if isinstance(cache, KeyValueCache):
            q_BNS, k_BNS = heads
            out_BNE = extend_row(q_BNS, k_BNS, v_BNE, inputs, cache, self.rel_pos_bias, self.config)
        else:
            assert isinstance(cache, ChunkState)
            out_BNE = extend_chunks(heads, v_BNE, inputs, cache, self.config, self.rel_pos_bias, gate_BN)
        return self.gated(u_BNE, out_BNE)
