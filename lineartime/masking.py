"""Masked language modelling: which tokens of a row are hidden, and what a model puts in their place.

Row r of a stream is its tokens [r context, (r + 1) context), the last row shorter; there is no overlap, for every token
can be a target in its own row. Masks are a pure function of (seed, epoch, row): of no batch, rank or reader."""

from collections.abc import Iterator

import numpy as np
import torch

from lineartime.data.tokenizer import Tokenizer
from lineartime.data.tokens import TokenStream, require_mask, rows_of_step
from lineartime.model import LanguageModel

CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
"""Of the tokens 15% are asked for; of these 80% are masked, 10% replaced by another token, 10% left as they are."""
NO_TARGET = -1


def mask_tokens(ids_T: np.ndarray, stream: TokenStream, *, seed: int, epoch: int,
                row: int) -> tuple[np.ndarray, np.ndarray]:
    """A row as the model is given it, and what is asked of it: two int64 arrays `[T]`.

    Each token that is not special is chosen with probability 0.15, independently of the others. A chosen token's target
    is its id, every other target is -1. A chosen token becomes [MASK] with probability 0.8, with probability 0.1 a
    token drawn uniformly from those that are not special, and stays otherwise. The first tokens of a row are masked
    alike whatever its length. A row in which nothing is chosen is left as it is."""
    # Raw numbers, which numpy promises to stay the same. The order of rows has the same key and another counter.
    philox = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64),
                              counter=np.array([0, 0, row, 1], np.uint64))
    assert stream.mask is not None
    choice_T, other_T = philox.random_raw(2 * len(ids_T)).reshape(-1, 2).T
    asked_T = choice_T < _share(CHOSEN)
    asked_T &= ~np.isin(ids_T, stream.special)
    inputs_T = np.where(asked_T & (choice_T < _share(CHOSEN * MASKED)), stream.mask, ids_T)
    replaced_T = asked_T & (choice_T >= _share(CHOSEN * MASKED)) & (choice_T < _share(CHOSEN * (MASKED + REPLACED)))
    inputs_T[replaced_T] = stream.ordinary[other_T[replaced_T] % np.uint64(len(stream.ordinary))]
    return inputs_T, np.where(asked_T, ids_T, NO_TARGET)


def _share(probability: float) -> np.uint64:
    """The number below which a raw 64-bit number lies with this probability."""
    return np.uint64(round(probability * 2**64))


def masked_batch(stream: TokenStream, *, seed: int, step: int, rows_per_step: int,
                 context: int) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of one training step, int64 `[rows_per_step, context]` each: a pure function of its
    arguments. An epoch takes every full row once, in another order and under other masks than the epoch before.

    Raises UsageError where the data has no [MASK], DataError where it does not fill one row."""
    require_mask(stream.mask, stream.folder)
    rows = rows_of_step(stream, len(stream), seed=seed, step=step, rows_per_step=rows_per_step, context=context)
    masked = [mask_tokens(stream.read(row * context, (row + 1) * context), stream, seed=seed, epoch=epoch, row=row)
              for epoch, row in rows]
    inputs_IT, targets_IT = (np.stack(part) for part in zip(*masked, strict=True))
    return inputs_IT, targets_IT


def masked_rows(stream: TokenStream, context: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All rows in order, the last one shorter, under the masks that evaluation always has: seed 0, epoch 0.

    Raises UsageError where the data has no [MASK]."""
    require_mask(stream.mask, stream.folder)
    for row, start in enumerate(range(0, len(stream), context)):
        ids_T = stream.read(start, min(start + context, len(stream)))
        yield mask_tokens(ids_T, stream, seed=0, epoch=0, row=row)


@torch.inference_mode()
def fill_masks(model: LanguageModel, inputs_T: np.ndarray) -> np.ndarray:
    """The likeliest token at every place of a row, int64 `[T]`."""
    ids_1T = torch.from_numpy(inputs_T)[None].to(model.embed.weight.device)
    return model(ids_1T)[0].argmax(-1).cpu().numpy()


def masked_sample(model: LanguageModel, tokenizer: Tokenizer, stream: TokenStream, *, n_documents: int = 4,
                  n_tokens: int = 60) -> str:
    """The beginnings of the first documents of a split with masks, with what the model puts there, and as they are."""
    lines = []
    for number in range(min(n_documents, stream.n_documents)):
        first, last = (int(position) for position in stream.document_positions[number : number + 2])
        ids_T = stream.read(first, min(last, first + n_tokens, first + model.config.context))
        inputs_T, targets_T = mask_tokens(ids_T, stream, seed=0, epoch=0, row=number)
        asked_T = targets_T != NO_TARGET
        inputs_T[asked_T] = stream.mask
        filled_T = np.where(asked_T, fill_masks(model, inputs_T), ids_T)
        for name, row_T in (("masked", inputs_T), ("filled", filled_T), ("text", ids_T)):
            lines.append(f"{name:<7} {' '.join(tokenizer.decode(row_T[1:].tolist()).split())}")
        lines.append("")
    return "\n".join(lines)
