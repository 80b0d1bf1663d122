"""FLASH's attention for one token per row in one kernel, see `decoding.extend.extend_by_one`.

A program computes some columns of a row's output. Every program of a row computes its heads and
scores, which costs little compared with reading its columns of values and of the state. The token's
position is read on the device, so that a CUDA graph can replay the launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.dispatch import on_own_device, refuse_forward_mode
from lineartime.ops.dtypes import wide_dtype
from lineartime.ops.reference import Heads, HeadsFromZ
from lineartime.ops.tiles import HALF, load_angles, load_base, load_tile, make_head, silu

SLOTS, STAGES = 32, 3  # slots of the open chunk that are read at a time, and stages of the pipeline of these reads

MANY_PROGRAMS = 256  # number of programs that fill a GPU; with fewer, each program has fewer columns


@triton.jit
def relu2(x):
    x = tl.maximum(x, 0.0)
    return x * x


@triton.jit
def head_of_token(heads, head, z1, z2, gamma, beta, sin, cos, b, dtype: tl.constexpr):
    """The two halves of one head of row b's token: made from z, or loaded where heads are made."""
    if heads is None:
        x1, x2 = make_head(z1, z2, gamma, beta, head, sin, cos, dtype)
    else:
        at = heads + (head * tl.num_programs(1) + b) * 2 * HALF + tl.arange(0, HALF)[None, :]
        x1, x2 = tl.load(at), tl.load(at + HALF)
    return x1, x2


@triton.jit
def decode_columns(uvz, heads, gamma, beta, sin, cos, bias, k_quad, k_lin, v, kv, offset, first, weight, out, E, F,
                   C: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, N_STAGES: tl.constexpr):
    """BE columns of a row's output. It also writes them of v; a row's first program writes k."""
    dtype = v.dtype.element_ty
    b = tl.program_id(1).to(tl.int64)
    column, half, only = tl.program_id(0) * BE + tl.arange(0, BE), tl.arange(0, HALF), tl.arange(0, 1)
    offset, first, weight = tl.load(offset + b).to(tl.int32), tl.load(first + b).to(tl.int32), tl.load(weight + b)
    uvz_row, k_row, v_row = uvz + b * F, k_quad + b * C * 2 * HALF, v + b * C * E

    z1, z2 = only, only
    if heads is None:
        z1, z2 = load_base(uvz_row + 2 * E, only, 1, F)
        sin, cos = load_angles(sin + b * HALF, cos + b * HALF, only, 1)
    q1, q2 = head_of_token(heads, 0, z1, z2, gamma, beta, sin, cos, b, dtype)
    k1, k2 = head_of_token(heads, 1, z1, z2, gamma, beta, sin, cos, b, dtype)
    mask = column < E
    new_v = silu(tl.load(uvz_row + E + column, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(v_row + offset * E + column, new_v, mask=mask)
    if tl.program_id(0) == 0:
        own = (offset * 2 * HALF + half)[None, :]
        tl.store(k_row + own, k1)
        tl.store(k_row + own + HALF, k2)
        l1, l2 = head_of_token(heads, 3, z1, z2, gamma, beta, sin, cos, b, dtype)
        tl.store(k_lin + b * C * 2 * HALF + own, l1)
        tl.store(k_lin + b * C * 2 * HALF + own + HALF, l2)

    # The token's own key is taken from registers: another program may not have written it yet.
    q1, q2 = q1.to(tl.float32), q2.to(tl.float32)
    own_score = tl.sum(tl.sum(q1 * k1.to(tl.float32) + q2 * k2.to(tl.float32), 1), 0) / C + tl.load(bias + C - 1)
    added = tl.zeros([BC, BE], tl.float32)
    for start in tl.range(tl.maximum(first, 0) // BC * BC, offset, BC, num_stages=N_STAGES):
        slot = start + tl.arange(0, BC)
        seen = (slot >= first) & (slot < offset)
        at = k_row + slot[:, None] * 2 * HALF + half[None, :]
        product = q1 * tl.load(at, mask=seen[:, None], other=0.0)
        product += q2 * tl.load(at + HALF, mask=seen[:, None], other=0.0)
        score = tl.sum(product, 1) / C + tl.load(bias + C - 1 - offset + slot, mask=seen, other=0.0)
        value = tl.load(v_row + slot[:, None] * E + column[None, :], mask=seen[:, None] & mask[None, :], other=0.0)
        added += tl.where(seen, relu2(score), 0.0)[:, None] * value
    made = relu2(own_score) * new_v + tl.sum(added, 0)
    if weight > 0:  # kv is undefined if the document has no closed chunk
        l1, l2 = head_of_token(heads, 2, z1, z2, gamma, beta, sin, cos, b, dtype)
        kv_row = kv + b * 2 * HALF * E
        made += weight * tl.sum(tl.trans(l1).to(tl.float32) * load_tile(kv_row, half, column, HALF, E, E), 0)
        made += weight * tl.sum(tl.trans(l2).to(tl.float32) * load_tile(kv_row + HALF * E, half, column, HALF, E, E), 0)
    u = silu(tl.load(uvz_row + column, mask=mask, other=0.0).to(tl.float32))
    tl.store(out + b * E + column, (u * made).to(out.dtype.element_ty), mask=mask)


def columns_for(n_rows: int, width: int) -> int:
    """Columns of the output per program: fewer if there are few rows."""
    for columns in (128, 64):
        if n_rows * triton.cdiv(width, columns) >= MANY_PROGRAMS:
            return columns
    return 32


@on_own_device
def launch(uvz_BF: Tensor, heads_4BS: Tensor | None, gamma_4S: Tensor | None, beta_4S: Tensor | None,
           sin_BR: Tensor | None, cos_BR: Tensor | None, bias_C: Tensor, k_quad_BCS: Tensor, k_lin_BCS: Tensor,
           v_BCE: Tensor, kv_BSE: Tensor, offset_B: Tensor, first_B: Tensor, weight_B: Tensor) -> Tensor:
    """Launch the kernel, with heads or what makes them; the rest is as in `ops`, contiguous."""
    n_rows, c, e = v_BCE.shape
    out_BE, columns = uvz_BF.new_empty(n_rows, e, dtype=wide_dtype(uvz_BF)), columns_for(n_rows, e)
    decode_columns[(triton.cdiv(e, columns), n_rows)](
        uvz_BF, heads_4BS, gamma_4S, beta_4S, sin_BR, cos_BR, bias_C, k_quad_BCS, k_lin_BCS, v_BCE, kv_BSE, offset_B,
        first_B, weight_B, out_BE, e, uvz_BF.shape[1], c, SLOTS, columns, STAGES, num_warps=4)
    return out_BE


decode_op = torch.library.custom_op("lineartime::chunk_decode_step", launch,
                                    mutates_args=("k_quad_BCS", "k_lin_BCS", "v_BCE"))


@decode_op.register_fake
def empty_output(uvz_BF: Tensor, heads_4BS: Tensor | None, gamma_4S: Tensor | None, beta_4S: Tensor | None,
                 sin_BR: Tensor | None, cos_BR: Tensor | None, bias_C: Tensor, k_quad_BCS: Tensor, k_lin_BCS: Tensor,
                 v_BCE: Tensor, *rest: Tensor) -> Tensor:
    return uvz_BF.new_empty(v_BCE.shape[::2], dtype=wide_dtype(uvz_BF))


def chunk_decode_step(uvz_B1F: Tensor, heads: Heads, bias_C: Tensor, k_quad_BCS: Tensor, k_lin_BCS: Tensor,
                      v_BCE: Tensor, kv_BSE: Tensor, offset_B: Tensor, first_B: Tensor, weight_B: Tensor) -> Tensor:
    """Causal `gated_chunk_attention` of one new token per row, for S = 128: `[B, 1, E]`.

    | argument | shape, dtype | meaning |
    |---|---|---|
    | uvz_B1F, heads | float32, bfloat16 or float16 | as in `ops.gated_chunk_attention`, T = 1 |
    | bias_C | `[C]`, float32 at least | position bias at key minus query position: 1 - C, ..., 0 |
    | k_quad_BCS, k_lin_BCS, v_BCE | uvz's dtype | the open chunk, written at slot `offset_B` |
    | kv_BSE | `[B, S, E]`, float32 | sum of k v over closed chunks |
    | offset_B | `[B]`, integer | slot of the token in the open chunk |
    | first_B | `[B]`, integer | its document's first slot; below 0 if in an earlier chunk |
    | weight_B | `[B]`, floating | factor of the linear half |

    A chunk that the token fills is not added to kv_BSE. Rounding may depend on the number of rows.
    Raises RuntimeError if an input requires a gradient or has a forward-mode tangent, ValueError
    for heads or buffers of another dtype, or gaps in buffers."""
    buffers = k_quad_BCS, k_lin_BCS, v_BCE
    inputs = (uvz_B1F, *heads, bias_C, kv_BSE, weight_B, *buffers)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise RuntimeError("a decode step in a kernel has no gradient: call it under torch.no_grad()")
    refuse_forward_mode(*inputs)
    if any(buffer.dtype != uvz_B1F.dtype or not buffer.is_contiguous() for buffer in buffers):
        raise ValueError("buffers must be contiguous and have the dtype of uvz")
    if isinstance(heads, HeadsFromZ):
        gamma_4S, beta_4S, *angles = heads
        made_or_by = None, gamma_4S, beta_4S, *(x.expand(len(uvz_B1F), -1, -1)[:, 0] for x in angles)
    else:
        if heads[0].dtype != uvz_B1F.dtype:
            raise ValueError("heads must have the dtype of uv")
        made_or_by = torch.stack(list(heads))[:, :, 0], None, None, None, None
    given = (uvz_B1F[:, 0], *made_or_by, bias_C, *buffers, kv_BSE, offset_B, first_B, weight_B)
    return decode_op(*(None if x is None else x.contiguous() for x in given))[:, None]
