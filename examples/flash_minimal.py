"""The paper's FLASH in plain PyTorch, from Codes 2, 4 and 8: read this first.

`Flash(...).load_state_dict(model.state_dict())` takes the weights of a FLASH of `lineartime` and
gives the same logits, in float64 to 1e-12 (tests/test_examples.py). It leaves out what the package
adds: packed documents, padding, rows that end inside a chunk, decoding, kernels.

Shape letters: B rows, T tokens, G chunks of C tokens, D the width of the model, E twice that, S =
128, V tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoid(position_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """sin and cos of position x 10000^(-i / half): two [T, width / 2], the angles of Codes 2 and
    3."""
    half = width // 2
    angle_TR = position_T.double()[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return angle_TR.sin(), angle_TR.cos()


def rope(x: Tensor, position_T: Tensor) -> Tensor:
    """Rotate the two halves of x [..., T, width] by the angles of its positions (Code 3)."""
    sin, cos = (angle.to(x.dtype) for angle in sinusoid(position_T, x.shape[-1]))
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


class RelPosBias(nn.Module):
    """b[i, j] depends on j - i alone: a table for short chunks, two rotated vectors for long ones
    (Code 4)."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n
        if n < 512:
            self.weight = nn.Parameter(0.02 * torch.randn(2 * n - 1))
        else:
            self.a, self.b = (nn.Parameter(0.02 * torch.randn(128)) for _ in range(2))

    def forward(self) -> Tensor:
        place_C = torch.arange(self.n)
        if self.n < 512:
            return self.weight[place_C[None, :] - place_C[:, None] + self.n - 1]
        a_CR, b_CR = rope(self.a.expand(self.n, -1), place_C), rope(self.b.expand(self.n, -1), place_C)
        return a_CR @ b_CR.T


class ScaleOffset(nn.Module):
    """Four heads from one base: quadratic query and key, linear query and key (Eq. 5)."""

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(0.02 * torch.randn(4, width))  # 0 would attend to nothing, and learn nothing
        self.beta = nn.Parameter(torch.zeros(4, width))

    def forward(self, z_BTS: Tensor, position_T: Tensor) -> Tensor:
        return rope(z_BTS * self.gamma[:, None, None] + self.beta[:, None, None], position_T)  # [4, B, T, S]


class FlashLayer(nn.Module):
    """x + W_o (u * (quadratic attention in each chunk + linear attention across chunks) v) (Code
    8)."""

    def __init__(self, d: int, chunk_size: int, causal: bool, s: int = 128, expansion: int = 2):
        super().__init__()
        self.e, self.s, self.c, self.causal = expansion * d, s, chunk_size, causal
        self.norm = nn.LayerNorm(d)
        self.in_proj = nn.Linear(d, 2 * self.e + s)
        self.scale_offset = ScaleOffset(s)
        self.rel_pos_bias = RelPosBias(chunk_size)
        self.out_proj = nn.Linear(self.e, d)

    def forward(self, x_BTD: Tensor) -> Tensor:
        u_BTE, v_BTE, z_BTS = F.silu(self.in_proj(self.norm(x_BTD))).split([self.e, self.e, self.s], dim=-1)
        heads = self.scale_offset(z_BTS, torch.arange(x_BTD.shape[1]))
        # Cut every row into chunks: [B, G, C, ...].
        q_quad, k_quad, q_lin, k_lin = (head.unflatten(1, (-1, self.c)) for head in heads)
        v_BGCE = v_BTE.unflatten(1, (-1, self.c))
        # Quadratic attention inside a chunk: relu(q k / n + b)^2, where n is the chunk size.
        a_BGCC = F.relu(q_quad @ k_quad.transpose(-1, -2) / self.c + self.rel_pos_bias()).square()
        if self.causal:
            a_BGCC = a_BGCC.tril()
        # Linear attention: each chunk reads the mean of k v over the chunks before it, or over all
        # chunks.
        kv_BGSE = k_lin.transpose(-1, -2) @ v_BGCE / self.c
        if self.causal:
            n_before = torch.arange(kv_BGSE.shape[1], dtype=x_BTD.dtype).clamp(min=1)[:, None, None]
            kv_BGSE = (kv_BGSE.cumsum(1) - kv_BGSE) / n_before
        else:
            kv_BGSE = kv_BGSE.mean(1, keepdim=True)
        attended_BTE = (a_BGCC @ v_BGCE + q_lin @ kv_BGSE).flatten(1, 2)
        return x_BTD + self.out_proj(u_BTE * attended_BTE)


class Flash(nn.Module):
    """Embedding, ScaledSin positions (Code 2), layers, norm, and a head tied to the embedding."""

    def __init__(self, vocab: int, d: int, n_layers: int, chunk_size: int, causal: bool = True, s: int = 128):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.abs_pos = nn.ParameterDict({"scalar": torch.full((1,), d**-0.5)})
        self.layers = nn.ModuleList(FlashLayer(d, chunk_size, causal, s) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d)
        self.head_bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT)
        sin_cos_TD = torch.cat(sinusoid(torch.arange(ids_BT.shape[1]), x_BTD.shape[-1]), dim=-1)
        x_BTD = x_BTD + self.abs_pos["scalar"] * sin_cos_TD.to(x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.norm(x_BTD) @ self.embed.weight.T + self.head_bias  # logits_BTV
