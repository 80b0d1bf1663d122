"""The verb that shows what rows say: `python -m benchmarks report`, and of speed or recall by that word behind it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from benchmarks import ROOT
from benchmarks.paper.tables import SCALE_NAMES, TABLES, ScaleName
from lineartime.cli.terminal import say
from lineartime.errors import DataError
from lineartime.settings import require, require_name

SPEED, RECALL = "speed", "recall"
"""Reports with rows of their own."""


def report(
    table: Annotated[str | None, typer.Argument(
        help=f"A table or figure: {', '.join(TABLES)}, by default all; or {SPEED}, or {RECALL}.")] = None,
    scale: Annotated[str | None, typer.Option(help="paper, gpu or cpu; by default each that has rows.")] = None,
    rows: Annotated[Path | None, typer.Option(help="File of rows; by default the committed ones.")] = None,
    into: Annotated[list[Path] | None, typer.Option(
        help="Page whose places for tables are filled, <!-- table lm_wiki40b cpu: begin -->, <!-- speed: begin --> or "
             "<!-- recall pairs: begin -->; may be given again.")] = None,
    images: Annotated[Path, typer.Option(help="Folder for the pictures of --into.")] = Path("benchmarks/tables/images"),
) -> None:
    """The paper's numbers beside ours, as Markdown; or `speed`, or `recall`.
    Speed and memory: ratios, times and memory by context; bold where FLASH loses."""
    require_name("table", table or SPEED, [*TABLES, SPEED, RECALL])
    require_name("scale", scale or "cpu", SCALE_NAMES)
    of_paper = table not in (SPEED, RECALL)
    require(scale is None or (of_paper and not into), "arguments that do not go together", "--scale", "leave it out")
    require(table is None or not of_paper or not into, "arguments that do not go together", f"{table} and --into",
            "leave out the table: the page's places name theirs")
    require(find_spec("pandas") is not None, "pandas is not installed", "tables are made with it",
            "pip install 'pandas>=3'")
    measured = read(table, rows or ROOT / "benchmarks" / "rows" / f"{'quality' if of_paper else table}.jsonl")
    if into:
        from benchmarks.pages import Kind, fill_pages  # they draw, and drawing imports torch

        kind: Kind = "speed" if table == SPEED else "recall" if table == RECALL else "table"
        for written in fill_pages(into, images, kind, measured):
            say(f"written  {written}")
    elif table == SPEED:
        from benchmarks.speed import speed_section, tables_of

        print(speed_section(tables_of(measured)), end="")
    elif table == RECALL:
        from benchmarks.recall.report import ABOUT, section

        print("\n\n".join(f"### {task}\n\n{section(measured, task)}" for task in ABOUT))
    else:
        from benchmarks.paper.report import table_section, tables_shown

        shown = tables_shown(measured, [table] if table else [], [cast(ScaleName, scale)] if scale else [])
        print("\n".join(map(table_section, shown)), end="")


def read(table: str | None, path: Path) -> list[Any]:
    """The rows of a report. Raises DataError where there are none, or rows of something else."""
    measured: list[Any]
    if table == SPEED:
        from benchmarks.speed import read_rows

        measured = read_rows(path)
    elif table == RECALL:
        from benchmarks.recall.study import read_rows as read_recall

        measured = read_recall(path)
    else:
        from benchmarks.paper.records import read_records

        measured = read_records(path)
    if not measured:
        verb = {SPEED: "step ... --json FILE", RECALL: "reproduce recall"}.get(table or "", "reproduce")
        raise DataError("no rows to report", path, f"`python -m benchmarks {verb}` writes them")
    return measured
