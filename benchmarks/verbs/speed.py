"""The verbs that measure speed and memory."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import Row
from benchmarks.cells import CELLS, measure_call, named_calls, run_calls, shape_named, shaped_config
from lineartime.atomic_io import append_json_lines
from lineartime.cli.arguments import Device, Setting, Task, pick_device, whole_numbers
from lineartime.cli.terminal import note
from lineartime.config import PRESETS
from lineartime.errors import ResourceError

DEFAULT = ["flash", "transformer++"]
"""Who is measured where nobody is named."""

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
    contexts = whole_numbers(lengths)
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
    lengths, fields = whole_numbers(contexts), shape_named(shape)
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
    lengths, fields = whole_numbers(contexts), shape_named(shape)
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
    calls, where = named_calls(names, cells or CELLS), ["--threads", str(threads), "--device", pick_device(device).type]
    from benchmarks.measure import rows_of_commit

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
    return {"threads": threads, "device": pick_device(device).type, "progress": note}
