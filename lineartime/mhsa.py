"""The Transformer's two layers: multi-head self-attention, and the feed-forward network (MLP, or GLU of Eqs. 1-2)."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.cache import ChunkState, Feed, KeyValueCache
from lineartime.layers import ACTIVATIONS, Layout, make_norm, rope


class MultiHeadAttention(nn.Module):
    """x + W_o concat_h(softmax(q_h k_h^T / sqrt(K)) v_h), with PyTorch's fused attention."""

    def __init__(self, d_model: int, n_heads: int, *, causal: bool = True, norm: str = "layer_norm"):
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.norm = make_norm(norm, d_model)
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x_BTD: Tensor, layout: Layout) -> Tensor:
        q_BTHK, k_BTHK, v_BTHK = self.project(x_BTD, layout)
        if layout.boundaries is None:
            q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
            out_BTHK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=self.causal).transpose(1, 2)
        else:
            q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BTHK, v_BTHK))
            out_BTHK = attend_documents(q, k, v, layout.boundaries, self.causal).view_as(q_BTHK)
        return x_BTD + self.out_proj(out_BTHK.flatten(2))

    def project(self, x_BTD: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        q_BTHK, k_BTHK, v_BTHK = self.in_proj(self.norm(x_BTD)).unflatten(-1, (3, self.n_heads, -1)).unbind(2)
        if layout.rotary is not None:
            sin, cos = (angle[..., None, :] for angle in layout.rotary)
            q_BTHK, k_BTHK = (rope(x, sin, cos).to(v_BTHK.dtype) for x in (q_BTHK, k_BTHK))
        return q_BTHK, k_BTHK, v_BTHK

    def extend(self, x_BND: Tensor, layout: Layout, feed: Feed, cache: ChunkState | KeyValueCache) -> Tensor:
        """`forward` for the next tokens of rows whose past is in `cache`; causal only."""
        assert isinstance(cache, KeyValueCache)
        q_BNHK, k_BNHK, v_BNHK = self.project(x_BND, layout)
        k_BLHK, v_BLHK = cache.append(k_BNHK, v_BNHK, feed)
        visible_B1NL = feed.visible(k_BLHK.shape[1])[:, None]
        q_BHNK, k_BHLK, v_BHLK = (x.transpose(1, 2) for x in (q_BNHK, k_BLHK, v_BLHK))
        out_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHLK, v_BHLK, attn_mask=visible_B1NL)
        return x_BND + self.out_proj(out_BHNK.transpose(1, 2).flatten(2))


def attend_documents(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, boundaries: list[int], causal: bool) -> Tensor:
    """Attention of each document to itself; all rows laid end to end as `[B T, H, K]`, no mask of T x T anywhere.

    On CUDA in a half type one call of variable-length attention, elsewhere a slice per document."""
    if q_THK.is_cuda and q_THK.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        cumulative = torch.tensor(boundaries, dtype=torch.int32, device=q_THK.device)
        longest = max(stop - start for start, stop in itertools.pairwise(boundaries))
        window = (-1, 0) if causal else (-1, -1)
        out_THK = varlen_attn(q_THK, k_THK, v_THK, cumulative, cumulative, longest, longest, window_size=window)
        assert isinstance(out_THK, Tensor)
        return out_THK
    out = []
    for start, stop in itertools.pairwise(boundaries):
        q_HTK, k_HTK, v_HTK = (x[start:stop].transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
        out.append(F.scaled_dot_product_attention(q_HTK, k_HTK, v_HTK, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(out)


class FeedForward(nn.Module):
    """x + W_o act(W_u x), or with `glu` x + W_o (act(W_u x) * W_v x) (Eqs. 1-2)."""

    def __init__(self, d_model: int, d_inner: int, *, glu: bool = False, activation: str = "gelu",
                 norm: str = "layer_norm"):
        super().__init__()
        self.glu, self.activation = glu, ACTIVATIONS[activation]
        self.norm = make_norm(norm, d_model)
        self.in_proj = nn.Linear(d_model, 2 * d_inner if glu else d_inner)
        self.out_proj = nn.Linear(d_inner, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = self.in_proj(self.norm(x_BTD))
        if self.glu:
            u_BTE, v_BTE = x.chunk(2, dim=-1)
            return x_BTD + self.out_proj(self.activation(u_BTE) * v_BTE)
        return x_BTD + self.out_proj(self.activation(x))
