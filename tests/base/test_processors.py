"""A process that shares the processors: what it sets before torch is loaded."""

import ctypes
import os
import struct
import threading

import pytest

from lineartime.base.processors import SLICE_NS, SPINS, share_processors

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


@pytest.mark.parametrize(("set_before", "spins"), [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"),
                                                   ({"OMP_WAIT_POLICY": "active"}, None)])
def test_threads_spin_briefly_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch,
                                                             set_before: dict[str, str], spins: str | None) -> None:
    monkeypatch.setattr(os, "environ", dict(set_before))
    monkeypatch.delattr(os, "sched_getscheduler", raising=False)
    share_processors()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler") or os.uname().machine not in SCHED_GETATTR,
                    reason="slices are of Linux")
def test_a_thread_asks_for_short_slices_and_keeps_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own: the choice holds for its thread and those that it starts."""
    monkeypatch.setenv("GOMP_SPINCOUNT", SPINS)
    seen: list[tuple[int, ...]] = []

    def choose() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        share_processors()
        attributes = ctypes.create_string_buffer(56)
        assert ctypes.CDLL(None).syscall(SCHED_GETATTR[os.uname().machine], 0, attributes, 56, 0) == 0
        seen.append(struct.unpack_from("IIQiIQ", attributes))

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    (_, policy, _, nice, _, slice_ns), = seen
    assert (policy, nice) == (os.SCHED_OTHER, 5)
    assert slice_ns in (SLICE_NS, 0)  # 0: a kernel before 6.12, which has no slices to choose
