"""Heads with the options beyond the paper: keys from several tokens, a gate on what is written, no RoPE on the linear
half. docs/paper.md has the options' names."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import rope


class HeadOptions(NamedTuple):
    """How heads are made beyond scale, offset and RoPE: by default as FLASH's."""

    taps_KS: Tensor | None = None
    """Weights of the convolution of z over K tokens that keys are made from (`key_conv`), the last token's last."""
    n_after: int = 0
    """How many of the K tokens come after a token."""
    from_conv: tuple[int, ...] = ()
    """The heads that are made from the convolution: 3, the linear half's key,
    and with `local_key_conv` 1; without chunks 1."""
    gate_S: Tensor | None = None
    """Weights of the gate on the linear half's key, attention heads side by side (`linear_gate`)."""
    gate_bias_H: Tensor | None = None
    linear_rope: bool = True
    """Whether the linear half's heads are rotated."""
    divisor: float | None = None
    """What the linear half's query is divided by (`linear_divisor`)."""


def convolve(z_BTS: Tensor, taps_KS: Tensor, n_after: int, segment_ids_BT: Tensor | None) -> Tensor:
    """The sum over k of taps[k] z[t + k - (K - 1 - n_after)], where that is a token of t's document: `[B, T, S]` of z's
    dtype. segment_ids_BT: the document of each token, or None for rows of one document."""
    around = (len(taps_KS) - 1 - n_after, n_after)
    row_BLS = F.pad(z_BTS, [0, 0, *around])
    if segment_ids_BT is None:
        return weigh_tokens(row_BLS, taps_KS, None)
    return weigh_own(row_BLS, F.pad(segment_ids_BT, around, value=-1), taps_KS, segment_ids_BT)


def weigh_own(row_BLS: Tensor, ids_BL: Tensor, taps_KS: Tensor, segment_ids_BT: Tensor) -> Tensor:
    """`weigh_tokens` of those of a token's document. ids_BL: the documents of the row."""
    n_tokens = segment_ids_BT.shape[1]
    return weigh_tokens(row_BLS, taps_KS, [ids_BL[:, k : k + n_tokens] == segment_ids_BT for k in range(len(taps_KS))])


def weigh_tokens(row_BLS: Tensor, taps_KS: Tensor, visible_KBT: Sequence[Tensor] | None) -> Tensor:
    """The sum over k of taps[k] row[t + k], where it is visible: `[B, T, S]` of row's dtype, T = L - K + 1."""
    n_tokens, out_BTS = row_BLS.shape[1] - len(taps_KS) + 1, row_BLS.new_zeros(())
    for k, weight_S in enumerate(taps_KS):
        part_BTS = row_BLS[:, k : k + n_tokens]
        if visible_KBT is not None:
            part_BTS = torch.where(visible_KBT[k][..., None], part_BTS, 0.0)
        out_BTS = out_BTS + part_BTS * weight_S
    return out_BTS.to(row_BLS.dtype)


def write_gate(conv_BTS: Tensor, gate_S: Tensor, gate_bias_H: Tensor) -> Tensor:
    """sigmoid(w z + b) of each token and attention head: gate_BTH, in float32 at least. Heads are columns of S."""
    product_BTS = at_least_float32(conv_BTS) * gate_S
    return torch.sigmoid(product_BTS.unflatten(-1, (len(gate_bias_H), -1)).sum(-1) + gate_bias_H)


def linear_heads(q_BTHS: Tensor, k_BTHS: Tensor, conv_BTS: Tensor,
                 options: HeadOptions) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k of the linear half with the divisor and the gates, and the gates, gate_BTH. conv_BTS: what the keys were
    made from."""
    if options.divisor is not None:
        q_BTHS = q_BTHS / options.divisor
    if options.gate_S is None:
        return q_BTHS, k_BTHS, None
    assert options.gate_bias_H is not None
    gate_BTH = write_gate(conv_BTS, options.gate_S, options.gate_bias_H)
    return q_BTHS, (k_BTHS * gate_BTH[..., None]).to(k_BTHS.dtype), gate_BTH


def memory_heads(z_BTS: Tensor, conv_BTS: Tensor, gamma_NS: Tensor, beta_NS: Tensor, sin: Tensor, cos: Tensor,
                 options: HeadOptions, n_heads: int = 1) -> tuple[list[Tensor], Tensor | None]:
    """`reference.make_heads` with options, each `[B, T, S]` of z's dtype, and the gates of the linear keys, gate_BTH,
    or None. Heads 2 and 3 are the linear half's.

    z_BTS: after silu. conv_BTS: its convolution, or z. n_heads: attention heads, which are columns of S."""
    wide_BTS, wide_conv_BTS = at_least_float32(z_BTS), at_least_float32(conv_BTS)
    sin, cos, gate_BTH, heads = sin[..., None, :], cos[..., None, :], None, []
    for n in range(len(gamma_NS)):
        made_BTS = (wide_conv_BTS if n in options.from_conv else wide_BTS) * gamma_NS[n] + beta_NS[n]
        made_BTHS = made_BTS.unflatten(-1, (n_heads, -1))
        heads.append(rope(made_BTHS, sin, cos) if options.linear_rope or n not in (2, 3) else made_BTHS)
    if len(heads) > 2:
        heads[2], heads[3], gate_BTH = linear_heads(heads[2], heads[3], conv_BTS, options)
    return [head_BTHS.to(z_BTS.dtype).flatten(-2) for head_BTHS in heads], gate_BTH
