"""Passages of books in which names that are no words stand with a digit, and are asked again later.

    python -m studies.plant DATA TOKENS SHORTEST LONGEST LEAST MOST OUT
    python -m studies.plant DATA TOKENS SHORTEST ROW LATEST OUT

DATA is prepared books, OUT a train.jsonl. The first writes passages of SHORTEST to LONGEST tokens,
names not counted, with a name every LEAST to MOST words (1.2 or more; 0 and 0: no names). The
second writes passages that fill rows of ROW tokens, so that no row cuts a name from its question,
in which each name is told once, and asked once at the end. LATEST is 0, or the largest share of a
passage that comes before its names, which then stand near each other, behind MARK."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.recall.tasks import N_QUESTIONS, article, invented
from lineartime.base.files import write_atomically
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from lineartime.data.tokens import TokenStream, open_split

NAMES = 4, 64  # the least and the most of a passage
MARK = " [names]"  # before names, so that a model writes none without it


def between(least: float, most: float, generator: torch.Generator) -> float:
    """A random number whose logarithm is uniform."""
    return least * (most / least) ** torch.rand((), generator=generator).item()


def facts(generator: torch.Generator) -> list[str]:
    """Names with their digits, such as " Bav7"."""
    names = invented(round(between(*NAMES, generator)), generator)
    return [f" {name}{int(torch.randint(10, (), generator=generator))}" for name in names]


def placed(text: str, told: Sequence[str], asked: Sequence[str], generator: torch.Generator, lead: float = 0) -> str:
    """The text with each of `told` before a word, at random places, or among the next words behind
    a share `lead` of it, and `asked` at its end."""
    words = [word.start() for word in re.finditer(r" (?=\w)", text)]
    words = words[int(lead * len(words)):][: 3 * len(told)] if lead else words
    cuts = sorted(words[i] for i in torch.randperm(len(words), generator=generator)[: len(told)].tolist())
    parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]
    return "".join([parts[0], *(fact + part for fact, part in zip(told, parts[1:], strict=True)), *asked])


def planted(text: str, least: float, most: float, generator: torch.Generator) -> str:
    """The text with a fact for `least` to `most` words, most repeated, and 32 more at its end."""
    known, n_words = facts(generator), len(re.findall(r" (?=\w)", text))
    n = 1 + int(n_words / between(least, most, generator))
    told = [known[i] for i in torch.randint(len(known), (n,), generator=generator).tolist()]
    asked = [told[i] for i in torch.randint(n, (N_QUESTIONS,), generator=generator).tolist()]
    return placed(text, told, asked, generator)


def filled(stream: TokenStream, tokenizer: Tokenizer, n_tokens: int, latest: float, generator: torch.Generator) -> str:
    """A passage of exactly so many tokens, in which each fact is told once and asked once."""
    while True:
        known = facts(generator)
        lead = latest and latest * (0.2 + 0.8 * torch.rand((), generator=generator).item())
        asked = [known[i] for i in torch.randperm(len(known), generator=generator).tolist()]
        n_text = n_tokens - 2 * sum(len(tokenizer.encode(fact)) for fact in known)
        if latest:
            known[0], asked[0] = MARK + known[0], MARK + asked[0]
        for _ in range(12):  # text may have other tokens around a name than without it
            text = placed(plain(stream, tokenizer, n_text, generator).strip(), known, asked, generator, lead)
            n_more = n_tokens - len(tokenizer.encode(text))
            if not n_more:
                return text
            n_text += n_more


def plain(stream: TokenStream, tokenizer: Tokenizer, n_tokens: int, generator: torch.Generator) -> str:
    return tokenizer.decode(article(stream, n_tokens, generator).tolist()).replace("\ufffd", "")


def passages(stream: TokenStream, tokenizer: Tokenizer, numbers: Sequence[str],
             generator: torch.Generator) -> Iterator[str]:
    """Passages without end, for the NUMBERS of the command line."""
    if len(numbers) == 3:
        shortest, row, latest = int(numbers[0]), int(numbers[1]), float(numbers[2])
        room = row
        while True:  # a passage ends with the token of a document's end
            n = round(between(shortest, row, generator))
            n = n if room - n >= shortest else room
            yield filled(stream, tokenizer, n - 1, latest, generator)
            room = room - n or row
    (shortest, longest), (least, most) = map(int, numbers[:2]), map(float, numbers[2:])
    while True:
        text = plain(stream, tokenizer, round(between(shortest, longest, generator)), generator)
        yield planted(text, least, most, generator) if most else text


def main(data: Path, enough: int, numbers: Sequence[str], out: Path) -> None:
    """Write passages of the training books, `enough` tokens in all."""
    stream, tokenizer = open_split(data, "train"), load_tokenizer(data / TOKENIZER_FILE)
    lines, n_tokens = [], 0
    for text in passages(stream, tokenizer, numbers, torch.Generator().manual_seed(46)):
        lines.append(json.dumps({"text": text}) + "\n")
        n_tokens += len(tokenizer.encode(text)) + 1
        if n_tokens >= enough:
            break
    write_atomically(out, "".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:-1], Path(sys.argv[-1]))
