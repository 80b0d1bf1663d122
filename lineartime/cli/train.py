"""From text to a run: `lineartime prepare`, `train` and `finetune`; and `config` and `info`."""

import importlib.util
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from lineartime import folders
from lineartime.base.errors import LineartimeError, UsageError
from lineartime.base.files import read_toml
from lineartime.base.ranks import TIMEOUT_S, launched
from lineartime.base.settings import describe_kind, field_text, replace_fields, require, require_name
from lineartime.base.stores import exists, is_address, require_there
from lineartime.cli.options import Device, Model, RankTimeout, Setting, Size, Task, import_own, own_modules
from lineartime.cli.terminal import Terminal, results_are_files, say, say_stopping, summary
from lineartime.config import MODEL_FIELDS, PRESETS, SOURCES, TASKS, TRAIN_FIELDS, model_config, to_dict
from lineartime.data.prepare_config import PrepareSettings
from lineartime.tasks.qa.finetune_config import FineTuning
from lineartime.training import run_config
from lineartime.training.run_config import DEFAULT_SIZE, SIZES, RunConfig, config_for_data, parse_setting

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest
    from lineartime.training.language import TrainResult


def prepare(settings: PrepareSettings) -> None:
    """Turn text into tokens once, for training to read. If it was cut off, it begins again."""
    results_are_files()
    from lineartime.data.prepare import prepare_text

    with Terminal() as terminal:
        manifest = prepare_text(settings, progress=terminal.count)
    out, begun = settings.out, "flash "
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
    with suppress(LineartimeError):  # a tokenizer that is not a model's
        if settings.tokenizer not in ("train", "bytes") and run_config.read_source(settings.tokenizer):
            begun, how = f"--from {quote(settings.tokenizer)} ", ""
    say(f"next        lineartime train {begun}{how}--data {quote(out)} --out RUN")


def say_counts(manifest: "Manifest") -> None:
    """Print a line of counts for each split of prepared text."""
    for name, split in manifest.splits.items():
        say(f"{name:<11} {split.documents:>7,} documents  {split.tokens:>12,} tokens  "
            f"{split.words:>12,} words  {split.bytes:>13,} bytes")


@dataclass(frozen=True)
class RunOptions:
    """The settings of a run that have an option of their own; `weights` is "from" in a file."""

    model: Annotated[str | None, f"A model ({', '.join(PRESETS)}), or a TOML file.", "MODEL|FILE", PRESETS] = None
    data: Annotated[str | None, "Prepared text, or several with their shares: books:0.7,wiki:0.3."] = None
    weights: Annotated[str | None, "Begin with the weights of a run or an exported folder.", "--from RUN"] = None
    out: Annotated[str | None, "Folder for the run; an unfinished run there is continued."] = None
    size: Annotated[str | None, f"How large the model and its training are: {', '.join(SIZES)}. By default "
                    f"{DEFAULT_SIZE}; paper for a file that sets layers, width, batch and steps.", SIZES] = None
    task: Annotated[str | None, "Take the model as the paper has it for c4, wiki40b or pg19.", TASKS] = None
    context: Annotated[int | None, "Tokens in a row."] = None
    tokens_per_step: Annotated[int | None, "Tokens in a batch."] = None
    steps: Annotated[int | None, "Number of steps."] = None
    minutes: Annotated[float | None, "Time for the run, in place of steps: their speed tells how many."] = None

    def settings(self, more: dict[str, Any]) -> dict[str, Any]:
        """The settings of the file, which the command line's options and `more` replace. Raises
        UsageError for an option that is among `more` too."""
        given = {{"weights": "from"}.get(name, name): value for name, value in vars(self).items() if value is not None}
        is_file = (self.model or "-").endswith(".toml")
        file = read_toml(Path(given.pop("model"))) if is_file else {}
        file |= dict(parse_setting(f"{name}={field_text(value)}") for name, value in file.items()
                     if name in MODEL_FIELDS + TRAIN_FIELDS)
        import_own(*own_modules(file.get("layers", ())))
        for name in sorted(given.keys() & more.keys()):
            raise UsageError("a setting is given twice", f"{name} and --set {name}", "give it once")
        whole = {"steps", "tokens_per_step"} | (set() if "from" in file | given else {"n_layers", "d_model"})
        if is_file and whole <= file.keys():  # nothing is to be chosen: what the file does not name is the paper's
            file.setdefault("size", "paper")
        return file | given | more


def train(
    options: RunOptions, *,
    log: Annotated[Literal["tensorboard"] | None, "Also write the metrics for TensorBoard."] = None,
    settings: Setting,
    device: Device = None,
    rank_timeout: RankTimeout = TIMEOUT_S,
) -> None:
    """Train a model, or go on with a run that was cut off.
    At the end the model is scored on held-out text, and a sample and a plot are written."""
    results_are_files()
    require(log is None or importlib.util.find_spec("tensorboard") is not None, "the library is not installed",
            "tensorboard", "pip install tensorboard, or leave out --log: metrics.jsonl has all of it")
    given = options.settings(settings)
    config = config_for_data(given)
    from lineartime.data.tokens import read_manifests
    from lineartime.training.language import train
    from lineartime.training.runtime import StopSignal

    manifests = read_manifests(config.data)
    n_micro_batches = config.rows_per_step // config.micro_batch_rows * config.train.context_parallel
    of_this_rank = max(n_micro_batches // launched().size, 1)
    is_logged = log is not None and launched().is_first
    tracker = tensorboard(f"{config.out}/tensorboard") if is_logged else nullcontext(lambda record: None)
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal, tracker as track:
        def on_plan(run: RunConfig) -> None:
            nonlocal config
            config = run
            say_plan(run, manifests, given.get("size"))

        def on_step(record: dict[str, Any]) -> None:
            terminal.step(record)
            track(record)

        def on_micro_batch(step: int, number: int) -> None:
            terminal.count("step", step + number / of_this_rank, config.train.steps, terminal.words)

        done = train(given if "minutes" in given else config, device=device, stop=stop, on_step=on_step,
                     on_micro_batch=on_micro_batch, progress=terminal.count, on_plan=on_plan, rank_timeout=rank_timeout)
    if done.already:
        say(f"complete: {done.out} was trained to step {config.train.steps}; nothing to do.")
        say(f"another run: the same command with another --out and --set seed={config.train.seed + 1}")
        return
    say_trained(done, tokens_of(manifests, "validation"))


def say_plan(config: RunConfig, manifests: "list[Manifest]", size: str | None) -> None:
    """Print what a run will read and make, unless it is complete."""
    from lineartime.data.mixture import read_mixture
    from lineartime.model.language_model import number_of_parameters

    there = folders.saved_run(Path(config.out)).get("train", {"steps": config.train.steps})
    if (Path(config.out) / folders.RESULT_FILE).exists() and there["steps"] >= config.train.steps:
        return
    model, train = config.model, config.train
    n_tokens, n_train = train.steps * train.tokens_per_step, tokens_of(manifests, "train")
    held_out, shares = tokens_of(manifests, "validation"), read_mixture(config.data)
    # Of several texts each has epochs of its own. This is the text that is read most often.
    most, folder = max((n_tokens * share / sum(shares.values()) / max(tokens_of([manifest], "train"), 1), folder)
                       for manifest, (folder, share) in zip(manifests, shares.items(), strict=True))
    say(f"size     {size or f'{DEFAULT_SIZE}; to choose another, name a size: ' + ', '.join(SIZES)}")
    say(f"model    {config.preset}, {number_of_parameters(model) / 1e6:,.1f} M parameters: {model.n_layers} layers of "
        f"width {model.d_model}")
    say(f"data     {n_train:,} tokens to train on, {held_out:,} held out")
    say(f"run      {train.steps:,} steps of {train.tokens_per_step:,} tokens in rows of {model.context:,}: "
        f"{n_tokens:,} tokens, {n_tokens / n_train:,.2f} epochs"
        + (f", of {folder} {most:,.2f}" if len(manifests) > 1 else "")
        + (": above ten, the model learns the text by heart; lower --steps" if most > 10 else ""))


def tokens_of(manifests: "list[Manifest]", split: str) -> int:
    return sum(manifest.splits[split].tokens for manifest in manifests if split in manifest.splits)


def say_trained(done: "TrainResult", n_held_out: int) -> None:
    """Print the scores, the sample and the files of a run."""
    from lineartime.data.mixture import read_mixture

    config, out, scores = done.config, done.out, done.scores["held_out"]
    say(summary("held-out", scores))
    texts = [*read_mixture(config.data)]
    imports = "".join(f" --import {module}" for module in own_modules(config.model.layers))
    evaluate = f"lineartime evaluate {quote(str(out))} --data {quote(texts[0])} --split validation{imports}"
    if n_held_out > config.train.last_eval_tokens:
        say(f"         a part of the {n_held_out:,} tokens, because the run was short; all of "
            f"{'them' if len(texts) == 1 else texts[0]}: {evaluate}")
    if done.sample:
        say(f"sample   {' '.join(done.sample.split())[:600]}")
    say(f"\nrun      {out}")
    in_parts = not (out / "latest" / folders.WEIGHTS_FILE).exists()  # of a sharded model
    others = "; `lineartime export` writes them for transformers" if in_parts else " or transformers"
    say(f"weights  {out / 'latest'}  (open with lineartime.load_model{others})")
    say(f"files    {out / 'loss.png'}, {out / 'metrics.jsonl'}, {out / 'result.json'}")
    generate = f"lineartime generate {quote(str(out))} \"Once more\" --temperature 0.8{imports}\n         "
    say(f"next     {generate * config.model.causal}{evaluate}")


def finetune(plan: FineTuning, *, device: Device = None, rank_timeout: RankTimeout = TIMEOUT_S) -> None:
    """Teach a masked model to find answers in documents. It is trained once for each learning rate,
    and the best is kept. To teach a causal model more text, use `lineartime train --from RUN`."""
    results_are_files()
    folders.named_folder(plan.run)
    require_there([*plan.data, *plan.validation])
    from lineartime.tasks.qa.finetune import finetune
    from lineartime.training.runtime import StopSignal

    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        result = finetune(plan, device=device, stop=stop, on_step=terminal.step, progress=terminal.count,
                          rank_timeout=rank_timeout)
    out = plan.out
    if "already" in result:
        say(f"complete: {out} was fine-tuned with these settings; nothing to do.")
    say("")
    for name, scores in result["learning_rates"].items():
        say(f"lr {name:<9} EM {scores['exact_match']:6.2f}  F1 {scores['f1']:6.2f}"
            + "  <- best" * (result["best"] == f"lr-{name}"))
    say(f"\nweights  {out / 'best'}  (open with lineartime.load_model or transformers)")
    say(f"report   {out / 'predictions.json'}")


@contextmanager
def tensorboard(folder: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields an `on_step` that writes each line for TensorBoard. The files are opened at the first
    line, so that a run that is complete leaves no trace."""
    with ExitStack() as at_end:
        writers: list[Any] = []

        def track(record: dict[str, Any]) -> None:
            from torch.utils.tensorboard import SummaryWriter

            step = record["step"]
            if not writers:
                # A resume writes lines again, at first a score. purge_step hides the older ones.
                made = SummaryWriter(folder, purge_step=step + ("held_out" in record))
                writers.append(at_end.enter_context(made))
            for name, value in numbers_of(record):
                writers[0].add_scalar(name, value, step, walltime=record["clock"]["time"])

        yield track


def numbers_of(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by their names, inside a table by a path such as "held_out/loss"."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from numbers_of(value, f"{prefix}{name}/")
        elif name not in ("step", "steps", "time") and not name.startswith(("n_", "of_")):
            yield prefix + name, value


def config(model: Model = "flash", size: Size = "paper", task: Task = "wiki40b") -> None:
    """List every field that --set takes. Of each: its value for a model, what values it takes, what
    it is, and the paper's table that has it."""
    run = run_config.run_config({"model": model, "size": size, "task": task, "data": "-", "out": "-"})
    for title, made in (("The model", run.model), ("Training", run.train)):
        say(f"{title}: {model}, {task}, size {size}\n")
        hints = get_type_hints(type(made), include_extras=True)
        for name, value in to_dict(made).items():
            field, text = get_args(hints[name])
            source = next((source for source, names in SOURCES.items() if name in names), "beyond the paper")
            say(f"{name} = {field_text(value)}  [{describe_kind(field)}; {source}]")
            say(textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    "))
        say("")
    say("vocab_size and end_of_document come from the data where they are not set")


def info(
    model: Annotated[str, f"A model: {', '.join(PRESETS)}; a run, an exported folder or `small`; or prepared text.",
                     "MODEL|RUN|DATA", PRESETS], *,
    task: Task = "wiki40b",
    settings: Setting,
    verify: Annotated[bool, "Read all files of prepared data and compare their SHA-256."] = False,
) -> None:
    """Describe a model, a run or prepared text. A model has a specification, parameters by part,
    and the memory of its weights and of its decoding state."""
    is_folder = model not in PRESETS and (
        model in folders.shipped_models() or is_address(model) or Path(model).is_dir())
    is_data = is_folder and exists(os.path.join(model, "manifest.json"))
    require(is_data or not verify, "--verify takes a folder of prepared data", model, "see `lineartime prepare`")
    require(not is_data or not settings, "--set takes a model or a run", model, "leave out --set")
    for name in [name for name in ("model", "task") if name in settings and (name, task) != ("task", "wiki40b")]:
        raise UsageError("a setting is given twice", f"{name} and --set {name}", "give it once")
    require(task == "wiki40b" or not is_folder, "--task takes the name of a model", model, "leave out --task")
    if is_data:
        from lineartime.data.tokens import read_manifest, verify_data

        manifest = verify_data(model) if verify else read_manifest(model)
        say_counts(manifest)
        size = sum(file["bytes"] for file in manifest.files.values())
        say(f"tokenizer   {manifest.vocab_size:,} tokens, SHA-256 {manifest.tokenizer['sha256']}")
        say(f"manifest    SHA-256 {manifest.sha256}")
        say(f"files       {len(manifest.files):,}, {size:,} bytes, {'verified by SHA-256' if verify else 'not read'}")
        return
    if is_folder:
        made, title = replace_fields(folders.read_config(folders.weights_folder(model))[0], settings), model
    else:
        require_name("model or folder", model, PRESETS)
        chosen = {"model": model, "task": task, **settings}
        made, title = model_config(**chosen), f"{chosen['model']} ({chosen['task']})"
    from lineartime.use.info import print_description

    print_description(made, title)
