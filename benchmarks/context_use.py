"""Whether a model uses its context: the same held-out tokens, scored at several contexts.

    python -m benchmarks.context_use RUN --data DATA --contexts 512,1024,2048 --out FILE.json"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import Row
from lineartime.base.errors import DataError, NumericsError
from lineartime.base.files import write_json
from lineartime.base.settings import PRECISIONS, require
from lineartime.cli.terminal import exit_code
from lineartime.data.tokens import TokenStream
from lineartime.folders import named_folder
from lineartime.model.language_model import LanguageModel
from lineartime.training.evaluation import load_with_split, losses_of, stacked_rows
from lineartime.training.runtime import pick_device

TOKENS_AT_ONCE = 1 << 15  # rows are scored together up to this many tokens


@torch.inference_mode()
def measure_context_use(model: LanguageModel, stream: TokenStream, contexts: Sequence[int], *,
                        document_tokens: int | None = None, precision: str = "float32") -> Row:
    """Losses in nats per token of the same tokens of a split at each context, see
    `losses_and_gains`: of those with half of the longest context ("after") before them in their
    document; the end-of-document token counts as one.

    contexts: rising. At context L a token sees the last L / 2 + 1 to L tokens of its document,
    because rows overlap by half and only their second half is scored. For a model with chunks give
    contexts whose half is whole chunks, or a token's chunk starts elsewhere at another context.
    document_tokens: so many of each document are read, at least the longest context. Raises
    UsageError for wrong contexts or a model that is not causal, DataError if no document is long
    enough, NumericsError for a loss that is not finite."""
    contexts, longest = list(contexts), max(contexts, default=0)
    require(model.config.causal, "only a causal model has a context that ends at a token", "causal = false")
    require(len(contexts) >= 2 and contexts == sorted({*contexts}) and contexts[0] >= 2,
            "wrong contexts", ",".join(map(str, contexts)), "give two or more, rising, from 2")
    require(document_tokens is None or document_tokens >= longest, "document_tokens is below the longest context",
            f"document_tokens = {document_tokens}, contexts = {','.join(map(str, contexts))}")
    model.check_length(longest)
    model.eval()
    after, starts = longest - longest // 2, stream.document_positions.astype(int)
    lengths = np.diff(starts)
    n_tokens, documents = np.minimum(lengths, document_tokens or lengths), np.flatnonzero(lengths > after).tolist()
    require(documents != [], f"no document has more than {after:,} tokens, half of the longest context",
            f"{stream.name}, {stream.split}", f"contexts up to {2 * int(lengths.max()) - 2:,} work", DataError)
    nll_DL = np.zeros((len(documents), len(contexts)))
    for row, i in enumerate(documents):
        targets = range(starts[i] + after, starts[i] + n_tokens[i])
        for column, context in enumerate(contexts):
            nll_DL[row, column] = score_targets(model, stream, targets, context, precision)
            require(math.isfinite(nll_DL[row, column]), "a held-out loss is not finite",
                    f"document {i}, context {context}", "the weights are damaged or have diverged", NumericsError)
    return {"contexts": contexts, "after": after} | losses_and_gains(documents, n_tokens[documents] - after, nll_DL)


def losses_and_gains(documents: Sequence[int], n_D: np.ndarray, nll_DL: np.ndarray) -> Row:
    """Losses over all scored tokens at each context, gains over the shortest, and their standard
    errors by m documents: sqrt(m / (m - 1) sum (D_i - gain n_i)^2) / sum n_i, D_i the gain summed
    over document i; None for m = 1. And each document's losses. n_D: tokens; nll_DL: sums."""
    m, loss_L = len(n_D), nll_DL.sum(0) / n_D.sum()
    gain_L = loss_L[0] - loss_L
    rest_DL = (nll_DL[:, :1] - nll_DL) - n_D[:, None] * gain_L
    errors = [None] * len(loss_L) if m < 2 else (np.sqrt(m / (m - 1) * (rest_DL**2).sum(0)) / n_D.sum()).tolist()
    each = [{"document": i, "n_tokens": int(n), "losses": (nll_L / n).tolist()}
            for i, n, nll_L in zip(documents, n_D, nll_DL, strict=True)]
    return {"n_tokens": int(n_D.sum()), "losses": loss_L.tolist(), "gains": gain_L.tolist(), "gain_errors": errors,
            "documents": each}


def score_targets(model: LanguageModel, stream: TokenStream, targets: range, context: int, precision: str) -> float:
    """The sum of -ln p of the tokens behind these places of a split."""
    # The second half of a row is scored, and the next row begins half a row later.
    half = context // 2
    starts = range(targets.start - (context - half), targets.stop - (context - half), half)
    batches = stacked_rows(model, stream, context, max(TOKENS_AT_ONCE // context, 1), starts)
    losses = (losses_T[context - half :] for batch in batches for losses_T in losses_of(model, batch, precision))
    return sum(float(losses_T[: targets.stop - begin].sum())
               for begin, losses_T in zip(range(targets.start, targets.stop, half), losses, strict=True))


def with_contexts(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=(),
                        help="contexts, rising, with commas")
    parser.add_argument("--document-tokens", type=int, help="read only so many tokens of each document")
    return parser


def main() -> None:
    parser = with_contexts(argparse.ArgumentParser(description=__doc__))
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
        write_json(given.out, facts | {"split": given.split, "trained_context": model.config.context} | use)
    print(f"{use['n_tokens']:,} tokens of {len(use['documents'])} documents, each with more than {use['after']:,} "
          "tokens before it\n   context   nats per token   gain over the shortest, and its standard error")
    columns = (use[name] for name in ("contexts", "losses", "gains", "gain_errors"))
    for context, loss, gain, error in zip(*columns, strict=True):
        print(f"{context:>10,}   {loss:>14.4f}   {gain:>+8.4f}" + ("" if error is None else f" +- {error:.4f}"))


if __name__ == "__main__":
    sys.exit(exit_code(main))
