"""The verb that measures: `lineartime benchmark ...`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lineartime.atomic_io import append_json_lines
from lineartime.benchmark.cells import CellTable, read_cells, shaped_config
from lineartime.cli.arguments import Device, Setting, pick_device, whole_numbers
from lineartime.cli.terminal import note
from lineartime.config import PRESETS

if TYPE_CHECKING:
    from lineartime.benchmark import Row

benchmark = typer.Typer(no_args_is_help=True, help="Measure speed and memory; one JSON row per measurement.")
DEFAULT = ["flash", "transformer++"]
"""Who is measured where nobody is named."""

Models = Annotated[list[str] | None, typer.Argument(help=f"Models: {', '.join(PRESETS)}.")]
Task = Annotated[str, typer.Option(help="Whose specification: c4, wiki40b or pg19.")]
Lengths = Annotated[str, typer.Option(help="Tokens of context, with commas.")]
Threads = Annotated[int, typer.Option(help="Processor threads.")]
Rows = Annotated[Path | None, typer.Option("--json", help="File that gets one JSON row per measurement.")]


@benchmark.command("decode")
def benchmark_decode(
    models: Models = None,
    lengths: Lengths = "2048,8192,32768,131072",
    task: Task = "wiki40b",
    settings: Setting = None,
    batch: Annotated[int, typer.Option(help="Rows that are decoded together.")] = 1,
    precision: Annotated[str, typer.Option(
        help="float32, bfloat16, or fastest: each model in whichever is, after its longest context.")] = "fastest",
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
    from lineartime.benchmark import decode

    measured = decode.benchmark_decode(configs, contexts, batch_size=batch, dtype=precision,
                                       quadratic_up_to=quadratic_up_to, read_up_to=read_up_to, repeats=repeats,
                                       capture=capture, **place(threads, device))
    show_and_keep(decode.print_decode, rows)(measured)


Labels = Annotated[list[str] | None, typer.Argument(
    help=f"Models ({', '.join(PRESETS)}, flash-pytorch, fla:retention, fla:gla), each with :compile, :checkpoint or "
         "for Transformers :unfused behind it.")]
Shape = Annotated[str | None, typer.Option(help="Sizes by a name in the file of cells, such as small.")]
Cells = Annotated[Path | None, typer.Option(help="File of cells; by default the package's own.")]
Precision = Annotated[str, typer.Option(help="float32, bfloat16 or both with a comma.")]
Repeats = Annotated[int, typer.Option(help="Timed steps per cell.")]


@benchmark.command("step")
def benchmark_step(
    labels: Labels = None,
    contexts: Lengths = "512,2048,8192",
    precision: Precision = "float32",
    tokens: Annotated[int, typer.Option(help="Tokens in a step; one row where the context is longer.")] = 8192,
    task: Task = "wiki40b",
    shape: Shape = None,
    settings: Setting = None,
    together: Annotated[bool, typer.Option(
        "--together", help="Measure all contexts and types side by side, not one after another.")] = False,
    repeats: Repeats = 5,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
    cells: Cells = None,
) -> None:
    """Time and memory of whole training steps, side by side: forward, loss, backward, clipping, optimizer.
    Any --set applies to every model that has the field."""
    measure_steps(CellTable(None, labels or DEFAULT, whole_numbers(contexts), precision.split(","), shape, task, tokens,
                            repeats, together, set=settings or []), cells, threads, device, rows)


@benchmark.command("memory")
def benchmark_memory(
    labels: Labels = None,
    contexts: Lengths = "2048,4096,8192,16384",
    precision: Precision = "float32",
    task: Task = "wiki40b",
    shape: Shape = None,
    settings: Setting = None,
    repeats: Repeats = 3,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
    cells: Cells = None,
) -> None:
    """Peak memory, and time per token beside it, of a training step of one row at growing contexts."""
    measure_steps(CellTable(None, labels or DEFAULT, whole_numbers(contexts), precision.split(","), shape, task, 1,
                            repeats, True, "memory", set=settings or []), cells, threads, device, rows)


def measure_steps(table: CellTable, cells: Path | None, threads: int, device: str | None, rows: Path | None,
                  there: "Sequence[Row]" = ()) -> None:
    """Training steps of a table, whose rows are written as soon as they are there. A table without a name is what a
    person asked for: a peer of it that is not installed is an error."""
    from lineartime.benchmark import peers, step

    config_of = partial(shaped_config, task=table.task, shape=fields_of(table.shape, cells), settings=table.set)
    chosen = step.step_cases(table.labels, table.contexts, table.precision, tokens=table.tokens, name=table.name,
                             longest=table.longest, config_of=config_of)
    if table.name is None:
        for case in chosen:
            peers.check_installed(case.label)
    else:
        note(f"{table.name}: {len(chosen)} cells")
    step.benchmark_step(chosen, repeats=table.repeats, together=table.together, benchmark=table.benchmark, there=there,
                        on_rows=show_and_keep(step.print_step, rows), **place(threads, device))


@benchmark.command("op")
def benchmark_op(
    op: Annotated[str, typer.Argument(help="gated_chunk_attention, gated_quadratic_attention, add_norm, "
                                           "mixed_chunk_attention, quadratic_attention, linear_attention, "
                                           "softmax_attention or linear_cross_entropy.")],
    contexts: Lengths = "2048",
    precision: Precision = "float32",
    tokens: Annotated[int, typer.Option(help="Tokens in a call; one row where the context is longer.")] = 8192,
    only: Annotated[list[str] | None, typer.Option(
        help="An implementation; may be given again. All by default.")] = None,
    model: Annotated[str | None, typer.Option(help="Model whose sizes the op has; by default one that has it.")] = None,
    task: Task = "wiki40b",
    shape: Shape = None,
    settings: Setting = None,
    repeats: Annotated[int, typer.Option(help="Timed calls per implementation.")] = 10,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
    cells: Cells = None,
) -> None:
    """Forward and backward of one op, its implementations side by side, each checked against float64."""
    lengths, fields = whole_numbers(contexts), fields_of(shape, cells)
    from lineartime.benchmark import op as ops

    config = shaped_config(model or ops.MODEL_OF.get(op, "flash"), task, fields, settings or [])
    ops.benchmark_op(op, [replace(config, context=n) for n in lengths], tokens=tokens, precisions=precision.split(","),
                     only=only or [], repeats=repeats, on_rows=show_and_keep(ops.print_op, rows),
                     **place(threads, device))


@benchmark.command("run")
def benchmark_run(
    names: Annotated[list[str], typer.Argument(help="Tables or lists of tables in the file of cells, such as bench.")],
    rows: Annotated[Path, typer.Option("--json", help="File that gets the rows, and is looked at for those that are "
                                                      "there.")] = Path("out/bench.jsonl"),
    again: Annotated[bool, typer.Option("--again", help="Measure what is in the file too.")] = False,
    threads: Threads = 1,
    device: Device = None,
    cells: Cells = None,
) -> None:
    """Measure named cells; the same command goes on where it stopped.
    Cells are left out whose rows the file has from the same commit."""
    tables = read_cells(cells).named(names)
    from lineartime.benchmark import measure

    rows.parent.mkdir(parents=True, exist_ok=True)
    for table in tables:
        measure_steps(table, cells, threads, device, rows, [] if again else measure.rows_of_commit(rows))


@benchmark.command("loss")
def benchmark_loss(
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 32_000,
    d_model: Annotated[int, typer.Option(help="Width of the hidden vectors.")] = 768,
    tokens: Annotated[int, typer.Option(help="Tokens in a call that is timed.")] = 8192,
    many_tokens: Annotated[int, typer.Option(help="Tokens whose memory is counted.")] = 2**18,
    precision: Precision = "float32,bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed calls per implementation.")] = 3,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
) -> None:
    """Time and memory of the head and the loss: with all logits, without them, and PyTorch's own where it has it."""
    from lineartime.benchmark import loss

    loss.benchmark_loss(vocab_size=vocab_size, d_model=d_model, tokens=tokens, many_tokens=many_tokens,
                        precisions=precision.split(","), repeats=repeats, on_rows=show_and_keep(loss.print_loss, rows),
                        **place(threads, device))


@benchmark.command("read")
def benchmark_read(
    model: Annotated[str, typer.Argument(help=f"A model: {', '.join(PRESETS)}.")] = "flash",
    tokens: Annotated[int, typer.Option(help="Tokens in the prompt.")] = 1_000_000,
    task: Task = "wiki40b",
    settings: Setting = None,
    threads: Threads = 1,
    device: Device = None,
    rows: Rows = None,
) -> None:
    """Memory while a long prompt is read: the most a process has had after each tenth of it."""
    config = shaped_config(model, task, settings=settings or [])
    from lineartime.benchmark import memory

    measured = memory.benchmark_read(config, tokens, threads=threads, device=pick_device(device).type)
    show_and_keep(lambda rows: memory.print_read(rows[0]), rows)([measured])


def show_and_keep(show: "Callable[[Sequence[Row]], None]", path: Path | None) -> "Callable[[list[Row]], None]":
    """What to do with rows as they come: print them, and write them to the file if there is one."""
    def on_rows(rows: "list[Row]") -> None:
        show(rows)
        if path is not None:
            append_json_lines(path, rows)

    return on_rows


def place(threads: int, device: str | None) -> dict[str, Any]:
    """Where every benchmark measures, and who hears of it."""
    return {"threads": threads, "device": pick_device(device).type, "progress": note}


def fields_of(shape: str | None, cells: Path | None) -> dict[str, Any]:
    """A shape of the file of cells, which is read where one is named."""
    return read_cells(cells).shape(shape) if shape else {}
