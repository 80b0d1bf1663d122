"""Prepared text for trainers that are not ours: as a data set of PyTorch, and of `datasets`."""

from typing import Any

import torch

from lineartime.base.stores import Name
from lineartime.data.mixture import orders
from lineartime.data.tokens import open_split


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of a split, as `DataLoader` and `transformers.Trainer` take them.

    Row i has the tokens i * context to (i + 1) * context of the split. "input_ids" are its tokens but the last, int64
    [context]. "labels" are the same if `shifted` (models of `transformers` shift them), otherwise the next tokens.
    "position_ids" begin anew with each document; by them the classes of `lineartime.hf` keep documents apart. seed: the
    order is that of an epoch of our training; None: that of the text. Raises as `open_split` does."""

    def __init__(self, data: Name, split: str, context: int, *, seed: int | None = None, epoch: int = 0,
                 shifted: bool = True):
        self.stream, self.context, self.shifted = open_split(data, split), context, shifted
        self.n_rows = (len(self.stream) - 1) // context
        self.order = range(self.n_rows) if seed is None else orders(seed, self.n_rows)(epoch)

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if not 0 <= i < self.n_rows:
            raise IndexError(i)
        row = int(self.order[i])
        ids = torch.from_numpy(self.stream.read(row * self.context, (row + 1) * self.context + 1))
        places = torch.arange(self.context)
        begins = torch.where(ids[:-1] == self.stream.end_of_document, places, 0).cummax(0).values
        return {"input_ids": ids[:-1], "labels": ids[:-1] if self.shifted else ids[1:], "position_ids": places - begins}


def as_dataset(data: Name, split: str, context: int, **how: Any) -> Any:
    """The same rows as a `datasets.IterableDataset`. how: as of `Rows`. Raises UsageError if `datasets` is missing."""
    from lineartime.data.sources import hub_library

    rows = Rows(data, split, context, **how)

    def read() -> Any:
        for i in range(len(rows)):
            yield {name: value.numpy() for name, value in rows[i].items()}

    return hub_library().IterableDataset.from_generator(read)
