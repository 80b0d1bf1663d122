"""The Gated Attention Unit (Section 2, Code 6) and the same unit with mixed chunk attention (Section 3.2, Code 8).

FLASH-Quad is a stack of the first, FLASH of the second. The one is the other with a single chunk, when causal.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime import ops
from lineartime.chunks import Chunking, attend_chunks, bias_reach, chunk_ids, fold_heads, unfold_heads
from lineartime.decoding.cache import Cache, ChunkState, Feed, KeyValueCache
from lineartime.decoding.extend import empty_chunk_state, extend_chunks, extend_row
from lineartime.layers import (
    ACTIVATIONS,
    Layout,
    RelPosBias,
    ScaleOffset,
    SplitLinear,
    at_least_float32,
    make_norm,
    rope,
    rotary,
)
from lineartime.ops.cross_entropy import product_type
from lineartime.ops.dispatch import kernels_refuse, use_kernels, want_kernels
from lineartime.ops.reference import learned_chunk_weights, to_chunks

CHUNK_BIAS_LEN = 512
"""The n of the position bias between chunks: the rotated form, which has no last chunk."""

Stream = tuple[Tensor, Tensor | None]
"""A residual stream and what is still to be added to it, which the norm of the next layer does in one kernel."""


class GatedAttentionUnit(nn.Module):
    """x + W_o (u * A v) with u, v, z = silu(W norm(x)) and A made from z by one cheap head (Eqs. 3-5).

    Without `chunk_size`, A = relu(q k^T / n + b)^2 over the row and n is `scale_len`. With it, A is that inside a chunk
    (n = chunk_size) plus linear attention across chunks. Weights start as `model.init_weights` says.

    The paper's ablations: `kernel` "softmax"; `n_heads` heads, each a slice of z and of v; without `gate` W_o takes u
    and A v side by side. n_chunks: chunks in a training row, for `chunk_pooling` "attention"."""

    def __init__(self, d_model: int = 768, *, expansion_factor: float = 2, query_key_dim: int = 128, n_heads: int = 1,
                 chunk_size: int | None = None, scale_len: int = 512, causal: bool = True, norm: str = "layer_norm",
                 activation: str = "silu", kernel: str = "relu2", gate: bool = True, document_mask: str = "exact",
                 chunk_pooling: str = "mean", chunk_parts: str = "both", overlap: bool = False,
                 first_to_all: bool = False, cls_softmax: bool = False, n_chunks: int = 1):
        super().__init__()
        self.d_inner, self.query_key_dim, self.n_heads = round(d_model * expansion_factor), query_key_dim, n_heads
        self.scale_len, self.causal, self.activation = chunk_size or scale_len, causal, ACTIVATIONS[activation]
        self.kernel, self.gate, self.cls_softmax, self.n_chunks = kernel, gate, cls_softmax, n_chunks
        self.chunking = None if chunk_size is None else Chunking(chunk_size, kernel, causal, document_mask,
                                                                 chunk_pooling, chunk_parts, overlap)
        self.norm = make_norm(norm, d_model)
        self.in_proj = SplitLinear(d_model, [self.d_inner, self.d_inner, query_key_dim])
        n_made = 2 if chunk_size is None else 6 if first_to_all else 4
        self.scale_offset = ScaleOffset(n_made, query_key_dim)
        self.rel_pos_bias = RelPosBias(bias_reach(self.scale_len, overlap))
        self.out_proj = nn.Linear(self.d_inner if gate else 2 * self.d_inner, d_model)
        self.learned_weights = chunk_pooling == "attention"
        self.impl: str | None = None
        """"reference", "triton" (kernels), or None: kernels on CUDA, where they can."""
        self.refused = what_kernels_lack({
            "n_heads": n_heads > 1, "activation": activation != "silu", "kernel": kernel != "relu2",
            "gate": not gate, "document_mask": document_mask != "exact" and chunk_size is not None,
            "chunk_pooling": self.learned_weights, "chunk_parts": chunk_parts != "both", "overlap": overlap,
            "first_to_all": first_to_all, "cls_softmax": cls_softmax})
        if self.learned_weights:
            self.chunk_scale_offset = ScaleOffset(2, query_key_dim)
            self.chunk_bias = RelPosBias(CHUNK_BIAS_LEN)
        init_gau(self)

    def forward(self, x: Tensor | Stream, layout: Layout | None = None) -> Tensor | Stream:
        """x: `[B, T, D]` of any length, or where the layer is `in_kernels` a stream, and so is then the result. layout:
        positions and documents; without one the row is one document that starts at 0."""
        x_BTD, delta_BTD = x if isinstance(x, tuple) else (x, None)
        if layout is None:
            position_1T = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
            layout = Layout(rotary(position_1T, self.query_key_dim // self.n_heads, at_least_float32(x_BTD).dtype))
        if self.in_kernels(x_BTD):
            x_BTD, normed_BTD = self.add_and_norm(x_BTD, delta_BTD)
            delta_BTD = self.out_proj(self.attend_in_kernels(normed_BTD, layout))
            return (x_BTD, delta_BTD) if isinstance(x, tuple) else x_BTD + delta_BTD
        u_BTE, v_BTE, z_BTS, heads_NBTS = self.project(x_BTD, layout)
        segment_ids_BT = layout.segment_ids_BT
        if segment_ids_BT is not None and self.n_heads > 1:
            segment_ids_BT = segment_ids_BT.repeat_interleave(self.n_heads, 0)
        v_BTE = fold_heads(v_BTE, self.n_heads)
        if self.chunking is None:
            out_BTE = self.attend_row(heads_NBTS, v_BTE, segment_ids_BT)
        else:
            out_BTE = self.attend_chunks(heads_NBTS, v_BTE, z_BTS, segment_ids_BT, self.chunking)
        return x_BTD + self.output(u_BTE, unfold_heads(out_BTE, self.n_heads))

    def in_kernels(self, x: Tensor) -> bool:
        """Whether this layer runs in kernels on inputs like x."""
        if not want_kernels(self.impl, x.device):
            return False
        c = None if self.chunking is None else self.chunking.chunk_size
        refusal = kernels_refuse(x.device, product_type(x), self.query_key_dim, self.d_inner, c) or self.refused
        return use_kernels(self.impl, x.device, refusal)

    def add_and_norm(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + delta and its norm, in one kernel where that can be."""
        norm = dict(self.norm.named_parameters())
        weight, bias = (norm["scalar"], None) if "scalar" in norm else (norm["weight"], norm["bias"])
        return ops.add_norm(x, delta, weight, bias, impl=self.impl)

    def project_whole(self, normed: Tensor) -> Tensor:
        """u, v and z before their silu in one tensor, as the kernels take them."""
        return F.linear(normed, self.in_proj.weight, self.in_proj.bias)

    def attend_in_kernels(self, normed_BTD: Tensor, layout: Layout) -> Tensor:
        """u * A v in kernels."""
        assert layout.rotary is not None
        inputs = self.project_whole(normed_BTD), self.scale_offset.gamma, self.scale_offset.beta, *layout.rotary
        if self.chunking is None:
            return ops.gated_quadratic_attention(
                *inputs, self.rel_pos_bias(normed_BTD.shape[1]), scale_len=self.scale_len, causal=self.causal,
                segment_ids_BT=layout.segment_ids_BT, impl="triton")
        return ops.gated_chunk_attention(
            *inputs, self.rel_pos_bias(self.rel_pos_bias.n), chunk_size=self.chunking.chunk_size, causal=self.causal,
            segment_ids_BT=layout.segment_ids_BT, pooling=self.chunking.pooling, impl="triton")

    def project(self, x_BTD: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, v, z and what is made from z, rotated: q and k of the quadratic part, then with chunks those of the linear
        part, then those of the first tokens. The heads of the ablation are entries of the batch."""
        u_BTE, v_BTE, z_BTS = (self.activation(part) for part in self.in_proj(self.norm(x_BTD)))
        assert layout.rotary is not None
        sin, cos = (angle[..., None, :] for angle in layout.rotary)
        made_NBTHS = self.scale_offset(z_BTS).unflatten(-1, (self.n_heads, -1))
        heads_NBTS = rope(made_NBTHS, sin, cos).to(z_BTS.dtype).flatten(-2)
        if self.n_heads > 1:
            heads_NBTS = torch.stack([fold_heads(head_BTS, self.n_heads) for head_BTS in heads_NBTS.unbind()])
        return u_BTE, v_BTE, z_BTS, heads_NBTS

    def output(self, u_BTE: Tensor, out_BTE: Tensor) -> Tensor:
        """W_o (u * A v) (Eq. 3), or without the gate W_o [u, A v]."""
        return self.out_proj(u_BTE * out_BTE if self.gate else torch.cat([u_BTE, out_BTE], dim=-1))

    def attend_row(self, heads_NBTS: Tensor, v_BTE: Tensor, segment_ids_BT: Tensor | None) -> Tensor:
        """FLASH-Quad: the whole row is one chunk."""
        q_BTS, k_BTS = heads_NBTS.unbind()
        segment_ids_BGC = None if segment_ids_BT is None else segment_ids_BT[:, None]
        return ops.quadratic_attention(
            q_BTS[:, None], k_BTS[:, None], v_BTE[:, None], self.rel_pos_bias(v_BTE.shape[1]), kernel=self.kernel,
            scale_len=self.scale_len, causal=self.causal, segment_ids_BGC=segment_ids_BGC,
            cls_softmax=self.cls_softmax)[:, 0]

    def attend_chunks(self, heads_NBTS: Tensor, v_BTE: Tensor, z_BTS: Tensor, segment_ids_BT: Tensor | None,
                      chunking: Chunking) -> Tensor:
        """FLASH: the row is cut into chunks; the last one is filled up with padding, which changes nothing."""
        n_tokens, c = v_BTE.shape[1], chunking.chunk_size
        segment_ids_BGC = chunk_ids(segment_ids_BT, v_BTE, c, chunking.causal and not self.learned_weights)
        q_quad, k_quad, q_lin, k_lin, *first = (to_chunks(head_BTS, c) for head_BTS in heads_NBTS.unbind())
        v_BGCE = to_chunks(v_BTE, c)
        a_BGG = None
        if self.learned_weights:
            assert segment_ids_BGC is not None
            a_BGG = self.chunk_weights(to_chunks(z_BTS, c), segment_ids_BGC)
        out_BGCE = attend_chunks(q_quad, k_quad, q_lin, k_lin, v_BGCE, segment_ids_BGC, chunking, self.rel_pos_bias,
                                 cls_softmax=self.cls_softmax, a_BGG=a_BGG)
        if first:
            assert segment_ids_BGC is not None
            q_all, k_all = first
            first_BGE = ops.first_to_all_attention(q_all[:, :, 0], k_all, v_BGCE, segment_ids_BGC)
            out_BGCE = torch.cat([out_BGCE[:, :, :1] + first_BGE[:, :, None], out_BGCE[:, :, 1:]], dim=2)
        return out_BGCE.flatten(1, 2)[:, :n_tokens]

    def chunk_weights(self, z_BGCS: Tensor, segment_ids_BGC: Tensor) -> Tensor:
        """The learned weight of chunk h for chunk g, `[B, G, G]`. A chunk is summarised by the mean of its z. When
        causal, chunk g asks by the summary of chunk g - 1: its own has tokens that some of its queries must not see."""
        valid_BGC = segment_ids_BGC >= 0
        z_BGS = (at_least_float32(z_BGCS) * valid_BGC[..., None]).sum(2) / valid_BGC.sum(-1, keepdim=True).clamp(min=1)
        chunk_G = torch.arange(z_BGS.shape[1], device=z_BGS.device)
        distance_GG = chunk_G - chunk_G[:, None]
        asking_BGS = torch.cat([z_BGS[:, :1], z_BGS[:, :-1]], dim=1) if self.causal else z_BGS
        hidden_BGG = ~valid_BGC.any(-1)[:, None, :] | (self.causal & (distance_GG >= 0))
        return self.weigh_chunks(asking_BGS, z_BGS, distance_GG[None]).masked_fill(hidden_BGG, 0.0)

    def weigh_chunks(self, asking_BPS: Tensor, asked_BLS: Tensor, distance_BPL: Tensor) -> Tensor:
        """Weights `[B, P, L]` between summaries of chunks so many chunks apart (Appendix A)."""
        q_BPS, k_BLS = self.chunk_scale_offset(asking_BPS)[0], self.chunk_scale_offset(asked_BLS)[1]
        return learned_chunk_weights(q_BPS, k_BLS, self.chunk_bias.at(distance_BPL), scale_len=self.n_chunks)

    def empty_cache(self, n_rows: int) -> Cache:
        """What decoding remembers of rows that have had no token yet."""
        n, s, e = n_rows * self.n_heads, self.query_key_dim // self.n_heads, self.d_inner // self.n_heads
        weight = self.out_proj.weight
        if self.chunking is None:
            return KeyValueCache(weight.new_zeros(n, 0, s), weight.new_zeros(n, 0, e), self.n_heads)
        return empty_chunk_state(n, s, e, self.n_heads, self.chunking, weight)

    def extend(self, x_BND: Tensor, layout: Layout, feed: Feed, cache: Cache) -> Tensor:
        """`forward` for the next tokens of rows whose past is in `cache`; causal only. Equal to the parallel form."""
        if isinstance(cache, ChunkState) and feed.one_each and self.steps_in_kernel(x_BND, cache):
            return x_BND + self.out_proj(self.step_in_kernel(x_BND, layout, feed, cache))
        u_BNE, v_BNE, z_BNS, heads_HBNS = self.project(x_BND, layout)
        v_BNE, feed = fold_heads(v_BNE, self.n_heads), feed.for_heads(self.n_heads)
        if isinstance(cache, KeyValueCache):
            q_BNS, k_BNS = heads_HBNS
            out_BNE = extend_row(q_BNS, k_BNS, v_BNE, feed, cache, self.rel_pos_bias, self.kernel, self.scale_len)
        else:
            assert isinstance(cache, ChunkState) and self.chunking is not None
            out_BNE = extend_chunks(heads_HBNS, v_BNE, feed, cache, self.chunking, self.rel_pos_bias, z_BNS,
                                    self.weigh_chunks if self.learned_weights else None)
        return x_BND + self.output(u_BNE, unfold_heads(out_BNE, self.n_heads))

    def steps_in_kernel(self, x: Tensor, cache: ChunkState) -> bool:
        """Whether the kernel for one token per row runs: for inference, in the type of the cache."""
        wanted = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return self.in_kernels(x) and not wanted and cache.v_BCE.dtype == product_type(x)

    def step_in_kernel(self, x_B1D: Tensor, layout: Layout, feed: Feed, cache: ChunkState) -> Tensor:
        """u * A v of one token per row in one kernel, which writes the token into the cache: out_B1E."""
        assert self.chunking is not None and layout.rotary is not None
        at = feed.at_new_token(self.chunking, cache.kv_BSE.dtype)
        sin_BR, cos_BR = (angle.expand(len(x_B1D), -1, -1)[:, 0] for angle in layout.rotary)
        uvz_BF = self.project_whole(self.add_and_norm(x_B1D)[1])[:, 0]
        out_BE = ops.chunk_decode_step(
            uvz_BF, self.scale_offset.gamma, self.scale_offset.beta, sin_BR, cos_BR, cache.bias(self.rel_pos_bias),
            cache.k_quad_BCS, cache.k_lin_BCS, cache.v_BCE, cache.kv_BSE, at.offset_B, at.first_B,
            at.weight_B11[:, 0, 0], impl="triton")
        if at.full is not None:
            cache.close(at)
        return out_BE[:, None]


def what_kernels_lack(fields: dict[str, bool]) -> str:
    """The first field whose value the kernels do not have, in words; "" for none."""
    return next((f"kernels do not have this {name}" for name, lacks in fields.items() if lacks), "")


def init_gau(layer: GatedAttentionUnit, std: float = 0.02) -> None:
    """Code 6's and Code 8's initial values: normal(0, std) for matrices, normal(0, 0.02) for scales and the position
    bias, 0 for offsets."""
    matrices = [layer.in_proj.weight, layer.out_proj.weight]
    scales = [layer.scale_offset.gamma, *layer.rel_pos_bias.parameters()]
    offsets = [layer.in_proj.bias, layer.out_proj.bias, layer.scale_offset.beta]
    if layer.learned_weights:
        scales += [layer.chunk_scale_offset.gamma, *layer.chunk_bias.parameters()]
        offsets += [layer.chunk_scale_offset.beta]
    for matrix in matrices:
        nn.init.normal_(matrix, std=std)
    for scale in scales:
        nn.init.normal_(scale, std=0.02)
    for offset in offsets:
        nn.init.zeros_(offset)
    for name, parameter in layer.norm.named_parameters():
        nn.init.zeros_(parameter) if name == "bias" else nn.init.ones_(parameter)
