"""Masked language modelling: the masks of a row.

Row r of a stream is its tokens [r context, (r + 1) context); the last row may be shorter. Rows do
not overlap: every token can be a target in its own row. Masks depend on seed, epoch and row."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lineartime.data.tokens import Mixture, TokenStream, require_mask, rows_of_step

CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
NO_TARGET = -1


def mask_tokens(ids_T: np.ndarray, stream: TokenStream, *, seed: int, epoch: int,
                row: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and the targets of a row, int64 `[T]` each. A row may have no target.

    Each token that is not special is chosen with probability 0.15. Its target is its id; every
    other target is -1. With probability 0.8 it becomes [MASK], with 0.1 a random token that is not
    special, else it stays. The masks of a row's first tokens do not depend on its length."""
    # numpy promises the same raw numbers for ever. The order of rows has this key, but counter 0.
    philox = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64),
                              counter=np.array([0, 0, row, 1], np.uint64))
    assert stream.mask is not None
    # Two numbers of 64 bits for each token: what becomes of it, and which token it may become.
    choice_T, other_T = philox.random_raw(2 * len(ids_T)).reshape(-1, 2).T
    # What a uniform number of 64 bits is below with a probability.
    chosen, masked, replaced = (np.uint64(round(CHOSEN * share * 2**64)) for share in (1, MASKED, MASKED + REPLACED))
    asked_T = (choice_T < chosen) & ~np.isin(ids_T, stream.special)
    inputs_T = np.where(asked_T & (choice_T < masked), stream.mask, ids_T)
    replaced_T = asked_T & (choice_T >= masked) & (choice_T < replaced)
    inputs_T[replaced_T] = stream.ordinary[other_T[replaced_T] % np.uint64(len(stream.ordinary))]
    return inputs_T, np.where(asked_T, ids_T, NO_TARGET)


def masked_batch(stream: TokenStream | Mixture, *, seed: int, step: int, rows_per_step: int, context: int,
                 chosen: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of one training step, int64 `[rows_per_step, context]` each, or of the
    rows `chosen`. An epoch takes every full row once, in its own order and with its own masks.
    Raises UsageError for data without [MASK], DataError for data that does not fill one row."""
    rows = rows_of_step(stream, seed=seed, step=step, rows_per_step=rows_per_step, context=context, n_shared=0)
    require_mask(rows[0][0].mask, rows[0][0].name)
    masked = [mask_tokens(own.read(row * context, (row + 1) * context), own, seed=seed, epoch=epoch, row=row)
              for own, epoch, row in (rows if chosen is None else [rows[r] for r in chosen])]
    inputs_IT, targets_IT = (np.stack(part) for part in zip(*masked, strict=True))
    return inputs_IT, targets_IT


def masked_rows(stream: TokenStream, context: int, starts: Iterable[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`mask_tokens` of the rows at `starts`, seed and epoch 0. Raises UsageError without [MASK]."""
    require_mask(stream.mask, stream.name)
    for start in starts:
        ids_T = stream.read(start, min(start + context, len(stream)))
        yield mask_tokens(ids_T, stream, seed=0, epoch=0, row=start // context)
