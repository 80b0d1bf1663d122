"""Which row of which prepared text each row of training is, as with `--data books:0.7,wiki:0.3`.

After any number of rows each text has given its share to within one row. Which text comes next
depends on the shares alone; the order within a text is drawn for each epoch. Both are functions of
a row's number, so a run goes on at any step and on any number of ranks."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from math import gcd, lcm
from pathlib import Path

import numpy as np

from lineartime.base.settings import require

SEVERAL = re.compile(r"[^,]+:[0-9.]+(,[^,]+:[0-9.]+)*")
LONGEST_PERIOD = 100_000


def read_mixture(text: str) -> dict[str, int]:
    """The prepared folders that `text` names, in order, each with its number of rows in a period:
    one by its path, or several as `FOLDER:SHARE,FOLDER:SHARE`; the shares' sum stands for all rows.
    Raises UsageError for a share that is missing, not positive, or has more digits than a period of
    100,000 rows can keep, and for a folder named twice."""
    if not SEVERAL.fullmatch(text) or Path(text).is_dir():
        require("," not in text or Path(text).exists(), "several folders need shares", text, "such as a:0.7,b:0.3")
        return {text: 1}
    named = [word.strip().rpartition(":")[::2] for word in text.split(",")]
    require(len(dict(named)) == len(named), "a folder is named twice", text, "add its shares")
    require(all(re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", share) and float(share) > 0 for _, share in named),
            "a share is a positive number", text, "such as a:0.7,b:0.3")
    shares = [Fraction(share) for _, share in named]
    whole = [int(share * lcm(*(each.denominator for each in shares))) for share in shares]
    weights = {folder: n // gcd(*whole) for (folder, _), n in zip(named, whole, strict=True)}
    require(sum(weights.values()) <= LONGEST_PERIOD, "the shares have too many digits", text, "round them to three")
    return weights


@cache
def order_of(weights: tuple[int, ...]) -> list[tuple[int, int]]:
    """The text of each row of a period, and the number of the row among those of its text.

    Row n of a text with weight w of W may come from row n W / w on, and is due before row (n + 1) W
    / w. Of the texts whose next row may come, the one due first comes; so none is late."""
    total, given, order = sum(weights), [0] * len(weights), []
    for row in range(total):
        _, k = min((-(-(n + 1) * total // w), k) for k, (n, w) in enumerate(zip(given, weights, strict=True))
                   if n * total // w <= row)
        order.append((k, given[k]))
        given[k] += 1
    return order


def place_of(row: int, weights: tuple[int, ...]) -> tuple[int, int]:
    """The text of a row, counted from the first of training, and the row's number in its text."""
    period, at = divmod(row, sum(weights))
    k, number = order_of(weights)[at]
    return k, period * weights[k] + number


def places_of_step(n_rows: Sequence[int], weights: tuple[int, ...] = (1,), *, seed: int, step: int,
                   rows_per_step: int) -> list[tuple[int, int, int]]:
    """Text, epoch and number of each row of a training step, for texts that have so many rows. An
    epoch of a text takes each of its rows once, in its own order."""
    places = []
    for row in range(step * rows_per_step, (step + 1) * rows_per_step):
        k, number = place_of(row, weights)
        epoch, index = divmod(number, n_rows[k])
        places.append((k, epoch, int(orders(seed, n_rows[k])(epoch)[index])))
    return places


@lru_cache(maxsize=64)
def orders(seed: int, n_rows: int) -> Callable[[int], np.ndarray]:
    """A function that gives the order of a text's rows in an epoch, a permutation [n_rows]. It is
    made of raw Philox numbers, which numpy promises not to change, unlike its `permutation`."""
    @lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        key = np.array([seed % 2**64, epoch], np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(n_rows), kind="stable")

    return order
