"""The process: its device, precision and C allocator, its memory, and the signals that stop it."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from lineartime.base.errors import Stopped
from lineartime.base.ranks import ALONE, Ranks, gather, launched
from lineartime.base.settings import require
from lineartime.base.words import Progress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of mallopt(3)


def choose_settings(device: torch.device, *, give_back: bool = False) -> dict[str, str]:
    """Set float32 precision and, on a CPU, the allocator; returns both settings in words. float32
    matmuls stay float32: "high" would allow TF32 or sums of bfloat16."""
    torch.set_float32_matmul_precision("highest")
    allocator = {"allocator": choose_allocator(give_back)} if device.type == "cpu" else {}
    return {"float32_matmul": "highest", **allocator}


def pick_device(device: torch.device | str | None = None, *, give_back: bool = False) -> torch.device:
    """The device `device` ("cpu" or "cuda"), by default cuda if available, with `choose_settings`
    done; each of several processes on a machine has its own GPU. Raises UsageError for an unknown
    or missing device, and for more processes than GPUs."""
    name = device.type if isinstance(device, torch.device) else device
    require(name in (None, "cpu", "cuda"), "unknown device", str(name), "one of cpu, cuda")
    require(name != "cuda" or torch.cuda.is_available(), "no such device here", "cuda", "use --device cpu")
    picked = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if picked.type == "cuda" and launched().size > 1:
        local = int(os.environ.get("LOCAL_RANK", 0))
        require(local < torch.cuda.device_count(), "more processes than GPUs on this machine",
                f"{torch.cuda.device_count()} GPUs", "lower --nproc-per-node, or use --device cpu")
        picked = torch.device("cuda", local)
        torch.cuda.set_device(picked)
    choose_settings(picked, give_back=give_back)
    return picked


def choose_allocator(give_back: bool = False) -> str:
    """Make glibc's malloc keep freed tensors of up to 32 MiB, its maximum; returns what is chosen.

    By default malloc returns them to the system, which clears and maps their pages anew at every
    step. Larger tensors always go back: holes between them would waste more. With `give_back`, and
    under `ulimit -v`, every tensor from 1 MiB on goes back and all threads share one heap: steps
    take longer, but holes and the 64 MiB of addresses per thread heap are saved."""
    libc = ctypes.CDLL(None)
    if not sys.platform.startswith("linux") or not hasattr(libc, "gnu_get_libc_version"):
        return "as it is"
    if give_back or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        chosen, wanted = "gives back", ((M_MMAP_THRESHOLD, 2**20), (M_ARENA_MAX, 1))
    else:
        chosen, wanted = "keeps up to 32 MiB", ((M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**31 - 1))
    return chosen if all([libc.mallopt(name, value) == 1 for name, value in wanted]) else "as it is"


def available_bytes() -> int | None:
    """Memory that processes can have without swapping, at most the limits of this process and of
    its container (cgroup v2); None on other systems than Linux."""
    free = system_bytes("/proc/meminfo", "MemAvailable")
    if free is None:
        return None
    limits = [free, resource.getrlimit(resource.RLIMIT_AS)[0]]
    with suppress(OSError, ValueError):  # a number, or "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)


def system_bytes(path: str, name: str) -> int | None:
    """N of a line `name: N kB` in a file of the system, in bytes; None without the file or line."""
    with suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of the process on a CPU, of tensors on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    # On Linux not `ru_maxrss`, which starts at the parent's.
    return system_bytes("/proc/self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class StopSignal:
    """The first SIGTERM or SIGINT requests a stop at a safe moment; the second ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    def check(self, note: str) -> None:
        """Raise Stopped, with `note`, if a stop was requested."""
        if self.number is not None:
            name = signal.Signals(self.number).name
            raise Stopped(f"stopped by {'Ctrl-C (SIGINT)' if name == 'SIGINT' else name}", note, self.number)

    def agree(self, ranks: Ranks) -> bool:
        """Whether any rank was asked to stop: one answer for all. Later signals count next time."""
        # The largest number of a signal is the same on all ranks, and 0 if no rank was asked.
        number = int(gather(torch.tensor(self.number or 0), ranks).max())
        self.number = number or self.number
        return number > 0

    def watch(self, note: str, progress: Progress | None, what: str, total: int | None,
              ranks: Ranks = ALONE) -> Callable[[int], None]:
        """A callback that reports a count to `progress`, or raises Stopped. All ranks call it."""
        def counted(done: int) -> None:
            if progress is not None:
                progress(what, done, total)
            if self.agree(ranks):
                self.check(note)

        return counted

    @contextmanager
    def listening(self, tell: Callable[[str], None] = lambda name: None) -> Iterator["StopSignal"]:
        """Handle the signals in the block; their handler calls tell with the name of the first."""
        def asked(number: int, frame: FrameType | None) -> None:
            if self.number is not None:
                return
            self.number = number
            tell(signal.Signals(number).name)
            time.sleep(0.1)  # programs such as `timeout` send the same signal twice
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)

        with ExitStack() as at_end:
            for each in (signal.SIGTERM, signal.SIGINT):
                at_end.callback(signal.signal, each, signal.signal(each, asked))
            yield self
