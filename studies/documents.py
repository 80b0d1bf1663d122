"""What labels and vectors of documents are worth, by length: beside TF-IDF with logistic regression.

    python studies/documents.py --texts TEXTS --frozen small [--frozen NAME=RUN ...]   resumable
    python studies/documents.py --into benchmarks/tables/documents.md  writes the tables

A model's vectors, as `lineartime embed` gives them, go into a logistic regression. Rows of fine-tuned models were
measured by this script of commit 4836173.

Passages of one task and seed begin at the same places at every length, so the result of a model that cuts documents at
N tokens is that of N tokens. Books, articles and pages of the test are none of those of the training. A seed draws
them, the places and the order of training, and is the same for all models. Topics and genres were written down by hand
(studies/labels)."""

import argparse
import csv
import gzip
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.metrics import accuracy_score, f1_score  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

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
from lineartime.release.provenance import provenance  # noqa: E402

ROWS = ROOT / "benchmarks" / "rows" / "documents.jsonl"
LABELS = Path(__file__).parent / "labels"
SEEDS = (0, 1, 2)
FROZEN = ", frozen"
"""Behind the name of a model whose vectors are not trained."""
READINGS = {"whole": None, "windows of 512": 512}
"""Tokens of windows that do not see each other; without them a passage is read with the state carried."""
PIECE = 4096
"""Tokens read at once. With larger tensors than these a processor reads half as many in a second."""
MEASURES = {"accuracy": "accuracy", "macro_f1": "macro F1"}
"""The scores of a row and their names in tables."""
EQUAL_SIZES = ("FLASH of 1.2 M, frozen", "Transformer++ of 1.1 M, frozen")
SECOND_READS = {512: "whole", 2048: "whole", 8192: "windows of 512", 32768: "windows of 512"}
"""Two models that a table compares, of which the first reads whole passages; and how the second reads, by length."""


class Source(NamedTuple):
    """A text that passages are taken from."""

    label: str
    group: str
    """Texts of one group are in one split: a book's author where authors would tell the genre."""
    text: str


class Task(NamedTuple):
    """What is asked of passages, how long they are, and how many of each text there are to train on and to test on."""

    sources: Callable[[Path], list[Source]]
    lengths: tuple[int, ...]
    """In tokens of the shipped model's tokenizer."""
    n_train: int
    n_test: int
    by_label: bool
    """Whether every label's texts are split in the same way."""


def books(texts: Path) -> list[dict[str, Any]]:
    return [book for split in ("train", "validation", "test")
            for book in parquet.read_table(texts / "pg19_medium" / f"{split}.parquet").to_pylist()]


def authors(texts: Path) -> list[Source]:
    """Six books of each author who has as many."""
    by_author: dict[str, list[dict[str, Any]]] = {}
    for book in books(texts):
        by_author.setdefault(book["author"], []).append(book)
    return [Source(author, str(book["book_id"]), book["text"]) for author, own in sorted(by_author.items())
            if len(own) >= 6 for book in own[:6]]


def genres(texts: Path) -> list[Source]:
    genre = labels_of("genres.csv")
    return [Source(genre[str(book["book_id"])], book["author"], book["text"]) for book in books(texts)]


def topics(texts: Path) -> list[Source]:
    topic, folder = labels_of("topics.csv"), texts / "wiki40b_mini"
    titles = [json.loads(line) for line in (folder / "articles.jsonl").read_text(encoding="utf-8").splitlines()]
    found = []
    for split in ("train", "validation", "test"):
        with gzip.open(folder / "en" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            articles = [json.loads(line)["text"] for line in file]
        for article, text in zip((each for each in titles if each["split"] == split), articles, strict=True):
            plain = re.sub(r"_(START_ARTICLE|START_SECTION|START_PARAGRAPH)_|_NEWLINE_", "\n", text)
            body = plain.split("\n", 3)[-1]  # begins with the title
            found.append(Source(topic[article["title"]], article["title"], body))
    return found


def pages(texts: Path) -> list[Source]:
    """Web pages, and the collection that each is from; but for one of twelve pages."""
    found = []
    for split in ("train", "validation"):
        with gzip.open(texts / "c4_mini" / "en" / f"c4-{split}.00000-of-00001.json.gz", "rt", encoding="utf-8") as file:
            for line in file:
                page = json.loads(line)
                found.append(Source("/".join(page["url"].split("/")[3:5]), page["url"], page["text"]))
    return [each for each in found if each.label != "github/opensource.guide"]


TASKS = {"author": Task(authors, (512, 2048, 8192, 32768), 4, 8, True),
         "genre": Task(genres, (512, 2048, 8192, 32768), 2, 4, False),
         "topic": Task(topics, (512, 2048, 8192), 4, 4, True),
         "source": Task(pages, (512,), 1, 1, True)}


def labels_of(name: str) -> dict[str, str]:
    with (LABELS / name).open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        next(rows)
        return {key: label for key, label in rows}


Passages = dict[str, list[tuple[str, str]]]
"""By split, texts and their labels."""


def passages(task: Task, sources: Sequence[Source], length: int, seed: int, tokenizer: Tokenizer) -> Passages:
    """Of each text passages of `length` tokens, or its end: a sixth of the groups is for validation, a sixth for the
    test. The places are the same at every length."""
    longest = max(task.lengths)
    split_of: dict[str, str] = {}
    for label in sorted({each.label for each in sources}) if task.by_label else [None]:
        groups = sorted({each.group for each in sources if label in (None, each.label)})
        order = np.random.default_rng([seed, len(groups)]).permutation(len(groups))
        n = max(len(groups) // 6, 1)
        for i, at in enumerate(order):
            split_of[groups[at]] = "test" if i < n else "validation" if i < 2 * n else "train"
    found: Passages = {"train": [], "validation": [], "test": []}
    for number, each in enumerate(sources):
        split = split_of[each.group]
        n = {"train": task.n_train, "validation": 1, "test": task.n_test}[split]
        generator = np.random.default_rng([seed, number])
        # Enough characters for the longest passage, at places that the length does not change.
        starts = generator.integers(max(len(each.text) - 5 * longest, 1), size=n)
        for start in starts:
            ids = tokenizer.encode(each.text[start : start + 8 * length])[:length]
            found[split].append((tokenizer.decode(ids), each.label))
    return found


def scores_of(truth: Sequence[str], said: Sequence[str]) -> dict[str, Any]:
    return {"accuracy": float(accuracy_score(truth, said)), "n_test": len(truth),
            "macro_f1": float(f1_score(truth, said, average="macro", zero_division=0))}


def by_tfidf(found: Passages) -> dict[str, Any]:
    """Words and pairs of words; the strength of the regularisation is chosen on the validation."""
    started = time.process_time()
    words = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), min_df=2, max_features=50_000)
    train = words.fit_transform(text for text, _ in found["train"])
    held_out, test = (words.transform(text for text, _ in found[split]) for split in ("validation", "test"))
    truth = {split: [label for _, label in each] for split, each in found.items()}
    models = [LogisticRegression(C=c, max_iter=300).fit(train, truth["train"]) for c in (10, 100)]
    best = max(models, key=lambda model: model.score(held_out, truth["validation"]))
    return {**scores_of(truth["test"], best.predict(test).tolist()), "regularisation": best.C,
            "n_features": train.shape[1], "seconds": time.process_time() - started}


def by_vectors(found: Passages, model: str, lengths: Sequence[int], window: int | None,
               cut_by: Tokenizer) -> dict[int, dict[str, Any]]:
    """Means of last hidden states over the first tokens of passages of the longest of the lengths, for each of them: a
    causal model's states do not depend on what follows. window: as in `means_of`. cut_by: the tokenizer that passages
    are cut by. They are computed in bfloat16, and differ from those in float32 by 0.1 % of their spread over books. The
    strength of the regularisation is chosen on the validation."""
    started = time.process_time()
    loaded, tokenizer, _ = lineartime.load_model(named_folder(model))
    loaded.to(torch.bfloat16)
    assert loaded.config.causal, "a mean over first tokens is that of a causal model"
    vectors: dict[str, list[list[np.ndarray]]] = {}
    for split, each in found.items():
        vectors[split] = [means_of(loaded.eval(), [tokenizer.end_of_document, *tokenizer.encode(text)],
                                   own_lengths(text, lengths, cut_by, tokenizer), window)
                          for text, _ in each]
        print(f"\r  {split}: {len(each):,} passages read ", end="", flush=True)
    truth = {split: [label for _, label in each] for split, each in found.items()}
    seconds, made = time.process_time() - started, {}
    for i, length in enumerate(lengths):
        train, held_out, test = (np.stack([each[i] for each in vectors[split]])
                                 for split in ("train", "validation", "test"))
        scale = StandardScaler().fit(train)
        models = [LogisticRegression(C=c, max_iter=1000).fit(scale.transform(train), truth["train"])
                  for c in (0.01, 0.1, 1, 10)]
        best = max(models, key=lambda each: each.score(scale.transform(held_out), truth["validation"]))
        made[length] = {**scores_of(truth["test"], best.predict(scale.transform(test)).tolist()),
                        "regularisation": best.C, "precision": "bfloat16", "n_features": train.shape[1],
                        "seconds": seconds}
    return made


def own_lengths(text: str, lengths: Sequence[int], cut_by: Tokenizer, own: Tokenizer) -> list[int]:
    """How many tokens of a model's own tokenizer the first tokens of another one are, for each of the lengths: all
    models read the same text."""
    ids = cut_by.encode(text)
    return [len(own.encode(cut_by.decode(ids[:length]))) for length in lengths]


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


def measure(texts: Path, frozen: dict[str, str], tasks: Iterable[str], rows: Path) -> None:
    """Every task, seed, length and model that has no row yet. frozen: folders of models by name."""
    _, tokenizer, _ = lineartime.load_model(named_folder("small"))
    for name, seed in itertools.product(tasks, SEEDS):
        task, sources = TASKS[name], TASKS[name].sources(texts)
        key = {"task": name, "seed": seed, "model": "TF-IDF"}
        for length in missing(rows, key, task.lengths):
            found = passages(task, sources, length, seed, tokenizer)
            add(rows, key | {"tokens": length}, found, by_tfidf(found))
        for (model, folder), (reading, size) in itertools.product(frozen.items(), READINGS.items()):
            key = {"task": name, "seed": seed, "model": model, "reading": reading}
            if lengths := missing(rows, key, lengths_read(name, folder, size)):
                found = passages(task, sources, lengths[-1], seed, tokenizer)
                for length, result in by_vectors(found, folder, lengths, size, tokenizer).items():
                    add(rows, key | {"tokens": length}, found, result)


def missing(rows: Path, key: dict[str, Any], lengths: Sequence[int]) -> list[int]:
    """The lengths that have no row with these columns."""
    there = read_json_lines(rows, dict, "a row") if rows.exists() else []
    return [length for length in lengths
            if not any((key | {"tokens": length}).items() <= row.items() for row in there)]


def add(rows: Path, key: dict[str, Any], found: Passages, result: dict[str, Any]) -> None:
    """Write a row and say it."""
    facts = {"n_train": len(found["train"]), "n_labels": len({label for _, label in found["test"]})}
    append_json_lines(rows, [key | facts | result | provenance() | {"command": command_of(key["model"])}])
    print(f"\n{', '.join(map(str, key.values()))}: accuracy {result['accuracy']:.3f}", flush=True)


def command_of(model: str) -> str:
    """What measures a row: a model that is not shipped is a run's folder with a name."""
    name = model.removesuffix(FROZEN)
    return "python studies/documents.py --texts TEXTS --frozen " + (
        "small" if name in ("small", "TF-IDF") else f'"{name}=RUN"')


def lengths_read(task: str, model: str, window: int | None) -> list[int]:
    """The lengths of a task's passages that a model makes vectors of. A Transformer reads what is longer than the rows
    of its training in windows alone. window: tokens of windows, if it reads so; a shorter passage has none."""
    config = lineartime.load_model(named_folder(model))[0].config
    longest = config.context if config.chunk_size is None and window is None else max(TASKS[task].lengths)
    return [each for each in TASKS[task].lengths if (window or 0) < each <= longest]


def tables(rows: Sequence[dict[str, Any]]) -> str:
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
        less = [[*side, label, *(difference_text(differences(by_seed(own, *side, length, score),
                                                             by_seed(own, *sides[0], length, score)))
                                 for length in task.lengths)]
                for score, label in MEASURES.items() for side in sides[1:]]
        lengths = [f"{length:,} tokens" for length in task.lengths]
        parts += [f"**{name.capitalize()}**, {own[0]['n_labels']} labels, {counts(own, 'n_train')} passages to train "
                  f"on, {counts(own, 'n_test')} to test; accuracy, mean and range of the seeds.",
                  markdown(["model", "how it reads", *lengths], accuracies)]
        if less:
            parts += ["Less the score of TF-IDF on the same passages, mean over the seeds with its 95 % interval; bold "
                      "where that leaves 0 out.", markdown(["model", "how it reads", "score", *lengths], less)]
    return "\n\n".join([*parts, *equal_sizes(rows)])


def equal_sizes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Differences of FLASH from the Transformer++ of its size, if both have rows."""
    first, second = EQUAL_SIZES
    if not {*EQUAL_SIZES} <= {row["model"] for row in rows}:
        return []
    less = []
    for name in TASKS:
        own = [row for row in rows if row["task"] == name]
        less += [[name, label, *(difference_text(differences(by_seed(own, first, "whole", length, score),
                                                             by_seed(own, second, reading, length, score)))
                                 for length, reading in SECOND_READS.items())]
                 for score, label in MEASURES.items()]
    lengths = [f"{length:,} tokens" + ("" if reading == "whole" else f", {reading}")
               for length, reading in SECOND_READS.items()]
    return [f"**{first.removesuffix(FROZEN)} less {second.removesuffix(FROZEN)}**, both frozen, on the same passages; "
            "windows are those of the Transformer++. Mean over the seeds with its 95 % interval.",
            markdown(["task", "score", *lengths], less)]


def by_seed(rows: Sequence[dict[str, Any]], model: str, reading: str, length: int,
            score: str = "accuracy") -> dict[int, float]:
    """A score of one task by the seed that has drawn its passages."""
    return {row["seed"]: row[score] for row in rows
            if (row["model"], row.get("reading", "whole"), row["tokens"]) == (model, reading, length)}


def counts(rows: Sequence[dict[str, Any]], field: str) -> str:
    """The least and the most of the seeds."""
    values = sorted({row[field] for row in rows})
    return f"{values[0]:,}" + (f" to {values[-1]:,}" if values[1:] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, help="the folder of pg19_medium, wiki40b_mini and c4_mini")
    parser.add_argument("--frozen", action="append", default=[], help="a causal model, or NAME=RUN; may be given again")
    parser.add_argument("--task", action="append", choices=TASKS, help="by default all; may be given again")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--into", type=Path, help="write the tables into this page")
    given = parser.parse_args()
    if given.texts:
        frozen = dict(each.split("=", 1) if "=" in each else (each, each) for each in given.frozen)
        measure(given.texts, {name + FROZEN: folder for name, folder in frozen.items()}, given.task or TASKS,
                given.rows)
    if given.into:
        fill_place(given.into, "documents", tables(read_json_lines(given.rows, dict, "a row")))


if __name__ == "__main__":
    sys.exit(exit_code(main))
