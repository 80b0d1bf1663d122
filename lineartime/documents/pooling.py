"""Means of the last hidden states over documents of any length: the vector of a document, and what its labels are read
from.

A document that fits into a row is read in a batch of documents of similar length. A longer one is read window by
window: by a causal model with the state carried, which equals one long row; by any other model as windows without
overlap that do not see each other. Either way every token counts once."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.data.read_text import cut
from lineartime.data.tokenizer import Tokenizer
from lineartime.documents.examples import Example
from lineartime.model import LanguageModel
from lineartime.ops.dtypes import at_least_float32
from lineartime.settings import require, require_precision

BATCHES_AHEAD, FULL_BATCHES_AHEAD = 16, 2
"""Most batches of rows that wait to be sorted by length, and most that would be full of tokens: what a stop loses."""
BETWEEN = "\n\n"
"""What stands between the two texts of a pair where the tokenizer has no [SEP]."""


class Mean(NamedTuple):
    """What is read from a document."""

    vector_D: np.ndarray
    """The mean of its tokens' last hidden states, float64 `[D]`."""
    n_tokens: int
    """Tokens read, the end-of-document token before the text included."""
    is_cut: bool
    """Whether the document has more tokens, which `max_tokens` left out."""


class TokenPiece(NamedTuple):
    """The next tokens of a document."""

    ids: list[int]
    is_last: bool
    is_cut: bool


@dataclass(frozen=True)
class Reading:
    """How documents are read. Raises UsageError for a wrong value."""

    max_tokens: int | None = None
    """Most tokens of a document; None: all."""
    batch_rows: int = 8
    """Rows read at once. It changes rounding, speed and memory."""
    precision: str = "float32"
    """The type of matrix products: "float32" or "bfloat16"."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "batch_rows"):
            value = getattr(self, name)
            require(value is None or value >= 1, "wrong value", f"{name} = {value}", "it takes whole numbers from 1")
        require_precision(self.precision)


def document_ids(tokenizer: Tokenizer, text: Iterable[str], second: str | None = None) -> Iterator[list[int]]:
    """The ids of a document, a piece of text at a time: the end-of-document token, then the text.

    text: the document in pieces. second: the second text of a pair. It stands behind "[SEP]" if the tokenizer has it,
    otherwise behind a blank line: an end-of-document token would hide the first text from it. Raises DataError as
    `Tokenizer.encode` does."""
    yield [tokenizer.end_of_document]
    if second is not None and tokenizer.separator is None:
        text, second = itertools.chain(text, (BETWEEN, second)), None
    yield from (tokenizer.encode(piece.text) for piece in cut(text))
    if second is not None and tokenizer.separator is not None:
        yield [tokenizer.separator]
        yield from (tokenizer.encode(piece.text) for piece in cut([second]))


def token_pieces(ids: Iterable[Sequence[int]], size: int, max_tokens: int | None = None) -> Iterator[TokenPiece]:
    """A document's first `max_tokens` ids as windows of `size`; the last has at least one id."""
    waiting: list[int] = []
    left, is_cut = max_tokens, False
    for piece in ids:
        waiting += piece
        if left is not None and len(waiting) > left:  # the rest of the document is not even read
            del waiting[left:]
            is_cut = True
        while len(waiting) > size:
            yield TokenPiece(waiting[:size], False, False)
            del waiting[:size]
            left = left if left is None else left - size
        if is_cut:
            break
    yield TokenPiece(waiting, True, is_cut)


def named_means(model: LanguageModel, tokenizer: Tokenizer, examples: Iterable[Example], reading: Reading, *,
                progress: Callable[[int], None] | None = None) -> Iterator[tuple[Example, Mean]]:
    """`read_means` of documents, each with its name. Raises DataError as the reader of the documents does."""
    waiting: collections.deque[Example] = collections.deque()

    def ids() -> Iterator[Iterator[list[int]]]:
        for example in examples:
            waiting.append(example)
            yield document_ids(tokenizer, example.text, example.second)

    for mean in read_means(model, ids(), reading, progress=progress):
        yield waiting.popleft(), mean


def carries_state(config: ModelConfig) -> bool:
    """Whether windows of a document are read one after another with the state carried. A position table would end."""
    return config.decodes and config.max_len is None


def window_size(config: ModelConfig) -> int:
    """Tokens of a window: the row of training, in whole chunks where the state is carried."""
    chunk = config.chunk_size or 1
    return config.context // chunk * chunk or config.context if carries_state(config) else config.context


def document_means(x_BTD: Tensor, segment_ids_BT: Tensor) -> Tensor:
    """The mean of each document's vectors, `[B, N, D]`, N the largest number of documents in a row; 0 for a document
    without tokens. segment_ids_BT: the document of each token, -1 for padding. Sums are in float32 at least, also under
    autocast, in which a token of a thousand would be lost.

    With the attention mask minus 1 the only document is the row without its padding: an embedding of its text."""
    n = max(int(segment_ids_BT.max()) + 1, 1)
    of_BNT = segment_ids_BT[:, None] == torch.arange(n, device=x_BTD.device)[:, None]
    wide_BTD = at_least_float32(x_BTD)
    # A matrix of zeros and ones sums the tokens of each document.
    with torch.autocast(x_BTD.device.type, enabled=False):
        sums_BND = of_BNT.to(wide_BTD.dtype) @ wide_BTD
    return (sums_BND / of_BNT.sum(-1, keepdim=True).clamp(min=1)).to(x_BTD.dtype)


def padded(rows: Sequence[Sequence[int]], width: int | None = None) -> np.ndarray:
    """ids_BT, int64: rows with -1 behind them as padding, `width` ids wide or as the longest."""
    ids_BT = np.full((len(rows), width or max(map(len, rows))), -1, np.int64)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = ids
    return ids_BT


def row_states(model: LanguageModel, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's last hidden states, `[B, T, D]`, float32 at least, and whether they are of tokens, bool `[B, T]`. T is
    the longest row's number of tokens. ids_BT: -1 is padding."""
    valid_BT = ids_BT >= 0
    valid_BT = valid_BT[:, : int(valid_BT.sum(1).max())]
    ids_BT = ids_BT[:, : valid_BT.shape[1]]
    x_BTD = model.hidden(ids_BT.clamp(min=0), padding_mask_BT=None if valid_BT.all() else valid_BT)
    return at_least_float32(x_BTD), valid_BT


def row_means(model: LanguageModel, ids_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The mean of each row's last hidden states, `[B, D]`. ids_BT: -1 is padding, which counts for nothing. dtype: that
    of the sums and the means, by default float32 at least."""
    x_BTD, valid_BT = row_states(model, ids_BT)
    return document_means(x_BTD.to(dtype or x_BTD.dtype), valid_BT.long() - 1)[:, 0]


@torch.inference_mode()
def read_means(model: LanguageModel, documents: Iterable[Iterable[Sequence[int]]], reading: Reading | None = None, *,
               progress: Callable[[int], None] | None = None) -> Iterator[Mean]:
    """The mean of each document, in order. documents: ids in pieces, of `document_ids`. progress is called after each
    batch or window with the number of tokens read so far. The model must be in
    evaluation mode. Raises DataError as `documents` does.

    Memory does not grow with a document but for the keys and values of a causal model with quadratic attention."""
    n_read = 0

    def count(n: int) -> None:
        nonlocal n_read
        n_read += n
        if progress is not None:
            progress(n_read)

    sum_D, n_tokens = np.zeros(model.config.d_model), 0
    for piece, piece_sum_D in piece_sums(model, documents, reading or Reading(), count):
        sum_D, n_tokens = sum_D + piece_sum_D, n_tokens + len(piece.ids)
        if piece.is_last:
            yield Mean(sum_D / n_tokens, n_tokens, piece.is_cut)
            sum_D, n_tokens = np.zeros_like(sum_D), 0


def piece_sums(model: LanguageModel, documents: Iterable[Iterable[Sequence[int]]], reading: Reading,
               count: Callable[[int], None]) -> Iterator[tuple[TokenPiece, np.ndarray]]:
    """The pieces of all documents in order, each with the sum of its last hidden states, float64 `[D]`. count is called
    with the number of tokens of each batch."""
    carried, size = carries_state(model.config), window_size(model.config)
    waiting: list[TokenPiece] = []  # for others of a similar length
    for ids in documents:
        pieces = token_pieces(ids, size, reading.max_tokens)
        for piece in pieces:
            if carried and not piece.is_last:
                # A long document is read alone, after those in front of it: results keep their order.
                yield from row_sums(model, waiting, reading, count)
                yield from carried_sums(model, itertools.chain([piece], pieces), reading, count)
                continue
            waiting.append(piece)
            n_waiting = sum(len(each.ids) for each in waiting)
            if (len(waiting) == reading.batch_rows * BATCHES_AHEAD
                    or n_waiting >= reading.batch_rows * FULL_BATCHES_AHEAD * size):
                yield from row_sums(model, waiting, reading, count)
    yield from row_sums(model, waiting, reading, count)


def row_sums(model: LanguageModel, waiting: list[TokenPiece], reading: Reading,
             count: Callable[[int], None]) -> Iterator[tuple[TokenPiece, np.ndarray]]:
    """Read the waiting pieces, the longest first, and empty the list."""
    device = model.embed.weight.device
    means_ND = np.empty((len(waiting), model.config.d_model))
    # Rows of a similar length together have little padding; the longest first, so that memory runs out at once or not.
    order = sorted(range(len(waiting)), key=lambda row: -len(waiting[row].ids))
    for first in range(0, len(order), reading.batch_rows):
        rows = order[first : first + reading.batch_rows]
        ids_BT = torch.from_numpy(padded([waiting[row].ids for row in rows])).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=reading.precision == "bfloat16"):
            means_ND[rows] = row_means(model, ids_BT, torch.float64).cpu().numpy()
        count(sum(len(waiting[row].ids) for row in rows))
    for mean_D, piece in zip(means_ND, waiting, strict=True):
        yield piece, mean_D * len(piece.ids)
    waiting.clear()


def carried_sums(model: LanguageModel, pieces: Iterable[TokenPiece], reading: Reading,
                 count: Callable[[int], None]) -> Iterator[tuple[TokenPiece, np.ndarray]]:
    """Read one document with the state carried."""
    state, device = model.decoding_state(1), model.embed.weight.device
    for piece in pieces:
        ids_1N = torch.tensor([piece.ids], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=reading.precision == "bfloat16"):
            x_1ND = model.extend(ids_1N, torch.tensor([len(piece.ids)], device=device), state)
        count(len(piece.ids))
        yield piece, x_1ND[0].double().sum(0).cpu().numpy()
