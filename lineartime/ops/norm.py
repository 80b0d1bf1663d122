"""The residual addition and the norm of the sum in one kernel, and the gradient in another. The reference is
`reference.add_norm`.

Both kernels are bound by memory bandwidth. The forward kernel reads x and delta and writes the sum and its norm. The
backward kernel reads the gradients of these two and the sum, and writes one gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.dispatch import on_own_device, refuse_forward_mode
from lineartime.ops.dtypes import matmul_dtype
from lineartime.ops.reference import NORM_EPS

TILE = 1024
"""Entries per tile of rows; a longer row is one tile."""

MAX_PROGRAMS = 512
"""Largest number of programs of the backward kernel. Each sums a part of the weight's gradient, and torch sums the
parts. The number is the same on all devices, so that the order of sums is, too."""


@triton.jit
def tile_of_rows(start, n_rows, D, BR: tl.constexpr, BD: tl.constexpr):
    """Offsets of the entries of BR rows from `start` on, their mask, and the indices of the rows."""
    row, column = start + tl.arange(0, BR), tl.arange(0, BD)
    at = row[:, None].to(tl.int64) * D + column[None, :]
    return at, (row[:, None] < n_rows) & (column[None, :] < D), row


@triton.jit
def add_norm_rows(x, delta, weight, bias, total, normed, stats, n_rows, D, eps, BR: tl.constexpr,
                  BD: tl.constexpr, ADD: tl.constexpr, LAYER_NORM: tl.constexpr):
    """The sum and the norm of BR rows. stats: 1 / standard deviation and mean; for ScaleNorm 1 / root mean square."""
    at, mask, row = tile_of_rows(tl.program_id(0) * BR, n_rows, D, BR, BD)
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        # The norm is that of the rounded sum, which is what the backward kernel reads.
        kept = (wide + tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, kept, mask=mask)
        wide = kept.to(tl.float32)
    if LAYER_NORM:
        mean = tl.sum(wide, 1) / D
        tl.store(stats + n_rows + row, mean, mask=row < n_rows)
        wide = tl.where(mask, wide - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    tl.store(stats + row, rstd, mask=row < n_rows)
    out = wide * rstd[:, None]
    if LAYER_NORM:
        column = tl.arange(0, BD)
        out *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        out += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    else:
        out *= tl.load(weight).to(tl.float32)
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def add_norm_rows_backward(dnormed, dtotal, total, weight, stats, dx, ddelta, sums, n_rows, n_tiles_each, D,
                           BR: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr, TWO_TYPES: tl.constexpr,
                           LAYER_NORM: tl.constexpr):
    """The gradients of `n_tiles_each` tiles of rows, and the sums of these rows for those of weight and bias."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BD)
    if LAYER_NORM:
        gain = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    else:
        gain = tl.load(weight).to(tl.float32)
    dweight, dbias = tl.zeros([BR, BD], tl.float32), tl.zeros([BR, BD], tl.float32)
    for tile in range(n_tiles_each):
        at, mask, row = tile_of_rows((program * n_tiles_each + tile) * BR, n_rows, D, BR, BD)
        d = tl.load(dnormed + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(stats + row, mask=row < n_rows, other=0.0)[:, None]
        if LAYER_NORM:
            x -= tl.load(stats + n_rows + row, mask=row < n_rows, other=0.0)[:, None]
        x *= rstd
        # x is normed here. The norm takes the mean of d out of the gradient (LayerNorm), and its part along x.
        dweight += d * x
        dbias += d
        d *= gain
        back = d - x * (tl.sum(d * x, 1) / D)[:, None]
        if LAYER_NORM:
            back -= (tl.sum(d, 1) / D)[:, None]
        back *= rstd
        if ADD:
            back += tl.load(dtotal + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, back.to(dx.dtype.element_ty), mask=mask)
        if TWO_TYPES:
            tl.store(ddelta + at, back.to(ddelta.dtype.element_ty), mask=mask)
    if LAYER_NORM:
        tl.store(sums + program.to(tl.int64) * D + column, tl.sum(dweight, 0), mask=column < D)
        tl.store(sums + (n_programs + program).to(tl.int64) * D + column, tl.sum(dbias, 0), mask=column < D)
    else:
        tl.store(sums + program, tl.sum(tl.sum(dweight, 1), 0))


def tile_for(width: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps, for rows of `width` entries."""
    block = max(triton.next_power_of_2(width), 16)
    rows = max(TILE // block, 1)
    return rows, block, max(rows * block // 256, 1)


@on_own_device
def forward(x_ND: Tensor, delta_ND: Tensor | None, weight: Tensor, bias: Tensor | None, normed_type: torch.dtype
            ) -> tuple[Tensor, Tensor, Tensor]:
    """The sum (empty without delta), its norm, and the statistics of the rows that backward needs."""
    n_rows, width = x_ND.shape
    rows, block, num_warps = tile_for(width)
    total_ND, normed_ND, stats_KN = empty_outputs(x_ND, delta_ND, weight, bias, normed_type)
    add_norm_rows[(triton.cdiv(n_rows, rows),)](
        x_ND, x_ND if delta_ND is None else delta_ND, weight, weight if bias is None else bias, total_ND, normed_ND,
        stats_KN, n_rows, width, NORM_EPS, rows, block, delta_ND is not None, bias is not None, num_warps=num_warps)
    return total_ND, normed_ND, stats_KN


def empty_outputs(x_ND: Tensor, delta_ND: Tensor | None, weight: Tensor, bias: Tensor | None,
                  normed_type: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the results of `forward`."""
    total_ND = x_ND.new_empty(x_ND.shape if delta_ND is not None else 0)
    stats_KN = x_ND.new_empty(1 if bias is None else 2, len(x_ND), dtype=torch.float32)
    return total_ND, x_ND.new_empty(x_ND.shape, dtype=normed_type), stats_KN


@on_own_device
def backward(dnormed_ND: Tensor, dtotal_ND: Tensor | None, total_ND: Tensor, weight: Tensor, stats_KN: Tensor,
             delta_type: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients: of x; of delta, the same values in delta's dtype (empty if it is x's); of weight and bias."""
    n_rows, width = total_ND.shape
    rows, block, num_warps = tile_for(width)
    n_tiles = triton.cdiv(n_rows, rows)
    n_tiles_each = max(triton.cdiv(n_tiles, MAX_PROGRAMS), 1)
    n_programs = max(triton.cdiv(n_tiles, n_tiles_each), 1)
    dx_ND, ddelta_ND, dgains = empty_gradients(dnormed_ND, dtotal_ND, total_ND, weight, stats_KN, delta_type)
    layer_norm, two_types = len(stats_KN) == 2, len(ddelta_ND) > 0
    sums = stats_KN.new_empty(len(dgains), n_programs, *weight.shape)
    add_norm_rows_backward[(n_programs,)](
        dnormed_ND, total_ND if dtotal_ND is None else dtotal_ND, total_ND, weight, stats_KN, dx_ND, ddelta_ND, sums,
        n_rows, n_tiles_each, width, rows, block, dtotal_ND is not None, two_types, layer_norm, num_warps=num_warps)
    torch.sum(sums, 1, out=dgains)
    return dx_ND, ddelta_ND, dgains


def empty_gradients(dnormed_ND: Tensor, dtotal_ND: Tensor | None, total_ND: Tensor, weight: Tensor, stats_KN: Tensor,
                    delta_type: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the results of `backward`."""
    ddelta_ND = total_ND.new_empty(0 if delta_type == total_ND.dtype else total_ND.shape, dtype=delta_type)
    return torch.empty_like(total_ND), ddelta_ND, stats_KN.new_empty(len(stats_KN), *weight.shape)


add_norm_forward = torch.library.custom_op("lineartime::add_norm", forward, mutates_args=())
add_norm_forward.register_fake(empty_outputs)
add_norm_backward = torch.library.custom_op("lineartime::add_norm_backward", backward, mutates_args=())
add_norm_backward.register_fake(empty_gradients)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_ND, delta_ND, weight, bias, _ = inputs
    total_ND, _, stats_KN = output
    ctx.save_for_backward(x_ND if delta_ND is None else total_ND, weight, stats_KN)
    ctx.delta_type, ctx.bias_type = None if delta_ND is None else delta_ND.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, dtotal_ND: Tensor | None, dnormed_ND: Tensor | None,
              dstats_KN: Tensor | None) -> tuple[Tensor | None, ...]:
    total_ND, weight, stats_KN = ctx.saved_tensors
    if dnormed_ND is None:
        return dtotal_ND, None if dtotal_ND is None else dtotal_ND.to(ctx.delta_type), None, None, None
    delta_type = ctx.delta_type or total_ND.dtype
    dx_ND, ddelta_ND, dgains = add_norm_backward(
        dnormed_ND.contiguous(), None if dtotal_ND is None or ctx.delta_type is None else dtotal_ND.contiguous(),
        total_ND, weight, stats_KN, delta_type)
    ddelta_ND = dx_ND if delta_type == total_ND.dtype else ddelta_ND
    return (dx_ND, None if ctx.delta_type is None else ddelta_ND, dgains[0].to(weight.dtype),
            None if ctx.bias_type is None else dgains[1].to(ctx.bias_type), None)


add_norm_forward.register_autograd(gradients, setup_context=keep)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`reference.add_norm` in one kernel: x + delta, or x if delta is None, and the norm of the sum over its last axis.

    x, delta: `[..., D]` of what `dispatch.unsupported_norm` allows. The sum has the promoted dtype of x and delta; so
    has the norm without autocast. Under autocast the norm has autocast's dtype, which saves the cast of the next
    matmul, and the kernel writes the gradient of delta in delta's dtype. Sums are taken in a fixed order. There is no
    second derivative. Raises RuntimeError in forward-mode differentiation."""
    width = x.shape[-1]
    refuse_forward_mode(x, delta, weight, bias)
    if delta is not None:
        x = x.to(torch.promote_types(x.dtype, delta.dtype))
        delta = delta.expand_as(x).reshape(-1, width).contiguous()
    total_ND, normed_ND, _ = add_norm_forward(
        x.reshape(-1, width).contiguous(), delta, weight.contiguous(), None if bias is None else bias.contiguous(),
        matmul_dtype(x))
    return x if delta is None else total_ND.view(x.shape), normed_ND.view(x.shape)
