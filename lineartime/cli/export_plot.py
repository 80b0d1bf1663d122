"""`lineartime export` and `lineartime plot`: what becomes of a finished run."""

from pathlib import Path
from typing import Annotated

import typer

from lineartime.atomic_io import read_json
from lineartime.cli.arguments import Device, Strict, pick_device
from lineartime.cli.terminal import Terminal, results_are_files, say, summary
from lineartime.data.pretrained import named_folder
from lineartime.errors import UsageError


def export(
    run: Annotated[str, typer.Argument(
        help="A run of `lineartime train`, or a folder of `finetune --task classify` or `embed`.")],
    out: Annotated[Path, typer.Option(help="New folder for the model.")] = ...,  # type: ignore[assignment]
    data: Annotated[Path | None, typer.Option(
        help="Folder of the prepared text that the run was trained on; by default the run's.")] = None,
    about: Annotated[Path | None, typer.Option(help="Markdown file that the model card begins with.")] = None,
    prompt: Annotated[str, typer.Option(
        help="Prompt of the card's sample; by default it begins a document.")] = "",
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Export a run to a folder for sharing: weights in bfloat16, and a model card with held-out scores.
    A folder of `lineartime finetune --task classify` or `embed`: weights in float32, and its report as the card."""
    results_are_files()
    folder = named_folder(run)
    if is_of_documents(folder):
        if data is not None or about is not None or prompt:
            raise UsageError("options that do not go together", "export",
                             "its report is the card: leave out --data, --about and --prompt")
        from lineartime.release.export import export_documents

        n_bytes = export_documents(folder, out, strict=strict)
        say(f"weights  {out / 'model.safetensors'} ({n_bytes / 1e6:.1f} MB; open with lineartime.load_model, "
            "transformers or sentence-transformers)")
        return
    from lineartime.qa.questions import read_utf8
    from lineartime.release.export import export

    text = read_utf8(about) if about is not None else ""
    with Terminal() as terminal:
        made = export(folder, out, data=data, about=text, prompt=prompt, device=pick_device(device),
                      strict=strict, progress=terminal.count)
    for split, evaluation in made.scores.items():
        say(summary(split, evaluation.to_dict(), made.task))
    say(f"weights  {out / 'model.safetensors'} ({made.n_bytes / 1e6:.1f} MB; open with lineartime.load_model or "
        "transformers)")
    say(f"card     {out / 'README.md'}")


def is_of_documents(folder: Path) -> bool:
    """Whether a folder is one of `lineartime finetune` for documents, and whole."""
    from lineartime.data.run_settings import RESULT_FILE, RUN_FILE

    result = folder / RESULT_FILE
    return result.exists() and not (folder / RUN_FILE).exists() and "task" in read_json(result)


def plot(
    runs: Annotated[list[str], typer.Argument(
        help="A run, or several as LABEL=RUN, which are drawn side by side; or LABEL=FILE of `evaluate --contexts`.")],
    out: Annotated[Path | None, typer.Option(help="PNG to write; needed for several runs, and for files.")] = None,
) -> None:
    """Draw a run's curves, or the curves of several runs in one picture, or what models gain from context."""
    split = [text.partition("=") for text in runs]
    named = {label if equals else Path(label).name: Path(run or label) for label, equals, run in split}
    files = [path for path in named.values() if path.suffix == ".json"]
    if out is None and (len(runs) > 1 or files):
        raise UsageError("the picture needs a file", "plot", "give --out a .png")
    if files and len(files) < len(named):
        raise UsageError("runs and files of `evaluate --contexts` side by side", str(files[0]), "draw them apart")
    from lineartime.plot import plot_context_use, plot_run, plot_side_by_side

    if out is None:
        say(str(plot_run(Path(runs[0]))))
        return
    say(str((plot_context_use if files else plot_side_by_side)(named, out)))
