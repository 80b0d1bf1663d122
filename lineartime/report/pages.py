"""Pages with places for what the rows give: between `<!-- speed: begin -->` and `<!-- speed: end -->`.

`<!-- speed small: begin -->` gets a picture and a short table, made of the tables of these names. A place for `targets`
gets the table of goals and what was reached. `<!-- table lm_wiki40b cpu: begin -->` shows a table of the
paper at a scale. Places of the other report are left as they are.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lineartime.benchmark import figures as pictures
from lineartime.benchmark.goals import Goal, goals_table
from lineartime.benchmark.markdown import speed_section, tables_shown
from lineartime.benchmark.rows import Row as Measured
from lineartime.benchmark.rows import tables_of
from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.reproduce import figures as curves
from lineartime.reproduce.markdown import table_section
from lineartime.reproduce.results import Outcomes, outcomes_of
from lineartime.reproduce.rows import Row
from lineartime.reproduce.tables import SCALE_NAMES, TABLES, ScaleName
from lineartime.run import write_atomically
from lineartime.settings import require_name

if TYPE_CHECKING:
    from pandas import DataFrame

Content = Callable[[list[str]], str]
"""What a place shows, given the names in its mark."""


def places_of(kinds: Sequence[str]) -> re.Pattern[str]:
    """Places of these kinds: the mark where one begins, its kind, its names, what it holds, the mark where it ends."""
    return re.compile(rf"(<!-- ({'|'.join(kinds)})((?: [\w.+-]+)*): begin -->\n)(.*?)(<!-- \2(?:\3)?: end -->)",
                      re.DOTALL)


def fill_places(text: str, page: Path, contents: Mapping[str, Content], example: str) -> str:
    """A page's text with its places of the given kinds filled.

    Raises UsageError for a page without a whole place; example: the mark of one, without its end."""
    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{contents[found[2]](found[3].split())}\n{found[5]}"

    made, n_places = places_of([*contents]).subn(fill, text)
    if not n_places or len(re.findall(rf"<!-- (?:{'|'.join(contents)})\b[^>]*-->", text)) != 2 * n_places:
        raise UsageError("no whole place for the tables", page, f"it needs a line <!-- {example}: begin --> and under "
                         f"it <!-- {example}: end -->")
    return made


def filled(text: str, page: Path, images: Path, rows: Sequence[Measured], n_old: int, goals: Sequence[Goal]) -> str:
    """A page's text with its places for speed and goals filled. page, images: where both will be, for the links
    between them.

    Raises UsageError for a page without a whole place."""
    def speed(names: list[str]) -> str:
        return speed_section(rows, n_old, shown=names, pictures=lambda table: [
            link(images / name, page) for name, _ in pictures.files_of(table)])

    return fill_places(text, page, {"speed": speed, "targets": lambda names: goals_table(goals, rows)}, "speed")


def filled_tables(text: str, page: Path, images: Path, rows: Sequence[Row]) -> str:
    """A page's text with its places for the paper's tables filled.

    Raises UsageError for a page without a whole place, or one for a table or a scale that does not exist."""
    def table(names: list[str]) -> str:
        outcomes = named_outcomes(names, page, rows)
        section = table_section(outcomes, [(curves.alt_text(outcomes, what), link(images / name, page))
                                           for name, what in curves.files_of(outcomes)])
        return f"#{section}"  # one heading below that of the question it answers

    return fill_places(text, page, {"table": table}, "table lm_wiki40b cpu")


def link(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path, page.parent)).as_posix()


def named_outcomes(names: Sequence[str], page: Path, rows: Sequence[Row]) -> Outcomes:
    """The table and the scale that a place names. Raises UsageError."""
    if len(names) != 2:
        raise UsageError("no table and scale", f"{' '.join(['table', *names])} in {page}",
                         "a place has a table's name and a scale's, such as <!-- table lm_wiki40b cpu: begin -->")
    require_name("table", names[0], TABLES)
    require_name("scale", names[1], SCALE_NAMES)
    return outcomes_of(names[0], cast(ScaleName, names[1]), rows)


def shown_tables(text: str, rows: Sequence[Measured]) -> "list[DataFrame]":
    """The tables of measurements whose pictures a page's places show."""
    tables = tables_of(rows)
    return [table for found in places_of(["speed"]).finditer(text)
            for table in tables_shown(tables, found[3].split())[: 1 if found[3] else None]]


def shown_outcomes(text: str, page: Path, rows: Sequence[Row]) -> list[Outcomes]:
    """The tables of the paper that a page's places show. Raises UsageError."""
    return [named_outcomes(found[3].split(), page, rows) for found in places_of(["table"]).finditer(text)]


def fill_pages(pages: Sequence[Path], images: Path, rows: Sequence[Measured], n_old: int,
               goals: Sequence[Goal]) -> list[Path]:
    """Fill the places for speed of every page and draw what they show; returns what was written.

    Nothing is written unless every page has its places. Raises DataError, UsageError, ResourceError."""
    texts = read_pages(pages)
    made = {page: filled(text, page, images, rows, n_old, goals) for page, text in texts.items()}
    return write_pages(made, images, {name: partial(pictures.draw, table, what) for text in texts.values()
                                      for table in shown_tables(text, rows)
                                      for name, what in pictures.files_of(table)})


def fill_table_pages(pages: Sequence[Path], images: Path, rows: Sequence[Row]) -> list[Path]:
    """As `fill_pages`, for the paper's tables."""
    texts = read_pages(pages)
    made = {page: filled_tables(text, page, images, rows) for page, text in texts.items()}
    return write_pages(made, images, {name: partial(curves.draw, outcomes, what) for page, text in texts.items()
                                      for outcomes in shown_outcomes(text, page, rows)
                                      for name, what in curves.files_of(outcomes)})


def read_pages(pages: Sequence[Path]) -> dict[Path, str]:
    """Raises DataError for one that cannot be read."""
    texts = {}
    for page in pages:
        try:
            texts[page] = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise DataError("cannot read the page", page, getattr(e, "strerror", None) or str(e)) from None
    return texts


def write_pages(texts: Mapping[Path, str], images: Path, draw: Mapping[str, Callable[[Path], None]]) -> list[Path]:
    """Draw pictures into a folder, by their names, and write pages; returns what was written. Raises ResourceError."""
    try:
        if draw:
            images.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ResourceError("cannot make the folder", images, e.strerror) from None
    written = []
    for name, draw_into in draw.items():
        draw_into(images / name)
        written.append(images / name)
    for page, text in texts.items():
        write_atomically(page, text)
        written.append(page)
    return written
