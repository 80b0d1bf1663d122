"""What there is, `lineartime config` and `info`, and what becomes of a run, `plot` and `export`."""

import textwrap
import typing
from pathlib import Path
from typing import Annotated

from lineartime.base.settings import describe_kind, field_text, replace_fields, require, require_name
from lineartime.base.stores import exists, is_address, joined
from lineartime.cli.options import Device, Model, Setting, Size, Task
from lineartime.cli.prepare import say_counts
from lineartime.cli.terminal import Terminal, results_are_files, say, summary
from lineartime.config import PRESETS, model_config, source_of
from lineartime.folders import named_folder, require_run, shipped_models, weights_folder
from lineartime.training.run_config import read_config, run_config


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
    say("vocab_size and end_of_document are those of the data where they are not set")


def info(
    model: Annotated[str, f"A model: {', '.join(PRESETS)}; a run, one of its checkpoints, an exported folder, or the "
                     "shipped model `small`; or a folder made by `lineartime prepare`. Exports and prepared text may "
                     "be in a store.", "MODEL|RUN|DATA", PRESETS],
    *,
    task: Task = "wiki40b",
    settings: Setting,
    verify: Annotated[bool, "Read all files of prepared data and compare their SHA-256."] = False,
) -> None:
    """Describe a model, a run or prepared text. Of a model: its specification, the parameters of
    each part, training FLOPs per token and the size of its decoding state."""
    is_folder = model not in PRESETS and (model in shipped_models() or is_address(model) or Path(model).is_dir())
    if not is_folder:
        require_name("model or folder", model, PRESETS)
    is_data = is_folder and exists(joined(model, "manifest.json"))
    require(is_data or not verify, "--verify takes a folder of prepared data", model, "see `lineartime prepare`")
    require(not is_data or not settings, "--set takes a model or a run", model, "leave out --set")
    require(task == "wiki40b" or not is_folder, "--task takes the name of a model", model, "leave out --task")
    if is_data:
        say_data(model, verify)
        return
    chosen = {"model": model, "task": task, **settings}
    made, title = ((replace_fields(read_config(weights_folder(model))[0], settings), model) if is_folder else
                   (model_config(**chosen), f"{chosen['model']} ({chosen['task']})"))
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


def export(
    run: Annotated[str, "A run of `lineartime train`.", "RUN"],
    out: Annotated[str, "New folder for the model, or its address in a store."],
    data: Annotated[str | None, "Prepared text that the card's scores are from; by default what the run was trained "
                    "on."] = None,
    about: Annotated[str | None, "Markdown file with which the model card begins, or its address."] = None,
    device: Device = None,
) -> None:
    """Export a run to a folder for sharing.
    It holds weights in bfloat16 and a model card with held-out scores."""
    results_are_files()
    folder = named_folder(run)
    from lineartime.data.read_text import read_small
    from lineartime.training.runtime import pick_device
    from lineartime.use.export import export

    text = read_small(about) if about is not None else ""
    with Terminal() as terminal:
        scores, n_bytes = export(folder, out, data=data, about=text, device=pick_device(device),
                                 progress=terminal.count)
    for split, evaluation in scores.items():
        say(summary(split, evaluation.to_dict()))
    say(f"weights  {joined(out, 'model.safetensors')} ({n_bytes / 1e6:.1f} MB; open with lineartime.load_model or "
        "transformers)")
    say(f"card     {joined(out, 'README.md')}")


def plot(
    runs: Annotated[tuple[str, ...], "A run; or LABEL=RUN several times, to draw runs side by side.", "RUNS"],
    out: Annotated[Path | None, "PNG file to write; needed for several runs."] = None,
) -> None:
    """Draw the curves of runs."""
    split = [(text, "", text) if Path(text).is_dir() else text.partition("=") for text in runs]
    named = {label: Path(path or label) for label, _, path in split}  # the label of a run without one is its path
    require(out is not None or len(runs) < 2, "the picture needs a file", "plot", "give --out a .png")
    require(len(named) == len(runs), "two runs have the same label", ", ".join(runs), "name each as LABEL=RUN")
    for run in named.values():
        require_run(run)
    from lineartime.training.plot import plot_run, plot_side_by_side

    say(str(plot_run(*named.values()) if out is None else plot_side_by_side(named, out)))
