"""Which text is the other half of a document, among 1,000: vectors of a model beside TF-IDF, by length.

    python studies/retrieval.py --texts TEXTS --model small [--model NAME=RUN ...]   reads what has no row
    python studies/retrieval.py --into benchmarks/tables/documents.md                      writes the table

A document is a passage of a book, of 4,096 tokens. Its halves are cut to the first 128, 512 or 2,048 tokens; a first
half asks for its second among those of all documents, by cosine. A book has two or three documents, so that some of the
wrong ones have its words too. A seed draws the places. Books of all splits are asked for, so a model must not have been
trained to find halves of these books. The page's "small, trained", 21 minutes of one core:

    lineartime finetune small --task embed --out RUN --context 512 --learning-rates 3e-4 --epochs 2
        --set precision=bfloat16 --documents TEXTS/wiki40b_mini/en/train.jsonl.gz
        --documents TEXTS/c4_mini/en/c4-train.00000-of-00001.json.gz
        --validation TEXTS/wiki40b_mini/en/validation.jsonl.gz
        --validation TEXTS/c4_mini/en/c4-validation.00000-of-00001.json.gz
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: E402

import lineartime  # noqa: E402
from benchmarks.append import append_json_lines  # noqa: E402
from benchmarks.pages import fill_place  # noqa: E402
from benchmarks.paper.memory import difference_text, differences  # noqa: E402
from benchmarks.recall.report import spread_text  # noqa: E402
from lineartime.atomic_io import read_json_lines  # noqa: E402
from lineartime.cli.exits import exit_code  # noqa: E402
from lineartime.data.pretrained import named_folder  # noqa: E402
from lineartime.data.tokenizer import Tokenizer  # noqa: E402
from lineartime.markdown import markdown  # noqa: E402
from lineartime.model import LanguageModel  # noqa: E402
from lineartime.release.provenance import provenance  # noqa: E402

ROWS = ROOT / "benchmarks" / "rows" / "retrieval.jsonl"
N_DOCUMENTS, LENGTHS, SEEDS, BATCH = 1000, (128, 512, 2048), (0, 1, 2), 4
CHARACTERS = 8
"""Of a token at most, on average over a half."""

Halves = list[tuple[list[int], list[int]]]
"""Tokens of the first and of the second half of each document."""


def halves(texts: Path, seed: int, tokenizer: Tokenizer) -> Halves:
    """The same number of documents of each book, or one more, at places that do not overlap."""
    found = [book["text"] for split in ("train", "validation", "test")
             for book in parquet.read_table(texts / "pg19_medium" / f"{split}.parquet").to_pylist()]
    size = 2 * LENGTHS[-1] * CHARACTERS
    found = [text for text in found if len(text) >= 4 * size]
    draw, made = np.random.default_rng(seed), []
    for i in range(N_DOCUMENTS):
        text, turn = found[i % len(found)], i // len(found)
        n_turns = -(-N_DOCUMENTS // len(found))
        room = len(text) // n_turns
        begin = turn * room + int(draw.integers(room - size))
        ids = tokenizer.encode(text[begin : begin + size])[: 2 * LENGTHS[-1]]
        made.append((ids[: LENGTHS[-1]], ids[LENGTHS[-1] :]))
    return made


def ranks(asking_NF: Any, asked_NF: Any) -> np.ndarray:
    """The place of each one's own among all, from 1; ties count against it. Rows have length 1."""
    likeness_NN = asking_NF @ asked_NF.T
    likeness_NN = likeness_NN if isinstance(likeness_NN, np.ndarray) else likeness_NN.toarray()
    return (likeness_NN >= likeness_NN.diagonal()[:, None]).sum(1)


def by_tfidf(documents: Halves, length: int, tokenizer: Tokenizer) -> np.ndarray:
    asking, asked = ([tokenizer.decode(each[side][:length]) for each in documents] for side in (0, 1))
    words = TfidfVectorizer(sublinear_tf=True).fit(asking + asked)
    return ranks(words.transform(asking), words.transform(asked))


@torch.inference_mode()
def vectors(model: LanguageModel, rows: Sequence[Sequence[int]], end_of_document: int) -> dict[int, np.ndarray]:
    """The vectors of `lineartime embed` of each row's first tokens, for each of the lengths, scaled to length 1: means
    of last hidden states, of the end-of-document token before the row too. The model is causal, so what a mean has does
    not depend on the tokens behind it. Computed in the model's precision."""
    sums: dict[int, list[torch.Tensor]] = {length: [] for length in LENGTHS}
    for i in range(0, len(rows), BATCH):
        x_BTD = model.hidden(torch.tensor([[end_of_document, *row] for row in rows[i : i + BATCH]])).double()
        for length in LENGTHS:
            sums[length].append(x_BTD[:, : length + 1].mean(1))
        print(f"\r  {i + BATCH:,} of {len(rows):,} halves ", end="", flush=True)
    return {length: torch.nn.functional.normalize(torch.cat(each), dim=-1).numpy() for length, each in sums.items()}


def measure(texts: Path, models: dict[str, str], rows: Path) -> None:
    """What has no row yet, a seed after the other."""
    _, tokenizer, _ = lineartime.load_model(named_folder("small"))
    for seed in SEEDS:
        there = read_json_lines(rows, dict, "a row") if rows.exists() else []
        missing = [name for name in ("TF-IDF", *models)
                   if not any((row["seed"], row["model"]) == (seed, name) for row in there)]
        documents = halves(texts, seed, tokenizer) if missing else []
        for name in missing:
            started = time.process_time()
            if name == "TF-IDF":
                places = {length: by_tfidf(documents, length, tokenizer) for length in LENGTHS}
            else:
                model, own, _ = lineartime.load_model(named_folder(models[name]))
                assert own.sha256 == tokenizer.sha256, "the models of a table share a tokenizer"
                model.eval().to(torch.bfloat16)
                sides = [vectors(model, [each[side] for each in documents], own.end_of_document) for side in (0, 1)]
                places = {length: ranks(sides[0][length], sides[1][length]) for length in LENGTHS}
            seconds = time.process_time() - started
            precision = {} if name == "TF-IDF" else {"precision": "bfloat16"}
            made = [{"task": "retrieval", "model": name, "seed": seed, "tokens": length, "n_documents": N_DOCUMENTS,
                     "accuracy": float((place == 1).mean()), "reciprocal_rank": float((1 / place).mean()),
                     "seconds": seconds, **precision} for length, place in places.items()]
            append_json_lines(rows, [each | provenance() | {"command": command_of(name)} for each in made])
            print(f"\rseed {seed}, {name}: " + ", ".join(f"{each['tokens']:,} tokens {each['accuracy']:.3f}"
                                                       for each in made), flush=True)


def command_of(name: str) -> str:
    """What measures a row: a model that is not shipped is a run's folder with a name."""
    return "python studies/retrieval.py --texts TEXTS --model " + ("small" if name in ("TF-IDF", "small") else
                                                               f'"{name}=RUN"')


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracies by length, mean and range of the seeds; and their differences from TF-IDF's, paired by seed."""
    names = sorted({row["model"] for row in rows}, key=lambda name: (name != "TF-IDF", name))
    found = {(name, length): {row["seed"]: row["accuracy"] for row in rows
                              if (row["model"], row["tokens"]) == (name, length)}
             for name in names for length in LENGTHS}
    accuracies = [[name, *(spread_text([*found[name, length].values()]) for length in LENGTHS)] for name in names]
    less = [[name, *(difference_text(differences(found[name, length], found["TF-IDF", length])) for length in LENGTHS)]
            for name in names[1:]]
    lengths = [f"{length:,} tokens of a half" for length in LENGTHS]
    return "\n\n".join([
        markdown(["vectors", *lengths], accuracies),
        "Less TF-IDF's on the same documents, mean over the seeds with its 95 % interval; bold where that leaves 0 "
        "out.",
        markdown(["vectors", *lengths], less)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, help="the folder of pg19_medium")
    parser.add_argument("--model", action="append", default=[], help="a causal model, or NAME=RUN; may be given again")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--into", type=Path, help="write the table into this page")
    given = parser.parse_args()
    if given.texts:
        measure(given.texts, dict(each.split("=", 1) if "=" in each else (each, each) for each in given.model),
                given.rows)
    if given.into:
        fill_place(given.into, "retrieval", table(read_json_lines(given.rows, dict, "a row")))


if __name__ == "__main__":
    sys.exit(exit_code(main))
