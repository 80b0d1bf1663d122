"""FLASH's attention on a processor, whose backward pass recomputes what is large.

The operations of `ops/reference.py` keep scores, heads and activations until the backward pass,
three times what the layer itself needs. Here a row is read in windows of chunks. Kept are the
projection, what attention returns before the gate, the states that each chunk reads, and heads
where the caller gives them. The backward pass goes through the windows from the last to the first,
makes activations, heads and scores of one window again, and lets them go. Where the causal mask
hides whole blocks of scores, these are not computed. A second derivative is taken by the reference.
Matmuls are PyTorch's, what is between them is in `training.c`.

The states of causal rows are carried from window to window. Those of other rows come from both
sides, so all states of a row are made before its first window is read."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineartime.ops import compiled, reference
from lineartime.ops.dispatch import must_be_followed, reference_gradients
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import Heads, HeadsFromZ

WINDOW_TOKENS = 2048  # tokens of a window: chunks of one row, or several whole rows; at least one chunk
SCORE_BLOCK = 64
"""Queries whose scores are one matmul, which leaves out the keys after the last of them; twice as
many in bfloat16, whose fast matmuls should be few. If not causal, a chunk is one block."""
SUM_BLOCK = 64  # tokens whose gradients of gamma and beta are summed apart, whoever does it
NO_TOKENS = torch.empty_strided((0, 0, 0), (0, 0, 0))  # at 0, which strides must not move
Parts = Sequence[tuple[int, Tensor]]
"""What attention takes of heads: the number of a head, and each token's factor `[B, T]`."""


def call(name: str, like: Tensor, *args: Tensor | int | None) -> None:
    """A function of training.c for the dtype of a tensor. It takes where a tensor is, and of one of
    `[B, T, ...]` the first two strides; None is no tensor, and wherever one of `[B, T, ...]` is
    taken, `NO_TOKENS` is."""
    numbers: list[int] = []
    for x in args:
        numbers += [x.data_ptr(), *x.stride()[: 2 * (x.dim() == 3)]] if isinstance(x, Tensor) else [x or 0]
    function = getattr(compiled.library(), f"{name}_{str(like.dtype).removeprefix('torch.')}")
    function(*map(ctypes.c_int64, numbers))


def table(tensors_BTF: Iterable[Tensor], s: int, parts: Parts = ()) -> Tensor:
    """Where each S columns of tensors are, with heads and factors: `Part` of training.c."""
    rows = [[0, x.data_ptr(), *x.stride()[:2], 0, 0, 0] for x_BTF in tensors_BTF for x in x_BTF.split(s, -1)]
    for row, (head, factor_BT) in zip(rows, parts, strict=False):
        row[0], row[4:] = head, [factor_BT.data_ptr(), *factor_BT.stride()]
    return torch.tensor(rows)


class DocumentWeights(NamedTuple):
    """What the linear half needs to know of documents, as numbers of float32 at least.

    A query reads states from D directions: the sum over earlier chunks, and when not causal that
    over later ones. Where a row that is not causal is one document, it reads one, the sum over all
    chunks."""

    causal: bool
    ids_BGC: Tensor | None  # int32; None where a row is one document
    weight_BGCD: Tensor  # Factors of queries: 0 for another document's state. `[B, G, 1, 1]` for one document.
    kept_BGCD: Tensor | None = None
    """1 for tokens whose k v are in the state that leaves their chunk: its last document's,
    backwards its first's."""
    goes_on_BG1D: Tensor | None = None  # 1 where that document is the one of the state that enters the chunk
    own_BGC: Tensor | None = None  # what a query is multiplied with when it reads its own chunk, which no state has

    def part(self, rows: slice, window: slice, c: int | None = None) -> "DocumentWeights":
        """Those of some rows and chunks, and of the first c tokens of each chunk."""
        return DocumentWeights._make([x[rows, window, :c] if isinstance(x, Tensor) else x for x in self])

    @property
    def linear(self) -> bool:
        """Whether there is a linear half: causal rows of one chunk read no state."""
        return self.weight_BGCD.shape[1] > 1 or not self.causal

    def parts(self, chunk_size: int, n_tokens: int, linear: bool) -> Parts:
        """What each head of a window is multiplied with, for `Window.heads_NCF`."""
        one_B1 = self.weight_BGCD.new_ones(len(self.weight_BGCD), 1)
        found = [(0, one_B1 / chunk_size), (1, one_B1)]
        if linear:
            found += [(2, weight_BGC.flatten(1)) for weight_BGC in self.weight_BGCD.unbind(-1)]
            kept_BGCD = one_B1[..., None, None] if self.kept_BGCD is None else self.kept_BGCD
            found += [(3, kept_BGC.flatten(1)) for kept_BGC in kept_BGCD.unbind(-1)]
        if self.own_BGC is not None:
            found += [(2, self.own_BGC.flatten(1)), (3, one_B1)]
        return [(head, factor.repeat_interleave(n_tokens // factor.shape[1], 1)) for head, factor in found]


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
    return DocumentWeights(causal, ids_BGC.int(), weight_BGCD, kept_BGCD, goes_on_BGD[:, :, None],
                           None if causal else each_BGC.to(like.dtype))


def windows_of(n_rows: int, n_tokens: int, chunk_size: int) -> list[tuple[slice, slice]]:
    """The rows and chunks of each window, in the order in which states go through them. A last
    chunk that is not whole is a window of its own, as long as its tokens."""
    n_whole, n_chunks = n_tokens // chunk_size, max(WINDOW_TOKENS // chunk_size, 1)
    parts = [slice(first, min(first + n_chunks, n_whole)) for first in range(0, n_whole, n_chunks)]
    if n_tokens % chunk_size:
        parts.append(slice(n_whole, n_whole + 1))
    n = max(WINDOW_TOKENS // n_tokens, 1)  # short rows: several at once
    return [(slice(first, first + n), part) for first in range(0, n_rows, n) for part in parts]


def bias_of_chunk(w: Tensor, chunk_size: int, documents: DocumentWeights) -> Tensor:
    """The bias of a chunk: `[C, C]`, in the documents' dtype; when causal -inf for keys after the
    query."""
    bias_CC = reference.toeplitz(w, chunk_size).to(documents.weight_BGCD.dtype)
    after_CC = torch.ones_like(bias_CC, dtype=torch.bool).triu(1)
    return bias_CC.masked_fill(after_CC, -torch.inf) if documents.causal else bias_CC


class Inputs(NamedTuple):
    """What attention is of, before silu; or the gradients of all that."""

    u_BTE: Tensor  # the gate; `NO_TOKENS`: there is none, and v has no silu
    v_BTE: Tensor
    z_BTS: Tensor  # `NO_TOKENS`: the heads are given
    heads: Sequence[Tensor]  # those given; or gamma and beta `[4, S]`, sin and cos, float32 at least

    @property
    def gated(self) -> bool:
        return self.u_BTE is not NO_TOKENS

    def part(self, rows: slice, span: slice) -> "Inputs":
        """Those of some tokens."""
        def of(x_BTE: Tensor) -> Tensor:
            return x_BTE if x_BTE.dim() < 3 or x_BTE is NO_TOKENS else x_BTE.expand(len(self.v_BTE), -1, -1)[rows, span]

        return Inputs(of(self.u_BTE), of(self.v_BTE), of(self.z_BTS), [of(x) for x in self.heads])

    def how(self) -> list[Tensor | None]:
        """What makes heads, for training.c: z, gamma, beta, sin, cos; heads that are given."""
        if self.z_BTS is NO_TOKENS:
            return [NO_TOKENS, None, None, NO_TOKENS, NO_TOKENS, table(self.heads, self.heads[0].shape[-1])]
        return [self.z_BTS, *self.heads, None]


class Window(NamedTuple):
    """What attention in the N chunks of a window takes. A chunk is as long as its tokens."""

    inputs: Inputs
    parts: Parts
    v_NCE: Tensor
    heads_NCF: list[Tensor]
    """q / n and k of the quadratic half. If there is a linear half its q and k, F = D S: q times
    the weight of what it reads in each of D directions, k 0 where k v do not leave the chunk. If no
    state has what is in the own chunk also q, times its weight, and k of that."""
    bias_CC: Tensor
    ids_NC: Tensor | None
    blocks: list[tuple[slice, slice]]
    """The queries of each block of scores, and its keys: when causal up to the last query."""
    reads: list[slice]  # the chunks that read a state: when causal not the first of a row
    makes: list[slice]  # the chunks whose state is read: when causal not the last of a row

    def scores(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor, list[Tensor | int | None]]:
        """q k^T of a block, of the quadratic and of the linear half, if it has that; and how
        training.c makes weights of them."""
        score_NRM, own_NRM = (torch.bmm(q[:, queries], k[:, keys].mT) if len(q) else NO_TOKENS for q, k in (
            self.heads_NCF[:2], self.heads_NCF[4:] or (NO_TOKENS, NO_TOKENS)))
        return score_NRM, own_NRM, [score_NRM, own_NRM, self.bias_CC, len(self.bias_CC), self.ids_NC,
                                    self.v_NCE.shape[1], queries.start]


def open_window(inputs: Inputs, documents: DocumentWeights, bias_CC: Tensor, s: int, rows: slice,
                chunks: slice) -> tuple[slice, Window]:
    """The span of tokens of a window, and what attention takes. s: width of heads."""
    span = slice(chunks.start * len(bias_CC), chunks.stop * len(bias_CC))
    inputs, is_last = inputs.part(rows, span), chunks.stop == documents.weight_BGCD.shape[1]
    n_rows, n_tokens, e = inputs.v_BTE.shape
    c = min(len(bias_CC), n_tokens)
    g, here = n_tokens // c, documents.part(rows, chunks, c)
    v_BTE = inputs.v_BTE
    if inputs.gated:
        v_BTE = v_BTE.new_empty(v_BTE.shape)
        call("gate", v_BTE, *v_BTE.shape, inputs.v_BTE, NO_TOKENS, v_BTE)
    # Heads, times 1 / n and the weights, so that both halves are plain matmuls.
    parts, f = here.parts(len(bias_CC), n_tokens, documents.linear), s * here.weight_BGCD.shape[-1]
    widths = [s, s, *[f, f] * documents.linear, *[s, s] * (here.own_BGC is not None)]
    heads = [v_BTE.new_empty(n_rows, n_tokens, width) for width in widths]
    call("heads", v_BTE, n_rows, n_tokens, s, 4 if documents.linear else 2, *inputs.how(), len(parts),
         table(heads, s, parts))
    # The blocks of scores.
    size = SCORE_BLOCK * (1 + (v_BTE.dtype == torch.bfloat16)) if here.causal else c
    blocks = [(slice(first, min(first + size, c)), slice(0, min(first + size, c))) for first in range(0, c, size)]
    reads, makes = (live_chunks(n_rows, g, first, last) for first, last in (
        (int(here.causal and chunks.start == 0), g), (0, g - int(here.causal and is_last))))
    return span, Window(inputs, parts, v_BTE.reshape(-1, c, e), [x.view(-1, c, x.shape[-1]) for x in heads], bias_CC,
                        None if here.ids_BGC is None else here.ids_BGC.flatten(0, 1).contiguous(), blocks, reads, makes)


def live_chunks(n_rows: int, n_chunks: int, first: int, stop: int) -> list[slice]:
    """Of the chunks of all rows those from the first to the last of each row."""
    if (first, stop) == (0, n_chunks):
        return [slice(0, n_rows * n_chunks)]
    return [slice(row + first, row + stop) for row in range(0, n_rows * n_chunks, n_chunks) if first < stop]


def multiply(a_NXY: Tensor, b_NYZ: Tensor, live: Sequence[slice], out_NXZ: Tensor | None = None) -> Tensor:
    """a b of the chunks that are live, and 0 of the others."""
    out_NXZ = a_NXY.new_empty(*a_NXY.shape[:2], b_NYZ.shape[2]) if out_NXZ is None else out_NXZ
    if live != [slice(0, len(out_NXZ))]:
        out_NXZ.zero_()
    for chunks in live:
        torch.bmm(a_NXY[chunks], b_NYZ[chunks], out=out_NXZ[chunks])
    return out_NXZ


def attend(window: Window, kv_NFE: Tensor, out_NCE: Tensor) -> None:
    """Both halves of a window. kv_NFE: the states that its chunks read."""
    # What is read from states first; what is inside the chunk is added to it block by block.
    is_linear = len(window.heads_NCF) > 2
    if is_linear:
        multiply(window.heads_NCF[2], kv_NFE, window.reads, out_NCE)
    for queries, keys in window.blocks:
        a_NRM, _, how = window.scores(queries, keys)
        call("weigh", a_NRM, *a_NRM.shape, *how, a_NRM)
        out_NCE[:, queries].baddbmm_(a_NRM, window.v_NCE[:, keys], beta=int(is_linear))


def differentiate(dout_NCE: Tensor, window: Window, kv_NFE: Tensor, dkv_NFE: Tensor,
                  dbias_CC: Tensor) -> tuple[list[Tensor], Tensor]:
    """The gradients of a window's heads and values; to dbias_CC its part is added.

    kv_NFE: the states that the chunks read. dkv_NFE: the gradients of those that they make."""
    v_NCE, (q_NCS, k_NCS, *linear) = window.v_NCE, window.heads_NCF
    # What blocks add to begins at 0, the rest is written whole.
    dheads = [(torch.zeros_like if i % 2 else torch.empty_like)(x) for i, x in enumerate(window.heads_NCF)]
    dv_NCE = (torch.empty_like if linear else torch.zeros_like)(v_NCE)
    if linear:  # out = q_lin kv, and kv of other chunks has k_lin v
        multiply(dout_NCE, kv_NFE.mT, window.reads, dheads[2])
        multiply(v_NCE, dkv_NFE.mT, window.makes, dheads[3])
        multiply(linear[1], dkv_NFE, window.makes, dv_NCE)
    for queries, keys in window.blocks:
        score_NRM, own_NRM, how = window.scores(queries, keys)
        a_NRM, dout_NRE = torch.empty_like(score_NRM), dout_NCE[:, queries]
        call("weigh", a_NRM, *a_NRM.shape, *how, a_NRM)
        dv_NCE[:, keys].baddbmm_(a_NRM.mT, dout_NRE)
        dscore_NRM = torch.bmm(dout_NRE, v_NCE[:, keys].mT, out=a_NRM)
        call("unweigh", score_NRM, *score_NRM.shape, *how, dscore_NRM, dbias_CC)
        dheads[0][:, queries] = torch.bmm(dscore_NRM, k_NCS[:, keys])
        dheads[1][:, keys].baddbmm_(dscore_NRM.mT, q_NCS[:, queries])
        if len(own_NRM):
            dheads[4][:, queries] = torch.bmm(own_NRM, linear[3][:, keys])
            dheads[5][:, keys].baddbmm_(own_NRM.mT, linear[2][:, queries])
    return dheads, dv_NCE


def read_states(added_BGFE: Tensor, state_BFE: Tensor, documents: DocumentWeights, out_BGFE: Tensor, *,
                backwards: bool = False) -> None:
    """The states of all directions that each chunk reads, one below the other. Backwards: the
    gradients of those that it makes, from the gradients of those that it reads.

    added_BGFE: what each chunk adds. state_BFE: that of earlier chunks, which becomes that behind
    the last."""
    goes_on, n = documents.goes_on_BG1D, documents.weight_BGCD.shape[-1]
    if not documents.causal and goes_on is None:  # one document: every chunk reads the sum over all
        out_BGFE.copy_(added_BGFE.sum(1, keepdim=True).expand_as(added_BGFE))
        return
    for i, (added, state, out) in enumerate(zip(added_BGFE.chunk(n, 2), state_BFE.chunk(n, 1), out_BGFE.chunk(n, 2),
                                                strict=True)):
        added_BGX, out_BGX = added.flatten(2), out.flatten(2)
        call("walk", added_BGX, *added_BGX.shape, added_BGX, state, NO_TOKENS if goes_on is None else goes_on[..., i],
             out_BGX, backwards != (i == 1))


def read_cut_rows(added: Iterable[Tensor], documents: DocumentWeights, like: Tensor, out_BGFE: Tensor, *,
                  backwards: bool = False) -> None:
    """`read_states` of all chunks of rows that are cut into windows. added: what the chunks of each
    window add. like: for the dtype of sums."""
    added_BGFE = torch.cat([x_NFE.unflatten(0, (len(out_BGFE), -1)) for x_NFE in added], 1)
    state_BFE = like.new_zeros(len(out_BGFE), *out_BGFE.shape[2:])
    read_states(added_BGFE, state_BFE, documents, out_BGFE, backwards=backwards)


def attend_rows(inputs: Inputs, s: int, w: Tensor, documents: DocumentWeights,
                chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.gated_chunk_attention`, or without a gate `reference.chunk_attention`. For the
    backward pass also what attention returns before the gate, attended_BTE, and the states that
    chunks read, kv_BGFE. s: width of heads."""
    (n_rows, n_tokens, e), n_chunks = inputs.v_BTE.shape, documents.weight_BGCD.shape[1]
    bias_CC, windows = bias_of_chunk(w, chunk_size, documents), windows_of(n_rows, n_tokens, chunk_size)
    states_first = not documents.causal and windows[0][1].stop < n_chunks  # see the top of this file
    attended_BTE = inputs.v_BTE.new_empty(n_rows, n_tokens, e)
    out_BTE = torch.empty_like(attended_BTE) if inputs.gated else attended_BTE
    kv_BGFE = attended_BTE.new_empty(n_rows, n_chunks, s * documents.weight_BGCD.shape[-1] * documents.linear, e)
    opened = partial(open_window, inputs, documents, bias_CC, s)

    def added_by(window: Window) -> Tensor:
        return multiply(window.heads_NCF[3].mT, window.v_NCE, window.makes)

    for rows, chunks in windows:
        if states_first and chunks.start == 0:
            added = (added_by(opened(rows, part)[1]) for _, part in windows_of(1, n_tokens, chunk_size))
            read_cut_rows(added, documents.part(rows, slice(None)), bias_CC, kv_BGFE[rows])
        span, window = opened(rows, chunks)
        part_BTE, part_BGFE = attended_BTE[rows, span], kv_BGFE[rows, chunks]
        # The states that the window's chunks read.
        if documents.linear and not states_first:
            if chunks.start == 0:  # a row begins: nothing was read before
                state_BFE = bias_CC.new_zeros(len(part_BTE), *kv_BGFE.shape[2:])
            read_states(added_by(window).view(part_BGFE.shape), state_BFE, documents.part(rows, chunks), part_BGFE)
        # Attention, written to its place where that is whole, and the gate.
        out_NCE = part_BTE.view(window.v_NCE.shape) if part_BTE.is_contiguous() else torch.empty_like(window.v_NCE)
        attend(window, part_BGFE.flatten(0, 1), out_NCE)
        if not part_BTE.is_contiguous():
            part_BTE.copy_(out_NCE.view(part_BTE.shape))
        if inputs.gated:
            call("gate", part_BTE, *part_BTE.shape, window.inputs.u_BTE, part_BTE, out_BTE[rows, span])
    return out_BTE, attended_BTE, kv_BGFE


def differentiate_rows(dout_BTE: Tensor, inputs: Inputs, s: int, w: Tensor, attended_BTE: Tensor, kv_BGFE: Tensor,
                       documents: DocumentWeights, chunk_size: int, gradients: Inputs) -> Tensor:
    """The gradient of w; the others go to `gradients`. attended_BTE: from `attend_rows`, or
    `NO_TOKENS` without a gate."""
    (n_rows, n_chunks, *state_size), n_tokens = kv_BGFE.shape, dout_BTE.shape[1]
    bias_CC, windows = bias_of_chunk(w, chunk_size, documents), windows_of(n_rows, n_tokens, chunk_size)
    dbias_CC, states_first = torch.zeros_like(bias_CC), not documents.causal and windows[0][1].stop < n_chunks

    def opened(rows: slice, chunks: slice) -> tuple[Window, Tensor, Inputs]:
        span, window = open_window(inputs, documents, bias_CC, s, rows, chunks)
        dpart_BTE, dinputs = dout_BTE[rows, span], gradients.part(rows, span)
        if not inputs.gated:
            return window, dpart_BTE.reshape(window.v_NCE.shape), dinputs
        dattended_BTE = torch.empty_like(dpart_BTE, memory_format=torch.contiguous_format)
        call("ungate", dpart_BTE, *dpart_BTE.shape, window.inputs.u_BTE, attended_BTE[rows, span], dpart_BTE,
             dattended_BTE, dinputs.u_BTE)
        return window, dattended_BTE.view(window.v_NCE.shape), dinputs

    def added_by(window: Window, dattended_NCE: Tensor) -> Tensor:
        return multiply(window.heads_NCF[2].mT, dattended_NCE, window.reads)

    for rows, chunks in reversed(windows):
        if states_first and chunks.stop == n_chunks:
            added = (added_by(*opened(rows, part)[:2]) for _, part in windows_of(1, n_tokens, chunk_size))
            dkv_BGFE = torch.empty_like(kv_BGFE[rows])
            read_cut_rows(added, documents.part(rows, slice(None)), bias_CC, dkv_BGFE, backwards=True)
        window, dattended_NCE, dinputs = opened(rows, chunks)
        part_BGFE = kv_BGFE[rows, chunks]
        # States' gradients walk backwards: from chunks that read a state to those that made it.
        dpart_BGFE = dkv_BGFE[:, chunks] if states_first else torch.empty_like(part_BGFE)
        if documents.linear and not states_first:
            if chunks.stop == n_chunks:  # a row ends, where the backward pass begins: nothing reads the state after it
                dstate_BFE = bias_CC.new_zeros(len(part_BGFE), *state_size)
            read_states(added_by(window, dattended_NCE).view(part_BGFE.shape), dstate_BFE,
                        documents.part(rows, chunks), dpart_BGFE, backwards=True)
        dheads, dv_NCE = differentiate(dattended_NCE, window, part_BGFE.flatten(0, 1), dpart_BGFE.flatten(0, 1),
                                       dbias_CC)
        differentiate_inputs(window, s, dheads, dv_NCE.view(dinputs.v_BTE.shape), dinputs)
    # The transpose of `reference.toeplitz`: [i, j] is of the distance j - i, at j - i + C - 1.
    return reference.add_shifted(dbias_CC.flip(0), 1).to(w.dtype)


def differentiate_inputs(window: Window, s: int, dheads_NCF: Iterable[Tensor], dv_BTE: Tensor,
                         gradients: Inputs) -> None:
    """From the gradients of a window's heads and values write those of its inputs; to those of
    gamma and beta they are added."""
    (n_rows, n_tokens, _), n_heads = dv_BTE.shape, 4 if len(window.heads_NCF) > 2 else 2
    z, gamma, _, sin, cos, _ = window.inputs.how()
    given = None if gamma is not None else table(gradients.heads, s)
    sums = window.bias_CC.new_zeros(-(-n_rows * n_tokens // SUM_BLOCK), 2, n_heads, s)
    dheads_BTF = [x.view(n_rows, n_tokens, x.shape[-1]) for x in dheads_NCF]
    call("unheads", dv_BTE, n_rows, n_tokens, s, n_heads, z, gamma, sin, cos, given, len(window.parts),
         table(dheads_BTF, s, window.parts), gradients.z_BTS, sums.flatten(), SUM_BLOCK)
    if given is None:
        for total_NS, sum_NS in zip(gradients.heads, sums.sum(0), strict=True):
            total_NS[:n_heads] += sum_NS
    if gradients.gated:
        call("ungate", dv_BTE, *dv_BTE.shape, window.inputs.v_BTE, NO_TOKENS, dv_BTE, NO_TOKENS, gradients.v_BTE)
    else:
        gradients.v_BTE.copy_(dv_BTE)


def split(uvz_BTF: Tensor, heads: Sequence[Tensor], gated: bool, from_z: bool) -> Inputs:
    """The parts of a projection, or of its gradient."""
    s = heads[0].shape[-1] if from_z else 0
    e = (uvz_BTF.shape[-1] - s) // (2 if gated else 1)
    u_BTE, v_BTE, z_BTS = uvz_BTF.split([e * gated, e, s], -1)
    return Inputs(u_BTE if gated else NO_TOKENS, v_BTE, z_BTS if from_z else NO_TOKENS, heads)


class WindowedAttention(torch.autograd.Function):
    """`attend_rows`, and the gradients of uvz, or if not gated v; of w; and of heads: four, or with
    `from_z` a `HeadsFromZ`, whose angles have none."""

    @staticmethod
    def forward(ctx: Any, uvz_BTF: Tensor, w: Tensor, definition: Callable[..., Tensor], gated: bool, from_z: bool,
                documents: DocumentWeights, chunk_size: int, *heads: Tensor) -> Tensor:
        inputs = split(*side_by_side(uvz_BTF, heads, from_z), gated, from_z)
        out_BTE, attended_BTE, kv_BGFE = attend_rows(inputs, heads[0].shape[-1], w, documents, chunk_size)
        ctx.how = definition, gated, from_z, documents, chunk_size
        ctx.save_for_backward(uvz_BTF, w, attended_BTE if gated else NO_TOKENS, kv_BGFE, *heads)
        return out_BTE

    @staticmethod
    def backward(ctx: Any, dout_BTE: Tensor) -> tuple[Tensor | None, ...]:
        uvz_BTF, w, attended_BTE, kv_BGFE, *heads = ctx.saved_tensors
        definition, gated, from_z, documents, chunk_size = ctx.how
        if must_be_followed(dout_BTE):  # what is written in place below could not be differentiated again
            wanted = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[7:]]
            followed = reference_gradients(definition, (uvz_BTF, w, *heads), dout_BTE, wanted)
            return *followed[:2], *[None] * 5, *followed[2:]
        uvz_BTF, wide = side_by_side(uvz_BTF, heads, from_z)
        duvz_BTF = torch.empty_like(uvz_BTF)
        dheads = [torch.zeros_like(x) for x in (wide[:2] if from_z else wide)]  # of gamma and beta, or of all
        dw = differentiate_rows(dout_BTE.contiguous(), split(uvz_BTF, wide, gated, from_z), heads[0].shape[-1], w,
                                attended_BTE, kv_BGFE, documents, chunk_size, split(duvz_BTF, dheads, gated, from_z))
        made = [dx.to(x.dtype) for dx, x in zip(dheads, heads, strict=False)]
        return duvz_BTF, dw, *[None] * 5, *made, *[None] * (4 - len(made))


def side_by_side(uvz_BTF: Tensor, heads: Sequence[Tensor], from_z: bool) -> tuple[Tensor, list[Tensor]]:
    """Tensors whose numbers of a token lie side by side; what makes heads is float32 at least."""
    dtype = at_least_float32(uvz_BTF[:0]).dtype if from_z else uvz_BTF.dtype
    return uvz_BTF.contiguous(), [x.to(dtype).contiguous() for x in heads]


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
