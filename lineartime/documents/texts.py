"""The texts of a fine-tuning in memory: their tokens, their labels, and which of them an epoch reads."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from lineartime.data.mixture import places_of_step
from lineartime.data.tokenizer import Tokenizer
from lineartime.documents.examples import Example, Label
from lineartime.documents.pooling import Reading, document_ids, read_means
from lineartime.errors import DataError
from lineartime.model import LanguageModel
from lineartime.run_config import RunConfig


@dataclass
class TokenizedTexts:
    """Tokenised documents with their labels, or pairs of texts, in order."""

    ids: list[np.ndarray] = field(default_factory=list)
    """Each begins with the end-of-document token."""
    labels: list[Label] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    """The places of the documents, for people."""
    second_ids: list[np.ndarray] = field(default_factory=list)
    """The other texts of pairs, if they are read apart; they begin as those of `ids` do."""
    n_cut: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_tokens(self) -> int:
        return sum(map(len, (*self.ids, *self.second_ids)))

    def sha256(self) -> str:
        """The hash of all ids and labels."""
        digest = hashlib.sha256(json.dumps(self.labels).encode() if self.labels else b"")
        for ids in (*self.ids, *self.second_ids):
            digest.update(len(ids).to_bytes(8, "little") + as_bytes(ids))
        return digest.hexdigest()


def as_bytes(ids: np.ndarray) -> bytes:
    """Token ids as bytes, the same for every width of the integers."""
    return ids.astype("<u4").tobytes()


def read_texts(tokenizer: Tokenizer, examples: Iterable[Example], max_tokens: int | None = None,
               progress: Callable[[int], None] | None = None, *, in_pairs: bool = False) -> TokenizedTexts:
    """Tokenise documents. max_tokens: cut longer ones, and count them in `n_cut`. progress is called with the number of
    documents read. in_pairs: read the two texts of a record apart, or the two halves of a document. Raises DataError
    for a document that is too short to be halved, and for fewer than two pairs."""
    texts, where = TokenizedTexts(), ""

    def tokens_of(text: str, second: str | None = None) -> np.ndarray:
        ids, is_cut = document_ids(tokenizer, text, second, max_tokens)
        texts.n_cut += is_cut
        return ids

    for example in examples:
        where = example.where
        # The two texts of a pair are one document for a label, and two for vectors.
        ids = tokens_of(example.text, None if in_pairs else example.second)
        if in_pairs:
            ids, second = halves(ids, where) if example.second is None else (ids, tokens_of(example.second))
            texts.second_ids.append(second)
        texts.ids.append(ids)
        if example.label is not None:
            texts.labels.append(example.label)
        texts.where.append(where)
        if progress is not None:
            progress(len(texts))
    if in_pairs and len(texts) < 2:
        raise DataError("one pair only", where, "give two or more: each is told apart from the others")
    return texts


def halves(ids: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The two halves of a document, each of which begins with the end-of-document token. Raises DataError."""
    middle = (len(ids) + 1) // 2
    first, second = ids[:middle], np.concatenate([ids[:1], ids[middle:]])
    if min(len(first), len(second)) < 2:  # one of them has the end-of-document token alone
        raise DataError("a document that is too short to be halved", where,
                        "take it out, or name a second text with --pair-field")
    return first, second


def epoch_rows(texts: TokenizedTexts, config: RunConfig, step: int, side: int = 0) -> list[tuple[int, np.ndarray]]:
    """The documents of a step by their numbers, each with what is read of it: all, or one stretch of the length of a
    row. Every epoch takes each document once, in an order drawn from (seed, epoch). side: 1 for the second texts."""
    places = places_of_step([len(texts)], seed=config.train.seed, step=step, rows_per_step=config.rows_per_step)
    n_sides, rows = 1 + bool(texts.second_ids), (texts.ids, texts.second_ids)[side]
    return [(row, rows[row][drawn_stretch(len(rows[row]), config.model.context, config.train.seed, epoch,
                                          n_sides * row + side)]) for _, epoch, row in places]


def drawn_stretch(n_tokens: int, size: int, seed: int, epoch: int, row: int) -> slice:
    """The part of a document that an epoch trains on: all of it, or one of its stretches of `size` tokens, drawn in
    proportion to its tokens from (seed, epoch, row)."""
    # A hash in place of a generator: the draw depends on no other document. It picks a token, whose stretch is read.
    key = hashlib.sha256(f"{seed}/{epoch}/{row}".encode()).digest()
    first = int.from_bytes(key[:8], "little") % n_tokens // size * size
    return slice(first, min(first + size, n_tokens))


def read_vectors(model: LanguageModel, ids: Iterable[np.ndarray], reading: Reading,
                 progress: Callable[[int], None] | None = None) -> np.ndarray:
    """The vectors of documents read whole by a model in evaluation mode, float64 `[N, D]`. progress is called with the
    number of tokens read."""
    return np.array(list(read_means(model, ids, reading, progress=progress)))


def reading_of(config: RunConfig) -> Reading:
    """How a run reads held-out documents: in batches as large as in training."""
    return Reading(batch_rows=config.micro_batch_rows, precision=config.train.precision)
