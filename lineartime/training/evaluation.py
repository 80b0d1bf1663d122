"""Scores of held-out text: every token once, each in the row that training would have put it in."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lineartime.base.errors import NumericsError
from lineartime.base.ranks import ALONE, Ranks, gather_rows
from lineartime.base.settings import PRECISIONS, require, require_counts, require_name
from lineartime.base.stores import Name
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer
from lineartime.data.tokens import Mixture, TokenStream, eval_rows, open_split, row_starts, words_and_bytes
from lineartime.model.language_model import LanguageModel, SpanModel, masked_token_losses, token_losses
from lineartime.training.masking import masked_rows
from lineartime.weights.load import load_model

MOST_CONTEXT = 1 << 26  # beyond any use, and small enough for the sums of a row


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The negative log-likelihood `nll`, sum of -ln p, of tokens, also of ends of documents."""

    n_tokens: int
    nll: float
    n_words: int
    n_bytes: int
    """A whole split's are in its manifest (for a published split of PG-19 the published number of
    words); a part's are counted in the text of its tokens. Masked tokens are no text: 0."""
    loss_by_position: list[tuple[int, int, float]]
    """Mean loss at positions first..last of the context, in blocks that double."""
    n_read: int | None = None
    """For masked language modelling, the tokens of all rows, masked or not; otherwise None."""
    word_count: str = "counted"
    """The source of `n_words`: "published" or "counted"."""

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
        """nll / ln 2 / bytes; infinite without bytes."""
        return self.nll / math.log(2) / self.n_bytes if self.n_bytes else math.inf

    def to_dict(self) -> dict[str, Any]:
        is_masked = self.n_read is not None  # masked tokens are no text, so there is no score per byte or per word
        names = ("loss perplexity n_tokens n_read" if is_masked else
                 "loss perplexity word_perplexity bits_per_byte n_tokens n_words word_count n_bytes").split()
        scores: dict[str, Any] = {"masked": True} if is_masked else {}
        scores |= {name: getattr(self, name) for name in names}
        scores["loss_by_position"] = [{"first": a, "last": b, "loss": x} for a, b, x in self.loss_by_position]
        return {name: None if value == math.inf else value for name, value in scores.items()}  # JSON has no infinity


def load_with_split(run: Path, data: Name,
                    split: str = "validation") -> tuple[LanguageModel, TokenStream, dict[str, Any]]:
    """A run's model, the split to score it on, and the facts of `load_model`. Raises UsageError for
    a model that answers questions and data of another tokenizer; and as `load_model` does."""
    model, tokenizer, facts = load_model(run)
    require(not isinstance(model, SpanModel), "this model answers questions", run, "evaluate it with --questions FILE")
    return model, split_of_tokenizer(data, split, tokenizer, facts), facts


def split_of_tokenizer(data: Name, split: str, tokenizer: Tokenizer, facts: dict[str, Any]) -> TokenStream:
    """A split that a model's tokenizer made. facts: of `load_model`. Raises UsageError for data of
    another tokenizer."""
    stream = open_split(data, split)
    require(stream.tokenizer_sha256 == tokenizer.sha256, "the run and the data have different tokenizers",
            f"{tokenizer.sha256[:12]} and {stream.tokenizer_sha256[:12]}",
            f"prepare the data with --tokenizer {facts['checkpoint']}/{TOKENIZER_FILE}")
    return stream


@torch.no_grad()  # not `inference_mode`: FSDP2 keeps what a sharded model gathers here, and training writes into it
def evaluate(model: LanguageModel, stream: TokenStream, *, context: int | None = None, batch_rows: int | None = None,
             max_tokens: int | None = None, spread: bool = False, precision: str = "float32", ranks: Ranks = ALONE,
             progress: Callable[[int], None] | None = None) -> Evaluation:
    """Score every token of a split once, in rows of `context`; the first token of a row is only
    read. For a model that is not causal, score the masked tokens of `masking.masked_rows`.

    context: tokens in a row, by default as in training. batch_rows: rows scored at once, by default
    8, fewer above a context of 8K; it changes only rounding, because sums are in float64.
    max_tokens: read about this many, the first ones, or if `spread` in rows at equal distances.
    precision: "float32" or "bfloat16". ranks: each rank scores a share, and all return the same
    numbers. progress is called with the number of tokens read. Raises UsageError for a context that
    is too long, another precision, and data with more tokens than the model or without its [MASK];
    NumericsError for a loss that is not finite."""
    require_name("precision", precision, PRECISIONS)
    require_counts(context=context, batch_rows=batch_rows, max_tokens=max_tokens)
    context = model.config.context if context is None else context
    require(context <= MOST_CONTEXT, "wrong value", f"context = {context}", f"at most {MOST_CONTEXT:,}")
    model.check_length(context)
    require(stream.vocab_size <= model.config.vocab_size, "the data have more tokens than the model",
            f"{stream.vocab_size:,} and {model.config.vocab_size:,}", "prepare them with the model's --tokenizer")
    batch_rows = min(batch_rows or min(8, max(1, 65_536 // context)), len(stream))  # a row has a token at least
    causal, n_read = model.config.causal, 0
    starts = row_starts(stream.n_tokens if causal else len(stream), context, max_tokens, spread)
    nll_T, count_T = np.zeros(context), np.zeros(context, dtype=np.int64)
    with ExitStack() as at_end:
        at_end.callback(model.train, model.training)
        model.eval()
        for batch, losses in scored(model, stacked_rows(model, stream, context, batch_rows, starts), precision, ranks):
            # A loss goes to its position in the row. Of masked tokens alone there are losses.
            asked_BT = np.ones(losses.shape, bool) if causal else batch[1] >= 0
            losses_BT: np.ndarray = np.zeros(asked_BT.shape)
            losses_BT[asked_BT] = losses.flatten()
            nll_T[: losses_BT.shape[1]] += losses_BT.sum(0)
            count_T[: losses_BT.shape[1]] += asked_BT.sum(0)
            n_read += asked_BT.size
            if progress is not None:
                progress(n_read)
    n_tokens, nll = int(count_T.sum()), float(nll_T.sum())
    if not math.isfinite(nll):
        raise NumericsError("the held-out loss is not finite", f"{nll}", "the weights are damaged or have diverged")
    # The manifest has the words and bytes of the whole split; those of a part are counted.
    n_words, n_bytes, word_count = stream.n_words, stream.n_bytes, stream.word_count
    if n_tokens < stream.n_tokens:
        (n_words, n_bytes), word_count = words_and_bytes(stream, context, starts) if causal else (0, 0), "counted"
    return Evaluation(n_tokens, nll, n_words, n_bytes, by_position(nll_T, count_T), None if causal else n_read,
                      word_count)


def evaluate_data(model: LanguageModel, held_out: TokenStream | Mixture, *, max_tokens: int | None = None,
                  progress: Callable[[int], None] | None = None,
                  **options: Any) -> tuple[Evaluation, dict[str, Evaluation]]:
    """`evaluate` of one text; or of texts mixed as in training, and of each of them by folder.
    max_tokens: of all texts together, of each equally many. For the rest see `evaluate`."""
    if isinstance(held_out, TokenStream):
        return evaluate(model, held_out, max_tokens=max_tokens, progress=progress, **options), {}
    each: list[Evaluation] = []
    n_before, most = 0, None if max_tokens is None else -(-max_tokens // len(held_out.streams))
    for stream in held_out.streams:
        counted = None if progress is None else lambda n_read, before=n_before: progress(before + n_read)
        each.append(evaluate(model, stream, max_tokens=most, progress=counted, **options))
        n_before += each[-1].n_read or each[-1].n_tokens
    names = [stream.name for stream in held_out.streams]
    return mixed(each, held_out.weights), dict(zip(names, each, strict=True))


def mixed(evaluations: Sequence[Evaluation], weights: Sequence[int]) -> Evaluation:
    """The evaluations of several texts as one. Losses are averaged by weight, words and bytes in
    proportion to the tokens; a block of positions over the texts that have it."""
    both = list(zip(weights, evaluations, strict=True))
    n_tokens = sum(each.n_tokens for each in evaluations)
    total = sum(weight for weight, each in both if each.n_tokens) or 1

    def share_of(name: str) -> float:
        per_token = sum(weight * getattr(each, name) / max(each.n_tokens, 1) for weight, each in both)
        return per_token * n_tokens / total

    blocks: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for weight, each in both:
        for first, last, loss in each.loss_by_position:
            blocks.setdefault((first, last), []).append((weight, loss))
    by_block = [(*block, sum(weight * loss for weight, loss in found) / sum(weight for weight, _ in found))
                for block, found in sorted(blocks.items())]
    n_read = sum(each.n_read or 0 for each in evaluations) or None
    return Evaluation(n_tokens, share_of("nll"), round(share_of("n_words")), round(share_of("n_bytes")), by_block,
                      n_read, ", ".join(sorted({each.word_count for each in evaluations})))


def stacked_rows(model: LanguageModel, stream: TokenStream, context: int, batch_rows: int,
                 starts: Iterable[int]) -> Iterator[list[np.ndarray]]:
    """`batch_rows` rows at once, or their inputs and targets; a shorter last row is alone."""
    rows: Iterable[tuple[np.ndarray, ...]] = masked_rows(stream, context, starts)
    if model.config.causal:
        rows = ((row,) for row in eval_rows(stream, context, starts))
    for _, alike in itertools.groupby(rows, key=lambda row: len(row[0])):
        while batch := list(itertools.islice(alike, batch_rows)):
            yield [np.stack(part) for part in zip(*batch, strict=True)]


def scored(model: LanguageModel, stacked: Iterable[list[np.ndarray]], precision: str,
           ranks: Ranks = ALONE) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    """Each batch with its losses (see `losses_of`), in order, on every rank. Rank r of W computes
    every W-th batch, or at the end another's: the ranks of a sharded model compute together."""
    left = iter(stacked)
    while group := list(itertools.islice(left, ranks.size)):
        own = losses_of(model, group[ranks.rank % len(group)], precision)
        for batch, flat in zip(group, gather_rows(torch.from_numpy(own).view(-1), ranks), strict=False):
            shape = batch[0][:, 1:].shape if model.config.causal else (-1,)
            yield batch, flat.numpy().reshape(shape)


def losses_of(model: LanguageModel, batch: Sequence[np.ndarray], precision: str) -> np.ndarray:
    """`token_losses` of rows, `masked_token_losses` of inputs and targets: nats, float64."""
    on_device = [torch.from_numpy(part).to(model.embed.weight.device) for part in batch]
    losses_of_batch: Callable[..., torch.Tensor] = token_losses if model.config.causal else masked_token_losses
    with torch.autocast(on_device[0].device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return losses_of_batch(model, *on_device).double().cpu().numpy()


def by_position(nll_T: np.ndarray, count_T: np.ndarray) -> list[tuple[int, int, float]]:
    """Mean loss in blocks of positions 1-32, 33-64, 65-128, ..."""
    edges = [0, *(32 << k for k in range(len(nll_T).bit_length()))]
    return [(first + 1, min(last, len(nll_T)), float(nll_T[first:last].sum() / n))
            for first, last in itertools.pairwise(edges) if (n := count_T[first:last].sum())]


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
