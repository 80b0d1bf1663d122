"""The paper's tables with our numbers beside its own, as Markdown, made of records and `paper.toml` alone."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

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
from lineartime.reproduce.results import CELL, Results, paired, results_of, speedups, spread, step_speedups
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
    at_hand: bool = True
    """Shown at once, and not folded away."""


def seeds_text(mean: float, least: float, most: float, n: int, text: Callable[[float], str]) -> str:
    """"17.31 (17.12-17.45)": the mean, and the least and the most of several."""
    return text(mean) + (f" ({range_text(text(least), text(most))})" if n > 1 else "")


def range_text(least: str, most: str) -> str:
    return f"{least} to {most}" if least[0] in "+-" else f"{least}-{most}"


def seeds_texts(values: pd.Series, text: Callable[[float], str]) -> Texts:
    return {cell: seeds_text(mean, least, most, n, text) for cell, mean, least, most, n in spread(values).itertuples()}


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
    return {cell: number(value) + ("" if cell[0] == reference else f" ({number(low)}-{number(high)})")
            for cell, value, low, high in step_speedups(results, reference).itertuples()}


def finetune_texts(results: Results) -> Texts:
    ms = spread(results.finetuned.step_ms)["mean"]
    return {(row, column): number(ms[results.table.reference, column] / mean) for (row, column), mean in ms.items()
            if (results.table.reference, column) in ms}


def step_texts(results: Results) -> Texts:
    return {cell: f"{number(median)} ({number(q1)}-{number(q3)})"
            for cell, median, q1, q3 in results.steps[["median", "q1", "q3"]].itertuples()}


def memory_texts(results: Results) -> Texts:
    return {cell: f"{mib:,.0f}" for cell, mib in results.steps.peak_mib.dropna().items()}


def parameter_texts(results: Results) -> Texts:
    known = pd.concat([results.trained.n_parameters.droplevel("seed"), results.timed.n_parameters]).dropna()
    return {cell: number(n / 1e6) for cell, n in known.groupby(level=CELL).first().items()}


def perplexity_text(x: float) -> str:
    return number(x, 4)


def signed(x: float) -> str:
    return f"{x:+.{2 if abs(x) >= 0.1 else 3}f}"


PERPLEXITY = Measure("perplexity", "Perplexity per token",
                     lambda results: seeds_texts(results.trained.perplexity, perplexity_text), ("train",))
WORDS = Measure("perplexity", "Perplexity per word",
                lambda results: seeds_texts(results.trained.word_perplexity, perplexity_text), ("train",))
TOKENS = Measure("", PERPLEXITY.title, PERPLEXITY.texts, PERPLEXITY.kinds)
STEP = Measure("step_ms", "Milliseconds of a step", step_texts, ("step",))
TO_QUALITY = Measure("speedup", "Speed-up to {reference}'s final quality",
                     lambda results: speedup_texts(results, results.table.reference or ""), ("train", "step"))
BY_STEP = Measure("step_speedup", "Speed-up over {reference} by time of a step",
                  lambda results: step_speedup_texts(results, results.table.reference or ""), ("step",))
BY_FINETUNING = Measure("finetune_speedup", "Speed-up by time of a fine-tuning step", finetune_texts, ("finetune",))
F1 = Measure("f1", "F1", lambda results: seeds_texts(results.finetuned.f1, "{:.1f}".format), ("finetune",))
PARAMETERS = Measure("parameters_m", "Parameters, millions", parameter_texts, ("train", "step"), False)
MEMORY = Measure("", "Peak memory of a step's process, MiB", memory_texts, ("step",), False)

QUALITY_AND_SPEED = (PERPLEXITY, STEP, TO_QUALITY, BY_STEP, MEMORY, PARAMETERS)
MEASURES = {
    "gau_vs_transformer": (PERPLEXITY, STEP, MEMORY, PARAMETERS),
    "gau_ablation": (PERPLEXITY, PARAMETERS, STEP), "mhsa_ablation": (PERPLEXITY, PARAMETERS, STEP),
    "mlm_c4": QUALITY_AND_SPEED, "lm_wiki40b": QUALITY_AND_SPEED, "flash_ablation": QUALITY_AND_SPEED,
    "lm_pg19": (WORDS, TOKENS, STEP, TO_QUALITY, BY_STEP, MEMORY, PARAMETERS),
    "triviaqa": (PERPLEXITY, F1, BY_STEP, BY_FINETUNING),
    **dict.fromkeys(("position_bias", "more_tokens"), (PERPLEXITY, STEP, TO_QUALITY, BY_STEP)),
    "chunk_size": (PERPLEXITY, STEP, MEMORY),
    **dict.fromkeys(("learning_rates", "initial_values", "gap"), (PERPLEXITY,)),
    "gpu_latency": (STEP, MEMORY, PARAMETERS), "speedup": ()}
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
    frames = {measure.title.format(reference=table.reference): (*measured(results, measure, paper), not measure.at_hand)
              for measure in MEASURES[table.name]}
    if table.name == "gap":
        parts += gap_grids(results, paper)
    if table.name == "speedup":
        parts.append(grid("", *speedup_frames(results, paper)))
    elif len(table.columns) == 1:
        parts.append(grid("", pd.DataFrame({title: ours.iloc[:, 0] for title, (ours, _, _) in frames.items()}),
                          pd.DataFrame({title: theirs.iloc[:, 0] for title, (_, theirs, _) in frames.items()
                                        if theirs.size})))
    else:
        parts += [grid(title, *each) for title, each in frames.items()]
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
    reference, texts = results.table.reference, measure.texts(results)

    def ours(row: str, column: str) -> str:
        needed = [(row, column), (reference, column)] if measure in (TO_QUALITY, BY_STEP) else [(row, column)]
        return texts.get((row, column)) or why_not(results, needed, measure.kinds)

    def theirs(row: str, column: str) -> str:
        printed = paper.printed(measure.name, row, column)
        worked_out = paper.step_speedup(row, reference or "", column) if measure is BY_STEP else None
        return str(printed) if printed is not None else number(worked_out) if worked_out else ""

    printed = frame(results.rows, results.columns, theirs)
    return frame(results.rows, results.columns, ours), printed if (printed != "").any(axis=None) else printed[[]]


def why_not(results: Results, needed: Sequence[tuple[str | None, str]], kinds: Sequence[str]) -> str:
    """What stands for a number that these kinds of records of cells do not give."""
    failed = results.failed[results.failed.kind.isin(kinds)]
    if any(cell in needed for cell in zip(failed.row, failed.column, strict=True)):
        return FAILED
    trained = results.trained.index.droplevel("seed")
    return NOT_TIMED if "step" in kinds and all(cell in trained for cell in needed) else NOT_RUN


def gap_grids(results: Results, paper: Paper) -> list[str]:
    """Table 5: what mixed chunks add to the perplexity, and to the loss, which is comparable between scales."""
    gaps = {f"{plain} -> {chunked}": (plain, chunked) for plain, chunked in GAPS}

    def ours(what: str) -> pd.DataFrame:
        def text(row: str, column: str) -> str:
            plain, chunked = ((model, column) for model in gaps[row])
            more = paired(results, chunked, plain, what)
            return seeds_text(more.mean(), more.min(), more.max(), len(more), signed) if len(more) else why_not(
                results, [plain, chunked], ["train"])

        return frame([*gaps], results.columns, text)

    perplexity = ours("perplexity")
    theirs = frame([*gaps], results.columns, lambda row, column: str(paper.printed("gap", gaps[row][1], column)))
    tasks = unique(column.split()[0] for column in results.columns)
    return [*(grid(f"Increase of the perplexity, {task}", perplexity.filter(regex=f"^{task} "), theirs)
              for task in tasks), grid("Increase of the loss, nats per token", ours("loss"), theirs[[]])]


def speedup_frames(results: Results, paper: Paper) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Figure 1: lengths by rivals."""
    rivals = {f"over {row}": row for row in results.table.models if row != "FLASH"}
    made = {label: texts for over, rival in rivals.items()
            for label, texts in ((over, speedup_texts(results, rival)),
                                 (f"{over} by time of a step", step_speedup_texts(results, rival)))}

    def ours(column: str, label: str) -> str:
        needed = [("FLASH", column), (rivals[label.removesuffix(" by time of a step")], column)]
        return made[label].get(("FLASH", column)) or why_not(results, needed, TO_QUALITY.kinds)

    return frame(results.columns, [*made], ours), frame(
        results.columns, [*rivals], lambda column, over: str(paper.printed("speedup", rivals[over], column)))


def command_text(results: Results) -> str:
    return f"`lineartime reproduce {results.table.name} --scale {results.scale.name} --texts TEXTS`"


def notes(results: Results, paper: Paper) -> list[str]:
    """What the numbers are, what failed and what is not there; folded, where they come from."""
    table, cells, by_step = results.table, results.cells, MEASURES[results.table.name]
    whose = f"{table.reference}'s" if table.reference else "the other's"
    trained, words = results.trained, []
    if len(trained):
        seeds = sorted(set(trained.index.get_level_values("seed")))
        words.append("Perplexity and loss: the whole held-out split at the end of training, " + (
            f"the mean of seeds {joined(map(str, seeds))} (the least and the most); without a range, seed {seeds[0]} "
            "alone." if len(seeds) > 1 else
            f"seed {seeds[0]} alone, so nothing tells how far seeds differ."))
    if TO_QUALITY in by_step or table.name == "speedup":
        words.append(f"Speed-up to the same quality, as the paper defines it: the time of {whose} training to its best "
                     "mean loss over the time of this model's to the same loss, each its steps times the time of one; "
                     f"\"{NEVER}\" never gets there; losses are those of a part of the split, scored during training.")
    if BY_STEP in by_step or table.name == "speedup":
        words.append(f"By time of a step: {whose} over this model's, both of one run (quartile over quartile).")
    words += [paper.note] if paper.note else []
    parts = [f"<sub>{' '.join(words)}</sub>"] if words else []
    left_out = [joined(names) for names in ([column for column in table.columns if column not in results.columns],
                                            [row for row in table.models if row not in results.rows]) if names]
    if left_out:
        parts.append(f"At this scale {NOT_RUN}: {'; '.join(left_out)}.")
    failures = results.failed.groupby(CELL, sort=False).said.agg("; ".join)
    if len(failures):
        parts.append(f"Failed: {'; '.join(f'{place_text(cell)}: {said}' for cell, said in failures.items())}.")
    missing = cells.index[cells.planned & ~cells.known]
    if len(missing):
        parts.append(f"No row yet: {'; '.join(map(place_text, missing))}.")
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
