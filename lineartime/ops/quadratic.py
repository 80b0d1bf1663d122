"""FLASH-Quad's attention in kernels, from a layer's first projection to its second, forward and backward. The
definition is `reference.gated_quadratic_attention`.

Weights are made where they are used and never leave the chip. A program makes some columns of the output, so those of
all columns are made E / 256 times: a third of the products, and nothing to keep but the inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.gradients import base_gradient, make_heads, score_gradients
from lineartime.ops.limits import refuse_forward_mode
from lineartime.ops.tiles import HALF, dot, load_rows, silu, silu_slope, store_rows, visible_tile


def tiles_for(kind: torch.dtype) -> tuple[int, int, int, int, int, int]:
    """Own rows, others, columns of v in either half and of a head at a time, warps, and stages of the loop."""
    return (64, 32, 32, 32, 8, 2) if kind == torch.float32 else (128, 64, 128, 128, 8, 2)


@triton.jit
def attend(heads, values, w, documents, gate, dout, out, T, E, gate_stride, out_stride, scale, OF_QUERIES: tl.constexpr,
           BACKWARD: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BE: tl.constexpr, BS: tl.constexpr):
    """Twice BE columns of the sum of all values (v) by their weights for BM queries, times the gate silu(u), or
    BACKWARD the gradient of u from it. With the sides changed, of values (do) by their weights for BM keys: the
    gradient of v.

    gate: u, or v, before silu."""
    n_columns = tl.cdiv(E, 2 * BE)
    own, column1 = tl.program_id(0) // n_columns, tl.program_id(0) % n_columns * 2 * BE + tl.arange(0, BE)
    column2 = column1 + BE
    if OF_QUERIES:
        own = tl.num_programs(0) // n_columns - 1 - own  # those with the most keys begin first
    own *= BM
    first = tl.program_id(1).to(tl.int64) * T
    n_all = tl.num_programs(1).to(tl.int64) * T
    own_heads, other_heads = heads, heads + n_all * 2 * HALF
    if not OF_QUERIES:
        own_heads, other_heads = other_heads, own_heads
    own_heads += (first + own) * 2 * HALF
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    own_document = tl.load(documents + first + own + i, mask=own + i < T, other=-1) if DOCUMENTS else i
    begin, end = 0, T
    if CAUSAL:
        if OF_QUERIES:
            end = tl.minimum(own + BM, T)
        else:
            begin = own // BN * BN

    total1, total2 = tl.zeros([BM, BE], tl.float32), tl.zeros([BM, BE], tl.float32)
    for other in range(begin, end, BN):
        query, key = (own + i[:, None], other + j[None, :]) if OF_QUERIES else (other + j[None, :], own + i[:, None])
        score = tl.load(w + (key - query))
        for s in tl.static_range(0, 2 * HALF, BS):
            part = s + tl.arange(0, BS)
            x = load_rows(own_heads, i, part, T - own, 2 * HALF, 2 * HALF)
            y = load_rows(other_heads + (first + other) * 2 * HALF, j, part, T - other, 2 * HALF, 2 * HALF)
            score = dot(x, tl.trans(y), score)
        other_document = tl.load(documents + first + other + j, mask=other + j < T, other=-1) if DOCUMENTS else j
        query_document = own_document[:, None] if OF_QUERIES else other_document[None, :]
        key_document = other_document[None, :] if OF_QUERIES else own_document[:, None]
        visible = visible_tile(query, key, query_document, key_document, T, CAUSAL, DOCUMENTS)
        relu = tl.where(visible, tl.maximum(score * scale, 0.0), 0.0)
        weight = (relu * relu).to(values.dtype.element_ty)
        total1 = dot(weight, load_rows(values + (first + other) * E, j, column1, T - other, E, E), total1)
        total2 = dot(weight, load_rows(values + (first + other) * E, j, column2, T - other, E, E), total2)

    gate_row, out_row = gate + (first + own) * gate_stride, out + (first + own) * out_stride
    dout_row = dout + (first + own) * E if OF_QUERIES and BACKWARD else dout
    finish(total1, gate_row, gate_stride, dout_row, out_row, out_stride, i, column1, T - own, E, OF_QUERIES, BACKWARD)
    finish(total2, gate_row, gate_stride, dout_row, out_row, out_stride, i, column2, T - own, E, OF_QUERIES, BACKWARD)


@triton.jit
def finish(total, gate_row, gate_stride, dout_row, out_row, out_stride, i, column, n_tokens, E,
           OF_QUERIES: tl.constexpr, BACKWARD: tl.constexpr):
    """From a sum of values to what `attend` writes."""
    gate = load_rows(gate_row, i, column, n_tokens, E, gate_stride).to(tl.float32)
    if BACKWARD:
        total *= silu_slope(gate)
        if OF_QUERIES:
            total *= load_rows(dout_row, i, column, n_tokens, E, E).to(tl.float32)
    else:
        total *= silu(gate)
    store_rows(out_row, i, column, n_tokens, E, out_stride, total)


def run(heads: Tensor, values: Tensor, w: Tensor, documents: Tensor | None, gate: Tensor, dout: Tensor | None,
        out: Tensor, scale_len: int, causal: bool, *, of_queries: bool, backward: bool) -> None:
    """Launch `attend`. gate and out: contiguous but for the distance of tokens."""
    n_batch, n_tokens, e = values.shape
    bm, bn, be, bs, warps, stages = tiles_for(values.dtype)
    w_padded = F.pad(w.float() * scale_len, [max(bm, bn)] * 2)
    attend[triton.cdiv(n_tokens, bm) * triton.cdiv(e, 2 * be), n_batch](
        heads, values, w_padded[max(bm, bn) + n_tokens - 1:], documents, gate, dout, out, n_tokens, e, gate.stride(1),
        out.stride(1), 1 / scale_len, OF_QUERIES=of_queries, BACKWARD=backward, CAUSAL=causal,
        DOCUMENTS=documents is not None, BM=bm, BN=bn, BE=be, BS=bs, num_warps=warps, num_stages=stages)


@torch.library.custom_op("lineartime::gated_quadratic_attention", mutates_args=())
def forward(uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor, documents: Tensor | None,
            scale_len: int, causal: bool) -> Tensor:
    """`gated_quadratic_attention` of contiguous tensors; documents: int32."""
    e = (uvz.shape[-1] - gamma.shape[-1]) // 2
    out = uvz.new_empty(*uvz.shape[:2], e)
    run(make_heads(uvz, gamma, beta, sin, cos), F.silu(uvz[..., e : 2 * e]).contiguous(), w, documents, uvz, None, out,
        scale_len, causal, of_queries=True, backward=False)
    return out


@forward.register_fake
def _(uvz: Tensor, gamma: Tensor, *rest: object) -> Tensor:
    return uvz.new_empty(*uvz.shape[:2], (uvz.shape[-1] - gamma.shape[-1]) // 2)


@torch.library.custom_op("lineartime::gated_quadratic_attention_backward", mutates_args=())
def backward(dout: Tensor, uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
             documents: Tensor | None, scale_len: int, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of uvz, gamma, beta and w, the last three in float32."""
    e = dout.shape[-1]
    heads = make_heads(uvz, gamma, beta, sin, cos)
    u, v_before = uvz[..., :e], uvz[..., e : 2 * e]
    v, do = F.silu(v_before).contiguous(), (dout * F.silu(u)).contiguous()
    duvz, dheads = torch.empty_like(uvz), torch.empty_like(heads)
    run(heads, v, w, documents, u, dout, duvz, scale_len, causal, of_queries=True, backward=True)
    run(heads, do, w, documents, v_before, None, duvz[..., e:], scale_len, causal, of_queries=False, backward=True)
    dw = score_gradients(uvz, v, do, gamma, beta, sin, cos, w, documents, None, dheads, row_len=uvz.shape[1],
                         scale_len=scale_len, causal=causal)
    dgamma, dbeta = base_gradient(uvz, dheads, gamma, beta, sin, cos, duvz)
    return duvz, dgamma, dbeta, dw


@backward.register_fake
def _(dout: Tensor, uvz: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
      *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgamma, dbeta, dw = (torch.empty_like(x, dtype=torch.float32) for x in (gamma, beta, w))
    return torch.empty_like(uvz), dgamma, dbeta, dw


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale_len, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    uvz, gamma, beta, sin, cos, w, documents = ctx.saved_tensors
    duvz, dgamma, dbeta, dw = backward(dout.contiguous(), uvz, gamma, beta, sin, cos, w, documents, ctx.scale_len,
                                       ctx.causal)
    return duvz, dgamma.to(gamma.dtype), dbeta.to(beta.dtype), None, None, dw.to(w.dtype), None, None, None


forward.register_autograd(differentiate, setup_context=keep)


def gated_quadratic_attention(uvz_BTF: Tensor, gamma_2S: Tensor, beta_2S: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
                              *, scale_len: int, causal: bool, segment_ids_BT: Tensor | None = None) -> Tensor:
    """`reference.gated_quadratic_attention` in kernels, for what `ops.kernel_refuses` lets pass. Its first derivatives
    only, and none of sin and cos.

    Sums are float32 and always in one order: the same inputs give the same bits. Of the forward pass nothing is kept
    but its inputs."""
    tensors = [x.contiguous() for x in (uvz_BTF, gamma_2S, beta_2S, sin, cos, w)]
    refuse_forward_mode(*tensors)
    documents_BT = None if segment_ids_BT is None else segment_ids_BT.int().contiguous()
    return forward(*tensors, documents_BT, scale_len, causal)
