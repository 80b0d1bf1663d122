"""`lineartime prepare`: text into tokens."""

from shlex import quote
from typing import TYPE_CHECKING

from lineartime.cli.terminal import Terminal, results_are_files, say
from lineartime.data.prepare_config import PrepareSettings

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest


def prepare(settings: PrepareSettings) -> None:
    """Turn text into tokens once, for training to read. If it was cut off, the same command goes
    on. Many machines can share the work: see docs/guides/many-machines.md."""
    results_are_files()
    from lineartime.data.prepare import prepare_text

    with Terminal() as terminal:
        manifest = prepare_text(settings, progress=terminal.count)
    say_prepared(manifest, settings.out)


def say_counts(manifest: "Manifest") -> None:
    """Print a line of counts for each split of prepared text."""
    for name, split in manifest.splits.items():
        say(f"{name:<11} {split.documents:>7,} documents  {split.tokens:>12,} tokens  "
            f"{split.words:>12,} words  {split.bytes:>13,} bytes")


def say_prepared(manifest: "Manifest", out: str) -> None:
    """Print the counts and notes of prepared text, and what comes next."""
    if manifest.already_prepared:
        say(f"already prepared: {out} holds this text with these settings; nothing to do.")
        return
    say_counts(manifest)
    for line in manifest.notes:
        say(f"note: {line}")
    if "validation" not in manifest.splits:
        say(f"note: {out} has nothing held out, which training needs: prepare with --held-out 0.05 or --validation")
        return
    task, mlm = manifest.settings.get("task"), manifest.settings.get("mlm")
    named = task or ("c4" if mlm else None)
    how = (f"--task {named} " if named else "") + ("--set causal=false " if mlm and named != "c4" else "")
    say(f"next        lineartime train flash {how}--data {quote(out)} --out RUN")
