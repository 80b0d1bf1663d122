"""Means of the last hidden states over documents of any length: the vector of a document.

A document that fits into a row is read in a batch of documents of similar length. A longer one is
read window by window: by a causal model with the state carried, which equals one long row; by any
other model as windows without overlap that do not see each other. Either way every token counts
once."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lineartime.base.settings import PRECISIONS, require, require_name
from lineartime.config import ModelConfig
from lineartime.data.tokenizer import Tokenizer
from lineartime.model.language_model import LanguageModel
from lineartime.ops.dtypes import at_least_float32, autocast_off

BATCHES_AHEAD, FULL_BATCHES_AHEAD = 16, 2
"""So many batches of rows wait to be sorted by length, or so many that are full of tokens."""


def document_ids(tokenizer: Tokenizer, text: str, max_tokens: int | None = None) -> np.ndarray:
    """The ids of a document, uint16 or uint32 `[N]`: the end-of-document token, then the text, at
    most `max_tokens` in all. Raises DataError as `Tokenizer.encode` does."""
    parts = [np.array([tokenizer.end_of_document], tokenizer.dtype)]
    for part in tokenizer.parts(text):
        parts.append(np.array(tokenizer.encode_part(part), tokenizer.dtype))
        if max_tokens is not None and sum(map(len, parts)) >= max_tokens:  # the rest is not even tokenised
            break
    return np.concatenate(parts)[:max_tokens]


def carries_state(config: ModelConfig) -> bool:
    """Whether windows are read with the state carried: not with a position table, which ends."""
    return config.decodes and config.max_len is None


def window_size(config: ModelConfig) -> int:
    """Tokens of a window: the row of training, in whole chunks where the state is carried."""
    chunk = config.chunk_size or 1
    return config.context // chunk * chunk or config.context if carries_state(config) else config.context


def document_means(x_BTD: Tensor, segment_ids_BT: Tensor, n: int | None = None) -> Tensor:
    """The mean of each document's vectors, `[B, N, D]`; 0 for a document without tokens.
    segment_ids_BT: the document of each token, -1 for padding. n: N, by default the largest number
    of documents in a row. Sums are in float32 at least: a bfloat16 sum of a thousand tokens loses
    the next one.

    With the attention mask minus 1 the only document is the row without its padding."""
    n = max(int(segment_ids_BT.max()) + 1, 1) if n is None else n
    of_BNT = segment_ids_BT[:, None] == torch.arange(n, device=x_BTD.device)[:, None]
    wide_BTD = at_least_float32(x_BTD)
    # A matrix of zeros and ones sums the tokens of each document.
    with autocast_off(x_BTD):
        sums_BND = of_BNT.to(wide_BTD.dtype) @ wide_BTD
    return (sums_BND / of_BNT.sum(-1, keepdim=True).clamp(min=1)).to(x_BTD.dtype)


def padded_rows(rows: Sequence[np.ndarray], width: int | None = None, fill: int = -1) -> np.ndarray:
    """Rows of ids, padded behind with `fill` to `width` or to the longest: int64 `[R, T]`."""
    ids_RT = np.full((len(rows), width or max(map(len, rows))), fill, np.int64)
    for row, ids in enumerate(rows):
        ids_RT[row, : len(ids)] = ids
    return ids_RT


def row_means(model: LanguageModel, ids_BT: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The mean of each row's last hidden states, `[B, D]`. ids_BT: -1 is padding, which counts for
    nothing. dtype: the type of sums and means, by default float32 at least."""
    # Columns that are padding in every row are cut off: as many columns stay as the longest row has
    # tokens.
    valid_BT = ids_BT >= 0
    valid_BT = valid_BT[:, : int(valid_BT.sum(1).max())]
    ids_BT = ids_BT[:, : valid_BT.shape[1]].clamp(min=0)
    x_BTD = at_least_float32(model.hidden(ids_BT, padding_mask_BT=None if valid_BT.all() else valid_BT))
    return document_means(x_BTD if dtype is None else x_BTD.to(dtype), valid_BT.long() - 1, n=1)[:, 0]


def means_of_rows(model: LanguageModel, documents: Sequence[np.ndarray], batch_rows: int, precision: str,
                  count: Callable[[int], None]) -> np.ndarray:
    """The means of documents, float64 `[N, D]`, read in windows that do not see each other. count
    is called with the number of tokens of each batch."""
    device, size = model.embed.weight.device, window_size(model.config)
    sums_ND = np.zeros((len(documents), model.config.d_model))
    windows = [(i, ids_N[first : first + size]) for i, ids_N in enumerate(documents)
               for first in range(0, len(ids_N), size)]
    # Rows of a similar length together have little padding; the longest first, so that memory runs
    # out at once or not.
    windows.sort(key=lambda window: -len(window[1]))
    for first in range(0, len(windows), batch_rows):
        numbers, rows = zip(*windows[first : first + batch_rows], strict=True)
        ids_BT = torch.from_numpy(padded_rows(rows)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            means_BD = row_means(model, ids_BT, torch.float64).cpu().numpy()
        for i, ids_N, mean_D in zip(numbers, rows, means_BD, strict=True):
            sums_ND[i] += mean_D * len(ids_N)
        count(sum(map(len, rows)))
    return sums_ND / np.array([len(ids_N) for ids_N in documents])[:, None]


def carried_mean(model: LanguageModel, ids_N: np.ndarray, precision: str, count: Callable[[int], None]) -> np.ndarray:
    """The mean of one document, float64 `[D]`, read in windows with the state carried."""
    state, device, size = model.decoding_state(1), model.embed.weight.device, window_size(model.config)
    sum_D = np.zeros(model.config.d_model)
    for first in range(0, len(ids_N), size):
        ids_1T = torch.from_numpy(padded_rows([ids_N[first : first + size]])).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            x_1TD = model.extend(ids_1T, torch.tensor([ids_1T.shape[1]], device=device), state)
        sum_D += x_1TD[0].double().sum(0).cpu().numpy()
        count(ids_1T.shape[1])
    return sum_D / len(ids_N)


@torch.inference_mode()
def embed(model: LanguageModel, tokenizer: Tokenizer, texts: Iterable[str], *, max_tokens: int | None = None,
          batch_rows: int = 8, precision: str = "float32",
          progress: Callable[[int], None] | None = None) -> np.ndarray:
    """The vectors of texts of any length, the means of their last hidden states: `[N, D]`, float64
    for a float64 model, else float32. The model must be in evaluation mode.

    max_tokens: cut longer documents to this many. batch_rows: rows read at once, which changes only
    rounding. precision: the type of matrix products, "float32" or "bfloat16". progress is called
    with the number of tokens read. Memory holds the ids of a batch, and the keys and values of a
    causal model with quadratic attention. Raises UsageError for wrong values, DataError for text
    that the tokenizer lacks."""
    for name, value in (("max_tokens", max_tokens), ("batch_rows", batch_rows)):
        require(value is None or (isinstance(value, int | np.integer) and bool(value >= 1)), "wrong value",
                f"{name} = {value}", "it takes whole numbers from 1")
    require_name("precision", precision, PRECISIONS)
    carried, size, n_read = carries_state(model.config), window_size(model.config), 0
    vectors: list[np.ndarray] = []
    waiting: list[np.ndarray] = []  # for others of a similar length

    def count(n: int) -> None:
        nonlocal n_read
        n_read += n
        if progress is not None:
            progress(n_read)

    def read_waiting() -> None:
        vectors.extend(means_of_rows(model, waiting, batch_rows, precision, count))
        waiting.clear()

    for text in texts:
        ids_N = document_ids(tokenizer, text, max_tokens)
        if carried and len(ids_N) > size:
            read_waiting()  # the vectors keep their order
            vectors.append(carried_mean(model, ids_N, precision, count))
            continue
        waiting.append(ids_N)
        if (len(waiting) == batch_rows * BATCHES_AHEAD
                or sum(map(len, waiting)) >= batch_rows * FULL_BATCHES_AHEAD * size):
            read_waiting()
    read_waiting()
    wide = model.embed.weight.dtype == torch.float64
    return np.array(vectors, np.float64 if wide else np.float32).reshape(len(vectors), model.config.d_model)
