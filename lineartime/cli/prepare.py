"""`lineartime prepare`, text into tokens, and what there is to begin with: `config` and `info`."""

import textwrap
import typing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from lineartime.base.settings import describe_kind, field_text, replace_fields, require, require_name
from lineartime.base.stores import exists, is_address, joined
from lineartime.cli.options import Model, Setting, Size, Task
from lineartime.cli.terminal import Terminal, results_are_files, say
from lineartime.config import PRESETS, model_config, source_of
from lineartime.data.prepare_config import PrepareSettings
from lineartime.folders import read_config, shipped_models, weights_folder
from lineartime.training.run_config import run_config

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest


def prepare(settings: PrepareSettings) -> None:
    """Turn text into tokens once, for training to read. If it was cut off, it begins again."""
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


def config(model: Model = "flash", size: Size = "paper", task: Task = "wiki40b") -> None:
    """List every field that --set takes. Of each: its value for a model, what values it takes, what
    it is, and the paper's table that has it."""
    run = run_config({"model": model, "size": size, "task": task, "data": "-", "out": "-"})
    for title, made in (("The model", run.model), ("Training", run.train)):
        say(f"{title}: {model}, {task}, size {size}\n")
        hints = typing.get_type_hints(type(made), include_extras=True)
        for name, value in vars(made).items():
            field, text = typing.get_args(hints[name])
            say(f"{name} = {field_text(value)}  [{describe_kind(field)}; {source_of(name)}]")
            say(textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    "))
        say("")
    say("vocab_size and end_of_document come from the data where they are not set")


def info(
    model: Annotated[str, f"A model: {', '.join(PRESETS)}; a run, an exported folder or `small`; or prepared text.",
                     "MODEL|RUN|DATA", PRESETS],
    *,
    task: Task = "wiki40b",
    settings: Setting,
    verify: Annotated[bool, "Read all files of prepared data and compare their SHA-256."] = False,
) -> None:
    """Describe a model, a run or prepared text. Of a model: its specification, the parameters of
    each part, and the memory of its weights and decoding state."""
    is_folder = model not in PRESETS and (model in shipped_models() or is_address(model) or Path(model).is_dir())
    is_data = is_folder and exists(joined(model, "manifest.json"))
    require(is_data or not verify, "--verify takes a folder of prepared data", model, "see `lineartime prepare`")
    require(not is_data or not settings, "--set takes a model or a run", model, "leave out --set")
    require(task == "wiki40b" or not is_folder, "--task takes the name of a model", model, "leave out --task")
    if is_data:
        say_data(model, verify)
        return
    if is_folder:
        made, title = replace_fields(read_config(weights_folder(model))[0], settings), model
    else:
        require_name("model or folder", model, PRESETS)
        chosen = {"model": model, "task": task, **settings}
        made, title = model_config(**chosen), f"{chosen['model']} ({chosen['task']})"
    from lineartime.use.info import print_description

    print_description(made, title)


def say_data(folder: str, verify: bool) -> None:
    """Print what prepared data hold. verify: read all files and compare their SHA-256."""
    from lineartime.data.tokens import read_manifest, verify_data

    manifest = verify_data(folder) if verify else read_manifest(folder)
    say_counts(manifest)
    size = sum(file["bytes"] for file in manifest.files.values())
    say(f"tokenizer   {manifest.vocab_size:,} tokens, SHA-256 {manifest.tokenizer['sha256']}")
    say(f"manifest    SHA-256 {manifest.sha256}")
    say(f"files       {len(manifest.files):,}, {size:,} bytes, " + ("verified by SHA-256" if verify else "not read"))
