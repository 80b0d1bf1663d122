"""Measured rows as pictures: time per token and memory against context, each line named at its end."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.benchmark.markdown import TITLES, parameters, title, tokens
from lineartime.benchmark.rows import KIND, OURS, STEPS, contexts_of, dtypes_of, kinds_of, newest, side_name, size_of
from lineartime.plot import COLOURS, drawing, scale_logarithmically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

NAME_HEIGHT = 0.058
"""Of a line's name, in heights of a panel."""

Line = tuple[str, str, list[int], list[float]]
"""Side, variant, contexts, values."""


def files_of(table: "DataFrame") -> list[tuple[str, str]]:
    """File names of a table's pictures and what each shows, "time" or "memory"; none without two contexts to join."""
    first = table.iloc[0]
    if first["benchmark"] not in TITLES:
        return []
    machine = "cpu" if first["device"] == "cpu" else re.sub(r"\W+", "-", first["hardware"].lower()).strip("-")
    parts = [first["benchmark"], first["name"], machine, f"{first['threads']}threads" if first["threads"] > 1 else "",
             parameters(size_of(table)).replace(" ", ""), f"{table.n_tokens.max()}"]
    stem = "-".join(part for part in parts if part)
    return [(f"{stem}-{what}.png", what) for what in (["time", "memory"] if first["benchmark"] in STEPS else ["time"])
            if any(len(contexts) > 1 for lines in lines_of(table, what).values() for _, _, contexts, _ in lines)]


def lines_of(table: "DataFrame", what: str) -> dict[str, list[Line]]:
    """What is drawn, by type: the value of each side and variant by context."""
    column = "ms" if what == "time" else "peak_mib"
    lines: dict[str, list[Line]] = {dtype: [] for dtype in dtypes_of(table)}
    known = newest(table[table.ms.notna()]).dropna(subset=column).sort_values("context").groupby(KIND)
    for side, variant in dict.fromkeys((side, variant) for side, variant, _ in kinds_of(table)):
        for dtype, made in lines.items():
            if (side, variant, dtype) in known.groups:
                points = known.get_group((side, variant, dtype))
                made.append((side, variant, points.context.tolist(), points[column].tolist()))
    return lines


def digest(table: "DataFrame", what: str) -> str:
    """A hash of all that a picture is drawn from; the picture carries it, so that one of older rows is found out."""
    drawn = [title(table), what, [*lines_of(table, what).items()]]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def draw(table: "DataFrame", what: str, path: Path) -> None:
    """Write one picture: a panel for each type, FLASH in front. Raises ResourceError."""
    sides = sorted(table.side.unique(), key=lambda side: side != OURS)
    colour = dict(zip(sides, itertools.cycle(COLOURS), strict=False))
    panels_of = {dtype: lines for dtype, lines in lines_of(table, what).items() if lines}
    benchmark, hardware = table.benchmark.iat[0], table.hardware.iat[0]
    with drawing(path, width=6.2 * len(panels_of) if len(panels_of) > 1 else 8, height=4.4,
                 metadata={"Rows": digest(table, what)}) as figure:
        panels = figure.subplots(1, len(panels_of), squeeze=False, sharey=True)[0]
        for axes, (dtype, lines) in zip(panels, panels_of.items(), strict=True):
            two_kinds = {side for side in sides if sum(line[0] == side for line in lines) > 1}
            for side, variant, contexts, values in lines:
                eager = variant == "eager" and side in two_kinds
                axes.plot(contexts, values, marker="o", color=colour[side], markersize=3.5,
                          linewidth=1.1 if eager else 2.2 if side == OURS else 1.6,
                          linestyle=(0, (4, 2)) if eager else "-", zorder=3 if side == OURS else 2)
            scale_logarithmically(axes, {context: tokens(context) for context in contexts_of(table)})
            axes.set_title(dtype)
            axes.set_xlabel("tokens of context")
            axes.spines["right"].set_visible(False)
        step = "ms per token of a step" if benchmark in STEPS else "ms per generated token"
        panels[0].set_ylabel("peak memory, MiB" if what == "memory" else step)
        for axes, lines in zip(panels, panels_of.values(), strict=True):
            name_lines(axes, lines, colour)
        figure.suptitle(f"{title(table)}. {hardware}", fontsize=9.5, x=0.008, ha="left", color="#555555")


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
                      fontweight="bold" if side == OURS else "normal", annotation_clip=False,
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
