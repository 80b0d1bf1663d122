"""Which documents are held out for validation."""

from typing import NamedTuple

import numpy as np

from lineartime.data.sources import SPLITS
from lineartime.data.units import CheckedFile, ReadArguments, Slice, read_slice
from lineartime.errors import DataError

LINE_SEARCH = 1 << 16
"""A single document is cut at a line that begins within this many characters."""


class Spans(NamedTuple):
    """The text of a split: documents [first, stop), ... of the files of the split `source`."""

    source: str
    spans: list[tuple[int, int]]


def divide_documents(files: list[CheckedFile], held_out: float | None, hashes: list[np.ndarray]) -> dict[str, Spans]:
    """The documents of each split. Of several of train at least the share `held_out` of the characters becomes
    validation, and equal documents stay on one side. hashes: of the documents of each file of train, if some are held
    out. Raises DataError for a split that would be empty."""
    parts = {}
    for split in SPLITS:
        own = [file for file in files if file.split == split]
        n_documents = sum(file.documents for file in own)
        if own and not n_documents:
            what = "nothing but white space" if any(file.blank for file in own) else "no documents"
            raise DataError(what, own[0].path, f"the {split} split would be empty")
        if own:
            parts[split] = Spans(split, [(0, n_documents)])
    if held_out is None:
        return parts
    n_train = parts["train"].spans[0][1]
    if n_train == 1:  # it is cut, see `cut_document`
        return parts | {"validation": Spans("validation", [(0, 1)])}
    held = spread_documents([file for file in files if file.split == "train" and file.documents], held_out,
                            np.concatenate(hashes))
    between = zip([0, *(i + 1 for i in held)], [*held, n_train], strict=True)
    divided = {"train": Spans("train", [span for span in between if span[0] < span[1]]),
               "validation": Spans("train", [(i, i + 1) for i in held])}
    return parts | divided


def spread_documents(files: list[CheckedFile], share: float, hashes_D: np.ndarray) -> list[int]:
    """The numbers of documents that hold at least `share` of the characters, at equal distances over all files; at
    least one, and not all. A document counts with the mean of its file, which is exact for a `.txt`.

    Of equal documents the first is chosen or not, and the others go with it, unless all are equal."""
    means, counts = [sum(file.characters) / file.documents for file in files], [file.documents for file in files]
    if len({*hashes_D.tolist()}) == 1:
        hashes_D = np.arange(len(hashes_D))
    _, firsts, groups_D = np.unique(hashes_D, return_index=True, return_inverse=True)
    groups_U = np.argsort(firsts)  # groups of equal documents, in the order of their first ones
    characters_U = np.bincount(groups_D, np.repeat(means, counts))[groups_U]
    n, wanted = len(groups_U), share * characters_U.sum()
    k = min(max(1, round(n * share)), n - 1)
    while True:
        chosen = (2 * np.arange(k) + 1) * n // (2 * k)
        if k >= n - 1 or characters_U[chosen].sum() >= wanted * (1 - 1e-9):
            return np.flatnonzero(np.isin(groups_D, groups_U[chosen])).tolist()
        k = min(k + 1 + k // 50, n - 1)


def cut_document(whole: CheckedFile, slices: list[Slice], held_out: float, how: ReadArguments
                 ) -> tuple[list[Slice], list[Slice]]:
    """The slices of a file of one document, of which the end is held out: those of train and of validation. Raises
    DataError for too little text."""
    n = sum(whole.characters)
    cut = n - int(n * held_out)
    counts = whole.characters if len(whole.characters) == len(slices) else [n]
    slices = slices if len(counts) == len(slices) else [Slice(whole.path, 0, whole.bytes)]
    begin, train = 0, []
    for i, (one, n_here) in enumerate(zip(slices, counts, strict=True)):
        if cut < begin + n_here:
            after = read_slice(one._replace(skip=cut - begin, characters=LINE_SEARCH), how)
            line = cut + "".join(text for text, _ in after).find("\n") + 1
            skip = (line if line < n else cut) - begin
            train += [one._replace(characters=skip, ends=True)] if skip else []
            return train, [one._replace(skip=skip), *slices[i + 1:]]
        train.append(one)
        begin += n_here
    raise DataError("too little text to hold some out", whole.path, f"held_out = {held_out}")
