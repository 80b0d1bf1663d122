"""Processes that read, check and tokenise text, so that all cores work.

A worker is a program of its own (`python -m lineartime.data.workers`), one for each thread of a pool. It is no fork,
because the caller may have threads; and not one of `multiprocessing`, which would run the caller's script again in
each. It takes a line of JSON, the name of a function and its arguments, and answers with one, the result or the error;
text and ids are in files."""

import builtins
import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lineartime import errors
from lineartime.errors import LineartimeError, ResourceError

Run = Callable[..., Iterator[Any]]
"""Calls a function with each of some tuples of arguments, and yields the results in their order. Arguments and results
are as JSON has them: a tuple becomes a list."""
Worker = subprocess.Popen[bytes]


@contextlib.contextmanager
def worker_pool(jobs: int) -> Iterator[Run]:
    """A function `run(function, arguments, few=False)` that works in at most `jobs` processes and yields the results in
    order. `few` says that the work is too small for other processes; it is then done here, as with one job or task.

    A process has one task at a time, so memory does not grow with their number. Of several errors the one of the first
    task is raised; ResourceError if a process dies. The processes end with the block."""
    workers: list[Worker] = []

    def run(function: Callable[..., Any], arguments: list[tuple[Any, ...]], few: bool = False) -> Iterator[Any]:
        n_workers = 1 if few else min(jobs, len(arguments))
        if n_workers <= 1:
            yield from (as_json(function(*as_json(each))) for each in arguments)
            return
        workers.extend(_started() for _ in range(n_workers - len(workers)))
        idle, own = iter(workers), threading.local()  # each thread has a worker of its own

        def ask(each: tuple[Any, ...]) -> Any:
            return _answer(own.worker, [function.__module__, function.__name__, each])

        with ThreadPoolExecutor(n_workers, initializer=lambda: setattr(own, "worker", next(idle))) as pool:
            try:
                yield from pool.map(ask, arguments)
            except BaseException:  # nobody waits for the other tasks
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.kill()
                raise

    try:
        yield run
    finally:
        for worker in workers:
            worker.kill()
            with contextlib.suppress(BrokenPipeError), worker:  # its pipes are closed
                pass


def as_json(value: Any) -> Any:
    """A value as it is on the other side of a pipe."""
    return json.loads(json.dumps(value))


def _started() -> Worker:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false",
                                "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.Popen([sys.executable, "-P", "-m", "lineartime.data.workers"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, env=environment,
                            process_group=0)  # an interrupt from the keyboard is for the caller alone


def _answer(worker: Worker, task: list[Any]) -> Any:
    """The result of a task. Raises its error, and ResourceError if the process has died."""
    assert worker.stdin and worker.stdout
    try:
        worker.stdin.write(json.dumps(task).encode() + b"\n")
        worker.stdin.flush()
        result, error = json.loads(worker.stdout.readline())
    except (OSError, ValueError):  # the pipe is broken, or has no whole line
        raise ResourceError("a process that tokenises has died", f"exit code {worker.wait()}",
                            "where memory was short use fewer --jobs; the same command goes on") from None
    if error is not None:
        kind, parts = error
        raise (getattr(errors, kind, None) or getattr(builtins, kind))(*parts)
    return result


def _described(e: Exception) -> tuple[str, list[Any]]:
    """What makes an error again in the caller's process: the name of its class, and its arguments."""
    if isinstance(e, LineartimeError):
        return type(e).__name__, [e.what, e.where if e.where is None else str(e.where), e.todo]
    if isinstance(e, OSError):
        return "OSError", [e.errno, e.strerror, e.filename if e.filename is None else str(e.filename)]
    return ("MemoryError", []) if isinstance(e, MemoryError) else ("RuntimeError", [traceback.format_exc()])


def main() -> None:
    """Do the tasks that come on stdin, one after another, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            tasks.put(line)
        os._exit(1)  # the caller is gone; a task that is being done is of no use

    threading.Thread(target=listen, daemon=True).start()
    while True:
        module, name, arguments = json.loads(tasks.get())
        result = error = None
        try:
            result = getattr(importlib.import_module(module), name)(*arguments)
        except Exception as e:
            error = _described(e)
        answers.write(json.dumps([result, error]).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
