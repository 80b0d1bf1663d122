"""The Transformer's layers: multi-head self-attention with one of five cores, and feed-forward."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lineartime.config import COMBINER, MC_TFM_PLUS_PLUS, PERFORMER, TRANSFORMER_PLUS_PLUS, ModelConfig, layer_config
from lineartime.model.attention.combiner import Combiner
from lineartime.model.attention.mixed_chunk import MixedChunk
from lineartime.model.attention.performer import Performer
from lineartime.model.attention.quadratic import ReluSquared, Softmax
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.extend import empty_cache
from lineartime.model.gau_options import KeyConv, WriteGate
from lineartime.model.layers import ACTIVATIONS, RelPosBias, ResidualLayer, ScaleOffset, SequenceInfo, make_norm
from lineartime.ops.dtypes import float16_as_float32

Core = Combiner | MixedChunk | Performer | ReluSquared | Softmax
"""Attention between the projections of a layer. `attend` of whole rows takes q, k and v `[B, T, H,
K]`, before RoPE, and the normed input of the projection, x_BTD, which Combiner alone reads; it
returns the heads concatenated, `[B, T, D]`. With a cache these are the next tokens of rows whose
past is there, and it is updated; for causal models."""


class MultiHeadAttention(ResidualLayer):
    """x + W_o concat_h(attention of head h of norm(x)), by one of five cores (`attention/`).

    | attn_type, attn_kernel | model | core |
    |---|---|---|
    | quadratic, softmax | Transformers | softmax(q k^T / sqrt(K)) v, by PyTorch |
    | quadratic, relu2 | ablation | relu(q k^T / n + b)^2 v, as in a GAU |
    | mixed_chunk, either | MC-TFM++ | one of these in a chunk, linear attention across |
    | linear, relu | Performer | phi(q) sum phi(k) v / phi(q) sum phi(k), phi(x) = relu(x) + 1e-3 |
    | rowmajor_axial, softmax | Combiner | softmax over a chunk's tokens and summaries of chunks |

    With `gate`, W_o takes act(W_u norm(x)) * attention (Eq. 3). Arguments and use are those of a
    `GatedAttentionUnit`; fields that are not given are those of the preset with this attn_type.
    Raises UsageError for a wrong field or ffn = gau."""

    kind = "attention"

    def __init__(self, config: ModelConfig | None = None, **fields: Any):
        presets = {"linear": PERFORMER, "rowmajor_axial": COMBINER, "mixed_chunk": MC_TFM_PLUS_PLUS}
        config = layer_config(config, presets.get(fields.get("attn_type", ""), TRANSFORMER_PLUS_PLUS), fields)
        d = config.d_model
        super().__init__(config, (d,) * (4 if config.gate else 3))  # q, k, v and perhaps a gate, by one matmul
        self.out_proj = nn.Linear(d, d, bias=config.bias)
        # What only some cores have: MC-TFM++'s second pair of heads, Combiner's summaries, ...
        if config.attn_type == "mixed_chunk":
            self.scale_offset = ScaleOffset(2, d)
        if config.attn_type == "rowmajor_axial":
            self.summary_proj, self.summary_key = (nn.Linear(d, d, bias=config.bias) for _ in range(2))
            self.summary_norm = make_norm(config if config.norm else replace(config, norm="layer_norm"))
        self.rel_pos_bias = RelPosBias(config.bias_len) if config.has_bias else None
        # The norms' gains are shared by the heads, as in Qwen3, and start as 1.
        self.query_norm = nn.RMSNorm(config.qk_width, eps=1e-6) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(config.qk_width, eps=1e-6) if config.qk_norm else None
        self.key_conv = KeyConv(config) if config.key_conv else None
        self.linear_gate = WriteGate(config) if config.linear_gate else None
        with torch.random.fork_rng(devices=[]):  # these draws do not move the generator
            self.init_weights(config.init_std)

    @property
    def core(self) -> Core:
        config = self.config
        if config.attn_type == "mixed_chunk":
            return MixedChunk(config, self.scale_offset, self.rel_pos_bias, self.key_conv, self.linear_gate)
        if config.attn_type == "rowmajor_axial":
            return Combiner(config, self.summary_proj, self.summary_key, self.summary_norm)
        if config.attn_type == "linear":
            return Performer(config)
        if config.attn_kernel == "relu2":
            return ReluSquared(config, self.rel_pos_bias)
        return Softmax(config, self.query_norm, self.key_norm)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        # `[B, T, H, K]` each; the gate is before its activation.
        shape = (len(self.in_sizes), self.config.n_heads, -1)
        q_BTHK, k_BTHK, v_BTHK, *gate = self.in_proj(normed_BTD).unflatten(-1, shape).unbind(2)
        if self.key_conv is not None and self.config.attn_type == "quadratic":
            k_BTHK = self.key_conv(k_BTHK.flatten(2), info, cache).view_as(k_BTHK)
        out_BTD = self.core.attend(q_BTHK, k_BTHK, v_BTHK, normed_BTD, info, cache)
        if gate:
            out_BTD = ACTIVATIONS[self.config.activation](gate[0].flatten(2)) * float16_as_float32(out_BTD)
        return self.project_out(out_BTD)

    def empty_cache(self, n_rows: int) -> Cache:
        core = self.core
        return (core.empty_cache(n_rows, self.like) if isinstance(core, Combiner | Performer)
                else empty_cache(n_rows, self.config, self.like, self.rel_pos_bias))

    def keep_scores(self, old: ModelConfig) -> None:
        if self.config.attn_kernel == "relu2":
            ratio = self.config.scale_len / old.scale_len
            for part in self.in_proj.parameters():
                part[: self.config.d_model] *= ratio
            if self.config.attn_type == "mixed_chunk":
                self.scale_offset.gamma[0] /= ratio


class FeedForward(ResidualLayer):
    """x + W_o act(W_u y), y = norm(x); with ffn "glu" x + W_o (act(W_u y) * W_v y) (Eqs. 1-2).

    Arguments are as of `MultiHeadAttention`; other fields are those of Transformer++."""

    kind, attends = "FFN", False

    def __init__(self, config: ModelConfig | None = None, **fields: Any):
        preset = replace(TRANSFORMER_PLUS_PLUS, n_heads=1, rel_pos=None)  # so that any width will do
        config = layer_config(config, preset, fields)
        super().__init__(config, (config.d_inner,) * (2 if config.ffn == "glu" else 1))
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=config.bias)
        with torch.random.fork_rng(devices=[]):
            self.init_weights(config.init_std)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        u_BTE, *v = self.in_proj(normed_BTD).split(self.config.d_inner, dim=-1)
        inner_BTE = float16_as_float32(ACTIVATIONS[self.config.activation](u_BTE))
        return self.project_out(inner_BTE * v[0] if v else inner_BTE)
