"""Kernels of FLASH's attention with heads that have the options beyond the paper: keys from several tokens, a gate, no
RoPE. The reference is `memory.gated_memory_attention`.

What these kernels make and differentiate are the heads of one attention head, 128 wide; the attention itself is that of
`mixed_chunk`. `near` is the convolution of silu(z).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.dispatch import on_own_device, refuse_forward_mode
from lineartime.ops.gradients import BASE_TILE
from lineartime.ops.memory import HeadOptions
from lineartime.ops.mixed_chunk import (
    Documents,
    Kept,
    attend,
    differentiate_attention,
    lay_out_documents,
    shapes_of,
)
from lineartime.ops.reference import chunk_ids, gates_read, to_chunks, turned_ids
from lineartime.ops.tiles import (
    HALF,
    SIZE,
    load_angles,
    load_base,
    load_rows,
    rotate,
    rotate_back,
    scale_base,
    silu,
    silu_slope,
    store_rows,
)


@triton.jit
def near_tokens(ids, first, token, left, start, SHIFT: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The tokens SHIFT further on, and whether each is of its token's document. first: the tile's first token among all
    rows; start: in its row."""
    other = token + SHIFT
    same = (token < left) & (other < left) & (other >= -start)
    if DOCUMENTS:
        own = tl.load(ids + first + token, mask=same, other=0)
        same = same & (own == tl.load(ids + first + other, mask=same, other=0))
    return other, same


@triton.jit
def load_half(rows, token, column, seen, stride):
    """Rows `token` where they are seen, else 0, in float32."""
    return tl.load(rows + token[:, None] * stride + column[None, :], mask=seen[:, None], other=0.0).to(tl.float32)


@triton.jit
def convolve_base(z_row, taps, ids, first, token, left, start, F, K: tl.constexpr, AFTER: tl.constexpr,
                  DOCUMENTS: tl.constexpr):
    """The two halves of the convolution of silu(z) over K tokens. z_row: pointer to z of the tile's first token."""
    column = tl.arange(0, HALF)
    near1, near2 = tl.zeros([token.shape[0], HALF], tl.float32), tl.zeros([token.shape[0], HALF], tl.float32)
    for k in tl.static_range(K):
        other, same = near_tokens(ids, first, token, left, start, k - (K - 1 - AFTER), DOCUMENTS)
        z1, z2 = load_half(z_row, other, column, same, F), load_half(z_row + HALF, other, column, same, F)
        near1 += silu(z1) * tl.load(taps + k * SIZE + column).to(tl.float32)[None, :]
        near2 += silu(z2) * tl.load(taps + k * SIZE + HALF + column).to(tl.float32)[None, :]
    return near1, near2


@triton.jit
def make_gate(near1, near2, gate, gate_bias):
    """The gates of the tile's tokens, a column."""
    column = tl.arange(0, HALF)
    by1, by2 = tl.load(gate + column).to(tl.float32), tl.load(gate + HALF + column).to(tl.float32)
    logit = tl.sum(near1 * by1[None, :] + near2 * by2[None, :], 1) + tl.load(gate_bias).to(tl.float32)
    return tl.sigmoid(logit)[:, None]


@triton.jit
def add_base_gradient(d1, d2, base1, base2, gamma, head, line, dbase1, dbase2):
    """dbase + the gradient of what a head was made from, base; stores the tile's sums for the head's scale and offset
    in two lines. d: the gradient of the head before RoPE."""
    column = tl.arange(0, HALF)
    tl.store(line + column, tl.sum(d1 * base1, 0))
    tl.store(line + HALF + column, tl.sum(d2 * base2, 0))
    tl.store(line + SIZE + column, tl.sum(d1, 0))
    tl.store(line + SIZE + HALF + column, tl.sum(d2, 0))
    at = head * SIZE + column
    dbase1 += d1 * tl.load(gamma + at).to(tl.float32)[None, :]
    dbase2 += d2 * tl.load(gamma + at + HALF).to(tl.float32)[None, :]
    return dbase1, dbase2


@triton.jit
def make_memory_heads_kernel(uvz, gamma, beta, sin, cos, taps, gate, gate_bias, ids, heads, gates, T, E, F,
                             angles_stride, q_scale, K: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr,
                             ROTATED: tl.constexpr, GATED: tl.constexpr, DOCUMENTS: tl.constexpr, BT: tl.constexpr):
    """The four heads of BT tokens, and the gates of their linear keys. LOCAL: the local key is made from `near` too.
    ROTATED: the linear half has RoPE."""
    start, batch = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    token, column, left = tl.arange(0, BT), tl.arange(0, HALF), T - start
    first, angles = batch * T + start, batch * angles_stride + start * HALF
    z_row = uvz + first * F + 2 * E
    z1, z2 = load_base(z_row, token, left, F)
    near1, near2 = convolve_base(z_row, taps, ids, first, token, left, start, F, K, AFTER, DOCUMENTS)
    sin_tile, cos_tile = load_angles(sin + angles, cos + angles, token, left)
    for head in tl.static_range(4):
        if head == 3 or (head == 1 and LOCAL):
            x1, x2 = scale_base(near1, near2, gamma, beta, head)
        else:
            x1, x2 = scale_base(z1, z2, gamma, beta, head)
        if head < 2 or ROTATED:
            x1, x2 = rotate(x1, x2, sin_tile, cos_tile)
        if head == 2:
            x1, x2 = x1 * q_scale, x2 * q_scale
        if head == 3 and GATED:
            by = make_gate(near1, near2, gate, gate_bias)
            x1, x2 = x1 * by, x2 * by
            tl.store(gates + first + token[:, None], by, mask=token[:, None] < left)
        row = heads + ((head * tl.num_programs(1) + batch) * T + start) * SIZE
        store_rows(row, token, column, left, HALF, SIZE, x1)
        store_rows(row + HALF, token, column, left, HALF, SIZE, x2)


@triton.jit
def near_gradient_kernel(uvz, dheads, dgates, gamma, beta, sin, cos, taps, gate, gate_bias, ids, dnear, sums, T, E, F,
                         angles_stride, K: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr,
                         ROTATED: tl.constexpr, GATED: tl.constexpr, DOCUMENTS: tl.constexpr, BT: tl.constexpr):
    """The gradient of `near` for BT tokens, and these tokens' sums for the gradients of what it meets: lines of `sums`
    are scale and offset of the linear key, of the local key, the gate's weights and its bias, and K taps. dgates: the
    gradient of the gates from what divides by them, or None."""
    start, batch = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    token, column, left = tl.arange(0, BT), tl.arange(0, HALF), T - start
    first, angles = batch * T + start, batch * angles_stride + start * HALF
    per_head = tl.num_programs(1).to(tl.int64) * T * SIZE
    z_row = uvz + first * F + 2 * E
    near1, near2 = convolve_base(z_row, taps, ids, first, token, left, start, F, K, AFTER, DOCUMENTS)
    sin_tile, cos_tile = load_angles(sin + angles, cos + angles, token, left)
    dnear1, dnear2 = tl.zeros([BT, HALF], tl.float32), tl.zeros([BT, HALF], tl.float32)
    line = sums + (batch * tl.num_programs(0) + tl.program_id(0)) * (6 + K) * SIZE
    for head in tl.static_range(3, 0 if LOCAL else 2, -2):
        row = dheads + head * per_head + first * SIZE
        d1 = load_rows(row, token, column, left, HALF, SIZE).to(tl.float32)
        d2 = load_rows(row + HALF, token, column, left, HALF, SIZE).to(tl.float32)
        if head < 2 or ROTATED:
            d1, d2 = rotate_back(d1, d2, sin_tile, cos_tile)
        if head == 3 and GATED:
            by = make_gate(near1, near2, gate, gate_bias)
            x1, x2 = scale_base(near1, near2, gamma, beta, head)
            dby = tl.sum(d1 * x1 + d2 * x2, 1)[:, None]
            if dgates is not None:
                dby += tl.load(dgates + first + token[:, None], mask=token[:, None] < left, other=0.0)
            dlogit = dby * by * (1.0 - by)
            dnear1 += dlogit * tl.load(gate + column).to(tl.float32)[None, :]
            dnear2 += dlogit * tl.load(gate + HALF + column).to(tl.float32)[None, :]
            tl.store(line + 4 * SIZE + column, tl.sum(dlogit * near1, 0))
            tl.store(line + 4 * SIZE + HALF + column, tl.sum(dlogit * near2, 0))
            tl.store(line + 5 * SIZE, tl.sum(tl.sum(dlogit, 1), 0))
            d1, d2 = d1 * by, d2 * by
        dnear1, dnear2 = add_base_gradient(d1, d2, near1, near2, gamma, head, line + (3 - head) * SIZE, dnear1, dnear2)
    row = dnear + first * SIZE
    store_rows(row, token, column, left, HALF, SIZE, dnear1)
    store_rows(row + HALF, token, column, left, HALF, SIZE, dnear2)
    for k in tl.static_range(K):
        other, same = near_tokens(ids, first, token, left, start, k - (K - 1 - AFTER), DOCUMENTS)
        z1, z2 = load_half(z_row, other, column, same, F), load_half(z_row + HALF, other, column, same, F)
        into = line + (6 + k) * SIZE + column
        tl.store(into, tl.sum(dnear1 * silu(z1), 0))
        tl.store(into + HALF, tl.sum(dnear2 * silu(z2), 0))


@triton.jit
def memory_base_gradient_kernel(uvz, dheads, dnear, gamma, sin, cos, taps, ids, duvz, sums, T, E, F, angles_stride,
                                q_scale, K: tl.constexpr, AFTER: tl.constexpr, LOCAL: tl.constexpr,
                                ROTATED: tl.constexpr, DOCUMENTS: tl.constexpr, BT: tl.constexpr):
    """The gradient of z for BT tokens: from the heads that are made from it, and from `near` of the tokens that read
    it. Lines of `sums`: scale and offset of q, of the local key unless LOCAL, and of q of the linear half."""
    start, batch = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    token, column, left = tl.arange(0, BT), tl.arange(0, HALF), T - start
    first, angles = batch * T + start, batch * angles_stride + start * HALF
    per_head = tl.num_programs(1).to(tl.int64) * T * SIZE
    z_row = uvz + first * F + 2 * E
    base1, base2 = load_base(z_row, token, left, F)
    sin_tile, cos_tile = load_angles(sin + angles, cos + angles, token, left)
    dz1, dz2 = tl.zeros([BT, HALF], tl.float32), tl.zeros([BT, HALF], tl.float32)
    line = sums + (batch * tl.num_programs(0) + tl.program_id(0)) * 6 * SIZE
    for head in tl.static_range(3):
        if head != 1 or not LOCAL:
            row = dheads + head * per_head + first * SIZE
            d1 = load_rows(row, token, column, left, HALF, SIZE).to(tl.float32)
            d2 = load_rows(row + HALF, token, column, left, HALF, SIZE).to(tl.float32)
            if head < 2 or ROTATED:
                d1, d2 = rotate_back(d1, d2, sin_tile, cos_tile)
            if head == 2:
                d1, d2 = d1 * q_scale, d2 * q_scale
            dz1, dz2 = add_base_gradient(d1, d2, base1, base2, gamma, head, line + 2 * head * SIZE, dz1, dz2)
    near_row = dnear + first * SIZE
    for k in tl.static_range(K):
        other, same = near_tokens(ids, first, token, left, start, (K - 1 - AFTER) - k, DOCUMENTS)
        by1, by2 = tl.load(taps + k * SIZE + column), tl.load(taps + k * SIZE + HALF + column)
        dz1 += load_half(near_row, other, column, same, SIZE) * by1.to(tl.float32)[None, :]
        dz2 += load_half(near_row + HALF, other, column, same, SIZE) * by2.to(tl.float32)[None, :]
    z1 = load_rows(z_row, token, column, left, HALF, F).to(tl.float32)
    z2 = load_rows(z_row + HALF, token, column, left, HALF, F).to(tl.float32)
    dz_row = duvz + first * F + 2 * E
    store_rows(dz_row, token, column, left, HALF, F, dz1 * silu_slope(z1))
    store_rows(dz_row + HALF, token, column, left, HALF, F, dz2 * silu_slope(z2))


def make_memory_heads(uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, taps: Tensor,
                      gate: Tensor | None, gate_bias: Tensor | None, ids: Tensor | None, n_after: int, local: bool,
                      linear_rope: bool, q_scale: float) -> tuple[Tensor, Tensor]:
    """`memory.memory_heads` of z before silu: heads_4BTS, and gates_BT, float32, without a gate no entry."""
    n_rows, n_tokens, f = uvz.shape
    s = gamma.shape[-1]
    heads = uvz.new_empty(4, n_rows, n_tokens, s)
    gates = uvz.new_empty(*((0,) if gate is None else (n_rows, n_tokens)), dtype=torch.float32)
    make_memory_heads_kernel[triton.cdiv(n_tokens, BASE_TILE), n_rows](
        uvz, gamma, beta, sin, cos, taps, gate, gate_bias, ids, heads, gates, n_tokens, (f - s) // 2, f,
        0 if len(sin) == 1 else n_tokens * s // 2, q_scale, K=len(taps), AFTER=n_after, LOCAL=local,
        ROTATED=linear_rope, GATED=gate is not None, DOCUMENTS=ids is not None, BT=BASE_TILE, num_warps=8)
    return heads, gates


def memory_head_gradients(uvz: Tensor, dheads: Tensor, dgates: Tensor | None, gamma: Tensor, beta: Tensor, sin: Tensor,
                          cos: Tensor, taps: Tensor, gate: Tensor | None, gate_bias: Tensor | None,
                          ids: Tensor | None, n_after: int, local: bool, linear_rope: bool, q_scale: float,
                          duvz: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward pass of `make_memory_heads`: writes the gradient of z before silu to its columns of duvz, and
    returns those of gamma, beta, taps, gate and gate_bias in float32; the last two mean nothing without a gate."""
    n_rows, n_tokens, f = uvz.shape
    s, grid, n_taps = gamma.shape[-1], (triton.cdiv(n_tokens, BASE_TILE), n_rows), len(taps)
    stride, how = 0 if len(sin) == 1 else n_tokens * s // 2, {
        "K": n_taps, "AFTER": n_after, "LOCAL": local, "ROTATED": linear_rope, "DOCUMENTS": ids is not None,
        "BT": BASE_TILE, "num_warps": 8}
    of_near = uvz.new_empty(grid[0] * grid[1], 6 + n_taps, s, dtype=torch.float32)
    of_base = uvz.new_empty(grid[0] * grid[1], 6, s, dtype=torch.float32)
    dnear = uvz.new_empty(n_rows, n_tokens, s, dtype=torch.float32)
    near_gradient_kernel[grid](uvz, dheads, dgates, gamma, beta, sin, cos, taps, gate, gate_bias, ids, dnear, of_near,
                               n_tokens, (f - s) // 2, f, stride, GATED=gate is not None, **how)
    memory_base_gradient_kernel[grid](uvz, dheads, dnear, gamma, sin, cos, taps, ids, duvz, of_base, n_tokens,
                                      (f - s) // 2, f, stride, q_scale, **how)
    near, base = of_near.sum(0), of_base.sum(0)
    lines = [(base[0], base[1]), (near[2], near[3]) if local else (base[2], base[3]), (base[4], base[5]),
             (near[0], near[1])]
    dgamma, dbeta = (torch.stack([line[i] for line in lines]) for i in (0, 1))
    return dgamma, dbeta, near[6:].clone(), near[4].clone(), near[5, :1].clone()  # an op returns no views


@torch.library.custom_op("lineartime::gated_memory_attention", mutates_args=())
@on_own_device
def forward(uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor, taps: Tensor,
            gate: Tensor | None, gate_bias: Tensor | None, ids: Tensor | None, begins: Tensor | None,
            ends: Tensor | None, scales: Tensor, each: Tensor | None, chunk_size: int, causal: bool, n_after: int,
            local: bool, linear_rope: bool, q_scale: float,
            written: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`gated_memory_attention` of contiguous tensors; and what is kept for the backward pass: the sum of the gates that
    each token reads, unless `written` no entry, and `mixed_chunk.Kept`. written: whether that sum divides. ids, begins,
    ends, scales, each: see `Documents`."""
    heads, gates = make_memory_heads(uvz, gamma, beta, sin, cos, taps, gate, gate_bias, ids, n_after, local,
                                     linear_rope, q_scale)
    read = gates.new_empty(0)
    if written:
        read = gates_read(ids, gates, chunk_size, causal).contiguous()
        heads[2] /= read.clamp(min=1)[..., None]
    out, _, v, states = attend(uvz, heads, w, None, Documents(ids, begins, ends, scales, each),
                               (uvz.shape[-1] - gamma.shape[-1]) // 2, chunk_size, causal, False)
    return out, read, heads, v, states


@forward.register_fake
def _(uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor, taps: Tensor,
      gate: Tensor | None, gate_bias: Tensor | None, ids: Tensor | None, begins: Tensor | None,
      ends: Tensor | None, scales: Tensor, each: Tensor | None, *rest: object) -> tuple[Tensor, ...]:
    s, written = gamma.shape[-1], rest[-1]
    out, none, v, states = shapes_of(uvz, s, None, scales, False)
    read = none.new_empty(uvz.shape[:2]) if written else none
    return out, read, uvz.new_empty(4, *uvz.shape[:2], s), v, states


@torch.library.custom_op("lineartime::gated_memory_attention_backward", mutates_args=())
@on_own_device
def backward(dout: Tensor, read: Tensor, heads: Tensor, v: Tensor, states: Tensor, uvz: Tensor, gamma: Tensor,
             beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor, taps: Tensor, gate: Tensor | None,
             gate_bias: Tensor | None, ids: Tensor | None, begins: Tensor | None, ends: Tensor | None, scales: Tensor,
             each: Tensor | None, chunk_size: int, causal: bool, n_after: int, local: bool, linear_rope: bool,
             q_scale: float, written: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of uvz, gamma, beta, w, taps, gate and gate_bias; the last two have no entry without a gate."""
    duvz, dheads, dw, _ = differentiate_attention(
        dout, None, uvz, Kept(heads, v, states), w, None, Documents(ids, begins, ends, scales, each), chunk_size,
        causal)
    dgates = None
    if written:
        dheads[2] /= read.clamp(min=1)[..., None]
        dread = torch.where(read >= 1, -(dheads[2].float() * heads[2]).sum(-1), 0.0)
        dgates = gates_read_transposed(ids, dread, chunk_size, causal).contiguous()
    dgamma, dbeta, dtaps, dgate, dgate_bias = memory_head_gradients(
        uvz, dheads, dgates, gamma, beta, sin, cos, taps, gate, gate_bias, ids, n_after, local, linear_rope, q_scale,
        duvz)
    no_gate = dgate.new_empty(0)
    return (duvz, dgamma.to(gamma.dtype), dbeta.to(beta.dtype), dw, dtaps.to(taps.dtype),
            no_gate if gate is None else dgate.to(gate.dtype),
            no_gate.clone() if gate_bias is None else dgate_bias.to(gate_bias.dtype))


@backward.register_fake
def _(dout: Tensor, read: Tensor, heads: Tensor, v: Tensor, states: Tensor, uvz: Tensor, gamma: Tensor, beta: Tensor,
      sin: Tensor, cos: Tensor, w: Tensor, taps: Tensor, gate: Tensor | None, gate_bias: Tensor | None,
      *rest: object) -> tuple[Tensor, ...]:
    no_gate = [uvz.new_empty(0, dtype=torch.float32) for _ in range(2)]
    return (*map(torch.empty_like, (uvz, gamma, beta, w, taps)),
            *(no_gate if gate is None or gate_bias is None else map(torch.empty_like, (gate, gate_bias))))


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # no zeros for the gradients of what is kept
    ctx.save_for_backward(*kept, *inputs[:14])
    ctx.how = inputs[14:]


def differentiate(ctx: Any, dout: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    gated = ctx.saved_tensors[11] is not None
    duvz, dgamma, dbeta, dw, dtaps, dgate, dgate_bias = backward(dout.contiguous(), *ctx.saved_tensors, *ctx.how)
    return (duvz, dgamma, dbeta, None, None, dw, dtaps, dgate if gated else None, dgate_bias if gated else None,
            *[None] * 12)


forward.register_autograd(differentiate, setup_context=keep)


def gates_read_transposed(segment_ids_BT: Tensor | None, read_BT: Tensor, chunk_size: int, causal: bool) -> Tensor:
    """The transpose of `reference.gates_read`: for each token the sum over those that read its gate."""
    if not causal:  # a token reads those that read it
        return gates_read(segment_ids_BT, read_BT, chunk_size, causal)
    ids_BGC, n_tokens = chunk_ids(segment_ids_BT, read_BT, chunk_size, False), read_BT.shape[1]
    assert ids_BGC is not None
    turned_BT = to_chunks(read_BT, chunk_size).flatten(1, 2).flip(1)
    return gates_read(turned_ids(ids_BGC).flatten(1, 2), turned_BT, chunk_size, True).flip(1)[:, :n_tokens]


def gated_memory_attention(uvz_BTF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
                           options: HeadOptions, *, chunk_size: int, causal: bool,
                           segment_ids_BT: Tensor | None = None, pooling: str = "mean") -> Tensor:
    """`memory.gated_memory_attention` in kernels, for inputs that `dispatch.unsupported_heads` allows; see
    `mixed_chunk.gated_chunk_attention`."""
    refuse_forward_mode(uvz_BTF, gamma_4S, beta_4S, w, options.taps_KS, options.gate_S, options.gate_bias_H)
    n_rows, n_tokens, _ = uvz_BTF.shape
    documents = lay_out_documents(segment_ids_BT, n_rows, n_tokens, chunk_size, causal,
                                  "mean" if pooling == "mean" else "sum", uvz_BTF.device)
    taps_KS = torch.ones_like(gamma_4S[:1]) if options.taps_KS is None else options.taps_KS
    tensors = [x.contiguous() for x in (uvz_BTF, gamma_4S, beta_4S, sin, cos, w, taps_KS)]
    gate_S = None if options.gate_S is None else options.gate_S.contiguous()
    return forward(*tensors, gate_S, options.gate_bias_H, *documents, chunk_size, causal, options.n_after,
                   1 in options.near, options.linear_rope, 1 / (options.divisor or 1.0), pooling == "written")[0]
