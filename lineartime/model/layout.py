"""The layout of rows: which token lies where, once for all layers, and the way back.

Padding goes to the end of its row, where it shifts neither positions nor chunks. With
`document_grid` "row" positions and chunks count from the row's beginning, as in the paper's
listings. With "own" positions count from each document's, which begins a chunk or lies in one."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.base.errors import UsageError
from lineartime.base.settings import require
from lineartime.config import ModelConfig


class Layout(NamedTuple):
    """Rows of T tokens as layers take them, in L places."""

    position_BL: Tensor  # `[1 or B, L]`
    segment_ids_BL: Tensor | None  # the document of each place, see `layers.SequenceInfo`
    order_BL: Tensor | None = None  # the token at each place; None: the tokens as they are, and L = T
    back_BT: Tensor | None = None  # the place of each token, if there is an `order_BL`

    def take(self, x_BT: Tensor) -> Tensor:
        """Ids or vectors of the tokens, `[B, T, ...]`, as `[B, L, ...]`."""
        return x_BT if self.order_BL is None else in_order(x_BT, self.order_BL)

    def take_vectors(self, x_BTD: Tensor) -> Tensor:
        """`take` with 0 for padding: 0 times a NaN of it would be NaN."""
        x_BLD, ids_BL = self.take(x_BTD), self.segment_ids_BL
        return x_BLD if ids_BL is None else x_BLD.masked_fill((ids_BL < 0)[..., None], 0.0)

    def give_back(self, x_BL: Tensor) -> Tensor:
        """The inverse of `take`."""
        return x_BL if self.back_BT is None else in_order(x_BL, self.back_BT)


def lay_out(config: ModelConfig, x_BT: Tensor, segment_ids_BT: Tensor | None = None,
            token_mask_BT: Tensor | None = None, begins_BT: Tensor | None = None, in_grid: bool = True) -> Layout:
    """The layout of rows of ids or vectors, `[B, T, ...]`; not `in_grid`, as in decoding, padding
    alone moves.

    segment_ids_BT: the document of each token, integers of at least 0 that do not decrease along a
    row, -1 for padding at its end; None: every row is one document, or documents start where
    begins_BT is True. token_mask_BT: bool, or numbers 0 and 1, False or 0 for padding, which may be
    anywhere in a row and have any segment id. Raises UsageError for wrong segment ids or masks."""
    has_grid = in_grid and config.document_grid == "own"
    reads = (has_grid and config.grid_size > 1) or (in_grid and (
        config.chunk_pooling == "attention" or config.by_document(in_graph=torch.compiler.is_exporting())))
    for name, given_BT in (("segment_ids", segment_ids_BT), ("token_mask", token_mask_BT), ("ids", begins_BT)):
        check_shape(name, given_BT, x_BT.shape[:2])
        traced = not torch.compiler.is_compiling() and torch._C._is_tracing()
        hidden = given_BT is not None and (torch.compiler.is_exporting() or traced or unwrapped(given_BT).dim() > 2)
        require(not (reads and hidden), "vmap, traces and exports hide documents and padding, which this must read",
                name, "call it as it is, or export lineartime.DecodeStep, which takes one token of each row")
    order_BT, are_given = None, segment_ids_BT is not None
    valid_BT = None if token_mask_BT is None else checked_mask(token_mask_BT)
    if not are_given and begins_BT is not None:
        segment_ids_BT = (begins_BT if valid_BT is None else begins_BT & valid_BT).cumsum(1)
    if valid_BT is not None:
        order_BT = padding_last(valid_BT)
        ids_BT = torch.zeros_like(order_BT) if segment_ids_BT is None else segment_ids_BT.long().gather(1, order_BT)
        segment_ids_BT = torch.where(valid_BT.gather(1, order_BT), ids_BT, -1)
    if are_given and segment_ids_BT is not None:
        check_segment_ids(segment_ids_BT := segment_ids_BT.long())
    laid = Layout(torch.arange(x_BT.shape[1], device=x_BT.device)[None], segment_ids_BT)
    if has_grid and segment_ids_BT is not None and segment_ids_BT.numel() > 0:
        laid = lay_out_documents(config, segment_ids_BT)
    # Both orders one after the other: padding moves first, then documents do.
    if order_BT is not None:
        back_BT = order_BT.argsort(1)
        if laid.order_BL is not None and laid.back_BT is not None:
            order_BT, back_BT = order_BT.gather(1, laid.order_BL), laid.back_BT.gather(1, back_BT)
        laid = laid._replace(order_BL=order_BT, back_BT=back_BT)
    return laid


def padding_last(valid_BT: Tensor) -> Tensor:
    """The order with each row's tokens first and its padding last, see `in_order`."""
    # Not a stable sort, which ONNX does not have.
    count_BT, padding_BT = valid_BT.long().cumsum(1), (~valid_BT).long().cumsum(1)
    return torch.where(valid_BT, count_BT, count_BT[:, -1:] + padding_BT).argsort(1)


def in_order(x_BT: Tensor, order_BL: Tensor) -> Tensor:
    """`[B, T, ...]` in another order along T: place l has what place order_BL[b, l] had."""
    if x_BT.dim() > 2:
        order_BL = order_BL[..., None].expand(-1, -1, x_BT.shape[-1])
    return x_BT.gather(1, order_BL)


def check_shape(name: str, given: Tensor | None, shape: torch.Size) -> None:
    """Raise UsageError unless a tensor is None or has this shape."""
    if given is not None and given.shape != shape:
        raise UsageError("wrong shape", f"{name} {list(given.shape)}", f"give {list(shape)}, one for each token")


def checked_mask(mask_BT: Tensor, name: str = "token_mask") -> Tensor:
    """A mask as bool. Raises UsageError for numbers but 0 and 1: a mask that is added to scores
    would be read as its opposite. It has 0 for a token, so floats without a 1 are refused too."""
    if mask_BT.dtype != torch.bool:
        right_BT = (mask_BT == 1) | ((mask_BT == 0) & ((mask_BT == 1).any() | (not mask_BT.is_floating_point())))
        refuse(mask_BT, right_BT, name, "1 or True is for a token, 0 or False for padding")
    return mask_BT.bool()


def check_segment_ids(segment_ids_BT: Tensor) -> None:
    """Raise UsageError unless segment ids are as `lay_out` says, and fit into a kernel's int32."""
    before_BT, after_BT = segment_ids_BT[:, :-1], segment_ids_BT[:, 1:]
    right_BT = (after_BT == -1) | ((before_BT >= 0) & (after_BT >= before_BT))
    right_BT = torch.cat([segment_ids_BT[:, :1] >= -1, right_BT], dim=1) & (segment_ids_BT < 2**31)
    refuse(segment_ids_BT, right_BT, "segment_ids", "number the documents of a row 0, 1, 2, ...; -1 is for padding "
                                                    "at its end, a token mask for other padding")


def ids_of_cu_seqlens(cu_seqlens: Tensor | Sequence[int], x_1TD: Tensor) -> Tensor:
    """The segment ids of one row of documents that begin at these places, `[1, T]`; the last number
    is T. Raises UsageError for several rows, and for numbers that are no such list."""
    n_rows, n_tokens = x_1TD.shape[:2]
    starts_N = torch.as_tensor(cu_seqlens, device=x_1TD.device)
    require(n_rows == 1, "cu_seqlens is for one row that holds all documents", f"{n_rows} rows", "give segment_ids")
    is_right = bool(starts_N.dim() == 1 and len(starts_N) > 1 and not starts_N.is_floating_point() and starts_N[0] == 0
                and starts_N[-1] == n_tokens and (starts_N.diff() >= 0).all())
    require(is_right, "wrong cu_seqlens", str(starts_N.tolist())[:80],
            f"give where each document begins, and the number of tokens: 0, ..., {n_tokens}")
    index_1T = torch.arange(n_tokens, device=x_1TD.device)[None]
    return torch.bucketize(index_1T, starts_N[1:].contiguous(), right=True)


def refuse(x_BT: Tensor, right_BT: Tensor, name: str, todo: str) -> None:
    """Raise UsageError for the first number of `name` that is not right. A CUDA device checks
    without host synchronisation, by an assertion; compiled code does not."""
    if torch.compiler.is_compiling() or x_BT.is_meta:
        return
    if x_BT.is_cuda:
        torch._assert_async(unwrapped(right_BT).all(), f"wrong {name}; {todo}")
    elif not unwrapped(right_BT).all():
        require(unwrapped(x_BT).dim() == 2, f"wrong {name}", "under vmap", todo)
        row, token = (~right_BT).nonzero()[0].tolist()
        raise UsageError(f"wrong {name}", f"row {row}: {x_BT[row, token]} at token {token}", todo)


def unwrapped(x: Tensor) -> Tensor:
    """What torch.func has wrapped: a tensor of all examples under vmap."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def ids_change(segment_ids_BT: Tensor) -> Tensor:
    """True for the first token of a row, and wherever the id is not that of the token before."""
    return segment_ids_BT.diff(dim=1, prepend=segment_ids_BT[:, :1] - 1) != 0


def tokens_since(begins_BT: Tensor) -> Tensor:
    """How many tokens are between each token and the last that begins something: `[B, T]`."""
    index_1T = torch.arange(begins_BT.shape[1], device=begins_BT.device)[None]
    return index_1T - torch.where(begins_BT, index_1T, 0).cummax(1).values


def lay_out_documents(config: ModelConfig, segment_ids_BT: Tensor) -> Layout:
    """The layout with `document_grid` "own" of rows whose padding is at their end."""
    # A document begins where the id changes. Padding goes on behind the last one.
    begins_BT = ids_change(segment_ids_BT) & (segment_ids_BT >= 0)
    index_1T = torch.arange(segment_ids_BT.shape[1], device=segment_ids_BT.device)[None]
    position_BT = tokens_since(begins_BT)
    c = config.grid_size
    if c == 1:
        return Layout(position_BT, segment_ids_BT)
    place_BT = index_1T + moves(begins_BT, segment_ids_BT, c, share=not config.first_to_all).cumsum(1)
    place_L = torch.arange((int(place_BT.max()) // c + 1) * c, device=place_BT.device)
    # A place without a token holds a copy of the token before it, and must belong to no document.
    # So documents get even numbers, the copies behind them odd ones, and what is behind the last
    # document is padding.
    token_BL = place_L.new_zeros(len(place_BT), len(place_L)).scatter(1, place_BT, index_1T.expand_as(place_BT))
    token_BL = token_BL.cummax(1).values
    is_copy_BL = place_BT.gather(1, token_BL) != place_L
    last_B1 = torch.where(segment_ids_BT >= 0, place_BT, -1).amax(1, keepdim=True)
    ids_BL = torch.where(place_L > last_B1, -1, 2 * begins_BT.cumsum(1).gather(1, token_BL) + is_copy_BL)
    return Layout(position_BT.gather(1, token_BL), ids_BL, token_BL, place_BT)


def moves(begins_BT: Tensor, segment_ids_BT: Tensor, chunk: int, share: bool) -> Tensor:
    """By how many places each document's first token moves on, and all tokens behind it: `[B, T]`,
    0 elsewhere. A document that does not fit into the rest of a chunk begins the next one. share:
    one that fits stays there: it reads no state, and its id keeps it from its neighbours."""
    moved_BT, n_tokens_B = np.zeros(begins_BT.shape, np.int64), (segment_ids_BT >= 0).sum(1).tolist()
    for moved_T, begins_T, n_tokens in zip(moved_BT, begins_BT.tolist(), n_tokens_B, strict=True):
        end = 0  # the place behind the documents so far
        for start, stop in itertools.pairwise([*np.flatnonzero(begins_T).tolist(), n_tokens]):
            free = -end % chunk
            moved_T[start] = 0 if share and stop - start <= free else free
            end += moved_T[start] + stop - start
    return torch.from_numpy(moved_BT).to(begins_BT.device)
