"""Passages of books in which names that are no words stand with a digit, and are asked again later.

    python -m studies.plant DATA TOKENS SHORTEST LONGEST LEAST MOST OUT      DATA: prepared books; OUT: a train.jsonl

Its passages have SHORTEST to LONGEST tokens. A name is told every LEAST to MOST words, and LEAST is 1.2 or more; with 0
and 0 there are no names. A model that learned from such passages is asked recall in text on other books and digits."""

import json
import re
import sys
from pathlib import Path

import torch

from benchmarks.recall.tasks import N_QUESTIONS, article, invented
from lineartime.atomic_io import write_atomically
from lineartime.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from lineartime.data.tokens import open_split


def between(least: float, most: float, generator: torch.Generator) -> float:
    """A random number whose logarithm is uniform."""
    return least * (most / least) ** torch.rand((), generator=generator).item()


def planted(text: str, least: float, most: float, generator: torch.Generator) -> str:
    """The text with facts such as " Bav7" before random words, one for `least` to `most` of them, and 32 more at its
    end. There are 4 to 64 different ones, so that most are repeated, near or far from where they stood before."""
    words = [word.start() for word in re.finditer(r" (?=\w)", text)]
    names = invented(round(between(4, 64, generator)), generator)
    facts = [f" {name}{int(torch.randint(10, (), generator=generator))}" for name in names]
    n = 1 + int(len(words) / between(least, most, generator))
    told = [facts[i] for i in torch.randint(len(facts), (n,), generator=generator).tolist()]
    asked = [told[i] for i in torch.randint(n, (N_QUESTIONS,), generator=generator).tolist()]
    cuts = sorted(words[i] for i in torch.randperm(len(words), generator=generator)[:n].tolist())
    parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]
    return "".join([parts[0], *(fact + part for fact, part in zip(told, parts[1:], strict=True)), *asked])


def main(data: Path, enough: int, shortest: int, longest: int, least: float, most: float, out: Path) -> None:
    """Write passages of the training books, `enough` tokens in all; `shortest` and `longest` do not count names."""
    stream, tokenizer = open_split(data, "train"), load_tokenizer(data / TOKENIZER_FILE)
    generator, lines, n_tokens = torch.Generator().manual_seed(46), [], 0
    while n_tokens < enough:
        ids = article(stream, round(between(shortest, longest, generator)), generator)
        plain = tokenizer.decode(ids.tolist()).replace("\ufffd", "")
        text = planted(plain, least, most, generator) if most else plain
        lines.append(json.dumps({"text": text}) + "\n")
        n_tokens += len(tokenizer.encode(text))
    write_atomically(out, "".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *map(float, sys.argv[5:7]), Path(sys.argv[7]))
