"""Time, memory and traffic of a training step on several ranks: `torchrun ... -m benchmarks step`."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks import Row, measure, peers
from benchmarks.measure import OnRows, Progress, Times, ignore
from benchmarks.step import LIMITS, StepCase, random_batch, step_row
from lineartime.config import TrainConfig, check_context_parallel
from lineartime.distributed.ranks import Ranks, connected, gather, gather_json, in_rows, launched, wait_for_all
from lineartime.model import LanguageModel
from lineartime.plan import numbers_sent
from lineartime.runtime import rss_bytes
from lineartime.settings import require
from lineartime.training import compute_gradient, divide, make_optimizer


def bytes_sent(work: Callable[[], None]) -> tuple[int, int]:
    """The bytes that this rank gives to collectives in `work`, of float32, as PyTorch's profiler records them: for
    states and edges of rows that ranks share, and for all else."""
    for_rows = otherwise = 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its own start and end
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True,
                                acc_events=True) as profile:  # without it older versions of torch warn
        work()
    for event in profile.events():
        if event.name.startswith("c10d::"):
            n_bytes, outer = 4 * math.prod(event.input_shapes[1]), event.cpu_parent  # after what is received
            while outer is not None and not outer.name.startswith("lineartime::"):
                outer = outer.cpu_parent
            for_rows += n_bytes * (outer is not None)
            otherwise += n_bytes * (outer is None)
    return for_rows, otherwise


def benchmark_ranks(cases: Sequence[StepCase], *, context_parallel: int = 1, repeats: int = 5, threads: int = 1,
                    device: str = "cpu", seed: int = 0, progress: Progress = ignore,
                    on_rows: OnRows = ignore) -> list[Row]:
    """Time and memory of whole training steps on the ranks of `torchrun`, which all call it; a row per case.

    Each rank, or each group of `context_parallel` ranks, has equally many rows of the step as one micro-batch. The
    cases take a step in turn. A row's time is that of the slowest rank, its processor time that of all together, its
    memory that of the rank with most. Before that, loss and gradient of two short rows per rank have been compared with
    what one process makes of them. Raises UsageError for rows that cannot be shared out."""
    measure.require_measurable([case.precision for case in cases], cases=len(cases), repeats=repeats)
    launched_ranks = in_rows(launched(), context_parallel)
    for case in cases:
        require(case.n_rows % launched_ranks.in_column.size == 0, "rows cannot be shared out equally",
                f"{case.n_rows} rows, {launched_ranks.in_column.size} ranks or groups of ranks", "raise --tokens")
        require(case.label.model != peers.PEER, "a peer runs in one process", case.label.text, "leave it out")
        require(not case.label.windowed, "windows are measured in one process", case.label.text, "leave out :windowed")
        check_context_parallel(case.config, context_parallel)
    rows: list[Row] = []
    with connected(device, n_in_row=context_parallel) as ranks:
        on, settings = measure.set_up(threads, device, seed)
        steps = [RankStep(case, ranks, on, seed) for case in cases]
        for case, step in zip(cases, steps, strict=True):
            progress(f"{case.text}: check and warm-up")
            step.check()
            step.count_bytes()
        for number, i in measure.in_turn(range(len(cases)), range(repeats)):
            progress(f"round {number + 1} of {repeats}: {cases[i].text}")
            steps[i].timed()
        shared = {"benchmark": "step", "threads": threads, "device": device, "warm_up": 1, "repeats": repeats,
                  "ranks": ranks.size, "context_parallel": context_parallel, **measure.facts_of_run()}
        for case, step in zip(cases, steps, strict=True):
            rows.append(step_row(case, {**step.answer(), "settings": settings}) | shared)
        if ranks.is_first:
            on_rows(rows)
        wait_for_all(ranks)
    return rows


class RankStep:
    """A model's training steps on this rank."""

    def __init__(self, case: StepCase, ranks: Ranks, device: torch.device, seed: int):
        self.case, self.ranks, self.device, self.seed = case, ranks, device, seed
        self.imported = (rss_bytes() or 0) * (device.type == "cpu")
        torch.manual_seed(seed)
        model = peers.build(case.label, case.config).to(device).train()
        assert isinstance(model, LanguageModel)
        if case.label.compiled:
            model.compile_layers()
        self.model, self.division = model, divide(model, TrainConfig(), ranks, device)
        self.train = TrainConfig(precision=case.precision, tokens_per_step=case.tokens_per_step, clip_scope="global",
                                 micro_batch_tokens=case.tokens_per_step, context_parallel=ranks.in_row.size)
        self.optimizer = make_optimizer(self.division.parts, self.train)
        self.task, batch = random_batch(case.config, case.n_rows, case.config.context, seed, device)
        self.batch = [part[ranks.in_column.share(case.n_rows)] for part in batch]
        self.times: Times = {}
        self.sent: Row = {}

    def step(self) -> None:
        """One step of all ranks."""
        compute_gradient(self.model, self.task, self.batch, len(self.batch[0]), self.train, division=self.division)
        self.optimizer.step()
        self.division.share_updates()

    def check(self) -> None:
        """Compare loss and gradient of short rows with those of one process."""
        ranks, n_columns = self.ranks, self.ranks.in_column.size
        length = 2 * (self.case.config.chunk_size or 128) * ranks.in_row.size
        _, batch = random_batch(self.case.config, 2 * n_columns, length, self.seed, self.device)
        train = replace(self.train, clip=None, precision="float32")
        alone, _ = compute_gradient(self.model, self.task, batch, 2, replace(train, context_parallel=1))
        wanted = [part.whole.grad.view(-1)[part.start : part.stop].clone() for part in self.division.parts
                  if part.whole.grad is not None]
        own = [part[ranks.in_column.share(2 * n_columns)] for part in batch]
        loss, _ = compute_gradient(self.model, self.task, own, 2, train, division=self.division)
        errors = {"the loss": abs(loss - alone) / alone}
        for part, expected in zip(self.division.parts, wanted, strict=True):
            if len(expected):
                assert part.own.grad is not None
                errors[part.name] = measure.relative_error(part.own.grad, expected, least=1e-6)
        what = f"loss and gradients against one process, {2 * n_columns} x {length:,} tokens"
        self.checked = measure.check(errors, LIMITS["float32"], what, otherwise="not the same step as in one process")

    def count_bytes(self) -> None:
        """Take a step, and keep what this rank sends in it, by layer and row."""
        for_rows, otherwise = bytes_sent(self.step)
        config, n_rows = self.case.config, len(self.batch[0])
        passes = 2 * config.n_layers * n_rows  # forward and backward
        by_formula = 4 * numbers_sent(config) if self.ranks.in_row.size > 1 else 0
        self.sent = {"sent_bytes": for_rows + otherwise, "sent_per_layer_bytes": for_rows / passes,
                     "sent_per_layer_by_formula_bytes": by_formula}
        measure.forget_peak(self.device)

    def timed(self) -> None:
        """Take a step with all clocks running; nobody begins before the others or ends before them."""
        wait_for_all(self.ranks)
        before = measure.mark(self.device)
        self.step()
        after = measure.mark(self.device, done=True)
        wait_for_all(self.ranks)
        measure.add_times(self.times, [before, after])

    def answer(self) -> Row:
        """What all ranks measured: of times the slowest, of processor time the sum, of memory the most."""
        memory = measure.peak_since(self.imported, self.device)
        measure.release_memory(self.device)
        all_memory = gather_json(memory, self.ranks)
        by_clock = {name: gather(torch.tensor(each), self.ranks) for name, each in self.times.items()}
        times = {name: (each.sum(0) if name == "cpu_ms" else each.amax(0)).tolist() for name, each in by_clock.items()}
        return {"times": times, "check": self.checked, **self.sent,
                **{name: max(each[name] for each in all_memory) for name in memory},
                "n_parameters": sum(p.numel() for p in self.model.parameters())}
