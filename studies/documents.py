"""What labels and vectors of documents are worth, by length: beside TF-IDF with logistic regression.

    python -m studies.documents --texts TEXTS --frozen small [--frozen NAME=RUN ...]   resumable
    python -m studies.documents --into benchmarks/tables/documents.md                  writes the tables

A model's vectors, as `lineartime embed` gives them, go into a logistic regression. Rows of fine-tuned models were
measured by this script of commit 4836173. `labelled_texts.py` has the passages."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.preprocessing import StandardScaler

import lineartime
from benchmarks import Row
from benchmarks.append import append_json_lines
from benchmarks.paper.memory import difference_text
from benchmarks.recall.report import spread_text
from lineartime.data.tokenizer import Tokenizer
from lineartime.markdown import markdown
from lineartime.model_names import named_folder
from lineartime.release.provenance import provenance
from studies import missing, named_models, run
from studies.labelled_texts import TASKS, Passages, passages

SEEDS = (0, 1, 2)
READINGS = {"whole": None, "windows of 512": 512}
"""Tokens of windows that do not see each other; without them a passage is read with the state carried."""
PIECE = 4096
"""Tokens read at once. With larger tensors than these a processor reads half as many in a second."""
FROZEN = ", frozen"
"""Behind the name of a model whose vectors are not trained."""
MEASURES = {"accuracy": "accuracy", "macro_f1": "macro F1"}
"""The scores of a row and their names in tables."""
EQUAL_SIZES = ("FLASH of 1.2 M, frozen", "Transformer++ of 1.1 M, frozen")
"""Two models that a table compares; the first reads whole passages."""
SECOND_READS = {512: "whole", 2048: "whole", 8192: "windows of 512", 32768: "windows of 512"}
"""How the second reads, by length."""
INTERVAL = "mean over the seeds with its 95 % interval"


def by_tfidf(found: Passages) -> Row:
    """Words and pairs of words."""
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2, max_features=50_000)
    words.fit(text for text, _ in found["train"])
    features = {split: words.transform(text for text, _ in each) for split, each in found.items()}
    return classified(features, found, (10, 100), 300)


def by_vectors(found: Passages, model: str, lengths: Sequence[int], window: int | None,
               cut_by: Tokenizer) -> dict[int, Row]:
    """Means of last hidden states over the first tokens of passages of the longest of the lengths, for each of them: a
    causal model's states do not depend on what follows. window: as in `means_of`. cut_by: the tokenizer that passages
    are cut by. They are computed in bfloat16, and differ from those in float32 by 0.1 % of their spread over books."""
    loaded, own, _ = lineartime.load_model(named_folder(model))
    loaded.eval().to(torch.bfloat16)
    assert loaded.config.causal, "a mean over first tokens is that of a causal model"
    vectors: dict[str, list[list[np.ndarray]]] = {split: [] for split in found}
    for split, text in [(split, text) for split, each in found.items() for text, _ in each]:
        # All models read the same text: so many tokens of their own as the first tokens of the other tokenizer are.
        ids = cut_by.encode(text)
        own_lengths = [len(own.encode(cut_by.decode(ids[:length]))) for length in lengths]
        vectors[split].append(means_of(loaded, [own.end_of_document, *own.encode(text)], own_lengths, window))
        print(f"\r  {split}: {len(vectors[split]):,} passages read ", end="", flush=True)
    made = {}
    for i, length in enumerate(lengths):
        features = {split: np.stack([each[i] for each in vectors[split]]) for split in found}
        scale = StandardScaler().fit(features["train"])
        features = {split: scale.transform(each) for split, each in features.items()}
        made[length] = {**classified(features, found, (0.01, 0.1, 1, 10), 1000), "precision": "bfloat16"}
    return made


@torch.inference_mode()
def means_of(model: lineartime.LanguageModel, ids: list[int], lengths: Sequence[int],
             window: int | None = None) -> list[np.ndarray]:
    """The mean of the states of the first tokens, for each of the lengths. window: its tokens, if they are read in
    windows that do not see each other; otherwise the state is carried."""
    assert PIECE % (window or 1) == 0, "pieces of whole windows"
    state, parts = model.decoding_state(1), []
    for piece in torch.tensor(ids).split(PIECE):
        if window is None:
            parts.append(model.extend(piece[None], torch.tensor([len(piece)]), state)[0])
            continue
        whole = piece[: len(piece) // window * window].view(-1, window)
        parts += [model.hidden(rows).flatten(0, 1) for rows in (whole, piece[None, whole.numel() :]) if rows.numel()]
    x_TD = torch.cat(parts).double()
    return [x_TD[: length + 1].mean(0).numpy() for length in lengths]


def classified(features: dict[str, Any], found: Passages, strengths: Sequence[float], max_iter: int) -> Row:
    """Scores on the test, and the strength of the regularisation, which is chosen on the validation."""
    truth = {split: [label for _, label in each] for split, each in found.items()}
    models = [LogisticRegression(C=c, max_iter=max_iter).fit(features["train"], truth["train"]) for c in strengths]
    best = max(models, key=lambda model: model.score(features["validation"], truth["validation"]))
    said = best.predict(features["test"]).tolist()
    return {"accuracy": float(accuracy_score(truth["test"], said)), "n_test": len(said), "regularisation": best.C,
            "macro_f1": float(f1_score(truth["test"], said, average="macro", zero_division=0)),
            "n_features": features["train"].shape[1]}


def measure(given: argparse.Namespace) -> None:
    """Every task, seed, length and model that has no row yet."""
    _, tokenizer, _ = lineartime.load_model(named_folder("small"))
    for name, seed in itertools.product(given.task or TASKS, SEEDS):
        task, sources, key = TASKS[name], TASKS[name].sources(given.texts), {"task": name, "seed": seed}
        for length in missing(given.rows, key | {"model": "TF-IDF"}, task.lengths):
            found = passages(task, sources, length, seed, tokenizer)
            add(given.rows, key | {"model": "TF-IDF"}, found, {length: by_tfidf(found)}, "small")
        for (model, folder), reading in itertools.product(named_models(given.frozen).items(), READINGS):
            own, window = key | {"model": model + FROZEN, "reading": reading}, READINGS[reading]
            # A Transformer reads what is longer than its rows in windows alone; a passage below a window has none.
            config = lineartime.load_model(named_folder(folder))[0].config
            longest = config.context if config.chunk_size is None and window is None else max(task.lengths)
            lengths = missing(given.rows, own, [each for each in task.lengths if (window or 0) < each <= longest])
            if lengths:
                found = passages(task, sources, lengths[-1], seed, tokenizer)
                add(given.rows, own, found, by_vectors(found, folder, lengths, window, tokenizer),
                    "small" if folder == "small" else f'"{model}=RUN"')


def add(rows: Path, key: Row, found: Passages, results: dict[int, Row], frozen: str) -> None:
    """Write a row for each length and say it."""
    facts = {"n_train": len(found["train"]), "n_labels": len({label for _, label in found["test"]}), **provenance(),
             "command": f"python -m studies.documents --texts TEXTS --frozen {frozen}"}
    for length, result in results.items():
        append_json_lines(rows, [key | {"tokens": length} | result | facts])
        print(f"\n{', '.join(map(str, key.values()))}, {length}: accuracy {result['accuracy']:.3f}", flush=True)


def tables(rows: Sequence[Row]) -> str:
    """For each task a table of accuracies, and one of both scores' differences from TF-IDF, paired by seed; then one of
    FLASH's from the Transformer++ of its size."""
    parts = []
    for name, task in TASKS.items():
        own = [row for row in rows if row["task"] == name]
        if not own:
            continue
        sides = sorted(dict.fromkeys((row["model"], row.get("reading", "whole")) for row in own),
                       key=lambda side: (side[0] != "TF-IDF", side))
        accuracies = [[*side, *(spread_text([*by_seed(own, *side, length).values()]) for length in task.lengths)]
                      for side in sides]
        less = [[*side, label, *(less_text(own, side, sides[0], length, score) for length in task.lengths)]
                for score, label in MEASURES.items() for side in sides[1:]]
        lengths = [f"{length:,} tokens" for length in task.lengths]
        parts += [f"**{name.capitalize()}**, {own[0]['n_labels']} labels, {counts(own, 'n_train')} passages to train "
                  f"on, {counts(own, 'n_test')} to test; accuracy, mean and range of the seeds.",
                  markdown(["model", "how it reads", *lengths], accuracies)]
        if less:
            parts += [f"Less the score of TF-IDF on the same passages, {INTERVAL}; bold where that leaves 0 out.",
                      markdown(["model", "how it reads", "score", *lengths], less)]
    first, second = EQUAL_SIZES
    if {*EQUAL_SIZES} <= {row["model"] for row in rows}:
        less = [[name, label, *(less_text([row for row in rows if row["task"] == name], (first, "whole"),
                                          (second, reading), length, score)
                                for length, reading in SECOND_READS.items())]
                for name in TASKS for score, label in MEASURES.items()]
        lengths = [f"{length:,} tokens" + ("" if reading == "whole" else f", {reading}")
                   for length, reading in SECOND_READS.items()]
        parts += [f"**{first.removesuffix(FROZEN)} less {second.removesuffix(FROZEN)}**, both frozen, on the same "
                  f"passages; windows are those of the Transformer++. {INTERVAL.capitalize()}.",
                  markdown(["task", "score", *lengths], less)]
    return "\n\n".join(parts)


def less_text(rows: Sequence[Row], side: tuple[str, str], other: tuple[str, str], length: int, score: str) -> str:
    """A score of one side less the other's, paired by seed. A side is a model and how it reads."""
    ours, theirs = (pd.Series(by_seed(rows, *each, length, score), dtype=float) for each in (side, other))
    return difference_text(ours - theirs)


def by_seed(rows: Sequence[Row], model: str, reading: str, length: int, score: str = "accuracy") -> dict[int, float]:
    """A score of one task by the seed that has drawn its passages."""
    return {row["seed"]: row[score] for row in rows
            if (row["model"], row.get("reading", "whole"), row["tokens"]) == (model, reading, length)}


def counts(rows: Sequence[Row], field: str) -> str:
    """The least and the most of the seeds."""
    values = sorted({row[field] for row in rows})
    return f"{values[0]:,}" + (f" to {values[-1]:,}" if values[1:] else "")


if __name__ == "__main__":
    run(__doc__, "documents", measure, tables, "documents", {
        "texts": {"type": Path, "help": "the folder of pg19_medium, wiki40b_mini and c4_mini"},
        "frozen": {"action": "append", "default": [], "help": "a causal model, or NAME=RUN; may be given again"},
        "task": {"action": "append", "choices": TASKS, "help": "by default all; may be given again"}})
