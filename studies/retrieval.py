"""Which document is asked for: vectors of a model beside TF-IDF and BM25, by length.

    python -m studies.retrieval --texts TEXTS --model small [--model NAME=RUN ...]   reads what has no row
    python -m studies.retrieval --into benchmarks/tables/documents.md                writes the table

`TASKS` says what is asked. Documents are passages of books, at places that a seed draws, and a book has several, so
that some of the wrong ones have its words too. Books of all splits are asked for, so a model must not have been trained
to find halves of these books."""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import bm25s
import numpy as np
import pandas as pd
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics.pairwise import cosine_similarity

import lineartime
from benchmarks import Row
from benchmarks.append import append_json_lines
from benchmarks.paper.memory import difference_text
from benchmarks.recall.report import spread_text
from benchmarks.recall.tasks import FORMS, RULER, invented
from lineartime.data.tokenizer import Tokenizer
from lineartime.markdown import markdown
from lineartime.model_names import named_folder
from lineartime.release.provenance import provenance
from studies import missing, named_models, run
from studies.documents import INTERVAL
from studies.labelled_texts import books

SEEDS = (0, 1, 2)
Sides = tuple[list[str], list[str]]
"""Texts that ask, and for each of them the one that is asked for."""


class Task(NamedTuple):
    what: str
    n_documents: int
    lengths: tuple[int, ...]
    """In tokens of the shipped model's tokenizer."""
    n_characters: int
    """Of the passage that a document is made from."""
    sides: Callable[[list[list[int]], int, int, Tokenizer], Sides]
    """Of the passages' tokens, a length and a seed."""


def halves(passages: list[list[int]], length: int, seed: int, tokenizer: Tokenizer) -> Sides:
    """The beginnings of a passage's first and second half."""
    middle = TASKS["retrieval"].lengths[-1]
    first, second = ([tokenizer.decode(ids[begin : begin + length]) for ids in passages] for begin in (0, middle))
    return first, second


def needles(passages: list[list[int]], length: int, seed: int, tokenizer: Tokenizer, noise: str = "") -> Sides:
    """A question for the number that belongs to a name, and the documents, each of which has one such sentence, at any
    place. noise: what documents are of instead of passages."""
    draw, filling = np.random.default_rng([seed, length]), tokenizer.encode(noise)
    generator, documents = torch.Generator().manual_seed(seed), []
    # Two each, as three letters may be a word.
    names = ["".join(each) for each in zip(*(invented(len(passages), generator) for _ in range(2)), strict=True)]
    for name, ids in zip(names, passages, strict=True):
        sentence = tokenizer.encode(f"{FORMS[RULER].key}{draw.integers(10**6, 10**7)}.".format(name))
        text = (filling * length or ids)[: length - len(sentence)]
        at = int(draw.integers(len(text)))
        documents.append(tokenizer.decode([*text[:at], *sentence, *text[at:]]))
    return [f"What is the special magic number for {name}?" for name in names], documents


NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TASKS = {
    "retrieval": Task("**The second half of a passage** of 4,096 tokens, by its first, among 1,000.", 1000,
                      (128, 512, 2048), 32_768, halves),
    "needle": Task("**The passage that tells a number**, by a question for it, among 50 (as LongEmbed's needles).", 50,
                   (256, 1024, 4096, 32_768), 196_608, needles),
    "passkey": Task("**The same in one sentence said again and again** (as LongEmbed's passkeys).", 50,
                    (256, 1024, 4096, 32_768), 196_608, partial(needles, noise=NOISE))}


@lru_cache(1)
def drawn(texts: Path, task: Task, seed: int, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of passages: of each book the same number, or one more, at places that do not overlap."""
    size = task.n_characters
    found = [book["text"] for book in books(texts) if len(book["text"]) >= 4 * size]
    draw, made, n_turns = np.random.default_rng(seed), [], -(-task.n_documents // len(found))
    for i in range(task.n_documents):
        text = found[i % len(found)]
        room = len(text) // n_turns
        begin = i // len(found) * room + int(draw.integers(room - size))
        made.append(tokenizer.encode(text[begin : begin + size]))
    return made


def ranks(likeness_NN: np.ndarray) -> np.ndarray:
    """The place of the one that is asked for, on the diagonal, among all, from 1; ties count against it."""
    return (likeness_NN >= likeness_NN.diagonal()[:, None]).sum(1)


def by_tfidf(asking: list[str], asked: list[str]) -> np.ndarray:
    words = TfidfVectorizer(sublinear_tf=True).fit(asking + asked)
    return cosine_similarity(words.transform(asking), words.transform(asked))


def by_bm25(asking: list[str], asked: list[str]) -> np.ndarray:
    """With the library's own settings. In a search for halves others of its variants and of its k1 and b, with stop
    words or without, differ from them by .014 at most (seed 0)."""
    index = bm25s.BM25()
    index.index(bm25s.tokenize(asked, show_progress=False), show_progress=False)
    return np.stack([index.get_scores(words)
                     for words in bm25s.tokenize(asking, return_ids=False, show_progress=False)])


WORDS = {"TF-IDF": by_tfidf, "BM25": by_bm25}


def by_vectors(folder: str, asking: list[str], asked: list[str]) -> np.ndarray:
    model, tokenizer, _ = lineartime.load_model(named_folder(folder))
    return cosine_similarity(*(lineartime.embed(model, tokenizer, texts, precision="bfloat16")
                               for texts in (asking, asked)))


def measure(given: argparse.Namespace) -> None:
    """What has no row yet, a seed after the other."""
    _, tokenizer, _ = lineartime.load_model(named_folder("small"))
    models = {**dict.fromkeys(WORDS, ""), **named_models(given.model)}
    for (name, task), seed, (model, folder) in itertools.product(TASKS.items(), SEEDS, models.items()):
        key = {"task": name, "model": model, "seed": seed}
        for length in missing(given.rows, key, task.lengths):
            sides = task.sides(drawn(given.texts, task, seed, tokenizer), length, seed, tokenizer)
            place = ranks(by_vectors(folder, *sides) if folder else WORDS[model](*sides))
            shown = "small" if folder in ("", "small") else f'"{model}=RUN"'
            append_json_lines(given.rows, [key | {
                "tokens": length, "n_documents": task.n_documents, "accuracy": float((place == 1).mean()),
                "reciprocal_rank": float((1 / place).mean()), **({"precision": "bfloat16"} if folder else {}),
                **provenance(), "command": f"python -m studies.retrieval --texts TEXTS --model {shown}"}])
            print(f"{name}, seed {seed}, {model}, {length} tokens: {(place == 1).mean():.3f}", flush=True)


def table(rows: Sequence[Row]) -> str:
    """Of each task accuracies by length, mean and range of the seeds; and their differences from TF-IDF's, paired by
    seed."""
    parts = []
    for task, about in TASKS.items():
        found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for row in rows:
            if row["task"] == task:
                found[row["model"], row["tokens"]][row["seed"]] = row["accuracy"]
        if not found:
            continue
        names = sorted({name for name, _ in found}, key=lambda name: (name not in ("TF-IDF", "BM25"), name))
        accuracies = [[name, *(spread_text([*found[name, length].values()]) for length in about.lengths)]
                      for name in names]
        less = [[name, *(difference_text(pd.Series(found[name, length]) - pd.Series(found["TF-IDF", length]))
                         for length in about.lengths)] for name in names if name != "TF-IDF"]
        lengths = [f"{length:,} tokens" for length in about.lengths]
        parts += [about.what, markdown(["by", *lengths], accuracies),
                  f"Less TF-IDF's on the same documents, {INTERVAL}; bold where that leaves 0 out.",
                  markdown(["by", *lengths], less)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    run(__doc__, "retrieval", measure, table, "retrieval", {
        "texts": {"type": Path, "help": "the folder of pg19_medium"},
        "model": {"action": "append", "default": [], "help": "a model, or NAME=RUN; may be given again"}})
