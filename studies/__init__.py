"""Single studies, a script each: `python -m studies.NAME` from a checkout. Rows are in
benchmarks/."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT, Row
from benchmarks.append import rows_in
from benchmarks.pages import fill_place
from lineartime.cli.terminal import exit_code


def rows_of(name: str) -> Path:
    return ROOT / "benchmarks" / "rows" / f"{name}.jsonl"


def run(doc: str, name: str, measure: Callable[[argparse.Namespace], None], table: Callable[[list[Row]], str],
        place: str, options: dict[str, dict[str, Any]]) -> None:
    """The command line of a study: measure what has no row; with --into write the table into its
    place of a page."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    for option, more in options.items():
        parser.add_argument(f"--{option}", **more)
    parser.add_argument("--rows", type=Path, default=rows_of(name), help="file of rows, added to")
    parser.add_argument("--into", type=Path, help="do not measure; write the table of the rows into this page")
    given = parser.parse_args()
    sys.exit(exit_code(lambda: fill_place(given.into, place, table(rows_in(given.rows))) if given.into else
                       measure(given)))
