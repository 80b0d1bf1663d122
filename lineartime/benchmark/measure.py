"""What every measurement shares: where a row comes from, the stopwatch, the spread, memory, a process of its own.

Cells of a table are measured in turn, many times over, so that a machine that slows down slows all of them. The
processor time of the process stands beside the time on the clock: on a CPU, other programs disturb it less.
"""

import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from torch import Tensor

from lineartime.atomic_io import read_json_lines
from lineartime.benchmark import Row
from lineartime.errors import NumericsError, ResourceError
from lineartime.info import table
from lineartime.runtime import choose_settings, forget_peak, peak_bytes, peak_rss_bytes, release_memory, rss_bytes
from lineartime.settings import require

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
Progress = Callable[[str], None]
"""Is told in a line what is measured next."""
OnRows = Callable[[list[Row]], None]
"""Gets the rows that were measured together, as soon as they are there."""

DATA_SHEET = {"H200": {"bfloat16": 989e12, "float32": 67e12}, "H100 80GB HBM3": {"bfloat16": 989e12, "float32": 67e12}}
"""Dense FLOP per second that NVIDIA states, a multiply-add being 2; float32 without TF32."""


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
        git("ls-files", "--error-unmatch", "lineartime/benchmark/measure.py")
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


def facts_of_run() -> Row:
    """What the rows that were measured together share: the name of their run, and `provenance`."""
    return {"run": uuid.uuid4().hex[:12], **provenance()}


def rows_of_commit(path: Path) -> list[Row]:
    """The rows of a file that were measured at the commit that is here, with no changes; a last line that was cut off
    is left out. Raises DataError for a file that is not of rows."""
    here = commit()
    if not path.exists() or (here is not None and here.endswith("+changes")):
        return []
    return [row for row in read_json_lines(path, dict, "a row of a measurement") if row.get("commit") == here]


def ignore(_: object) -> None:
    """Do nothing: for callers who want neither progress nor rows before the end."""


def require_positive(**counts: int) -> None:
    """Raise UsageError where a number is below 1."""
    require(min(counts.values()) >= 1, "nothing to measure",
            ", ".join(f"{name} = {count:,}" for name, count in counts.items()), "they take whole numbers from 1")


def in_turn(cases: Sequence[T], rounds: Iterable[int]) -> Iterator[tuple[int, T]]:
    """Every case once a round, with the round. The order turns round every time, so that no case always follows the
    same one."""
    for number in rounds:
        for case in cases[:: -1 if number % 2 else 1]:
            yield number, case


def peak_of(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """The most memory there was while `work` was done: in all, and above what there was before."""
    release_memory(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else rss_bytes() or peak_rss_bytes()
    forget_peak(device)
    work()
    return peak_bytes(device), peak_bytes(device) - before


def compare(label: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float, *,
            what: str = "output and gradients", against: str = "the reference") -> Row:
    """A row's "check": the largest relative error of tensors by name against float64. Raises NumericsError where it is
    above the limit, or no number."""
    errors = {key: ((found[key].double() - x).norm() / x.norm()).item() for key, x in expected.items()}
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    if not errors[worst] <= limit:
        raise NumericsError(f"not what {against} gives", f"{label}, {worst}: relative error {errors[worst]:.2g}, "
                            f"the limit is {limit:.2g}")
    return {"what": f"{what} against {against} in float64", "error": errors[worst], "worst": worst, "limit": limit}


def available_bytes() -> int:
    """Memory that processes can still have, swap left out."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


Mark = tuple[float, float, torch.cuda.Event | None]
"""Milliseconds of the clock and of the processor, and a GPU's event."""


class Stopwatch:
    """Milliseconds of the clock, of the processor and, by its own events, of a GPU.

    `times` has them by the name of their clock, such as "cpu_ms"."""

    def __init__(self, device: torch.device):
        self.device = device
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is done inside, and add it."""
        self.wait()
        before = self.mark()
        yield
        self.add([before, self.mark(wait=True)])

    def mark(self, wait: bool = False) -> Mark:
        """What the clocks say; wait: when a GPU has done what it was given."""
        event = torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else None
        if event is not None:
            event.record()
        if wait:
            self.wait()
        return time.perf_counter() * 1e3, time.process_time() * 1e3, event

    def add(self, marks: Sequence[Mark]) -> None:
        """Add the time from each mark to the next."""
        self.wait()
        for (wall, cpu, event), (wall_after, cpu_after, event_after) in itertools.pairwise(marks):
            passed = {"wall_ms": wall_after - wall, "cpu_ms": cpu_after - cpu}
            if event is not None and event_after is not None:
                passed["gpu_ms"] = event.elapsed_time(event_after)
            for name, ms in passed.items():
                self.times.setdefault(name, []).append(ms)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def last(self) -> Row:
        """The newest measurement by the name of its clock."""
        return {name: times[-1] for name, times in self.times.items()}

    def compared(self) -> list[float]:
        """The times of the clock that is compared."""
        return self.times[f"{clock_of_times(self.times)}_ms"]


def clock_of_times(times: Mapping[str, object]) -> str:
    """Which clock is compared: that of a GPU, else that of the processor."""
    return "gpu" if "gpu_ms" in times else "cpu"


def spreads(times: Mapping[str, Sequence[float]]) -> Row:
    """A row's times by the names of their clocks, and which clock is compared."""
    return {name: spread(each) for name, each in times.items()} | {"clock": clock_of_times(times)}


def spread(values: Sequence[float]) -> Row:
    """Median, quartiles, least, most and how many."""
    low, middle, high = (statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3)
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values), "n": len(values)}


def compared_ms(row: Row) -> Row:
    """The times of a row by the clock that is compared."""
    return row[f"{row['clock']}_ms"]


def what_is_timed(row: Row) -> str:
    if row["device"] != "cpu":
        return row["gpu"]
    return f"processor time, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"


def heading(what: str, row: Row) -> str:
    """What stands over the table of a run."""
    return f"{what}, {what_is_timed(row)}, {row['dtype']}; {row['repeats']} rounds, run {row['run']}"


def quartiles(row: Row, figures: str = ",.0f") -> list[str]:
    """The median of a row, and its quartiles."""
    times = compared_ms(row)
    return [f"{times['median']:{figures}}", f"{times['q1']:{figures}} to {times['q3']:{figures}}"]


def print_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], width: int) -> None:
    """Print a table for a person, its first column at least so wide."""
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    console.print(title, markup=False)
    made = table(*columns, width=width)
    for line in lines:
        made.add_row(*line)
    console.print(made)


def set_up(threads: int, device: str, seed: int = 0) -> tuple[torch.device, Row]:
    """Begin a job in its process: threads, random numbers, settings; the device, and the settings that were chosen."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    on = torch.device(device)
    return on, choose_settings(on)


def measure_gemm(dtype: str, threads: int, device: str, size: int | None = None) -> Iterator[Row]:
    """Operations per second of a large square matmul, by the clock that is compared: the best of seven."""
    on, _ = set_up(threads, device)
    watch = Stopwatch(on)
    size = size or (2048 if device == "cpu" else 8192)
    a, b = (torch.randn(size, size, device=on, dtype=getattr(torch, dtype)) for _ in range(2))
    for _ in range(8):
        with watch.running():
            torch.mm(a, b)
    yield {"flops": 2e3 * size**3 / min(watch.compared()[1:])}


def peak_flops(dtype: str, threads: int, device: str) -> Row:
    """What utilisation is measured against: the data sheet's rate of a GPU, else that of a large matmul here."""
    if device == "cuda":
        for name, rates in DATA_SHEET.items():
            if name in torch.cuda.get_device_name() and dtype in rates:
                return {"peak_flops": rates[dtype], "peak_flops_from": f"data sheet of {name}"}
    answer = in_own_process("gemm", {"dtype": dtype, "threads": threads, "device": device})
    return {"peak_flops": answer.get("flops"), "peak_flops_from": "measured GEMM"}


class Worker:
    """`JOBS[job](**arguments)` in a process of its own: a generator that goes on when it is told.

    It is started at once, so that several can import together, and does nothing before `ask`."""

    def __init__(self, job: str, arguments: Row):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lineartime.benchmark"], env={**os.environ, "PYTHONPATH": path}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.failed: Row | None = None
        self.first: Row = {"job": job, **arguments}

    def ask(self, order: Row | None = None) -> Row:
        """The next answer to an order; {"failed": why} where the process has died, and from then on."""
        if self.failed is None:
            assert self.process.stdin is not None and self.process.stdout is not None
            line = ""
            with suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps({**self.first, **(order or {})}) + "\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
            self.first = {}
            answer = json.loads(line) if line.endswith("\n") else {"failed": self.why()}
            if "failed" not in answer:
                return answer
            self.failed = answer
        return self.failed

    def why(self) -> str:
        """The reason for which the process ended."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "killed, most likely for want of memory"
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[-1] if lines else f"exit code {code}"

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def in_own_process(job: str, arguments: Row) -> Row:
    """The first answer of `JOBS[job](**arguments)` in a fresh Python; {"failed": why} where it dies."""
    worker = Worker(job, arguments)
    try:
        return worker.ask()
    finally:
        worker.close()


def measured_alone(job: str, arguments: Row, what: str, where: str) -> Row:
    """As `in_own_process`; raises ResourceError(what, where, why) where it dies."""
    answer = in_own_process(job, arguments)
    if "failed" in answer:
        raise ResourceError(what, where, answer["failed"])
    return answer
