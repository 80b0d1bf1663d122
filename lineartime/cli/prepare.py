"""`lineartime prepare`: text into tokens."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lineartime.atomic_io import scratch_folder
from lineartime.cli.options import given_options
from lineartime.cli.terminal import Terminal, results_are_files, say
from lineartime.data.prepare_config import PrepareSettings
from lineartime.errors import DataError, UsageError
from lineartime.settings import require

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest


def prepare(
    settings: PrepareSettings,
    join: Annotated[bool, "The inputs are the folders of all parts: check them and put them together."] = False,
) -> None:
    """Turn text into tokens once, for training to read. If it was cut off, the same command goes on.

    On N machines: give --part 1/N, --part 2/N, ... and --tokenizer FILE to the same command, one on each machine. Then
    run `lineartime prepare --join PART1 PART2 ... --out DATA` on one. The result is what one machine would have made.
    """
    results_are_files()
    if join and (more := [name for name in given_options(settings) if name not in ("INPUTS", "--out")]):
        raise UsageError("--join takes the folders of the parts and --out", ", ".join(more),
                         "leave it out: the parts have their own settings")
    require(settings.tokenizer == "train" or settings.vocab_size is None, "this tokenizer has its own vocabulary",
            f"--tokenizer {settings.tokenizer} --vocab-size {settings.vocab_size}", "leave out --vocab-size")
    from lineartime.data.prepare import join as join_parts
    from lineartime.data.prepare import prepare_text

    with Terminal() as terminal, saved_stdin(settings) as settings:
        manifest = (join_parts(settings.inputs, settings.out, progress=terminal.count) if join else
                    prepare_text(settings, progress=terminal.count))
    say_prepared(manifest, settings.out, settings.part)


@contextmanager
def saved_stdin(settings: PrepareSettings) -> Iterator[PrepareSettings]:
    """The settings, with a file beside `out` in the place of `-`, because text is read several times. It goes with the
    block."""
    inputs, stdin = settings.inputs, Path("-")
    if stdin not in inputs:
        yield settings
        return
    if inputs.count(stdin) > 1:
        raise UsageError("stdin is read once", "-", "name it once")
    with scratch_folder(Path(os.path.realpath(settings.out))) as folder:
        path = folder / "stdin.txt"
        with path.open("wb") as file:
            while block := (b"" if sys.stdin is None else sys.stdin.buffer.read(1 << 20)):
                if b"\0" in block:  # and not the endless copy of a device
                    raise DataError("a NUL byte: this is no text", "stdin")
                file.write(block)
        if not path.stat().st_size:
            raise DataError("no text", "stdin", "pipe some in: cat notes.txt | lineartime prepare - ...")
        yield dataclasses.replace(settings, inputs=tuple(path if each == stdin else each for each in inputs))


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
