"""Settings of the process that speed depends on: chosen by the program, printed, and stored with every measurement."""

import ctypes
import resource
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
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
        chosen["allocator"] = choose_allocator()
    return chosen


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
