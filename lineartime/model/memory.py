"""Options beyond the paper for a longer memory of the linear half: keys made from several tokens (in quadratic
attention too), a gate on what is written. All are off by default; FLASH and FLASH-Quad do not use this file."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.base.ranks import ALONE, Ranks
from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import fold_heads, unfold_heads
from lineartime.ops.context import with_neighbours
from lineartime.ops.dtypes import at_least_float32

CONV_NOISE = 0.3
"""Standard deviation of the noise on a new convolution's weights: keys differ by their neighbours from the start."""
GATE_STD = 0.1
"""Standard deviation of a new gate's weights: the gates of all tokens start near one half."""


class KeyConv(nn.Module):
    """A depthwise convolution of z over `key_conv` tokens: a token and those before it, or if not causal those around
    it. Other documents and padding count as 0."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.n_after = 0 if config.causal else config.key_conv // 2
        self.taps = nn.Parameter(torch.empty(config.key_conv, config.n_heads * config.qk_width))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set the initial values: normal(0, 0.3), plus 1 for the token itself."""
        nn.init.normal_(self.taps, std=CONV_NOISE)
        self.taps[-1 - self.n_after] += 1

    def forward(self, z_BTS: Tensor, segment_ids_BT: Tensor | None, ranks: Ranks = ALONE) -> Tensor:
        """The convolution of rows, the sum over k of taps[k] z[t + k - (K - 1 - n_after)]: `[B, T, S]` of z's dtype.
        segment_ids_BT, ranks: see `layers.SequenceInfo`."""
        n_taps, n_tokens = len(self.taps), z_BTS.shape[1]
        around = (n_taps - 1 - self.n_after, self.n_after)
        if segment_ids_BT is None:
            return weigh_tokens(F.pad(z_BTS, [0, 0, *around]), self.taps, None)
        if ranks.size == 1:
            row_BLS, ids_BL = F.pad(z_BTS, [0, 0, *around]), F.pad(segment_ids_BT, around, value=-1)
        else:
            row_BLS, ids_BL = with_neighbours(z_BTS, segment_ids_BT, around, ranks)
        return weigh_tokens(row_BLS, self.taps, [ids_BL[:, k : k + n_tokens] == segment_ids_BT for k in range(n_taps)])

    def add_to(self, cache: Cache) -> None:
        """Give an empty cache the places for the last tokens' z."""
        like = next(iter(cache.tensors().values()))
        cache.z_BKS = like.new_zeros(len(like), len(self.taps), self.taps.shape[1] // self.n_heads)

    def extend(self, z_BNS: Tensor, inputs: DecodeInputs, cache: Cache) -> Tensor:
        """`forward` for the next N tokens of rows whose last z are in `cache`, which is updated: `[B, N, S]`."""
        assert cache.z_BKS is not None
        n_taps = len(self.taps)
        place_K = torch.arange(n_taps, device=z_BNS.device)
        before_BKS = unfold_heads(cache.z_BKS, self.n_heads)
        index_BK1 = ((inputs.seq_lens_B[:, None] + place_K) % n_taps)[..., None]  # the oldest token first
        row_BLS = torch.cat([before_BKS.gather(1, index_BK1.expand_as(before_BKS)), z_BNS], dim=1)
        first_BN = inputs.position_BN - inputs.start_BN  # tokens of its document before each token
        visible_KBN = [first_BN >= n_taps - 1 - tap for tap in range(n_taps)]
        last_BK1 = (inputs.n_new_B[:, None] + place_K)[..., None]  # the row's last K tokens, for the cache
        last_BKS = row_BLS.gather(1, last_BK1.expand_as(before_BKS))
        # Position p is at place p modulo K. The step of a token writes what it wrote if it is repeated.
        index_BK1 = ((inputs.seq_lens_B + inputs.n_new_B)[:, None] + place_K)[..., None] % n_taps
        kept_BKS = torch.zeros_like(last_BKS).scatter(1, index_BK1.expand_as(last_BKS), last_BKS)
        if kept_BKS.requires_grad:  # what was read stays as it is, for its gradient
            cache.z_BKS = fold_heads(kept_BKS, self.n_heads)
        else:  # in place, for a captured step
            cache.z_BKS.copy_(fold_heads(kept_BKS, self.n_heads))
        return weigh_tokens(row_BLS[:, 1:], self.taps, visible_KBN)


def weigh_tokens(row_BLS: Tensor, taps_KS: Tensor, visible_KBT: Sequence[Tensor] | None) -> Tensor:
    """The sum over k of taps[k] row[t + k], where it is visible: `[B, T, S]` of row's dtype, T = L - K + 1."""
    n_tokens, out_BTS = row_BLS.shape[1] - len(taps_KS) + 1, row_BLS.new_zeros(())
    for k, weight_S in enumerate(taps_KS):
        part_BTS = row_BLS[:, k : k + n_tokens]
        if visible_KBT is not None:
            part_BTS = torch.where(visible_KBT[k][..., None], part_BTS, 0.0)
        out_BTS = out_BTS + part_BTS * weight_S
    return out_BTS.to(row_BLS.dtype)


class WriteGate(nn.Module):
    """The parameters of `write_gate`, by which the linear half's key is multiplied."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_heads * config.qk_width))
        self.bias = nn.Parameter(torch.empty(config.n_heads))

    def init_weights(self) -> None:
        """Set the initial values: normal(0, 0.1), bias 0."""
        nn.init.normal_(self.weight, std=GATE_STD)
        nn.init.zeros_(self.bias)


def write_gate(conv_BTS: Tensor, gate_S: Tensor, gate_bias_H: Tensor) -> Tensor:
    """sigmoid(w z + b) of each token and attention head: gate_BTH, in float32 at least. Heads are columns of S."""
    product_BTS = at_least_float32(conv_BTS) * gate_S
    return torch.sigmoid(product_BTS.unflatten(-1, (len(gate_bias_H), -1)).sum(-1) + gate_bias_H)


def gated_keys(config: ModelConfig, k_BTHK: Tensor, conv_BTS: Tensor,
               gate: WriteGate | None) -> tuple[Tensor, Tensor | None]:
    """The linear half's keys times their gates, `[B, T, H, K]`; and gate_BT, which chunk_pooling "written" divides by
    and in which B counts rows times heads, else None. conv_BTS: what the keys are made from."""
    if gate is None:
        return k_BTHK, None
    gate_BTH = write_gate(conv_BTS, gate.weight, gate.bias)
    gate_BT = gate_BTH.movedim(-1, 1).flatten(0, 1) if config.chunk_pooling == "written" else None
    return (k_BTHK * gate_BTH[..., None]).to(k_BTHK.dtype), gate_BT
