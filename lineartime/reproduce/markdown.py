"""The paper's tables with our numbers beside its own, as Markdown, made of records and `paper.toml` alone."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from lineartime.benchmark.markdown import (
    CLOCKS,
    folded,
    joined,
    machine_text,
    markdown,
    number,
    provenance_words,
    unique,
)
from lineartime.reproduce.paper import Paper, read_paper
from lineartime.reproduce.records import Record
from lineartime.reproduce.results import CELL, Results, results_of, speedups, spread, step_speedups
from lineartime.reproduce.scales import caption_of
from lineartime.reproduce.tables import SCALE_NAMES, TABLES, ScaleName

NOT_RUN, NOT_TIMED, FAILED, NEVER = "not run", "not timed", "failed", "--"
Texts = Mapping[Hashable, str]
"""By row and column; cells of which nothing is known are not there."""


@dataclass(frozen=True)
class Measure:
    """One number of a cell: what the paper's is called, and what ours says."""

    name: str
    """In `paper.toml`; a name that is not there has no numbers of the paper."""
    title: str
    """With "{reference}" for the row that speed-ups are measured to."""
    texts: Callable[[Results], Texts]
    kinds: tuple[str, ...]
    """Of records that it is made of."""
    folded: bool = False
    """Shown only when it is opened."""
    note: str = ""
    """What is said of it below the tables, with "{whose}" for the row that it is compared with."""


def texts_of(values: pd.Series | pd.DataFrame, text: Callable[[float], str] = number) -> Texts:
    """By row and column "17.31 (17.12-17.45)": a value, and where they are known its least and most."""
    return {cell: text(value) + (f" ({range_text(*map(text, ends))})" if ends and not math.isnan(ends[0]) else "")
            for cell, value, *ends in pd.DataFrame(values).itertuples()}


def range_text(least: str, most: str) -> str:
    return f"{least} to {most}" if least[0] in "+-" else f"{least}-{most}"


def of_seeds(values: pd.Series) -> pd.DataFrame:
    """By row and column: the mean of the seeds, with the least and the most of several."""
    found = spread(values)
    return found[["mean"]].join(found[["min", "max"]].where(found["size"] > 1))


def speedup_texts(results: Results, reference: str) -> Texts:
    """Of the mean curve, with the least and the most of the seeds' own curves."""
    texts = {}
    for cell, value, seeds in speedups(results, reference).itertuples():
        reached = [seed for seed in seeds if not math.isnan(seed)]
        words = [range_text(number(min(reached)), number(max(reached)))] if len(reached) > 1 else []
        words += [f"{len(seeds) - len(reached)} of {len(seeds)} seeds {NEVER}"] if len(reached) < len(seeds) else []
        alone = math.isnan(value) or cell[0] == reference or not words
        texts[cell] = (NEVER if math.isnan(value) else number(value)) + ("" if alone else f" ({'; '.join(words)})")
    return texts


def step_speedup_texts(results: Results, reference: str) -> Texts:
    values = step_speedups(results, reference)
    values.loc[values.index.get_level_values("row") == reference, ["low", "high"]] = math.nan
    return texts_of(values)


def finetune_speedups(results: Results) -> pd.Series:
    ms = spread(results.finetuned.step_ms)["mean"].unstack("row")
    return ms.rdiv(ms.get(results.table.reference), axis=0).stack().swaplevel()


def n_parameters(results: Results) -> pd.Series:
    known = pd.concat([results.trained.n_parameters.droplevel("seed"), results.timed.n_parameters]).dropna()
    return known.groupby(level=CELL).first()


def perplexity_text(x: float) -> str:
    return number(x, 4)


def signed(x: float) -> str:
    return f"{x:+.{2 if abs(x) >= 0.1 else 3}f}"


MEASURE = {
    "perplexity": Measure("perplexity", "Perplexity per token",
                          lambda results: texts_of(of_seeds(results.trained.perplexity), perplexity_text), ("train",)),
    "word_perplexity": Measure("perplexity", "Perplexity per word", lambda results: texts_of(
        of_seeds(results.trained.word_perplexity), perplexity_text), ("train",)),
    "step": Measure("step_ms", "Milliseconds of a step",
                    lambda results: texts_of(results.steps[["median", "q1", "q3"]]), ("step",)),
    "to_quality": Measure("speedup", "Speed-up to {reference}'s final quality",
                          lambda results: speedup_texts(results, results.table.reference or ""), ("train", "step"),
                          note="Speed-up to the same quality, as the paper defines it: the time of {whose} training to "
                          "its best mean loss over the time of this model's to the same loss, each its steps times the "
                          f"time of one; \"{NEVER}\" never gets there; losses are those of a part of the split, scored "
                          "during training."),
    "by_step": Measure("step_speedup", "Speed-up over {reference} by time of a step",
                       lambda results: step_speedup_texts(results, results.table.reference or ""), ("step",),
                       note="By time of a step: {whose} over this model's, both of one run (quartile over quartile)."),
    "by_finetuning": Measure("finetune_speedup", "Speed-up by time of a fine-tuning step",
                             lambda results: texts_of(finetune_speedups(results)), ("finetune",)),
    "f1": Measure("f1", "F1", lambda results: texts_of(of_seeds(results.finetuned.f1), "{:.1f}".format), ("finetune",)),
    "parameters": Measure("parameters_m", "Parameters, millions",
                          lambda results: texts_of(n_parameters(results) / 1e6), ("train", "step"), folded=True),
    "memory": Measure("", "Peak memory of a step's process, MiB",
                      lambda results: texts_of(results.steps.peak_mib.dropna(), "{:,.0f}".format), ("step",),
                      folded=True)}
MEASURE["token_perplexity"] = replace(MEASURE["perplexity"], name="")
"""By the names in `tables.toml`."""
MEASURES = {name: tuple(MEASURE[each] for each in table.measures) for name, table in TABLES.items()}
"""Of each table, in order."""
GAPS = (("FLASH-Quad", "FLASH"), ("TFM++", "MC-TFM++"))
"""Table 5: a model, and it with mixed chunks."""


def tables_shown(records: Sequence[Record], names: Sequence[str], scales: Sequence[ScaleName]) -> list[Results]:
    """Tables, by default all, at the scales, by default all, that have records of them; one without any is shown
    once."""
    scales = scales or SCALE_NAMES[::-1]
    recorded = {record.get("scale") for record in records}
    shown = []
    for name in names or TABLES:
        at_scales = [results_of(name, scale, records) for scale in scales if scale in recorded or scale == scales[0]]
        shown += [results for results in at_scales if results.cells.known.any()] or at_scales[:1]
    return shown


def table_section(results: Results, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """A table at one scale: heading, pictures, our numbers beside the paper's, and what they are.

    pictures: of each the words that say what it shows, and its path."""
    table, paper = results.table, read_paper()[results.table.name]
    parts = [f"### {table.title}, {results.scale.name} scale", *(f"![{alt}]({path})" for alt, path in pictures)]
    if not results.cells.known.any():
        return "\n\n".join([*parts, f"This table was {NOT_RUN} at this scale: {command_text(results)}."]) + "\n"
    if table.name == "gap":
        parts += gap_grids(results, paper)
    if table.name == "speedup":
        parts.append(grid("", *speedup_frames(results, paper)))
    else:
        made = [(measure.title.format(reference=table.reference), measured(results, measure, paper), measure.folded)
                for measure in MEASURES[table.name]]
        if len(table.columns) == 1:
            ours, theirs = (pd.DataFrame({title: both[side].iloc[:, 0] for title, both, _ in made if both[side].size})
                            for side in (0, 1))
            parts.append(grid("", ours, theirs))
        else:
            parts += [grid(title, *both, fold) for title, both, fold in made]
    return "\n\n".join([*parts, *notes(results, paper)]) + "\n"


def grid(title: str, ours: pd.DataFrame, theirs: pd.DataFrame, fold: bool = False) -> str:
    """Our numbers, as texts, and left of each column the paper's, where it has any. Where most of ours were not run, a
    line says so, with those that were."""
    there = ours.where(~ours.isin([NOT_RUN, NOT_TIMED])).stack().dropna()
    if 2 * len(there) < ours.size:
        known = "; ".join(f"{place_text(cell)}: {text}" for cell, text in there.items())
        return f"{title or 'All of it'}: {NOT_RUN}{' but for ' * bool(known)}{known}."
    head, columns = [""], [ours.index]
    for name in ours:
        head += [f"{name}: paper", "ours"] if name in theirs else [name]
        columns += [theirs[name], ours[name]] if name in theirs else [ours[name]]
    text = markdown(head, list(zip(*columns, strict=True)), 1)
    if fold:
        return folded(title, text)
    return f"**{title}**\n\n{text}" if title else text


def frame(rows: Sequence[str], columns: Sequence[str], text: Callable[[str, str], str]) -> pd.DataFrame:
    return pd.DataFrame([[text(row, column) for column in columns] for row in rows], list(rows), list(columns))


def measured(results: Results, measure: Measure, paper: Paper) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Our texts, models by columns, and the paper's, without columns where it has no number at all.

    A speed-up by time of a step that is not printed is worked out from the times that are."""
    texts = measure.texts(results)
    compared = [results.table.reference] if "{reference}" in measure.title else []

    def ours(row: str, column: str) -> str:
        return texts.get((row, column)) or why_not(results, [row, *compared], column, measure.kinds)

    def theirs(row: str, column: str) -> str:
        printed = paper.printed(measure.name, row, column)
        if printed is None and measure.name == "step_speedup":
            ratio = paper.step_speedup(row, results.table.reference or "", column)
            return number(ratio) if ratio else ""
        return "" if printed is None else str(printed)

    printed = frame(results.rows, results.columns, theirs)
    return frame(results.rows, results.columns, ours), printed if (printed != "").any(axis=None) else printed[[]]


def why_not(results: Results, rows: Sequence[str | None], column: str, kinds: Sequence[str]) -> str:
    """What stands for a number that these kinds of records of these rows do not give."""
    cells, failed = [(row, column) for row in rows], results.failed[results.failed.kind.isin(kinds)]
    if any(cell in cells for cell in zip(failed.row, failed.column, strict=True)):
        return FAILED
    trained = results.trained.index.droplevel("seed")
    return NOT_TIMED if "step" in kinds and all(cell in trained for cell in cells) else NOT_RUN


def gap_grids(results: Results, paper: Paper) -> list[str]:
    """Table 5: what mixed chunks add to the perplexity, and to the loss, which is comparable between scales."""
    gaps = {f"{plain} -> {chunked}": (plain, chunked) for plain, chunked in GAPS}

    def ours(what: str) -> pd.DataFrame:
        by_model = results.trained[what].unstack("row").reindex(columns=list(results.table.models))
        more = pd.concat({label: by_model[chunked] - by_model[plain] for label, (plain, chunked) in gaps.items()},
                         names=["row"])
        texts = texts_of(of_seeds(more), signed)
        return frame([*gaps], results.columns, lambda row, column: texts.get((row, column)) or why_not(
            results, gaps[row], column, ["train"]))

    perplexity = ours("perplexity")
    theirs = frame([*gaps], results.columns, lambda row, column: str(paper.printed("gap", gaps[row][1], column)))
    tasks = unique(column.split()[0] for column in results.columns)
    return [*(grid(f"Increase of the perplexity, {task}", perplexity.filter(regex=f"^{task} "), theirs)
              for task in tasks), grid("Increase of the loss, nats per token", ours("loss"), theirs[[]])]


def speedup_frames(results: Results, paper: Paper) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Figure 1: lengths by rivals."""
    ours, theirs = {}, {}
    for rival in (row for row in results.table.models if row != "FLASH"):
        theirs[f"over {rival}"] = [str(paper.printed("speedup", rival, column)) for column in results.columns]
        for label, texts in ((f"over {rival}", speedup_texts(results, rival)),
                             (f"over {rival} by time of a step", step_speedup_texts(results, rival))):
            ours[label] = [texts.get(("FLASH", column)) or why_not(
                results, ["FLASH", rival], column, MEASURE["to_quality"].kinds) for column in results.columns]
    return pd.DataFrame(ours, results.columns), pd.DataFrame(theirs, results.columns)


def command_text(results: Results) -> str:
    return f"`lineartime reproduce {results.table.name} --scale {results.scale.name} --texts TEXTS`"


def notes(results: Results, paper: Paper) -> list[str]:
    """What the numbers are, what failed and what is not there; folded, where they come from."""
    table, cells, trained, words = results.table, results.cells, results.trained, []
    if len(trained):
        seeds = sorted(set(trained.index.get_level_values("seed")))
        words.append("Perplexity and loss: the whole held-out split at the end of training, " + (
            f"the mean of seeds {joined(map(str, seeds))} (the least and the most); without a range, seed {seeds[0]} "
            "alone." if len(seeds) > 1 else
            f"seed {seeds[0]} alone, so nothing tells how far seeds differ."))
    whose = f"{table.reference}'s" if table.reference else "the other's"
    words += [measure.note.format(whose=whose) for measure in MEASURES[table.name] if measure.note]
    words += [paper.note] if paper.note else []
    parts = [f"<sub>{' '.join(words)}</sub>"] if words else []
    left_out = [joined(name for name in every if name not in known) for every, known in (
        (table.columns, results.columns), (table.models, results.rows)) if len(known) < len(every)]
    failures = results.failed.groupby(CELL, sort=False).said.agg("; ".join)
    for begin, said in ((f"At this scale {NOT_RUN}", left_out),
                        ("Failed", [f"{place_text(cell)}: {why}" for cell, why in failures.items()]),
                        ("No row yet", [*map(place_text, cells.index[cells.planned & ~cells.known])])):
        parts += [f"{begin}: {'; '.join(said)}."] if said else []
    return [*parts, folded("Where these numbers come from", "\n\n".join(provenance(results, paper)))]


def place_text(cell: Hashable) -> str:
    return ", ".join(cell) if isinstance(cell, tuple) else str(cell)


def provenance(results: Results, paper: Paper) -> list[str]:
    """The scale; clock, text, machine, commit and command of what was run, if only a part of it went well; what has
    fewer seeds than the scale has."""
    steps, trained = results.steps, list(results.trained.record)
    records = [*trained, *results.finetuned.record, *results.timed.record]
    words = []
    if len(steps):
        n_tokens = unique(f"{tokens:,}" for tokens in steps.tokens)
        words.append(f"steps of {joined(n_tokens)} tokens timed side by side, median (quartiles) of "
                     f"{joined(unique(str(row[row['clock'] + '_ms']['n']) for row in steps.record))}, "
                     f"{joined(unique(CLOCKS[row['clock']] for row in steps.record))}")
    words += unique(f"text {row['text']} ({row['data']['train_tokens']:,} tokens to train on, "
                    f"{row['data']['validation_tokens']:,} held out, vocabulary {row['data']['vocab_size']:,}, "
                    f"sha256 {row['data']['sha256'][:10]})" for row in trained)
    texts = [f"Scale {results.scale.name}: {caption_of(results.table, results.scale)}."]
    texts += [f"The paper's times are of {paper.hardware}."] if paper.hardware else []
    if records:
        words += [joined(unique(row["dtype"] for row in records)), *unique(map(machine_text, records)),
                  *provenance_words(records)]
        texts.append(f"Ours: {'; '.join(words)}. Made by {command_text(results)}.")
    if len(results.finetuned):
        n_questions = unique(str(row["n_questions"]) for row in results.finetuned.record)
        overlap = unique(f"{row['word_overlap']['f1']:.1f}" for row in results.finetuned.record)
        texts.append(f"F1 of {joined(n_questions)} questions; that of the span that shares most words with the "
                     f"question: {joined(overlap)}. Fine-tuning was not timed side by side.")
    fewer = []
    for cell, seeds in results.trained.reset_index("seed").groupby(level=CELL, sort=False).seed:
        wanted = results.cells.cell[cell].seeds
        if results.cells.planned[cell] and set(wanted) - set(seeds):
            fewer.append(f"{place_text(cell)} has seed {joined(map(str, seeds))} of {len(wanted)}")
    return [" ".join(texts), *([f"Fewer seeds than the scale has: {'; '.join(fewer)}."] if fewer else [])]
