"""The Gated Attention Unit (Section 2, Code 6), which FLASH-Quad stacks, and with mixed chunk
attention (Section 3.2, Code 8), which FLASH stacks. Ablations and options: `gau_options.py`."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime import ops
from lineartime.config import FLASH, FLASH_QUAD, ModelConfig, layer_config
from lineartime.model import gau_options
from lineartime.model.decoding.cache import Cache, ChunkState, KeyValueCache
from lineartime.model.decoding.extend import empty_cache, extend_chunks, extend_row
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import RelPosBias, ResidualLayer, ScaleOffset, SequenceInfo, fold_heads, unfold_heads
from lineartime.ops.dispatch import HAS_TRITON, unsupported_step, use_kernels
from lineartime.ops.reference import CarriedState, Heads, HeadsFromZ, make_heads

if HAS_TRITON:
    from lineartime.ops import decode_step


class GatedAttentionUnit(ResidualLayer):
    """x + W_o (u * A v), u, v, z = silu(W norm(x)); q, k: z scaled, offset, rotated (Eqs. 1, 3-5).

    Without a chunk size, A = relu(q k^T / n + b)^2 over the row, with n = `scale_len`. With a chunk
    size, A is the same inside a chunk (n = chunk_size) plus linear attention across chunks. A token
    sees itself and those before it, or with causal=False all. The arguments are a `ModelConfig`, or
    fields of one by name (d_model, chunk_size, ...); other fields are those of FLASH, without
    chunk_size those of FLASH-Quad. `language_model.init_weights` lists the initial values.

    `forward` takes packed documents and padding, and with a cache the next tokens of rows. Kernels
    have no second derivatives; `layer.impl = "reference"` has.

    Raises UsageError for a wrong field, and for the configuration of a model without GAUs."""

    kind = "GAU"

    def __init__(self, config: ModelConfig | None = None, **fields: Any):
        config = layer_config(config, FLASH_QUAD if fields.get("chunk_size") is None else FLASH, fields)
        e, s = config.d_inner, config.query_key_dim
        # One matmul makes u, v and z. q and k are made from z, with chunks a pair for each half.
        super().__init__(config, (e, e, s))
        self.scale_offset = ScaleOffset(2 if config.chunk_size is None else 6 if config.first_to_all else 4, s)
        self.rel_pos_bias = RelPosBias(config.bias_len) if config.position_bias else None
        self.out_proj = nn.Linear(e if config.gate else 2 * e, config.d_model, bias=config.bias)
        # What only options have.
        if config.chunk_pooling == "attention":
            self.chunk_scale_offset, self.chunk_bias = ScaleOffset(2, s), RelPosBias(gau_options.CHUNK_BIAS_LEN)
        self.key_conv = gau_options.KeyConv(config) if config.key_conv else None
        self.linear_gate = gau_options.WriteGate(config) if config.linear_gate else None
        self.init_weights(config.init_std)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        """W_o (u * A v): `[B, T, D]`."""
        config, uvz_BTF, ids_BT = self.config, self.in_proj(normed_BTD), info.segment_ids_BT
        if cache is not None and info.inputs is not None:
            return self.project_out(self.attend_next(uvz_BTF, info, info.inputs, cache))
        if ids_BT is not None and config.n_heads > 1:  # attention heads are entries of the batch
            ids_BT = ids_BT.repeat_interleave(config.n_heads, 0)
        if not config.attends_as_flash:
            return self.project_out(self.attend_otherwise(uvz_BTF, info, ids_BT))
        # One op does all between the two matmuls, with less traffic to memory.
        if config.chunk_size is None:
            out_BTE = ops.gated_quadratic_attention(
                uvz_BTF, self.heads_from_z(info), self.bias_of(uvz_BTF.shape[1]), scale_len=config.scale_len,
                causal=config.causal, segment_ids_BT=ids_BT, impl=self.impl)
        else:
            uvz_BTF, heads, gate_BT = self.op_inputs(uvz_BTF, info)
            out_BTE = ops.gated_chunk_attention(
                uvz_BTF, heads, self.bias_of(config.bias_len), chunk_size=config.chunk_size, causal=config.causal,
                segment_ids_BT=ids_BT, pooling=config.chunk_pooling, gate_BT=gate_BT, exchange=info.exchange,
                impl=self.impl)
        return self.project_out(unfold_heads(out_BTE, config.n_heads))

    def bias_of(self, length: int) -> Tensor | None:
        """The position bias of so many tokens, `[2 length - 1]`, if there is one."""
        return None if self.rel_pos_bias is None else self.rel_pos_bias(length)

    def heads_from_z(self, info: SequenceInfo) -> HeadsFromZ:
        """How FLASH's heads are made from z."""
        return HeadsFromZ(self.scale_offset.gamma, self.scale_offset.beta, *info.angles[self.config.qk_width])

    def op_inputs(self, uvz_BTF: Tensor, info: SequenceInfo,
                  cache: Cache | None = None) -> tuple[Tensor, Heads, Tensor | None]:
        """What an op takes: u, v, z and how FLASH's heads are made from z. Or u, v, heads that
        options make, and gate_BT; B then counts rows times attention heads."""
        if self.config.makes_plain_heads:
            return uvz_BTF, self.heads_from_z(info), None
        uv_BTF, z_BTS = uvz_BTF.split([2 * self.config.d_inner, self.config.query_key_dim], dim=-1)
        if (h := self.config.n_heads) > 1:  # a head takes its columns of u and its columns of v
            uv_BTF = torch.cat([fold_heads(part_BTE, h) for part_BTE in uv_BTF.chunk(2, dim=-1)], dim=-1)
        heads, gate_BT = self.make_heads(F.silu(z_BTS), info, cache)
        return uv_BTF, heads, gate_BT

    def make_heads(self, z_BTS: Tensor, info: SequenceInfo,
                   cache: Cache | None = None) -> tuple[list[Tensor], Tensor | None]:
        """The heads, and with chunk_pooling "written" gate_BT; z is after its activation."""
        if self.config.makes_plain_heads:
            return [*make_heads(z_BTS, *self.heads_from_z(info))], None
        conv_BTS = z_BTS if self.key_conv is None else self.key_conv(z_BTS, info, cache)
        return gau_options.heads_of_z(self.config, z_BTS, conv_BTS, self.scale_offset, self.linear_gate,
                                      info.turns[self.config.qk_width])

    def attend_otherwise(self, uvz_BTF: Tensor, info: SequenceInfo, segment_ids_BT: Tensor | None) -> Tensor:
        """What W_o takes where a layer attends neither as FLASH nor as FLASH-Quad."""
        # For impl "triton" this raises, on CUDA it notes the reason.
        use_kernels(self.impl, uvz_BTF.device, lambda: "kernels do not run the paper's ablations; without chunks they "
                                                       "need one head and no key_conv")
        u_BTE, v_BTE, z_BTS = gau_options.split_activated(self.config, uvz_BTF)
        heads, gate_BT = self.make_heads(z_BTS, info)
        a_BGG = None
        if self.config.chunk_pooling == "attention":
            a_BGG = gau_options.chunk_weights(self.config, z_BTS, segment_ids_BT, self.chunk_scale_offset,
                                              self.chunk_bias)
        out_BTE = gau_options.ablated_attention(self.config, heads, v_BTE, self.rel_pos_bias, segment_ids_BT,
                                                a_BGG=a_BGG, gate_BT=gate_BT, exchange=info.exchange)
        return gau_options.gated(self.config, u_BTE, out_BTE)

    def empty_cache(self, n_rows: int) -> Cache:
        return empty_cache(n_rows, self.config, self.like, self.rel_pos_bias)

    def keep_scores(self, old: ModelConfig) -> None:
        if self.config.attn_kernel == "relu2":
            for part in self.scale_offset.parameters():
                part[0] *= self.config.scale_len / old.scale_len
        if self.config.chunk_pooling == "attention":
            for part in self.chunk_scale_offset.parameters():
                part[0] *= self.config.n_chunks / old.n_chunks

    def attend_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: Cache) -> Tensor:
        """u * A v of the next tokens: out_BNE. The cache is updated. The chunks that each row fills
        are computed as in training; the tokens before and after them separately."""
        if not isinstance(cache, ChunkState) or not self.config.attends_as_flash:
            return self.attend_tokens_next(uvz_BNF, info, inputs, cache)
        # A new token per row is one launch of a kernel on a GPU.
        if self.can_step_in_kernel(uvz_BNF, inputs, cache):
            return self.step_in_kernel(uvz_BNF, info, inputs, cache)
        # Chunks that the new tokens fill from the first slot to the last run as in training.
        n_first = inputs.whole_chunks(cache.chunk_size)
        if not n_first:
            return self.attend_tokens_next(uvz_BNF, info, inputs, cache)
        if n_first == inputs.n_new and max(n_first) == uvz_BNF.shape[1]:
            return self.attend_chunks_next(uvz_BNF, info, inputs, cache)
        # Cut behind what fills the open chunk, or behind whole chunks. Each part comes here again.
        cut = inputs.cut(n_first)
        angles = zip(*(cut.split(angle) for angle in info.angles[self.config.qk_width]), strict=True)
        parts = zip(cut.split(uvz_BNF), angles, cut.inputs, strict=True)
        return cut.join(*(self.attend_next(uvz, SequenceInfo({self.config.qk_width: both}, now.position_BN, inputs=now),
                                           now, cache) for uvz, both, now in parts))

    def attend_tokens_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: Cache) -> Tensor:
        """`attend_next` of tokens at any place."""
        u_BNE, v_BNE, z_BNS = gau_options.split_activated(self.config, uvz_BNF)
        heads, gate_BN = self.make_heads(z_BNS, info, cache)
        inputs = inputs.for_heads(self.config.n_heads)
        if isinstance(cache, KeyValueCache):
            q_BNS, k_BNS = heads
            out_BNE = extend_row(q_BNS, k_BNS, v_BNE, inputs, cache, self.rel_pos_bias, self.config)
        else:
            assert isinstance(cache, ChunkState)
            out_BNE = extend_chunks(heads, v_BNE, inputs, cache, self.config, self.rel_pos_bias, gate_BN)
        return gau_options.gated(self.config, u_BNE, out_BNE)

    def attend_chunks_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs,
                           cache: ChunkState) -> Tensor:
        """`attend_next` of the whole chunks that follow the closed ones. A row that has fewer gets
        values of 0, which change no state and which no earlier token sees."""
        c, h = cache.chunk_size, self.config.n_heads
        uvz_BNF, heads, gate_BN = self.op_inputs(uvz_BNF, info, cache)
        inputs = inputs.for_heads(h)
        # The op begins with the cache's state, and leaves there the one after its last chunk.
        state = CarriedState(*cache.past(inputs))
        out_BNE = ops.gated_chunk_attention(
            inputs.without_padding(uvz_BNF), heads, self.bias_of(c), chunk_size=c, causal=True,
            segment_ids_BT=inputs.document_BN if inputs.any_begins else None, pooling=self.config.chunk_pooling,
            gate_BT=None if gate_BN is None else inputs.without_padding(gate_BN), exchange=state, impl=self.impl)
        cache.kv_BSE = state.kv_BSE
        if cache.written_B is not None:
            cache.written_B = state.count_B
        return unfold_heads(out_BNE, h)

    def can_step_in_kernel(self, uvz_BNF: Tensor, inputs: DecodeInputs, cache: ChunkState) -> bool:
        """Whether `step_in_kernel` runs, which has no gradient."""
        return (inputs.single_token and not cache.wants_gradient(itertools.chain((uvz_BNF,), self.parameters()))
                and use_kernels(self.impl, uvz_BNF.device, unsupported_step, cache.k_quad_BCS, cache.v_BCE)
                and cache.v_BCE.dtype == uvz_BNF.dtype)

    def step_in_kernel(self, uvz_B1F: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: ChunkState) -> Tensor:
        """`attend_next` of one token per row by one kernel, which writes k and v to the cache."""
        uvz_B1F, heads, gate_B1 = self.op_inputs(uvz_B1F, info, cache)
        # Where in its chunk each row's token is, and what its state is divided by.
        at = inputs.for_heads(self.config.n_heads).token_position(self.config, cache.kv_BSE.dtype)
        bias_M = cache.kv_BSE.new_zeros(cache.chunk_size) if cache.bias_M is None else cache.bias_M
        out_B1E = decode_step.chunk_decode_step(
            uvz_B1F, heads, bias_M, cache.k_quad_BCS, cache.k_lin_BCS, cache.v_BCE, cache.kv_BSE, at.offset_B,
            at.first_B, cache.factor(at, gate_B1)[:, 0, 0])
        if at.full is not None:
            cache.close(at)
        return unfold_heads(out_B1E, self.config.n_heads)
