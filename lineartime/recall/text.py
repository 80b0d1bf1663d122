"""Recall inside real text: sentences that give somebody a number, anywhere in an article, and at the end the same
sentences again. What comes before the number is language; the number is in the row alone."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from lineartime.data.tokens import TokenStream, open_split
from lineartime.errors import DataError
from lineartime.recall.tasks import Draw, Rows, Task

WHAT, CHANCE = "numbers given to names inside articles", 0.1
LENGTH = 512
N_FACTS = (1, 2, 4, 8)
CONSONANTS, VOWELS, DIGITS = "bdfgklmnprstvz", "aeiou", "0123456789"
N_DIGITS = 4


def letters(choices: str, index_B: Tensor) -> list[str]:
    return [choices[i] for i in index_B.tolist()]


def invented(n: int, generator: torch.Generator) -> list[str]:
    """n different names that are no words, such as "Bavotu"."""
    names: dict[str, None] = {}
    while len(names) < n:
        syllables = [first + second for first, second in zip(
            letters(CONSONANTS, torch.randint(len(CONSONANTS), (3,), generator=generator)),
            letters(VOWELS, torch.randint(len(VOWELS), (3,), generator=generator)), strict=True)]
        names["".join(syllables).capitalize()] = None
    return list(names)


def text_task(data: Path, length: int = LENGTH) -> Task:
    """The task on prepared text: training rows are of its training split, test rows of its validation split. Raises as
    `open_split` does."""
    tokenizer = load_tokenizer(data / TOKENIZER_FILE)
    train, test = (drawn_from(open_split(data, split), tokenizer) for split in ("train", "validation"))
    return Task(train, WHAT, tokenizer.vocab_size, length, N_FACTS, CHANCE, len(DIGITS), test=test, language=True,
                end_of_document=tokenizer.end_of_document)


def drawn_from(stream: TokenStream, tokenizer: Tokenizer) -> Draw:
    """Rows of a split. The sentences stand between any two tokens of the text, in order of their places; the questions
    are the sentences again, in another order. The text of a row goes on into the next document; its end-of-document
    tokens are left out, so that the row is one. Digits stand apart; the answer is a digit's last token."""
    digit_ids = [tokenizer.encode(f" {digit}") for digit in DIGITS]
    full_stop = tokenizer.encode(".")

    def draw(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
        rows = [one_row(n_facts, length, generator) for _ in range(n_rows)]
        return Rows(*(torch.stack(part) for part in zip(*rows, strict=True)))

    def one_row(n_facts: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sentences: list[Tensor] = []
        ends: list[Tensor] = []  # of each sentence, the places of its answers in it
        for name in invented(n_facts, generator):
            ids, places = tokenizer.encode(f" The number of {name} is"), []
            for digit in torch.randint(len(DIGITS), (N_DIGITS,), generator=generator).tolist():
                ids += digit_ids[digit]
                places.append(len(ids) - 1)
            sentences.append(torch.tensor(ids + full_stop))
            ends.append(torch.tensor(places))
        n_text = length - 2 * sum(map(len, sentences))
        text = article(stream, n_text, generator)
        cuts = torch.randint(n_text + 1, (n_facts,), generator=generator).sort()[0].tolist()
        order = torch.randperm(n_facts, generator=generator).tolist()
        parts: list[Tensor] = []
        starts, at = [0] * n_facts, 0
        for i, (begin, end) in enumerate(zip([0, *cuts], [*cuts, n_text], strict=True)):
            parts.append(text[begin:end])
            at += end - begin
            if i < n_facts:
                starts[i] = at
                parts.append(sentences[i])
                at += len(sentences[i])
        asked = []
        for i in order:
            asked.append(at + ends[i] - 1)
            parts.append(sentences[i])
            at += len(sentences[i])
        answers = [sentences[i][ends[i]] for i in order]
        return torch.cat(parts), torch.cat(asked), torch.cat(answers), torch.cat([starts[i] + ends[i] for i in order])

    return draw


def article(stream: TokenStream, n_tokens: int, generator: torch.Generator) -> Tensor:
    """So many tokens of a split from a random place on. Raises DataError if it is too short, or the row."""
    n_read = n_tokens + n_tokens // 4 + 64
    if n_tokens < 1 or len(stream) < n_read:
        raise DataError("too few tokens for a row with its sentences", f"{stream.folder}, {stream.split}")
    start = int(torch.randint(len(stream) - n_read + 1, (1,), generator=generator))
    ids = stream.read(start, start + n_read)
    kept = ids[ids != stream.end_of_document][:n_tokens]
    if len(kept) < n_tokens:
        raise DataError("documents are too short", f"{stream.folder}, {stream.split}")
    return torch.from_numpy(np.ascontiguousarray(kept))
