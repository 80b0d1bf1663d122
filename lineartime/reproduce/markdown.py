"""The paper's tables with our numbers beside its own, as Markdown: made of rows and `paper.toml`, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from lineartime.benchmark.rows import Spread
from lineartime.reproduce.paper import Paper, read_paper
from lineartime.reproduce.results import (
    Outcome,
    Outcomes,
    Seeds,
    best_loss,
    outcomes_of,
    paired,
    perplexity_of,
    speedup,
    step_speedup,
)
from lineartime.reproduce.rows import Row
from lineartime.reproduce.scales import caption_of
from lineartime.reproduce.tables import SCALE_NAMES, TABLES, ScaleName

NOT_RUN, NOT_TIMED, FAILED, NEVER = "not run", "not timed", "failed", "--"
FIGURES = 4
"""Of a perplexity."""


@dataclass(frozen=True)
class Measure:
    """One number of a cell: what the paper's is called, and what ours says."""

    name: str
    """In `paper.toml`; a name that is not there has no numbers of the paper."""
    title: str
    """With "{reference}" for the row that speed-ups are measured to."""
    ours: Callable[[Outcomes, Outcome], str | None]
    """None where it is not known."""
    kinds: tuple[str, ...]
    """Of rows that it is made of."""
    at_hand: bool = True
    """Shown at once, and not folded away."""


def reference_of(outcomes: Outcomes, outcome: Outcome) -> Outcome:
    """The cell of the same column that speed-ups are measured to."""
    assert outcomes.table.reference is not None
    return outcomes.cells[outcomes.table.reference, outcome.cell.column]


def speedup_text(outcome: Outcome, reference: Outcome) -> str | None:
    """Of the mean curve, with the least and the most of the seeds' own curves."""
    found = speedup(outcome, reference)
    if found is None:
        return None
    if found.value is None:
        return NEVER
    known = Seeds(tuple(value for value in found.seeds if value is not None) or (found.value,))
    if outcome is reference:
        return number(found.value)
    never = found.seeds.count(None)
    words = [range_text(known, number)] if known.n > 1 else []
    words += [f"{never} of {len(found.seeds)} seeds {NEVER}"] if never else []
    return number(found.value) + (f" ({'; '.join(words)})" if words else "")


def step_speedup_text(outcome: Outcome, reference: Outcome) -> str | None:
    found = step_speedup(outcome, reference)
    if found is None:
        return None
    return number(found.value) + ("" if outcome is reference else f" ({number(found.low)}-{number(found.high)})")


def finetune_speedup_text(outcome: Outcome, reference: Outcome) -> str | None:
    ours, theirs = outcome.finetune_ms, reference.finetune_ms
    return None if ours is None or theirs is None else number(theirs.mean / ours.mean)


def seeds_text(seeds: Seeds | None, text: Callable[[float], str]) -> str | None:
    """"17.31 (17.12-17.45)": the mean, and the least and the most of several."""
    if seeds is None:
        return None
    return text(seeds.mean) + (f" ({range_text(seeds, text)})" if seeds.n > 1 else "")


def range_text(seeds: Seeds, text: Callable[[float], str]) -> str:
    least, most = text(seeds.least), text(seeds.most)
    return f"{least} to {most}" if least[0] in "+-" else f"{least}-{most}"


def times_text(ms: Spread | None) -> str | None:
    return None if ms is None else f"{number(ms.median)} ({number(ms.q1)}-{number(ms.q3)})"


def millions_text(n: int | None) -> str | None:
    return None if n is None else number(n / 1e6)


def mib_text(mib: float | None) -> str | None:
    return None if mib is None else f"{mib:,.0f}"


def perplexity_text(x: float) -> str:
    return number(x, FIGURES)


def signed(x: float) -> str:
    return f"{x:+.{2 if abs(x) >= 0.1 else 3}f}"


PERPLEXITY = Measure("perplexity", "Perplexity per token", lambda _, cell: seeds_text(cell.perplexity, perplexity_text),
                     ("train",))
WORDS = Measure("perplexity", "Perplexity per word", lambda _, cell: seeds_text(cell.word_perplexity, perplexity_text),
                ("train",))
TOKENS = Measure("", "Perplexity per token", PERPLEXITY.ours, PERPLEXITY.kinds)
STEP = Measure("step_ms", "Milliseconds of a step", lambda _, cell: times_text(cell.step_ms), ("step",))
TO_QUALITY = Measure("speedup", "Speed-up to {reference}'s final quality",
                     lambda table, cell: speedup_text(cell, reference_of(table, cell)), ("train", "step"))
BY_STEP = Measure("step_speedup", "Speed-up over {reference} by time of a step",
                  lambda table, cell: step_speedup_text(cell, reference_of(table, cell)), ("step",))
BY_FINETUNING = Measure("finetune_speedup", "Speed-up by time of a fine-tuning step",
                        lambda table, cell: finetune_speedup_text(cell, reference_of(table, cell)), ("finetune",))
F1 = Measure("f1", "F1", lambda _, cell: seeds_text(cell.f1, lambda x: f"{x:.1f}"), ("finetune",))
PARAMETERS = Measure("parameters_m", "Parameters, millions",
                     lambda _, cell: millions_text(cell.n_parameters), ("train", "step"), False)
MEMORY = Measure("", "Peak memory of a step's process, MiB",
                 lambda _, cell: mib_text(cell.peak_mib), ("step",), False)

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


def tables_shown(rows: Sequence[Row], names: Sequence[str], scales: Sequence[ScaleName]) -> list[Outcomes]:
    """Tables, by default all, at the scales, by default all, that have rows of them; one without any is shown once."""
    shown = []
    for name in names or TABLES:
        at_scales = [outcomes_of(name, scale, rows) for scale in scales or reversed(SCALE_NAMES)]
        shown += [outcomes for outcomes in at_scales if outcomes.known] or at_scales[:1]
    return shown


def tables_text(shown: Sequence[Outcomes], pictures: Callable[[Outcomes], Sequence[tuple[str, str]]] = lambda _: (),
                ) -> str:
    """Sections one below the other. pictures: a table's, as in `table_section`."""
    return "\n".join(table_section(outcomes, pictures(outcomes)) for outcomes in shown)


def table_section(outcomes: Outcomes, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """A table at one scale: heading, pictures, our numbers beside the paper's, and what they are. pictures: of each
    the words that say what it shows, and its path."""
    table, paper = outcomes.table, read_paper()[outcomes.table.name]
    own = {"gap": gap_tables, "speedup": speedup_table}.get(table.name)
    parts = [f"### {table.title}, {outcomes.scale.name} scale", *(f"![{alt}]({path})" for alt, path in pictures)]
    parts += [own(outcomes, paper)] if own else []
    measures = MEASURES[table.name]
    if len(table.columns) == 1:
        parts.append(one_column(outcomes, paper, measures))
    else:
        parts += [measured(outcomes, paper, measure) for measure in measures]
    return "\n\n".join([*parts, *notes(outcomes, paper)]) + "\n"


def measured(outcomes: Outcomes, paper: Paper, measure: Measure) -> str:
    """Models by columns, and in each column the paper's number, where it has any, and ours."""
    table = outcomes.table
    printed = {place: paper_text(outcomes, paper, measure, *place) for place in outcomes.cells}
    both = any(printed.values())
    head = ["", *(words for column in table.columns for words in headings(column, both))]
    lines = []
    for row in table.models:
        line = [row]
        for column in table.columns:
            line += [printed[row, column] or ""] if both else []
            line.append(ours_text(outcomes, outcomes.cells[row, column], measure))
        lines.append(line)
    title = measure.title.format(reference=table.reference)
    if measure.at_hand:
        return f"**{title}**\n\n{markdown(head, lines, 1)}"
    return folded(title, markdown(head, lines, 1))


def one_column(outcomes: Outcomes, paper: Paper, measures: Sequence[Measure]) -> str:
    """Models by measures, where a table has but one column."""
    (column,) = outcomes.table.columns
    head, lines = [""], [[row] for row in outcomes.table.models]
    for measure in measures:
        printed = [paper_text(outcomes, paper, measure, row, column) for row in outcomes.table.models]
        head += headings(measure.title.format(reference=outcomes.table.reference), any(printed))
        for line, text in zip(lines, printed, strict=True):
            line += [text or ""] if any(printed) else []
            line.append(ours_text(outcomes, outcomes.cells[line[0], column], measure))
    return markdown(head, lines, 1)


def headings(label: str, printed: bool) -> list[str]:
    """Of the paper's column and ours, or of ours alone."""
    return [f"{label}: paper", "ours"] if printed else [label]


def paper_text(outcomes: Outcomes, paper: Paper, measure: Measure, row: str, column: str) -> str | None:
    """As printed; a speed-up by time of a step that is not printed is worked out from the times that are."""
    printed = paper.printed(measure.name, row, column)
    if printed is None and measure is BY_STEP and outcomes.table.reference:
        worked_out = paper.step_speedup(row, outcomes.table.reference, column)
        return None if worked_out is None else number(worked_out)
    return None if printed is None else str(printed)


def ours_text(outcomes: Outcomes, outcome: Outcome, measure: Measure) -> str:
    text = measure.ours(outcomes, outcome)
    needed = [outcome, reference_of(outcomes, outcome)] if measure in (TO_QUALITY, BY_STEP) else [outcome]
    return why_not(needed, measure.kinds) if text is None else text


def why_not(cells: Sequence[Outcome], kinds: Sequence[str]) -> str:
    """What stands for a number that these kinds of rows of cells do not give."""
    if any(kind in cell.failures for cell in cells for kind in kinds):
        return FAILED
    return NOT_TIMED if "step" in kinds and all(cell.trained for cell in cells) else NOT_RUN


def gap_tables(outcomes: Outcomes, paper: Paper) -> str:
    """Table 5: what mixed chunks add to the perplexity, and to the loss, which is comparable between scales."""
    def differences(title: str, columns: Sequence[str], of: Callable[[Row], float], printed: bool) -> str:
        head = ["", *(words for column in columns for words in headings(column, printed))]
        lines = []
        for plain, chunked in GAPS:
            line = [f"{plain} -> {chunked}"]
            for column in columns:
                ours, theirs = outcomes.cells[chunked, column], outcomes.cells[plain, column]
                more = seeds_text(paired(ours, theirs, of), signed)
                line += [str(paper.printed("gap", chunked, column))] if printed else []
                line.append(more or why_not([ours, theirs], ["train"]))
            lines.append(line)
        return f"**{title}**\n\n{markdown(head, lines, 1)}"

    tasks = unique(column.split()[0] for column in outcomes.table.columns)
    by_task = {task: [column for column in outcomes.table.columns if column.split()[0] == task] for task in tasks}
    return "\n\n".join([
        *(differences(f"Increase of the perplexity, {task}", columns, perplexity_of, True)
          for task, columns in by_task.items()),
        differences("Increase of the loss, nats per token", list(outcomes.table.columns), best_loss, False)])


def speedup_table(outcomes: Outcomes, paper: Paper) -> str:
    """Figure 1: lengths by rivals."""
    rivals = [row for row in outcomes.table.models if row != "FLASH"]
    head = ["Length", *(words for rival in rivals for words in (*headings(f"over {rival}", True), "by time of a step"))]
    lines = []
    for column in outcomes.table.columns:
        line, flash = [column], outcomes.cells["FLASH", column]
        for rival in rivals:
            reference = outcomes.cells[rival, column]
            absent = why_not([flash, reference], TO_QUALITY.kinds)
            line += [str(paper.printed("speedup", rival, column)), speedup_text(flash, reference) or absent,
                     step_speedup_text(flash, reference) or absent]
        lines.append(line)
    return markdown(head, lines, 1)


def notes(outcomes: Outcomes, paper: Paper) -> list[str]:
    """What the numbers are and where they come from; what failed, and what is not there."""
    table, scale, known = outcomes.table, outcomes.scale, outcomes.known
    words = [f"Scale {scale.name}: {caption_of(table, scale)}."]
    if paper.hardware:
        words.append(f"The paper's times are of {paper.hardware}.")
    if paper.note:
        words.append(paper.note)
    whose = f"{table.reference}'s" if table.reference else "the other's"
    if TO_QUALITY in MEASURES[table.name] or table.name == "speedup":
        words.append(f"Speed-up to the same quality, as the paper defines it: the time of {whose} training to its best "
                     "mean loss over the time of this model's to the same loss, each its steps times the time of one; "
                     f"\"{NEVER}\" never gets there.")
    if BY_STEP in MEASURES[table.name] or table.name == "speedup":
        words.append(f"By time of a step: {whose} over this model's, both of one run (quartile over quartile).")
    if any(outcome.rows for outcome in known):
        words.append(measured_words(known))
    answered = [row for outcome in known for row in outcome.finetuned.values()]
    if answered:
        overlap = unique(f"{row['word_overlap']['f1']:.1f}" for row in answered)
        words.append(f"F1 of {joined(unique(str(row['n_questions']) for row in answered))} questions; that of the span "
                     f"that shares most words with the question: {joined(overlap)}. Fine-tuning was not timed side by "
                     "side.")
    parts = [f"<sub>{' '.join(words)}</sub>"]
    failed = [f"{place_text(outcome)}: {joined(outcome.failures.values())}" for outcome in known if outcome.failures]
    if failed:
        parts.append(f"Failed: {'; '.join(failed)}.")
    missing = [outcome for outcome in outcomes.cells.values() if outcome.planned and not outcome.known]
    if missing:
        parts.append(f"No row yet: {'; '.join(map(place_text, missing))}.")
    fewer = [f"{place_text(outcome)} has seed {joined(map(str, outcome.trained))} of {len(outcome.cell.seeds)}"
             for outcome in known if outcome.planned and outcome.trained and outcome.missing_seeds]
    if fewer:
        parts.append(f"Fewer seeds than the scale has: {'; '.join(fewer)}.")
    return parts


def place_text(outcome: Outcome) -> str:
    return f"{outcome.cell.row}, {outcome.cell.column}"


def measured_words(known: Sequence[Outcome]) -> str:
    """Seeds, clock, text, machine, commit and command of what was run, if only a part of it went well."""
    rows = [row for outcome in known for row in outcome.rows]
    trained = [row for outcome in known for row in outcome.trained.values()]
    timed = [outcome.timed[-1] for outcome in known if outcome.timed]
    words = []
    if trained:
        seeds = sorted({row["settings"]["seed"] for row in trained})
        many = len(seeds) > 1
        words.append(f"seed{'s' * many} {joined(map(str, seeds))}"
                     + (": the mean of their best on validation (the least and the most)" if many else
                        ": best on validation, so nothing tells how far seeds differ"))
    if timed:
        n_tokens = unique(f"{row['tokens_per_step']:,}" for row in timed)
        words.append(f"steps of {joined(n_tokens)} tokens timed side by side, median (quartiles) of "
                     f"{joined(unique(str(row[row['clock'] + '_ms']['n']) for row in timed))}, "
                     f"{joined(unique(CLOCKS[row['clock']] for row in timed))}")
    words += unique(f"text {row['text']} ({row['data']['train_tokens']:,} tokens to train on, "
                    f"{row['data']['validation_tokens']:,} held out, vocabulary {row['data']['vocab_size']:,}, "
                    f"sha256 {row['data']['sha256'][:10]})" for row in trained)
    words.append(joined(unique(row["dtype"] for row in rows)))
    words += unique(map(machine_text, rows))
    words += provenance_words(rows)
    table, scale = known[0].cell.table.name, known[0].cell.scale.name
    return f"Ours: {'; '.join(words)}. Made by `lineartime reproduce {table} --scale {scale} --texts TEXTS`."
