"""FLASH's attention on a processor, whose backward pass recomputes what is large.

The operations of `ops/reference.py` keep scores, heads and activations until the backward pass,
three times what the layer itself needs. Here a row is read in windows of chunks. Kept are the
projection, what attention returns before the gate, the states that each chunk reads, and heads
where the caller gives them. The backward pass goes through the windows from the last to the first,
makes activations, heads and scores of one window again, and lets them go. Where the causal mask
hides whole blocks of scores, these are not computed. A second derivative is taken by the reference.

The states of causal rows are carried from window to window. Those of other rows come from both
sides, so all states of a row are made before its first window is read."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops import reference
from lineartime.ops.dispatch import must_be_followed, reference_gradients
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import Heads, HeadsFromZ

silu_backward = torch.ops.aten.silu_backward.grad_input
WINDOW_TOKENS = 2048
"""Tokens of a window: chunks of one row, or several whole rows; at least one chunk."""
SCORE_BLOCK = 64
"""Queries whose scores are one matmul, which leaves out the keys after the last of them. A chunk is
one block if not causal, and in bfloat16, where matmuls are so fast that fewer are better."""


class DocumentWeights(NamedTuple):
    """What the linear half needs to know of documents, as numbers of float32 at least.

    A query reads states from D directions: the sum over earlier chunks, and when not causal that
    over later ones. Where a row that is not causal is one document, it reads one, the sum over all
    chunks."""

    causal: bool
    ids_BGC: Tensor | None
    """None where a row is one document."""
    weight_BGCD: Tensor
    """Factors of queries: 0 for another document's state. `[B, G, 1, 1]` for one document."""
    kept_BGCD: Tensor | None = None
    """1 for tokens whose k v are in the state that leaves their chunk: its last document's,
    backwards its first's."""
    goes_on_BGD: Tensor | None = None
    """1 where that document is the one of the state that enters the chunk."""
    own_BGC: Tensor | None = None
    """What a query is multiplied with when it reads its own chunk, which no state has."""

    def part(self, rows: slice, window: slice) -> "DocumentWeights":
        """Those of some rows and chunks."""
        return DocumentWeights._make([x[rows, window] if isinstance(x, Tensor) else x for x in self])


def weigh_documents(segment_ids_BT: Tensor | None, x_BT: Tensor, chunk_size: int, pooling: str,
                    causal: bool) -> DocumentWeights:
    """The `DocumentWeights` of rows `[B, T, ...]`, in their dtype, float32 at least."""
    like, n_tokens = at_least_float32(x_BT[:0]), x_BT.shape[1]  # the first for its dtype and device alone
    if segment_ids_BT is None:  # a query reads all tokens of the chunks before its own, or of the row
        first_G = torch.arange(0, n_tokens, chunk_size, device=like.device).to(like.dtype)
        count_G = first_G.clamp(min=1) if causal else torch.full_like(first_G, n_tokens)
        weight_G = 1 / count_G if pooling == "mean" else torch.ones_like(count_G)
        return DocumentWeights(causal, None, weight_G[:, None, None].expand(len(x_BT), -1, 1, 1))
    ids_BGC = reference.to_chunks(segment_ids_BT, chunk_size, fill=-1)
    # Values of width 0: only the numbers of tokens are wanted here, not the sums of k v.
    none_BGC0 = like.new_zeros(*ids_BGC.shape, 0)
    states = reference.states_of_rows(none_BGC0, none_BGC0, ids_BGC, causal=causal)
    seen, count_BGC = reference.tokens_read(states, ids_BGC, None)
    each_BGC = 1 / count_BGC.clamp(min=1) if pooling == "mean" else torch.ones_like(count_BGC)
    last_BG, tail_BGC = reference.last_documents(ids_BGC)
    kept, goes_on = [tail_BGC], [states[0][2] == last_BG]
    if not causal:  # the same of rows that are read from their end
        first_BG, head_BGC = reference.last_documents(reference.reversed_ids(ids_BGC))
        kept.append(head_BGC.flip(1, 2))
        goes_on.append((states[1][2] == first_BG).flip(1))
    weights = [seen_BGC * each_BGC for seen_BGC in seen]
    weight_BGCD, kept_BGCD, goes_on_BGD = (torch.stack(x, -1).to(like.dtype) for x in (weights, kept, goes_on))
    return DocumentWeights(causal, ids_BGC, weight_BGCD, kept_BGCD, goes_on_BGD,
                           None if causal else each_BGC.to(like.dtype))


def windows_of(n_rows: int, n_chunks: int, chunk_size: int) -> list[tuple[slice, slice]]:
    """The rows and chunks of each window, in the order in which states go through them."""
    n = max(WINDOW_TOKENS // chunk_size, 1)
    if n_chunks <= n:  # short rows: several whole ones
        return [(slice(first, first + n // n_chunks), slice(0, n_chunks))
                for first in range(0, n_rows, n // n_chunks)]
    return [(slice(row, row + 1), slice(first, min(first + n, n_chunks)))
            for row in range(n_rows) for first in range(0, n_chunks, n)]


def bias_of_chunk(w: Tensor, chunk_size: int, causal: bool) -> Tensor:
    """The bias of a chunk: `[C, C]`, float32 at least; when causal -inf for keys after the
    query."""
    bias_CC = at_least_float32(reference.toeplitz(w, chunk_size))
    return bias_CC.masked_fill(torch.ones_like(bias_CC, dtype=torch.bool).triu(1), -torch.inf) if causal else bias_CC


class WindowInputs(NamedTuple):
    """What attention in the N chunks of a window takes, all of one dtype."""

    q_quad_NCS: Tensor
    """Divided by n."""
    k_quad_NCS: Tensor
    q_lin_NCF: Tensor
    """Multiplied with the weight of what it reads in each of D directions, F = D S."""
    k_lin_NCF: Tensor
    """0 where the token's k v do not leave the chunk in a direction."""
    v_NCE: Tensor
    own: tuple[Tensor, Tensor] | None
    """q and k `[N, C, S]` of the linear half inside the chunk, or None; q has its weight."""
    ids_NC: Tensor | None
    """The documents; None where a row is one."""
    bias_CC: Tensor
    causal: bool

    @property
    def blocks(self) -> list[tuple[slice, slice]]:
        """The queries of each block, and its keys: when causal up to the last of the queries."""
        c = len(self.bias_CC)
        size = SCORE_BLOCK if self.causal and self.v_NCE.dtype != torch.bfloat16 else c
        return [(slice(first, min(first + size, c)), slice(0, min(first + size, c))) for first in range(0, c, size)]


def chunks(x_BT: Tensor, chunk_size: int) -> Tensor:
    """`reference.to_chunks` with one axis for rows and chunks: `[N, C, ...]`."""
    return reference.to_chunks(x_BT, chunk_size).flatten(0, 1)


def tokens(x_NC: Tensor, like_BT: Tensor) -> Tensor:
    """`[N, C, ...]` as `[B, T, ...]`, with the B and T of another tensor."""
    return reference.from_chunks(x_NC.unflatten(0, (len(like_BT), -1)), like_BT.shape[1])


def weighted(x_NCS: Tensor, weight_BGCD: Tensor | None) -> Tensor:
    """x times each token's weight of each direction, side by side: `[N, C, D S]`, rounded once."""
    if weight_BGCD is None:
        return x_NCS
    out_NCDS = x_NCS.new_empty(*x_NCS.shape[:2], weight_BGCD.shape[-1], x_NCS.shape[2])
    return torch.mul(x_NCS[:, :, None], weight_BGCD.flatten(0, 1)[..., None], out=out_NCDS).flatten(2)


def unweighted(dx_NCF: Tensor, weight_BGCD: Tensor | None) -> Tensor:
    """The gradient of x, from that of what `weighted` returns."""
    if weight_BGCD is None or weight_BGCD.shape[-1] == 1:
        return weighted(dx_NCF, weight_BGCD)
    dx_NCDS = dx_NCF.unflatten(2, (weight_BGCD.shape[-1], -1))
    return (dx_NCDS * weight_BGCD.flatten(0, 1)[..., None]).sum(2).to(dx_NCF.dtype)


def make_inputs(heads: Iterable[Tensor], v_BTE: Tensor, documents: DocumentWeights, bias_CC: Tensor) -> WindowInputs:
    """The `WindowInputs` of one window, from its own heads, values and documents."""
    # Heads are scaled by 1 / n and the weights here, so that both halves are plain matmuls.
    q_quad, k_quad, q_lin, k_lin = (chunks(head_BTS, len(bias_CC)) for head_BTS in heads)
    causal, ids_BGC, weight_BGCD, kept_BGCD, _, own_BGC = documents
    own = None if own_BGC is None else (weighted(q_lin, own_BGC[..., None]), k_lin)
    return WindowInputs(q_quad / len(bias_CC), k_quad, weighted(q_lin, weight_BGCD), weighted(k_lin, kept_BGCD),
                        chunks(v_BTE, len(bias_CC)), own, None if ids_BGC is None else ids_BGC.flatten(0, 1), bias_CC,
                        causal)


def block_product(x_NRS: Tensor, y_NMS: Tensor, hidden_NRM: Tensor | None) -> Tensor:
    """x y^T of a block, and 0 where hidden."""
    product_NRM = torch.bmm(x_NRS, y_NMS.mT)
    return product_NRM if hidden_NRM is None else product_NRM.masked_fill_(hidden_NRM, 0.0)


def block_scores(inputs: WindowInputs, rows: slice, keys: slice) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """What a block has: which keys are hidden; relu(q k^T / n + b), in float32 at least and 0 for
    hidden keys; and the linear half's weights inside the chunk. None where there is none."""
    ids_NC, hidden_NRM, own_NRM = inputs.ids_NC, None, None
    if ids_NC is not None:
        hidden_NRM = ~reference.same_document(ids_NC[:, rows], ids_NC[:, keys])
    # When causal the bias is -inf for keys after the query, which relu makes 0.
    score_NRM = torch.bmm(inputs.q_quad_NCS[:, rows], inputs.k_quad_NCS[:, keys].mT) + inputs.bias_CC[rows, keys]
    if hidden_NRM is not None:
        score_NRM.masked_fill_(hidden_NRM, 0.0)
    if inputs.own is not None:
        q_NCS, k_NCS = inputs.own
        own_NRM = block_product(q_NCS[:, rows], k_NCS[:, keys], hidden_NRM)
    return hidden_NRM, score_NRM.relu_(), own_NRM


def attend(inputs: WindowInputs, kv_NFE: Tensor) -> Tensor:
    """Both halves of a window: `[N, C, E]`. kv_NFE: the states that its chunks read."""
    # What is read from states first; what is inside the chunk is added to it block by block.
    out_NCE = torch.bmm(inputs.q_lin_NCF, kv_NFE)
    for rows, keys in inputs.blocks:
        _, relu_NRM, own_NRM = block_scores(inputs, rows, keys)
        a_NRM = relu_NRM.square_() if own_NRM is None else own_NRM + relu_NRM.square_()
        out_NCE[:, rows].baddbmm_(a_NRM.to(out_NCE.dtype), inputs.v_NCE[:, keys])
    return out_NCE


def differentiate(dout_NCE: Tensor, inputs: WindowInputs, kv_NFE: Tensor, dkv_NFE: Tensor,
                  dbias_CC: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None, Tensor]:
    """The gradients of the heads of a `WindowInputs`, of its `own`, and of v; to dbias_CC its part
    is added.

    kv_NFE: the states that the chunks read. dkv_NFE: the gradients of those that they make."""
    # The linear half: out = q_lin kv, and kv of other chunks has k_lin v.
    dq_lin_NCF, dk_lin_NCF = torch.bmm(dout_NCE, kv_NFE.mT), torch.bmm(inputs.v_NCE, dkv_NFE.mT)
    dv_NCE = torch.bmm(inputs.k_lin_NCF, dkv_NFE)
    dq_NCS, dk_NCS = torch.empty_like(inputs.q_quad_NCS), torch.zeros_like(inputs.k_quad_NCS)
    d_own = None if inputs.own is None else (torch.empty_like(inputs.own[0]), torch.zeros_like(inputs.own[1]))
    for rows, keys in inputs.blocks:
        hidden_NRM, relu_NRM, own_NRM = block_scores(inputs, rows, keys)
        dout_NRE, v_NME = dout_NCE[:, rows], inputs.v_NCE[:, keys]
        a_NRM = relu_NRM.square() if own_NRM is None else own_NRM + relu_NRM.square()
        dv_NCE[:, keys].baddbmm_(a_NRM.to(v_NME.dtype).mT, dout_NRE)
        da_NRM = block_product(dout_NRE, v_NME, None if own_NRM is None else hidden_NRM)
        # The weight is relu^2, so the gradient of a score is 2 relu times that of the weight.
        dscore_NRM = relu_NRM.mul_(da_NRM).mul_(2)
        dbias_CC[rows, keys] += dscore_NRM.sum(0)
        dscore_NRM = dscore_NRM.to(v_NME.dtype)
        dq_NCS[:, rows] = torch.bmm(dscore_NRM, inputs.k_quad_NCS[:, keys])
        dk_NCS[:, keys].baddbmm_(dscore_NRM.mT, inputs.q_quad_NCS[:, rows])
        if d_own is not None and inputs.own is not None:
            d_own[0][:, rows] = torch.bmm(da_NRM, inputs.own[1][:, keys])
            d_own[1][:, keys].baddbmm_(da_NRM.mT, inputs.own[0][:, rows])
    return (dq_NCS, dk_NCS, dq_lin_NCF, dk_lin_NCF), d_own, dv_NCE


def walk_chunks(added_NFE: Tensor, state_BFE: Tensor, goes_on_BG: Tensor | None, *, backwards: bool = False) -> Tensor:
    """The states before each chunk of a window, or backwards after it: `[N, F, E]`. state_BFE, the
    first of them, becomes the one behind the last chunk: state = added + goes_on * state."""
    added_BGFE = added_NFE.unflatten(0, (len(state_BFE), -1))
    states_BGFE, n_chunks = torch.empty_like(added_BGFE), added_BGFE.shape[1]
    for i in reversed(range(n_chunks)) if backwards else range(n_chunks):
        # The chunk reads the state as it was. Then the state is dropped where its document ends.
        states_BGFE[:, i] = state_BFE
        if goes_on_BG is not None:
            state_BFE *= goes_on_BG[:, i, None, None]
        state_BFE += added_BGFE[:, i]
    return states_BGFE.flatten(0, 1)


def states_read(added_NFE: Tensor, state_BFE: Tensor, documents: DocumentWeights, *,
                backwards: bool = False) -> Tensor:
    """The states of all directions that each chunk of a window reads, one below the other: `[N, F,
    E]`. Backwards: the gradients of those that it makes, from the gradients of those that it reads.

    added_NFE: what each chunk adds. state_BFE: that of earlier chunks, see `walk_chunks`."""
    goes_on_BGD = documents.goes_on_BGD
    if documents.causal:
        return walk_chunks(added_NFE, state_BFE, None if goes_on_BGD is None else goes_on_BGD[..., 0],
                           backwards=backwards)
    if goes_on_BGD is None:  # one document: every chunk reads the sum over all
        added_BGFE = added_NFE.unflatten(0, (len(state_BFE), -1))
        return added_BGFE.sum(1, keepdim=True).expand_as(added_BGFE).flatten(0, 1)
    directions = zip(added_NFE.chunk(2, 1), state_BFE.chunk(2, 1), goes_on_BGD.unbind(-1), (False, True), strict=True)
    return torch.cat([walk_chunks(added, state, goes_on, backwards=backwards != from_end)
                      for added, state, goes_on, from_end in directions], 1)


HeadsOf = Callable[[slice, slice], Iterable[Tensor]]
"""(rows, span of tokens) -> heads of these tokens, in the order of `reference.Heads`."""
TakeGradient = Callable[[slice, slice, list[Tensor]], None]
"""(rows, span of tokens, gradients of their heads, each `[B, T, S]`) -> None."""


def open_window(uv_BTF: Tensor, heads_of: HeadsOf, documents: DocumentWeights, bias_CC: Tensor, gated: bool,
                rows: slice, window: slice) -> tuple[slice, DocumentWeights, Tensor | None, WindowInputs]:
    """The span of tokens of a window, its documents, u_BTE if there is a gate, and what attention
    takes."""
    span = slice(window.start * len(bias_CC), window.stop * len(bias_CC))
    here, u_BTE, v_BTE = documents.part(rows, window), None, uv_BTF[rows, span]
    if gated:
        u_BTE, v_BTE = (F.silu(part) for part in v_BTE.chunk(2, dim=-1))
    return span, here, u_BTE, make_inputs(heads_of(rows, span), v_BTE, here, bias_CC)


def states_of_cut_row(added: Sequence[Tensor], documents: DocumentWeights, like: Tensor, *,
                      backwards: bool = False) -> Tensor:
    """`states_read` of all chunks of a row that is cut into windows: `[G, F, E]`. added: what the
    chunks of each window add. like: for the dtype of the sums."""
    added_GFE = torch.cat([*added])
    return states_read(added_GFE, like.new_zeros(1, *added_GFE.shape[1:]), documents, backwards=backwards)


def attend_rows(uv_BTF: Tensor, s: int, heads_of: HeadsOf, w: Tensor, documents: DocumentWeights, chunk_size: int,
                gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.gated_chunk_attention` of u and v, or not gated `reference.chunk_attention` of v.
    For the backward pass also what attention returns before the gate, attended_BTE, and the states
    that chunks read, kv_BGFE. s: width of heads."""
    (n_rows, n_tokens, _), e = uv_BTF.shape, uv_BTF.shape[-1] // (2 if gated else 1)
    n_chunks, bias_CC = -(-n_tokens // chunk_size), bias_of_chunk(w, chunk_size, documents.causal)
    windows = windows_of(n_rows, n_chunks, chunk_size)
    states_first = not documents.causal and windows[0][1].stop < n_chunks  # see the top of this file
    attended_BTE = uv_BTF.new_empty(n_rows, n_tokens, e)
    out_BTE = torch.empty_like(attended_BTE) if gated else attended_BTE
    kv_BGFE = uv_BTF.new_empty(n_rows, n_chunks, s * documents.weight_BGCD.shape[-1], e)

    opened = partial(open_window, uv_BTF, heads_of, documents, bias_CC, gated)

    def added_by(inputs: WindowInputs) -> Tensor:
        return torch.bmm(inputs.k_lin_NCF.mT, inputs.v_NCE)

    for rows, window in windows:
        if states_first and window.start == 0:
            added = [added_by(opened(rows, part)[-1]) for _, part in windows_of(1, n_chunks, chunk_size)]
            kv_BGFE[rows] = states_of_cut_row(added, documents.part(rows, slice(None)), bias_CC)
        span, here, u_BTE, inputs = opened(rows, window)
        part_BTE = attended_BTE[rows, span]
        # The states that the window's chunks read.
        if not states_first:
            if window.start == 0:  # a row begins: nothing was read before
                state_BFE = bias_CC.new_zeros(len(part_BTE), *kv_BGFE.shape[2:])
            kv_BGFE[rows, window] = states_read(added_by(inputs), state_BFE, here).unflatten(0, (len(part_BTE), -1))
        # Attention, and the gate.
        part_BTE[:] = tokens(attend(inputs, kv_BGFE[rows, window].flatten(0, 1)), part_BTE)
        if u_BTE is not None:
            torch.mul(u_BTE, part_BTE, out=out_BTE[rows, span])
    return out_BTE, attended_BTE, kv_BGFE


def differentiate_rows(dout_BTE: Tensor, uv_BTF: Tensor, heads_of: HeadsOf, w: Tensor, attended_BTE: Tensor | None,
                       kv_BGFE: Tensor, documents: DocumentWeights, chunk_size: int, duv_BTF: Tensor,
                       take_gradient: TakeGradient) -> Tensor:
    """The gradient of w. Those of uv and heads go to duv_BTF and to `take_gradient`.

    attended_BTE: from `attend_rows`; None: without a gate."""
    n_rows, n_chunks, *state_size = kv_BGFE.shape
    bias_CC = bias_of_chunk(w, chunk_size, documents.causal)
    dbias_CC, windows = torch.zeros_like(bias_CC), windows_of(n_rows, n_chunks, chunk_size)
    states_first = not documents.causal and windows[0][1].stop < n_chunks

    def opened(rows: slice, window: slice) -> tuple[slice, DocumentWeights, WindowInputs, Tensor]:
        span, here, u_BTE, inputs = open_window(uv_BTF, heads_of, documents, bias_CC, attended_BTE is not None, rows,
                                                window)
        part_BTE = dout_BTE[rows, span]
        return span, here, inputs, chunks(part_BTE if u_BTE is None else part_BTE * u_BTE, chunk_size)

    def added_by(inputs: WindowInputs, dattended_NCE: Tensor) -> Tensor:
        return torch.bmm(inputs.q_lin_NCF.mT, dattended_NCE)

    for rows, window in reversed(windows):
        if states_first and window.stop == n_chunks:
            added = [added_by(*opened(rows, part)[-2:]) for _, part in windows_of(1, n_chunks, chunk_size)]
            dkv_GFE = states_of_cut_row(added, documents.part(rows, slice(None)), bias_CC, backwards=True)
        span, here, inputs, dattended_NCE = opened(rows, window)
        part_BTE, duv_part_BTF = dout_BTE[rows, span], duv_BTF[rows, span]
        # States' gradients walk backwards: from chunks that read a state to those that made it.
        if states_first:
            dkv_NFE = dkv_GFE[window]
        else:
            if window.stop == n_chunks:  # a row ends, where the backward pass begins: nothing reads the state after it
                dstate_BFE = bias_CC.new_zeros(len(part_BTE), *state_size)
            dkv_NFE = states_read(added_by(inputs, dattended_NCE), dstate_BFE, here, backwards=True)
        (dq_quad, dk_quad, dq_lin, dk_lin), d_own, dv_NCE = differentiate(
            dattended_NCE, inputs, kv_BGFE[rows, window].flatten(0, 1), dkv_NFE, dbias_CC)
        # Undo what `make_inputs` did to the heads, then silu and the gate.
        dq_lin, dk_lin = unweighted(dq_lin, here.weight_BGCD), unweighted(dk_lin, here.kept_BGCD)
        if d_own is not None and here.own_BGC is not None:
            dq_lin, dk_lin = dq_lin + weighted(d_own[0], here.own_BGC[..., None]), dk_lin + d_own[1]
        dheads = dq_quad / chunk_size, dk_quad, dq_lin, dk_lin
        take_gradient(rows, span, [tokens(dhead_NCS, part_BTE) for dhead_NCS in dheads])
        if attended_BTE is None:
            duv_part_BTF[:] = tokens(dv_NCE, part_BTE)
            continue
        (u_raw_BTE, v_raw_BTE), (du_BTE, dv_BTE) = (x.chunk(2, dim=-1) for x in (uv_BTF[rows, span], duv_part_BTF))
        silu_backward(part_BTE * attended_BTE[rows, span], u_raw_BTE, grad_input=du_BTE)
        silu_backward(tokens(dv_NCE, part_BTE), v_raw_BTE, grad_input=dv_BTE)
    return diagonal_sums(dbias_CC).to(w.dtype)


class WindowedAttention(torch.autograd.Function):
    """`attend_rows`, and the gradients of uvz, or if not gated v; of w; and of heads: four, or with
    `from_z` a `HeadsFromZ`, whose angles have none."""

    @staticmethod
    def forward(ctx: Any, uvz_BTF: Tensor, w: Tensor, definition: Callable[..., Tensor], gated: bool, from_z: bool,
                documents: DocumentWeights, chunk_size: int, *heads: Tensor) -> Tensor:
        s = heads[0].shape[-1]
        uv_BTF = uvz_BTF[..., :-s] if from_z else uvz_BTF
        out_BTE, attended_BTE, kv_BGFE = attend_rows(uv_BTF, s, heads_in_parts(uvz_BTF, heads, from_z), w, documents,
                                                     chunk_size, gated)
        ctx.how = definition, from_z, documents, chunk_size
        ctx.save_for_backward(uvz_BTF, w, attended_BTE if gated else None, kv_BGFE, *heads)
        return out_BTE

    @staticmethod
    def backward(ctx: Any, dout_BTE: Tensor) -> tuple[Tensor | None, ...]:
        uvz_BTF, w, attended_BTE, kv_BGFE, *heads = ctx.saved_tensors
        definition, from_z, documents, chunk_size = ctx.how
        if must_be_followed(dout_BTE):  # what is written in place below could not be differentiated again
            wanted = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[7:]]
            followed = reference_gradients(definition, (uvz_BTF, w, *heads), dout_BTE, wanted)
            return *followed[:2], *[None] * 5, *followed[2:]
        uv_BTF, duv_BTF = uvz_BTF, (duvz_BTF := torch.empty_like(uvz_BTF))
        if from_z:
            uv_BTF, duv_BTF = (x[..., : -heads[0].shape[-1]] for x in (uvz_BTF, duvz_BTF))
            dheads = [torch.zeros_like(at_least_float32(x)) for x in heads[:2]]  # of gamma and beta
            take_gradient = partial(differentiate_z, uvz_BTF, heads, duvz_BTF, dheads)
        else:
            dheads = [torch.empty_like(x) for x in heads]
            take_gradient = partial(write_gradients, dheads)
        dw = differentiate_rows(dout_BTE, uv_BTF, heads_in_parts(uvz_BTF, heads, from_z), w, attended_BTE, kv_BGFE,
                                documents, chunk_size, duv_BTF, take_gradient)
        made = [dx.to(x.dtype) for dx, x in zip(dheads, heads, strict=False)]
        return duvz_BTF, dw, *[None] * 5, *made, *[None] * (4 - len(made))


def heads_in_parts(uvz_BTF: Tensor, heads: Sequence[Tensor], from_z: bool) -> HeadsOf:
    """What gives the heads of some tokens: those given, or with `from_z` made by a `HeadsFromZ`."""
    if from_z:
        return partial(heads_from_z, uvz_BTF, HeadsFromZ(*heads))
    return lambda rows, span: (x[rows, span] for x in heads)


def write_gradients(dheads: Sequence[Tensor], rows: slice, span: slice, dparts: list[Tensor]) -> None:
    """Write the gradients of some tokens' heads into those of all."""
    for whole, part in zip(dheads, dparts, strict=True):
        whole[rows, span] = part


def differentiate_z(uvz_BTF: Tensor, heads: Sequence[Tensor], duvz_BTF: Tensor, dscales: Sequence[Tensor], rows: slice,
                    span: slice, dparts: list[Tensor]) -> None:
    """From some tokens' dheads write dz to duvz, and add to the gradients of gamma and beta."""
    gamma_4S, _, sin, cos = heads
    dgamma_4S, dbeta_4S = dscales
    # Back through RoPE, then scale and offset, then silu.
    z_raw_BTS, s = uvz_BTF[rows, span, -gamma_4S.shape[-1] :], gamma_4S.shape[-1]
    dheads_4BTS = torch.stack([at_least_float32(dhead_BTS) for dhead_BTS in dparts])
    dmade_4BTS = rotate_halves(dheads_4BTS, -part_of(sin, rows, span), part_of(cos, rows, span))
    dbeta_4S.add_(dmade_4BTS.sum((1, 2)))
    dgamma_4S.add_((dmade_4BTS * F.silu(z_raw_BTS)).sum((1, 2)))
    dz_BTS = dmade_4BTS.mul_(gamma_4S[:, None, None]).sum(0).to(z_raw_BTS.dtype)
    silu_backward(dz_BTS, z_raw_BTS, grad_input=duvz_BTF[rows, span, -s:])


def rotate_halves(x_4BTS: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """`reference.rope`, in half as many passes, which autograd could not follow."""
    # [x1 cos - x2 sin, x2 cos + x1 sin], written straight into its halves.
    out_4BTS = torch.empty_like(x_4BTS)
    (x1, x2), (out1, out2) = x_4BTS.chunk(2, dim=-1), out_4BTS.chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin)
    return out_4BTS


def heads_from_z(uvz_BTF: Tensor, made_by: HeadsFromZ, rows: slice, span: slice) -> Tensor:
    """`reference.make_heads` of some tokens."""
    gamma_4S, beta_4S, sin, cos = made_by
    z_BTS = F.silu(uvz_BTF[rows, span, -gamma_4S.shape[-1] :])
    # In float32 until the heads are complete, then rounded once.
    z, gamma, beta = (at_least_float32(x) for x in (z_BTS, gamma_4S[:, None, None], beta_4S[:, None, None]))
    made_4BTS = torch.addcmul(beta, z, gamma)
    return rotate_halves(made_4BTS, part_of(sin, rows, span), part_of(cos, rows, span)).to(z_BTS.dtype)


def part_of(angle: Tensor, rows: slice, span: slice) -> Tensor:
    """The angles `[1 or B, T, S / 2]` of some tokens."""
    return angle[rows if len(angle) > 1 else slice(0, 1), span]


def diagonal_sums(x_CC: Tensor) -> Tensor:
    """The transpose of `reference.toeplitz`: sums over the diagonals, `[2 C - 1]`."""
    # Entry [i, j] belongs to the distance j - i, which is at j - i + C - 1.
    index_C = torch.arange(len(x_CC), device=x_CC.device)
    at_CC = index_C - index_C[:, None] + len(x_CC) - 1
    return x_CC.new_zeros(2 * len(x_CC) - 1).index_add_(0, at_CC.flatten(), x_CC.flatten())


def attention_in_windows(uvz_BTF: Tensor, heads: Heads, w: Tensor | None = None, *, gated: bool, chunk_size: int,
                         causal: bool, segment_ids_BT: Tensor | None = None, pooling: str = "mean",
                         gate_BT: Tensor | None = None, exchange: reference.Exchange | None = None) -> Tensor:
    """`reference.gated_chunk_attention`, or not gated `reference.chunk_attention`, for what
    `dispatch.use_windows` allows."""
    assert exchange is None
    from_z, op = isinstance(heads, HeadsFromZ), reference.gated_chunk_attention if gated else reference.chunk_attention
    # Heads with their divisor already, so that "written" is a sum below.
    heads = reference.divided_by_gates(heads, gate_BT, segment_ids_BT, chunk_size, causal)
    documents = weigh_documents(segment_ids_BT, uvz_BTF, chunk_size, pooling, causal)

    def definition(uvz_BTF: Tensor, w: Tensor, *heads: Tensor) -> Tensor:
        return op(uvz_BTF, HeadsFromZ(*heads) if from_z else heads, w, chunk_size=chunk_size, causal=causal,
                  segment_ids_BT=segment_ids_BT, pooling="mean" if pooling == "mean" else "sum")

    return WindowedAttention.apply(uvz_BTF, reference.bias_or_zeros(w, uvz_BTF, chunk_size), definition, gated,
                                     from_z, documents, chunk_size, *heads)


gated_chunk_attention = partial(attention_in_windows, gated=True)
chunk_attention = partial(attention_in_windows, gated=False)
