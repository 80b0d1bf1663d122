"""Pages with places for what was measured: between `<!-- speed: begin -->` and `<!-- speed: end -->`.

`<!-- speed small: begin -->` shows a picture and a short table, made of the tables of these names.
`<!-- table lm_wiki40b cpu: begin -->` shows a table of the paper at a scale. Places of the other report are left as
they are.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lineartime.atomic_io import write_atomically
from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.plot import Picture, draw
from lineartime.reproduce.records import Record
from lineartime.reproduce.tables import SCALE_NAMES, TABLES, ScaleName
from lineartime.settings import require_name

Show = Callable[[str, Picture], str]
"""A picture's file name and the picture -> the link to it."""
Place = Callable[[list[str], Show], str]
"""What a kind of place shows, given the names in its mark."""


def speed_places(rows: Sequence[Any]) -> dict[str, Place]:
    """Places for speed and memory, of rows as the benchmark reads them."""
    from lineartime.benchmark.figures import pictures_of
    from lineartime.benchmark.markdown import speed_section
    from lineartime.benchmark.rows import tables_of

    def speed(names: list[str], show: Show) -> str:
        return speed_section(tables_of(rows), shown=names, pictures=lambda table: [
            show(name, picture) for name, picture in [*pictures_of(table).items()][: 1 if names else None]])

    return {"speed": speed}


def table_places(records: Sequence[Record]) -> dict[str, Place]:
    """Places for the paper's tables."""
    from lineartime.reproduce.results import results_of

    def table(names: list[str], show: Show) -> str:
        name, scale = [*names, "", ""][:2]
        require_name("table", name, TABLES)
        require_name("scale", scale, SCALE_NAMES)
        # One heading below that of the question it answers.
        return "#" + illustrated(results_of(name, cast(ScaleName, scale), records), show)

    return {"table": table}


def illustrated(results: Any, show: Show) -> str:
    """The section of one of the paper's tables with its pictures."""
    from lineartime.reproduce.figures import pictures_of
    from lineartime.reproduce.markdown import table_section

    return table_section(results, [(picture.caption, show(name, picture))
                                   for name, picture in pictures_of(results).items()])


def filled(text: str, page: Path, images: Path, places: Mapping[str, Place]) -> tuple[str, dict[str, Picture]]:
    """A page's text with its places of the given kinds filled, and the pictures they show by file name. page, images:
    where both will be, for the links between them.

    Raises UsageError for a page without a whole place, or one for something that does not exist."""
    drawn: dict[str, Picture] = {}

    def show(name: str, picture: Picture) -> str:
        drawn[name] = picture
        return Path(os.path.relpath(images / name, page.parent)).as_posix()

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{places[found[2]](found[3].split(), show)}\n{found[5]}"

    kinds = "|".join(places)
    place = re.compile(rf"(<!-- ({kinds})((?: [\w.+-]+)*): begin -->\n)(.*?)(<!-- \2(?:\3)?: end -->)", re.DOTALL)
    made, n_places = place.subn(fill, text)
    if not n_places or len(re.findall(rf"<!-- (?:{kinds})\b[^>]*-->", text)) != 2 * n_places:
        raise UsageError("no whole place for the tables", page, "it needs a line such as <!-- speed: begin --> or <!-- "
                         "table lm_wiki40b cpu: begin -->, and under it the same with end")
    return made, drawn


def fill_pages(pages: Iterable[Path], images: Path, places: Mapping[str, Place]) -> list[Path]:
    """Fill the places of every page and draw what they show; returns what was written.

    Nothing is written unless every page has its places. Raises DataError, UsageError, ResourceError."""
    made, drawn = {}, {}
    for page in pages:
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise DataError("cannot read the page", page, getattr(e, "strerror", None) or str(e)) from None
        made[page], pictures = filled(text, page, images, places)
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
