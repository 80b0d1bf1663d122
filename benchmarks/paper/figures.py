"""The paper's figures, and pictures of its tables, from the records of `python -m benchmarks reproduce`."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from benchmarks.markdown import number, tokens, unique
from benchmarks.paper import memory
from benchmarks.paper.results import Results, costs, curve_of, gaps, of_cell, positions_of, speedups, step_speedups
from benchmarks.paper.tables import value
from lineartime.plot import COLOURS, Line, Panel, Picture, middle

SPREAD = ["mean", "min", "max"]
IN_FRONT = ("FLASH", "GAU", "C = 256", "to the same quality")
LEFT_OUT_NATS = 0.2
QUALITY = "minus nats per token"
RING = {"marker": "o", "linestyle": "", "markersize": 7, "color": "#444444", "markerfacecolor": "white", "zorder": 4}


def pictures_of(results: Results) -> dict[str, Picture]:
    """A table's pictures by file name; none of what nothing is known of."""
    pictures = {}
    for what in PICTURES.get(results.table.name, ("perplexity",)):
        shows, panels_of = KINDS[what]
        panels = tuple(panel for panel in panels_of(results) if panel.lines or any(dot[1] for dot in panel.dots))
        words = f"{results.table.title}, {results.scale.name} scale. {shows}"
        seeds = sorted(set(results.trained.loss.unstack("seed").count(axis=1)))
        if seeds and what != "latency":
            words += f". {' to '.join(unique(map(str, (seeds[0], seeds[-1]))))} {'seed' if seeds == [1] else 'seeds'}"
        if panels:
            pictures[f"{results.table.name}-{results.scale.name}-{what}.png"] = Picture(words, panels)
    return pictures


def line(name: str, names: Iterable[str], heights: pd.DataFrame) -> Line:
    """heights: by place, height, least and most. names: of all lines a picture may have, for their colours."""
    ordered = sorted(names, key=lambda each: each not in IN_FRONT)
    style = {"color": COLOURS[ordered.index(name) % len(COLOURS)]}
    return Line(name, tuple(heights.astype(float).itertuples(name=None)),
                style | ({"zorder": 3, "linewidth": 2.2} if name in IN_FRONT else {}))


def lines(names: Iterable[str], heights: pd.DataFrame) -> tuple[Line, ...]:
    """heights: by row and place, height, least and most."""
    known = {name: of_cell(heights, name).droplevel("row").sort_index() for name in unique(names)}
    return tuple(line(name, known, found) for name, found in known.items() if len(found))


def over_seeds(values: pd.DataFrame) -> pd.DataFrame:
    """Mean, least and most of a column for each seed."""
    return values.agg(SPREAD, axis=1)


def cost_panels(results: Results) -> list[Panel]:
    """Figures 5 to 8: the time of a step by context, then a panel for each context: quality, which is minus the
    held-out loss, against steps x time. The dashed line is the best of the reference's mean curve.

    Only cells that were both trained and timed are in it. The first third of every curve, where quality rises so fast
    that the rest would be pressed together, is left out up to the dashed line. Costs ten times apart are on a
    logarithmic scale."""
    known, panels = costs(results), latency_panels(results)
    unit_s, units = (60.0, "minutes") if (known.seconds * known.steps).max() < 7200 else (3600.0, "hours")
    for column in own_columns(results):
        best, drawn, rings, clocks = math.nan, [], [], []
        for row in (row for row in results.rows if (row, column) in known.index):
            cell, curve = known.loc[(row, column)], curve_of(results, row, column)
            best, cost = float(cell.best), cell.seconds / unit_s
            reached = cost * cell.reached
            n_before = sum(cost * curve.index < reached) if reached > 0 else len(curve)
            start = min(len(curve) // 3, max(n_before - 1, 0))
            drawn.append(line(row, results.table.models, over_seeds(-curve).set_axis(cost * curve.index)[start:]))
            rings += [(float(reached), -best)] if row != results.table.reference and reached > 0 else []
            timed = results.steps.record[row, column]
            clocks.append("processor time" if timed["clock"] == "cpu" else f"time on one {timed['gpu'] or 'processor'}")
        ends = [each.points[-1][0] for each in drawn]
        drawn += [Line("reaches it", tuple(rings), RING)] if rings else []
        panels.append(Panel(title_of(results, column), f"{', '.join(unique(clocks))}, {units}", QUALITY,
                            tuple(drawn), level=None if math.isnan(best) else -best,
                            level_name=f"best of {results.table.reference}",
                            x_scale="log" if ends and max(ends) > 10 * min(ends) else "linear"))
    return panels if len(known) else []


def latency_panels(results: Results) -> list[Panel]:
    """Time against the context, with quartiles: per token, or where columns differ in more than the context, of a step.

    Nothing without two contexts to join."""
    of_step, steps = results.table.kind == "step", results.steps
    contexts = {column: results.table.columns[column].context for column in own_columns(results)
                if column in steps.index.get_level_values("column")}
    if len(contexts) < 2:
        return []
    ms = steps[["median", "q1", "q3"]].div(1.0 if of_step else steps.tokens / 1000, axis=0)
    return [Panel("Time of a training step", "tokens of context" + (" x rows" if of_step else ""),
                  "ms" if of_step else "ms per 1,000 tokens", lines(results.table.models, by_context(ms, contexts)),
                  contexts=tuple((context, column if of_step else tokens(context))
                                 for column, context in contexts.items()), log_heights=True)]


def by_context(values: pd.DataFrame, contexts: Mapping[str, int]) -> pd.DataFrame:
    """Lines of some columns, by their contexts."""
    return values[values.index.isin(list(contexts), level="column")].rename(index=contexts, level="column")


def position_panels(results: Results) -> list[Panel]:
    """A panel for each context: the loss of early and of late tokens, at the end of training."""
    panels = []
    for column in own_columns(results):
        losses = {row: positions_of(results, row, column) for row in results.rows}
        drawn = [line(row, results.table.models, over_seeds(found).set_axis([middle(*span) for span in found.index]))
                 for row, found in losses.items() if len(found)]
        panels.append(Panel(title_of(results, column), "position, tokens", "held-out nats per token", tuple(drawn),
                            x_scale="positions"))
    return panels


def size_panels(results: Results) -> list[Panel]:
    """Figure 3: a line for each kind of layer, a point for each size."""
    quality = (-results.trained.loss.astype(float)).groupby(["row", "column"]).agg(["mean", "min", "max"])
    quality["ms"] = 1000 * results.steps["median"] / results.steps.tokens
    points = quality.dropna().rename(index=lambda row: row.split()[0], level="row").set_index("ms", append=True)
    return [Panel(title_of(results, column), "ms per 1,000 tokens of training", QUALITY,
                  lines((row.split()[0] for row in results.table.models),
                        points[points.index.isin([column], level="column")].droplevel("column")))
            for column in results.columns]


def speedup_panels(results: Results) -> list[Panel]:
    """Figure 1: a panel for each Transformer, FLASH's speed-up over it against the context."""
    panels, contexts = [], {name: column.context for name, column in results.table.columns.items()}
    for rival in (row for row in results.table.models if row != "FLASH"):
        quality, step = (of_cell(found, "FLASH").droplevel("row")
                         for found in (speedups(results, rival), step_speedups(results, rival)))
        quality = quality.dropna()
        each = pd.DataFrame(quality.seeds.tolist(), quality.index)
        paper = pd.Series({name: value("speedup", "speedup", rival, name) for name in contexts})
        heights = {"to the same quality": pd.DataFrame({"value": quality.value, "low": each.min(axis=1),
                                                        "high": each.max(axis=1)}),
                   "by the time of a step": step,
                   "the paper's": pd.DataFrame(dict.fromkeys(step.columns, paper.dropna()))}
        drawn = lines(heights, by_context(pd.concat(heights, names=["row", "column"]), contexts))
        panels.append(Panel(f"Over {rival}", "tokens of context", "times as fast",
                            drawn if len(step) or len(quality) else (), log_heights=True, level=1.0,
                            level_name="as fast",
                            contexts=tuple((context, tokens(context)) for context in contexts.values())))
    return panels


def perplexity_dots(results: Results) -> list[Panel]:
    """Tables 1 and 2: a panel for each column; the dashed line is the mean of the row that others are changes of."""
    first = results.table.reference or next(iter(results.table.models))
    panels = []
    for column in results.columns:
        values = values_of(results, results.trained.perplexity, column)
        level = fmean(values[first]) if values[first] else None
        panels.append(dots(title_of(results, column), "perplexity per token", values, level, first))
    return panels


def answer_dots(results: Results) -> list[Panel]:
    """Table 4: perplexity of pretraining, and F1 beside that of a guess by word overlap."""
    (column,) = results.table.columns
    guesses = [record["word_overlap"]["f1"] for record in results.finetuned.record]
    return [dots("Pretraining, left is better", "perplexity per masked token",
                 values_of(results, results.trained.perplexity, column)),
            dots("Answers, right is better", "F1, percent", values_of(results, results.finetuned.f1, column),
                 max(guesses, default=None), "a guess by word overlap")]


def gap_dots(results: Results) -> list[Panel]:
    """Table 5: a panel for each task; what each seed's perplexity is with mixed chunks, less that without them."""
    panels, found = [], gaps(results, "perplexity")
    for task in ("LM", "MLM"):
        values = {f"{row.replace('->', 'to')}, {column.context:,}": of_cell(found, row, name).tolist()
                  for row in found.index.unique("row") for name, column in results.table.columns.items()
                  if name.split()[0] == task}
        panels.append(dots(task, "perplexity per token", {name: each for name, each in values.items() if each},
                           0.0, "no difference"))
    return panels


def memory_panels(results: Results) -> list[Panel]:
    """The study of text, of rows that have several seeds: loss by context, and differences to FLASH by recurrence and
    by tokens trained on, from a quarter of them."""
    names = [row for row in results.table.models if row not in results.table.one_seed]
    rows = [(row, base) for row, base in memory.compared(results) if row in names]
    contexts, classes, curves = (memory.losses_at(results, told)
                                 for told in (memory.by_context, memory.by_class, memory.by_tokens))

    def drawn(name: str, seeds: Mapping[float, Mapping[int, float]], what: Sequence[str]) -> list[Line]:
        heights = {place: list(each.values()) for place, each in sorted(seeds.items()) if each}
        return [line(name, names, over_seeds(pd.DataFrame.from_dict(heights, orient="index"))[what])] if heights else []

    # At contexts longer than those of training a loss may rise so far that all others would be pressed together.
    first = [fmean(losses.values()) for losses in contexts[min(contexts)].values()] if contexts else []
    by_context = [each for row in names for each in drawn(
        row, {context: losses[row] for context, losses in contexts.items()
              if row in losses and fmean(losses[row].values()) < max(first) + LEFT_OUT_NATS}, ["mean"])]
    panels = [Panel("Loss by context, means", "tokens of context", "nats per token", tuple(by_context),
                    contexts=tuple((context, tokens(context)) for context in sorted(contexts)))]
    differences: dict[str, Any] = {"y_label": "difference, nats", "level": 0.0, "level_name": "as FLASH"}
    for kind in memory.KINDS:
        seen = [place for place in classes if place[0] == kind]
        # Classes stand at powers of two, as contexts do, and the models of a class side by side.
        points = [each for n, (row, base) in enumerate(rows) for i, place in enumerate(seen) for each in drawn(
            row, {2 ** (i + 0.1 * (n - (len(rows) - 1) / 2)): memory.paired(classes[place], row, base)}, SPREAD)]
        panels.append(Panel(f"{kind.capitalize()}s, and where they were before", "", lines=tuple(points), **differences,
                            contexts=tuple((2**i, textwrap.fill(place[1], 12)) for i, place in enumerate(seen))))
    by_tokens = [each for row, base in rows for each in drawn(
        row, {n / 1e6: memory.paired(losses, row, base) for n, losses in curves.items() if 4 * n > max(curves)},
        SPREAD)]
    panels.append(Panel("While it learns, scored part", "million tokens trained on", lines=tuple(by_tokens),
                        **differences))
    return panels


def dots(title: str, x_label: str, values: Mapping[str, Sequence[float]], level: float | None = None,
         level_name: str = "") -> Panel:
    """values: of each name the numbers of its seeds, perhaps none."""
    return Panel(title, x_label, dots=tuple((name, tuple(each), number(fmean(each)) if each else "not run")
                                            for name, each in values.items()), level=level, level_name=level_name)


def values_of(results: Results, values: pd.Series, column: str) -> dict[str, list[float]]:
    """Of each row the numbers of its seeds, perhaps none."""
    return {row: of_cell(values, row, column).tolist() for row in results.table.models}


def own_columns(results: Results) -> list[str]:
    """Those that the scale runs: not where runs of other tables are all there is."""
    planned = {column for _, column in results.table.cells[results.scale.name]}
    return [column for column in results.columns if column in planned]


def title_of(results: Results, column: str) -> str:
    """With the column's name, if it says more than its context."""
    context = f"ontext {results.table.columns[column].context:,}"
    return f"C{context}" if column.isdigit() else f"{column}, c{context}"


KINDS: dict[str, tuple[str, Callable[[Results], list[Panel]]]] = {
    "cost": ("Quality against what training costs", cost_panels),
    "positions": ("Loss by position in the context", position_panels),
    "latency": ("Time of a training step", latency_panels),
    "sizes": ("Quality against the time of a step", size_panels),
    "speedup": ("FLASH's speed-up", speedup_panels),
    "perplexity": ("Perplexity, left is better", perplexity_dots),
    "answers": ("Pretraining and answers", answer_dots),
    "worth": ("What the long memory is worth, models with several seeds: loss by context, but for losses more than "
              f"{LEFT_OUT_NATS} above the worst at the shortest; differences to FLASH, seed by seed, by recurrence "
              "class and by tokens trained on, below 0 is better (mean, least and most)", memory_panels),
    "gap": ("What mixed chunks add to the perplexity, left is better", gap_dots)}
"""What a picture shows, and its panels; one of which nothing is known is left out."""
PICTURES = {**dict.fromkeys(("mlm_c4", "lm_wiki40b", "lm_pg19", "flash_ablation", "chunk_size", "more_tokens"),
                            ("cost", "positions")), "gau_vs_transformer": ("sizes",), "triviaqa": ("answers",),
            "gap": ("gap",), "memory": ("worth",), "gpu_latency": ("latency",), "speedup": ("speedup",)}
"""What is drawn of a table; of others their perplexity."""
