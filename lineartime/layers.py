"""The small layers of Codes 2-5: ScaledSin, RoPE, the relative position bias, the norms; and scale-and-offset (Eq. 5).

Shape letters, here and everywhere in the package: B batch, T time, G chunks, P = G + 1 places before, between and after
them, C chunk length (M where it counts keys), D `d_model`, E `d_inner`, S `query_key_dim`, N heads made from one base,
H heads, K head width, V vocabulary. In decoding N counts new tokens and L keys so far.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.config import TOEPLITZ_BELOW

BIAS_WIDTH = 128
"""Width of the two vectors of the rotated position bias (Code 4);
not `query_key_dim`, though the paper has 128 for both."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 where its type is shorter; sums, norms and scores are taken in this type."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rotary(position: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """sin and cos of position x 10000^(-i / half) for i < half = width / 2: the angles of Codes 2 and 3.

    position: integers of any shape `[...]`. Returns two tensors `[..., width / 2]` of `dtype`. The angles are taken in
    float64 and rounded after sin and cos, so that the error stays below 1e-6 at position 10^6."""
    half = width // 2
    frequency = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=position.device) / half)
    angle = position.double()[..., None] * frequency
    return angle.sin().to(dtype), angle.cos().to(dtype)


def rope(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotary position embedding (Code 3): the halves of the last axis turned by the angles of `rotary`.

    x: `[..., width]`; sin, cos: `[..., width / 2]`, broadcast. Several axes count as one: the position of an entry is
    its index in their row-major order."""
    halves = x.unflatten(-1, (2, -1))
    # [x1 cos - x2 sin, x2 cos + x1 sin] without taking the halves apart: torch.compile makes slow code of a cat.
    sign = torch.arange(-1, 2, 2, device=x.device)[:, None]
    return (halves * cos[..., None, :] + halves.flip(-2) * (sin[..., None, :] * sign)).flatten(-2)


class ScaledSin(nn.Module):
    """Sinusoidal absolute position embedding times a learned scalar that starts at d^-1/2 (Code 2)."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model
        self.scalar = nn.Parameter(torch.empty(()))

    def forward(self, position_BT: Tensor) -> Tensor:
        """position_BT: integers. Returns `[B, T, D]`."""
        return self.scalar * torch.cat(rotary(position_BT, self.d_model, self.scalar.dtype), dim=-1)


class RelPosBias(nn.Module):
    """Relative position bias b[i, j] = w[j - i + n - 1] (Code 4): a table for n < 512, else two rotated vectors.

    n is the configuration's `scale_len`, so the form never depends on the row at hand. The rotated form is a function
    of i - j as well:
    rope(a, i) . rope(b, j) = sum_k (a1 b1 + a2 b2) cos((i - j) f_k) + (a1 b2 - a2 b1) sin((i - j) f_k)."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n
        if n < TOEPLITZ_BELOW:
            self.weight = nn.Parameter(torch.empty(2 * n - 1))
        else:
            self.a = nn.Parameter(torch.empty(BIAS_WIDTH))
            self.b = nn.Parameter(torch.empty(BIAS_WIDTH))

    def at(self, offset: Tensor) -> Tensor:
        """The bias at key position minus query position; any shape, integers. The table holds |offset| < n."""
        if self.n < TOEPLITZ_BELOW:
            return self.weight[offset + self.n - 1]
        a1, a2 = self.a.chunk(2)
        b1, b2 = self.b.chunk(2)
        sin, cos = rotary(-offset, BIAS_WIDTH, self.a.dtype)
        # Not two products of matrices: autocast would take them in bfloat16, and the terms nearly cancel.
        return (cos * (a1 * b1 + a2 * b2) + sin * (a1 * b2 - a2 * b1)).sum(-1)

    def forward(self, length: int) -> Tensor:
        """w of a square of `length` queries and keys: `[2 length - 1]`, entry j - i + length - 1 is b[i, j]."""
        if self.n < TOEPLITZ_BELOW:
            return self.weight[self.n - length : self.n + length - 1]
        return self.at(torch.arange(1 - length, length, device=self.a.device))


class ScaleNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times one learned scalar (Code 5)."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.scalar = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return (self.scalar * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def make_norm(norm: str, d_model: int) -> nn.Module:
    """LayerNorm or ScaleNorm over the last axis (Code 5); eps is 1e-5 in both."""
    return nn.LayerNorm(d_model, eps=1e-5) if norm == "layer_norm" else ScaleNorm()


class SplitLinear(nn.Linear):
    """One linear layer whose output comes in parts, each a product of its own: `nn.Linear` and a split, in numbers and
    in parameters. The parts are contiguous and so are their gradients, where a split leaves copying to be done."""

    def __init__(self, d_in: int, widths: Sequence[int]):
        super().__init__(d_in, sum(widths))
        self.widths = list(widths)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        weights, biases = self.weight.split(self.widths), self.bias.split(self.widths)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


class ScaleOffset(nn.Module):
    """The cheap transforms Q and K of Eq. 5: several heads from one base, each a scale and an offset per dimension."""

    def __init__(self, n_heads: int, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(n_heads, width))
        self.beta = nn.Parameter(torch.empty(n_heads, width))

    def forward(self, z_BTS: Tensor) -> Tensor:
        """Returns heads_NBTS."""
        return z_BTS * self.gamma[:, None, None] + self.beta[:, None, None]


@dataclasses.dataclass
class Layout:
    """Where the tokens of a batch of rows stand: made once for a forward pass, read by every attention layer."""

    rotary: tuple[Tensor, Tensor] | None
    """sin and cos `[1 or B, T, width / 2]` of the positions; None without RoPE."""
    segment_ids_BT: Tensor | None = None
    """The document of each token: integers that never fall along a row, -1 for padding at its end.
    None: one document."""
    boundaries: list[int] | None = None
    """Where documents start and end in the flattened rows, 0 and B T included; only softmax attention reads it."""


def document_boundaries(segment_ids_BT: Tensor) -> list[int]:
    """Starts of the documents in the rows laid end to end, then the end: `[0, ..., B T]`. Padding is a document too."""
    starts_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return [*starts_BT.flatten().nonzero().flatten().tolist(), segment_ids_BT.numel()]
