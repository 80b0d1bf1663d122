"""The verb that measures recall: `python -m benchmarks recall`."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lineartime.atomic_io import append_json_lines
from lineartime.cli.arguments import Setting, ShippedModel, numbers
from lineartime.cli.terminal import Terminal, note, results_are_files, say, say_stopping
from lineartime.config import MODEL_FIELDS, TRAIN_FIELDS
from lineartime.data.pretrained import model_folder, named_folder, shipped_models
from lineartime.errors import UsageError
from lineartime.run_config import parse_setting
from lineartime.settings import require


def recall(
    models: Annotated[list[str] | None, typer.Argument(
        help="Models of the study, by default the main ones; for --task text also trained ones: folders, or small.")
        ] = None,
    shipped: ShippedModel = None,
    task: Annotated[str, typer.Option(help="pairs, joint, needle, induction, copying, zoology or text.")] = "pairs",
    data: Annotated[Path | None, typer.Option(help="Prepared text, for --task text.")] = None,
    rates: Annotated[str | None, typer.Option("--learning-rates", help="Rates to try, with commas.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="The best rate is repeated up to so many seeds.")] = None,
    settings: Setting = None,
    rows: Annotated[Path, typer.Option(
        "--json", help="File of rows, looked at for what is there and added to.")] = Path("out/recall.jsonl"),
) -> None:
    """Train small models to find in a row what was written there before, and ask them, also in longer rows.
    The same command goes on where it stopped. Trained models are asked without more training."""
    given = dict(parse_setting(text) for text in settings or [])
    wrong = given.keys() - {*MODEL_FIELDS, *TRAIN_FIELDS}
    if wrong:
        raise UsageError("not a setting of recall", ", ".join(sorted(wrong)))
    from benchmarks.recall import report, study
    from benchmarks.recall.measure import n_asked
    from lineartime.release.provenance import provenance
    from lineartime.training import StopSignal

    content, about = study.read_study(), study.task_of(task, data)
    trained = [name for name in models or []
               if name not in content["models"] and (name in shipped_models() or Path(name).is_dir())]
    runs = [*map(named_folder, trained), *([model_folder(shipped)] if shipped else [])]
    names = [name for name in models or [] if name not in trained]
    if runs and data is None:
        raise UsageError("a trained model is asked in text alone", runs[0], "give --task text and --data")
    if not runs and not names:
        names = content["lists"]["few" if task == study.TEXT else "main"]
    train = study.training(task, about, given if names else {})
    fields = {name: value for name, value in given.items() if name in MODEL_FIELDS}
    for name in names:  # a wrong one is refused before the first is trained
        length = study.config_of(name, about, fields).context
        require(length >= about.least, "the row is too short for its facts", f"context = {length}",
                f"the task {task} takes {about.least} tokens or more")
    tried = numbers(rates) if rates else content["study"]["learning_rates"]
    n_seeds = seeds or content["study"]["seeds"]
    results_are_files()

    def made(name: str) -> dict[str, Any]:
        """Where a row comes from, without the folders of the machine."""
        words = ["python", "-m", "benchmarks", "recall", name, "--task", task]
        for text in settings or []:
            words += ["--set", text]
        return provenance() | {"command": shlex.join(words)}

    measured = []
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        for run in runs:
            assert data is not None
            length = fields.get("context", about.length)
            progress = stop.watch("nothing is written", terminal.count, "asking", n_asked(length, about.n_facts))
            row = study.ask_run(run, data, length, progress) | made(run.name)
            append_json_lines(rows, [row])
            say(report.line(row))

        def on_step(record: dict[str, Any]) -> None:
            stop.check("what is measured is in the rows; the same command goes on")
            terminal.step(record)

        for number, name in enumerate(names, 1):
            note(f"{name} ({number} of {len(names)}), {task}: {len(tried)} learning rates, {n_seeds} seeds")
            for row in study.measure_model(name, task, about, train, fields, tried, n_seeds, rows, partial(made, name),
                                           on_step=on_step):
                measured.append(row)
                say(report.line(row))
    if measured:
        print(f"\n{report.section(measured, task)}\n")
    say(f"rows     {rows}")
