"""Pages with places for what was measured, between `<!-- NAMES: begin -->` and the same with end:
`speed` for all tables of speed, `speed small` for a picture and a short table of those so named,
`table lm_wiki40b cpu` for a table of the paper at a scale, `recall pairs` for a task of recall."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from benchmarks.figures import Picture, draw, figures_of, recall_picture, speed_pictures
from benchmarks.paper.report import table_section
from benchmarks.paper.results import results_of
from benchmarks.paper.tables import SCALE_NAMES, TABLES, ScaleName
from benchmarks.recall import study
from benchmarks.speed import speed_section, speed_summary, tables_of
from lineartime.base.errors import UsageError
from lineartime.base.files import read_text, write_atomically
from lineartime.base.settings import require_name
from lineartime.base.words import in_markdown

Kind = Literal["speed", "table", "recall", "laws"]


def fill_pages(pages: Iterable[Path], images: Path, kind: Kind, rows: Sequence[Any]) -> list[Path]:
    """Fill the places of a kind of every page and draw what they show; returns what was written.
    Nothing is written unless every page has its places. Raises as `filled`, and ResourceError."""
    drawn = dict[str, Picture]()
    made = {page: filled(page, images, kind, rows, drawn) for page in pages}
    for name, picture in drawn.items():
        draw(picture, images / name)
    for page, text in made.items():
        write_atomically(page, text)
    return [*(images / name for name in drawn), *made]


def filled(page: Path, images: Path, kind: Kind, rows: Sequence[Any], drawn: dict[str, Picture]) -> str:
    """A page's text with its places of a kind filled. images: where the pictures will be; drawn:
    gets them by file name. Raises as `with_places`, and UsageError for what does not exist."""
    folder = Path(os.path.relpath(images, page.parent)).as_posix()

    def links(pictures: dict[str, Picture]) -> list[str]:
        drawn.update(pictures)
        return [f"![{in_markdown(picture.caption)}]({folder}/{name})" for name, picture in pictures.items()]

    return with_places(page, kind, lambda names: shown(kind, rows, names, links))


def with_places(page: Path, kind: str, made: Callable[[list[str]], str]) -> str:
    """A page's text whose places of a kind hold what is made of the names in their marks. Raises
    UsageError for a page without a whole place, CheckpointError for one that is no text."""
    text = read_text(page)
    place = re.compile(rf"(<!-- {kind}((?: [\w.+-]+)*): begin -->\n)(.*?)(<!-- {kind}(?:\2)?: end -->)", re.DOTALL)
    with_tables, n_places = place.subn(lambda found: f"{found[1]}\n{made(found[2].split())}\n{found[4]}", text)
    if not n_places or len(re.findall(rf"<!-- {kind}\b[^>]*-->", text)) != 2 * n_places:
        raise UsageError("no whole place for the tables", page, "it needs a line such as <!-- speed: begin --> or <!-- "
                         "table lm_wiki40b cpu: begin -->, and under it the same with end")
    return with_tables


def shown(kind: Kind, rows: Sequence[Any], names: list[str],
          links: Callable[[dict[str, Picture]], list[str]] = lambda pictures: []) -> str:
    """What a place shows, given the names in its mark. links: makes Markdown of its pictures."""
    if kind == "laws":
        from benchmarks import laws  # transformers takes seconds to import

        return f"{laws.table(rows)}\n"
    if kind == "speed":
        tables = tables_of(rows)
        return (speed_summary(tables, names, lambda table: links(dict([*speed_pictures(table).items()][:1]))) if names
                else speed_section(tables, lambda table: links(speed_pictures(table))))
    name, scale = [*names, "", ""][:2]
    if kind == "recall":
        require_name("task", name, study.STUDY["tasks"])
        pictures = {f"recall-{name}.png": recall_picture(rows, name)} if study.learning(rows, name) else {}
        return study.section(rows, name, links(pictures))
    require_name("table", name, TABLES)
    require_name("scale", scale, SCALE_NAMES)
    results = results_of(name, cast(ScaleName, scale), rows)
    return "#" + table_section(results, links(figures_of(results)))  # one heading below the question it answers
