"""What a model recalls: the held-out loss of tokens that occurred before in their row, and of those that did not."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lineartime.data.tokens import TokenStream, eval_rows
from lineartime.distributed.ranks import ALONE
from lineartime.errors import NumericsError
from lineartime.evaluation import batches, rows_at_once, scored
from lineartime.model import LanguageModel
from lineartime.settings import require, require_precision

KINDS = ("token", "bigram", "rare bigram")
SEEN = ("in its chunk", "in earlier chunks only", "not before")
RARE_PER_MILLION = 10
"""A rare bigram makes up at most this many of a million bigrams of the training split."""
BLOCK_TOKENS = 1 << 20
"""Tokens of the training split that are read at once."""
Progress = Callable[[str, int, int | None], None]
"""Of what is done, how much is done, and of how much."""


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Losses in nats per token by what was there before.

    A target y with x before it is of a class of each of two `KINDS`: as the token y, and as the bigram x y; a rare
    bigram is of the third kind too. It is `SEEN` in its chunk if the token, or the whole bigram, is among the tokens
    of its document in the chunk of x up to x; in earlier chunks only if it is not, but is among those in the row.
    Chunks are counted from the row's start, as those of local attention are."""

    context: int
    chunk: int
    """Tokens of a row and of a chunk."""
    n_tokens: list[list[int]]
    """Targets of each kind and class."""
    nll: list[list[float]]
    """Sum of -ln p over them."""

    def to_dict(self) -> dict[str, Any]:
        classes = [{"kind": kind, "seen": seen, "n_tokens": n, "loss": nll / n if n else None}
                   for kind, n_S, nll_S in zip(KINDS, self.n_tokens, self.nll, strict=True)
                   for seen, n, nll in zip(SEEN, n_S, nll_S, strict=True)]
        return {"context": self.context, "chunk": self.chunk, "rare_per_million": RARE_PER_MILLION,
                "n_tokens": sum(self.n_tokens[0]), "loss": sum(self.nll[0]) / sum(self.n_tokens[0]), "classes": classes}


@torch.inference_mode()
def measure_recurrence(model: LanguageModel, stream: TokenStream, training: TokenStream, *, chunk: int | None = None,
                       context: int | None = None, precision: str = "float32",
                       progress: Progress | None = None) -> Recurrence:
    """Score a split as `evaluate` does, and sum the losses by what occurred before in the row.

    training: the split that says which bigrams are rare (Zoology, arXiv:2312.04927, tells in this way what a model
    recalls from what its weights hold). chunk: tokens, by default as the model has; a model without chunks needs it.
    context, precision: see `evaluate`. Raises UsageError for these, for a model that is not causal and for splits of
    two tokenizers, NumericsError for a loss that is not finite."""
    require_precision(precision)
    require(model.config.causal, "only a causal model recalls what is before a token", "causal = false")
    context, batch_rows = rows_at_once(model, stream, context, None)
    chunk = (model.config.chunk_size or 0) if chunk is None else chunk
    require(chunk != 0 or model.config.chunk_size is not None, "this model has no chunks", "chunk",
            "give it --chunk N, as another model has")
    require(chunk >= 1, "wrong value", f"chunk = {chunk}", "it takes whole numbers from 1")
    require(training.tokenizer_sha256 == stream.tokenizer_sha256, "the splits have different tokenizers",
            f"{training.folder} and {stream.folder}")
    frequent = frequent_bigrams(training, progress)
    was_training, n_read = model.training, 0
    model.eval()
    n_KS, nll_KS = np.zeros((3, 3), np.int64), np.zeros((3, 3))
    stacked = ([np.stack(batch)] for batch in batches(eval_rows(stream, context), len, lambda _: batch_rows))
    for (rows_BL,), losses_BT in scored(model, stacked, precision, ALONE):
        token_BT, bigram_BT = seen_before(rows_BL, chunk, stream.end_of_document)
        rare_BT = ~np.isin(bigrams_of(rows_BL, stream.vocab_size), frequent)
        everything = np.ones_like(rare_BT)
        for kind, (seen_BT, chosen_BT) in enumerate(
                ((token_BT, everything), (bigram_BT, everything), (bigram_BT, rare_BT))):
            n_KS[kind] += np.bincount(seen_BT[chosen_BT], minlength=3)
            nll_KS[kind] += np.bincount(seen_BT[chosen_BT], losses_BT[chosen_BT], minlength=3)
        n_read += losses_BT.size
        if progress is not None:
            progress("evaluating", n_read, stream.n_tokens)
    model.train(was_training)
    if not math.isfinite(nll_KS.sum()):
        raise NumericsError("the held-out loss is not finite", f"{nll_KS[0].sum()}",
                            "the weights are damaged or have diverged")
    return Recurrence(context, chunk, n_KS.tolist(), nll_KS.tolist())


def seen_before(rows_BL: np.ndarray, chunk: int, end_of_document: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the targets rows_BL[:, 1:], where the token and where the bigram was before: places in `SEEN`, each `[B, T]`,
    T = L - 1."""
    document_BL = np.cumsum(rows_BL == end_of_document, axis=1)
    is_end_BT = rows_BL[:, 1:] == end_of_document
    # An end-of-document token ends a document, and has been there if it began it: its last one in the row.
    of_token_BL = np.where(rows_BL == end_of_document, -1, document_BL)
    token_BT = last_before(rows_BL, of_token_BL)[:, 1:]
    # No document holds the bigram at its end before, for its first token is no bigram's second.
    bigram_BT = np.where(is_end_BT, -1, last_before(rows_BL[:, :-1], rows_BL[:, 1:], document_BL[:, 1:]))
    chunk = min(chunk, rows_BL.shape[1])  # a longer one holds the row as well, and may be no number of 64 bits
    chunk_T = np.arange(rows_BL.shape[1] - 1) // chunk
    token, bigram = (np.where(place_BT < 0, 2, (place_BT // chunk != chunk_T).astype(np.int64))
                     for place_BT in (token_BT, bigram_BT))
    return token, bigram


def last_before(*keys_BN: np.ndarray) -> np.ndarray:
    """The place in its row of the last entry before each that is equal in all keys, -1 without one: `[B, N]`."""
    n_rows, length = keys_BN[0].shape
    flat = [key_BN.ravel() for key_BN in keys_BN] + [np.repeat(np.arange(n_rows), length)]
    order = np.lexsort(flat)  # stable: equal entries stay in the order of their places
    same = np.logical_and.reduce([key[order[1:]] == key[order[:-1]] for key in flat])
    place = np.full(n_rows * length, -1)
    place[order[1:]] = np.where(same, order[:-1] % length, -1)
    return place.reshape(n_rows, length)


def bigrams_of(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """A number for each two neighbours in the last dimension, which is one shorter."""
    return ids[..., :-1] * vocab_size + ids[..., 1:]


def frequent_bigrams(stream: TokenStream, progress: Progress | None = None) -> np.ndarray:
    """All bigrams of a split that are not rare, by `bigrams_of`, sorted. Memory grows with the number of different
    bigrams: 16 bytes for each."""
    found, n_found = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for start in range(0, stream.n_tokens, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, stream.n_tokens)
        new, n_new = np.unique(bigrams_of(stream.read(start, stop + 1), stream.vocab_size), return_counts=True)
        found, places = np.unique(np.concatenate([found, new]), return_inverse=True)
        n_found = np.bincount(places, np.concatenate([n_found, n_new]), minlength=len(found)).astype(np.int64)
        if progress is not None:
            progress("counting bigrams", stop, stream.n_tokens)
    return found[n_found * 1_000_000 > RARE_PER_MILLION * stream.n_tokens]


def describe(recurrence: Recurrence) -> list[str]:
    """The table that `python -m benchmarks recurrence` prints, line by line."""
    said = recurrence.to_dict()
    lines = [f"{said['n_tokens']:,} tokens in rows of {recurrence.context:,}, chunks of {recurrence.chunk:,}: was the "
             "token, or the bigram that it ends, in its document before",
             f"{'':<12}{'seen':<24}{'tokens':>12}   nats per token"]
    for each in said["classes"]:
        loss = "--" if each["loss"] is None else f"{each['loss']:.4f}"
        lines.append(f"{each['kind']:<12}{each['seen']:<24}{each['n_tokens']:>12,}   {loss:>14}")
    rare = f"at most {RARE_PER_MILLION} of a million in the training split"
    return [*lines, f"{'all':<36}{said['n_tokens']:>12,}   {said['loss']:>14.4f}", f"rare bigrams: {rare}"]
