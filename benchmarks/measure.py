"""How everything is measured: side by side, each case in a process of its own.

The cases take turns, many times over, so that a machine that slows down slows all of them. The
processor time of a process stands beside the time on the clock: other programs disturb it less."""

import ctypes
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import Row
from benchmarks.provenance import append_json_lines, provenance, rows_in
from lineartime.base.errors import LineartimeError
from lineartime.base.settings import PRECISIONS, require, require_name
from lineartime.training.loop import out_of_memory
from lineartime.training.runtime import available_bytes, choose_settings, peak_bytes, system_bytes

Progress = Callable[[str], None]  # is told in a line what is measured next
Job = Callable[..., Generator[Row, Row, None]]
"""A generator that runs in a process of its own: each answer after the first is for an order."""


class Setup(NamedTuple):
    """How often is measured, on which device, with how many threads, who hears of progress."""

    repeats: int = 5
    threads: int = 1
    device: str = "cpu"
    progress: Progress = lambda _: None

    @property
    def place(self) -> Row:
        return {"threads": self.threads, "device": self.device}


class Case(NamedTuple):
    """What is measured in a process of its own, and has a row of its own."""

    job: Job
    """Its first answer has the row's "settings", and perhaps "check". An order then says whether a
    call is "timed", how many come before it ("warm"), and whether to give back the memory after it
    ("release"); the answer has the "times" of all timed calls so far, and more of the row."""
    arguments: Row
    row: Row  # the columns that are known before: label, context_tokens, dtype, ...
    n_tokens: int  # of a timed call
    first: Callable[[], Row] = dict
    """More arguments of the job, made when the case is checked; or {"failed": why}."""


def side_by_side(cases: Sequence[Case], benchmark: str, setup: Setup, warm_up: int, *,
                 hold: bool | None = None) -> list[Row]:
    """Check every case, then let those that passed take turns; a row for each, with "failed" and no
    times where a case did not pass or its process died. hold: whether a process keeps its memory
    between its turns, and an untimed round comes first; by default where there is enough."""
    # All processes import at once, and wait to be asked.
    workers = [Worker(case.job, case.arguments) for case in cases]
    try:
        answers = []
        for case, worker in zip(cases, workers, strict=True):
            more, row = case.first(), case.row
            setup.progress(f"{row['label']}, context {row['context_tokens']:,}, {row['dtype']}: warm-up")
            answers.append(more if "failed" in more else worker.ask(more))
        alive = [i for i, answer in enumerate(answers) if "failed" not in answer]
        if hold is None:
            needed = sum(answers[i]["above_import_mib"] for i in alive) * 2**20
            hold = needed < 0.8 * (available_bytes() or 0)
        for i in alive:
            answers[i]["settings"]["between_steps"] = "keeps memory" if hold else "gives memory back"
        # Who gives its memory back has to warm up before each turn instead.
        for number in range(-1 if hold else 0, setup.repeats):
            setup.progress(f"round {number + 1} of {setup.repeats}")
            for i in alive[:: -1 if number % 2 else 1]:  # so that no case always follows the same one
                answer = workers[i].ask({"warm": 0 if hold else 1, "release": not hold, "timed": number >= 0})
                answers[i] = answer if "failed" in answer else answers[i] | answer
    finally:
        for worker in reversed(workers):
            worker.close()
    shared = {"benchmark": benchmark, "cell": None, "run": uuid.uuid4().hex[:12], "warm_up": warm_up,
              "repeats": setup.repeats, "threads": setup.threads, "device": setup.device, **provenance()}
    return [case.row | ({"failed": answer["failed"]} if "failed" in answer else
                        answer | spreads(answer.pop("times"), case.n_tokens)) | shared
            for case, answer in zip(cases, answers, strict=True)]


def add_missing(path: Path, key: Row, command: str, made: Callable[[], Row]) -> Row:
    """The newest row of a file with these columns; where there is none, it is made and appended.
    made: its other columns. Raises DataError and ResourceError, and as `made`."""
    for row in reversed(rows_in(path)):
        if key.items() <= row.items():
            return row
    began = time.process_time()
    row = key | made() | {"seconds": round(time.process_time() - began, 1), **provenance(), "command": command}
    append_json_lines(path, [row])
    return row


def require_measurable(precisions: Iterable[str] = (), **counts: int) -> None:
    """Raise UsageError for an unknown type, and where a number is below 1."""
    for precision in precisions:
        require_name("precision", precision, PRECISIONS)
    require(min(counts.values()) >= 1, "nothing to measure",
            ", ".join(f"{name} = {count:,}" for name, count in counts.items()), "they take whole numbers from 1")


def peak_since(before: int, device: torch.device) -> Row:
    """A row's memory: the most there has been, in all and above the bytes there were before."""
    peak = peak_bytes(device)
    return {"peak_mib": peak / 2**20, "above_import_mib": max(peak - before, 0) / 2**20}


Times = dict[str, list[float]]
"""Milliseconds by the name of their clock: "wall_ms", "cpu_ms" of the process and "gpu_ms"."""
Mark = tuple[float, float, torch.cuda.Event | None]
"""Milliseconds of the clock and of the processor, and a GPU's event."""


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device, *, done: bool = False) -> Mark:
    """What the clocks say; done: when a GPU has done what it was given."""
    event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
    if event is not None:
        event.record()
    if done:
        wait(device)
    return time.perf_counter() * 1e3, time.process_time() * 1e3, event


def add_times(times: Times, marks: Sequence[Mark]) -> None:
    """Add the time from each mark to the next, when a GPU has done all of it."""
    for (wall, cpu, event), (wall_after, cpu_after, event_after) in itertools.pairwise(marks):
        passed = {"wall_ms": wall_after - wall, "cpu_ms": cpu_after - cpu}
        if event is not None and event_after is not None:
            passed["gpu_ms"] = event.elapsed_time(event_after)
        for clock, ms in passed.items():
            times.setdefault(clock, []).append(ms)


def take_turn(call: Callable[[], Any], order: Row, times: Times, device: torch.device) -> Any:
    """Call a function as an order says, see `Case`; returns what the last call gave."""
    for timed in [False] * order["warm"] + [order["timed"]]:
        wait(device)
        before = mark(device)
        answer = call()
        add_times(times if timed else {}, [before, mark(device, done=True)])
    return answer


def spreads(times: Mapping[str, Sequence[float]], n_tokens: int) -> Row:
    """A row's columns of time: the spread of each clock; "clock", the one that is compared (the
    GPU's, else the processor's); and by it "tokens_per_s". n_tokens: of a call."""
    clock, found = "gpu" if "gpu_ms" in times else "cpu", {name: spread(each) for name, each in times.items()}
    return found | {"clock": clock, "tokens_per_s": n_tokens * 1e3 / found[f"{clock}_ms"]["median"]}


def spread(values: Sequence[float]) -> Row:
    low, middle, high = (statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3)
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values), "n": len(values)}


def print_rows(rows: Sequence[Row]) -> None:
    first = rows[0]
    timed = f"processor time, threads: {first['threads']}" if first["device"] == "cpu" else first["gpu"]
    print(f"{first['benchmark']}: time of a {first['unit']}, {timed}; {first['repeats']} rounds, run {first['run']}")
    for row in rows:
        what = f"{row['label']:<36} {row['dtype']:<9} context {row['context_tokens']:,} {row.get('context', '')}"
        if "failed" in row:
            print(f"{what} failed: {row['failed']}")
            continue
        ms, memory = row[f"{row['clock']}_ms"], f", peak {row['peak_mib']:,.0f} MiB" if "peak_mib" in row else ""
        print(f"{what}  {ms['median']:,.2f} ms ({ms['q1']:,.2f} to {ms['q3']:,.2f}), "
              f"{row['tokens_per_s']:,.0f} tokens/s{memory}")


def set_up(threads: int, device: str) -> tuple[torch.device, Row, int]:
    """Begin a job in its process; the device, the settings that were chosen, and on a processor the
    bytes that the process has so far, if the system is Linux."""
    imported = (system_bytes("/proc/self/status", "VmRSS") or 0) * (device == "cpu")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    on = torch.device(device)
    return on, choose_settings(on), imported


class Worker:
    """A job in a process of its own, which starts at once, so that several import together."""

    def __init__(self, job: Job, arguments: Row):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, job, arguments))
        self.process.start()
        theirs.close()
        self.failed: Row | None = None

    def ask(self, order: Row | None = None) -> Row:
        """The next answer; {"failed": why} after its death. The first order adds arguments."""
        if self.failed is not None:
            return self.failed
        try:
            self.pipe.send(order or {})
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            killed, code = "killed, most likely for want of memory", self.process.exitcode
            answer = {"failed": killed if code == -signal.SIGKILL else f"exit code {code}"}
        if "failed" in answer:
            self.failed = answer
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe: Connection, job: Job, arguments: Row) -> None:
    """A worker's process: send what the job yields, when it is asked, or why it failed."""
    os.dup2(2, 1)  # what a library prints is no result
    try:
        answers = job(**arguments, **pipe.recv())
        pipe.send(next(answers))
        while True:
            pipe.send(answers.send(pipe.recv()))
    except (EOFError, StopIteration):  # nobody asks any more, or there is no more to say
        return
    except LineartimeError as e:
        pipe.send({"failed": str(e)})
    except Exception as e:
        pipe.send({"failed": "out of memory" if out_of_memory(e) else f"{type(e).__name__}: {e}".splitlines()[0]})


def release_memory(device: torch.device) -> None:
    """Return the allocator's unused memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
