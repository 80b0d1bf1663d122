"""Whether a model uses its context: the same held-out tokens, scored at several contexts.

    python -m benchmarks.context_use RUN --data DATA --contexts 512,1024,2048 --out FILE.json"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lineartime.base.errors import DataError, NumericsError
from lineartime.base.files import write_atomically
from lineartime.base.settings import PRECISIONS, require
from lineartime.cli.terminal import exit_code
from lineartime.data.tokens import TokenStream
from lineartime.folders import named_folder
from lineartime.model.language_model import LanguageModel
from lineartime.training.evaluation import batches, load_with_split, scored
from lineartime.training.runtime import pick_device

TOKENS_AT_ONCE = 1 << 15
"""Rows are scored together up to this many tokens."""


@dataclasses.dataclass(frozen=True)
class ContextUse:
    """Losses in nats per token of the same tokens at several contexts."""

    contexts: list[int]
    """At context L a token sees the last L / 2 + 1 to L tokens of its document, because rows overlap by half and only
    their second half is scored. At the longest context L a document's first L tokens see everything before them."""
    after: int
    """Half of the longest context. Only tokens with more than `after` tokens of their document before them are scored;
    the end-of-document token at the document's start counts as one."""
    document_D: list[int]
    """The documents that have scored tokens, by their number in the split."""
    n_tokens_D: list[int]
    """Scored tokens of each document."""
    nll_DL: list[list[float]]
    """Sum of -ln p by document and context."""

    @property
    def losses(self) -> list[float]:
        """Mean loss over all scored tokens at each context."""
        return [sum(column) / sum(self.n_tokens_D) for column in zip(*self.nll_DL, strict=True)]

    @property
    def gains(self) -> list[float]:
        """The loss at the shortest context less the loss at each context."""
        return [self.losses[0] - loss for loss in self.losses]

    @property
    def gain_errors(self) -> list[float | None]:
        """Standard errors of `gains`, clustered by document; None for a single document.

        With D_i the gain summed over the n_i tokens of document i, of m documents:
        sqrt(m / (m - 1) sum (D_i - gain n_i)^2) / sum n_i."""
        n_D, nll_DL, m = np.array(self.n_tokens_D), np.array(self.nll_DL), len(self.n_tokens_D)
        if m < 2:
            return [None] * len(self.contexts)
        rest_DL = (nll_DL[:, :1] - nll_DL) - n_D[:, None] * np.array(self.gains)
        return (np.sqrt(m / (m - 1) * (rest_DL**2).sum(0)) / n_D.sum()).tolist()

    def to_dict(self) -> dict[str, Any]:
        documents = [{"document": i, "n_tokens": n, "losses": [nll / n for nll in nll_L]}
                     for i, n, nll_L in zip(self.document_D, self.n_tokens_D, self.nll_DL, strict=True)]
        return {"contexts": self.contexts, "after": self.after, "n_tokens": sum(self.n_tokens_D),
                "losses": self.losses, "gains": self.gains, "gain_errors": self.gain_errors, "documents": documents}


@torch.inference_mode()
def measure_context_use(model: LanguageModel, stream: TokenStream, contexts: Sequence[int], *,
                        document_tokens: int | None = None, precision: str = "float32") -> ContextUse:
    """Score the same tokens of a split at each context: those with half of the longest context before them.

    contexts: rising; each reads two tokens per scored token. Documents shorter than half of the longest context are not
    read. document_tokens: only the first so many tokens of each document are read, at least the longest context; by
    default all. For a model with chunks give contexts whose half is whole chunks, or a token's chunk starts elsewhere
    at another context; nothing checks it. Raises UsageError for wrong contexts or a model that is not causal, DataError
    if no document is long enough, NumericsError for a loss that is not finite."""
    contexts, longest = list(contexts), max(contexts, default=0)
    require(model.config.causal, "only a causal model has a context that ends at a token", "causal = false")
    require(len(contexts) >= 2 and contexts == sorted({*contexts}) and contexts[0] >= 2,
            "wrong contexts", ",".join(map(str, contexts)), "give two or more, rising, from 2")
    require(document_tokens is None or document_tokens >= longest, "document_tokens is below the longest context",
            f"document_tokens = {document_tokens}, contexts = {','.join(map(str, contexts))}")
    model.check_length(longest)
    after = longest - longest // 2
    starts = stream.document_positions.astype(int)
    lengths = np.diff(starts)
    n_tokens, chosen = np.minimum(lengths, document_tokens or lengths), np.flatnonzero(lengths > after).tolist()
    if not chosen:
        raise DataError(f"no document has more than {after:,} tokens, half of the longest context",
                        f"{stream.name}, {stream.split}", f"contexts up to {2 * int(lengths.max()) - 2:,} work")
    was_training, nll_DL = model.training, []
    model.eval()
    for i in chosen:
        ids = stream.read(starts[i], starts[i] + n_tokens[i] + 1)
        nll_L = [score_document(model, ids, context, after, precision) for context in contexts]
        for context, nll in zip(contexts, nll_L, strict=True):
            if not math.isfinite(nll):
                raise NumericsError("a held-out loss is not finite", f"document {i}, context {context}",
                                    "the weights are damaged or have diverged")
        nll_DL.append(nll_L)
    model.train(was_training)
    return ContextUse(contexts, after, chosen, [int(n_tokens[i]) - after for i in chosen], nll_DL)


def score_document(model: LanguageModel, ids: np.ndarray, context: int, first: int, precision: str) -> float:
    """The sum of -ln p of a document's targets from `first` on."""
    rows = rows_of_document(len(ids) - 1, context, first)
    batches_of_rows = list(batches(rows, lambda row: row[2] - row[0], lambda length: max(TOKENS_AT_ONCE // length, 1)))
    stacked = ([np.stack([ids[start : stop + 1] for start, _, stop in batch])] for batch in batches_of_rows)
    nll = 0.0
    for batch, (_, losses_BT) in zip(batches_of_rows, scored(model, stacked, precision), strict=True):
        for (start, begin, _), losses_T in zip(batch, losses_BT, strict=True):
            nll += float(losses_T[begin - start :].sum())
    return nll


def rows_of_document(n_tokens: int, context: int, first: int) -> Iterator[tuple[int, int, int]]:
    """Rows (start, begin, stop) that score each target from `first` on once. A row reads the tokens from `start`, and
    its targets [begin, stop), at most half of `context`, are scored."""
    half = context // 2
    for begin in range(first, n_tokens, half):
        yield begin + half - context, begin, min(begin + half, n_tokens)


def describe(use: ContextUse) -> list[str]:
    """The scores as a table for a person, line by line."""
    lines = [f"{sum(use.n_tokens_D):,} tokens of {len(use.document_D)} documents, each token with more than "
             f"{use.after:,} of its document before it",
             "   context   nats per token   gain over the shortest, and its standard error"]
    for context, loss, gain, error in zip(use.contexts, use.losses, use.gains, use.gain_errors, strict=True):
        spread = "" if error is None else f" +- {error:.4f}"
        lines.append(f"{context:>10,}   {loss:>14.4f}   {gain:>+8.4f}{spread}")
    return lines


def with_contexts(parser: argparse.ArgumentParser, *, required: bool) -> argparse.ArgumentParser:
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=(),
                        required=required, help="contexts, rising, with commas")
    parser.add_argument("--document-tokens", type=int, help="read only so many tokens of each document")
    return parser


def main() -> None:
    parser = with_contexts(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter),
                           required=True)
    parser.add_argument("run", help="a run, one of its checkpoints, or small")
    parser.add_argument("--data", required=True, help="prepared text")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="JSON file for the scores")
    given = parser.parse_args()
    model, stream, facts = load_with_split(named_folder(given.run), given.data, given.split)
    use = measure_context_use(model.to(pick_device(given.device)), stream, given.contexts,
                              document_tokens=given.document_tokens, precision=given.precision)
    if given.out:
        found = facts | {"split": given.split, "trained_context": model.config.context} | use.to_dict()
        write_atomically(given.out, json.dumps(found) + "\n")
    print(*describe(use), sep="\n")


if __name__ == "__main__":
    sys.exit(exit_code(main))
