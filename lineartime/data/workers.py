"""Processes that tokenise the shares of `prepare` on this machine, so that all cores work.

A worker is a program of its own, `python -m lineartime.data.workers WORK NUMBER OF`. It is no fork, because the caller
may have threads; and not one of `multiprocessing`, which would run the caller's script again in each. It prints the
number of each unit that it has done, or the words of an error of the system."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from lineartime.atomic_io import system_errors
from lineartime.data.files import Name
from lineartime.data.shares import encode
from lineartime.errors import ResourceError


def encode_all(work: Name, n_workers: int, done: Callable[[int], None]) -> None:
    """Tokenise all units in so many processes; with one it is this process. `done` is told the number of each unit that
    is done.

    Raises ResourceError for an error of the system, and for a process that dies. The processes end with this call."""
    if n_workers <= 1:
        encode(work, done=done)
        return
    workers = [_started(str(work), number, n_workers) for number in range(n_workers)]
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
            if line.startswith(b"["):
                raise ResourceError(*json.loads(line))
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


def _started(work: str, number: int, of: int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false",
                                "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    arguments = [sys.executable, "-P", "-m", "lineartime.data.workers", work, str(number), str(of)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                            process_group=0)  # an interrupt from the keyboard is for the caller alone


def main(work: str, number: str, of: str) -> None:
    """Do one share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer

    def end_with_the_caller() -> None:
        os.read(0, 1)  # nothing comes; it ends when the caller does
        os._exit(1)

    threading.Thread(target=end_with_the_caller, daemon=True).start()
    try:
        with system_errors(work):
            encode(work, int(number), int(of), lambda index: print(index, file=answers))
    except ResourceError as e:
        print(json.dumps([e.what, str(e.where), e.todo]), file=answers)
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
