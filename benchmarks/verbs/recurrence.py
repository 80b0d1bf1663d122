"""The verb that scores a split by what was in a token's row before: `python -m benchmarks recurrence`."""

from pathlib import Path
from typing import Annotated

import typer

from lineartime.cli.arguments import Device, Strict, pick_device
from lineartime.cli.evaluate import show_or_print
from lineartime.cli.terminal import Terminal
from lineartime.data.pretrained import named_folder
from lineartime.distributed.ranks import connected
from lineartime.errors import ResourceError
from lineartime.settings import require, require_precision


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

    model, stream, facts = load_with_split(folder, data, split, strict=strict)
    picked = pick_device(device)
    with connected(picked.type) as ranks, Terminal() as terminal:
        found = measure_recurrence(model.to(picked), stream, open_split(data, "train"), chunk=chunk, context=context,
                                   batch_rows=batch_rows, precision=precision, ranks=ranks, progress=terminal.count)
    show_or_print({**facts, "split": split, **found.to_dict()}, describe(found), out, as_json)
