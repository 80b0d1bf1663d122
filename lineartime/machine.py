"""Settings of the process that speed depends on: chosen by the program, printed, and stored with every measurement."""

import ctypes
import resource
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of `mallopt(3)`."""


def choose_settings(device: torch.device) -> dict[str, str]:
    """Choose float32 precision and the allocator's habits for `device`; returns what was chosen, for people and rows.

    float32 products stay float32 products: "high" would make them TF32 or sums of bfloat16 where the hardware has
    those. On a CPU with glibc, tensors of up to 32 MiB come from a heap that is kept: otherwise they go back to the
    system when they are freed, and each of their pages is cleared and mapped again, step after step. Larger ones come
    from the system and go back to it, for in a heap the holes between them would take more than they do."""
    torch.set_float32_matmul_precision("highest")
    chosen = {"float32_matmul": "highest"}
    if device.type == "cpu":
        chosen["allocator"] = "keeps up to 32 MiB" if keep_freed_memory() else "as it is"
    return chosen


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to serve tensors of up to 32 MiB, the most it takes, from a heap that never shrinks; False
    where there is no glibc, or where the process may have only so much memory (`ulimit -v`), in which holes count."""
    if not sys.platform.startswith("linux") or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    wanted = ((M_MMAP_THRESHOLD, 32 * 2**20), (M_TRIM_THRESHOLD, 2**31 - 1))
    return all([libc.mallopt(name, value) == 1 for name, value in wanted])
