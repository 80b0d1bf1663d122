"""Pages with places for what was measured: between `<!-- speed: begin -->` and `<!-- speed: end -->`.

`<!-- speed small: begin -->` shows a picture and a short table, made of the tables of these names.
`<!-- table lm_wiki40b cpu: begin -->` shows a table of the paper at a scale, `<!-- recall pairs: begin -->` a task of
recall. Places of other reports are left as they are.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from benchmarks.figures import pictures_of as speed_pictures_of
from benchmarks.markdown import speed_section
from benchmarks.paper.figures import pictures_of
from benchmarks.paper.markdown import table_section
from benchmarks.paper.results import results_of
from benchmarks.paper.tables import SCALE_NAMES, TABLES, ScaleName
from benchmarks.recall.report import section as recall_section
from benchmarks.recall.study import read_study
from benchmarks.speed_rows import tables_of
from lineartime.atomic_io import read_bytes, write_atomically
from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.plot import Picture, draw
from lineartime.settings import require, require_name

Kind = Literal["speed", "table", "recall"]
"""Of places: for speed and memory, of rows as the benchmark reads them; for the paper's tables, of records; for recall,
of rows as its study reads them."""
Show = Callable[[str, Picture], str]
"""A picture's file name and the picture -> the link to it."""


def shown(kind: Kind, rows: Sequence[Any], names: list[str], show: Show) -> str:
    """What a place shows, given the names in its mark."""
    if kind == "speed":
        return speed_section(tables_of(rows), shown=names, pictures=lambda table: [
            show(name, picture) for name, picture in [*speed_pictures_of(table).items()][: 1 if names else None]])
    name, scale = [*names, "", ""][:2]
    if kind == "recall":
        require_name("task", name, read_study()["tasks"])
        return recall_section(rows, name, show)
    require_name("table", name, TABLES)
    require_name("scale", scale, SCALE_NAMES)
    results = results_of(name, cast(ScaleName, scale), rows)
    # One heading below that of the question it answers.
    return "#" + table_section(results, [(picture.caption, show(file, picture))
                                         for file, picture in pictures_of(results).items()])


def filled(text: str, page: Path, images: Path, kind: Kind, rows: Sequence[Any]) -> tuple[str, dict[str, Picture]]:
    """A page's text with its places of a kind filled, and the pictures they show by file name. page, images: where both
    will be, for the links between them.

    Raises UsageError for a page without a whole place, or one for something that does not exist."""
    drawn: dict[str, Picture] = {}

    def show(name: str, picture: Picture) -> str:
        drawn[name] = picture
        return Path(os.path.relpath(images / name, page.parent)).as_posix()

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{shown(kind, rows, found[2].split(), show)}\n{found[4]}"

    place = re.compile(rf"(<!-- {kind}((?: [\w.+-]+)*): begin -->\n)(.*?)(<!-- {kind}(?:\2)?: end -->)", re.DOTALL)
    made, n_places = place.subn(fill, text)
    if not n_places or len(re.findall(rf"<!-- {kind}\b[^>]*-->", text)) != 2 * n_places:
        raise UsageError("no whole place for the tables", page, "it needs a line such as <!-- speed: begin --> or <!-- "
                         "table lm_wiki40b cpu: begin -->, and under it the same with end")
    return made, drawn


def page_text(page: Path) -> str:
    """A page's text. Raises DataError if it cannot be read."""
    try:
        return read_bytes(page).decode()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError("cannot read the page", page, getattr(e, "strerror", None) or str(e)) from None


def fill_place(page: Path, name: str, made: str) -> None:
    """Fill a page's one place `<!-- name: begin -->`, for scripts that make their own tables. Raises UsageError for a
    page without it, DataError for one that cannot be read."""
    place = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    text, n_places = place.subn(lambda found: f"{found[1]}\n{made}\n\n{found[2]}", page_text(page))
    require(n_places == 1, "no place for the table", str(page), f"add <!-- {name}: begin -->, <!-- {name}: end -->")
    write_atomically(page, text)


def fill_pages(pages: Iterable[Path], images: Path, kind: Kind, rows: Sequence[Any]) -> list[Path]:
    """Fill the places of a kind of every page and draw what they show; returns what was written.

    Nothing is written unless every page has its places. Raises DataError, UsageError, ResourceError."""
    made, drawn = {}, {}
    for page in pages:
        made[page], pictures = filled(page_text(page), page, images, kind, rows)
        drawn.update(pictures)
    try:
        images.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError("cannot make the folder", images, e.strerror) from None
    for name, picture in drawn.items():
        draw(picture, images / name)
    for page, text in made.items():
        write_atomically(page, text)
    return [*(images / name for name in drawn), *made]
