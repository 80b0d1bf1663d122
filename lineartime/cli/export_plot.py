"""`lineartime export` and `lineartime plot`: what becomes of a finished run."""

from pathlib import Path
from typing import Annotated

from lineartime.base.settings import require
from lineartime.base.stores import joined
from lineartime.cli.options import Device
from lineartime.cli.terminal import Terminal, results_are_files, say, summary
from lineartime.folders import named_folder, require_run


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
