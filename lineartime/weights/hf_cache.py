"""The cache of the `transformers` classes: a `DecodingState` as their library's `Cache`."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from lineartime.base.errors import UsageError
from lineartime.base.settings import require
from lineartime.model.decoding.state import DecodingState, load_state
from lineartime.model.language_model import LanguageModel
from lineartime.model.layout import in_order, padding_last
from lineartime.weights.generation.step import DecodeStep


class LineartimeCache(Cache):
    """A `DecodingState` as a cache of `generate`, whose first tokens fix the batch size."""

    layers: list[Any] = []  # noqa: RUF012  # the library's own, of which there are none: `state` holds everything
    is_croppable = False

    # Not that of the base class, which wants layers.
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.state: DecodingState | None = None
        """Without its model: an exporter takes all that is in a cache for tensors of the graph."""
        self.n_columns = torch.zeros((), dtype=torch.long)
        """Tokens given to each row, padding included; a tensor, as all that a graph takes in."""

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.seq_lens_B.shape[0]

    def extend(self, model: LanguageModel, ids_BN: Tensor, valid_BN: Tensor, collected: list[Tensor] | None = None,
               embeds_BND: Tensor | None = None) -> Tensor:
        """`LanguageModel.extend` by the next columns of a batch, where valid_BN is True: x_BND. In
        an exported program of one column all are. Raises UsageError for another number of rows."""
        n_rows = ids_BN.shape[0]  # `len` would fix it in a graph
        if self.state is None:
            self.state = dataclasses.replace(model.decoding_state(n_rows), model=None)
        self.state.check(model, n_rows)
        if torch.compiler.is_exporting() and ids_BN.shape[1] == 1:
            step = DecodeStep(model, self.state.reserve_in_graph(1))
            x_BND = step.hidden(ids_BN[:, 0], step.tensors_of(self.state), collected, embeds_BND)[:, None]
        else:  # it wants a row's padding last; then the states go back to their columns
            order_BN = padding_last(valid_BN)
            x_BND = model.extend(ids_BN.gather(1, order_BN), valid_BN.sum(1), self.state, collected,
                                 None if embeds_BND is None else in_order(embeds_BND, order_BN))[0]
            back_BN = order_BN.argsort(1)
            x_BND = in_order(x_BND, back_BN)
            if collected is not None:
                collected[:] = [in_order(each_BND, back_BN) for each_BND in collected]
        self.n_columns = self.n_columns + ids_BN.shape[1]  # last: a call that fails has read nothing
        return x_BND

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may occur more than once."""
        if self.state is not None:
            self.state.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.n_columns)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no longest row."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raises UsageError unless it is 0: a sum cannot forget some of its tokens exactly."""
        require(tokens_to_remove == 0, "this cache cannot forget tokens", f"crop({tokens_to_remove})",
                "generate without an assistant")

    def save_pretrained(self, path: Path | str, model: Any) -> None:
        """Write this cache of `model` to a file. Raises ResourceError, or UsageError if empty."""
        if self.state is None:
            raise UsageError("the cache is empty", path, "give it to a model first")
        dataclasses.replace(self.state, model=model.model).save(path, {"n_columns": int(self.n_columns)})

    @classmethod
    def from_pretrained(cls, path: Path | str, model: Any) -> "LineartimeCache":
        """The cache in a file of `save_pretrained`. Raises as `DecodingState.load` does."""
        made = cls()
        state, facts = load_state(Path(path), model.model, {"n_columns"})
        made.state = dataclasses.replace(state, model=None)
        made.n_columns = made.n_columns + facts["n_columns"]
        return made
