"""Which documents are held out for validation."""

import itertools
from bisect import bisect_left

import numpy as np

from lineartime.base.errors import DataError
from lineartime.data.units import ReadArguments, Slice, read_slice

LINE_SEARCH = 1 << 16
"""A single document is cut at a line that begins within this many characters."""


def held_out_documents(bytes_D: np.ndarray, hashes_D: np.ndarray, share: float) -> np.ndarray:
    """Which documents, in bool `[D]`, are held out: at equal distances, with at least `share` of the bytes; at least
    one, and not all. Of equal documents the first is chosen or not, and the others go with it, unless all are equal."""
    if len({*hashes_D.tolist()}) == 1:
        hashes_D = np.arange(len(hashes_D))
    _, firsts, groups_D = np.unique(hashes_D, return_index=True, return_inverse=True)
    groups_U = np.argsort(firsts)  # groups of equal documents, in the order of their first ones
    bytes_U = np.bincount(groups_D, bytes_D)[groups_U]
    n, wanted = len(groups_U), share * bytes_U.sum()
    k = min(max(1, round(n * share)), n - 1)
    while True:
        chosen = (2 * np.arange(k) + 1) * n // (2 * k)
        if k >= n - 1 or bytes_U[chosen].sum() >= wanted * (1 - 1e-9):
            return np.isin(groups_D, groups_U[chosen])
        k = min(k + 1 + k // 50, n - 1)


def cut_document(slices: list[Slice], share: float, how: ReadArguments) -> tuple[list[Slice], list[Slice]]:
    """The slices of the only document, of which the end is held out: those of train and of validation. Raises DataError
    for too little text."""
    counts = [sum(len(text) for text, _ in read_slice(one, how)) for one in slices]
    begins = [0, *itertools.accumulate(counts)]
    n = begins[-1]
    cut = n - int(n * share)
    if cut == n:
        raise DataError("too little text to hold some out", slices[0].path, f"held_out = {share}")
    # The next line may begin in a later slice.
    after = (text for one in _cut_at(cut, slices, begins)[1] for text, _ in read_slice(one, how))
    text = ""
    while len(text) < LINE_SEARCH and (more := next(after, "")):
        text += more
    line = cut + text[:LINE_SEARCH].find("\n") + 1
    return _cut_at(line if 2 * (n - line) >= n - cut else cut, slices, begins)


def _cut_at(at: int, slices: list[Slice], begins: list[int]) -> tuple[list[Slice], list[Slice]]:
    """The slices before the character `at`, and those from it on; the last one before it is not empty. begins: the
    character at which each begins, and at which the last one ends."""
    i = bisect_left(begins, at) - 1
    skip = at - begins[i]
    return ([*slices[:i], slices[i]._replace(characters=skip, ends=True)],
            [slices[i]._replace(skip=skip)] * (at < begins[i + 1]) + slices[i + 1:])
