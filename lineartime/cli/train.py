"""`lineartime train`, and `finetune`, which teaches a masked model to answer questions."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lineartime.base.files import read_toml
from lineartime.base.ranks import TIMEOUT_S, launched
from lineartime.base.settings import require
from lineartime.base.stores import require_there
from lineartime.cli.options import Device, RankTimeout, Setting
from lineartime.cli.terminal import Terminal, results_are_files, say, say_stopping, summary
from lineartime.config import PRESETS, TASKS
from lineartime.folders import RESULT_FILE, WEIGHTS_FILE, named_folder, saved_run
from lineartime.tasks.qa.finetune_config import FineTuning
from lineartime.training.run_config import DEFAULT_SIZE, SIZES, RunConfig, config_for_data

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest
    from lineartime.training.language import TrainResult


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

    def settings(self) -> dict[str, Any]:
        """The settings of the file, which the command line's replace."""
        given = {{"weights": "from"}.get(name, name): value for name, value in vars(self).items() if value is not None}
        if not (self.model or "-").endswith(".toml"):
            return given
        file = read_toml(Path(given.pop("model")))
        whole = {"steps", "tokens_per_step"} | (set() if "from" in file | given else {"n_layers", "d_model"})
        if whole <= file.keys():  # nothing is to be chosen: what the file does not name is the paper's
            file.setdefault("size", "paper")
        return file | given


def train(
    options: RunOptions,
    *,
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
    given = options.settings() | settings
    config = config_for_data(given)
    from lineartime.data.tokens import read_manifests
    from lineartime.training.language import train
    from lineartime.training.runtime import StopSignal

    manifests = read_manifests(config.data)
    say_plan(config, manifests, given.get("size"))
    n_micro_batches = config.rows_per_step // config.micro_batch_rows * config.train.context_parallel
    of_this_rank = max(n_micro_batches // launched().size, 1)
    is_logged = log is not None and launched().is_first
    tracker = tensorboard(f"{config.out}/tensorboard") if is_logged else nullcontext(lambda record: None)
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal, tracker as track:
        def on_step(record: dict[str, Any]) -> None:
            terminal.step(record)
            track(record)

        def on_micro_batch(step: int, number: int) -> None:
            terminal.count("step", step + number / of_this_rank, config.train.steps, terminal.words)

        done = train(config, device=device, stop=stop, on_step=on_step, progress=terminal.count,
                     on_micro_batch=on_micro_batch, rank_timeout=rank_timeout)
    if done.already:
        say(f"complete: {done.out} was trained to step {config.train.steps}; nothing to do.")
        say(f"another run: the same command with another --out and --set seed={config.train.seed + 1}")
        return
    say_trained(done, tokens_of(manifests, "validation"))


def say_plan(config: RunConfig, manifests: "list[Manifest]", size: str | None) -> None:
    """Print what a run will read and make, unless it is complete."""
    from lineartime.data.mixture import read_mixture
    from lineartime.model.language_model import number_of_parameters

    there = saved_run(Path(config.out)).get("train", {"steps": config.train.steps})
    if (Path(config.out) / RESULT_FILE).exists() and there["steps"] >= config.train.steps:
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
    """The tokens of a split of all texts."""
    return sum(manifest.splits[split].tokens for manifest in manifests if split in manifest.splits)


def say_trained(done: "TrainResult", n_held_out: int) -> None:
    """Print the scores, the sample and the files of a run."""
    from lineartime.data.mixture import read_mixture

    config, out, scores = done.config, done.out, done.scores["held_out"]
    say(summary("held-out", scores))
    texts = [*read_mixture(config.data)]
    evaluate = f"lineartime evaluate {quote(str(out))} --data {quote(texts[0])} --split validation"
    if n_held_out > config.train.last_eval_tokens:
        say(f"         a part of the {n_held_out:,} tokens, because the run was short; all of "
            f"{'them' if len(texts) == 1 else texts[0]}: {evaluate}")
    if done.sample:
        say(f"sample   {' '.join(done.sample.split())[:600]}")
    say(f"\nrun      {out}")
    in_parts = not (out / "latest" / WEIGHTS_FILE).exists()  # of a sharded model
    others = "; `lineartime export` writes them for transformers" if in_parts else " or transformers"
    say(f"weights  {out / 'latest'}  (open with lineartime.load_model{others})")
    say(f"files    {out / 'loss.png'}, {out / 'metrics.jsonl'}, {out / 'result.json'}")
    generate = f"lineartime generate {quote(str(out))} \"Once more\" --temperature 0.8\n         "
    say(f"next     {generate * config.model.causal}{evaluate}")


def finetune(plan: FineTuning, *, device: Device = None, rank_timeout: RankTimeout = TIMEOUT_S) -> None:
    """Teach a masked model to find answers in documents. It is trained once for each learning rate,
    and the best is kept. To teach a causal model more text, use `lineartime train --from RUN`."""
    results_are_files()
    named_folder(plan.run)
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
        elif name not in ("step", "steps", "time"):
            yield prefix + name, value
