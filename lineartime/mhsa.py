"""The Transformer's two layers: multi-head self-attention of every kind, and the feed-forward network (MLP or GLU)."""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime import ops
from lineartime.chunks import Chunking, attend_chunks, bias_reach, chunk_ids, fold_heads, unfold_heads
from lineartime.decoding.cache import Cache, ChunkState, Feed, KeyValueCache, PrefixState, RowCache
from lineartime.decoding.extend import (
    empty_chunk_state,
    extend_chunks,
    extend_linear,
    extend_row,
    extend_rowmajor_axial,
    extend_softmax,
)
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
from lineartime.ops.reference import to_chunks


class MultiHeadAttention(nn.Module):
    """x + W_o concat_h(attention of head h), by one of five kinds of attention.

    | attn_type, attn_kernel | model | attention |
    |---|---|---|
    | quadratic, softmax | Transformers | softmax(q k^T / sqrt(K)) v, by PyTorch's fused attention |
    | quadratic, relu2 | ablation | relu(q k^T / n + b)^2 v, as in a GAU |
    | mixed_chunk | MC-TFM++ | the same in a chunk, and linear attention across chunks |
    | linear, relu | Performer | phi(q) sum phi(k) v / phi(q) sum phi(k), phi(x) = relu(x) + 1e-3 |
    | rowmajor_axial, softmax | Combiner | softmax over the tokens of a chunk and a summary of every other |

    With `gate`, W_o takes act(W_u x) * attention instead (Eq. 3)."""

    def __init__(self, d_model: int, n_heads: int, *, attn_type: str = "quadratic", kernel: str = "softmax",
                 chunk_size: int | None = None, scale_len: int = 512, causal: bool = True, norm: str = "layer_norm",
                 activation: str = "gelu", gate: bool = False, prefix_sum: str | None = None,
                 document_mask: str = "exact", chunk_pooling: str = "mean", chunk_parts: str = "both",
                 overlap: bool = False):
        super().__init__()
        self.n_heads, self.head_dim, self.causal, self.kernel = n_heads, d_model // n_heads, causal, kernel
        self.attn_type, self.gate, self.activation = attn_type, gate, ACTIVATIONS[activation]
        self.chunk_size, self.scale_len, self.prefix_sum = chunk_size, chunk_size or scale_len, prefix_sum
        self.norm = make_norm(norm, d_model)
        self.in_proj = nn.Linear(d_model, (4 if gate else 3) * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.chunking = None
        if attn_type == "mixed_chunk":
            assert chunk_size is not None
            self.chunking = Chunking(chunk_size, kernel, causal, document_mask, chunk_pooling, chunk_parts, overlap)
            self.scale_offset = ScaleOffset(2, d_model)
        if attn_type == "rowmajor_axial":
            self.summary_proj, self.summary_key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
            self.summary_norm = make_norm(norm, d_model)
        self.rel_pos_bias = RelPosBias(bias_reach(self.scale_len, overlap)) if kernel == "relu2" else None

    def forward(self, x_BTD: Tensor, layout: Layout) -> Tensor:
        x_BTD, residual = self.norm(x_BTD), x_BTD
        projected = self.in_proj(x_BTD).unflatten(-1, (-1, self.n_heads, self.head_dim))
        q_BTHK, k_BTHK, v_BTHK, *gate = projected.unbind(2)
        if self.chunking is not None:
            out_BTD = self.attend_chunks(q_BTHK, k_BTHK, v_BTHK, layout, self.chunking)
        else:
            q_BTHK, k_BTHK = self.rotate(q_BTHK, layout), self.rotate(k_BTHK, layout)
            if self.attn_type == "rowmajor_axial":
                out_BTD = self.attend_rowmajor_axial(x_BTD, q_BTHK, k_BTHK, v_BTHK, layout)
            elif self.attn_type == "linear":
                out_BTD = self.attend_linear(q_BTHK, k_BTHK, v_BTHK, layout)
            elif self.kernel == "relu2":
                out_BTD = self.attend_relu2(q_BTHK, k_BTHK, v_BTHK, layout)
            else:
                out_BTD = self.attend_softmax(q_BTHK, k_BTHK, v_BTHK, layout)
        return residual + self.output(out_BTD, gate)

    def rotate(self, x_BTHK: Tensor, layout: Layout) -> Tensor:
        """RoPE by the positions of the layout, where the model has it."""
        if layout.rotary is None:
            return x_BTHK
        sin, cos = (angle[..., None, :] for angle in layout.rotary)
        return rope(x_BTHK, sin, cos).to(x_BTHK.dtype)

    def output(self, out_BTD: Tensor, gate: list[Tensor]) -> Tensor:
        """W_o, behind the gate where there is one."""
        if gate:
            out_BTD = self.activation(gate[0].flatten(2)) * out_BTD
        return self.out_proj(out_BTD)

    def attend_softmax(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, layout: Layout) -> Tensor:
        """The Transformers': fused, a document at a time, no mask of T x T anywhere. On CUDA in a half type the
        documents are one call of variable-length attention."""
        if layout.boundaries is not None and q_BTHK.is_cuda and q_BTHK.dtype in (torch.bfloat16, torch.float16):
            return attend_varlen(q_BTHK, k_BTHK, v_BTHK, layout.boundaries, self.causal).flatten(2)
        parts = []
        for qkv in by_document((q_BTHK, k_BTHK, v_BTHK), layout):
            q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in qkv)
            out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=self.causal)
            parts.append(out_BHTK.transpose(1, 2))
        return torch.cat(parts, dim=1).view_as(v_BTHK).flatten(2)

    def attend_relu2(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, layout: Layout) -> Tensor:
        """A GAU's kernel in place of softmax, one position bias for all heads."""
        assert self.rel_pos_bias is not None
        q, k, v = (fold_heads(x.flatten(2), self.n_heads)[:, None] for x in (q_BTHK, k_BTHK, v_BTHK))
        ids_BT = layout.segment_ids_BT
        ids_BGC = None if ids_BT is None else ids_BT.repeat_interleave(self.n_heads, 0)[:, None]
        out = ops.quadratic_attention(q, k, v, self.rel_pos_bias(q.shape[2]), scale_len=self.scale_len,
                                      causal=self.causal, segment_ids_BGC=ids_BGC)[:, 0]
        return unfold_heads(out, self.n_heads)

    def chunk_heads(self, q_BTHK: Tensor, k_BTHK: Tensor, layout: Layout) -> Tensor:
        """q and k of the quadratic part, then of the linear part: the same, scaled and offset per dimension. Rotated,
        and heads folded into the batch: `[B H, T, 4, K]`."""
        q_lin_BTD = q_BTHK.flatten(2) * self.scale_offset.gamma[0] + self.scale_offset.beta[0]
        k_lin_BTD = k_BTHK.flatten(2) * self.scale_offset.gamma[1] + self.scale_offset.beta[1]
        heads = (q_BTHK, k_BTHK, q_lin_BTD.view_as(q_BTHK), k_lin_BTD.view_as(k_BTHK))
        return torch.stack([fold_heads(self.rotate(x, layout).flatten(2), self.n_heads) for x in heads], dim=2)

    def attend_chunks(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, layout: Layout,
                      chunking: Chunking) -> Tensor:
        """MC-TFM++: mixed chunk attention with every head a softmax head."""
        n_tokens, c = v_BTHK.shape[1], chunking.chunk_size
        q_quad, k_quad, q_lin, k_lin = (to_chunks(x, c) for x in self.chunk_heads(q_BTHK, k_BTHK, layout).unbind(2))
        v_BTK, ids_BT = fold_heads(v_BTHK.flatten(2), self.n_heads), layout.segment_ids_BT
        ids_BT = None if ids_BT is None else ids_BT.repeat_interleave(self.n_heads, 0)
        ids_BGC = chunk_ids(ids_BT, v_BTK, c, chunking.causal)
        out_BGCK = attend_chunks(q_quad, k_quad, q_lin, k_lin, to_chunks(v_BTK, c), ids_BGC, chunking,
                                 self.rel_pos_bias)
        return unfold_heads(out_BGCK.flatten(1, 2)[:, :n_tokens], self.n_heads)

    def attend_linear(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, layout: Layout) -> Tensor:
        """Performer, a document at a time."""
        parts = [ops.performer_attention(*qkv, causal=self.causal, prefix_sum=self.prefix_sum or "blocks")
                 for qkv in by_document((q_BTHK, k_BTHK, v_BTHK), layout)]
        return torch.cat(parts, dim=1).view_as(v_BTHK).flatten(2)

    def attend_rowmajor_axial(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor,
                              layout: Layout) -> Tensor:
        """Combiner, a document at a time: its rows of C tokens begin where the document does."""
        parts = []
        angles = () if layout.rotary is None else tuple(a.expand(len(x_BTD), -1, -1) for a in layout.rotary)
        for q, k, v, x, *sin_cos in by_document((q_BTHK, k_BTHK, v_BTHK, x_BTD, *angles), layout):
            parts.append(self.axial(x, q, k, v, sin_cos)[0])
        return torch.cat(parts, dim=1).view_as(v_BTHK).flatten(2)

    def axial(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, angles: list[Tensor],
              earlier: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`rowmajor_axial_attention` of one document, with summary keys RoPE(W_b norm(x + W_a vs)) at each token's own
        place."""
        assert self.chunk_size is not None
        c = self.chunk_size

        def summarise(vs_BGCHK: Tensor) -> Tensor:
            summary_BGCD = to_chunks(x_BTD, c) + self.summary_proj(vs_BGCHK.flatten(3))
            key_BGCHK = self.summary_key(self.summary_norm(summary_BGCD)).unflatten(-1, (self.n_heads, -1))
            if not angles:
                return key_BGCHK
            sin, cos = (to_chunks(angle, c)[..., None, :] for angle in angles)
            return rope(key_BGCHK, sin, cos).to(key_BGCHK.dtype)

        return ops.rowmajor_axial_attention(q_BTHK, k_BTHK, v_BTHK, summarise, chunk_size=c, causal=self.causal,
                                            earlier=earlier)

    def axial_at(self, layout: Layout, parts: tuple[Tensor, ...], first: int,
                 earlier: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`axial` of tokens from position `first` on: `decoding.Attend`."""
        x_BTD, q_BTHK, k_BTHK, v_BTHK = parts
        angles: list[Tensor] = []
        if layout.rotary is not None:
            position_1T = torch.arange(first, first + x_BTD.shape[1], device=x_BTD.device)[None]
            angles = list(rotary(position_1T, self.head_dim, layout.rotary[0].dtype))
        return self.axial(x_BTD, q_BTHK, k_BTHK, v_BTHK, angles, earlier)

    def empty_cache(self, n_rows: int) -> Cache:
        """What decoding remembers of rows that have had no token yet."""
        h, k, weight = self.n_heads, self.head_dim, self.out_proj.weight

        def zeros(*shape: int) -> Tensor:
            return weight.new_zeros(n_rows, *shape)

        if self.chunking is not None:
            return empty_chunk_state(n_rows * h, k, k, h, self.chunking, weight)
        if self.attn_type == "linear":
            return PrefixState(at_least_float32(zeros(h, k, k + 1)))
        if self.attn_type == "rowmajor_axial":
            assert self.chunk_size is not None
            none_B, c = torch.zeros(n_rows, dtype=torch.long, device=weight.device), self.chunk_size
            return RowCache(none_B, none_B.clone(), zeros(c, h * k), zeros(c, h, k), zeros(c, h, k), zeros(c, h, k),
                            zeros(0, c, h, k), zeros(0, c, h, k))
        return KeyValueCache(weight.new_zeros(n_rows * h, 0, k), weight.new_zeros(n_rows * h, 0, k), h)

    def extend(self, x_BND: Tensor, layout: Layout, feed: Feed, cache: Cache) -> Tensor:
        """`forward` for the next tokens of rows whose past is in `cache`; causal only."""
        x_BND, residual = self.norm(x_BND), x_BND
        projected = self.in_proj(x_BND).unflatten(-1, (-1, self.n_heads, self.head_dim))
        q_BNHK, k_BNHK, v_BNHK, *gate = projected.unbind(2)
        if isinstance(cache, ChunkState):
            assert self.chunking is not None
            heads = self.chunk_heads(q_BNHK, k_BNHK, layout).movedim(2, 0)
            v = fold_heads(v_BNHK.flatten(2), self.n_heads)
            out = extend_chunks(heads, v, feed.for_heads(self.n_heads), cache, self.chunking, self.rel_pos_bias)
            return residual + self.output(unfold_heads(out, self.n_heads), gate)
        q_BNHK, k_BNHK = self.rotate(q_BNHK, layout), self.rotate(k_BNHK, layout)
        if isinstance(cache, PrefixState):
            out_BND = extend_linear(q_BNHK, k_BNHK, v_BNHK, feed, cache)
        elif isinstance(cache, RowCache):
            out_BND = extend_rowmajor_axial(x_BND, q_BNHK, k_BNHK, v_BNHK, feed, cache, partial(self.axial_at, layout))
        else:
            assert isinstance(cache, KeyValueCache)
            q, k, v = (fold_heads(x.flatten(2), self.n_heads) for x in (q_BNHK, k_BNHK, v_BNHK))
            if self.rel_pos_bias is not None:
                out = extend_row(q, k, v, feed.for_heads(self.n_heads), cache, self.rel_pos_bias, self.kernel,
                                 self.scale_len)
            else:
                out = extend_softmax(q, k, v, feed, cache)
            out_BND = unfold_heads(out, self.n_heads)
        return residual + self.output(out_BND, gate)


def by_document(parts: tuple[Tensor, ...], layout: Layout) -> list[list[Tensor]]:
    """The rows' documents, each as a batch of one; without documents the batch as it is. In their order they make up
    the rows laid end to end."""
    if layout.boundaries is None:
        return [list(parts)]
    flat = [part.flatten(0, 1)[None] for part in parts]
    return [[part[:, start:stop] for part in flat] for start, stop in itertools.pairwise(layout.boundaries)]


def attend_varlen(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, boundaries: list[int], causal: bool) -> Tensor:
    """Attention of each document to itself, all rows laid end to end, by one call of CUDA's variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    cumulative = torch.tensor(boundaries, dtype=torch.int32, device=q_BTHK.device)
    longest = max(stop - start for start, stop in itertools.pairwise(boundaries))
    q_THK, k_THK, v_THK = (x.flatten(0, 1) for x in (q_BTHK, k_BTHK, v_BTHK))
    window = (-1, 0) if causal else (-1, -1)
    out_THK = varlen_attn(q_THK, k_THK, v_THK, cumulative, cumulative, longest, longest, window_size=window)
    assert isinstance(out_THK, Tensor)
    return out_THK.view_as(q_BTHK)


class FeedForward(nn.Module):
    """x + W_o act(W_u x), or with `glu` x + W_o (act(W_u x) * W_v x) (Eqs. 1-2)."""

    def __init__(self, d_model: int, d_inner: int, *, glu: bool = False, activation: str = "gelu",
                 norm: str = "layer_norm"):
        super().__init__()
        self.glu, self.activation = glu, ACTIVATIONS[activation]
        self.norm = make_norm(norm, d_model)
        self.in_proj = SplitLinear(d_model, [d_inner, d_inner] if glu else [d_inner])
        self.out_proj = nn.Linear(d_inner, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        u_BTE, *v = self.in_proj(self.norm(x_BTD))
        inner_BTE = self.activation(u_BTE) * v[0] if self.glu else self.activation(u_BTE)
        return x_BTD + self.out_proj(inner_BTE)
