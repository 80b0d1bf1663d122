"""Measured rows as pictures: time per token and memory against context, each line named at its end."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.benchmark.markdown import TITLES, parameters, title, tokens
from lineartime.benchmark.rows import STEPS, Table, side_name
from lineartime.plot import COLOURS, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

NAME_HEIGHT = 0.058
"""Of a line's name, in heights of a panel."""

Line = tuple[str, str, list[int], list[float]]
"""Side, variant, contexts, values."""


def files_of(table: Table) -> list[tuple[str, str]]:
    """File names of a table's pictures and what each shows, "time" or "memory"; none without two contexts to join."""
    if table.benchmark not in TITLES:
        return []
    machine = "cpu" if table.on_cpu else re.sub(r"\W+", "-", table.hardware.lower()).strip("-")
    parts = [table.benchmark, table.name, machine, f"{table.threads}threads" if table.threads > 1 else "",
             parameters(table.n_parameters).replace(" ", ""), f"{max(cell.n_tokens for cell in table.cells)}"]
    stem = "-".join(part for part in parts if part)
    return [(f"{stem}-{what}.png", what) for what in (["time", "memory"] if table.benchmark in STEPS else ["time"])
            if any(len(contexts) > 1 for dtype in table.dtypes for _, _, contexts, _ in lines_of(table, dtype, what))]


def lines_of(table: Table, dtype: str, what: str) -> list[Line]:
    """What is drawn for one type: the value of each side and variant by context."""
    lines = []
    for side in table.sides:
        for variant in dict.fromkeys(cell.variant for cell in table.cells if cell.side == side):
            found = [table.newest(side=side, variant=variant, dtype=dtype, context=context)
                     for context in table.contexts]
            points = [(cell.context, cell.ms.median if what == "time" else cell.peak_mib) for cell in found
                      if cell is not None and cell.ms]
            known = [(context, value) for context, value in points if value]
            if known:
                lines.append((side, variant, [context for context, _ in known], [value for _, value in known]))
    return lines


def digest(table: Table, what: str) -> str:
    """A hash of all that a picture is drawn from; the picture carries it, so that one of older rows is found out."""
    drawn = [title(table), what, [[dtype, lines_of(table, dtype, what)] for dtype in table.dtypes]]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def draw(table: Table, what: str, path: Path) -> None:
    """One picture: a panel for each type, FLASH in front."""
    sides = sorted(table.sides, key=lambda side: side != "flash")
    colour = dict(zip(sides, itertools.cycle(COLOURS), strict=False))
    dtypes = [dtype for dtype in table.dtypes if lines_of(table, dtype, what)]
    with drawing(path, width=6.2 * len(dtypes) if len(dtypes) > 1 else 8, height=4.4,
                 metadata={"Rows": digest(table, what)}) as figure:
        panels = figure.subplots(1, len(dtypes), squeeze=False, sharey=True)[0]
        for axes, dtype in zip(panels, dtypes, strict=True):
            lines = lines_of(table, dtype, what)
            two_kinds = {side for side in sides if len({line[1] for line in lines if line[0] == side}) > 1}
            for side, variant, contexts, values in lines:
                eager = variant == "eager" and side in two_kinds
                axes.plot(contexts, values, marker="o", color=colour[side], markersize=3.5,
                          linewidth=1.1 if eager else 2.2 if side == "flash" else 1.6,
                          linestyle=(0, (4, 2)) if eager else "-", zorder=3 if side == "flash" else 2)
            scale_logarithmically(axes, {context: tokens(context) for context in table.contexts})
            axes.set_title(dtype)
            axes.set_xlabel("tokens of context")
        axes = panels[0]
        if what == "memory":
            axes.set_ylabel("peak memory, MiB")
        elif table.benchmark in STEPS:
            axes.set_ylabel("ms per token of a step")
        else:
            axes.set_ylabel("ms per generated token")
        for axes, dtype in zip(panels, dtypes, strict=True):
            axes.spines["right"].set_visible(False)
            name_lines(axes, lines_of(table, dtype, what), colour)
        figure.suptitle(f"{title(table)}. {table.hardware}", fontsize=9.5, x=0.008, ha="left", color="#555555")


def scale_logarithmically(axes: "Axes", contexts: Mapping[int, str]) -> None:
    """Both axes, with the names of the contexts that were measured and plain numbers."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(contexts), list(contexts.values()))
    axes.xaxis.set_minor_locator(NullLocator())
    label_plainly(axes.yaxis)


def label_plainly(axis: "Axis") -> None:
    """1, 2, 5, 10 along a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1000 else f"{y:g}"))
    axis.set_minor_formatter(NullFormatter())


def name_lines(axes: "Axes", lines: Sequence[Line], colour: dict[str, str]) -> None:
    """Each line's name right of the panel, pushed apart where ends are close; a thread leads from the end to it."""
    several = {side for side, *_ in lines if sum(line[0] == side for line in lines) > 1}
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ends = sorted((((math.log(values[-1]) - low) / (high - low), side, variant, contexts[-1], values[-1])
                   for side, variant, contexts, values in lines))
    places = spread_apart([height for height, *_ in ends], NAME_HEIGHT)
    for place, (_, side, variant, context, value) in zip(places, ends, strict=True):
        axes.annotate(side_name(side) + (f", {variant}" if side in several else ""), xy=(context, value),
                      xytext=(1.06, place), textcoords="axes fraction", va="center", fontsize=9, color=colour[side],
                      fontweight="bold" if side == "flash" else "normal", annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": "#c4c4c4", "linewidth": 0.7, "shrinkA": 2, "shrinkB": 4,
                                  "relpos": (0, 0.5)})


def spread_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """The rising places nearest to the rising ones that are wanted, at least `gap` apart: neighbours that are too
    close are moved as one block to their mean."""
    blocks: list[list[float]] = []
    for place in wanted:
        blocks.append([place])
        while len(blocks) > 1:
            *_, lower, upper = blocks
            if middle(upper) - middle(lower) >= gap * (len(lower) + len(upper)) / 2:
                break
            blocks[-2:] = [lower + upper]
    return [middle(block) + gap * (i - (len(block) - 1) / 2) for block in blocks for i in range(len(block))]


def middle(places: Sequence[float]) -> float:
    return sum(places) / len(places)
