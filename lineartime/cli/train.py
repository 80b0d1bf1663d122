"""`lineartime train`: a model, from nothing or from weights."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lineartime.atomic_io import read_toml
from lineartime.cli.arguments import Device, RankTimeout, Setting, complete_from
from lineartime.cli.terminal import Terminal, interrupted_at_once, results_are_files, say, say_stopping, summary
from lineartime.cli.tracking import TRACKERS, require_tracker, tracked
from lineartime.cli.train_plan import Pace, say_plan, tokens_of
from lineartime.config import PRESETS, TASKS
from lineartime.distributed.ranks import TIMEOUT_S, launched
from lineartime.run_config import SIZES, parse_setting

if TYPE_CHECKING:
    from lineartime.training import TrainResult


def train(
    model: Annotated[str | None, typer.Argument(
        help=f"A model ({', '.join(PRESETS)}) or a TOML file of settings.",
        autocompletion=complete_from(PRESETS))] = None,
    data: Annotated[str | None, typer.Option(
        help="Folder made by `lineartime prepare`, or several with their shares: books:0.7,wiki:0.3.")] = None,
    weights: Annotated[str | None, typer.Option(
        "--from", metavar="RUN", help="Begin with the weights of a run, a checkpoint, an exported folder, or small.")
        ] = None,
    out: Annotated[str | None, typer.Option(help="Folder for the run; an unfinished run there is continued.")] = None,
    size: Annotated[str | None, typer.Option(
        autocompletion=complete_from(SIZES), help=f"{', '.join(SIZES)}; by default what fits the machine, but paper "
        "for a file that sets layers, width, batch and steps.")] = None,
    task: Annotated[str | None, typer.Option(
        autocompletion=complete_from(TASKS), help="Use the specification of c4, wiki40b or pg19.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="Tokens in a batch.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    log: Annotated[str | None, typer.Option(
        help=f"Write the metrics by a library too, in files: {', '.join(TRACKERS)}.")] = None,
    settings: Setting = None,
    device: Device = None,
    rank_timeout: RankTimeout = TIMEOUT_S,
) -> None:
    """Train a model, continue a run, or begin anew with its weights; then evaluate it, write a sample and a plot."""
    results_are_files()
    if log is not None:
        require_tracker(log)
    given: dict[str, Any] = {}
    if model and model.endswith(".toml"):
        given = read_toml(Path(model))
        whole = {"steps", "tokens_per_step"} | (set() if "from" in given else {"n_layers", "d_model"})
        if whole <= given.keys():  # and nothing is to be chosen: what it does not name is the paper's
            given.setdefault("size", "paper")
    elif model:
        given["model"] = model
    for name, value in (("from", weights), ("data", data), ("out", out), ("size", size), ("task", task),
                        ("context", context), ("tokens_per_step", tokens_per_step), ("steps", steps)):
        if value is not None:
            given[name] = value
    given.update(parse_setting(text) for text in settings or [])
    with interrupted_at_once():
        from lineartime.data.run_settings import sized_config

        config, size_words = sized_config(given, device)
        from lineartime.data.tokens import read_manifests
        from lineartime.training import StopSignal, train

    manifests = read_manifests(config.data)
    say_plan(config, manifests, size_words, device)
    tracker = tracked(log, config) if log is not None and launched().is_first else nullcontext()
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal, tracker as track:
        pace = Pace(config, manifests, terminal)

        def on_step(record: dict[str, Any]) -> None:
            terminal.step(record, pace.left(record["step"]))
            if track is not None:
                track(record)

        done = train(config, device=device, stop=stop, on_step=on_step, progress=terminal.count,
                     on_micro_batch=pace, rank_timeout=rank_timeout)
    if done.already:
        say(f"complete: {done.out} was trained to step {config.train.steps}; nothing to do.")
        say(f"another run: the same command with another --out, and --set seed={config.train.seed + 1} "
            "or any other setting.")
        return
    say_trained(done)


def say_trained(done: "TrainResult") -> None:
    """Print the scores, the sample and the files of a run."""
    from lineartime.data.mixture import read_mixture
    from lineartime.data.tokens import read_manifests

    config, out, scores = done.config, done.out, done.scores["held_out"]
    manifests = read_manifests(config.data)
    tasks = [manifest.settings.get("task") for manifest in manifests]
    say(summary("held-out", scores, tasks[0] if len(set(tasks)) == 1 else None))
    n_held_out = tokens_of(manifests, "validation")
    evaluate = f"lineartime evaluate {out} --data {read_mixture(config.data)[0].folder} --split validation"
    if n_held_out > config.train.last_eval_tokens:
        say(f"         a part of the {n_held_out:,} tokens, because the run was short; all of them: {evaluate}")
    for folder, each in done.scores.get("by_source", {}).items():
        say(f"         {folder}: {each['loss']:.3f} nats per {'masked ' * ('masked' in each)}token")
    if "xz_bits_per_byte" in done.scores:
        xz = done.scores["xz_bits_per_byte"]
        say(f"         xz -9e, which has seen the training text: {xz:.3f} bits per byte; the model is "
            f"{'better' if scores['bits_per_byte'] < xz else 'worse'}")
    if not done.sample:
        say("sample   none is written of a sharded model: see `lineartime generate`")
    elif not config.model.causal:
        say(f"sample   {out / 'sample.txt'}, with masks, with what the model puts there, and as it is:\n"
            + "".join(f"         {line[:200]}\n" for line in done.sample.splitlines()[:3]).rstrip())
    else:
        say(f"sample   {' '.join(done.sample.split())[:600]}")
    say(f"\nrun      {out}")
    say(f"weights  {out / 'latest'}  (open with lineartime.load_model or transformers)")
    say(f"plot     {out / 'loss.png'}")
    say(f"metrics  {out / 'metrics.jsonl'}, {out / 'result.json'}")
    generate = f"lineartime generate {out} \"Once more\" --temperature 0.8\n         " if config.model.causal else ""
    say(f"next     {generate}{evaluate}")
