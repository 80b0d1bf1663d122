"""The paper's tables with our numbers beside its own, as Markdown."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.markdown import folded, listed, number, source_line, unique
from benchmarks.paper import memory
from benchmarks.paper.results import CELL, GAPS, Record, Results, gaps, results_of, speedups, spread, step_speedups
from benchmarks.paper.tables import PAPER, SCALE_NAMES, printed, read_toml, step_speedup
from lineartime.base.words import in_markdown, markdown

NOT_RUN, FAILED, NEVER = "not run", "failed", "--"
TRAIN, FINETUNE, STEP = ("train",), ("finetune",), ("step",)
four_figures = partial(number, figures=4)
Texts = Mapping[Any, str]  # by row and column; cells of which nothing is known are not there


class Measure(NamedTuple):
    """One number of a cell. title: with "{reference}" for the row that speed-ups are measured to.
    paper: its name in `paper.toml`, if it is there. kinds: of records that it is made of. values: a
    column of what was trained, or what makes them; text: what writes one."""

    title: str
    paper: str
    kinds: tuple[str, ...]
    values: str | Callable[[Results], pd.Series | pd.DataFrame]
    text: Callable[[Any], str] = number


def texts_of(values: pd.Series | pd.DataFrame, text: Callable[[Any], str] = number) -> Texts:
    """By row and column "17.31 (17.12-17.45)": a value, and its least and most if known."""
    return {cell: text(value) + (f" ({range_text(*map(text, ends))})" if ends and not math.isnan(ends[0]) else "")
            for cell, value, *ends in pd.DataFrame(values).itertuples()}


def range_text(least: str, most: str) -> str:
    return f"{least} to {most}" if least[0] in "+-" else f"{least}-{most}"


def speedup_texts(results: Results, reference: str | None) -> pd.Series:
    """Of the mean curve, with the least and the most of the seeds' own."""
    texts = {}
    for cell, value, seeds in speedups(results, reference).itertuples():
        reached = [number(seed) for seed in sorted(seeds) if not math.isnan(seed)]
        words = [range_text(reached[0], reached[-1])] if len(reached) > 1 else []
        words += [f"{len(seeds) - len(reached)} of {len(seeds)} seeds {NEVER}"] if len(reached) < len(seeds) else []
        range_of_seeds = f" ({'; '.join(words)})" if words and cell[0] != reference else ""
        texts[cell] = NEVER if math.isnan(value) else number(value) + range_of_seeds
    return pd.Series(texts, dtype=object)


def step_speedups_shown(results: Results, reference: str | None) -> pd.DataFrame:
    values = step_speedups(results, reference)
    values.loc[values.index.get_level_values("row") == reference, ["low", "high"]] = math.nan
    return values


def finetune_speedups(results: Results) -> pd.Series:
    ms = spread(results.finetuned.step_ms)["mean"].unstack("row")
    return ms.rdiv(ms.get(results.table.reference, math.nan), axis=0).stack().dropna().swaplevel()


def millions_of_parameters(results: Results) -> pd.Series:
    known = pd.concat([results.trained.n_parameters.droplevel("seed"), results.steps.n_parameters]).dropna()
    return known.groupby(level=CELL).first() / 1e6


MEASURES = {
    "seeds": Measure("Seeds", "", TRAIN, lambda results: results.trained.groupby(level=CELL).size(), "{:.0f}".format),
    "loss": Measure("Nats per token", "", TRAIN, "loss", "{:.3f}".format),
    "minutes": Measure("Processor minutes of training", "", TRAIN, "minutes", "{:.1f}".format),
    "perplexity": Measure("Perplexity per token", "perplexity", TRAIN, "perplexity", four_figures),
    "word_perplexity": Measure("Perplexity per word", "perplexity", TRAIN, "word_perplexity", four_figures),
    "token_perplexity": Measure("Perplexity per token", "", TRAIN, "perplexity", four_figures),
    "step": Measure("Milliseconds of a step", "step_ms", STEP, lambda results: results.steps[["median", "q1", "q3"]]),
    "to_quality": Measure("Speed-up to {reference}'s final quality", "speedup", TRAIN + STEP,
                          lambda results: speedup_texts(results, results.table.reference), str),
    "by_step": Measure("Speed-up over {reference} by time of a step", "step_speedup", STEP,
                       lambda results: step_speedups_shown(results, results.table.reference)),
    "by_finetuning": Measure("Speed-up by time of a fine-tuning step", "finetune_speedup", FINETUNE, finetune_speedups),
    "f1": Measure("F1", "f1", FINETUNE, lambda results: spread(results.finetuned.f1), "{:.1f}".format),
    "parameters": Measure("Parameters, millions", "parameters_m", TRAIN + STEP, millions_of_parameters),
    "memory": Measure("Peak memory of a step's process, MiB", "", STEP,
                      lambda results: results.steps.peak_mib.dropna(), "{:,.0f}".format)}
"""By the names in `tables.toml`."""
FOLDED = ("Parameters, millions", "Peak memory of a step's process, MiB")
WORDS = read_toml("words")


def tables_shown(records: Sequence[Record], names: Sequence[str]) -> list[Results]:
    """Tables at the scales that have records of them; one without any is shown once."""
    shown = []
    for name in names:
        at_scales = [results_of(name, scale, records) for scale in SCALE_NAMES[::-1]]
        shown += [results for results in at_scales if results.rows] or at_scales[:1]
    return shown


def table_section(results: Results, pictures: Sequence[str] = ()) -> str:
    """A table at one scale: heading, pictures in Markdown, our numbers and the paper's, notes."""
    table = results.table
    parts = [f"### {table.title}, {results.scale.name} scale", *pictures]
    if not results.rows:
        return "\n\n".join([*parts, f"Not measured yet: {NOT_RUN} at this scale, `{command_of(results)}`."]) + "\n"
    made = {MEASURES[name].title.format(reference=table.reference): measured(results, MEASURES[name])
            for name in table.measures}
    if table.name == "speedup":
        parts.append(speedup_grid(results))
    elif len(table.columns) == 1:
        parts.append(grid("", *({(row, title): both[side][row, results.columns[0]] for row in results.rows
                                 for title, both in made.items()} for side in (0, 1))))
        parts += memory.parts(results) if table.name == "memory" else []
        parts += [memory.gains(results)] if table.name == "code" else []
    else:
        parts += gap_grids(results) if table.name == "gap" else []
        parts += [grid(title, *both) for title, both in made.items()]
        parts += [WORDS["memory"]["differences"], memory.columns_part(results)] if table.name == "memory_texts" else []
    return "\n\n".join([*parts, *notes(results)]) + "\n"


def grid(title: str, ours: Texts, theirs: Texts) -> str:
    """Our numbers beside the paper's."""
    rows, columns = (unique(names) for names in zip(*ours, strict=True))
    head, lines = [""], [[row] for row in rows]
    for column in columns:
        printed_any = any(theirs.get((row, column)) for row in rows)
        head += [f"{column}: paper", "ours"] if printed_any else [column]
        for row, line in zip(rows, lines, strict=True):
            line += [*([theirs[row, column]] if printed_any else []), ours[row, column]]
    text = markdown(head, lines, 1)
    if title in FOLDED:
        return folded(title, text)
    return f"**{title}**\n\n{text}" if title else text


def measured(results: Results, measure: Measure) -> tuple[Texts, Texts]:
    """Ours and the paper's, whose speed-ups by time of a step may have to be made from times."""
    table, values, ours, theirs = results.table, measure.values, {}, {}
    texts = texts_of(spread(results.trained[values]) if isinstance(values, str) else values(results), measure.text)
    compared = [table.reference] if "{reference}" in measure.title else []
    for row, column in itertools.product(results.rows, results.columns):
        ours[row, column] = texts.get((row, column)) or why_not(results, [row, *compared], column, measure.kinds)
        ratio = step_speedup(table.name, row, table.reference, column) if measure.paper == "step_speedup" else None
        theirs[row, column] = printed(table.name, measure.paper, row, column) or (number(ratio) if ratio else "")
    return ours, theirs


def why_not(results: Results, rows: Sequence[str | None], column: str, kinds: Sequence[str]) -> str:
    failed = any(place[0] in rows and place[1] == column and place[2] in kinds for place in results.failed)
    return FAILED if failed else NOT_RUN


def gap_grids(results: Results) -> list[str]:
    """Table 5: what mixed chunks add to the perplexity, and to the loss."""
    made = {}
    for what in ("perplexity", "loss"):
        texts = texts_of(spread(gaps(results, what)), lambda x: f"{x:+.{2 if abs(x) >= 0.1 else 3}f}")
        made[what] = {cell: texts.get(cell) or why_not(results, GAPS[cell[0]], cell[1], ["train"])
                      for cell in itertools.product(GAPS, results.columns)}
    paper = {(row, column): printed("gap", "gap", GAPS[row][1], column) for row, column in made["loss"]}
    grids = [grid(f"Increase of the perplexity, {task}",
                  {cell: text for cell, text in made["perplexity"].items() if cell[1].split()[0] == task}, paper)
             for task in unique(column.split()[0] for column in results.columns)]
    return [*grids, grid("Increase of the loss, nats per token", made["loss"], {})]


def speedup_grid(results: Results) -> str:
    """Figure 1: FLASH's speed-ups, contexts by rivals."""
    made: dict[str, tuple[str, Texts]] = {}
    for rival in (row for row in results.table.models if row != "FLASH"):
        made |= {f"over {rival}": (rival, texts_of(speedup_texts(results, rival), str)),
                 f"over {rival} by time of a step": (rival, texts_of(step_speedups_shown(results, rival)))}
    kinds = TRAIN + STEP
    ours = {(column, title): texts.get(("FLASH", column)) or why_not(results, ["FLASH", rival], column, kinds)
            for column in results.columns for title, (rival, texts) in made.items()}
    return grid("", ours, {(column, title): printed("speedup", "speedup", title.removeprefix("over "), column)
                           for column, title in ours})


def command_of(results: Results) -> str:
    return f"python -m benchmarks reproduce {results.table.name} --scale {results.scale.name} --texts TEXTS"


def notes(results: Results) -> list[str]:
    """What the numbers are, what failed, what is not there, and where all of it comes from."""
    table, note = results.table, PAPER[results.table.name].get("note")
    words = [WORDS["quality"]] * bool(len(results.trained))
    words += [WORDS["notes"][name] for name in table.measures if name in WORDS["notes"]]
    if results.table.name == "triviaqa" and len(results.finetuned):
        guessed = [f"{row['word_overlap']['f1']:.1f}" for row in results.finetuned.record if "word_overlap" in row]
        if guessed:  # older rows have the score of that guess
            words.append(f"F1 of the span that shares most words with the question: {listed(guessed)}.")
        words.append("Fine-tuning was not timed side by side.")
    words += [note] if note else []
    left_out = [", ".join(name for name in every if name not in known) for every, known in (
        (table.columns, results.columns), (table.models, results.rows)) if len(known) < len(every)]
    failures = [f"{row}, {column}{'' if seed is None else f', seed {seed}'}: {in_markdown(error)}"
                for (row, column, _, seed), error in results.failed.items()]
    records = [*results.trained.record, *results.finetuned.record, *results.steps.record]
    hardware = PAPER[table.name].get("hardware")
    caption = (table.cpu_caption if results.scale.name == "cpu" else "") or results.scale.caption
    return [*([f"<sub>{' '.join(words)}</sub>"] if words else []),
            *([f"At this scale {NOT_RUN}: {'; '.join(left_out)}."] if left_out else []),
            *([f"Failed: {'; '.join(failures)}."] if failures else []),
            f"<sub>Scale {results.scale.name}: {caption}."
            + (f" The paper's times are of {hardware}." if hardware else "") + "</sub>",
            *([source_line([row | {"command": command_of(results)} for row in records])] if records else [])]
