"""Slices of files that can be read on their own, and the documents that are held out.

Every file is read to its end before anything is written, so that its faults are found first. That counts its documents
and finds its slices, which processes then tokenise."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lineartime.data.read_text import Place, read_pieces
from lineartime.data.splits import SPLITS
from lineartime.errors import DataError

LINE_SEARCH = 1 << 16
"""A single document is cut at a line that begins within this many characters."""
Reading = dict[str, Any]
"""The named arguments of `read_pieces`: field, max_line_bytes, task."""


class Slice(NamedTuple):
    """Consecutive characters of a file's documents, and where their reading begins."""

    path: str
    at: int
    line: int
    """The fields of a `Place`."""
    characters: int
    in_word: bool
    """Whether it goes on with a word of the slice before."""
    skip: int = 0
    """Characters at its place that belong to the slice before."""
    ends: bool = False
    """Whether its document is cut, and ends with it."""


class CheckedFile(NamedTuple):
    """A file that was read to its end: its documents that are not blank, the number of blank ones, its characters."""

    path: str
    split: str
    documents: int
    blank: int
    characters: int
    slices: list[Slice]


class Part(NamedTuple):
    """The text of a split: spans [first, stop) of the documents of the files that `source` names, a split too."""

    source: str
    spans: list[tuple[int, int]]


def check_file(path: str, split: str, reading: Reading, slice_characters: int) -> CheckedFile:
    """Read a file to its end. slice_characters: a slice ends after so many, at the next place where reading can go on;
    a file without such a place is one slice. Raises DataError."""
    documents = blank = characters = begin = 0
    all_blank, place, in_word = True, Place(), False
    slices: list[Slice] = []
    for text, last, following in read_pieces(Path(path), **reading):
        characters += len(text)
        all_blank = all_blank and (not text or text.isspace())
        if last:
            documents, blank, all_blank = documents + (not all_blank), blank + all_blank, True
        if following and characters - begin >= slice_characters:
            slices.append(Slice(path, *place, characters - begin, in_word))
            place, begin, in_word = following, characters, not last and not text[-1].isspace()
    if characters > begin:
        slices.append(Slice(path, *place, characters - begin, in_word))
    return CheckedFile(path, split, documents, blank, characters, slices)


def read_slice(one: Slice, reading: Reading) -> Iterator[tuple[str, bool, bool]]:
    """The pieces of a slice: text, whether it ends a document, whether it goes on with a word. Blank documents of a
    file of rows have none."""
    skip, n_left, in_word = one.skip, one.characters, one.in_word
    for text, last, _ in read_pieces(Path(one.path), start=Place(one.at, one.line), **reading):
        own = text[skip:skip + n_left]
        skip, n_left = skip - min(skip, len(text)), n_left - len(own)
        if own:
            last = last or (one.ends and not n_left)
            yield own, last, in_word
            in_word = not last and not own[-1].isspace()
        if not n_left:
            return


def hold_out(files: list[CheckedFile], held_out: float | None, reading: Reading) -> list[CheckedFile]:
    """The files; if a single document is to be held out from, its file is now two of one document each, in train and in
    validation. Raises DataError for too little text."""
    train = [file for file in files if file.split == "train" and file.documents]
    if held_out is None or sum(file.documents for file in train) != 1:
        return files
    whole = train[0]
    cut, begin = _line_near(whole, whole.characters - int(whole.characters * held_out), reading), 0
    if cut == whole.characters:
        raise DataError("too little text to hold some out", whole.path, f"held_out = {held_out}")
    # The slice in which the cut lies goes to both: it is read from its place twice, and the second time skips.
    halves: tuple[list[Slice], list[Slice]] = [], []
    for one in whole.slices:
        n_train = min(max(cut - begin, 0), one.characters)
        begin += one.characters
        if n_train:
            halves[0].append(one._replace(characters=n_train, ends=begin >= cut))
        if n_train < one.characters:
            in_word = one.in_word and bool(halves[1])  # the word before the cut is of another document now
            halves[1].append(one._replace(skip=n_train, characters=one.characters - n_train, in_word=in_word))
    pair = [CheckedFile(whole.path, split, 1, 0, sum(one.characters for one in half), half)
            for split, half in zip(("train", "validation"), halves, strict=True)]
    return [each for file in files for each in (pair if file is whole else [file])]


def _line_near(whole: CheckedFile, cut: int, reading: Reading) -> int:
    """The first character of the first line after `cut`, or `cut` if none begins within `LINE_SEARCH` characters."""
    begin = 0
    for one in whole.slices:
        if begin <= cut < begin + one.characters:
            after = read_slice(one._replace(skip=cut - begin, characters=LINE_SEARCH), reading)
            line = cut + "".join(text for text, *_ in after).find("\n") + 1
            return line if line < whole.characters else cut
        begin += one.characters
    return cut


def divide(files: list[CheckedFile], held_out: float | None) -> dict[str, Part]:
    """The documents of each split. Of several of train at least the share `held_out` of the characters becomes
    validation. Raises DataError for a split that would be empty."""
    parts = {}
    for split in SPLITS:
        own = [file for file in files if file.split == split]
        n_documents = sum(file.documents for file in own)
        if own and not n_documents:
            what = "nothing but white space" if any(file.blank for file in own) else "no documents"
            raise DataError(what, own[0].path, f"the {split} split would be empty")
        if own:
            parts[split] = Part(split, [(0, n_documents)])
    if held_out is None:
        return parts
    if "validation" in parts:  # of a document that is cut
        parts["validation"] = parts.pop("validation")  # last, as below
        return parts
    ((_, stop),) = parts["train"].spans
    held = spread_documents([file for file in files if file.split == "train" and file.documents], held_out)
    between = zip([0, *(i + 1 for i in held)], [*held, stop], strict=True)
    divided = {"train": Part("train", [span for span in between if span[0] < span[1]]),
               "validation": Part("train", [(i, i + 1) for i in held])}
    return parts | divided


def spread_documents(files: list[CheckedFile], share: float) -> list[int]:
    """The numbers of documents that hold at least `share` of the characters, at equal distances over all files; at
    least one, and not all. A document counts with the mean of its file, which is exact for a `.txt`."""
    means, counts = [file.characters / file.documents for file in files], [file.documents for file in files]
    characters_D = np.repeat(means, counts)
    n, wanted = len(characters_D), share * sum(file.characters for file in files)
    k = min(max(1, round(n * share)), n - 1)
    while True:
        chosen = (2 * np.arange(k) + 1) * n // (2 * k)
        if k >= n - 1 or characters_D[chosen].sum() >= wanted * (1 - 1e-9):
            return chosen.tolist()
        k = min(k + 1 + k // 50, n - 1)


def texts_of(files: list[CheckedFile], part: Part, reading: Reading) -> Iterator[str]:
    """The pieces of a split's documents."""
    document, spans = 0, iter(part.spans)
    first, stop = next(spans)
    for file in files:
        for one in file.slices if file.split == part.source and file.documents else ():
            for text, last, _ in read_slice(one, reading):
                if document >= stop:
                    first, stop = next(spans, (sys.maxsize, sys.maxsize))
                if first <= document < stop:
                    yield text
                document += last
