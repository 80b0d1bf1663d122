"""The Gated Attention Unit (Section 2, Code 6) and the same unit with mixed chunk attention (Section 3.2, Code 8).

FLASH-Quad stacks the first, FLASH the second. With equal n, a causal FLASH layer of one chunk computes the first.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lineartime import ops
from lineartime.base.settings import check_rules, require
from lineartime.config import FLASH, FLASH_QUAD, ModelConfig, layer_config
from lineartime.model.decoding.cache import Cache, ChunkState, KeyValueCache
from lineartime.model.decoding.extend import empty_cache, extend_chunks, extend_row
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import RelPosBias, ResidualLayer, ScaleOffset, SequenceInfo, make_norm
from lineartime.ops.dispatch import unsupported_step, use_kernels
from lineartime.ops.reference import CarriedState, make_heads, split_uvz


class GatedAttentionUnit(ResidualLayer):
    """x + W_o (u * A v) with u, v, z = silu(W norm(x)); q and k of A are z scaled, offset and rotated (Eqs. 1, 3-5).

    Without a chunk size, A = relu(q k^T / n + b)^2 over the row, with n = `scale_len`. With a chunk size, A is the same
    inside a chunk (n = chunk_size) plus linear attention across chunks. The norm and the residual are inside. A token
    sees itself and those before it, or with causal=False all. The arguments are a `ModelConfig`, or fields of one by
    name (d_model, chunk_size, causal, query_key_dim, ...); other fields are those of FLASH, without chunk_size those
    of FLASH-Quad. `model.init_weights` lists the initial values.

    `forward` takes packed documents and padding; `empty_cache` and `extend` decode (docs/guide.md, section 8). Second
    derivatives work on a processor; where kernels run, set `layer.impl = "reference"` for them.

    Raises UsageError for a wrong field, for the configuration of a model without GAUs, and for that of an ablated GAU
    (`ModelConfig.is_ablated_gau`), which `ablations.AblatedGatedAttentionUnit` takes."""

    kind = "GAU"

    def __init__(self, config: ModelConfig | None = None, **fields: Any):
        config = layer_config(config, FLASH_QUAD if fields.get("chunk_size") is None else FLASH, fields)
        self.check_kind(config)
        require(not config.is_ablated_gau, "this GAU is neither FLASH's nor FLASH-Quad's", "GatedAttentionUnit",
                "take lineartime.model.ablations.AblatedGatedAttentionUnit")
        super().__init__(config)
        self.make_parameters(n_made=2 if config.chunk_size is None else 4, out_width=config.d_inner)
        self.init_weights(config.init_std)

    @staticmethod
    def check_kind(config: ModelConfig) -> None:
        """Raise UsageError for the configuration of a model without GAUs."""
        require(config.ffn == "gau", "a GatedAttentionUnit is a layer of a model with ffn = gau", f"ffn = {config.ffn}")

    def make_parameters(self, n_made: int, out_width: int) -> None:
        """Make norm, projections, scales and position bias. n_made: number of heads made from z. out_width: inputs of
        W_o."""
        config = self.config
        self.norm = make_norm(config)
        self.in_sizes = (config.d_inner, config.d_inner, config.query_key_dim)
        self.in_proj = nn.Linear(config.d_model, sum(self.in_sizes))
        self.scale_offset = ScaleOffset(n_made, config.query_key_dim)
        self.rel_pos_bias = RelPosBias(config.bias_len)
        self.out_proj = nn.Linear(out_width, config.d_model)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo) -> Tensor:
        """W_o (u * A v): `[B, T, D]`."""
        config, bias = self.config, self.rel_pos_bias
        assert info.rotary is not None
        # One matmul makes u, v and z. One op does the rest up to W_o: SiLU, heads, attention and the gate. So kernels
        # can do it together, with less traffic to memory.
        uvz_BTF = self.in_proj(normed_BTD)
        gamma, beta, (sin, cos) = self.scale_offset.gamma, self.scale_offset.beta, info.rotary
        if config.chunk_size is None:
            out_BTE = ops.gated_quadratic_attention(
                uvz_BTF, gamma, beta, sin, cos, bias(uvz_BTF.shape[1]), scale_len=config.scale_len,
                causal=config.causal, segment_ids_BT=info.segment_ids_BT, impl=self.impl)
        else:
            out_BTE = ops.gated_chunk_attention(
                uvz_BTF, gamma, beta, sin, cos, bias(bias.n), chunk_size=config.chunk_size, causal=config.causal,
                segment_ids_BT=info.segment_ids_BT, pooling=config.chunk_pooling, exchange=info.exchange,
                impl=self.impl)
        return self.out_proj(out_BTE)

    def empty_cache(self, n_rows: int) -> Cache:
        """`KeyValueCache`, or with chunks `ChunkState`, see `ResidualLayer.empty_cache`."""
        check_rules(self.config, self.config.decoding_rules())
        return empty_cache(n_rows, self.config, self.like, self.rel_pos_bias)

    def branch_next(self, normed_BND: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: Cache) -> Tensor:
        return self.out_proj(self.attend_next(self.in_proj(normed_BND), info, inputs, cache))

    def keep_scores(self, old: ModelConfig) -> None:
        if self.config.attn_kernel == "relu2":
            for part in self.scale_offset.parameters():
                part[0] *= self.config.scale_len / old.scale_len
        if self.config.chunk_pooling == "attention":
            for part in self.get_submodule("chunk_scale_offset").parameters():
                part[0] *= self.config.n_chunks / old.n_chunks

    def attend_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: Cache) -> Tensor:
        """u * A v of the next tokens: out_BNE. The cache is updated. The chunks that each row fills are computed
        as in training; the tokens before and after them separately."""
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
        assert info.rotary is not None
        # Cut behind the tokens that fill the open chunk, or behind the whole chunks. Each part comes here again.
        cut = inputs.cut(n_first)
        angles = zip(*(cut.split(angle) for angle in info.rotary), strict=True)
        parts = zip(cut.split(uvz_BNF), map(SequenceInfo, angles), cut.inputs, strict=True)
        return cut.join(*(self.attend_next(*part, cache) for part in parts))

    def attend_tokens_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: Cache) -> Tensor:
        """`attend_next` of tokens at any place."""
        assert info.rotary is not None
        # The heads are made as in training, and what was read before is in the cache.
        u_BNE, v_BNE, z_BNS = split_uvz(uvz_BNF, self.config.query_key_dim)
        heads_HBNS = make_heads(z_BNS, self.scale_offset.gamma, self.scale_offset.beta, *info.rotary)
        if isinstance(cache, KeyValueCache):
            q_BNS, k_BNS = heads_HBNS
            return u_BNE * extend_row(q_BNS, k_BNS, v_BNE, inputs, cache, self.rel_pos_bias, self.config)
        assert isinstance(cache, ChunkState)
        return u_BNE * extend_chunks(heads_HBNS, v_BNE, inputs, cache, self.config, self.rel_pos_bias)

    def attend_chunks_next(self, uvz_BNF: Tensor, info: SequenceInfo, inputs: DecodeInputs,
                           cache: ChunkState) -> Tensor:
        """`attend_next` of the whole chunks that follow the closed ones. A row that has fewer is filled up with values
        of 0, which change no state and which no earlier token sees."""
        assert info.rotary is not None
        c = cache.chunk_size
        # The op begins with the state that the cache holds, and leaves there the state after its last chunk.
        state = CarriedState(*cache.past(inputs))
        out_BNE = ops.gated_chunk_attention(
            inputs.without_padding(uvz_BNF), self.scale_offset.gamma, self.scale_offset.beta, *info.rotary,
            self.rel_pos_bias(c), chunk_size=c, causal=True,
            segment_ids_BT=inputs.document_BN if inputs.any_begins else None, pooling=self.config.chunk_pooling,
            exchange=state, impl=self.impl)
        cache.kv_BSE = state.kv_BSE
        return out_BNE

    def can_step_in_kernel(self, uvz_BNF: Tensor, inputs: DecodeInputs, cache: ChunkState) -> bool:
        """Whether `step_in_kernel` runs, which has no gradient."""
        wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (uvz_BNF, *self.parameters()))
        return (inputs.single_token and not wants_gradient
                and use_kernels(self.impl, uvz_BNF.device, unsupported_step, cache.k_quad_BCS, cache.v_BCE)
                and cache.v_BCE.dtype == uvz_BNF.dtype)

    def step_in_kernel(self, uvz_B1F: Tensor, info: SequenceInfo, inputs: DecodeInputs, cache: ChunkState) -> Tensor:
        """`attend_next` of one token per row by one kernel, which writes the token's k and v into the cache."""
        assert info.rotary is not None and cache.bias_M is not None
        # Where in its chunk each row's token is, and what its state is divided by.
        at = inputs.token_position(self.config, cache.kv_BSE.dtype)
        sin_BR, cos_BR = (angle.expand(len(uvz_B1F), -1, -1)[:, 0] for angle in info.rotary)
        out_BE = ops.chunk_decode_step(
            uvz_B1F[:, 0], (self.scale_offset.gamma, self.scale_offset.beta, sin_BR, cos_BR),
            cache.bias_M, cache.k_quad_BCS, cache.k_lin_BCS, cache.v_BCE, cache.kv_BSE, at.offset_B,
            at.first_B, at.weight_B11[:, 0, 0], impl=self.impl)
        if at.full is not None:
            cache.close(at)
        return out_BE[:, None]
