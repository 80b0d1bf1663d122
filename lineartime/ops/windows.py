"""FLASH's attention on a processor, with a backward pass of its own: what is large is recomputed and not kept.

The operations of `ops/reference.py` keep scores, heads and activations until the backward pass, three times what the
layer itself needs. Here a row is read in windows of chunks. Kept are the projection, what attention returns before the
gate, the state that enters each chunk, and heads where the caller gives them. The backward pass goes through the
windows from the last to the first, makes activations, heads and scores of one window again, and lets them go. Scores
that the causal mask hides are not computed. A backward pass that is itself differentiated is the reference's.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops import reference
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.second_derivatives import must_be_followed, reference_gradients

silu_backward = torch.ops.aten.silu_backward.grad_input
WINDOW_TOKENS = 2048
"""Tokens of a window: chunks of one row, or several whole rows; at least one chunk."""
BLOCK = 64
"""Queries whose scores are one product: keys after the last of them are left out. In bfloat16 a chunk is one block, for
there products are so fast that their number counts."""


class DocumentWeights(NamedTuple):
    """What the linear half needs to know of the documents of rows in chunks, as numbers of float32 at least."""

    ids_BGC: Tensor | None
    """None where a row is one document."""
    weight_BGC: Tensor
    """What a query is multiplied with: 0 where the state that enters is of another document. `[B, G, 1]` where a row is
    one document."""
    tail_BGC: Tensor | None
    """1 for tokens of the last document of their chunk, whose k v are in the state that leaves it."""
    goes_on_BG: Tensor | None
    """1 where that document is the one of the state that enters the chunk."""

    def part(self, rows: slice, window: slice) -> "DocumentWeights":
        """Those of some rows and chunks."""
        parts = [None if x is None else x[rows, window] for x in self]
        return DocumentWeights._make(parts)


def lay_out_documents(segment_ids_BT: Tensor | None, x_BT: Tensor, chunk_size: int, pooling: str) -> DocumentWeights:
    """The documents of the rows of a tensor `[B, T, ...]`; numbers are of its dtype, or of float32."""
    like = at_least_float32(x_BT[:0])  # for its dtype and device alone
    ids_BGC = reference.chunk_ids(segment_ids_BT, x_BT, chunk_size, causal=True)
    if ids_BGC is None:  # a query reads all tokens of the chunks before its own
        count_G = torch.arange(0, x_BT.shape[1], chunk_size, device=like.device).to(like.dtype)
        weight_G = 1 / count_G.clamp(min=1) if pooling == "mean" else torch.ones_like(count_G)
        return DocumentWeights(None, weight_G[:, None].expand(len(x_BT), -1, 1), None, None)
    # Values of width 0: only the numbers of tokens are wanted here, not the sums of k v.
    none_BGC0 = like.new_zeros(*ids_BGC.shape, 0)
    states = reference.states_of_rows(none_BGC0, none_BGC0, ids_BGC, causal=True)
    (seen_BGC,), count_BGC = reference.tokens_read(states, ids_BGC, None)
    last_BG, tail_BGC = reference.last_documents(ids_BGC)
    weight_BGC = seen_BGC / count_BGC.clamp(min=1) if pooling == "mean" else seen_BGC
    return DocumentWeights(ids_BGC, *(x.to(like.dtype) for x in (weight_BGC, tail_BGC, states[0][2] == last_BG)))


def windows_of(n_rows: int, n_chunks: int, chunk_size: int) -> list[tuple[slice, slice]]:
    """The rows and chunks of each window, in the order in which states go through them."""
    n = max(WINDOW_TOKENS // chunk_size, 1)
    if n_chunks <= n:  # short rows: several whole ones
        return [(slice(first, first + n // n_chunks), slice(0, n_chunks))
                for first in range(0, n_rows, n // n_chunks)]
    return [(slice(row, row + 1), slice(first, min(first + n, n_chunks)))
            for row in range(n_rows) for first in range(0, n_chunks, n)]


def causal_bias(w: Tensor, chunk_size: int) -> Tensor:
    """The position bias of a chunk, -inf for keys after the query: `[C, C]`, in float32 at least."""
    hidden_CC = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=w.device).triu(1)
    return at_least_float32(reference.toeplitz(w, chunk_size)).masked_fill(hidden_CC, -torch.inf)


class WindowInputs(NamedTuple):
    """What attention in the N chunks of a window takes, all of one dtype."""

    q_quad_NCS: Tensor
    """Divided by n."""
    k_quad_NCS: Tensor
    q_lin_NCS: Tensor
    """Multiplied with the weight of what it reads."""
    k_lin_NCS: Tensor
    """0 where the token's k v do not leave the chunk."""
    v_NCE: Tensor
    ids_NC: Tensor | None
    """DocumentWeights; None where a row is one."""
    bias_CC: Tensor

    @property
    def blocks(self) -> list[tuple[slice, slice]]:
        """The queries of each block, and the keys up to the last of them."""
        c = len(self.bias_CC)
        size = c if self.v_NCE.dtype == torch.bfloat16 else BLOCK
        return [(slice(first, min(first + size, c)), slice(0, min(first + size, c))) for first in range(0, c, size)]


def chunks(x_BT: Tensor, chunk_size: int) -> Tensor:
    """`reference.to_chunks` with one axis for rows and chunks: `[N, C, ...]`."""
    return reference.to_chunks(x_BT, chunk_size).flatten(0, 1)


def tokens(x_NC: Tensor, like_BT: Tensor) -> Tensor:
    """`[N, C, ...]` as `[B, T, ...]`, with the B and T of another tensor."""
    return reference.from_chunks(x_NC.unflatten(0, (len(like_BT), -1)), like_BT.shape[1])


def weighted(x_NCS: Tensor, weight_BGC: Tensor | None) -> Tensor:
    """x times a weight for each token, in x's dtype, rounded once; None: x."""
    if weight_BGC is None:
        return x_NCS
    return torch.mul(x_NCS, weight_BGC.flatten(0, 1)[..., None], out=torch.empty_like(x_NCS))


def make_inputs(heads: Iterable[Tensor], v_BTE: Tensor, documents: DocumentWeights, bias_CC: Tensor) -> WindowInputs:
    """The window of some tokens, of whose documents alone `documents` tells."""
    # The heads are scaled by 1 / n and by the documents' weights here, so that both halves are plain matmuls.
    q_quad, k_quad, q_lin, k_lin = (chunks(head_BTS, len(bias_CC)) for head_BTS in heads)
    ids_BGC, weight_BGC, tail_BGC, _ = documents
    return WindowInputs(q_quad / len(bias_CC), k_quad, weighted(q_lin, weight_BGC), weighted(k_lin, tail_BGC),
                  chunks(v_BTE, len(bias_CC)), None if ids_BGC is None else ids_BGC.flatten(0, 1), bias_CC)


def relu_scores(inputs: WindowInputs, rows: slice, keys: slice) -> Tensor:
    """relu(q k^T / n + b) of a block, in float32 at least: 0 for keys of other documents and keys after the query."""
    # The bias is -inf for keys after the query, which relu makes 0. Scores of other documents are set to 0.
    score_NRM = torch.bmm(inputs.q_quad_NCS[:, rows], inputs.k_quad_NCS[:, keys].mT) + inputs.bias_CC[rows, keys]
    if inputs.ids_NC is not None:
        score_NRM.masked_fill_(~reference.same_document(inputs.ids_NC[:, rows], inputs.ids_NC[:, keys]), 0.0)
    return score_NRM.relu_()


def attend(inputs: WindowInputs, kv_NSE: Tensor) -> Tensor:
    """Both halves of a window: `[N, C, E]`. kv_NSE: the states that enter its chunks."""
    # The linear half first; the quadratic half is added to it block by block.
    out_NCE = torch.bmm(inputs.q_lin_NCS, kv_NSE)
    for rows, keys in inputs.blocks:
        a_NRM = relu_scores(inputs, rows, keys).square_().to(out_NCE.dtype)
        out_NCE[:, rows].baddbmm_(a_NRM, inputs.v_NCE[:, keys])
    return out_NCE


def differentiate(dout_NCE: Tensor, inputs: WindowInputs, kv_NSE: Tensor, dkv_NSE: Tensor,
                  dbias_CC: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of the heads of a `WindowInputs`, each `[N, C, S]`, and of v; to dbias_CC its part is added.

    kv_NSE: the states that enter the chunks. dkv_NSE: the gradients of those that leave them."""
    # The linear half: out = q_lin kv, and kv of later chunks has k_lin v.
    dq_lin_NCS, dk_lin_NCS = torch.bmm(dout_NCE, kv_NSE.mT), torch.bmm(inputs.v_NCE, dkv_NSE.mT)
    dv_NCE = torch.bmm(inputs.k_lin_NCS, dkv_NSE)
    dq_NCS, dk_NCS = torch.empty_like(dq_lin_NCS), torch.zeros_like(dk_lin_NCS)
    for rows, keys in inputs.blocks:
        # The weight is relu^2, so the gradient of a score is 2 relu times that of the weight.
        relu_NRM = relu_scores(inputs, rows, keys)
        dout_NRE, v_NME = dout_NCE[:, rows], inputs.v_NCE[:, keys]
        dv_NCE[:, keys].baddbmm_(relu_NRM.square().to(v_NME.dtype).mT, dout_NRE)
        dscore_NRM = relu_NRM.mul_(torch.bmm(dout_NRE, v_NME.mT)).mul_(2)
        dbias_CC[rows, keys] += dscore_NRM.sum(0)
        dscore_NRM = dscore_NRM.to(v_NME.dtype)
        dq_NCS[:, rows] = torch.bmm(dscore_NRM, inputs.k_quad_NCS[:, keys])
        dk_NCS[:, keys].baddbmm_(dscore_NRM.mT, inputs.q_quad_NCS[:, rows])
    return (dq_NCS, dk_NCS, dq_lin_NCS, dk_lin_NCS), dv_NCE


def walk_states(added_NSE: Tensor, state_BSE: Tensor, goes_on_BG: Tensor | None, *, backwards: bool = False) -> Tensor:
    """The states before each chunk of a window, or backwards after it: `[N, S, E]`. state_BSE, the first, becomes that
    after the last: state = added + goes_on * state."""
    added_BGSE = added_NSE.unflatten(0, (len(state_BSE), -1))
    states_BGSE, n_chunks = torch.empty_like(added_BGSE), added_BGSE.shape[1]
    for i in reversed(range(n_chunks)) if backwards else range(n_chunks):
        # The chunk reads the state as it was. Then the state is dropped where its document ends, and gets the chunk's.
        states_BGSE[:, i] = state_BSE
        if goes_on_BG is not None:
            state_BSE *= goes_on_BG[:, i, None, None]
        state_BSE += added_BGSE[:, i]
    return states_BGSE.flatten(0, 1)


HeadsOf = Callable[[slice, slice], Iterable[Tensor]]
"""(rows, span of tokens) -> heads of these tokens, each `[B, T, S]` of uv's dtype: q and k of the quadratic half, then
of the linear half."""
TakeGradient = Callable[[slice, slice, list[Tensor]], None]
"""(rows, span of tokens, gradients of their heads, each `[B, T, S]`) -> None."""


def attend_rows(uv_BTF: Tensor, s: int, heads_of: HeadsOf, w: Tensor, documents: DocumentWeights,
                chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.gated_head_attention` of causal rows. For the backward pass also what attention says before the gate,
    attended_BTE, and the states that enter the chunks, kv_BGSE. s: the width of heads."""
    (n_rows, n_tokens, _), e = uv_BTF.shape, uv_BTF.shape[-1] // 2
    n_chunks, bias_CC = -(-n_tokens // chunk_size), causal_bias(w, chunk_size)
    out_BTE, attended_BTE = (uv_BTF.new_empty(n_rows, n_tokens, e) for _ in range(2))
    kv_BGSE = uv_BTF.new_empty(n_rows, n_chunks, s, e)
    for rows, window in windows_of(n_rows, n_chunks, chunk_size):
        span, here = slice(window.start * chunk_size, window.stop * chunk_size), documents.part(rows, window)
        u_BTE, v_BTE = (F.silu(part) for part in uv_BTF[rows, span].chunk(2, dim=-1))
        if window.start == 0:  # a row begins: nothing was read before
            state_BSE = bias_CC.new_zeros(len(u_BTE), s, e)
        # The states that enter the window's chunks, attention, and the gate.
        inputs = make_inputs(heads_of(rows, span), v_BTE, here, bias_CC)
        kv_NSE = walk_states(torch.bmm(inputs.k_lin_NCS.mT, inputs.v_NCE), state_BSE, here.goes_on_BG)
        kv_BGSE[rows, window] = kv_NSE.unflatten(0, (len(u_BTE), -1))
        attended_BTE[rows, span] = tokens(attend(inputs, kv_NSE), u_BTE)
        torch.mul(u_BTE, attended_BTE[rows, span], out=out_BTE[rows, span])
    return out_BTE, attended_BTE, kv_BGSE


def differentiate_rows(dout_BTE: Tensor, uv_BTF: Tensor, heads_of: HeadsOf, w: Tensor, attended_BTE: Tensor,
                       kv_BGSE: Tensor, documents: DocumentWeights, chunk_size: int, duv_BTF: Tensor,
                       take_gradient: TakeGradient) -> Tensor:
    """The gradient of w. That of uv is written to duv_BTF, those of heads are given to `take_gradient`."""
    n_rows, n_chunks, s, e = kv_BGSE.shape
    bias_CC = causal_bias(w, chunk_size)
    dbias_CC = torch.zeros_like(bias_CC)
    for rows, window in reversed(windows_of(n_rows, n_chunks, chunk_size)):
        span, here = slice(window.start * chunk_size, window.stop * chunk_size), documents.part(rows, window)
        u_BTE, v_BTE = (F.silu(part) for part in uv_BTF[rows, span].chunk(2, dim=-1))
        if window.stop == n_chunks:  # a row ends, where the backward pass begins: nothing reads the state that leaves
            dstate_BSE = bias_CC.new_zeros(len(u_BTE), s, e)
        inputs = make_inputs(heads_of(rows, span), v_BTE, here, bias_CC)
        # The gradient of the states walks backwards: from the chunks that read a state to those that made it.
        dattended_NCE = chunks(dout_BTE[rows, span] * u_BTE, chunk_size)
        dkv_NSE = walk_states(torch.bmm(inputs.q_lin_NCS.mT, dattended_NCE), dstate_BSE, here.goes_on_BG,
                              backwards=True)
        (dq_quad, dk_quad, dq_lin, dk_lin), dv_NCE = differentiate(
            dattended_NCE, inputs, kv_BGSE[rows, window].flatten(0, 1), dkv_NSE, dbias_CC)
        # Undo what `make_inputs` did to the heads, then silu and the gate.
        dheads = dq_quad / chunk_size, dk_quad, weighted(dq_lin, here.weight_BGC), weighted(dk_lin, here.tail_BGC)
        take_gradient(rows, span, [tokens(dhead_NCS, u_BTE) for dhead_NCS in dheads])
        (u_raw_BTE, v_raw_BTE), (du_BTE, dv_BTE) = (x[rows, span].chunk(2, dim=-1) for x in (uv_BTF, duv_BTF))
        silu_backward(dout_BTE[rows, span] * attended_BTE[rows, span], u_raw_BTE, grad_input=du_BTE)
        silu_backward(tokens(dv_NCE, u_BTE), v_raw_BTE, grad_input=dv_BTE)
    return diagonal_sums(dbias_CC).to(w.dtype)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keep the inputs and what `attend_rows` returns for the backward pass."""
    *tensors, ctx.documents, ctx.chunk_size, ctx.definition = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:])


class GatedHeadAttention(torch.autograd.Function):
    """`attend_rows` of heads that are made already, and the gradients of uv, heads and w."""

    @staticmethod
    def forward(uv_BTF: Tensor, q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, w: Tensor,
                documents: DocumentWeights, chunk_size: int,
                definition: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        heads = q_quad, k_quad, q_lin, k_lin
        return attend_rows(uv_BTF, q_quad.shape[-1], lambda rows, span: (x[rows, span] for x in heads), w, documents,
                           chunk_size)

    setup_context = staticmethod(keep)

    @staticmethod
    def backward(ctx: Any, dout_BTE: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, attended_BTE, kv_BGSE = ctx.saved_tensors
        if must_be_followed(dout_BTE):  # what is written in place below could not be differentiated again
            return *reference_gradients(ctx.definition, inputs, dout_BTE, ctx.needs_input_grad[:6]), None, None, None
        uv_BTF, *heads, w = inputs
        duv_BTF, all_dheads = torch.empty_like(uv_BTF), [torch.empty_like(x) for x in heads]

        def take_gradient(rows: slice, span: slice, dheads: list[Tensor]) -> None:
            for whole, part in zip(all_dheads, dheads, strict=True):
                whole[rows, span] = part

        dw = differentiate_rows(dout_BTE, uv_BTF, lambda rows, span: (x[rows, span] for x in heads), w, attended_BTE,
                                kv_BGSE, ctx.documents, ctx.chunk_size, duv_BTF, take_gradient)
        return duv_BTF, *all_dheads, dw, None, None, None


def rotate(x_4BTS: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """`reference.rope`, in half as many passes, which autograd could not follow."""
    # [x1 cos - x2 sin, x2 cos + x1 sin], written straight into its halves.
    out_4BTS = torch.empty_like(x_4BTS)
    (x1, x2), (out1, out2) = x_4BTS.chunk(2, dim=-1), out_4BTS.chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin)
    return out_4BTS


class GatedChunkAttention(torch.autograd.Function):
    """`attend_rows` of heads that are made from z, and the gradients of uvz, gamma, beta and w."""

    @staticmethod
    def forward(uvz_BTF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin: Tensor, cos: Tensor, w: Tensor,
                documents: DocumentWeights, chunk_size: int,
                definition: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        s = gamma_4S.shape[-1]
        return attend_rows(uvz_BTF[..., :-s], s, partial(heads_from_z, uvz_BTF, gamma_4S, beta_4S, sin, cos), w,
                           documents, chunk_size)

    setup_context = staticmethod(keep)

    @staticmethod
    def backward(ctx: Any, dout_BTE: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, attended_BTE, kv_BGSE = ctx.saved_tensors
        if must_be_followed(dout_BTE):
            return *reference_gradients(ctx.definition, inputs, dout_BTE, ctx.needs_input_grad[:6]), None, None, None
        uvz_BTF, gamma_4S, beta_4S, sin, cos, w = inputs
        s, duvz_BTF = gamma_4S.shape[-1], torch.empty_like(uvz_BTF)
        dgamma_4S, dbeta_4S = torch.zeros_like(gamma_4S), torch.zeros_like(beta_4S)

        def take_gradient(rows: slice, span: slice, dheads: list[Tensor]) -> None:
            # Back through RoPE, then scale and offset, then silu.
            z_raw_BTS = uvz_BTF[rows, span, -s:]
            sin_BTR, cos_BTR = part_of(sin, rows, span), part_of(cos, rows, span)
            dheads_4BTS = torch.stack([at_least_float32(dhead_BTS) for dhead_BTS in dheads])
            dmade_4BTS = rotate(dheads_4BTS, -sin_BTR, cos_BTR)
            dbeta_4S.add_(dmade_4BTS.sum((1, 2)))
            dgamma_4S.add_((dmade_4BTS * F.silu(z_raw_BTS)).sum((1, 2)))
            dz_BTS = dmade_4BTS.mul_(gamma_4S[:, None, None]).sum(0).to(z_raw_BTS.dtype)
            silu_backward(dz_BTS, z_raw_BTS, grad_input=duvz_BTF[rows, span, -s:])

        dw = differentiate_rows(
            dout_BTE, uvz_BTF[..., :-s], partial(heads_from_z, uvz_BTF, gamma_4S, beta_4S, sin, cos), w,
            attended_BTE, kv_BGSE, ctx.documents, ctx.chunk_size, duvz_BTF[..., :-s], take_gradient)
        return duvz_BTF, dgamma_4S, dbeta_4S, None, None, dw, None, None, None


def heads_from_z(uvz_BTF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin: Tensor, cos: Tensor, rows: slice,
                 span: slice) -> Tensor:
    """`reference.make_heads` of some tokens."""
    z_BTS = F.silu(uvz_BTF[rows, span, -gamma_4S.shape[-1] :])
    # In float32 until the heads are complete, then rounded once.
    z, gamma, beta = (at_least_float32(x) for x in (z_BTS, gamma_4S[:, None, None], beta_4S[:, None, None]))
    made_4BTS = torch.addcmul(beta, z, gamma)
    return rotate(made_4BTS, part_of(sin, rows, span), part_of(cos, rows, span)).to(z_BTS.dtype)


def part_of(angle: Tensor, rows: slice, span: slice) -> Tensor:
    """The angles `[1 or B, T, S / 2]` of some tokens."""
    return angle[rows if len(angle) > 1 else slice(0, 1), span]


def diagonal_sums(x_CC: Tensor) -> Tensor:
    """The transpose of `reference.toeplitz`: sums over the diagonals, `[2 C - 1]`."""
    # Entry [i, j] belongs to the distance j - i, which is at j - i + C - 1.
    index_C = torch.arange(len(x_CC), device=x_CC.device)
    at_CC = index_C - index_C[:, None] + len(x_CC) - 1
    return x_CC.new_zeros(2 * len(x_CC) - 1).index_add_(0, at_CC.flatten(), x_CC.flatten())


def gated_chunk_attention(uvz_BTF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin: Tensor, cos: Tensor, w: Tensor, *,
                          chunk_size: int, causal: bool, segment_ids_BT: Tensor | None = None, pooling: str = "mean",
                          exchange: reference.Exchange | None = None) -> Tensor:
    """`reference.gated_chunk_attention`, for what `dispatch.use_windows` allows."""
    assert causal and exchange is None
    documents = lay_out_documents(segment_ids_BT, uvz_BTF, chunk_size, pooling)
    definition = partial(reference.gated_chunk_attention, chunk_size=chunk_size, causal=True,
                         segment_ids_BT=segment_ids_BT, pooling=pooling)
    return GatedChunkAttention.apply(uvz_BTF, gamma_4S, beta_4S, sin, cos, w, documents, chunk_size, definition)[0]


def gated_head_attention(uv_BTF: Tensor, heads: Sequence[Tensor], w: Tensor, *, chunk_size: int, causal: bool,
                         segment_ids_BT: Tensor | None = None, pooling: str = "mean", gate_BT: Tensor | None = None,
                         exchange: reference.Exchange | None = None) -> Tensor:
    """`reference.gated_head_attention`, for what `dispatch.use_windows` allows. What "written" divides by, q has
    here."""
    assert causal and exchange is None
    heads = reference.divided_by_gates(heads, gate_BT, segment_ids_BT, chunk_size, causal)
    documents = lay_out_documents(segment_ids_BT, uv_BTF, chunk_size, pooling)

    def definition(uv_BTF: Tensor, *heads_and_w: Tensor) -> Tensor:
        # The heads have their divisor already, so "written" and "fixed" are sums here.
        *heads, w = heads_and_w
        return reference.gated_head_attention(uv_BTF, heads, w, chunk_size=chunk_size, causal=True,
                                              segment_ids_BT=segment_ids_BT,
                                              pooling="mean" if pooling == "mean" else "sum")

    return GatedHeadAttention.apply(uv_BTF, *heads, w, documents, chunk_size, definition)[0]
