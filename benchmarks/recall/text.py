"""Recall inside real text: names that are no words, each with a digit behind it, anywhere in an article, and at the end
the names again. What stands around a name is language; its digit is in the row alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.recall.tasks import N_QUESTIONS, Draw, Rows, Task
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from lineartime.data.tokens import TokenStream, open_split
from lineartime.errors import DataError

WHAT, CHANCE = "digits behind names inside articles", 0.1
LENGTH = 512
N_FACTS = (4, 8, 16, 32)
CONSONANTS, VOWELS, DIGITS = "bdfgklmnprstvz", "aeiou", "0123456789"


def invented(n: int, generator: torch.Generator) -> list[str]:
    """n names that are no words, such as "Bav"; no two end alike."""
    ends = torch.randperm(len(VOWELS) * len(CONSONANTS), generator=generator)[:n].tolist()
    starts = torch.randint(len(CONSONANTS), (n,), generator=generator).tolist()
    return [CONSONANTS[start].upper() + VOWELS[end % len(VOWELS)] + CONSONANTS[end // len(VOWELS)]
            for start, end in zip(starts, ends, strict=True)]


def text_task(data: Path, length: int = LENGTH) -> Task:
    """The task on prepared text: training rows are of its training split, test rows of its validation split. Raises as
    `open_split` does."""
    tokenizer = load_tokenizer(data / TOKENIZER_FILE)
    digits = tuple(tokenizer.encode(digit)[-1] for digit in DIGITS)
    train, test = (drawn_from(open_split(data, split), tokenizer, digits) for split in ("train", "validation"))
    return Task(train, WHAT, tokenizer.vocab_size, length, N_FACTS, CHANCE, len(DIGITS), test=test, answers=digits,
                end_of_document=tokenizer.end_of_document)


def drawn_from(stream: TokenStream, tokenizer: Tokenizer, digits: Sequence[int]) -> Draw:
    """Rows of a split. Facts, such as " Bav7", stand between any two tokens of the text, in order of their places; the
    questions are names without a digit. The text of a row goes on into the next document; its end-of-document tokens
    are left out, so that the row is one. digits: the token of each."""

    def draw(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
        rows = [one_row(n_facts, length, generator) for _ in range(n_rows)]
        return Rows(*(torch.stack(part) for part in zip(*rows, strict=True)))

    def one_row(n_facts: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        names = [tokenizer.encode(f" {name}") for name in invented(n_facts, generator)]
        value_N = torch.tensor(digits)[torch.randint(len(digits), (n_facts,), generator=generator)]
        asked_Q = torch.randint(n_facts, (N_QUESTIONS,), generator=generator)
        facts = [[*name, value] for name, value in zip(names, value_N.tolist(), strict=True)]
        questions = [names[i] for i in asked_Q.tolist()]
        n_text = length - sum(map(len, [*facts, *questions]))
        text = article(stream, n_text, generator)
        cut_N = torch.randint(n_text + 1, (n_facts,), generator=generator).sort()[0]
        head, *rest = torch.tensor_split(text, cut_N)
        written = [part for fact, after in zip(facts, rest, strict=True) for part in (torch.tensor(fact), after)]
        ids_T = torch.cat([head, *written, *map(torch.tensor, questions)])
        place_N = cut_N + torch.tensor([len(fact) for fact in facts]).cumsum(0) - 1
        place_Q = length - 1 - (torch.tensor([0, *map(len, questions[:0:-1])]).cumsum(0)).flip(0)
        return ids_T, place_Q, value_N[asked_Q], place_N[asked_Q]

    return draw


def article(stream: TokenStream, n_tokens: int, generator: torch.Generator) -> Tensor:
    """So many tokens of a split from a random place on. Raises DataError if it is too short, or the row."""
    n_read = n_tokens + n_tokens // 4 + 64
    if n_tokens < 1 or len(stream) < n_read:
        raise DataError("too few tokens for a row with its facts", f"{stream.folder}, {stream.split}")
    start = int(torch.randint(len(stream) - n_read + 1, (1,), generator=generator))
    ids = stream.read(start, start + n_read)
    kept = ids[ids != stream.end_of_document][:n_tokens]
    if len(kept) < n_tokens:
        raise DataError("documents are too short", f"{stream.folder}, {stream.split}")
    return torch.from_numpy(np.ascontiguousarray(kept))
