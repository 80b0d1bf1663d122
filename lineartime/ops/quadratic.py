"""FLASH-Quad's attention in kernels, between a layer's two projections, forward and backward. The
reference is `reference.gated_quadratic_attention`.

All E columns of v need each weight. So weights are written to memory, a buffer at a time, from
where a matmul reads them. Recomputing them costs 128 of every E + 128 multiply-adds."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.dispatch import on_own_device, refuse_forward_mode, schema_of
from lineartime.ops.dtypes import wide_dtype
from lineartime.ops.gradients import base_gradient, launch_make_heads, score_gradients, score_parts
from lineartime.ops.reference import HeadsFromZ, bias_or_zeros
from lineartime.ops.tiles import SIZE, dot, head_product, load_tile, silu, silu_slope, store_tile, visible_tile


@triton.jit
def weigh(own_head, other_head, w, documents, weights, first_row, first_own, T, row_stride, stride, scale,
          OF_QUERIES: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
          BS: tl.constexpr):
    """OF_QUERIES: the weights of BN keys for BM queries. Otherwise those of BM keys for BN queries.
    0 where masked. A tile that the causal mask hides is not written."""
    # The tile begins at `own` in the row and `into` in the buffer, its columns at `other`.
    n_others = tl.cdiv(T, BN)
    into, other = tl.program_id(0) // n_others * BM, tl.program_id(0) % n_others * BN
    own = first_own + into
    if CAUSAL:  # all of the tile is hidden
        if (other >= own + BM) if OF_QUERIES else (own >= other + BN):
            return
    first = (first_row + tl.program_id(1)).to(tl.int64) * T
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    query, key = (own + i[:, None], other + j[None, :]) if OF_QUERIES else (other + j[None, :], own + i[:, None])
    # q k^T is added onto the bias, which has been multiplied by n, BS dimensions at a time.
    score = head_product(own_head + (first + own) * SIZE, i, T - own, other_head + (first + other) * SIZE, j, T - other,
                         tl.load(w + (key - query)), BS)
    # Hidden pairs get weight 0.
    visible = visible_tile(query, key, documents, first, T, CAUSAL, DOCUMENTS)
    relu = tl.where(visible, tl.maximum(score * scale, 0.0), 0.0)
    at = tl.program_id(1).to(tl.int64) * row_stride + into.to(tl.int64) * stride + other
    tl.store(weights + at + i[:, None] * stride + j[None, :], (relu * relu).to(weights.dtype.element_ty))


@triton.jit
def add_up(weights, values, gate, dout, out, first_row, first_own, T, E, row_stride, stride, gate_stride, out_stride,
           OF_QUERIES: tl.constexpr, BACKWARD: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
           BK: tl.constexpr):
    """BE columns of weights times values. OF_QUERIES: for BM queries, values are v, and out is the
    sum times the gate silu(u), or BACKWARD the gradient of u. Otherwise, for BM keys, of do: the
    gradient of v.

    gate: u, or for keys v, before silu."""
    n_columns = tl.cdiv(E, BE)
    into, first_column = tl.program_id(0) // n_columns * BM, tl.program_id(0) % n_columns * BE
    if OF_QUERIES:  # the queries with the most keys come first
        into = (tl.num_programs(0) // n_columns - 1) * BM - into
    own = first_own + into
    first = (first_row + tl.program_id(1)).to(tl.int64) * T
    i, j, column = tl.arange(0, BM), tl.arange(0, BK), first_column + tl.arange(0, BE)
    begin, end = 0, T
    if CAUSAL:  # a query reads keys up to itself, a key the queries from itself on
        if OF_QUERIES:
            end = tl.minimum(own + BM, T)
        else:
            begin = own // BK * BK
    # Weights times values, BK of them at a time.
    x_row = weights + tl.program_id(1).to(tl.int64) * row_stride + into.to(tl.int64) * stride
    total = tl.zeros([BM, BE], tl.float32)
    for other in range(begin, end, BK):
        x = tl.load(x_row + other + i[:, None] * stride + j[None, :])
        total = dot(x, load_tile(values + (first + other) * E, j, column, T - other, E, E), total)

    gate_row, out_row = gate + (first + own) * gate_stride, out + (first + own) * out_stride
    # By quarters: registers do not hold a whole tile of gates besides the tile of sums.
    left, right = split_columns(total)
    parts = split_columns(left) + split_columns(right)
    for n in tl.static_range(4):
        column = first_column + n * (BE // 4) + tl.arange(0, BE // 4)
        by = load_tile(gate_row, i, column, T - own, gate_stride, E).to(tl.float32)
        by = silu_slope(by) if BACKWARD else silu(by)
        part = parts[n]
        if BACKWARD and OF_QUERIES:
            part *= load_tile(dout + (first + own) * E, i, column, T - own, E, E).to(tl.float32)
        store_tile(out_row, i, column, T - own, out_stride, part * by, E)


@triton.jit
def split_columns(tile):
    """The left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1]))


class QuadInputs(NamedTuple):
    """What the custom op takes, contiguous. documents: int32."""

    uvz: Tensor
    gamma: Tensor
    beta: Tensor
    sin: Tensor
    cos: Tensor
    w: Tensor
    documents: Tensor | None
    scale_len: float
    causal: bool


def sum_weighted(given: QuadInputs, heads: Tensor, values: Tensor, gate: Tensor, dout: Tensor | None, out: Tensor, *,
                 of_queries: bool, backward: bool) -> None:
    """Launch `weigh` and `add_up` for SCORES_AT_ONCE weights at a time.

    gate and out: contiguous but for the stride of tokens."""
    n_batch, n_tokens, e = values.shape
    # A tile of weights: own rows, others, columns of a head at a time, warps, stages of the loop.
    # Own rows are queries and others keys, or the reverse. Of sums: own rows, columns, others.
    wide = values.dtype == torch.float32
    bm, bn, bs, warps, stages = (64, 64, 32, 8, 2) if wide else (128, 128, 64, 8, 2)
    own, be, bk, sum_warps, sum_stages = (64, 64, 32, 8, 2) if wide else (128, 256, 64, 8, 3)  # bk divides bm and bn
    # q and k for queries, k and q for keys; the bias with room for the distances of whole tiles.
    own_head, other_head = (heads[0], heads[1]) if of_queries else (heads[1], heads[0])
    w_padded = F.pad(given.w.float() * given.scale_len, [max(bm, bn)] * 2)[max(bm, bn) + n_tokens - 1:]
    # A buffer holds the weights of several rows, or of some tiles of one, again and again.
    parts = score_parts(n_batch, n_tokens, bm, bn)
    weights = values.new_empty(parts[0].n_rows, parts[0].n_tiles * bm, parts[0].n_keys)
    for part in parts:
        weigh[part.n_tiles * part.n_keys // bn, part.n_rows](
            own_head, other_head, w_padded, given.documents, weights, part.first_row, part.first_tile * bm, n_tokens,
            weights.stride(0), weights.stride(1), 1 / given.scale_len, OF_QUERIES=of_queries, CAUSAL=given.causal,
            DOCUMENTS=given.documents is not None, BM=bm, BN=bn, BS=bs, num_warps=warps, num_stages=stages)
        add_up[triton.cdiv(part.n_tiles * bm, own) * triton.cdiv(e, be), part.n_rows](
            weights, values, gate, dout, out, part.first_row, part.first_tile * bm, n_tokens, e, weights.stride(0),
            weights.stride(1), gate.stride(1), out.stride(1), OF_QUERIES=of_queries, BACKWARD=backward,
            CAUSAL=given.causal, BM=own, BE=be, BK=bk, num_warps=sum_warps, num_stages=sum_stages)


@on_own_device
def quad_forward(*inputs: Any) -> Tensor:
    """`gated_quadratic_attention` of `QuadInputs`."""
    given, out = QuadInputs(*inputs), empty_quad_output(*inputs)
    e = out.shape[-1]
    heads, v = launch_make_heads(given.uvz, *given[1:5]), F.silu(given.uvz[..., e : 2 * e]).contiguous()
    sum_weighted(given, heads, v, given.uvz, None, out, of_queries=True, backward=False)
    return out


def empty_quad_output(*inputs: Any) -> Tensor:
    uvz, gamma, *_ = inputs
    return uvz.new_empty(*uvz.shape[:2], (uvz.shape[-1] - gamma.shape[-1]) // 2, dtype=wide_dtype(uvz))


@on_own_device
def quad_backward(dout: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of uvz, gamma, beta and w, the last three in float32."""
    given = QuadInputs(*inputs)
    uvz = given.uvz
    # Heads, v and do are made again: the forward pass keeps only its inputs.
    e = dout.shape[-1]
    heads = launch_make_heads(uvz, *given[1:5])
    u, v_before = uvz[..., :e], uvz[..., e : 2 * e]
    v, do = F.silu(v_before).contiguous(), (dout * F.silu(u)).to(uvz.dtype).contiguous()
    # The gradients of u and v by weights times values, then of q, k, the bias, and z.
    duvz, dheads = torch.empty_like(uvz), torch.empty_like(heads)
    sum_weighted(given, heads, v, u, dout, duvz, of_queries=True, backward=True)
    sum_weighted(given, heads, do, v_before, None, duvz[..., e:], of_queries=False, backward=True)
    dw = score_gradients(heads, v, do, given.w, given.documents, None, dheads, row_len=uvz.shape[1],
                         scale_len=given.scale_len, causal=given.causal)
    dgamma, dbeta = base_gradient(uvz, dheads, given.gamma, given.sin, given.cos, duvz)
    return duvz, dgamma, dbeta, dw


def empty_quad_gradients(dout: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = QuadInputs(*inputs)
    dgamma, dbeta, dw = (torch.empty_like(x, dtype=torch.float32) for x in (given.gamma, given.beta, given.w))
    return torch.empty_like(given.uvz), dgamma, dbeta, dw


def save_for_quad_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.how = inputs[-2:]  # what is no tensor
    ctx.save_for_backward(*inputs[:-2])


def quad_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    given = QuadInputs(*ctx.saved_tensors, *ctx.how)
    duvz, dgamma, dbeta, dw = quad_backward_op(dout.contiguous(), *given)
    return duvz, dgamma.to(given.gamma.dtype), dbeta.to(given.beta.dtype), None, None, dw.to(given.w.dtype), *[None] * 3


quad_op = torch.library.custom_op("lineartime::gated_quadratic_attention", quad_forward, mutates_args=(),
                                  schema=f"({schema_of(QuadInputs)}) -> Tensor")
quad_op.register_fake(empty_quad_output)
quad_op.register_autograd(quad_gradients, setup_context=save_for_quad_backward)
quad_backward_op = torch.library.custom_op(
    "lineartime::gated_quadratic_attention_backward", quad_backward, mutates_args=(),
    schema=f"(Tensor dout, {schema_of(QuadInputs)}) -> (Tensor, Tensor, Tensor, Tensor)")
quad_backward_op.register_fake(empty_quad_gradients)


def gated_quadratic_attention(uvz_BTF: Tensor, heads: HeadsFromZ, w: Tensor | None, *, scale_len: float, causal: bool,
                              segment_ids_BT: Tensor | None = None) -> Tensor:
    """`reference.gated_quadratic_attention` in kernels, where `dispatch.unsupported_rows` has no
    reason.

    First derivatives only, and none of sin and cos. Sums are float32 and deterministic. The
    backward pass needs only the inputs. Raises RuntimeError in forward-mode differentiation."""
    w = bias_or_zeros(w, uvz_BTF, uvz_BTF.shape[1])
    tensors = [x.contiguous() for x in (uvz_BTF, *heads, w)]
    refuse_forward_mode(*tensors)
    documents_BT = None if segment_ids_BT is None else segment_ids_BT.int().contiguous()
    return quad_op(*tensors, documents_BT, scale_len, causal)
