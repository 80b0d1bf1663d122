"""Embeddings: a vector for a document of any length, the mean of its last hidden states."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from lineartime.data.tokenizer import Tokenizer
from lineartime.documents.examples import text_examples
from lineartime.documents.pooling import Mean, Reading, named_means
from lineartime.documents.results import VECTOR
from lineartime.model import LanguageModel


def embed(model: LanguageModel, tokenizer: Tokenizer, texts: Iterable[str | tuple[str, str]], *,
          max_tokens: int | None = None, batch_rows: int = 8, precision: str = "float32",
          progress: Callable[[int], None] | None = None) -> np.ndarray:
    """The vectors of texts, or of pairs of texts, of any length: `[N, D]`, float64 for a float64 model, else float32.

    model, tokenizer: of `load_model`. max_tokens: cut longer documents to this many. batch_rows: rows read at once,
    which changes only rounding. precision: "float32" or "bfloat16". progress is called with the number of tokens read.
    Raises UsageError for wrong values, DataError for a text that is white space or that the tokenizer lacks."""
    reading = Reading(max_tokens, batch_rows, precision)
    vectors = [mean.vector_D for _, mean in named_means(model, tokenizer, text_examples(texts), reading,
                                                        progress=progress)]
    wide = model.embed.weight.dtype == torch.float64
    return np.array(vectors, np.float64 if wide else np.float32).reshape(len(vectors), model.config.d_model)


def found_vector(mean: Mean) -> dict[str, Any]:
    """What `lineartime embed` writes of a document, its vector in float32."""
    return {VECTOR: mean.vector_D.astype(np.float32).tolist()}
