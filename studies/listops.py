"""ListOps of the Long Range Arena (Tay et al., 2020): expressions of 500 to 2,000 symbols, each to its value, a digit.

    python -m studies.listops --out out/listops                     trains from nothing and tests; resumable
    python -m studies.listops --into benchmarks/tables/documents.md       writes the table

Expressions are drawn by the rule of Tay et al.: an argument is an operator with probability 0.25 and else a digit, to
depth 10; an operator (the least, the greatest, the median rounded down, the sum modulo 10) takes 2 to 10 arguments. As
there, a closing bracket is a symbol and the brackets that group an operator with its arguments are left out, and the
label is read from the state of a first symbol. (Read from the mean of a thousand states, as `lineartime finetune` does,
FLASH guessed after 14,000 expressions; from the first symbol's it is right a third of the time after 1,600.) All models
read the same expressions, none of them twice; a seed draws the initial values and the order."""

import argparse
import functools
import itertools
import math
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import Row
from benchmarks.measure import add_missing
from benchmarks.recall.report import spread_text
from lineartime.cli.terminal import Terminal, note, say_stopping
from lineartime.config import TrainConfig, model_config
from lineartime.config_json import Head
from lineartime.distributed.ranks import ALONE, Ranks
from lineartime.documents import metrics
from lineartime.documents.classify import ONE, label_losses, targets_of
from lineartime.documents.pooling import padded, row_states
from lineartime.documents.tasks import LabelObjective
from lineartime.documents.texts import TokenizedTexts
from lineartime.markdown import markdown
from lineartime.model import DocumentClassifier, LanguageModel
from lineartime.run import Run
from lineartime.run_config import RunConfig
from lineartime.run_files import read_metrics
from lineartime.training import Callbacks, Setup, StopSignal, fit_once
from studies import run

COMMAND = "python -m studies.listops --out out/listops"
RULE = "outermost operator"
"""The name in a row of `by_operator`: what a model must be better than to have read more than one symbol."""

OPERATORS = {"MIN": min, "MAX": max, "MED": lambda args: int(np.median(args)), "SM": lambda args: sum(args) % 10}
SYMBOLS = (*map(str, range(10)), *OPERATORS, "]", "end")
"""The vocabulary; "end" begins every row, as in every model of documents, and is [CLS] here."""
OPERATOR_SHARE, MAX_DEPTH, MAX_ARGUMENTS, LENGTHS = 0.25, 10, 10, (500, 2000)
N_HELD_OUT, N_TEST, BATCH = 300, 1000, 8

GAU, PAIRS = {"n_layers": 4, "query_key_dim": 32}, {"n_layers": 2, "n_heads": 4}
WIDER = {**PAIRS, "expansion_factor": 4.5}
MODELS: dict[str, Row] = {
    "transformer++": WIDER, "flash": {**GAU, "chunk_size": 128}, "flash+": {**GAU, "chunk_size": 128},
    "flash-quad": GAU, "performer": WIDER, "combiner": PAIRS}
"""As many parameters in each, to a tenth."""
SIZES = {"d_model": 64, "init_std": 0.15, "vocab_size": len(SYMBOLS), "context": 2048, "causal": False}
RATES, SEEDS = (1e-3, 3e-3), (0, 1, 2)
TRAIN = {"tokens_per_step": 32768, "micro_batch_tokens": 8192, "eval_tokens": 10**9, "save_every": 100,
         "precision": "bfloat16"}


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


def train(name: str, rate: float, seed: int, steps: int, out: Path, callbacks: Callbacks) -> Row:
    """Train a model from nothing, or go on, and test it: what a row has of the result. Raises Stopped after saving."""
    note(f"{name}, rate {rate:g}, seed {seed}")
    head, config = Head(ONE, tuple(map(str, range(10)))), model_config(name, **SIZES, **MODELS[name])
    settings = RunConfig(config, TrainConfig(learning_rate=rate, seed=seed, steps=steps, warmup_steps=steps // 10,
                                             eval_every=min(steps, 100), **TRAIN), name, "listops", "listops", str(out))
    splits = splits_of(steps * settings.rows_per_step)

    def begin(ranks: Ranks) -> Setup:
        torch.manual_seed(seed)
        return Setup(DocumentClassifier(config, head), Expressions(settings, head, *splits[:2], ranks), {})

    def score(run: Run, model: LanguageModel, ranks: Ranks) -> Row:
        return {"accuracy": scores_of(model, splits[2])["accuracy"],
                "n_parameters": sum(p.numel() for p in model.parameters())}

    result, _ = fit_once(settings, {"expressions": splits[0].sha256()}, "cpu", begin, score, callbacks)
    curve = [(each["step"], each["held_out"]["loss"], each["held_out"]["accuracy"]) for each in read_metrics(out)
             if "held_out" in each]
    shutil.rmtree(out)
    commonest = Counter(splits[2].labels).most_common(1)[0][1] / N_TEST
    return {"accuracy": result["accuracy"], "commonest": commonest, "n_parameters": result["n_parameters"],
            "n_train": len(splits[0]), "tokens": splits[0].n_tokens, "n_test": N_TEST, "curve": curve}


def measure(given: argparse.Namespace) -> None:
    """Every learning rate with the first seed, the best with the others: what has no row yet."""
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        def row_of(name: str, rate: float, seed: int) -> Row:
            key = {"task": "listops", "model": name, "learning_rate": rate, "seed": seed, "steps": given.steps}
            out = given.out / f"{name}-{rate:g}-{seed}-{given.steps}"
            return add_missing(given.rows, key, COMMAND, lambda: train(
                name, rate, seed, given.steps, out, Callbacks(stop, terminal.step)))

        add_missing(given.rows, {"task": "listops", "model": RULE, "steps": given.steps}, COMMAND,
                    lambda: by_operator(given.steps * TRAIN["tokens_per_step"] // SIZES["context"]))
        for seed, name in itertools.product(SEEDS, given.model or MODELS):
            first = [row_of(name, rate, SEEDS[0]) for rate in RATES]
            row_of(name, min(first, key=lambda row: row["curve"][-1][1])["learning_rate"], seed)


def table(rows: Sequence[Row]) -> str:
    """A line for each model and number of steps: its best rate, by the held-out loss of the first seed, and the
    accuracies of seeds."""
    (rule,), rows = ([row for row in rows if (row["model"] == RULE) == is_rule] for is_rule in (True, False))
    lines = []
    for steps, name in sorted({(row["steps"], row["model"]) for row in rows},
                              key=lambda each: (each[0], [*MODELS].index(each[1]))):
        own = [row for row in rows if (row["steps"], row["model"]) == (steps, name)]
        best = min((row for row in own if row["seed"] == SEEDS[0]), key=lambda row: row["curve"][-1][1])
        values = [row["accuracy"] for row in own if row["learning_rate"] == best["learning_rate"]]
        lines.append([name, f"{best['n_parameters']:,}", f"{steps:,}", f"{best['learning_rate']:g}", str(len(values)),
                      spread_text(values, 3)])
    first, operator = rows[0], rule["accuracy"]
    return "\n\n".join([
        f"{first['n_train'] // first['steps']} expressions a step, each read once; {first['n_test']:,} to test. "
        f"The commonest value is right {first['commonest']:.3f} of the time; the commonest for the outermost operator, "
        f"which is the first symbol, {operator:.3f} (standard error "
        f"{math.sqrt(operator * (1 - operator) / first['n_test']):.3f}).",
        markdown(["model", "parameters", "steps", "learning rate", "seeds", "accuracy"], lines)])


if __name__ == "__main__":
    run(__doc__, "listops", measure, table, "listops", {
        "out": {"type": Path, "default": Path("out/listops"), "help": "folder of unfinished runs"},
        "model": {"action": "append", "choices": MODELS, "help": "by default all; may be given again"},
        "steps": {"type": int, "default": 500}})
