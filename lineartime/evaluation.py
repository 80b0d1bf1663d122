"""Held-out text scored: every token exactly once, each in the row that training would have put it in."""

import dataclasses
import lzma
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lineartime.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from lineartime.data.tokens import TokenStream, eval_rows, open_split
from lineartime.errors import NumericsError, UsageError
from lineartime.masking import masked_rows
from lineartime.model import LanguageModel, SpanModel, masked_token_losses, token_losses
from lineartime.run import load_model
from lineartime.settings import require, require_precision

XZ_LIMIT_BYTES = 1 << 22
"""Text up to this size is compared with `xz` after training: of more it takes longer than a small model's training."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a split's tokens cost; logarithms are natural unless a name says bits."""

    n_tokens: int
    """Tokens scored, the end-of-document tokens among them."""
    nll: float
    """Sum of -ln p over them."""
    n_words: int
    n_bytes: int
    """Words and bytes of the text that they spell; what was scored in part counts in proportion. Of a published split
    of PG-19 the words are those of its paper."""
    loss_by_position: list[tuple[int, int, float]]
    """Mean loss at positions first..last of the context, in blocks that double."""
    n_read: int | None = None
    """Masked language modelling: the tokens of the rows, of which `n_tokens` were masked; otherwise None."""
    word_count: str = "counted"
    """"published" or "counted": where `n_words` is from."""

    @property
    def loss(self) -> float:
        """Nats per token; 0 where no token was masked."""
        return self.nll / max(self.n_tokens, 1)

    @property
    def perplexity(self) -> float:
        """Per token: exp(nll / tokens)."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """exp(nll / words), the measure of PG-19."""
        return _exp(self.nll / self.n_words) if self.n_words else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.n_bytes if self.n_bytes else math.inf

    def to_dict(self) -> dict[str, Any]:
        by_position = [{"first": a, "last": b, "loss": x} for a, b, x in self.loss_by_position]
        if self.n_read is not None:  # the likelihood of no text: neither per byte nor per word
            return {"masked": True, "loss": self.loss, "perplexity": self.perplexity, "n_tokens": self.n_tokens,
                    "n_read": self.n_read, "loss_by_position": by_position}
        return {"loss": self.loss, "perplexity": self.perplexity, "word_perplexity": self.word_perplexity,
                "bits_per_byte": self.bits_per_byte, "n_tokens": self.n_tokens, "n_words": self.n_words,
                "word_count": self.word_count, "n_bytes": self.n_bytes, "loss_by_position": by_position}


def load_with_split(run: Path, data: Path, split: str = "validation") -> tuple[LanguageModel, TokenStream,
                                                                               dict[str, Any]]:
    """A run's model, the text that it is to be scored on, and what `load_model` says of it.

    Raises UsageError for a model that answers questions and for text in the tokens of another tokenizer, and as
    `load_model` and `open_split` do."""
    model, tokenizer, facts = load_model(run)
    if isinstance(model, SpanModel):
        raise UsageError("this model answers questions", run, "evaluate it with --questions FILE")
    stream = open_split(data, split)
    if stream.tokenizer_sha256 != tokenizer.sha256:
        raise UsageError("the run and the data have different tokenizers",
                         f"{tokenizer.sha256[:12]} and {stream.tokenizer_sha256[:12]}",
                         f"prepare the data with --tokenizer {facts['checkpoint']}/{TOKENIZER_FILE}")
    return model, stream, facts


@torch.inference_mode()
def evaluate(model: LanguageModel, stream: TokenStream, *, context: int | None = None, batch_rows: int | None = None,
             max_tokens: int | None = None, precision: str = "float32",
             progress: Callable[[int], None] | None = None) -> Evaluation:
    """Score the tokens of a split, in rows of `context` that overlap by the one token that is only read; of a model
    that is not causal the masked tokens of `masking.masked_rows`, which are the same whatever `batch_rows` is.

    context: tokens in a row, by default those of training. batch_rows: rows scored at once, by default 8, fewer from a
    context of 16K on; the sums are in float64, so that it changes nothing but rounding. max_tokens: stop after about so
    many. precision: "float32" or "bfloat16". progress is called with the number of tokens read. Raises UsageError for a
    context that is too long, for another precision and where the data has no [MASK] and needs one, NumericsError where
    a loss is not finite."""
    require_precision(precision)
    context = model.config.context if context is None else context
    require(context >= 1 and (batch_rows is None or batch_rows >= 1), "wrong value",
            f"batch_rows = {batch_rows}, context = {context}", "they take whole numbers from 1")
    model.check_length(context)
    batch_rows = batch_rows or min(8, max(1, 65_536 // context))
    was_training = model.training
    model.eval()
    nll_T, count_T, n_read = np.zeros(context), np.zeros(context, dtype=np.int64), 0
    causal = model.config.causal
    rows: Iterable[tuple[np.ndarray, ...]] = (((row,) for row in eval_rows(stream, context)) if causal
                                              else masked_rows(stream, context))
    waiting: list[tuple[np.ndarray, ...]] = []

    def score() -> None:
        nonlocal n_read
        losses = losses_of(model, [np.stack(part) for part in zip(*waiting, strict=True)], precision)
        asked_BT = np.ones(losses.shape, bool) if causal else np.stack([targets_T for _, targets_T in waiting]) >= 0
        losses_BT: np.ndarray = np.zeros(asked_BT.shape)
        losses_BT[asked_BT] = losses.flatten()
        nll_T[: losses_BT.shape[1]] += losses_BT.sum(0)
        count_T[: losses_BT.shape[1]] += asked_BT.sum(0)
        n_read += asked_BT.size
        waiting.clear()
        if progress is not None:
            progress(n_read)

    for row in rows:
        if waiting and (len(row[0]) != len(waiting[0][0]) or len(waiting) == batch_rows):
            score()
        if max_tokens is not None and n_read >= max_tokens:
            break
        waiting.append(row)
    if waiting:
        score()
    model.train(was_training)
    n_tokens, nll = int(count_T.sum()), float(nll_T.sum())
    if not math.isfinite(nll):
        raise NumericsError("the held-out loss is not finite", f"{nll}", "the weights are damaged or have diverged")
    share = n_tokens / stream.n_tokens
    return Evaluation(n_tokens, nll, round(stream.n_words * share), round(stream.n_bytes * share),
                      by_position(nll_T, count_T), None if causal else n_read, stream.word_count)


def losses_of(model: LanguageModel, batch: Sequence[np.ndarray], precision: str) -> np.ndarray:
    """`token_losses` of rows, or `masked_token_losses` of inputs and targets, in nats: float64 on the CPU."""
    on_device = [torch.from_numpy(part).to(model.embed.weight.device) for part in batch]
    with torch.autocast(on_device[0].device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        losses = (token_losses if model.config.causal else masked_token_losses)(model, *on_device)
    return losses.double().cpu().numpy()


def by_position(nll_T: np.ndarray, count_T: np.ndarray) -> list[tuple[int, int, float]]:
    """Mean loss in blocks of positions 1-32, 33-64, 65-128, ...: what a longer context is worth."""
    blocks, first, last = [], 0, 32
    while first < len(nll_T):
        last = min(last, len(nll_T))
        if count_T[first:last].sum():
            blocks.append((first + 1, last, float(nll_T[first:last].sum() / count_T[first:last].sum())))
        first, last = last, 2 * last
    return blocks


def xz_bits_per_byte(data_dir: Path, split: str = "validation") -> float:
    """Bits per byte of `xz -9e` for a split after it has seen the training text:
    (xz(train + split) - xz(train)) x 8 / bytes.

    The text comes back from the tokens, documents end to end. For text that fits in memory."""
    tokenizer = load_tokenizer(data_dir / TOKENIZER_FILE)

    def text(name: str) -> bytes:
        stream = open_split(data_dir, name)
        ids = stream.read(0, len(stream))
        return tokenizer.decode(ids[ids != stream.end_of_document].tolist()).encode()

    def size(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    train, held_out = text("train"), text(split)
    return (size(train + held_out) - size(train)) * 8 / len(held_out)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
