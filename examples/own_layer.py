"""A layer of one's own: softmax attention over the last 64 tokens of the document.

    cd examples
    lineartime train flash --data DATA --out RUN --set layers=gau,gau,own_layer:SlidingWindow

A layer has the parts that `__init__` makes, `branch`, which training and decoding share, and
`empty_cache`. Norm, residual, padding and the state's file are of the base class. In names of
tensors B are rows, T tokens, D features, G blocks of C tokens with M keys, H heads of width K.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime import Cache, LastTokens, ModelConfig, ResidualLayer, SequenceInfo


class SlidingWindow(ResidualLayer):
    """softmax(q k / K^1/2 + b) v over the last tokens, with a learned b for each distance."""

    window = 64  # so many tokens, in a subclass perhaps others

    def __init__(self, config: ModelConfig):
        if not config.causal:
            raise ValueError("a sliding window sees the past alone: causal = true")
        super().__init__(config, in_sizes=(config.d_model,) * 3)  # makes self.in_proj, of q, k and v
        self.n_heads = math.gcd(config.d_model, 4)
        self.distance_bias = nn.Embedding(self.window, self.n_heads)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.init_weights(config.init_std)  # for the layer alone; a model draws its own

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        w, n_tokens = self.window, normed_BTD.shape[1]
        q_BTD, k_BTD, v_BTD = self.in_proj(normed_BTD).split(self.in_sizes, dim=-1)
        # Keys and values with those of the w tokens before, which in decoding are in the cache.
        kv_BLF = info.with_last(torch.cat([k_BTD, v_BTD], dim=-1), w, cache)
        # Blocks of C queries, each with w + C keys: memory grows with T, not with its square.
        block = w if n_tokens > 1 else 1
        fill = -n_tokens % block
        q_BGHCK = self.heads(F.pad(q_BTD, [0, 0, 0, fill]).unflatten(1, (-1, block)))
        kv_BGMF = F.pad(kv_BLF, [0, 0, 0, fill]).unfold(1, w + block, block).mT
        k_BGHMK, v_BGHMK = map(self.heads, kv_BGMF.chunk(2, dim=-1))
        # A query sees the w nearest tokens up to itself, as far as they are of its document.
        age_BGC = F.pad(info.age_BT, [0, fill]).unflatten(1, (-1, block))
        index_M = torch.arange(w + block, device=q_BTD.device)
        back_CM = index_M[w:, None] - index_M
        seen_BGCM = (back_CM >= 0) & (back_CM < w) & (back_CM <= age_BGC[..., None])
        bias_HCM = self.distance_bias(back_CM.clamp(0, w - 1)).movedim(-1, 0)
        mask_BGHCM = bias_HCM.masked_fill(~seen_BGCM[:, :, None], -math.inf)
        scores_BGHCM = q_BGHCK / q_BGHCK.shape[-1] ** 0.5 @ k_BGHMK.mT + mask_BGHCM
        out_BGCHK = (scores_BGHCM.softmax(-1) @ v_BGHMK).transpose(2, 3)
        return self.project_out(out_BGCHK.flatten(3).flatten(1, 2)[:, :n_tokens])

    def heads(self, x_BGCD: Tensor) -> Tensor:
        return x_BGCD.unflatten(-1, (self.n_heads, -1)).transpose(2, 3)

    def empty_cache(self, n_rows: int) -> LastTokens:
        return LastTokens(self.like.new_zeros(n_rows, self.window, 2 * self.config.d_model))
