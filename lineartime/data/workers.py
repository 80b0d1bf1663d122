"""Processes that do the shares of `prepare` on this machine, so that all cores work.

A worker is a program of its own, `python -m lineartime.data.workers STEP WORK NUMBER OF`. It is no fork, because the
caller may have threads; and not one of `multiprocessing`, which would run the caller's script again in each. It prints
the number of each task that it has done, and at last its error, if there is one, as JSON."""

import builtins
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lineartime import errors
from lineartime.data import shares
from lineartime.data.files import Name
from lineartime.errors import LineartimeError, ResourceError


def run_shares(step: str, work: Name, n_workers: int, done: Callable[[int], None]) -> None:
    """Do a step of `shares`, "check" or "encode", in so many processes; with one it is this process. `done` is told the
    number of each task that is done.

    Raises the first error of a process, and ResourceError for one that dies. All end with this function."""
    if n_workers <= 1:
        getattr(shares, step)(work, done=done)
        return
    workers = [_started(step, str(work), number, n_workers) for number in range(n_workers)]
    lines: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()

    def listen(number: int) -> None:
        for line in workers[number].stdout or ():
            lines.put((number, line))
        lines.put((number, b""))  # it has ended

    threads = [threading.Thread(target=listen, args=(number,), daemon=True) for number in range(n_workers)]
    for thread in threads:
        thread.start()
    try:
        n_running = n_workers
        while n_running:
            number, line = lines.get()
            if line.startswith(b"{"):
                raise _error_of(json.loads(line))
            if line:
                done(int(line))
                continue
            n_running -= 1
            if workers[number].wait():
                raise ResourceError("a process that tokenises has died", f"exit code {workers[number].returncode}",
                                    "where memory was short use fewer --jobs; the same command goes on")
    finally:
        for worker, thread in zip(workers, threads, strict=True):
            worker.kill()
            thread.join()
            with worker:  # its pipes are closed
                pass


def _started(step: str, work: str, number: int, of: int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false",
                                "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    arguments = [sys.executable, "-P", "-m", "lineartime.data.workers", step, work, str(number), str(of)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                            process_group=0)  # an interrupt from the keyboard is for the caller alone


def _error_of(fields: dict[str, Any]) -> BaseException:
    """The error that a process has printed."""
    kind = fields["kind"]
    return (getattr(errors, kind, None) or getattr(builtins, kind))(*fields["arguments"])


def _described(e: Exception) -> dict[str, Any]:
    """What makes an error again in the caller's process: the name of its class, and its arguments."""
    if isinstance(e, LineartimeError):
        return {"kind": type(e).__name__, "arguments": [e.what, e.where and str(e.where), e.todo]}
    if isinstance(e, OSError):
        return {"kind": "OSError", "arguments": [e.errno, e.strerror, e.filename and str(e.filename)]}
    if isinstance(e, MemoryError):
        return {"kind": "MemoryError", "arguments": []}
    return {"kind": "RuntimeError", "arguments": [traceback.format_exc()]}


def main(step: str, work: str, number: str, of: str) -> None:
    """Do one share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer

    def end_with_the_caller() -> None:
        os.read(0, 1)  # nothing comes; it ends when the caller does
        os._exit(1)

    threading.Thread(target=end_with_the_caller, daemon=True).start()
    try:
        getattr(shares, step)(work, int(number), int(of), done=lambda index: print(index, file=answers))
    except Exception as e:
        print(json.dumps(_described(e)), file=answers)
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
