"""A part of prepared text, made on one of several machines: the units of its share of the files, `part.json`, and the
tokenizer."""

import bisect
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lineartime.data.slices import CheckedFile
from lineartime.data.splits import Source
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer
from lineartime.data.tokens import Manifest, Split, read_signed, signed
from lineartime.data.units import Encoded
from lineartime.errors import UsageError
from lineartime.settings import require

PART_FILE = "part.json"


@dataclass
class TextPart:
    """The content of part.json."""

    number: int
    of: int
    settings: dict[str, Any]
    """The manifest's settings, the same in all parts."""
    files: list[list[str]]
    """Split and name of every file of text, of all parts."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """The manifest's entries for this part's files."""
    checked: list[list[int]] = field(default_factory=list)
    """Documents, blank documents and characters of each."""
    notes: list[str] = field(default_factory=list)
    units: list[tuple[str, Encoded]] = field(default_factory=list)
    """The split of each unit, and its hashes."""


def first_part(number: int, of: int, manifest: Manifest, sources: list[Source]) -> tuple[TextPart, list[Source]]:
    """What is known of a part before its text is read, and its share of the files."""
    part = TextPart(number, of, manifest.settings, [[each.split, each.name] for each in sources],
                    notes=[*manifest.notes])
    own = share([source.path.stat().st_size for source in sources], number, of)
    return part, sources[own.start:own.stop]


def share(sizes: Sequence[int], number: int, of: int) -> range:
    """The files of part `number`, from 1: consecutive ones, at least one, of about the same bytes in each part.

    Raises UsageError for more parts than files."""
    require(len(sizes) >= of, "more parts than files", f"{of} parts of {len(sizes):,} files", "make fewer parts")
    middles = [end - size / 2 for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    bounds = [0]
    for k in range(1, of):
        bound = bisect.bisect(middles, sum(sizes) * k / of)
        bounds.append(min(max(bound, bounds[-1] + 1), len(sizes) - (of - k)))
    bounds.append(len(sizes))
    return range(bounds[number - 1], bounds[number])


def read_part(folder: Path) -> TextPart:
    """The description of a part. Raises DataError for a folder that is no part, or a damaged or newer one."""
    def part_of(fields: dict[str, Any]) -> TextPart:
        part = TextPart(**fields | {"units": [(split, Encoded(**unit)) for split, unit in fields["units"]]})
        if len(part.sources) != len(part.checked):
            raise ValueError
        return part

    return read_signed(Path(folder) / PART_FILE, "part", part_of)


def require_same_part(folder: Path, asked: TextPart, manifest: Manifest) -> None:
    """Raise UsageError unless a folder has the part that is asked for, of the manifest's text."""
    require((folder / PART_FILE).is_file(), "the output exists and is not a part", str(folder), "choose another")
    part, names = read_part(folder), ("number", "of", "settings", "files")
    require(part.sources == manifest.sources and all(getattr(part, name) == getattr(asked, name) for name in names),
            "the output was prepared differently", str(folder), "choose another or delete it")


def write_part(folder: Path, part: TextPart, files: list[CheckedFile], encoded: list[tuple[str, Encoded]],
               manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Make a folder of units a part, and count what it holds."""
    part.sources, part.units = manifest.sources, encoded
    part.checked = [[file.documents, file.blank, file.characters] for file in files]
    (folder / PART_FILE).write_text(json.dumps(signed(dataclasses.asdict(part), "part")) + "\n")
    (folder / TOKENIZER_FILE).write_text(tokenizer.json, encoding="utf-8")
    for split, unit in encoded:
        counts = manifest.splits.setdefault(split, Split())
        counts.documents += unit.rows - unit.open
        counts.tokens += unit.ids
        counts.words += unit.words
        counts.bytes += unit.bytes


def ordered_parts(folders: Sequence[Path]) -> list[tuple[TextPart, Path]]:
    """All parts of one text in their order, with their folders.

    Raises UsageError for parts that are missing, are there twice or do not belong together; DataError as `read_part`
    does."""
    require(len(folders) > 0, "there are no parts to join", "--join", "give the folder of every part")
    parts: dict[int, tuple[TextPart, Path]] = {}
    for folder in folders:
        part = read_part(folder)
        first, other = next(iter(parts.values()), (part, folder))
        changed = [name for name in {**first.settings, **part.settings}
                   if first.settings.get(name) != part.settings.get(name)]
        changed += ["number of parts"] * (part.of != first.of) + ["files"] * (part.files != first.files)
        if changed:
            raise UsageError("these parts do not belong together", f"{other} and {folder} ({', '.join(changed)})",
                             "prepare them with the same inputs and options")
        if part.number in parts:
            raise UsageError(f"part {part.number}/{part.of} twice", f"{parts[part.number][1]} and {folder}",
                             "name each part once")
        parts[part.number] = (part, folder)
    of = next(iter(parts.values()))[0].of
    missing = [f"{number}/{of}" for number in range(1, of + 1) if number not in parts]
    require(not missing, "parts are missing", ", ".join(missing[:8]), "name the folder of every part")
    in_order = [parts[number] for number in sorted(parts)]
    sources = [[source["split"], source["name"]] for part, _ in in_order for source in part.sources]
    require(sources == in_order[0][0].files, "the parts have other files than their shares", str(in_order[0][1]),
            "prepare all parts from the same files")
    return in_order
