"""The verb that shows what rows say: `lineartime report`, and `lineartime report speed`."""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, cast

import typer

from lineartime.cli.terminal import say
from lineartime.errors import DataError, UsageError
from lineartime.reproduce.tables import SCALE_NAMES, TABLES, ScaleName
from lineartime.settings import require_name

SPEED = "speed"
PACKAGE = Path(__file__).parents[1]


def report(
    table: Annotated[str | None, typer.Argument(
        help=f"A table or figure: {', '.join(TABLES)}; or {SPEED}, for speed and memory as measured by `lineartime "
             "benchmark`. By default all tables.")] = None,
    scale: Annotated[str | None, typer.Option(help="paper, gpu or cpu; by default each that has rows.")] = None,
    rows: Annotated[Path | None, typer.Option(
        help="Rows of `lineartime reproduce`, or for speed of `lineartime benchmark --json`; by default "
             "the package's.")] = None,
    html: Annotated[Path | None, typer.Option(help="Page that gets all tables and their pictures in one file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Folder that gets the pictures.")] = None,
    into: Annotated[list[Path] | None, typer.Option(
        help="Page whose places for tables are filled, <!-- table lm_wiki40b cpu: begin --> or <!-- speed: begin -->; "
             "may be given again.")] = None,
    images: Annotated[Path, typer.Option(help="Folder for the pictures of --into.")] = Path("docs/images"),
) -> None:
    """The paper's numbers beside ours, as Markdown, PNG or one HTML page; or `speed`.
    Speed and memory: ratios, times and memory by context; bold where FLASH loses."""
    if table == SPEED:
        refuse(table, {"--scale": scale, "--html": html, "--png": png})
        written = report_speed(rows, into, images)
    else:
        if table is not None:
            require_name("table", table, [*TABLES, SPEED])
        if scale is not None:
            require_name("scale", scale, SCALE_NAMES)
        if into:
            refuse("--into, whose places name their tables,", {"TABLE": table, "--scale": scale, "--html": html,
                                                               "--png": png})
        written = report_tables(table, cast(ScaleName | None, scale), rows, html, png, into, images)
    for path in written:
        say(f"written  {path}")


def refuse(what: str, given: dict[str, object]) -> None:
    """Raise UsageError for the first that was given."""
    for name, value in given.items():
        if value is not None:
            raise UsageError("arguments that do not go together", f"{what} takes no {name}", "leave one out")


def require_pandas() -> None:
    """Raise UsageError where it is not installed."""
    if find_spec("pandas") is None:
        raise UsageError("pandas is not installed", "tables are made with it", "pip install 'lineartime[report]'")


def report_speed(rows: Path | None, into: list[Path] | None, images: Path) -> list[Path]:
    """`lineartime report speed`; returns the files that were written."""
    require_pandas()
    from lineartime.benchmark.markdown import speed_section
    from lineartime.benchmark.rows import read_rows

    rows = rows or PACKAGE / "results" / "speed.jsonl"
    measured = read_rows(rows)
    if not measured:
        raise DataError("no rows to report", rows, "`lineartime benchmark ... --json FILE` writes them")
    if into:
        from lineartime.report.pages import fill_pages, speed_places  # they draw, and drawing imports torch

        return fill_pages(into, images, speed_places(measured))
    print(speed_section(measured), end="")
    return []


def report_tables(table: str | None, scale: ScaleName | None, rows: Path | None, html: Path | None, png: Path | None,
                  into: list[Path] | None, images: Path) -> list[Path]:
    """`lineartime report` of one table or all; returns the files that were written."""
    require_pandas()
    from lineartime.reproduce.markdown import table_section, tables_shown
    from lineartime.reproduce.records import RECORDS
    from lineartime.reproduce.results import read_results

    records = read_results(rows or RECORDS)
    if into:
        from lineartime.report.pages import fill_pages, table_places

        return fill_pages(into, images, table_places(records))
    shown = tables_shown(records, [table] if table else [], [scale] if scale else [])
    if html is None and png is None:
        print("\n".join(map(table_section, shown)), end="")
        return []
    from lineartime.atomic_io import write_atomically
    from lineartime.plot import Picture, draw_into
    from lineartime.report.html import page
    from lineartime.report.pages import illustrated

    drawn: dict[str, Picture] = {}

    def show(name: str, picture: Picture) -> str:
        drawn[name] = picture
        return name

    text = "\n".join(illustrated(results, show) for results in shown)
    with tempfile.TemporaryDirectory() as scratch:
        written = draw_into(png or Path(scratch), drawn)
        if html is not None:
            write_atomically(html, page("The paper's tables and figures, and ours", text, png or Path(scratch)))
    return [*(written if png else []), *([html] if html else [])]
