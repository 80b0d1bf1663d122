"""`lineartime prepare`: text into tokens."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lineartime.atomic_io import scratch_folder
from lineartime.cli.terminal import Terminal, results_are_files, say
from lineartime.errors import DataError, UsageError

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest


def prepare(
    given: typer.Context,
    inputs: Annotated[list[Path] | None, typer.Argument(
        help="Text: .txt, .md, .txt.gz, .jsonl(.gz), .json.gz, .parquet, folders of them, or `-`, one document on "
             "stdin.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the prepared tokens.")] = ...,  # type: ignore[assignment]
    sample: Annotated[bool, typer.Option("--sample", help="Prepare the book that ships with the package.")] = False,
    tokenizer: Annotated[str, typer.Option(
        help="train, bytes, the path of a tokenizer.json, or what has one: a run, an export, small.")] = "train",
    add_tokens: Annotated[Path | None, typer.Option(
        help="Further tokens for this tokenizer, one in each line of a file.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Size of a trained tokenizer's vocabulary.")] = 32_000,
    held_out: Annotated[float | None, typer.Option(
        help="Fraction of the text, at least, that is kept for validation: whole documents at equal distances, or the "
             "end of a single one.")] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="Text for validation.")] = None,
    test: Annotated[list[Path] | None, typer.Option(help="Text for test.")] = None,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    task: Annotated[str | None, typer.Option(help="Read the text as c4, wiki40b or pg19.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Read the task's data set from the hub, with `datasets`.")] = False,
    documents: Annotated[int | None, typer.Option(help="With --hub: number of documents of each split.")] = None,
    mlm: Annotated[bool, typer.Option("--mlm", help="For masked language modelling: add [MASK] and [SEP].")] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes that tokenise; by default one per core.")] = None,
    part: Annotated[str | None, typer.Option(
        metavar="K/N", help="Prepare share K of N of the files, on one of N machines; needs --tokenizer.")] = None,
    joined: Annotated[bool, typer.Option(
        "--join", help="The inputs are the folders of all parts: check and join them.")] = False,
) -> None:
    """Tokenise text once into shards that training reads. The same command goes on where it was cut off.

    On N machines: the same command with --part 1/N, --part 2/N, ... and --tokenizer FILE on each; then on one,
    `lineartime prepare --join PART1 PART2 ... --out DATA`, which makes what one machine would have made."""
    results_are_files()
    if joined:
        more = [name.replace("_", "-") for name in given.params if name not in ("inputs", "out", "joined")
                and getattr(given.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
        if more:
            raise UsageError("--join takes the folders of the parts and --out", f"--{', --'.join(more)}",
                             "leave it out: the parts have their own settings")
    if tokenizer != "train" and getattr(given.get_parameter_source("vocab_size"), "name", "DEFAULT") != "DEFAULT":
        raise UsageError("this tokenizer has its own vocabulary", f"--tokenizer {tokenizer} --vocab-size {vocab_size}",
                         "leave out --vocab-size")
    from lineartime.data.prepare import join, prepare

    with Terminal(stay=True) as terminal, saved_stdin(inputs or [], out) as inputs:
        if joined:
            manifest = join(inputs, out, progress=terminal.count)
            say_prepared(manifest, out)
            return
        manifest = prepare(inputs, out, sample=sample, tokenizer=tokenizer, add_tokens=add_tokens,
                           vocab_size=vocab_size, held_out=held_out, validation=validation or [], test=test or [],
                           field=text_field, task=task, hub=hub, documents=documents, mlm=mlm, jobs=jobs, part=part,
                           progress=terminal.count)
    say_prepared(manifest, out, part)


@contextmanager
def saved_stdin(inputs: list[Path], out: Path) -> Iterator[list[Path]]:
    """The inputs, with a file beside `out` in the place of `-`: text is read several times. It goes with the block."""
    if Path("-") not in inputs:
        yield inputs
        return
    if inputs.count(Path("-")) > 1:
        raise UsageError("stdin is read once", "-", "name it once")
    with scratch_folder(Path(os.path.realpath(out))) as folder:
        path = folder / "stdin.txt"
        with path.open("wb") as file:
            while block := (b"" if sys.stdin is None else sys.stdin.buffer.read(1 << 20)):
                if b"\0" in block:  # and not the endless copy of a device
                    raise DataError("a NUL byte: this is no text", "stdin")
                file.write(block)
        if not path.stat().st_size:
            raise DataError("no text", "stdin", "pipe some in: cat notes.txt | lineartime prepare - ...")
        yield [path if each == Path("-") else each for each in inputs]


def say_counts(manifest: "Manifest") -> None:
    """Print a line of counts for each split of prepared text."""
    for name, split in manifest.splits.items():
        say(f"{name:<11} {split.documents:>7,} documents  {split.tokens:>12,} tokens  "
            f"{split.words:>12,} words  {split.bytes:>13,} bytes")


def say_prepared(manifest: "Manifest", out: Path, part: str | None = None) -> None:
    """Print the counts and notes of prepared text, and what comes next."""
    if manifest.already_prepared:
        say(f"already prepared: {out} holds this text with these settings; nothing to do.")
        return
    say_counts(manifest)
    for line in manifest.notes:
        say(f"note: {line}")
    if part is not None:
        say("next        lineartime prepare --join PART1 PART2 ... --out DATA, when all parts are there")
        return
    if "validation" not in manifest.splits:
        say(f"note: {out} has nothing held out, which training needs: prepare with --held-out 0.05 or --validation")
        return
    task, mlm = manifest.settings.get("task"), manifest.settings.get("mlm")
    named = task or ("c4" if mlm else None)
    how = (f"--task {named} " if named else "") + ("--set causal=false " if mlm and named != "c4" else "")
    say(f"next        lineartime train flash {how}--data {out} --out RUN")
