"""`lineartime prepare`: text into tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lineartime.cli.options import given_options
from lineartime.cli.terminal import Terminal, results_are_files, say
from lineartime.data.prepare_config import PrepareSettings
from lineartime.errors import UsageError
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

    with Terminal() as terminal:
        manifest = (join_parts(settings.inputs, settings.out, progress=terminal.count) if join else
                    prepare_text(settings, progress=terminal.count))
    say_prepared(manifest, settings.out, settings.part)


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
