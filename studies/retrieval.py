"""Which text is the other half of a document, among 1,000: vectors of a model beside TF-IDF, by length.

    python -m studies.retrieval --texts TEXTS --model small [--model NAME=RUN ...]   reads what has no row
    python -m studies.retrieval --into benchmarks/tables/documents.md                writes the table

A document is a passage of a book, of 4,096 tokens. Its halves are cut to the first 128, 512 or 2,048 tokens; a first
half asks for its second among those of all documents, by cosine. A book has two or three documents, so that some of the
wrong ones have its words too. A seed draws the places. Books of all splits are asked for, so a model must not have been
trained to find halves of these books."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics.pairwise import linear_kernel

import lineartime
from benchmarks import Row
from benchmarks.append import append_json_lines, rows_in
from benchmarks.paper.memory import difference_text
from benchmarks.recall.report import spread_text
from lineartime.data.tokenizer import Tokenizer
from lineartime.markdown import markdown
from lineartime.model import LanguageModel
from lineartime.model_names import named_folder
from lineartime.release.provenance import provenance
from studies import named_models, run
from studies.document_scores import INTERVAL
from studies.labelled_texts import books

N_DOCUMENTS, LENGTHS, SEEDS, BATCH = 1000, (128, 512, 2048), (0, 1, 2), 4
Halves = list[tuple[list[int], list[int]]]
"""Tokens of the first and of the second half of each document."""


def halves(texts: Path, seed: int, tokenizer: Tokenizer) -> Halves:
    """The same number of documents of each book, or one more, at places that do not overlap."""
    size = 2 * LENGTHS[-1] * 8  # characters: a token has 8 at most, on average over a half
    found = [book["text"] for book in books(texts) if len(book["text"]) >= 4 * size]
    draw, made, n_turns = np.random.default_rng(seed), [], -(-N_DOCUMENTS // len(found))
    for i in range(N_DOCUMENTS):
        text = found[i % len(found)]
        room = len(text) // n_turns
        begin = i // len(found) * room + int(draw.integers(room - size))
        ids = tokenizer.encode(text[begin : begin + size])
        made.append((ids[: LENGTHS[-1]], ids[LENGTHS[-1] : 2 * LENGTHS[-1]]))
    return made


def ranks(asking_NF: Any, asked_NF: Any) -> np.ndarray:
    """The place of each one's own among all, from 1; ties count against it. Rows have length 1."""
    likeness_NN = linear_kernel(asking_NF, asked_NF)
    return (likeness_NN >= likeness_NN.diagonal()[:, None]).sum(1)


def by_tfidf(documents: Halves, length: int, tokenizer: Tokenizer) -> np.ndarray:
    asking, asked = ([tokenizer.decode(each[side][:length]) for each in documents] for side in (0, 1))
    words = TfidfVectorizer(sublinear_tf=True).fit(asking + asked)
    return ranks(words.transform(asking), words.transform(asked))


@torch.inference_mode()
def vectors(model: LanguageModel, rows: Sequence[Sequence[int]], end_of_document: int) -> dict[int, np.ndarray]:
    """Vectors as `lineartime embed` makes them, of each row's first tokens, for each of the lengths, of length 1.
    The model is causal, so a mean of first states does not depend on the tokens behind them."""
    sums: dict[int, list[torch.Tensor]] = {length: [] for length in LENGTHS}
    for i in range(0, len(rows), BATCH):
        x_BTD = model.hidden(torch.tensor([[end_of_document, *row] for row in rows[i : i + BATCH]])).double()
        for length in LENGTHS:
            sums[length].append(x_BTD[:, : length + 1].mean(1))
    return {length: torch.nn.functional.normalize(torch.cat(each), dim=-1).numpy() for length, each in sums.items()}


def measure(given: argparse.Namespace) -> None:
    """What has no row yet, a seed after the other."""
    _, tokenizer, _ = lineartime.load_model(named_folder("small"))
    models = {"TF-IDF": "", **named_models(given.model)}
    for seed in SEEDS:
        there = [row["model"] for row in rows_in(given.rows) if row["seed"] == seed]
        missing = {name: folder for name, folder in models.items() if name not in there}
        documents = halves(given.texts, seed, tokenizer) if missing else []
        for name, folder in missing.items():
            if folder:
                model, own, _ = lineartime.load_model(named_folder(folder))
                assert own.sha256 == tokenizer.sha256, "the models of a table share a tokenizer"
                model.eval().to(torch.bfloat16)
                sides = [vectors(model, [each[side] for each in documents], own.end_of_document) for side in (0, 1)]
            places = {length: ranks(sides[0][length], sides[1][length]) if folder else
                      by_tfidf(documents, length, tokenizer) for length in LENGTHS}
            shown = "small" if folder in ("", "small") else f'"{name}=RUN"'
            facts = ({"precision": "bfloat16"} if folder else {}) | provenance() | {
                "command": f"python -m studies.retrieval --texts TEXTS --model {shown}"}
            append_json_lines(given.rows, [
                {"task": "retrieval", "model": name, "seed": seed, "tokens": length, "n_documents": N_DOCUMENTS,
                 "accuracy": float((place == 1).mean()), "reciprocal_rank": float((1 / place).mean()), **facts}
                for length, place in places.items()])
            print(f"seed {seed}, {name}: {[round(float((place == 1).mean()), 3) for place in places.values()]}")


def table(rows: Sequence[Row]) -> str:
    """Accuracies by length, mean and range of the seeds; and their differences from TF-IDF's, paired by seed."""
    names = sorted({row["model"] for row in rows}, key=lambda name: (name != "TF-IDF", name))
    found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row["model"], row["tokens"]][row["seed"]] = row["accuracy"]
    accuracies = [[name, *(spread_text([*found[name, length].values()]) for length in LENGTHS)] for name in names]
    less = [[name, *(difference_text(pd.Series(found[name, length]) - pd.Series(found["TF-IDF", length]))
                     for length in LENGTHS)] for name in names[1:]]
    lengths = [f"{length:,} tokens of a half" for length in LENGTHS]
    return "\n\n".join([
        markdown(["vectors", *lengths], accuracies),
        f"Less TF-IDF's on the same documents, {INTERVAL}; bold where that leaves 0 out.",
        markdown(["vectors", *lengths], less)])


if __name__ == "__main__":
    run(__doc__, "retrieval", measure, table, "retrieval", {
        "texts": {"type": Path, "help": "the folder of pg19_medium"},
        "model": {"action": "append", "default": [], "help": "a causal model, or NAME=RUN; may be given again"}})
