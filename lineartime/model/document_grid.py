"""The grid of packed rows: where the positions and the chunks of each document begin.

With `ModelConfig.document_grid` "row" they count from the beginning of the row, as in the paper's listings. With "own"
positions count from the beginning of each document. Rows are then laid out once, where a model or a layer takes them:
a document begins with a chunk, or lies in one. The layers compute as always, and the results go back to where the
tokens were."""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.config import ModelConfig


class Places(NamedTuple):
    """Rows of T tokens as layers take them, in L places."""

    position_BL: Tensor
    """The position of each place, `[1 or B, L]`."""
    segment_ids_BL: Tensor | None
    """The document of each place, see `layers.SequenceInfo`."""
    order_BL: Tensor | None = None
    """The token at each place; None: the tokens as they are, and L = T."""
    back_BT: Tensor | None = None
    """The place of each token, if there is an `order_BL`."""


def padding_last(valid_BT: Tensor) -> Tensor:
    """The order with each row's tokens first and its padding last, see `layers.in_order`. ONNX has no stable sort."""
    count_BT, padding_BT = valid_BT.cumsum(1), (~valid_BT).cumsum(1)
    return torch.where(valid_BT, count_BT, count_BT[:, -1:] + padding_BT).argsort(1)


def places_of(config: ModelConfig, n_tokens: int, device: torch.device, segment_ids_BT: Tensor | None,
              order_BT: Tensor | None = None) -> Places:
    """The places of rows of `n_tokens`. segment_ids_BT: see `layers.SequenceInfo`. order_BT: if given, the
    ids are those of the tokens in this order, see `layers.tokens_first`."""
    index_1T = torch.arange(n_tokens, device=device)[None]
    back_BT = None if order_BT is None else order_BT.argsort(1)
    if config.document_grid == "row" or segment_ids_BT is None or segment_ids_BT.numel() == 0:
        return Places(index_1T, segment_ids_BT, order_BT, back_BT)
    # A document begins where the id changes. Padding, which is at the end of a row, goes on behind the last one.
    begins_BT = (segment_ids_BT.diff(dim=1, prepend=segment_ids_BT[:, :1] - 1) != 0) & (segment_ids_BT >= 0)
    position_BT = index_1T - torch.where(begins_BT, index_1T, 0).cummax(1).values
    c = config.grid_size
    if c == 1:
        return Places(position_BT, segment_ids_BT, order_BT, back_BT)
    place_BT = index_1T + moves(begins_BT, segment_ids_BT, c, share=not config.first_to_all).cumsum(1)
    place_L = torch.arange((int(place_BT.max()) // c + 1) * c, device=device)
    # A place without a token holds a copy of the token before it, and must belong to no document. So documents get even
    # numbers, the copies behind them odd ones, and what is behind the last document is padding.
    token_BL = place_L.new_zeros(len(place_BT), len(place_L)).scatter(1, place_BT, index_1T.expand_as(place_BT))
    token_BL = token_BL.cummax(1).values
    is_copy_BL = place_BT.gather(1, token_BL) != place_L
    last_B1 = torch.where(segment_ids_BT >= 0, place_BT, -1).amax(1, keepdim=True)
    ids_BL = torch.where(place_L > last_B1, -1, 2 * begins_BT.cumsum(1).gather(1, token_BL) + is_copy_BL)
    order_BL = token_BL if order_BT is None else order_BT.gather(1, token_BL)
    return Places(position_BT.gather(1, token_BL), ids_BL, order_BL,
                  place_BT if back_BT is None else place_BT.gather(1, back_BT))


def moves(begins_BT: Tensor, segment_ids_BT: Tensor, chunk: int, share: bool) -> Tensor:
    """By how many places each document's first token moves on, and with it all tokens behind it: `[B, T]`, 0 for other
    tokens. A document that does not fit into the rest of a chunk begins the next one.

    share: whether a document that fits stays there. It is computed as it would be alone: it reads no state, and its id
    keeps it from its neighbours in the chunk."""
    moved_BT, n_tokens_B = np.zeros(begins_BT.shape, np.int64), (segment_ids_BT >= 0).sum(1).tolist()
    for moved_T, begins_T, n_tokens in zip(moved_BT, begins_BT.tolist(), n_tokens_B, strict=True):
        end = 0  # the place behind the documents so far
        for start, stop in itertools.pairwise([*np.flatnonzero(begins_T).tolist(), n_tokens]):
            free = -end % chunk
            moved_T[start] = 0 if share and stop - start <= free else free
            end += moved_T[start] + stop - start
    return torch.from_numpy(moved_BT).to(begins_BT.device)
