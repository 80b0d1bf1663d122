"""Synthetic tasks of recall: rows in which facts are written, and questions whose answers only the
row holds. And tasks of a state: words of a group, and at each letter what they multiply to.

A fact is a key and a value. A question is a key; the token that must come next is its value. All
other tokens are noise or structure, and are not scored. A draw depends on its generator alone."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.base.errors import DataError
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from lineartime.data.tokens import TokenStream, open_split

N_KEYS, N_VALUES, N_NOISE = 64, 16, 16  # tokens of each kind in the small vocabulary
FIRST_VALUE, FIRST_NOISE = N_KEYS, N_KEYS + N_VALUES
SEPARATOR = FIRST_NOISE + N_NOISE
FIRST_PAIR = SEPARATOR + 1  # a token for each key with each value, where a fact is one token
N_QUESTIONS = 32  # questions at the end of a row
ZOOLOGY_VOCABULARY = 8192


class Rows(NamedTuple):
    """Rows with questions: B rows of T tokens, Q questions in each."""

    ids_BT: Tensor
    asked_BQ: Tensor  # the place of each question; the answer is the token that should follow
    answer_BQ: Tensor


Draw = Callable[[int, int, int, torch.Generator], Rows]
"""Draws `Rows` from the number of rows, of facts in each and of tokens in each, and a generator."""


@dataclass(frozen=True)
class Task:
    """One task; `measure.learn` trains a model on it."""

    draw: Draw
    what: str
    vocab_size: int
    length: int  # tokens in a training row
    n_facts: tuple[int, ...]  # facts in a row; training begins with the fewest
    n_values: int
    distinct: bool = False  # whether no two facts of a row have the same value
    test: Draw | None = None  # draws test rows of another text than the training rows
    times: tuple[int, ...] = (1, 2, 4, 8)  # lengths of test rows, as multiples of the trained length
    test_rows: int = 6  # fewest test rows of a length
    least: int = 1  # fewest tokens of a row with the most facts and their questions
    answers: tuple[int, ...] | None = None
    """The tokens of which the most probable one is the answer; by default all."""
    end_of_document: int | None = None
    counted: str = "facts"  # what `n_facts` counts


def commonest(n_values: int, n: int) -> float:
    """The share of the most frequent of a row's n values, the mean of 4,000 rows: the accuracy of a
    model that knows the values and not their keys."""
    draws = torch.randint(n_values, (4000, n), generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.one_hot(draws, n_values).sum(1).amax(1).double().mean().item() / n


def noise(n_rows: int, length: int, generator: torch.Generator) -> Tensor:
    return FIRST_NOISE + torch.randint(N_NOISE, (n_rows, length), generator=generator)


def choose(n_rows: int, n_of: int, n: int, generator: torch.Generator) -> Tensor:
    """n of the numbers below n_of for each row, in random order, none twice: `[B, n]`."""
    return torch.rand(n_rows, n_of, generator=generator).argsort(1)[:, :n]


def draw_facts(n_rows: int, n_facts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Different keys, and a value for each: `[B, n]` tokens each."""
    keys_BN = choose(n_rows, N_KEYS, n_facts, generator)
    return keys_BN, FIRST_VALUE + torch.randint(N_VALUES, (n_rows, n_facts), generator=generator)


def ask(ids_BT: Tensor, keys_BN: Tensor, values_BN: Tensor, generator: torch.Generator) -> Rows:
    """Write random keys at the ends of rows as questions."""
    n_rows, length = ids_BT.shape
    picked_BQ = torch.randint(keys_BN.shape[1], (n_rows, N_QUESTIONS), generator=generator)
    ids_BT[:, -N_QUESTIONS:] = keys_BN.gather(1, picked_BQ)
    asked_BQ = torch.arange(length - N_QUESTIONS, length).expand(n_rows, -1)
    return Rows(ids_BT, asked_BQ, values_BN.gather(1, picked_BQ))


def pairs(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
    """Multi-query associative recall: facts of two tokens first, then noise, then questions."""
    ids_BT = noise(n_rows, length, generator)
    keys_BN, values_BN = draw_facts(n_rows, n_facts, generator)
    ids_BT[:, 0 : 2 * n_facts : 2], ids_BT[:, 1 : 2 * n_facts : 2] = keys_BN, values_BN
    return ask(ids_BT, keys_BN, values_BN, generator)


def joint(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
    """`pairs` whose fact is one token: a model need not look at a token's neighbour."""
    ids_BT = noise(n_rows, length, generator)
    keys_BN, values_BN = draw_facts(n_rows, n_facts, generator)
    ids_BT[:, :n_facts] = FIRST_PAIR + N_VALUES * keys_BN + values_BN - FIRST_VALUE
    return ask(ids_BT, keys_BN, values_BN, generator)


def needle(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
    """Facts of two tokens anywhere in noise but in the last 64 tokens, questions at the end."""
    ids_BT = noise(n_rows, length, generator)
    keys_BN, values_BN = draw_facts(n_rows, n_facts, generator)
    place_BN = 2 * choose(n_rows, (length - 2 * N_QUESTIONS) // 2, n_facts, generator)
    ids_BT.scatter_(1, place_BN, keys_BN).scatter_(1, place_BN + 1, values_BN)
    return ask(ids_BT, keys_BN, values_BN, generator)


def induction(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
    """A string of different symbols anywhere in noise, not at a fixed place, and at the end."""
    ids_BT, first = noise(n_rows, length, generator), length - n_facts - 1
    string_BN = choose(n_rows, N_KEYS, n_facts + 1, generator)
    start_B1 = torch.randint(first - n_facts, (n_rows, 1), generator=generator)
    ids_BT[:, first:] = string_BN
    ids_BT.scatter_(1, start_B1 + torch.arange(n_facts + 1), string_BN)
    return Rows(ids_BT, torch.arange(first, first + n_facts).expand(n_rows, -1), string_BN[:, 1:])


def copying(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
    """A string whose symbols recur, noise, a separator, and the string again."""
    ids_BT = noise(n_rows, length, generator)
    string_BN = FIRST_VALUE + torch.randint(N_VALUES, (n_rows, n_facts), generator=generator)
    ids_BT[:, 0] = ids_BT[:, length - n_facts - 1] = SEPARATOR
    ids_BT[:, 1 : n_facts + 1] = ids_BT[:, length - n_facts :] = string_BN
    return Rows(ids_BT, torch.arange(length - n_facts - 1, length - 1).expand(n_rows, -1), string_BN)


def zoology(n_rows: int, n_facts: int, length: int, generator: torch.Generator) -> Rows:
    """Multi-query associative recall as Zoology defines it (Arora et al. 2023): the vocabulary's
    lower half is keys, its upper half values; the facts first; every key again, 2 g tokens after
    them, g drawn without replacement, p(g) ~ (g + 1)^-0.99; else random tokens. Needs 4 n <= T."""
    half = ZOOLOGY_VOCABULARY // 2
    keys_BN = 1 + choose(n_rows, half - 1, n_facts, generator)
    values_BN = half + choose(n_rows, half, n_facts, generator)
    ids_BT = torch.randint(ZOOLOGY_VOCABULARY, (n_rows, length), generator=generator)
    ids_BT[:, 0 : 2 * n_facts : 2], ids_BT[:, 1 : 2 * n_facts : 2] = keys_BN, values_BN
    gaps_G = torch.arange(1, (length - 2 * n_facts) // 2 + 1).double() ** -0.99
    gap_BN = torch.multinomial(gaps_G.expand(n_rows, -1), n_facts, generator=generator)
    asked_BN = 2 * n_facts + 2 * gap_BN
    return Rows(ids_BT.scatter_(1, asked_BN, keys_BN), asked_BN, values_BN)


def word(after_LP: Tensor, n_rows: int, n_asked: int, length: int, generator: torch.Generator,
         ends: bool = False) -> Rows:
    """Random words of letters that permute things. At each of a word's first `n_asked` letters, or
    the last, a question: the number of the permutation that the word has made so far. after_LP: the
    permutation that a letter makes of each one."""
    ids_BT = torch.randint(len(after_LP), (n_rows, length), generator=generator)
    made_BT = torch.zeros_like(ids_BT)
    for t in range(length):
        made_BT[:, t] = after_LP[ids_BT[:, t], made_BT[:, t - 1]]
    asked_N = torch.arange(length)[-n_asked:] if ends else torch.arange(n_asked)
    return Rows(ids_BT, asked_N.expand(n_rows, -1), made_BT[:, asked_N])


def word_task(letters: Sequence[Sequence[int]], what: str) -> Task:
    """Words of up to 40 letters, each a permutation, asked in longer ones too."""
    every = list(itertools.permutations(range(len(letters[0]))))
    number, n = {each: i for i, each in enumerate(every)}, len(every)
    after_LP = torch.tensor([[number[tuple(letter[i] for i in each)] for each in every] for letter in letters])
    return Task(partial(word, after_LP), what, n, WORD[-1], WORD, n, test=partial(word, after_LP, ends=True),
                times=(1, 2, 4, 7), test_rows=48, least=WORD[-1], counted="last letters")


SMALL = (4, 8, 16, 32)
WORD = (5, 10, 20, 40)  # letters of training words, the shortest first; test words are asked at as many last ones
TASKS = {
    "pairs": Task(pairs, "key-value pairs of two tokens at the beginning", FIRST_PAIR, 128, SMALL, N_VALUES,
                  least=2 * SMALL[-1] + N_QUESTIONS),
    "joint": Task(joint, "key-value pairs of one token at the beginning", FIRST_PAIR + N_KEYS * N_VALUES, 128,
                  (*SMALL, 64), N_VALUES, least=64 + N_QUESTIONS),
    "needle": Task(needle, "key-value pairs anywhere", FIRST_PAIR, 256, SMALL, N_VALUES,
                   least=2 * SMALL[-1] + 2 * N_QUESTIONS),
    "induction": Task(induction, "a repeated string of different symbols", FIRST_PAIR, 128, SMALL, N_KEYS,
                      distinct=True, least=2 * SMALL[-1] + 2),
    "copying": Task(copying, "a repeated string whose symbols recur", FIRST_PAIR, 128, SMALL, N_VALUES,
                    least=2 * SMALL[-1] + 2),
    "zoology": Task(zoology, "multi-query associative recall in Zoology's form", ZOOLOGY_VOCABULARY, 128, SMALL,
                    ZOOLOGY_VOCABULARY // 2, distinct=True, least=4 * SMALL[-1]),
    "parity": word_task([(0, 1), (1, 0)], "whether so far the number of ones is odd"),
    "s5": word_task([(1, 0, 2, 3, 4), (1, 2, 3, 4, 0)], "the order that swaps and turns have given five things"),
}

# Recall inside real text: names that are no words, each with a digit behind it, anywhere in an
# article, and at the end the names again. What stands around a name is language; its digit is in
# the row alone.
CONSONANTS, VOWELS, DIGITS = "bdfgklmnprstvz", "aeiou", "0123456789"
TEXT, ONCE = "text", "once"
FORMS = {TEXT: "digits behind names inside articles", ONCE: "digits behind names inside articles, each asked once"}
"""Tasks in text, each with what stands in a table's heading."""


def invented(n: int, generator: torch.Generator) -> list[str]:
    """n names that are no words, such as "Bav"; no two end alike."""
    ends = torch.randperm(len(VOWELS) * len(CONSONANTS), generator=generator)[:n].tolist()
    starts = torch.randint(len(CONSONANTS), (n,), generator=generator).tolist()
    return [CONSONANTS[start].upper() + VOWELS[end % len(VOWELS)] + CONSONANTS[end // len(VOWELS)]
            for start, end in zip(starts, ends, strict=True)]


def text_task(data: Path, name: str = TEXT) -> Task:
    """The task on prepared text: training rows are of its training split, test rows of its
    validation split. name: of `FORMS`. Raises as `open_split` does."""
    tokenizer = load_tokenizer(data / TOKENIZER_FILE)
    digits = tuple(tokenizer.encode(digit)[-1] for digit in DIGITS)
    train, test = (partial(draw_text, open_split(data, split), tokenizer, digits, name == ONCE)
                   for split in ("train", "validation"))
    return Task(train, FORMS[name], tokenizer.vocab_size, 512, SMALL, len(DIGITS), test=test, test_rows=48,
                answers=digits, end_of_document=tokenizer.end_of_document)


def draw_text(stream: TokenStream, tokenizer: Tokenizer, digits: Sequence[int], once: bool, n_rows: int, n_facts: int,
              length: int, generator: torch.Generator) -> Rows:
    """Rows of a split. Facts, such as " Bav7", stand between any two tokens of the text; the
    questions are keys without a value, each once or drawn at random. The text of a row goes on into
    the next document; end-of-document tokens are left out, so that the row is one document. digits:
    the token of each digit."""
    def one_row() -> tuple[Tensor, Tensor, Tensor]:
        keys = [tokenizer.encode(f" {name}") for name in invented(n_facts, generator)]
        value_N = torch.tensor(digits)[torch.randint(len(digits), (n_facts,), generator=generator)]
        asked_Q = (torch.randperm(n_facts, generator=generator) if once else
                   torch.randint(n_facts, (N_QUESTIONS,), generator=generator))
        facts = [torch.tensor([*key, value]) for key, value in zip(keys, value_N.tolist(), strict=True)]
        questions = [torch.tensor(keys[i]) for i in asked_Q.tolist()]
        n_text = length - sum(map(len, [*facts, *questions]))
        text = article(stream, n_text, generator)
        head, *rest = torch.tensor_split(text, torch.randint(n_text + 1, (n_facts,), generator=generator).sort()[0])
        written = [part for fact_and_text in zip(facts, rest, strict=True) for part in fact_and_text]
        place_Q = length - 1 - torch.tensor([0, *map(len, questions[:0:-1])]).cumsum(0).flip(0)
        return torch.cat([head, *written, *questions]), place_Q, value_N[asked_Q]

    return Rows(*(torch.stack(part) for part in zip(*(one_row() for _ in range(n_rows)), strict=True)))


def article(stream: TokenStream, n_tokens: int, generator: torch.Generator) -> Tensor:
    """So many tokens of a split from a random place on. Raises DataError if one is too short."""
    n_read = n_tokens + n_tokens // 4 + 64
    if n_tokens < 1 or len(stream) < n_read:
        raise DataError("too few tokens for a row with its facts", f"{stream.folder}, {stream.split}")
    start = int(torch.randint(len(stream) - n_read + 1, (1,), generator=generator))
    ids = stream.read(start, start + n_read)
    kept = ids[ids != stream.end_of_document][:n_tokens]
    if len(kept) < n_tokens:
        raise DataError("documents are too short", f"{stream.folder}, {stream.split}")
    return torch.from_numpy(np.ascontiguousarray(kept))
