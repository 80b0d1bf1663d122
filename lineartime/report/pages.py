"""Pages with places for what the rows give: between `<!-- speed: begin -->` and `<!-- speed: end -->`.

`<!-- speed small decode: begin -->` shows only the tables or benchmarks of these names; losses are said of all. A place
for `targets` gets the table of what was wanted and reached.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.report.pictures import draw, files_of
from lineartime.report.rows import Cell, Table, tables_of
from lineartime.report.speed import speed_section
from lineartime.report.targets import Target, targets_table
from lineartime.run import write_atomically

PLACE = re.compile(r"<!-- (speed|targets)((?: [\w.+-]+)*): begin -->\n(.*?)<!-- \1: end -->", re.DOTALL)


def filled(text: str, page: Path, images: Path, cells: Sequence[Cell], n_old: int, targets: Sequence[Target]) -> str:
    """A page's text with its places filled. page, images: where both will be, for the links between them.

    Raises UsageError for a page without a whole place."""
    def fill(found: re.Match[str]) -> str:
        what, names = found[1], found[2].split()
        if what == "targets":
            content = targets_table(targets, cells)
        else:
            content = speed_section(cells, n_old, shown=names, pictures=lambda table: [
                Path(os.path.relpath(images / name, page.parent)).as_posix() for name, _ in files_of(table)])
        return f"<!-- {what}{found[2]}: begin -->\n\n{content}\n<!-- {what}: end -->"

    made, n_places = PLACE.subn(fill, text)
    if not n_places or len(re.findall(r"<!-- (?:speed|targets)[^>]*-->", text)) != 2 * n_places:
        raise UsageError("no whole place for the tables", page, "it needs a line <!-- speed: begin --> and under it "
                         "<!-- speed: end -->")
    return made


def shown_tables(text: str, cells: Sequence[Cell]) -> list[Table]:
    """The tables that a page's places show."""
    places = [found[2].split() for found in PLACE.finditer(text) if found[1] == "speed"]
    return [table for table in tables_of(cells) if any(table.among(names) for names in places)]


def fill_pages(pages: Sequence[Path], images: Path, cells: Sequence[Cell], n_old: int,
               targets: Sequence[Target]) -> list[Path]:
    """Fill the places of every page and draw what they show; returns what was written.

    Nothing is written unless every page has its places. Raises DataError, UsageError, ResourceError."""
    texts = {}
    for page in pages:
        try:
            texts[page] = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise DataError("cannot read the page", page, getattr(e, "strerror", None) or str(e)) from None
    made = {page: filled(text, page, images, cells, n_old, targets) for page, text in texts.items()}
    pictures = {name: (table, what) for text in texts.values() for table in shown_tables(text, cells)
                for name, what in files_of(table)}
    try:
        if pictures:
            images.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError("cannot make the folder", images, e.strerror) from None
    written = []
    for name, (table, what) in pictures.items():
        draw(table, what, images / name)
        written.append(images / name)
    for page, text in made.items():
        write_atomically(page, text)
        written.append(page)
    return written
