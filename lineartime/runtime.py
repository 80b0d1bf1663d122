"""The process: settings that speed depends on, chosen by the program and kept with every measurement; its memory."""

import ctypes
import logging
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch

from lineartime.errors import UsageError

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Names of `mallopt(3)`."""

PR_SET_PDEATHSIG = 1
"""Of `prctl(2)`."""


def choose_settings(device: torch.device) -> dict[str, str]:
    """Choose float32 precision and the allocator's habits for `device`; returns what was chosen, for people and rows.

    float32 products stay float32 products: "high" would make them TF32 or sums of bfloat16 where the hardware has
    those. On a CPU with glibc, tensors of up to 32 MiB come from a heap that is kept: otherwise they go back to the
    system when they are freed, and each of their pages is cleared and mapped again, step after step. Larger ones come
    from the system and go back to it, for in a heap the holes between them would take more than they do."""
    torch.set_float32_matmul_precision("highest")
    chosen = {"float32_matmul": "highest"}
    if device.type == "cpu":
        chosen["allocator"] = choose_allocator()
    return chosen


def pick_device(device: torch.device | str | None = None, *, tell: bool = False) -> torch.device:
    """The device asked for ("cpu" or "cuda"), else cuda where there is one, with the process set up for it (see
    `choose_settings`); tell: a line of the log says how. Raises UsageError for one that is not there."""
    name = device.type if isinstance(device, torch.device) else device
    if name not in (None, "cpu", "cuda"):
        raise UsageError("unknown device", name, "one of cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("no such device here", name, "use --device cpu")
    picked = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = choose_settings(picked)
    if tell:
        logger.info(f"on {picked.type}: " + ", ".join(f"{what} {how}" for what, how in chosen.items()))
    return picked


def choose_allocator() -> str:
    """Tell glibc's malloc to serve tensors of up to 32 MiB, the most it takes, from a heap that never shrinks; what was
    chosen, in words.

    Where the process may have only so much memory (`ulimit -v`) holes in a heap count, and so do the 64 MiB of
    addresses that each thread's own heap begins with: there threads share one, and a tensor goes back when it is freed.
    Left to itself malloc keeps more and more, depending on what was freed before."""
    libc = ctypes.CDLL(None)
    if not sys.platform.startswith("linux") or not hasattr(libc, "gnu_get_libc_version"):
        return "as it is"
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        chosen, wanted = "gives back", ((M_MMAP_THRESHOLD, 2**20), (M_ARENA_MAX, 1))
    else:
        chosen, wanted = "keeps up to 32 MiB", ((M_MMAP_THRESHOLD, 32 * 2**20), (M_TRIM_THRESHOLD, 2**31 - 1))
    return chosen if all([libc.mallopt(name, value) == 1 for name, value in wanted]) else "as it is"


def rss_bytes(name: str = "VmRSS") -> int | None:
    """What Linux says of this process's memory; None where it does not."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None


def peak_rss_bytes() -> int:
    """The most memory this process has had at once. On Linux not `ru_maxrss`, which starts from the parent's."""
    peak = rss_bytes("VmHWM")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(device: torch.device) -> int:
    """The most memory there has been at once: of the process on a CPU, of tensors on a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss_bytes()


def forget_peak(device: torch.device) -> None:
    """Let the peak begin again from the memory now held; where a system cannot, it stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def release_memory(device: torch.device) -> None:
    """Give back what the allocator keeps, so that other processes can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when the one that started it is gone, however that ended: for a process
    that would else hold its run's lock."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
