"""Measured rows as pictures: time per token and memory against context."""

import itertools
import re
from typing import TYPE_CHECKING, Any

from benchmarks.markdown import parameters, title, tokens
from benchmarks.speed_rows import KIND, OURS, contexts_of, dtypes_of, newest, side_name, size_of
from lineartime.plot import COLOURS, Line, Panel, Picture

if TYPE_CHECKING:
    from pandas import DataFrame


def pictures_of(table: "DataFrame") -> dict[str, Picture]:
    """The pictures of a table of whole models by file name, of time and of memory; none without two contexts to
    join."""
    first = table.iloc[0]
    machine = "cpu" if first["device"] == "cpu" else re.sub(r"\W+", "-", first["hardware"].lower()).strip("-")
    parts = [first["benchmark"], first["name"], machine, f"{first['threads']}threads" if first["threads"] > 1 else "",
             parameters(size_of(table)).replace(" ", ""), f"{table.n_tokens.max()}"]
    shown = ([("time", "ms", "ms per token of a step"), ("memory", "peak_mib", "peak memory, MiB")]
             if first["benchmark"] == "step" else [("time", "ms", "ms per generated token")])
    pictures = {}
    for what, column, y_label in shown:
        panels = panels_of(table, column, y_label)
        if any(len(line.points) > 1 for panel in panels for line in panel.lines):
            stem = re.sub(r"[^\w.+-]+", "-", "-".join(part for part in (*parts, what) if part))
            pictures[f"{stem}.png"] = Picture(f"{title(table)}. {first['hardware']}", panels)
    return pictures


def panels_of(table: "DataFrame", column: str, y_label: str) -> tuple[Panel, ...]:
    """A panel for each type with any values, a line for each side and variant, FLASH in front."""
    known = newest(table).dropna(subset=["ms", column])
    n_variants = known.groupby("side").variant.nunique()
    colours = dict(zip(sorted(table.side.unique(), key=lambda side: side != OURS), itertools.cycle(COLOURS),
                       strict=False))
    lines: dict[str, list[Line]] = {dtype: [] for dtype in dtypes_of(known)}
    for (side, variant, dtype), found in known.groupby(KIND, sort=False):
        style: dict[str, Any] = {"color": colours[side], **({"linewidth": 2.2, "zorder": 3} if side == OURS else {})}
        if n_variants[side] > 1 and variant == "eager":
            style |= {"linewidth": 1.1, "linestyle": "--"}
        lines[dtype].append(Line(side_name(side) + (f", {variant}" if n_variants[side] > 1 else ""),
                                 tuple(found[["context", column]].itertuples(index=False, name=None)), style))
    contexts = tuple((context, tokens(context)) for context in contexts_of(table))
    return tuple(Panel(dtype, "tokens of context", y_label, tuple(drawn), contexts=contexts, log_heights=True)
                 for dtype, drawn in lines.items())
