"""Speed and memory, measured so that numbers can be compared: one JSON row each, with what is needed to repeat it.

Cells of a table are measured in turn, many times over, so that a machine that slows down slows all of them. The
processor time of the process stands beside the time on the clock: on a CPU, other programs disturb it less.
"""

import copy
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lineartime.cache import DecodingState
from lineartime.config import ModelConfig, to_dict
from lineartime.errors import ResourceError, UsageError
from lineartime.generate import PIECE_TOKENS, decode_step, prefill
from lineartime.info import describe, mib, table
from lineartime.model import LanguageModel, token_losses

LENGTHS = tuple(1024 * 2**i for i in range(7))
"""1K to 64K tokens."""
ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]


def provenance() -> Row:
    """What a measurement needs to be repeated: commit, command, hardware, versions, and how busy the machine was."""
    program = Path(sys.argv[0]).name
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "command": shlex.join([program if program != "__main__.py" else "lineartime", *sys.argv[1:]]),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lineartime": version(),
    }


def commit() -> str | None:
    """The checkout's commit, with "+changes" where the package differs from it; None for an installed package."""
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "lineartime/benchmark.py")
        changes = git("status", "--porcelain", "--untracked-files=no", "--", "lineartime")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = named.get("model name", platform.machine())
    return f"{name} (family {named.get('cpu family')}, model {named.get('model')})"


def version() -> str | None:
    try:
        return importlib.metadata.version("lineartime")
    except importlib.metadata.PackageNotFoundError:
        return None


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file of JSON lines. Raises ResourceError."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as e:
        raise ResourceError("cannot write", path, e.strerror) from None


def peak_rss_bytes() -> int:
    """The most memory this process has had at once. On Linux not `ru_maxrss`, which starts from the parent's."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Stopwatch:
    """Milliseconds of the clock and of the processor, per unit of work."""

    def __init__(self, device: torch.device):
        self.device = device
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    @contextmanager
    def running(self, units: int = 1) -> Iterator[None]:
        self.wait()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wait()
        self.wall_ms.append((time.perf_counter() - wall) * 1e3 / units)
        self.cpu_ms.append((time.process_time() - cpu) * 1e3 / units)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def spread(values: Sequence[float]) -> Row:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def benchmark_decode(models: Mapping[str, LanguageModel], lengths: Sequence[int] = LENGTHS, *,
                     quadratic_up_to: int = 8192, repeats: int = 20, block_tokens: int = 16, threads: int = 1,
                     seed: int = 0, progress: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Time per generated token of one row after contexts of `lengths` tokens; a row per model and length.

    models: label to model, on the device and in the type to measure; any weights will do. The context is read piece by
    piece, which leaves the state that generating it would leave. Then blocks of `block_tokens` greedy tokens are timed,
    one per cell in turn, `repeats` times, after one that is not timed. quadratic_up_to: models whose state grows
    are not measured beyond it. Raises UsageError past the end of a position table."""
    if not lengths or min(lengths) < 1 or min(repeats, block_tokens, threads) < 1:
        raise UsageError("nothing to measure", f"lengths = {list(lengths)}, repeats = {repeats}, "
                         f"block_tokens = {block_tokens}, threads = {threads}", "they take whole numbers from 1")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cells = []
        for label, model in models.items():
            model.eval()
            longest = quadratic_up_to if describe(model.config).decoding.per_token else max(lengths)
            mine = sorted(n for n in set(lengths) if n <= longest)
            model.check_length(max(mine, default=0) + (repeats + 1) * block_tokens)
            for n, state in states_at(model, mine, seed):
                progress(f"{label}: {n:,} tokens read")
                cells.append((label, model, n, state))
        next_ids = [torch.zeros(1, dtype=torch.long, device=model.embed.weight.device) for _, model, _, _ in cells]
        watches = [Stopwatch(ids_1.device) for ids_1 in next_ids]
        for repeat in range(-1, repeats):
            # Turned round every time, so that no cell always follows the same one.
            for i in range(len(cells))[:: -1 if repeat % 2 else 1]:
                _, model, _, state = cells[i]
                watch = watches[i] if repeat >= 0 else Stopwatch(watches[i].device)
                with watch.running(units=block_tokens):
                    for _ in range(block_tokens):
                        next_ids[i] = decode_step(model, next_ids[i], state).argmax(-1)
            progress(f"block {repeat + 1} of {repeats}")
    finally:
        torch.set_num_threads(threads_before)
    facts = provenance()
    return [{"benchmark": "decode", "model": label, "context_tokens": n, "wall_ms_per_token": spread(watch.wall_ms),
             "cpu_ms_per_token": spread(watch.cpu_ms), "state_bytes": state.n_bytes, "batch_size": 1,
             "repeats": repeats, "block_tokens": block_tokens, "warm_up_tokens": block_tokens, "threads": threads,
             "device": watch.device.type, "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
             "process_peak_rss_mib": peak_rss_bytes() / 2**20, "config": to_dict(model.config), **facts}
            for (label, model, n, state), watch in zip(cells, watches, strict=True)]


@torch.inference_mode()
def states_at(model: LanguageModel, lengths: Sequence[int], seed: int) -> Iterator[tuple[int, DecodingState]]:
    """A copy of the decoding state at each of the rising `lengths` of one row of random tokens."""
    device, generator = model.embed.weight.device, torch.Generator().manual_seed(seed)
    state, n_read = model.decoding_state(1), 0
    for length in lengths:
        while n_read < length:
            n_new = min(PIECE_TOKENS, length - n_read)
            ids_1N = torch.randint(model.config.vocab_size, (1, n_new), generator=generator).to(device)
            model.extend(ids_1N, torch.tensor([n_new], device=device), state)
            n_read += n_new
        yield length, copy.deepcopy(state)


def flatness(rows: Sequence[Row]) -> dict[str, float]:
    """By model: the largest over the smallest median time per token of all contexts, less 1."""
    medians: dict[str, list[float]] = {}
    for row in rows:
        medians.setdefault(row["model"], []).append(row[clock_of(row) + "_ms_per_token"]["median"])
    return {label: max(values) / min(values) - 1 for label, values in medians.items()}


def clock_of(row: Row) -> str:
    """Which of the two times is compared: that of the processor on a CPU, else that of the clock."""
    return "cpu" if row["device"] == "cpu" else "wall"


def print_decode(rows: Sequence[Row]) -> None:
    """Print `benchmark_decode`'s rows as a table, and how flat each model's are."""
    console, first = Console(highlight=False), rows[0]
    console.print(f"Milliseconds per generated token, one row, {what_is_timed(first)};\n"
                  f"{first['repeats']} blocks of {first['block_tokens']} tokens", markup=False)
    made = table("model", "context", "median", "min", "max", "state", width=14)
    for row in rows:
        times = row[clock_of(row) + "_ms_per_token"]
        made.add_row(row["model"], f"{row['context_tokens']:,}",
                     *(f"{times[key]:.2f}" for key in ("median", "min", "max")), mib(row["state_bytes"]))
    console.print(made)
    for label, flat in flatness(rows).items():
        mine = [row["context_tokens"] for row in rows if row["model"] == label]
        console.print(f"{label}: medians from {min(mine):,} to {max(mine):,} tokens lie within {flat:.1%}",
                      markup=False)


def what_is_timed(row: Row) -> str:
    if row["device"] != "cpu":
        return f"{row['gpu']}, {row['dtype']}"
    return f"processor time, {row['threads']} thread{'s' if row['threads'] > 1 else ''}, {row['dtype']}"


def benchmark_train(configs: Mapping[str, ModelConfig], contexts: Sequence[int], *, tokens: int = 8192,
                    repeats: int = 3, precision: str = "float32", threads: int = 1, device: str = "cpu", seed: int = 0,
                    progress: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Time and memory of forward, loss and backward of a micro-batch; a row per model and context.

    configs: label to model, whose context is replaced. tokens: in a micro-batch, one row where the context is longer.
    Every measurement is a process of its own, which takes one step that is not timed and then one that is; the cells
    are gone through `repeats` times. A process that dies gives a row with "failed" and no times."""
    if not contexts or min(*contexts, tokens, repeats, threads) < 1:
        raise UsageError("nothing to measure", f"contexts = {list(contexts)}, tokens = {tokens}, repeats = {repeats}, "
                         f"threads = {threads}", "they take whole numbers from 1")
    cells = [(label, replace(config, context=context)) for label, config in configs.items() for context in contexts]
    answers: list[list[Row]] = [[] for _ in cells]
    for repeat in range(repeats):
        for (label, config), mine in zip(cells, answers, strict=True):
            if not any("failed" in answer for answer in mine):
                progress(f"{label}, context {config.context:,}: {repeat + 1} of {repeats}")
                mine.append(in_own_process("train", {
                    "config": to_dict(config), "tokens": tokens, "precision": precision, "threads": threads,
                    "device": device, "seed": seed}))
    facts, rows = provenance(), []
    for (label, config), mine in zip(cells, answers, strict=True):
        row: Row = {"benchmark": "train", "model": label, "context_tokens": config.context}
        failed = [answer["failed"] for answer in mine if "failed" in answer]
        if failed:
            row["failed"] = failed[0]
        else:
            n_tokens = mine[0]["n_tokens"]
            clock = clock_of({"device": device})
            for name in ("wall", "cpu"):
                row[f"{name}_ms_per_step"] = spread([answer[f"{name}_ms"] for answer in mine])
            row |= {"tokens_per_step": n_tokens, "peak_mib": max(answer["peak_mib"] for answer in mine),
                    "tokens_per_s": n_tokens * 1e3 / row[f"{clock}_ms_per_step"]["median"]}
        rows.append({**row, "repeats": repeats, "warm_up_steps": 1, "threads": threads, "device": device,
                     "dtype": precision, "config": to_dict(config), **facts})
    return rows


def train_step(config: ModelConfig, tokens: int, precision: str, threads: int, device: str, seed: int) -> Row:
    """One process's part of `benchmark_train`."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, n_rows = LanguageModel(config).to(device), max(tokens // config.context, 1)
    rows_BT = torch.randint(config.vocab_size, (n_rows, config.context + 1), device=device)
    watch = Stopwatch(torch.device(device))
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with watch.running():
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = token_losses(model, rows_BT).mean()
            loss.backward()
    peak = peak_rss_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()
    return {"wall_ms": watch.wall_ms[-1], "cpu_ms": watch.cpu_ms[-1], "peak_mib": peak / 2**20,
            "n_tokens": n_rows * config.context}


def print_train(rows: Sequence[Row]) -> None:
    """Print `benchmark_train`'s rows as a table."""
    console, first = Console(highlight=False), rows[0]
    console.print(f"Forward, loss and backward, {what_is_timed(first)}; median of {first['repeats']} processes",
                  markup=False)
    made = table("model", "context", "tokens/s", "ms per step", "min", "max", "peak memory", width=14)
    for row in rows:
        if "failed" in row:
            made.add_row(row["model"], f"{row['context_tokens']:,}", "failed", row["failed"])
            continue
        times = row[clock_of(row) + "_ms_per_step"]
        made.add_row(row["model"], f"{row['context_tokens']:,}", f"{row['tokens_per_s']:,.0f}",
                     *(f"{times[key]:,.0f}" for key in ("median", "min", "max")), f"{row['peak_mib']:,.0f} MiB")
    console.print(made)


def benchmark_read(config: ModelConfig, n_tokens: int = 1_000_000, *, threads: int = 1, device: str = "cpu",
                   seed: int = 0) -> Row:
    """Memory and time while a prompt of `n_tokens` is read by a model with random weights, in a process of its own.

    The row has the most memory the process has had, whenever a tenth of the prompt has been read: what a model with a
    state of constant size needs does not grow after the first. Raises ResourceError where the process dies."""
    if min(n_tokens, threads) < 1:
        raise UsageError("nothing to measure", f"n_tokens = {n_tokens}, threads = {threads}",
                         "they take whole numbers from 1")
    answer = in_own_process("read", {"config": to_dict(config), "n_tokens": n_tokens, "threads": threads,
                                     "device": device, "seed": seed})
    if "failed" in answer:
        raise ResourceError("reading the prompt failed", f"{n_tokens:,} tokens", answer["failed"])
    return {"benchmark": "read", "prompt_tokens": n_tokens, **answer, "threads": threads, "device": device,
            "dtype": "float32", "config": to_dict(config), **provenance()}


def read_prompt(config: ModelConfig, n_tokens: int, threads: int, device: str, seed: int) -> Row:
    """One process's part of `benchmark_read`."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = LanguageModel(config).to(device).eval()
    # Eight bytes a token, made piece by piece: a list of them would take room that hides what the reading takes.
    prompt = array("q")
    while len(prompt) < n_tokens:
        prompt.extend(torch.randint(config.vocab_size, (min(PIECE_TOKENS, n_tokens - len(prompt)),)).tolist())
    tenths: list[Row] = []
    started = time.perf_counter()

    def sample(n_read: int) -> None:
        if n_read * 10 >= n_tokens * (len(tenths) + 1):
            peak = peak_rss_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()
            tenths.append({"tokens": n_read, "peak_mib": peak / 2**20, "seconds": time.perf_counter() - started})

    cpu = time.process_time()
    _, state = prefill(model, [prompt], sample)
    return {"wall_seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu, "tenths": tenths,
            "growth_mib": tenths[-1]["peak_mib"] - tenths[0]["peak_mib"], "state_bytes": state.n_bytes}


def print_read(row: Row) -> None:
    """Print `benchmark_read`'s row."""
    console, tenths = Console(highlight=False), row["tenths"]
    made = table("tokens read", "peak memory", "tokens/s", width=12)
    before: Row = {"tokens": 0, "seconds": 0.0}
    for now in tenths:
        speed = (now["tokens"] - before["tokens"]) / (now["seconds"] - before["seconds"])
        made.add_row(f"{now['tokens']:,}", f"{now['peak_mib']:,.1f} MiB", f"{speed:,.0f}")
        before = now
    console.print(made)
    console.print(f"{row['prompt_tokens']:,} tokens read in {row['wall_seconds']:,.0f} s; peak memory grew by "
                  f"{row['growth_mib']:,.1f} MiB after the first tenth; the state is {mib(row['state_bytes'])}")


JOBS: dict[str, Callable[..., Row]] = {"train": train_step, "read": read_prompt}


def in_own_process(job: str, arguments: Row) -> Row:
    """`JOBS[job](**arguments)` in a fresh Python; {"failed": why} where it dies."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "lineartime.benchmark"], env={**os.environ, "PYTHONPATH": path},
                          input=json.dumps({"job": job, **arguments}), capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout)
    if done.returncode == -signal.SIGKILL:
        return {"failed": "killed, most likely for want of memory"}
    return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def main() -> None:
    """Do the job that stdin describes; the answer is a line of JSON."""
    arguments = json.load(sys.stdin)
    job = JOBS[arguments.pop("job")]
    print(json.dumps(job(ModelConfig(**arguments.pop("config")), **arguments)))


if __name__ == "__main__":
    main()
