"""The expressions of ListOps for `listops.py`: how they are drawn, read by a model and scored.

They are drawn by the rule of Tay et al. (2020): an argument is an operator with probability 0.25 and else a digit, to
depth 10; an operator (the least, the greatest, the median rounded down, the sum modulo 10) takes 2 to 10 arguments. As
there, a closing bracket is a symbol and the brackets that group an operator with its arguments are left out, and the
label is read from the state of a first symbol."""

import functools
import random
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import Row
from lineartime.distributed.ranks import ALONE, Ranks
from lineartime.documents import metrics
from lineartime.documents.classify import label_losses, targets_of
from lineartime.documents.pooling import padded, row_states
from lineartime.documents.tasks import LabelObjective
from lineartime.documents.texts import TokenizedTexts
from lineartime.model import DocumentClassifier, LanguageModel

OPERATORS = {"MIN": min, "MAX": max, "MED": lambda values: int(np.median(values)),
             "SM": lambda values: sum(values) % 10}
SYMBOLS = (*map(str, range(10)), *OPERATORS, "]", "end")
"""The vocabulary; "end" begins every row, as in every model of documents, and is [CLS] here."""
OPERATOR_SHARE, MAX_DEPTH, MAX_ARGUMENTS, LENGTHS = 0.25, 10, 10, (500, 2000)
N_HELD_OUT, N_TEST, BATCH = 300, 1000, 8


def expression(draw: random.Random, depth: int = 1) -> tuple[list[str], int]:
    """An expression's symbols and its value."""
    if depth == MAX_DEPTH or draw.random() > OPERATOR_SHARE:
        digit = draw.randrange(10)
        return [str(digit)], digit
    parts = [expression(draw, depth + 1) for _ in range(draw.randint(2, MAX_ARGUMENTS))]
    name = draw.choice(list(OPERATORS))
    symbols = [name, *(symbol for symbols, _ in parts for symbol in symbols), "]"]
    return symbols, OPERATORS[name]([value for _, value in parts])


def documents(n: int, seed: int) -> TokenizedTexts:
    """So many expressions with more than 500 and fewer than 2,000 symbols."""
    draw, made, number = random.Random(seed), TokenizedTexts(), {name: i for i, name in enumerate(SYMBOLS)}
    while len(made) < n:
        symbols, value = expression(draw)
        if LENGTHS[0] < len(symbols) < LENGTHS[1]:
            made.ids.append(np.array([number["end"], *(number[symbol] for symbol in symbols)]))
            made.labels.append(str(value))
    return made


@functools.cache
def splits_of(n: int) -> tuple[TokenizedTexts, TokenizedTexts, TokenizedTexts]:
    """So many expressions to train on, those held out and those of the test; drawn once for all runs, half a minute."""
    print(f"drawing {n:,} expressions to train on, {N_HELD_OUT:,} held out, {N_TEST:,} to test", flush=True)
    return documents(n, 0), documents(N_HELD_OUT, 1), documents(N_TEST, 2)


class Expressions(LabelObjective):
    """The objective of `fit`: a label is read from the state of the first symbol."""

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        ids_BT, targets = batch
        assert isinstance(model, DocumentClassifier)
        return label_losses(self.head, model.label_logits(row_states(model, ids_BT)[0][:, 0]), targets)

    def evaluate(self, model: LanguageModel, progress: Any = None) -> Row:
        return scores_of(model, self.validation)


@torch.inference_mode()
def scores_of(model: LanguageModel, documents: TokenizedTexts) -> Row:
    """`score_labels` of expressions, read in the precision of the training."""
    assert isinstance(model, DocumentClassifier)
    order = sorted(range(len(documents)), key=lambda i: -len(documents.ids[i]))
    logits_NL = np.empty((len(documents), len(model.head.labels)))
    for first in range(0, len(order), BATCH):
        rows = order[first : first + BATCH]
        ids_BT = torch.from_numpy(padded([documents.ids[row] for row in rows]))
        with torch.autocast("cpu", torch.bfloat16):
            logits_NL[rows] = model.eval().label_logits(row_states(model, ids_BT)[0][:, 0]).numpy()
    model.train()
    return metrics.score_labels(model.head, logits_NL, targets_of(model.head, documents.labels))


def by_operator(n: int) -> Row:
    """The rule that reads one symbol: the commonest value in n training expressions of the outermost operator."""
    train, _, test = splits_of(n)
    values: dict[int, Counter[str]] = {}
    for ids, value in zip(train.ids, train.labels, strict=True):
        values.setdefault(int(ids[1]), Counter())[value] += 1
    said = [values[int(ids[1])].most_common(1)[0][0] for ids in test.ids]
    return {"accuracy": float(np.mean([a == b for a, b in zip(said, test.labels, strict=True)])), "n_train": len(train),
            "n_test": len(test)}
