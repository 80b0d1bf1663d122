"""Where the weights of the paper's listings stand in the package's layers.

| listing | here |
|---|---|
| `norm/gamma`, `norm/beta` (LayerNorm) | `norm.weight`, `norm.bias` |
| `norm/scalar` (ScaleNorm) | `norm.scalar` |
| `dense/kernel`, `dense/bias` (columns u, v, base) | `in_proj.weight` (transposed), `in_proj.bias` |
| `gamma`, `beta_1` (a row per head; GAU: q, k; FLASH: quad_q, quad_k, lin_q, lin_k) | `scale_offset.gamma`, `.beta` |
| `rel_pos_bias/weight` (n < 512) | `rel_pos_bias.weight` |
| `rel_pos_bias/a`, `rel_pos_bias/b` (n >= 512) | `rel_pos_bias.a`, `rel_pos_bias.b` |
| `dense_1/kernel`, `dense_1/bias` | `out_proj.weight` (transposed), `out_proj.bias` |
| `scaledsin_scalar` | `abs_pos.scalar` of the model |
"""

from torch import Tensor

PARAMETERS = {
    "norm/gamma": "norm.weight",
    "norm/beta": "norm.bias",
    "norm/scalar": "norm.scalar",
    "dense/kernel": "in_proj.weight",
    "dense/bias": "in_proj.bias",
    "gamma": "scale_offset.gamma",
    "beta_1": "scale_offset.beta",
    "rel_pos_bias/weight": "rel_pos_bias.weight",
    "rel_pos_bias/a": "rel_pos_bias.a",
    "rel_pos_bias/b": "rel_pos_bias.b",
    "dense_1/kernel": "out_proj.weight",
    "dense_1/bias": "out_proj.bias",
    "scaledsin_scalar": "abs_pos.scalar",
}


def from_listing(var: dict[str, Tensor]) -> dict[str, Tensor]:
    """The listing's weights under the package's parameter names and in its shapes: TensorFlow's kernels are [in, out],
    torch's not, and a scalar is `[1]` here."""
    return {PARAMETERS[name]: w.T if name.endswith("/kernel") else w if w.dim() else w[None]
            for name, w in var.items()}
