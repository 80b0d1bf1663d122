"""What every measurement shares: where a row comes from, the stopwatch, the spread, a process of its own.

Cells of a table are measured in turn, many times over, so that a machine that slows down slows all of them. The
processor time of the process stands beside the time on the clock: on a CPU, other programs disturb it less.
"""

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lineartime.errors import ResourceError

ROOT = Path(__file__).resolve().parents[2]

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


def clock_of(row: Row) -> str:
    """Which of the two times is compared: that of the processor on a CPU, else that of the clock."""
    return "cpu" if row["device"] == "cpu" else "wall"


def what_is_timed(row: Row) -> str:
    if row["device"] != "cpu":
        return f"{row['gpu']}, {row['dtype']}"
    return f"processor time, {row['threads']} thread{'s' if row['threads'] > 1 else ''}, {row['dtype']}"


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
