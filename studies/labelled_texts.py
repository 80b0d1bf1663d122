"""Texts with labels, and passages of them, for `documents.py`.

Passages of one task and seed begin at the same places at every length, so the result of a model that cuts documents at
N tokens is that of N tokens. Books, articles and pages of the test are none of those of the training. A seed draws
them and the places, the same for all models. Topics and genres were written down by hand (studies/labels)."""

import csv
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pyarrow import parquet

from lineartime.data.tokenizer import Tokenizer
from lineartime.settings import require


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


def below(texts: Path | None, folder: str) -> Path:
    """A folder among the texts. Raises UsageError where none are given."""
    require(texts is not None, "no folder of texts is given", f"it has {folder}", "give --texts")
    return texts / folder


def books(texts: Path | None, splits: Sequence[str] = ("train", "validation", "test")) -> list[dict[str, Any]]:
    return [book for split in splits
            for book in parquet.read_table(below(texts, "pg19_medium") / f"{split}.parquet").to_pylist()]


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
    topic, folder, found = labels_of("topics.csv"), below(texts, "wiki40b_mini"), []
    titles = [json.loads(line) for line in (folder / "articles.jsonl").read_text(encoding="utf-8").splitlines()]
    for split in ("train", "validation", "test"):
        articles = json_lines(folder / "en" / f"{split}.jsonl.gz")
        for article, line in zip((each for each in titles if each["split"] == split), articles, strict=True):
            plain = re.sub(r"_(START_ARTICLE|START_SECTION|START_PARAGRAPH)_|_NEWLINE_", "\n", line["text"])
            body = plain.split("\n", 3)[-1]  # begins with the title
            found.append(Source(topic[article["title"]], article["title"], body))
    return found


def pages(texts: Path) -> list[Source]:
    """Web pages, and the collection that each is from; but for one of twelve pages."""
    lines = (line for split in ("train", "validation")
             for line in json_lines(below(texts, "c4_mini") / "en" / f"c4-{split}.00000-of-00001.json.gz"))
    found = [Source("/".join(page["url"].split("/")[3:5]), page["url"], page["text"]) for page in lines]
    return [each for each in found if each.label != "github/opensource.guide"]


def json_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def labels_of(name: str) -> dict[str, str]:
    with (Path(__file__).parent / "labels" / name).open(encoding="utf-8", newline="") as file:
        return {key: label for key, label in [*csv.reader(file)][1:]}


TASKS = {"author": Task(authors, (512, 2048, 8192, 32768), 4, 8, True),
         "genre": Task(genres, (512, 2048, 8192, 32768), 2, 4, False),
         "topic": Task(topics, (512, 2048, 8192), 4, 4, True),
         "source": Task(pages, (512,), 1, 1, True)}
Passages = dict[str, list[tuple[str, str]]]
"""By split, texts and their labels."""


def passages(task: Task, sources: Sequence[Source], length: int, seed: int, tokenizer: Tokenizer) -> Passages:
    """Of each text passages of `length` tokens, or its end: a sixth of the groups is for validation, a sixth for the
    test."""
    split_of: dict[str, str] = {}
    for label in sorted({each.label for each in sources}) if task.by_label else [None]:
        groups = sorted({each.group for each in sources if label in (None, each.label)})
        n = max(len(groups) // 6, 1)
        for i, at in enumerate(np.random.default_rng([seed, len(groups)]).permutation(len(groups))):
            split_of[groups[at]] = "test" if i < n else "validation" if i < 2 * n else "train"
    found: Passages = {"train": [], "validation": [], "test": []}
    for number, each in enumerate(sources):
        split = split_of[each.group]
        n = {"train": task.n_train, "validation": 1, "test": task.n_test}[split]
        # Enough characters for the longest passage, at places that the length does not change.
        last = max(len(each.text) - 5 * max(task.lengths), 1)
        for start in np.random.default_rng([seed, number]).integers(last, size=n):
            ids = tokenizer.encode(each.text[start : start + 8 * length])[:length]
            found[split].append((tokenizer.decode(ids), each.label))
    return found
