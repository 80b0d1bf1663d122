"""Means of the last hidden states over documents of any length: the vector of a document.

A document that fits into a row is read in a batch of documents of similar length. A longer one is
read in windows: by a causal model with the state carried, which equals one long row; by any other
model as rows that do not see each other. Either way every token counts once."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lineartime.base.settings import PRECISIONS, require, require_counts, require_name
from lineartime.data.tokenizer import Tokenizer
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel
from lineartime.model.layout import refuse
from lineartime.ops.dtypes import at_least_float32, autocast_off


def document_ids(tokenizer: Tokenizer, text: str, max_tokens: int | None = None) -> np.ndarray:
    """The ids of a document, uint16 or uint32 `[N]`: the end-of-document token, then the text, at
    most `max_tokens` in all. Raises DataError as `Tokenizer.encode` does."""
    parts = [np.array([tokenizer.end_of_document], tokenizer.dtype)]
    for part in tokenizer.parts(text):
        parts.append(np.array(tokenizer.encode_part(part), tokenizer.dtype))
        if max_tokens is not None and sum(map(len, parts)) >= max_tokens:  # the rest is not even tokenised
            break
    return np.concatenate(parts)[:max_tokens]


def document_means(x_BTD: Tensor, segment_ids_BT: Tensor, n: int | None = None) -> Tensor:
    """The mean of each document's vectors, `[B, N, D]`; 0 for a document without tokens.
    segment_ids_BT: the document of each token, -1 for padding. n: N, by default the largest number
    of documents in a row. Sums are float32 at least: a bfloat16 sum of 1,000 tokens loses the next.

    With the attention mask minus 1 the only document is the row without its padding. Raises
    UsageError for other numbers, as of a mask that is added to scores."""
    refuse(segment_ids_BT, (segment_ids_BT >= -1) & (segment_ids_BT % 1 == 0), "segment_ids",
           "number the documents from 0; -1 is for padding")
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


def batches_of(model: LanguageModel, documents: Sequence[np.ndarray], batch_rows: int,
               ) -> Iterator[tuple[Sequence[int], Sequence[np.ndarray], DecodingState | None]]:
    """What is read at once: the numbers of documents, their windows, and the state that is carried
    through a long document, whose windows come one by one."""
    config, rows = model.config, []
    carries = model.decodes and config.max_len is None  # a position table ends
    chunk = (config.chunk_size or 1) if carries else 1
    size = config.context // chunk * chunk or config.context
    for i, ids_N in enumerate(documents):
        windows = [ids_N[first : first + size] for first in range(0, len(ids_N), size)]
        if carries and len(windows) > 1:
            state = model.decoding_state(1)
            yield from (([i], [window], state) for window in windows)
        else:
            rows += [(i, window) for window in windows]
    # Similar lengths have little padding. The longest come first: memory runs out at once or not.
    rows.sort(key=lambda row: -len(row[1]))
    for first in range(0, len(rows), batch_rows):
        yield *zip(*rows[first : first + batch_rows], strict=True), None


@torch.inference_mode()
def embed(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str], *, max_tokens: int | None = None,
          batch_rows: int = 8, precision: str = "float32", progress: Callable[[int], None] | None = None) -> np.ndarray:
    """The vectors of texts of any length, the means of their last hidden states: `[N, D]`, float64
    for a float64 model, else float32. The model must be in evaluation mode.

    max_tokens: cut longer documents to this many. batch_rows: rows read at once, which changes only
    rounding. precision: the type of matrix products, "float32" or "bfloat16". progress gets the
    number of tokens read. Raises UsageError for wrong values, DataError for unknown characters."""
    require_counts(max_tokens=max_tokens, batch_rows=batch_rows)
    require(not isinstance(texts, str), "these are the letters of one text", "embed", "give a list of texts")
    require_name("precision", precision, PRECISIONS)
    device, n_read = model.embed.weight.device, 0
    documents = [document_ids(tokenizer, text, max_tokens) for text in texts]
    sums_ND = np.zeros((len(documents), model.config.d_model))
    for numbers, rows, state in batches_of(model, documents, batch_rows):
        ids_BT = torch.from_numpy(padded_rows(rows)).to(device)
        valid_BT = ids_BT >= 0
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            if state is None:
                x_BTD = model.hidden(ids_BT.clamp(min=0), token_mask_BT=None if valid_BT.all() else valid_BT)
            else:
                x_BTD = model.extend(ids_BT, valid_BT.sum(1), state)[0]
        np.add.at(sums_ND, [*numbers], (x_BTD.double() * valid_BT[..., None]).sum(1).cpu().numpy())
        n_read += int(valid_BT.sum())
        if progress is not None:
            progress(n_read)
    lengths_N = np.array([len(ids_N) for ids_N in documents])
    wide = model.embed.weight.dtype == torch.float64
    return (sums_ND / lengths_N[:, None]).astype(np.float64 if wide else np.float32)
