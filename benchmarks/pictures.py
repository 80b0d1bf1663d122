"""Pictures of measured rows as PNG: panels of lines beside each other, and one legend below."""

import hashlib
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lineartime.atomic_io import replaced
from lineartime.plot import DASHED, DPI, STYLE, use_powers_of_two

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Line:
    """Points from left to right: place and height, and perhaps the least and the most that the height may be."""

    name: str
    """In the legend, if there is one."""
    points: tuple[tuple[float, ...], ...]
    style: dict[str, Any] = field(default_factory=dict)
    """Settings of matplotlib other than the usual ones."""


@dataclass(frozen=True)
class Panel:
    """One diagram of lines."""

    title: str
    x_label: str
    y_label: str = ""
    lines: tuple[Line, ...] = ()
    x_scale: Literal["linear", "log", "positions"] = "linear"
    """"positions" are powers of two."""
    contexts: tuple[tuple[int, str], ...] = ()
    """What is written along the bottom, which then has powers of two."""
    log_heights: bool = False
    level: float | None = None
    """Height of a dashed line."""
    level_name: str = ""


@dataclass(frozen=True)
class Picture:
    """Panels under a caption, which says all that the alternative text of the picture has to say."""

    caption: str
    panels: tuple[Panel, ...]


def digest(picture: Picture) -> str:
    """A hash of all that a picture is drawn from; the file carries it, so that one of older rows is found out."""
    def as_stored(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        # The pictures in the repository were drawn when a panel also had `dots`, after its lines.
        return {key: each for name, value in fields
                for key, each in [(name, value), *([("dots", ())] if name == "lines" else [])]}

    return hashlib.sha256(json.dumps(asdict(picture, dict_factory=as_stored)).encode()).hexdigest()


def draw(picture: Picture, path: Path) -> None:
    """Write a picture as PNG, whole or not at all. Raises ResourceError."""
    import matplotlib

    with matplotlib.rc_context(STYLE), replaced(path) as file:
        figure_of(picture).savefig(file, format="png", facecolor="white", metadata={"Rows": digest(picture)})


def figure_of(picture: Picture) -> "Figure":
    """Panels beside each other, in at most three columns, and one legend for all of them below."""
    from matplotlib.figure import Figure

    panels = picture.panels
    n_columns = 2 if len(panels) == 4 else min(3, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    width = max(0.3 + 4.2 * n_columns, 8)
    figure = Figure(figsize=(width, 0.3 + 3.2 * n_rows), dpi=DPI, layout="constrained")
    places = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for axes in places[len(panels):]:
        axes.remove()
    for i, (axes, panel) in enumerate(zip(places, panels, strict=False)):
        left = panels[i - 1] if i % n_columns else None
        draw_lines(axes, panel)
        scale_axes(axes, panel, panels)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label if left is None or left.y_label != panel.y_label else "")
    finish_figure(figure, picture.caption)
    return figure


def draw_lines(axes: "Axes", panel: Panel) -> None:
    """Lines, each with a band from the least to the most; a single point has a bar."""
    for line in (line for line in panel.lines if line.points):
        x, y, *reach = (list(column) for column in zip(*line.points, strict=True))
        style = {"linewidth": 1.5, "marker": "o", "markersize": 4, "zorder": 2, **line.style}
        style |= {"marker": "o", "markersize": 6} if len(x) == 1 else {}
        (drawn,) = axes.plot(x, y, label=line.name, **style)
        if reach and len(x) == 1:
            axes.vlines(x, reach[0], reach[1], color=drawn.get_color(), alpha=0.5, linewidth=2)
        elif reach:
            axes.fill_between(x, reach[0], reach[1], color=drawn.get_color(), alpha=0.18, linewidth=0)
    if panel.level is not None:
        axes.axhline(panel.level, label=panel.level_name, **DASHED)


def scale_axes(axes: "Axes", panel: Panel, panels: Sequence[Panel]) -> None:
    """Scales of a panel and what is written along its axes. Logarithmic heights are those of all panels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if panel.contexts or panel.x_scale == "positions":
        use_powers_of_two(axes)
    if panel.contexts:
        axes.set_xticks(*zip(*panel.contexts, strict=True))
    if panel.log_heights:
        heights = [height for each in panels if each.log_heights
                   for line in each.lines for point in line.points for height in point[1:]]
        low, high = min(heights), max(heights)
        room = max(1.15, 2.3 * (low / high) ** 0.5)  # two round numbers are between limits that are 5 times apart
        axes.set(yscale="log", ylim=(low / room, high * room))
    if panel.x_scale == "log":
        axes.set_xscale("log")
    for axis in [axes.xaxis] * (panel.x_scale == "log") + [axes.yaxis] * panel.log_heights:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1000 else f"{y:g}"))
        axis.set_minor_formatter(NullFormatter())


def finish_figure(figure: "Figure", caption: str) -> None:
    """Put the caption above the panels, and one legend for all of them below, for which the figure grows."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    width, height = figure.get_size_inches()
    if handles:
        n_rows = math.ceil(len(handles) / max(1, width // max(1.9, 0.6 + 0.095 * max(map(len, handles)))))
        figure.set_figheight(height + 0.25 * n_rows)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center",
                      ncols=math.ceil(len(handles) / n_rows))
    figure.suptitle(textwrap.fill(caption, round(13.5 * width)), fontsize=9.5, x=0.008, ha="left", color="#555555")
