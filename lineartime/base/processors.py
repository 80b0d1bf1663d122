"""How this process shares the processors. Imports no torch, which reads GOMP_SPINCOUNT."""

import ctypes
import os
import struct

SPINS = "1000"  # how often a thread of PyTorch looks for the others before it sleeps; libgomp has 300,000
SLICE_NS = 100_000  # Nanoseconds for which a thread asks to run; Linux gives 1 to 3 ms. It runs sooner, not longer.
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of a call for which glibc before 2.41 has no function


def share_processors() -> None:
    """Let threads wait for each other without holding up a busy machine; call before torch loads.

    The threads of an op wait for the last of them, which on a busy machine has often lost its
    processor; threads that spin take the time that it needs. So waiting threads soon sleep, unless
    GOMP_SPINCOUNT or OMP_WAIT_POLICY is set; and with short time slices, which need Linux 6.12, a
    thread runs at once when it is woken. docs/speed.md says what this gains."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    number = SCHED_SETATTR.get(os.uname().machine) if hasattr(os, "sched_getscheduler") else None
    if number and os.sched_getscheduler(0) == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)
