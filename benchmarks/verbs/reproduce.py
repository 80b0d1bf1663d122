"""The verb that makes the paper's tables again: `python -m benchmarks reproduce`."""

import os
from pathlib import Path
from typing import Annotated, cast

import typer

from benchmarks.paper.tables import SCALE_NAMES, TABLES, ScaleName
from lineartime.cli.arguments import Device, pick_device
from lineartime.cli.terminal import note, say, say_stopping
from lineartime.errors import DataError
from lineartime.settings import require, require_name

RECALL = "recall"


def reproduce(
    tables: Annotated[list[str] | None, typer.Argument(
        help=f"Tables and figures, by default all: {', '.join(TABLES)}; or {RECALL}, a study of its own.")] = None,
    scale: Annotated[str, typer.Option(help="paper, gpu or cpu: how large.")] = "cpu",
    texts: Annotated[Path | None, typer.Option(help="Folder with the texts of the scale, each in a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for prepared text and runs; what is there goes on.")] = Path(
        "out/reproduce"),
    rows: Annotated[Path | None, typer.Option(
        help="File of rows, looked at for what is there and added to; by default rows.jsonl in --out.")] = None,
    jobs: Annotated[int | None, typer.Option(
        help="Runs at a time; by default one per processor core, and one on a GPU.")] = None,
    ranks: Annotated[int, typer.Option(
        help="Processes of one run, which torchrun starts on this machine; rows do not depend on their number.")] = 1,
    seeds: Annotated[int | None, typer.Option(help="Only the first so many seeds of each cell.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what is there and what is missing.")] = False,
    device: Device = None,
) -> None:
    """Train, fine-tune and time what a table of the paper needs and has no row yet.
    The same command goes on where it stopped; `python -m benchmarks report` shows the rows."""
    names = tables or list(TABLES)
    for name in names:
        require_name("table", name, [*TABLES, RECALL])
    require(names == [RECALL] or RECALL not in names, "recall does not run together with tables", " ".join(names),
            "run it by itself")
    require_name("scale", scale, SCALE_NAMES)
    size = cast(ScaleName, scale)
    require(names != [RECALL] or (ranks, seeds, jobs, plan) == (1, None, None, False),
            "the study of recall takes no --ranks, --seeds, --jobs or --plan", RECALL, "leave them out")
    for option, value in (("jobs", jobs), ("ranks", ranks), ("seeds", seeds)):
        require(value is None or value >= 1, "wrong value", f"{option} = {value}", "it takes whole numbers from 1")
    if texts is not None and not texts.is_dir():
        raise DataError("no such folder of texts", texts)
    from benchmarks.paper import runner
    from benchmarks.paper.records import read_records
    from lineartime.training import StopSignal

    path = rows or out / ("recall.jsonl" if names == [RECALL] else "rows.jsonl")
    if plan:
        for name in names:
            for line in runner.plan_lines(name, size, read_records(path), seeds):
                say(line)
        return
    where = pick_device(device).type
    at_once = jobs or (1 if where == "cuda" else max((os.cpu_count() or 1) // ranks, 1))
    place = runner.Place(texts, out, path, where, at_once, seeds, note, ranks)
    with StopSignal().listening(say_stopping) as stop:
        n_rows = (runner.reproduce_recall(place, stop) if names == [RECALL] else
                  sum(runner.reproduce(name, size, place, stop) for name in names))
    say(f"{n_rows:,} rows added to {path}" if n_rows else f"complete: {path} has every row; nothing to do.")
    if names != [RECALL]:
        say(f"next     python -m benchmarks report {names[0] if len(names) == 1 else ''} --scale {scale} --rows {path}")
