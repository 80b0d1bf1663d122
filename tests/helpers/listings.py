"""The paper's pseudocode, line by line, in float64 torch: the second witness beside the recorded
cases.

Each function is one printed listing and keeps its names, its order of operations and its einsum
strings. It is written to be compared with the page, not to be fast, and imports nothing from the
package. Weights come as a dictionary under the names that the listing gives its variables (`var`,
see conformance/README.md); a listing that calls another one hands on the part of the dictionary
below that name, for example `norm/gamma` as `gamma`.

What is printed but cannot run, and what stands here instead:
- `rel_pos_bias`: `return t` belongs inside the function, `dtype=dtype` means float32;
- `norm`: ScaleNorm returns `scale * x` but its variable is called `scalar`;
- `FLASH`: one bracket too many in the bidirectional kernel;
- `GAU`: the length is known, not symbolic, because `rel_pos_bias` branches on it;
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
DTYPE = torch.float64


def below(var: Weights, scope: str) -> Weights:
    """The weights of a listing called within another one: `scope/name` as `name`."""
    return {name.removeprefix(scope + "/"): w for name, w in var.items() if name.startswith(scope + "/")}


def dense(x: Tensor, var: Weights) -> Tensor:
    """`tf.layers.dense`: the kernel is [inputs, outputs]."""
    return x @ var["kernel"] + var["bias"]


def tf_range(n: int) -> Tensor:
    return torch.arange(n, dtype=DTYPE)


def rope(x: Tensor, axis: int | list[int]) -> Tensor:
    """Code 3. RoPE position embedding over one axis or several neighbouring ones, counted as one
    running position."""
    shape = list(x.shape)
    if isinstance(axis, int):
        axis = [axis]

    spatial_shape = [shape[i] for i in axis]
    total_len = 1
    for i in spatial_shape:
        total_len *= i
    position = torch.reshape(tf_range(total_len), spatial_shape)

    for _ in range(axis[-1] + 1, len(shape) - 1, 1):
        position = position.unsqueeze(-1)

    half_size = shape[-1] // 2
    freq_seq = tf_range(half_size) / float(half_size)
    inv_freq = 10000**-freq_seq
    sinusoid = torch.einsum("...,d->...d", position, inv_freq)
    sin = torch.sin(sinusoid)
    cos = torch.cos(sinusoid)
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def rel_pos_bias(n: int, var: Weights) -> Tensor:
    """Code 4. Relative position bias [n, n]."""
    if n < 512:
        w = var["weight"]
        assert w.shape == (2 * n - 1,)
        t = F.pad(w, [0, n])
        t = torch.tile(t, [n])
        t = t[..., :-n]
        t = torch.reshape(t, [n, 3 * n - 2])
        r = (2 * n - 1) // 2
        # For n = 1 the printed slice r:-r is 0:0, which is empty; the whole row, one entry, is
        # meant.
        t = t[..., r:-r] if r else t
    else:
        a = rope(torch.tile(var["a"][None, :], [n, 1]), axis=0)
        b = rope(torch.tile(var["b"][None, :], [n, 1]), axis=0)
        t = torch.einsum("mk,nk->mn", a, b)
    return t


def norm(x: Tensor, var: Weights, begin_axis: int = -1, eps: float = 1e-5, norm_type: str = "layer_norm") -> Tensor:
    """Code 5. Normalization layer."""
    axes = list(range(x.ndim))[begin_axis:]
    if norm_type == "layer_norm":
        mean = torch.mean(x, axes, keepdim=True)
        variance = torch.mean(torch.square(x - mean), axes, keepdim=True)
        x = (x - mean) * torch.rsqrt(variance + eps)
        gamma = var["gamma"]
        beta = var["beta"]
        return gamma * x + beta
    assert norm_type == "scale_norm"
    mean_square = torch.mean(torch.square(x), axes, keepdim=True)
    x = x * torch.rsqrt(mean_square + eps)
    scalar = var["scalar"]
    return scalar * x


def GAU(x: Tensor, causal: bool, var: Weights, norm_type: str = "layer_norm", expansion_factor: int = 2) -> Tensor:
    """Code 6. GAU block (FLASH-Quad): batch size x sequence length x model size."""
    seq_len = x.shape[1]
    d = x.shape[-1]
    e = int(d * expansion_factor)

    shortcut, x = x, norm(x, below(var, "norm"), begin_axis=-1, norm_type=norm_type)

    s = var["gamma"].shape[-1]  # 128 in print
    uv = dense(x, below(var, "dense"))
    u, v, base = torch.split(F.silu(uv), [e, e, s], dim=-1)

    gamma = var["gamma"]
    beta = var["beta_1"]
    base = torch.einsum("...r,hr->...hr", base, gamma) + beta
    base = rope(base, axis=1)
    q, k = torch.unbind(base, dim=-2)

    qk = torch.einsum("bnd,bmd->bnm", q, k)
    bias = rel_pos_bias(seq_len, below(var, "rel_pos_bias"))
    kernel = torch.square(F.relu(qk / seq_len + bias))

    if causal:
        causal_mask = torch.tril(torch.ones(seq_len, seq_len, dtype=x.dtype))
        kernel = kernel * causal_mask

    x = u * torch.einsum("bnm,bme->bne", kernel, v)
    x = dense(x, below(var, "dense_1"))
    return x + shortcut


def segment_ids_to_mask(segment_ids: Tensor, causal: bool = False) -> Tensor:
    """Code 7. Weight with which chunk h's keys and values enter chunk g: segment ids [b, g, n] ->
    [b, g, h]."""
    min_ids, max_ids = torch.amin(segment_ids, dim=-1), torch.amax(segment_ids, dim=-1)
    mask = torch.logical_and(min_ids[:, :, None] <= max_ids[:, None, :], max_ids[:, :, None] >= min_ids[:, None, :])
    mask = mask.to(DTYPE)
    if causal:
        g = min_ids.shape[1]
        causal_mask = 1.0 - torch.triu(torch.ones(g, g, dtype=DTYPE))
        mask = mask * causal_mask
    total = torch.sum(mask, dim=-1, keepdim=True)
    return torch.where(total == 0, 0.0, mask / torch.where(total == 0, 1.0, total))  # tf.math.divide_no_nan


def FLASH(x: Tensor, causal: bool, segment_ids: Tensor, var: Weights, norm_type: str = "layer_norm",
          expansion_factor: int = 2) -> Tensor:
    """Code 8. FLASH block: batch size x num chunks x chunk length x model size."""
    _, _, n, d = x.shape
    e = int(d * expansion_factor)
    shortcut, x = x, norm(x, below(var, "norm"), begin_axis=-1, norm_type=norm_type)

    s = var["gamma"].shape[-1]  # 128 in print
    uv = dense(x, below(var, "dense"))
    u, v, base = torch.split(F.silu(uv), [e, e, s], dim=-1)

    gamma = var["gamma"]
    beta = var["beta_1"]
    base = torch.einsum("...r,hr->...hr", base, gamma) + beta
    base = rope(base, axis=[1, 2])
    quad_q, quad_k, lin_q, lin_k = torch.unbind(base, dim=-2)

    if causal:
        lin_kv = torch.einsum("bgnk,bgne->bgke", lin_k, v) / n
        mask = segment_ids_to_mask(segment_ids, causal=True)
        cum_lin_kv = torch.einsum("bhke,bgh->bgke", lin_kv, mask)
        linear = torch.einsum("bgnk,bgke->bgne", lin_q, cum_lin_kv)

        quad_qk = torch.einsum("bgnk,bgmk->bgnm", quad_q, quad_k)
        bias = rel_pos_bias(n, below(var, "rel_pos_bias"))
        kernel = torch.square(F.relu(quad_qk / n + bias))
        causal_mask = torch.tril(torch.ones(n, n, dtype=x.dtype))
        quadratic = torch.einsum("bgnm,bgme->bgne", kernel * causal_mask, v)
    else:
        lin_kv = torch.einsum("bgnk,bgne->bgke", lin_k, v) / n
        mask = segment_ids_to_mask(segment_ids)
        lin_kv = torch.einsum("bhke,bgh->bgke", lin_kv, mask)
        linear = torch.einsum("bgnk,bgke->bgne", lin_q, lin_kv)

        quad_qk = torch.einsum("bgnk,bgmk->bgnm", quad_q, quad_k)
        bias = rel_pos_bias(n, below(var, "rel_pos_bias"))
        kernel = torch.square(F.relu(quad_qk / n + bias))
        quadratic = torch.einsum("bgnm,bgme->bgne", kernel, v)

    x = u * (quadratic + linear)
    x = dense(x, below(var, "dense_1"))
    return x + shortcut
