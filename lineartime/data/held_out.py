"""Which documents are held out for validation."""

import numpy as np

from lineartime.data.units import ReadArguments, Slice, read_slice
from lineartime.errors import DataError

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
    n = sum(counts)
    cut, begin = n - int(n * share), 0
    for i, (one, n_here) in enumerate(zip(slices, counts, strict=True)):
        if cut < begin + n_here:
            after = read_slice(one._replace(skip=cut - begin, characters=LINE_SEARCH), how)
            line = cut + "".join(text for text, _ in after).find("\n") + 1
            skip = (line if line < n else cut) - begin
            train = [*slices[:i], one._replace(characters=skip, ends=True)] if skip else slices[:i]
            return train, [one._replace(skip=skip), *slices[i + 1:]]
        begin += n_here
    raise DataError("too little text to hold some out", slices[0].path, f"held_out = {share}")
