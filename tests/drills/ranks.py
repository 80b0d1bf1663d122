"""Runs of several ranks that are disturbed and go on, also with other numbers of ranks, to the same
bits. A disturbed launch ends in time, with the right exit codes and one line of error."""

import errno
import os
import resource
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from disk import disturbed
from drills import child, folders
from drills.child import Ended

MODES: dict[str, dict[str, object]] = {
    "whole": {}, "bfloat16": {"precision": "bfloat16"}, "sharded": {"shard": "true", "clip_scope": "global"},
    "shared rows": {"context_parallel": 2}, "muon": {"optimizer": "muon"}}
EVERY = [(2, 2), (3, 3), (4, 3), (2, 5)]  # save_every and eval_every
TIMEOUT_S, CALM_S = 5, 60  # `--rank-timeout` of a disturbed launch, and of another
CODES = {"signal": {7}, "request": {143, 130, 7}, "change": {7}, "fails": {6, 7}, "full": {6, 7}, "store": {6, 7}}
"""Kinds of faults, and exit codes of ranks that no signal has ended."""


class Fault(NamedTuple):
    """port: who has it: "agent" holds the store, as torchrun does, or "rank 0" may take it."""

    n_ranks: int
    kind: str = ""
    victims: tuple[int, ...] = ()
    number: int = 0  # a signal, for the victims or the process that holds the store
    seconds: float = 0.0  # when it is sent, from the start
    disk: dict[str, Any] | None = None  # of the victims, see `Disk`
    limit: int | None = None  # bytes of a victim's files
    port: str = "agent"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items()
                        if value != Fault._field_defaults.get(name))


def draw(random: Random, seconds: float, changes: int) -> Fault:
    """A fault. seconds, changes: of the disk, in an undisturbed launch."""
    n = random.choice([2, 2, 2, 4])
    kind = random.choice(["signal", "signal", "signal", *CODES])
    one = (random.randrange(n),)
    port = random.choice(["agent", "agent", "rank 0"])
    when = random.random() * seconds * random.choice([1, 1, 0.2])  # while they connect
    if kind == "signal":
        return Fault(n, kind, one, random.choice([signal.SIGKILL, signal.SIGSTOP]), when, port=port)
    if kind == "request":
        asked = random.choice([one, tuple(range(n))])
        return Fault(n, kind, asked, random.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT]), when, port=port)
    if kind == "store":
        return Fault(n, kind, (), random.choice([signal.SIGKILL, signal.SIGSTOP]), when)
    if kind == "full":
        return Fault(n, kind, random.choice([one, tuple(range(n))]), limit=random.randrange(20_000), port=port)
    victim = random.choice([0, *one])  # the first changes more
    disk: dict[str, Any] = {"at": random.randint(1, changes if victim == 0 else max(changes // 4, 1))}
    disk |= {"number": signal.SIGKILL} if kind == "change" else {
        "error": random.choice([errno.ENOSPC, errno.EIO]), "stays": True}
    return Fault(n, kind, (victim,), disk.get("number", 0), disk=disk, port=port)


def rank(number: int, port: int, given: list[str], fault: Fault, out: Path) -> Callable[[], object]:
    def call() -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(fault.n_ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "TORCHELASTIC_USE_AGENT_STORE": str(fault.port == "agent")}
        child.verb(given)()

    return disturbed(call, out, **fault.disk) if fault.disk and number in fault.victims else call


def hold(port: str) -> Callable[[], object]:
    def call() -> None:
        from torch.distributed import TCPStore

        if port == "agent":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            print(store.port, flush=True)
            signal.pause()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            print(listener.getsockname()[1], flush=True)

    return call


def launch(made: Path, folder: Path, mode: str, every: tuple[int, int], fault: Fault,
           around: Callable[[Callable[[], object]], Callable[[], object]] = lambda do: do) -> list[Ended]:
    out = folder / "out"
    changes = {"steps": 12, "micro_batch_tokens": 32, "save_every": every[0], "eval_every": every[1], **MODES[mode]}
    given = folders.train(made / "data", out, **changes)
    given += ["--rank-timeout", str(TIMEOUT_S if fault.kind else CALM_S)]
    if fault.n_ranks == 1:
        return [child.run(child.verb(given), folder)]
    holder = child.start(hold(fault.port), folder)
    select.select([holder.out], [], [], child.SECONDS)
    port, began = int(os.read(holder.out, 100)), time.monotonic()
    if fault.port == "rank 0":
        child.wait(holder)
    limits = {} if fault.limit is None else {resource.RLIMIT_FSIZE: fault.limit}
    children = []
    for number in range(fault.n_ranks):
        do = rank(number, port, given, fault, out)
        children.append(child.start(do if number else around(do), folder, child.Streams(
            limits=limits if number in fault.victims else {})))
    if fault.seconds:
        time.sleep(max(fault.seconds - (time.monotonic() - began), 0))
        for pid in [children[number].pid for number in fault.victims] or [holder.pid]:
            child.send(pid, fault.number)
    stopped = fault.victims if fault.number == signal.SIGSTOP else ()
    ended = {}
    for number in sorted(range(fault.n_ranks), key=lambda number: number in stopped):
        if number in stopped:  # all others have ended
            child.send(children[number].pid, signal.SIGKILL)
        ended[number] = child.wait(children[number])
    if fault.port != "rank 0":
        child.send(holder.pid, signal.SIGKILL)
        child.wait(holder)
    return [ended[number] for number in range(fault.n_ranks)]


def wrong(fault: Fault, ended: list[Ended]) -> tuple[str, str] | None:
    struck = {-fault.number, -signal.SIGKILL} if fault.number == signal.SIGSTOP else {-fault.number}
    others = [each for number, each in enumerate(ended) if not (number in fault.victims and each.code in struck - {0})]
    said = "\n".join(f"rank {number} ends in {each.code}: {each.err[-400:]}" for number, each in enumerate(ended))
    for each in others:
        verdict = child.misbehaviour(each._replace(code=0))
        if verdict or each.code not in {0} | CODES[fault.kind]:
            return verdict or "code", said
    failed = [each.code for each in others if each.code]
    lines = sum(child.last_words(each.err) for each in ended)
    most = 1 if fault.port == "agent" and fault.kind != "store" else fault.n_ranks
    if not bool(failed) <= lines <= most:
        return "noisy", said
    return ("code", said) if failed and fault.kind in ("fails", "full") and 6 not in failed else None


@cache
def calm(made: Path, folder: Path, mode: str, every: tuple[int, int]) -> tuple[dict[str, Any], set[str], float, int]:
    """The state and the names that one process leaves, and the seconds and changes of the disk of
    two ranks, which leave the same."""
    from ranks_here import differences, state_of

    def run(n_ranks: int) -> float:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.monotonic()
        ended = launch(made, folder, mode, every, Fault(n_ranks),
                       lambda do: disturbed(do, folder / "out", folder / "changes"))
        assert not any(each.code for each in ended), ended
        return time.monotonic() - began

    run(FEWEST.get(mode, 1))
    state = state_of(folder / "out")
    seconds = run(2)
    assert not differences(folder / "out", state)
    return state, names(folder / "out"), seconds, int((folder / "changes").read_text())


FEWEST = {"shared rows": 2}  # processes that a run has at least, if not 1


def names(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()} - {path.name for path in out.glob("step-*")} - {"sample.txt"}


def trial(made: Path, folder: Path, random: Random) -> dict[str, object]:
    from ranks_here import differences

    mode, every = random.choice([*MODES]), random.choice(EVERY)
    state, expected, seconds, changes = calm(made, folder, mode, every)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    told = [f"save_every, eval_every = {every}"]

    def result(verdict: str, message: str = "") -> dict[str, object]:
        return {"verdict": verdict, "what": f"{mode} run", "how": "; ".join(told), "message": message}

    for _ in range(random.choice([1, 1, 2, 3])):
        fault = draw(random, seconds, changes)
        told.append(str(fault))
        if found := wrong(fault, launch(made, folder, mode, every, fault)):
            return result(*found)
    last = Fault(random.choice([FEWEST.get(mode, 1), 2, 2, 4]))
    told.append(str(last))
    ended = launch(made, folder, mode, every, last)
    if any(each.code for each in ended):
        return result("lost", "\n".join(f"the last launch ends in {each.code}: {each.err[-400:]}" for each in ended))
    if different := differences(folder / "out", state):
        return result("lost", ", ".join(different)[:600])
    more = names(folder / "out") - expected
    return result("leftover" if more else "ok", ", ".join(sorted(more)))
