"""The training loop. A batch is a function of (seed, step), so a run's state is weights, optimizer state and a step."""

import itertools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lineartime import checkpoint
from lineartime.atomic_io import read_bytes, write_atomically, write_json
from lineartime.config import TrainConfig, to_dict
from lineartime.data.mixture import read_mixture
from lineartime.data.run_settings import RESULT_FILE, saved_run, sized_config
from lineartime.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from lineartime.data.tokens import Mixture, open_data, open_split, read_manifests, sha256_of
from lineartime.distributed.ordered import (
    Part,
    exchange,
    gather_parts,
    norm_of,
    parts_of,
    require_fitting,
    sum_over_row,
    tree_sum,
)
from lineartime.distributed.ranks import (
    ALONE,
    TIMEOUT_S,
    Ranks,
    connected,
    gather,
    gather_json,
    in_rows,
    launched,
    require_same,
    wait_for_all,
)
from lineartime.distributed.shard import OrderedReduceScatter, local, padded, shard_model, sharded_parts, write_back
from lineartime.distributed.windows import differentiate_windows
from lineartime.errors import DataError, NumericsError, ResourceError, Stopped
from lineartime.evaluation import XZ_LIMIT_BYTES, evaluate_data, xz_bits_per_byte
from lineartime.generation.generate import generate
from lineartime.masking import masked_sample
from lineartime.model import LanguageModel, read_rows
from lineartime.objectives import MaskedTokens, NextToken, Objective
from lineartime.plot import PLOT_FILE, plot_run
from lineartime.run import METRICS_FILE, Run, Wanted, read_metrics, read_result, result_or_none
from lineartime.run_config import RunConfig
from lineartime.runtime import available_bytes, is_picked, peak_bytes, pick_device
from lineartime.weights.folder import tokenizer_files
from lineartime.weights.start import check_shapes, find_weights, first_weights

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int | None], None]
"""A callback of progress: a description, the amount done, and the total, None if unknown."""

SAMPLE_FILE = "sample.txt"
SAVED = "the last step is saved; the same command evaluates"


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step` (from 0): linear warm-up to the peak, then `schedule`; it ends above 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    left, after_warmup = config.steps - step, max(config.steps - config.warmup_steps, 1)
    if config.schedule == "linear":
        return config.learning_rate * left / after_warmup
    if config.schedule == "cosine":
        return config.learning_rate * (1 - math.cos(math.pi * left / after_warmup)) / 2
    if config.schedule == "wsd" and step > config.decay_from:
        return config.learning_rate * left / (config.steps - config.decay_from)
    return config.learning_rate


def make_optimizer(parts: Sequence[Part], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW as in Tables 6-7 for the parts of the parameters that this process updates. Matrices and embeddings decay;
    biases, norms, scales and position biases do not."""
    decayed = [part.own for part in parts if part.name.endswith("weight") and part.whole.dim() >= 2]
    others = [part.own for part in parts if not (part.name.endswith("weight") and part.whole.dim() >= 2)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                             eps=config.adam_epsilon, fused=True)


def compute_gradient(model: nn.Module, objective: Objective, batch: Sequence[Tensor], n_rows: int,
                     config: TrainConfig, *, parts: Sequence[Part] | None = None, ranks: Ranks = ALONE,
                     n_windows: int = 1, reduce_scatter: OrderedReduceScatter | None = None,
                     between: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Leave the clipped gradient of a batch's mean loss in `.grad`; returns loss (nats per target) and gradient norm.

    batch: the tensors of `Objective.batch`, split into micro-batches of `n_rows` rows, which are weighted by their
    numbers of targets and added as `distributed.ordered` does, so that the result does not depend on the number of
    ranks. With clip_scope "local" each micro-batch's gradient is clipped before the average, and the norm returned is
    the mean of their norms; with "global", and of a sharded model, the average is clipped, and the norm is its own.
    parts: what this rank updates, by default all; `part.own.grad` is set. n_windows: windows of a row, see
    `distributed.windows`; more than one for `NextToken`. reduce_scatter: of a sharded model, `shard_model`'s. between
    is called before each micro-batch, and may raise.
    Raises NumericsError, and leaves `.grad` unusable, if the loss or norm is not finite.
    """
    parts = list(parts or parts_of(model))
    parameters = [part.whole for part in parts]
    forget(part.own for part in parts)  # those of the step before
    micro_batches = list(zip(*(part.split(n_rows) for part in batch), strict=True))
    counts = torch.tensor([objective.n_targets(*micro_batch) for micro_batch in micro_batches])
    n_targets = max(int(gather(counts, ranks.in_column).sum()), 1)
    losses, norms, is_sharded = [], [], reduce_scatter is not None and ranks.size > 1
    is_local = config.clip_scope == "local" and not config.shard  # a rank has no micro-batch's gradient of its own
    autocast = partial(torch.autocast, batch[0].device.type, torch.bfloat16, enabled=config.precision == "bfloat16")

    def mean_loss(micro_batch: Sequence[Tensor], count: int, part: Ranks) -> Tensor:
        with autocast():
            return objective.losses(model, *micro_batch, ranks=part).sum() / max(count, 1)

    def read(micro_batch: Sequence[Tensor], part: Ranks) -> None:
        with autocast():
            read_rows(model, micro_batch[0], part)

    def gradient_of(micro_batch: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
        if n_windows > 1:
            forget(parameters)
            loss = differentiate_windows(partial(read, micro_batch), partial(mean_loss, micro_batch, count),
                                         n_windows).sum()
        else:
            loss = mean_loss(micro_batch, count, ranks.in_row)
            forget(parameters)
            loss.backward()
        return loss.detach(), [local(p.grad if p.grad is not None else torch.zeros_like(p)) for p in parameters]

    def gradients() -> Iterator[list[Tensor]]:
        for micro_batch, count in zip(micro_batches, counts.tolist(), strict=True):
            between()
            share = count / n_targets
            if reduce_scatter is not None:
                reduce_scatter.share = share
            loss, gradient = gradient_of(micro_batch, count)
            if not is_sharded:
                sum_over_row(gradient, ranks.in_row)
            if is_local:
                norms.append(clip_(gradient, config.clip))
            losses.append(loss * share)
            if share != 1 and not is_sharded:
                torch._foreach_mul_(gradient, share)
            yield gradient

    total = tree_sum(gradients())
    if not is_sharded:
        total = exchange(total, ranks)
    if not is_local:
        norm = norm_of(total, parts, ranks)
        scale_to(total, norm, config.clip)
    else:
        norm = gather(torch.stack(norms).cpu(), ranks.in_column).mean()
    forget(parameters)
    for part, g in zip(parts, total, strict=True):
        part.own.grad = (g if g.numel() == part.own.numel() else padded(g)).view_as(part.own)
    # Of ranks in columns and rows, and micro-batches; then micro-batch by micro-batch, as the rows are read.
    losses_CRM = gather(torch.stack(losses).cpu(), ranks).unflatten(0, (-1, ranks.in_row.size))
    loss_value = losses_CRM.permute((2, 0, 1) if is_sharded else (0, 2, 1)).flatten().sum().item()
    for name, value in (("loss", loss_value), ("gradient norm", norm.item())):
        if not math.isfinite(value):
            raise NumericsError(f"the {name} is not finite", f"{name} = {value}")
    return loss_value, norm.item()


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients. Not `model.zero_grad`, which misses those of parameters that FSDP2 has gathered."""
    for p in parameters:
        p.grad = None


def clip_(gradient: list[Tensor], clip: float | None) -> Tensor:
    """Scale a gradient in place so that its norm is at most `clip`; returns the norm before."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
    scale_to(gradient, norm, clip)
    return norm


def scale_to(gradient: list[Tensor], norm: Tensor, clip: float | None) -> None:
    """Scale a gradient of this norm in place so that its norm is at most `clip`."""
    if clip is not None:
        torch._foreach_mul_(gradient, (clip / norm).clamp(max=1.0).to(gradient[0].device))


class StopSignal:
    """The first SIGTERM or SIGINT requests a stop at the next safe moment; the second ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    def check(self, note: str) -> None:
        """Raise Stopped, with `note`, if a stop was requested."""
        if self.number is not None:
            name = signal.Signals(self.number).name
            raise Stopped(f"stopped by {'Ctrl-C (SIGINT)' if name == 'SIGINT' else name}", note, self.number)

    def agree(self, ranks: Ranks) -> bool:
        """Whether a stop was requested of any rank: one answer for all, so that they stop at the same place. A signal
        that comes while they ask counts the next time."""
        number = int(gather(torch.tensor(self.number or 0), ranks).max())
        self.number = number or self.number
        return number > 0

    def watch(self, note: str, progress: Progress | None, what: str, total: int | None,
              ranks: Ranks = ALONE) -> Callable[[int], None]:
        """A callback that takes a count, reports it to `progress`, and raises Stopped if a stop was requested. All
        ranks call it equally often."""
        def counted(done: int) -> None:
            if progress is not None:
                progress(what, done, total)
            if self.agree(ranks):
                self.check(note)

        return counted

    @contextmanager
    def listening(self, tell: Callable[[str], None] = lambda name: None) -> Iterator["StopSignal"]:
        """Handle the signals inside the block. tell is called at once with the name of the first, by a thread of its
        own: Python handles a signal only when the operation that it came in has ended."""
        def asked(number: int, frame: FrameType | None) -> None:
            if self.number is not None:
                return
            self.number = number
            time.sleep(0.1)  # programs such as `timeout` send the same signal twice
            for each in old:
                signal.signal(each, signal.SIG_DFL)

        def answer() -> None:
            while data := os.read(heard, 1):
                if data[0] in old:
                    tell(signal.Signals(data[0]).name)
                    return

        old = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        heard, woken = os.pipe()
        os.set_blocking(woken, False)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for each in old:
            signal.signal(each, asked)
        try:
            yield self
        finally:
            for each, handler in old.items():
                signal.signal(each, handler)
            signal.set_wakeup_fd(before)
            os.close(woken)
            thread.join()
            os.close(heard)


def new_model(config: RunConfig) -> LanguageModel:
    """The run's model, initialised from its seed, or on the meta device if it is to be sharded. Raises ResourceError if
    its training cannot fit into memory."""
    per_parameter = 4 if torch.cuda.is_available() else 16  # the weight; on a CPU also its gradient and two moments
    needed, available = per_parameter * config.model.least_parameters, available_bytes()
    if config.train.shard:
        needed //= launched().size  # of the machine that all ranks are on, at most
    if available is not None and needed > available:
        raise ResourceError("the model does not fit into memory", f"{needed / 2**30:,.1f} GiB needed, "
                            f"{available / 2**30:,.1f} GiB available", "lower n_layers, d_model or vocab_size")
    torch.manual_seed(config.train.seed)
    with torch.device("meta") if config.train.shard else nullcontext():
        return LanguageModel(config.model)


def fit(run: Run, model: LanguageModel, objective: Objective, *, extra_files: dict[str, str], device: torch.device,
        stop: StopSignal, ranks: Ranks = ALONE, on_step: Callable[[dict[str, Any]], None] | None = None,
        on_micro_batch: Callable[[int, int], None] | None = None, score_last: bool = True,
        first: Callable[[Wanted], dict[str, Tensor]] | None = None, patience: int | None = None) -> LanguageModel:
    """Train `model` to the last step, from the newest checkpoint if there is one; returns it.

    Each of several ranks computes a share of every step's micro-batches, see `distributed.ordered`, and with
    `context_parallel` its part of their rows, see `distributed.context`; all stop at the same step. Every `eval_every`
    steps `objective.evaluate` scores the model. extra_files: texts saved with every checkpoint, by file name. on_step
    is called with each line of the metrics and the number of "steps", on_micro_batch before each micro-batch of this
    rank with the steps done and the micro-batch's number in its step. score_last: whether to score the last step too,
    if it is a multiple of `eval_every`. first: the weights to begin with, see `Run.resume`. patience: end after so many
    evaluations without a better score or loss, by `Run.best_so_far`; the best checkpoint is kept. Raises Stopped after
    saving if `stop` requests it, NumericsError for a loss or gradient before the update and for weights before a save,
    ResourceError when memory runs out."""
    config, context = run.config.train, run.config.model.context
    model.activation_checkpointing = config.activation_checkpointing
    model = model if config.shard else model.to(device)
    if config.compile:
        model.compile_layers()
    reduce_scatter = None
    if config.shard:
        layers = [(layer, partial(layer.init_weights, model.config.init_std)) for layer in model.residual_layers()]
        reduce_scatter = shard_model(model, layers, model.init_outer_weights, config.seed, ranks, device)
    parts = parts_of(model, ranks) if reduce_scatter is None else sharded_parts(model, ranks)
    optimizer = make_optimizer(parts, config)
    done = run.resume(model, parts, optimizer, first)
    if reduce_scatter is not None:
        write_back(parts)
    if patience is not None:
        run.best_so_far()  # before a save, which removes others
    if done:
        run.save(done, model, parts, optimizer, extra_files)  # a kill may have left the end of the last save undone
    model.train()
    saved = done

    def save(step: int) -> None:
        nonlocal saved
        if step != saved:
            finite = all(t.isfinite().all() for part in parts for t in (part.own, *optimizer.state[part.own].values()))
            if not gather(torch.tensor(finite), ranks).all():
                raise NumericsError("the weights are not finite", f"step {step}", advice(saved, config))
            run.save(step, model, parts, optimizer, extra_files)
            saved = step

    def stop_if_asked(step: int, _: int = 0) -> None:
        if stop.agree(ranks):
            save(step)
            stop.check(f"saved at step {step} of {config.steps}; the same command goes on" if step else "before step 1")

    def begin_micro_batch(step: int, numbers: Iterator[int]) -> None:
        stop_if_asked(step)  # a step takes minutes
        if on_micro_batch is not None:
            on_micro_batch(step, next(numbers))

    def log(record: dict[str, Any]) -> None:
        run.log(record)
        if on_step is not None:
            on_step(record | {"steps": config.steps})

    def score_if_due(step: int) -> None:
        stop_if_asked(step)
        if step and step % config.eval_every == 0:
            if patience is not None:
                save(step)
            held_out = objective.evaluate(model, partial(stop_if_asked, step))
            log({"step": step, "clock": {"time": time.time()}, "held_out": held_out})

    for step in range(done, config.steps):
        score_if_due(step)  # the step is saved: after a stop or a kill during the evaluation, a resume repeats it
        if patience is not None and step % config.eval_every == 0 and run.best_so_far() >= patience:
            return model
        started, cpu_started = time.perf_counter(), time.process_time()
        batch = [torch.from_numpy(part).to(device) for part in objective.batch(step)]
        learning_rate = learning_rate_at(step, config)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        fits = True
        try:
            loss, norm = compute_gradient(model, objective, batch, run.config.micro_batch_rows, config, parts=parts,
                                          ranks=ranks, reduce_scatter=reduce_scatter,
                                          n_windows=run.config.n_windows,
                                          between=partial(begin_micro_batch, step, itertools.count()))
            optimizer.step()
            if reduce_scatter is None:
                gather_parts([part.whole.detach() for part in parts], ranks)
            else:
                write_back(parts)
        except NumericsError as e:
            raise NumericsError(e.what, f"step {step + 1}", advice(saved, config)) from None
        except (RuntimeError, MemoryError) as e:
            if config.compile and type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise ResourceError("torch.compile failed", str(e).split("\n\n")[0], "set compile = false") from e
            if not out_of_memory(e):
                raise
            fits = False
        if not fits:  # outside `except`, where the exception still holds the tensors of the failed step
            where = f"micro_batch_tokens = {config.micro_batch_tokens}, context = {context}"
            todo = suggest_size(model, parts, optimizer, objective, batch, run.config)
            raise ResourceError("out of memory", where, todo)
        clock = {"time": time.time(), "tokens_per_s": config.tokens_per_step / (time.perf_counter() - started),
                 "cpu_s": sum(gather(torch.tensor(time.process_time() - cpu_started), ranks).tolist())}
        log({"step": step + 1, "loss": loss, "learning_rate": learning_rate, "grad_norm": norm,
             "tokens": (step + 1) * config.tokens_per_step, "clock": clock})
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            save(step + 1)
    if score_last:
        score_if_due(config.steps)
    if patience is not None:
        run.best_so_far()
    return model


def fit_once(config: RunConfig, facts: dict[str, Any], device: torch.device | str | None, stop: StopSignal,
             begin: Callable[[Ranks], tuple[LanguageModel, Objective, dict[str, str]]],
             score: Callable[[Run, LanguageModel, Ranks], dict[str, Any]], *,
             on_step: Callable[[dict[str, Any]], None] | None,
             on_micro_batch: Callable[[int, int], None] | None = None, score_last: bool = True,
             first: Callable[[Wanted], dict[str, Tensor]] | None = None, patience: int | None = None,
             rank_timeout: float = TIMEOUT_S) -> tuple[dict[str, Any], bool]:
    """Run or resume `fit` in the run's folder, then write the scores into the result file. Returns the content of the
    result file, and whether it was complete before; if so, nothing is trained. A damaged one is written again.

    All ranks of `torchrun` call it; rank 0 holds the lock and writes. facts: hashes of the data and the tokenizer.
    begin returns the new model, the objective and the `extra_files` of `fit`; score returns the content of the result
    file; first and patience are those of `fit`. Raises as `in_rows`, `connected`, `require_fitting`, `Run`,
    `checkpoint.lock` and `fit` do."""
    out = Path(config.out)
    picked = device if is_picked(device) else pick_device(device, give_back=config.train.shard)
    n_in_row = config.train.context_parallel
    require_fitting(config.rows_per_step // config.micro_batch_rows, config.train.shard, in_rows(launched(), n_in_row))
    with (connected(picked.type, rank_timeout, n_in_row, partial(stop.check, "before the ranks met")) as ranks,
          checkpoint.lock(out) if ranks.is_first else nullcontext()):
        require_same({**to_dict(config.model), **to_dict(config.train), "out": config.out, **facts,
                      "torch": torch.__version__}, ranks)
        run = Run(out, config, facts, ranks)
        found = result_or_none(out, read_result, "step-*") if ranks.is_first else None
        complete = gather_json(found, ranks)[0]
        if complete is not None:
            return complete, True
        if picked is not device:
            pick_device(picked, tell=True, give_back=config.train.shard)
        model, objective, extra_files = begin(ranks)
        model = fit(run, model, objective, extra_files=extra_files, device=picked, stop=stop, ranks=ranks,
                    on_step=on_step, on_micro_batch=on_micro_batch, score_last=score_last,
                    first=first, patience=patience)
        if stop.agree(ranks):
            stop.check(SAVED)
        result = {"run": run.id, **score(run, model, ranks)}
        if ranks.is_first:
            last = max(checkpoint.saved_steps(out))
            checkpoint.point(out / "latest", f"step-{last:08d}")  # if the disk failed at the link of the last save
            write_json(out / RESULT_FILE, result)
        wait_for_all(ranks)
    return result, False


@dataclass(frozen=True)
class TrainResult:
    """A completed run."""

    out: Path
    """The run's folder, which `load_model` opens. `latest` is its newest checkpoint, `metrics.jsonl` has a line per
    step and each evaluation, `loss.png` shows the curves."""
    config: RunConfig
    scores: dict[str, Any]
    """The content of `result.json`: "run" (the id in `run.json`), "steps", "held_out" (`Evaluation.to_dict` of the
    held-out split, after a short run of its first `TrainConfig.last_eval_tokens`), "peak_mib", and for short text that
    was scored whole "xz_bits_per_byte"."""
    sample: str
    """Generated text, or masked text that the model has filled if it is not causal; empty if the model is sharded."""
    already: bool
    """Whether the run was complete before, so that nothing was trained."""


def train(config: RunConfig | Mapping[str, Any], *, device: torch.device | str | None = None,
          stop: StopSignal | None = None, on_step: Callable[[dict[str, Any]], None] | None = None,
          on_micro_batch: Callable[[int, int], None] | None = None, progress: Progress | None = None,
          rank_timeout: float = TIMEOUT_S) -> TrainResult:
    """Train a model on prepared text, or continue an unfinished run; then score the held-out split, and write a sample,
    the result file and a plot into the run's folder `config.out`.

    config: a run, or a flat table of settings (`model` or `from`, `size`, `data`, `out` and any field of the
    configurations, see `sized_config`); where it names no size, the log says which was taken. A run whose source is
    there begins with those weights at step 0; when it goes on it does not need them. device: by default cuda if
    available. stop: requests a save and an end, see `StopSignal.listening`. on_step and on_micro_batch: see `fit`.
    progress is called during the final evaluation, in tokens. Under `torchrun` every rank calls it with the same
    arguments, and a rank that does not answer for `rank_timeout` seconds is lost.
    Raises UsageError for wrong settings or a folder with another run, DataError for the data, CheckpointError for
    damage, NumericsError for a loss or gradient that is not finite, ResourceError for memory, disk and a run in use,
    RankError for a rank that was lost, Stopped after saving."""
    if isinstance(config, RunConfig):
        settings = config
    else:
        settings, size = sized_config(config, device)
        if "size" not in config and launched().is_first:
            train = settings.train
            logger.warning(f"size {size}; it takes {train.steps:,} steps of {train.tokens_per_step:,} tokens")
    stop = stop or StopSignal()
    data, out = settings.data, Path(settings.out)
    tokenizer, manifests = load_tokenizer(read_mixture(data)[0].folder / TOKENIZER_FILE), read_manifests(data)
    facts = {"data_sha256": sha256_of(data, manifests), "tokenizer_sha256": manifests[0].tokenizer["sha256"]}
    source, first = settings.source, None
    if source is not None:
        check_shapes(source.model, settings.model)
        there = saved_run(out)
        if there.get("from") == source.name:  # the run has its own weights
            facts |= {name: there[name] for name in there if name.startswith("from")}
        else:
            folder, known = find_weights(source)
            facts |= known
            first = partial(first_weights, folder, source.model, tokenizer)

    def begin(ranks: Ranks) -> tuple[LanguageModel, Objective, dict[str, str]]:
        kind = NextToken if settings.model.causal else MaskedTokens
        objective = kind(settings, open_data(data, "train"), open_data(data, "validation"), ranks)
        return new_model(settings), objective, tokenizer_files(tokenizer)

    result, already = fit_once(settings, facts, device, stop, begin,
                               lambda run, model, ranks: finish(run, model, data, stop, ranks, progress),
                               on_step=on_step, on_micro_batch=on_micro_batch, first=first,
                               rank_timeout=rank_timeout)
    if already and launched().is_first and (out / METRICS_FILE).exists():
        try:
            read_metrics(out)
        except DataError as e:
            raise DataError(e.what, e.where, f"{e.todo}; mend the file or delete it: the run is complete, and its "
                            "weights and scores are whole") from None
    drawn = already and (out / PLOT_FILE).exists()  # a kill may have come between the result and the picture
    if launched().is_first and not drawn:
        plot_run(out)
    path = out / SAMPLE_FILE
    sample = read_bytes(path).decode(errors="replace") if path.exists() else ""
    return TrainResult(out, settings, result, sample, already)


def finish(run: Run, model: LanguageModel, data: str, stop: StopSignal, ranks: Ranks,
           progress: Progress | None) -> dict[str, Any]:
    """Score the held-out split (of it `TrainConfig.last_eval_tokens` at most) and, unless the model is sharded, write a
    sample; returns the result file's content. Its "peak_mib" is the largest peak memory of a process in training; if
    the run was resumed, earlier processes do not count."""
    config, peak_mib = run.config, peak_bytes(model.embed.weight.device) / 2**20
    held_out = open_data(data, "validation")
    n_scored = min(held_out.n_tokens, config.train.last_eval_tokens)
    is_whole = n_scored == held_out.n_tokens
    evaluation, by_source = evaluate_data(
        model, held_out, context=config.model.context, precision=config.train.precision,
        batch_rows=config.micro_batch_rows, ranks=ranks, max_tokens=None if is_whole else n_scored,
        progress=stop.watch(SAVED, progress, "evaluating", n_scored, ranks))
    result: dict[str, Any] = {"steps": config.train.steps, "held_out": evaluation.to_dict(),
                              **({"by_source": {name: each.to_dict() for name, each in by_source.items()}}
                                 if by_source else {}),
                              "peak_mib": float(gather(torch.tensor(peak_mib), ranks).max())}
    if not ranks.is_first:
        return result
    stream = held_out.streams[0] if isinstance(held_out, Mixture) else held_out
    small = open_split(stream.folder, "train").n_bytes + stream.n_bytes <= XZ_LIMIT_BYTES
    if config.model.causal and not by_source and small and is_whole:
        result["xz_bits_per_byte"] = xz_bits_per_byte(stream.folder)
    model.eval()
    if run.is_sharded:  # all weights would be gathered again for every token
        return result
    tokenizer = load_tokenizer(stream.folder / TOKENIZER_FILE)
    if not config.model.causal:
        write_atomically(run.out / SAMPLE_FILE, masked_sample(model, tokenizer, stream))
        return result
    length = min(200, (config.model.max_len or 201) - 1)
    ids = generate(model, [[stream.end_of_document]], max_new_tokens=length, temperature=0.8, top_p=0.95,
                   seed=config.train.seed, stop=lambda row, new: stop.number is not None)[0]
    stop.check(SAVED)
    write_atomically(run.out / SAMPLE_FILE, tokenizer.decode(ids) + "\n")
    return result


def advice(saved: int, config: TrainConfig) -> str:
    """Advice for an error of numerics: the last good checkpoint, and a setting to change."""
    kept = f"the checkpoint of step {saved} is good" if saved else "there is no checkpoint yet"
    return f"{kept}; try a lower learning_rate (now {config.learning_rate:g})"


def out_of_memory(error: Exception) -> bool:
    """Whether an exception means that memory ran out; PyTorch's CPU allocator raises a plain RuntimeError."""
    texts = ("not enough memory", "can't allocate memory", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


def suggest_size(model: nn.Module, parts: Sequence[Part], optimizer: torch.optim.AdamW, objective: Objective,
                 batch: Sequence[Tensor], config: RunConfig) -> str:
    """Advice for a micro-batch that is too large: the next smaller size that fits.

    Each size is tried with two micro-batches and the optimizer's moments allocated, as in training, and an eighth more
    rows, because a new process finds its memory fragmented differently. Rows that ranks share are not tried."""
    n_rows = config.micro_batch_rows
    if config.train.context_parallel > 1:
        return "lower micro_batch_tokens" if n_rows > 1 else "raise context_parallel, or lower context"
    while n_rows > 1:
        n_rows = max(n for n in range(1, n_rows) if config.rows_per_step % n == 0)
        n_tried = n_rows + n_rows // 8
        model.zero_grad(set_to_none=True)
        moments: list[Tensor] = []
        try:
            moments += [torch.zeros_like(part.own) for part in parts if not optimizer.state[part.own] for _ in range(2)]
            with suppress(NumericsError):
                compute_gradient(model, objective, [part[: 2 * n_tried] for part in batch], n_tried, config.train,
                                 n_windows=config.n_windows)
            size = n_rows * config.model.context
            return f"micro_batch_tokens = {size} fits; as the unit of local clipping it is yours to change"
        except (RuntimeError, MemoryError) as e:
            if not out_of_memory(e):
                raise
    if config.train.window_tokens is not None:
        return "not even one row fits; lower window_tokens, or context"
    return "not even one row fits; lower context, or switch activation_checkpointing on"
