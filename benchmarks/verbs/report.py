"""The verb that shows what rows say: `python -m benchmarks report`, and of speed or recall by that word behind it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from benchmarks import ROOT
from benchmarks.paper.tables import SCALE_NAMES, TABLES, ScaleName
from benchmarks.verbs.reproduce import RECALL
from lineartime.cli.terminal import say
from lineartime.errors import DataError, UsageError
from lineartime.settings import require, require_name

SPEED = "speed"
WRITERS = {SPEED: "step ... --json FILE", RECALL: "reproduce recall"}
"""Reports with rows of their own, and the command that writes them."""


def report(
    table: Annotated[str | None, typer.Argument(
        help=f"A table or figure: {', '.join(TABLES)}, by default all; or {SPEED}, or {RECALL}.")] = None,
    scale: Annotated[str | None, typer.Option(help="paper, gpu or cpu; by default each that has rows.")] = None,
    rows: Annotated[Path | None, typer.Option(
        help="Rows of `python -m benchmarks reproduce`, or for speed of `python -m benchmarks step --json`; by default "
             "the package's.")] = None,
    into: Annotated[list[Path] | None, typer.Option(
        help="Page whose places for tables are filled, <!-- table lm_wiki40b cpu: begin -->, <!-- speed: begin --> or "
             "<!-- recall pairs: begin -->; may be given again.")] = None,
    images: Annotated[Path, typer.Option(help="Folder for the pictures of --into.")] = Path("benchmarks/tables/images"),
) -> None:
    """The paper's numbers beside ours, as Markdown; or `speed`, or `recall`.
    Speed and memory: ratios, times and memory by context; bold where FLASH loses."""
    given = {"TABLE": table, "--scale": scale}
    what = table if table in WRITERS else "--into, whose places name their tables,"
    for name in ("--scale",) if table in WRITERS else given if into else ():
        require(not given[name], "arguments that do not go together", f"{what} takes no {name}", "leave one out")
    require_name("table", table or SPEED, [*TABLES, *WRITERS])
    require_name("scale", scale or "cpu", SCALE_NAMES)
    if find_spec("pandas") is None:
        raise UsageError("pandas is not installed", "tables are made with it", "pip install 'pandas>=3'")
    path = rows or ROOT / "benchmarks" / "rows" / (f"{table}.jsonl" if table in WRITERS else "quality.jsonl")
    measured: Sequence[Any]
    if table == SPEED:
        from benchmarks.speed_rows import read_rows

        measured = read_rows(path)
    elif table == RECALL:
        from benchmarks.recall.study import read_rows as read_recall

        measured = read_recall(path)
    else:
        from benchmarks.paper.records import read_records

        measured = read_records(path)
    if not measured:
        raise DataError("no rows to report", path,
                        f"`python -m benchmarks {WRITERS.get(table or '', 'reproduce')}` writes them")
    if into:
        from benchmarks.pages import Kind, fill_pages  # they draw, and drawing imports torch

        kind: Kind = "speed" if table == SPEED else "recall" if table == RECALL else "table"
        for written in fill_pages(into, images, kind, measured):
            say(f"written  {written}")
    elif table == SPEED:
        from benchmarks.markdown import speed_section
        from benchmarks.speed_rows import tables_of

        print(speed_section(tables_of(measured)), end="")
    elif table == RECALL:
        from benchmarks.recall.report import lines_of

        print("\n".join(lines_of(measured)))
    else:
        from benchmarks.paper.markdown import table_section, tables_shown

        shown = tables_shown(measured, [table] if table else [], [cast(ScaleName, scale)] if scale else [])
        print("\n".join(map(table_section, shown)), end="")
