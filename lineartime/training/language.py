"""A run of language modelling, from its settings to its scores, its sample and its plot."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lineartime.base.errors import ResourceError
from lineartime.base.files import read_bytes, write_atomically
from lineartime.base.ranks import TIMEOUT_S, Ranks, gather, gather_json, launched
from lineartime.base.settings import require
from lineartime.base.words import Progress
from lineartime.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from lineartime.data.tokens import Mixture, open_data, read_manifests, sha256_of, tokenizer_of
from lineartime.folders import RESULT_FILE, WEIGHTS, saved_run
from lineartime.model.language_model import LanguageModel, number_of_parameters
from lineartime.training.evaluation import evaluate_data
from lineartime.training.loop import SAVED, Callbacks, First, Loop, Setup, fit_once
from lineartime.training.objectives import MaskedTokens, NextToken
from lineartime.training.plot import PLOT_FILE, plot_run
from lineartime.training.run import SAMPLE_FILE, Run
from lineartime.training.run_config import RunConfig, config_for_data
from lineartime.training.runtime import StopSignal, available_bytes, peak_bytes
from lineartime.weights.checkpoint import read_parts
from lineartime.weights.generation.generate import generate
from lineartime.weights.load import find_weights
from lineartime.weights.transfer import check_shapes
from lineartime.weights.transformers_files import tokenizer_files

PLANNED = ("steps", "warmup_steps", "eval_every", "save_every")
MOST_LOOKS, MEASURED, LOOKED, LAST_S = 10, 0.05, 0.1, 5.0
"""Of a run of so many minutes: most held-out scores, and checkpoints; the shares of its time in
which its speed is measured and it is scored; and seconds for the sample and the picture."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """A completed run."""

    out: Path
    """The run's folder, which `load_model` opens."""
    config: RunConfig
    scores: dict[str, Any]
    """The content of `result.json` but its hash: "run" (its id), "steps", "held_out"
    (`Evaluation.to_dict` of the held-out split, or of `TrainConfig.last_eval_tokens` of it), for
    several texts "by_source" (the same of each), and "peak_mib"."""
    sample: str
    """Generated text; empty if the model is sharded or does not decode."""
    already: bool
    """Whether the run was complete before."""


def train(config: RunConfig | Mapping[str, Any], *, device: torch.device | str | None = None,
          stop: StopSignal | None = None, on_step: Callable[[dict[str, Any]], None] | None = None,
          on_micro_batch: Callable[[int, int], None] | None = None, progress: Progress | None = None,
          on_plan: Callable[[RunConfig], None] = lambda run: None, rank_timeout: float = TIMEOUT_S) -> TrainResult:
    """Train a model on prepared text, or continue an unfinished run; then score the held-out split,
    and write a sample, the result file and a plot into the run's folder `config.out`.

    config: a run, or a flat table of settings, see `config_for_data`; with "minutes" in place of
    "steps" it makes as many steps as that time has room for. on_plan gets the run, with its steps,
    before the first of them. device: by default cuda if available. stop: requests a save and an
    end, see `StopSignal.listening`. on_step and on_micro_batch: see `Callbacks`. progress counts
    the tokens of the final evaluation. Under `torchrun` every rank calls `train` with the same
    arguments; one that is silent for `rank_timeout` seconds is lost.

    Raises UsageError for wrong settings or another run in the folder, DataError for the data,
    CheckpointError for damage, NumericsError for a loss or gradient that is not finite,
    ResourceError for memory, disk and a run in use, RankError for a lost rank, Stopped if asked."""
    settings, stop = config if isinstance(config, RunConfig) else config_for_data(config), stop or StopSignal()
    # What decides the numbers is stored with the run: hashes of the text, tokenizer and weights.
    data, out = settings.data, Path(settings.out)
    tokenizer, manifests = tokenizer_of(data), read_manifests(data)
    of_weights, first = weights_to_begin(settings)
    timed = None if isinstance(config, RunConfig) or "minutes" not in config else config
    facts = {"data_sha256": sha256_of(data, manifests), "tokenizer_sha256": manifests[0].tokenizer["sha256"],
             **of_weights, **({} if timed is None else {"minutes": timed["minutes"]})}

    def begin(ranks: Ranks) -> Setup:
        kind = NextToken if settings.model.causal else MaskedTokens
        objective = kind(settings, open_data(data, "train"), open_data(data, "validation"), ranks)
        return Setup(new_model(settings), objective, tokenizer_files(tokenizer), first)

    def plan(device: torch.device, ranks: Ranks) -> RunConfig:
        nonlocal settings
        if timed is not None:
            settings = planned(timed, settings, begin, device, stop, ranks)
        on_plan(settings)
        return settings

    # The run itself. If it was complete before, nothing is trained or scored.
    score = partial(score_and_sample, stop=stop, progress=progress)
    callbacks = Callbacks(stop, on_step, on_micro_batch)
    result, already = fit_once(settings, facts, device, begin, score, callbacks, rank_timeout, plan)
    if launched().is_first:  # a kill may have come before the picture; other ranks may not see the files
        plot, of_result = out / PLOT_FILE, (out / RESULT_FILE).stat()
        if not (already and plot.exists() and plot.stat().st_mtime_ns >= of_result.st_mtime_ns):
            plot_run(out)
    path = out / SAMPLE_FILE
    sample = read_bytes(path).decode(errors="replace") if path.exists() else ""
    return TrainResult(out, settings, result, sample, already)


def planned(settings: Mapping[str, Any], run: RunConfig, begin: Callable[[Ranks], Setup], device: torch.device,
            stop: StopSignal, ranks: Ranks) -> RunConfig:
    """The run of `settings`, which has "minutes", with its steps: those of the run that is saved in
    its folder, or as many as there is time for by the speed of the first steps, of which rank 0
    decides. Raises UsageError if the folder has another run, and as `fit` does."""
    last, minutes, tokens = time.monotonic(), settings["minutes"], run.train.tokens_per_step
    end, given = last + 60 * minutes, {name: value for name, value in settings.items() if name != "minutes"}
    if there := saved_run(Path(run.out)):
        require(there.get("minutes") == minutes, "another run is here", run.out,
                f"minutes: {there.get('minutes')} -> {minutes}. Give another --out, or the same settings")
        return config_for_data({name: there["train"][name] for name in PLANNED} | given)
    logger.info(f"{minutes:g} minutes: the speed of the first steps is measured")
    watch = stop.watch("before step 1", None, "", None, ranks)
    no_trace: Any = SimpleNamespace(config=run, ranks=ranks, resume=lambda *_: 0, log=lambda record: None)
    loop = Loop(no_trace, begin(ranks), device, Callbacks(on_micro_batch=lambda step, number: watch(step)))
    seconds, last = list[float](), time.monotonic()
    enough = last + MEASURED * (end - last)
    while len(seconds) < 3 or (len(seconds) < 20 and gather_json(last < enough, ranks)[0]):
        loop.step(len(seconds))
        seconds.append(time.monotonic() - last)
        last = time.monotonic()
    scores = loop.setup.objective.evaluate(loop.model, watch)
    look, step = time.monotonic() - last, statistics.median(seconds[1:])
    looks = min(max(int(LOOKED * (end - last) / look), 1), MOST_LOOKS)
    # The last score has all held-out tokens, or three times those of training: what is less.
    left, per_token = end - time.monotonic() - looks * look - LAST_S, look / scores["n_tokens"]
    n = max((left - scores["of_tokens"] * per_token) / step, left / (step + 3 * tokens * per_token), 1)
    n, looks, step = gather_json([int(n), looks, step], ranks)[0]
    logger.info(f"{minutes:g} minutes: {n:,} steps of {tokens:,} tokens at {1 / step:.3g} steps/s")
    every = {"eval_every": max(n // looks, 1), "save_every": max(n // MOST_LOOKS, 1)}
    return config_for_data({**every, **given, "steps": n})


def weights_to_begin(config: RunConfig) -> tuple[dict[str, Any], First | None]:
    """What a run stores of its first weights, and what reads them; a continued run needs none."""
    source, there = config.source, saved_run(Path(config.out))
    if source is None:
        return {}, None
    check_shapes(source.model, config.model)
    if there.get("from") == source.name:
        return {name: there[name] for name in there if name.startswith("from")}, None
    folder, facts = find_weights(source)
    return facts, partial(read_parts, folder, WEIGHTS)


def new_model(config: RunConfig) -> LanguageModel:
    """The run's model, initialised from its seed, or on the meta device if it is to be sharded.
    Raises ResourceError if its training cannot fit into memory."""
    # Refused before memory is asked for: some systems kill a process without a word.
    on_cpu = 12 if config.train.optimizer == "muon" else 16  # the weight, its gradient, and one moment or two
    needed = number_of_parameters(config.model) * (4 if torch.cuda.is_available() else on_cpu)
    available = available_bytes()
    if config.train.shard:
        needed //= launched().size  # one rank's part: this machine needs at least that
    if available is not None and needed > available:
        raise ResourceError("the model does not fit into memory", f"{needed / 2**30:,.1f} GiB needed, "
                            f"{available / 2**30:,.1f} GiB available", "lower n_layers, d_model or vocab_size")
    torch.manual_seed(config.train.seed)
    with torch.device("meta") if config.train.shard else nullcontext():
        return LanguageModel(config.model)


def score_and_sample(run: Run, model: LanguageModel, ranks: Ranks, *, stop: StopSignal,
                     progress: Progress | None) -> dict[str, Any]:
    """Score the held-out split, and write a sample; returns the result file's content."""
    # The peak of this process since it began, before the scores, which need other memory.
    config, peak_mib = run.config, peak_bytes(model.embed.weight.device) / 2**20
    held_out = open_data(config.data, "validation")
    n_scored = min(held_out.n_tokens, config.train.last_eval_tokens)
    evaluation, by_source = evaluate_data(
        model, held_out, context=config.model.context, precision=config.train.precision, spread=True, ranks=ranks,
        batch_rows=config.micro_batch_rows, max_tokens=None if n_scored == held_out.n_tokens else n_scored,
        progress=stop.watch(SAVED, progress, "evaluating", n_scored, ranks))
    result: dict[str, Any] = {"steps": config.train.steps, "held_out": evaluation.to_dict()}
    if by_source:
        result["by_source"] = {name: each.to_dict() for name, each in by_source.items()}
    result["peak_mib"] = float(gather(torch.tensor(peak_mib), ranks).max())
    # All weights of a sharded model would be gathered for every token.
    if ranks.is_first and not run.is_sharded and model.decodes:
        stream = held_out.streams[0] if isinstance(held_out, Mixture) else held_out
        tokenizer = load_tokenizer(stream.folder / TOKENIZER_FILE)
        length = min(200, (config.model.max_len or 201) - 1)
        ids = generate(model, [[stream.end_of_document]], max_new_tokens=length, temperature=0.8, top_p=0.95,
                       seed=config.train.seed, stop=lambda row, new: stop.number is not None)[0]
        stop.check(SAVED)
        write_atomically(run.out / SAMPLE_FILE, tokenizer.decode(ids) + "\n")
    return result
