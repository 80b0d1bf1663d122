"""The verbs of `python -m benchmarks`. What needs torch is imported where it is needed, so that --help is quick."""

import os
import shlex
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from benchmarks import ROOT, Row
from benchmarks.append import append_json_lines
from benchmarks.cells import CELLS, measure_call, named_calls, run_calls, shape_named, shaped_config
from benchmarks.paper.tables import SCALE_NAMES, TABLES, ScaleName
from lineartime.cli.evaluate import show_or_print
from lineartime.cli.options import Device, ShippedModel, Strict, Task, numbers
from lineartime.cli.terminal import Terminal, note, results_are_files, say, say_stopping
from lineartime.config import MODEL_FIELDS, PRESETS, TRAIN_FIELDS
from lineartime.data.pretrained import model_folder, named_folder, shipped_models
from lineartime.distributed.ranks import connected
from lineartime.errors import DataError, ResourceError, UsageError
from lineartime.run_config import parse_setting
from lineartime.settings import require, require_name, require_precision

SPEED, RECALL = "speed", "recall"
"""What has rows of its own beside those of the tables."""
DEFAULT = ["flash", "transformer++"]
"""Who is measured where nobody is named."""

Setting = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set any field of the models.")]
Models = Annotated[list[str] | None, typer.Argument(help=f"Models: {', '.join(PRESETS)}.")]
Labels = Annotated[list[str] | None, typer.Argument(
    help=f"Models ({', '.join(PRESETS)}, flash-pytorch), each with :compile, :checkpoint or "
         "for Transformers :unfused behind it.")]
Lengths = Annotated[str, typer.Option(help="Tokens of context, with commas.")]
Tokens = Annotated[int, typer.Option(help="Tokens in a step or call; one row where the context is longer.")]
Precision = Annotated[str, typer.Option(help="float32, bfloat16 or both with a comma.")]
Shape = Annotated[str | None, typer.Option(help="Sizes by a name in the file of cells, such as small.")]
Repeats = Annotated[int, typer.Option(help="Timed rounds.")]
Threads = Annotated[int, typer.Option(min=1, max=1024, help="Processor threads.")]
Rows = Annotated[Path | None, typer.Option("--json", help="File that gets one JSON row per measurement.")]


def benchmark_decode(
    models: Models = None,
    lengths: Lengths = "2048,8192,32768,131072",
    task: Task = "wiki40b",
    settings: Setting = None,
    batch: Annotated[int, typer.Option(help="Rows that are decoded together.")] = 1,
    precision: Precision = "bfloat16",
    quadratic_up_to: Annotated[int, typer.Option(help="Longest context for models with a key-value cache.")] = 32768,
    read_up_to: Annotated[int, typer.Option(
        help="Contexts up to this are read as well as filled with random numbers.")] = 2048,
    repeats: Annotated[int, typer.Option(help="Timed blocks of whole chunks per context.")] = 2,
    capture: Annotated[bool, typer.Option("--capture", help="Each step is a CUDA graph.")] = False,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
) -> None:
    """Time per generated token after contexts of different lengths.
    Any --set applies to every model that has the field. Long contexts are not read, which would take minutes: their
    state is filled with random numbers."""
    contexts = list(numbers(lengths, int))
    configs = {name: shaped_config(name, task, settings=settings or []) for name in models or DEFAULT}
    from benchmarks import decode

    measured = decode.benchmark_decode(
        configs, contexts, batch_size=batch, precisions=precision.split(","), quadratic_up_to=quadratic_up_to,
        read_up_to=read_up_to, repeats=repeats, capture=capture, **place(threads, device))
    show_and_keep(rows, measured)


def benchmark_step(
    labels: Labels = None,
    contexts: Lengths = "512,2048,8192",
    precision: Precision = "float32",
    tokens: Tokens = 8192,
    task: Task = "wiki40b",
    shape: Shape = None,
    settings: Setting = None,
    together: Annotated[bool, typer.Option(
        "--together", help="Measure all contexts and types side by side, not one after another.")] = False,
    repeats: Repeats = 5,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
) -> None:
    """Time and memory of whole training steps, side by side: forward, loss, backward, clipping, optimizer.
    Any --set applies to every model that has the field."""
    lengths, fields = list(numbers(contexts, int)), shape_named(shape)
    from benchmarks import step

    chosen = step.step_cases(labels or DEFAULT, lengths, precision.split(","), tokens=tokens,
                             config_of=lambda preset: shaped_config(preset, task, fields, settings or []))
    step.benchmark_step(chosen, repeats=repeats, together=together, on_rows=partial(show_and_keep, rows),
                        **place(threads, device))


def benchmark_memory(labels: Labels = None, contexts: Lengths = "2048,4096,8192,16384",
                     precision: Precision = "float32", task: Task = "wiki40b", shape: Shape = None,
                     settings: Setting = None, repeats: Repeats = 3, threads: Threads = 1, device: Device = None,
                     rows: Rows = None) -> None:
    """Peak memory of training steps of one row at growing contexts: `step --tokens 1 --together`."""
    benchmark_step(labels, contexts, precision, 1, task, shape, settings, True, repeats, threads, device, rows)


def benchmark_op(
    op: Annotated[str, typer.Argument(help="gated_chunk_attention, gated_quadratic_attention, add_norm, "
                                           "softmax_attention or linear_cross_entropy.")],
    contexts: Lengths = "2048",
    precision: Precision = "float32",
    tokens: Tokens = 8192,
    model: Annotated[str | None, typer.Option(help="Model whose sizes the op has; by default one that has it.")] = None,
    task: Task = "wiki40b",
    shape: Shape = None,
    settings: Setting = None,
    repeats: Repeats = 10,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
) -> None:
    """Forward and backward of one op, its implementations side by side, each checked against float64."""
    lengths, fields = list(numbers(contexts, int)), shape_named(shape)
    from benchmarks import op as ops

    config = shaped_config(model or ops.MODEL_OF.get(op, "flash"), task, fields, settings or [])
    ops.benchmark_op(op, [replace(config, context=n) for n in lengths], tokens=tokens, precisions=precision.split(","),
                     repeats=repeats, on_rows=partial(show_and_keep, rows), **place(threads, device))


def benchmark_run(
    names: Annotated[list[str], typer.Argument(help="Tables or lists of tables in the file of cells, such as bench.")],
    rows: Annotated[Path, typer.Option("--json", help="File that gets the rows, and is looked at for those that are "
                                                      "there.")] = Path("out/bench.jsonl"),
    threads: Threads = 1,
    device: Device = None,
    cells: Annotated[Path | None, typer.Option(help="File of cells; by default the package's own.")] = None,
) -> None:
    """Measure named cells, each by a call of its own; the same command goes on where it stopped.
    Calls are left out whose rows the file has from the same commit."""
    calls = named_calls(names, cells or CELLS)
    from benchmarks.measure import rows_of_commit
    from lineartime.runtime import pick_device

    where = ["--threads", str(threads), "--device", pick_device(device).type]
    call = partial(measure_call, rows=rows, more=where)
    rows.parent.mkdir(parents=True, exist_ok=True)
    done = {row["cell"] for row in rows_of_commit(rows) if row.get("cell")}
    if not run_calls(calls, call, done, rows.with_suffix(".calls.jsonl"), note):
        raise ResourceError("a call failed", rows, "what it said is above; the same command tries it again")


def show_and_keep(path: Path | None, rows: list[Row]) -> None:
    """Print rows, and write them to the file if there is one."""
    from benchmarks.measure import print_rows

    print_rows(rows)
    if path is not None:
        append_json_lines(path, rows)


def place(threads: int, device: str | None) -> dict[str, Any]:
    """Where every benchmark measures, and who hears of it."""
    from lineartime.runtime import pick_device

    return {"threads": threads, "device": pick_device(device).type, "progress": note}


def reproduce(
    tables: Annotated[list[str] | None, typer.Argument(
        help=f"Tables and figures, by default all: {', '.join(TABLES)}; or {RECALL}, a study of its own.")] = None,
    scale: Annotated[str, typer.Option(help="paper, gpu or cpu: how large.")] = "cpu",
    texts: Annotated[Path | None, typer.Option(help="Folder with the texts of the scale, each in a folder.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for prepared text and runs; what is there goes on.")] = Path(
        "out/reproduce"),
    rows: Annotated[Path | None, typer.Option(
        help="File of rows, looked at for what is there and added to; by default rows.jsonl in --out.")] = None,
    jobs: Annotated[int | None, typer.Option(
        help="Runs at a time; by default one per processor core, and one on a GPU.")] = None,
    ranks: Annotated[int, typer.Option(
        help="Processes of one run, which torchrun starts on this machine; rows do not depend on their number.")] = 1,
    seeds: Annotated[int | None, typer.Option(help="Only the first so many seeds of each cell.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what is there and what is missing.")] = False,
    device: Device = None,
) -> None:
    """Train, fine-tune and time what a table of the paper needs and has no row yet.
    The same command goes on where it stopped; `python -m benchmarks report` shows the rows."""
    names = tables or list(TABLES)
    for name in names:
        require_name("table", name, [*TABLES, RECALL])
    require(names == [RECALL] or RECALL not in names, "recall does not run together with tables", " ".join(names),
            "run it by itself")
    require_name("scale", scale, SCALE_NAMES)
    size = cast(ScaleName, scale)
    require(names != [RECALL] or (ranks, seeds, jobs, plan) == (1, None, None, False),
            "the study of recall takes no --ranks, --seeds, --jobs or --plan", RECALL, "leave them out")
    for option, value in (("jobs", jobs), ("ranks", ranks), ("seeds", seeds)):
        require(value is None or value >= 1, "wrong value", f"{option} = {value}", "it takes whole numbers from 1")
    if texts is not None and not texts.is_dir():
        raise DataError("no such folder of texts", texts)
    from benchmarks.paper import runner
    from benchmarks.paper.records import read_records
    from lineartime.runtime import pick_device
    from lineartime.training import StopSignal

    path = rows or out / ("recall.jsonl" if names == [RECALL] else "rows.jsonl")
    if plan:
        for name in names:
            for line in runner.plan_lines(name, size, read_records(path), seeds):
                say(line)
        return
    where = pick_device(device).type
    at_once = jobs or (1 if where == "cuda" else max((os.cpu_count() or 1) // ranks, 1))
    place = runner.Place(texts, out, path, where, at_once, seeds, note, ranks)
    with StopSignal().listening(say_stopping) as stop:
        n_rows = (runner.reproduce_recall(place, stop) if names == [RECALL] else
                  sum(runner.reproduce(name, size, place, stop) for name in names))
    say(f"{n_rows:,} rows added to {path}" if n_rows else f"complete: {path} has every row; nothing to do.")
    if names != [RECALL]:
        say(f"next     python -m benchmarks report {names[0] if len(names) == 1 else ''} --scale {scale} --rows {path}")


def recall(
    models: Annotated[list[str] | None, typer.Argument(
        help="Models of the study, by default the main ones; for --task text also trained ones: folders, or small.")
        ] = None,
    shipped: ShippedModel = None,
    task: Annotated[str, typer.Option(help="pairs, joint, needle, induction, copying, zoology or text.")] = "pairs",
    data: Annotated[Path | None, typer.Option(help="Prepared text, for --task text.")] = None,
    rates: Annotated[str | None, typer.Option("--learning-rates", help="Rates to try, with commas.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="The best rate is repeated up to so many seeds.")] = None,
    settings: Setting = None,
    rows: Annotated[Path, typer.Option(
        "--json", help="File of rows, looked at for what is there and added to.")] = Path("out/recall.jsonl"),
) -> None:
    """Train small models to find in a row what was written there before, and ask them, also in longer rows.
    The same command goes on where it stopped. Trained models are asked without more training."""
    given = dict(parse_setting(text) for text in settings or [])
    wrong = given.keys() - {*MODEL_FIELDS, *TRAIN_FIELDS}
    if wrong:
        raise UsageError("not a setting of recall", ", ".join(sorted(wrong)))
    from benchmarks.recall import report as recall_report
    from benchmarks.recall import study
    from benchmarks.recall.measure import n_asked
    from lineartime.training import StopSignal

    content, about = study.read_study(), study.task_of(task, data)
    trained = [name for name in models or []
               if name not in content["models"] and (name in shipped_models() or Path(name).is_dir())]
    runs = [*map(named_folder, trained), *([model_folder(shipped)] if shipped else [])]
    names = [name for name in models or [] if name not in trained]
    require(not runs or data is not None, "a trained model is asked in text alone", " ".join(map(str, runs)),
            "give --task text and --data")
    if not runs and not names:
        names = content["lists"]["few" if task == study.TEXT else "main"]
    train = study.training(task, about, given if names else {})
    fields = {name: value for name, value in given.items() if name in MODEL_FIELDS}
    for name in names:  # a wrong one is refused before the first is trained
        length = study.config_of(name, about, fields).context
        require(length >= about.least, "the row is too short for its facts", f"context = {length}",
                f"the task {task} takes {about.least} tokens or more")
    tried = numbers(rates) if rates else content["study"]["learning_rates"]
    n_seeds = seeds or content["study"]["seeds"]
    results_are_files()
    # Where a row comes from, without the folders of the machine.
    words = ["--task", task, *(word for text in settings or [] for word in ("--set", text))]
    command_of = partial(recall_command, words)
    measured = []
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        for run in runs:
            length = fields.get("context", about.length)
            progress = stop.watch("nothing is written", terminal.count, "asking", n_asked(length, about.n_facts))
            row = study.ask_run(run, cast(Path, data), length, progress) | command_of(run.name)
            append_json_lines(rows, [row])
            say(recall_report.line(row))
        for number, name in enumerate(names, 1):
            note(f"{name} ({number} of {len(names)}), {task}: {len(tried)} learning rates, {n_seeds} seeds")
            for row in study.measure_model(name, task, about, train, fields, tried, n_seeds, rows,
                                           partial(command_of, name), on_step=partial(check_and_show, stop, terminal)):
                measured.append(row)
                say(recall_report.line(row))
    if measured:
        print(f"\n{recall_report.section(measured, task)}\n")
    say(f"rows     {rows}")


def recall_command(words: list[str], name: str) -> dict[str, Any]:
    """Where a row of recall comes from: provenance, and the command with these words behind the model's name."""
    from lineartime.release.provenance import provenance

    return provenance() | {"command": shlex.join(["python", "-m", "benchmarks", "recall", name, *words])}


def check_and_show(stop: Any, terminal: Terminal, record: dict[str, Any]) -> None:
    """After a step: raise if somebody asked to stop, else show how far it is."""
    stop.check("what is measured is in the rows; the same command goes on")
    terminal.step(record)


def recurrence(
    run: Annotated[str, typer.Argument(help="A run, one of its checkpoints, an exported folder, or small.")],
    data: Annotated[Path, typer.Option(help="Folder made by `lineartime prepare`.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    chunk: Annotated[int | None, typer.Option(help="Tokens of a chunk; by default the model's.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row; by default as in training.")] = None,
    batch_rows: Annotated[int | None, typer.Option(help="Rows scored at once.")] = None,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="JSON file for the scores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Score a split by whether a token, or a pair of tokens, was in its row before: what does the model recall?"""
    for option, value in (("batch_rows", batch_rows), ("context", context), ("chunk", chunk)):
        require(value is None or value >= 1, "wrong value", f"{option} = {value}", "it takes whole numbers from 1")
    if out is not None and not out.parent.is_dir():
        raise ResourceError("cannot write", out, "there is no such folder")
    require_precision(precision)
    folder = named_folder(run)
    from benchmarks.recurrence import describe, measure_recurrence
    from lineartime.data.tokens import open_split
    from lineartime.evaluation import load_with_split
    from lineartime.runtime import pick_device

    model, stream, facts = load_with_split(folder, data, split, strict=strict)
    picked = pick_device(device)
    with connected(picked.type) as ranks, Terminal() as terminal:
        found = measure_recurrence(model.to(picked), stream, open_split(data, "train"), chunk=chunk, context=context,
                                   batch_rows=batch_rows, precision=precision, ranks=ranks, progress=terminal.count)
    show_or_print({**facts, "split": split, **found.to_dict()}, describe(found), out, as_json)




def report(
    table: Annotated[str | None, typer.Argument(
        help=f"A table or figure: {', '.join(TABLES)}, by default all; or {SPEED}, or {RECALL}.")] = None,
    scale: Annotated[str | None, typer.Option(help="paper, gpu or cpu; by default each that has rows.")] = None,
    rows: Annotated[Path | None, typer.Option(help="File of rows; by default the committed ones.")] = None,
    into: Annotated[list[Path] | None, typer.Option(
        help="Page whose places for tables are filled, <!-- table lm_wiki40b cpu: begin -->, <!-- speed: begin --> or "
             "<!-- recall pairs: begin -->; may be given again.")] = None,
    images: Annotated[Path, typer.Option(help="Folder for the pictures of --into.")] = Path("benchmarks/tables/images"),
) -> None:
    """The paper's numbers beside ours, as Markdown; or `speed`, or `recall`.
    Speed and memory: ratios, times and memory by context; bold where FLASH loses."""
    require_name("table", table or SPEED, [*TABLES, SPEED, RECALL])
    require_name("scale", scale or "cpu", SCALE_NAMES)
    of_paper = table not in (SPEED, RECALL)
    require(scale is None or (of_paper and not into), "arguments that do not go together", "--scale", "leave it out")
    require(table is None or not of_paper or not into, "arguments that do not go together", f"{table} and --into",
            "leave out the table: the page's places name theirs")
    require(find_spec("pandas") is not None, "pandas is not installed", "tables are made with it",
            "pip install 'pandas>=3'")
    measured = read(table, rows or ROOT / "benchmarks" / "rows" / f"{'quality' if of_paper else table}.jsonl")
    if into:
        from benchmarks.pages import Kind, fill_pages  # they draw, and drawing imports torch

        kind: Kind = "speed" if table == SPEED else "recall" if table == RECALL else "table"
        for written in fill_pages(into, images, kind, measured):
            say(f"written  {written}")
    elif table == SPEED:
        from benchmarks.speed import speed_section, tables_of

        print(speed_section(tables_of(measured)), end="")
    elif table == RECALL:
        from benchmarks.recall.report import ABOUT, section

        print("\n\n".join(f"### {task}\n\n{section(measured, task)}" for task in ABOUT))
    else:
        from benchmarks.paper.report import table_section, tables_shown

        shown = tables_shown(measured, [table] if table else [], [cast(ScaleName, scale)] if scale else [])
        print("\n".join(map(table_section, shown)), end="")


def read(table: str | None, path: Path) -> list[Any]:
    """The rows of a report. Raises DataError where there are none, or rows of something else."""
    measured: list[Any]
    if table == SPEED:
        from benchmarks.speed import read_rows

        measured = read_rows(path)
    elif table == RECALL:
        from benchmarks.recall.study import read_rows as read_recall

        measured = read_recall(path)
    else:
        from benchmarks.paper.records import read_records

        measured = read_records(path)
    if not measured:
        verb = {SPEED: "step ... --json FILE", RECALL: "reproduce recall"}.get(table or "", "reproduce")
        raise DataError("no rows to report", path, f"`python -m benchmarks {verb}` writes them")
    return measured
