"""The verbs of `python -m benchmarks`."""

import os
import tomllib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from benchmarks import ROOT, Row, decode, llama, op, pages, step
from benchmarks.cells import LISTS, SHAPES, measure_call, named_calls, shaped_config
from benchmarks.measure import Setup, print_rows
from benchmarks.paper import runner
from benchmarks.paper.report import table_section, tables_shown
from benchmarks.paper.results import read_records
from benchmarks.paper.tables import TABLES, ScaleName
from benchmarks.peers import PACKAGES, parse_label
from benchmarks.provenance import append_json_lines, rows_in
from benchmarks.recall import study
from benchmarks.recall.measure import n_asked
from benchmarks.recall.tasks import FORMS, TASKS
from benchmarks.speed import read_rows
from lineartime.base.errors import DataError, ResourceError, UsageError, raised_as
from lineartime.base.settings import require, require_counts, require_name
from lineartime.cli.options import Device, Setting, Task, import_own, own_modules
from lineartime.cli.terminal import Terminal, note, results_are_files, say, say_stopping
from lineartime.config import MODEL_FIELDS, PRESETS, TRAIN_FIELDS, ModelConfig
from lineartime.folders import named_folder, shipped_models
from lineartime.training.runtime import StopSignal, pick_device

OTHERS = ("speed", "recall", "laws")  # reports beside those of the tables
DEFAULT = ("flash", "transformer++")  # who is measured where nobody is named
OF_TRAINED = [name for name in FORMS if name not in study.STUDY["tasks"]]  # what no model of the study learns
Tokens = Annotated[int, "Tokens in a step or call; one row where the context is longer."]


@dataclass(frozen=True)
class How:
    """The options that all measurements share."""

    contexts: Annotated[tuple[int, ...], "Tokens of context, with commas."] = ()
    precision: Annotated[str, "float32, bfloat16, for llama.cpp q8_0, or several with commas."] = "float32"
    task: Task = "wiki40b"
    shape: Annotated[str | None, "Sizes by a name in cells.toml, such as small."] = None
    settings: Setting = field(default_factory=dict)
    repeats: Annotated[int, "Timed rounds."] = 5
    threads: Annotated[int, "Processor threads."] = 1
    device: Device = None
    rows: Annotated[Path | None, "File that gets one JSON row per measurement.", "--json FILE"] = None

    @property
    def setup(self) -> Setup:
        require(1 <= self.threads <= 1024, "wrong value", f"threads = {self.threads}", "it takes 1 to 1024")
        check_rows(self.rows)
        return Setup(self.repeats, self.threads, pick_device(self.device).type, progress=note)

    def config(self, preset: str) -> ModelConfig:
        if self.shape is not None:
            require_name("shape", self.shape, SHAPES)
        return shaped_config(preset, self.task, SHAPES.get(self.shape or ""), self.settings)

    def show_and_keep(self, rows: list[Row]) -> None:
        print_rows(rows)
        if self.rows is not None:
            append_json_lines(self.rows, rows)


def check_rows(rows: Path | None) -> None:
    """Raise ResourceError before long work if rows cannot be written to this file."""
    if rows is not None:
        append_json_lines(rows, ())


def benchmark_decode(
    how: How,
    models: Annotated[tuple[str, ...], f"Models: {', '.join([*PRESETS, llama.NAME])}.", "MODELS"] = (),
    batch: Annotated[int, "Rows that are decoded together."] = 1,
    quadratic_up_to: Annotated[int, "Longest context for models with a key-value cache."] = 32768,
    compiled: Annotated[bool, "Each step is one graph of torch.compile."] = False,
) -> None:
    """Time per generated token after contexts of different lengths. Contexts are not read, which
    would take minutes: the state is filled with random numbers, that of llama.cpp with keys and
    values that repeat. It takes the type q8_0 too, and it is had by
    `npm install --ignore-scripts --prefix out/llama @node-llama-cpp/linux-x64@3.22.1`."""
    for name in models:
        require_name("model", name, [*PRESETS, llama.NAME])
    how.show_and_keep(decode.benchmark_decode(
        {name: how.config(parse_label(name).preset) for name in models or DEFAULT},
        how.contexts or (2048, 8192, 32768, 131072), how.setup, batch_size=batch, precisions=how.precision.split(","),
        quadratic_up_to=quadratic_up_to, compiled=compiled))


def benchmark_step(
    how: How,
    labels: Annotated[tuple[str, ...], f"Models ({', '.join([*PRESETS, *PACKAGES])}), each perhaps with :compiled, "
                                       ":checkpointed, :reference or :unfused behind it.", "LABELS"] = (),
    tokens: Tokens = 8192,
    together: Annotated[bool, "Measure all contexts and types side by side, not one after another."] = False,
    reads: Annotated[bool, "Only forward, to the logits of the last token, without a gradient."] = False,
) -> None:
    """Time and memory of whole training steps, side by side: forward, loss, backward, clipping,
    optimizer. Any --set applies to every model that has the field."""
    cases = step.step_cases(labels or DEFAULT, how.contexts or (512, 2048, 8192), how.precision.split(","),
                            tokens=tokens, config_of=how.config, reads=reads)
    for rows in step.benchmark_step(cases, how.setup, together=together):
        how.show_and_keep(rows)


def benchmark_op(how: How, name: Annotated[str, f"{', '.join(op.OPS)}.", "OP"], tokens: Tokens = 8192) -> None:
    """Forward and backward of one op: the reference, the same compiled and, on a GPU, the kernels,
    side by side."""
    for precision in how.precision.split(","):
        for context in how.contexts or (2048,):
            config = replace(how.config(op.OPS.get(name, "flash")), context=context)
            how.show_and_keep(op.benchmark_op(name, config, how.setup, tokens=tokens, precision=precision))


def benchmark_run(
    names: Annotated[tuple[str, ...], f"Lists of cells ({', '.join(LISTS)}) or tables of them.", "LISTS"],
    rows: Annotated[Path, "File that gets the rows, and is looked at for those that are there.", "--json FILE"] = Path(
        "out/bench.jsonl"),
    threads: Annotated[int, "Processor threads."] = 1,
    device: Device = None,
) -> None:
    """Measure the named cells of cells.toml, each by a call of its own; the same command goes on
    where it stopped. Calls whose rows the file has are left out."""
    calls, failed, place = named_calls(names), [], (threads, pick_device(device).type)
    where = ["--threads", str(threads), "--device", place[1]]
    done = {row.get("cell") for row in rows_in(rows) if (row.get("threads"), row.get("device")) == place}
    for number, (name, words) in enumerate(calls.items(), 1):
        if name not in done:
            note(f"{name} ({number} of {len(calls)})")
            failed += [name] if measure_call(name, [*words, *where], rows) else []
    if failed:
        raise ResourceError("calls failed", ", ".join(failed), "what they said is above; the same command tries again")


def reproduce(
    tables: Annotated[tuple[str, ...], f"Tables and figures, by default all: {', '.join(TABLES)}.", "TABLES"] = (),
    scale: Annotated[ScaleName, "How large."] = "cpu",
    texts: Annotated[Path | None, "Folder with the texts of the scale, each in a folder."] = None,
    out: Annotated[Path, "Folder for prepared text and runs; what is there goes on."] = Path("out/reproduce"),
    rows: Annotated[Path | None, "File of rows, looked at for what is there and added to; by default rows.jsonl in "
                                 "--out."] = None,
    jobs: Annotated[int | None, "Runs at a time; by default one per processor core, and one on a GPU."] = None,
    device: Device = None,
) -> None:
    """Train, fine-tune and time what a table of the paper needs and has no row yet.
    The same command goes on where it stopped; `python -m benchmarks report` shows the rows."""
    names = tables or tuple(TABLES)
    for name in names:
        require_name("table", name, TABLES)
    require_counts(jobs=jobs)
    require(texts is None or texts.is_dir(), "no such folder of texts", texts, kind=DataError)
    path, where = rows or out / "rows.jsonl", pick_device(device).type
    place = runner.Place(texts, out, path, where, jobs or (1 if where == "cuda" else os.cpu_count() or 1), note)
    with StopSignal().listening(say_stopping) as stop:
        n_rows = sum(runner.reproduce(name, scale, place, stop) for name in names)
    say(f"{n_rows:,} rows added to {path}" if n_rows else f"complete: {path} has every row; nothing to do.")
    say(f"next     python -m benchmarks report {names[0] if len(names) == 1 else ''} --rows {path}")


def recall(
    models: Annotated[tuple[str, ...], "Models of the study, by default all that learn the task; in text also trained "
                                       "ones: folders, or small.", "MODELS"] = (),
    task: Annotated[str | None, f"{', '.join([*TASKS, *FORMS])}; by default all but {' and '.join(OF_TRAINED)}, "
                                   "for trained models; text only with --data."] = None,
    data: Annotated[Path | None, f"Prepared text, for {', '.join(FORMS)}."] = None,
    settings: Setting = {},  # noqa: B006  # which nobody changes
    rows: Annotated[Path, "File of rows, looked at for what is there and added to.", "--json FILE"] = Path(
        "out/recall.jsonl"),
) -> None:
    """Train small models to find in a row what was written there before, and ask them, also in
    longer rows; trained models are only asked. The same command goes on where it stopped."""
    known = study.STUDY["models"]
    trained = [name for name in models if name not in known and (name in shipped_models() or Path(name).is_dir())]
    wrong = settings.keys() - ({"context"} if trained else {*MODEL_FIELDS, *TRAIN_FIELDS} - study.CHOSEN)
    require(not wrong, "not a setting of recall" + " by a trained model" * bool(trained), ", ".join(sorted(wrong)))
    require(not trained or (task in FORMS and data is not None), "a trained model is asked in text alone",
            " ".join(trained), f"give --task {' or '.join(FORMS)} and --data")
    require(task not in OF_TRAINED or 0 < len(models) == len(trained), f"{task} is asked of trained models alone",
            " ".join(models), "give their folders, or small")
    todo = []
    for name in [task] if task else [each for each in study.STUDY["tasks"] if each not in FORMS or data]:
        about = study.task_of(name, data if task or name in FORMS else None)
        for model in [each for each in models or study.models_of(name) if each not in trained]:
            study.check(model, name, about, settings)  # a wrong one is refused before the first is trained
            todo.append((name, about, model))
    check_rows(rows)
    results_are_files()
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        for run in map(named_folder, trained):
            name = cast(str, task)
            about = study.task_of(name, data)
            length = settings.get("context", about.length)
            progress = stop.watch("nothing is written", terminal.count, "asking", n_asked(about, length))
            row = study.ask_run(run, cast(Path, data), name, length, progress)
            append_json_lines(rows, [row])
            say(study.line(row))
        for number, (name, about, model) in enumerate(todo, 1):
            note(f"{name}: {model} ({number} of {len(todo)})")
            for row in study.measure_model(model, name, about, settings, rows, partial(check_and_show, stop, terminal)):
                say(study.line(row))
    for name in dict.fromkeys(name for name, _, _ in todo):
        print(f"\n{study.section(study.read_rows(rows), name)}\n")
    say(f"rows     {rows}")


def measure_laws(
    names: Annotated[tuple[str, ...], f"Models ({', '.join(PRESETS)}), model types of transformers, and layers of your "
                                      "own, MODULE:CLASS; by default those of laws.toml.", "NAMES"] = (),
    only: Annotated[tuple[str, ...], "A law; may be given again; by default all.", "--law LAW"] = (),
    settings: Annotated[tuple[str, ...], "Set a field of a class's configuration, as TOML does. May be given again.",
                        "--set NAME=VALUE"] = (),
    rows: Annotated[Path | None, "File that gets one JSON row per class.", "--json FILE"] = None,
) -> None:
    """What packing, padding, caches and beams must not change, asked of tiny random models of any
    causal class. Each law holds, is broken without a word, is refused, or is not tried."""
    import_own(*own_modules(names))
    from benchmarks import laws  # transformers takes seconds to import

    with raised_as(UsageError, "not a setting of TOML", " ".join(settings), ValueError):
        fields = tomllib.loads("\n".join(settings))
    check_rows(rows)
    for name in names or laws.CLASSES:
        row = laws.measure(name, only, fields)
        print(*laws.lines(row), sep="\n", flush=True)
        if rows is not None:
            append_json_lines(rows, [row])


def check_and_show(stop: StopSignal, terminal: Terminal, record: Row) -> None:
    """After a step: raise if somebody asked to stop, else show how far it is."""
    stop.check("what is measured is in the rows; the same command goes on")
    terminal.step(record)


def report(
    table: Annotated[str | None, f"A table or figure: {', '.join(TABLES)}, by default all; or "
                                 f"{', '.join(OTHERS)}.", "TABLE"] = None,
    rows: Annotated[Path | None, "File of rows; by default the committed ones."] = None,
    into: Annotated[tuple[str, ...], "Page whose places for tables are filled, <!-- table lm_wiki40b cpu: begin -->, "
                                      "<!-- speed: begin --> or <!-- recall pairs: begin -->; also several."] = (),
) -> None:
    """The paper's numbers beside ours, as Markdown; or `speed`, `recall` or `laws`.
    Speed and memory: ratios, times and memory by context; bold where FLASH loses."""
    require_name("table", table or "speed", [*TABLES, *OTHERS])
    kind = cast(pages.Kind, table if table in OTHERS else "table")
    require(table in (None, kind) or not into, "arguments that do not go together", f"{table} and --into",
            "leave out the table: the page's places name theirs")
    path = rows or ROOT / "benchmarks" / "rows" / f"{'quality' if kind == 'table' else table}.jsonl"
    laws_in = partial(rows_in, parse=lambda row: row | {"class": row["class"], "laws": row["laws"]})
    read, verb = {"speed": (read_rows, "step ... --json FILE"), "recall": (study.read_rows, "recall"),
                  "laws": (laws_in, "laws --json FILE"), "table": (read_records, "reproduce")}[kind]
    measured = cast(Any, read)(path)
    require(measured != [], "no rows to report", path, f"`python -m benchmarks {verb}` writes them", DataError)
    if into:
        for written in pages.fill_pages(map(Path, into), ROOT / "benchmarks" / "tables" / "images", kind, measured):
            say(f"written  {written}")
    elif kind == "recall":
        print("\n\n".join(f"### {task}\n\n{study.section(measured, task)}" for task in study.ABOUT))
    elif kind == "table":
        print("\n".join(map(table_section, tables_shown(measured, [table] if table else [*TABLES]))), end="")
    else:
        print(pages.shown(kind, measured, []), end="")
