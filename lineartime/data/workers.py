"""Processes that read, check and tokenise text, so that all cores work.

A worker is a program of its own (`python -m lineartime.data.workers`), one for each thread of a pool. It is no fork,
because the caller may have threads; and not one of `multiprocessing`, which would run the caller's script again in
each. It takes a pickled (function, arguments) and answers with (result, error); text and ids are in files."""

import contextlib
import os
import pickle
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

from lineartime.errors import LineartimeError, ResourceError

Run = Callable[..., Iterator[Any]]
"""Calls a function with each of some tuples of arguments, and yields the results in their order."""


@contextlib.contextmanager
def worker_pool(jobs: int) -> Iterator[Run]:
    """A function `run(function, arguments, few=False)` that works in at most `jobs` processes and yields the results in
    order. `few` says that the work is too small for other processes; it is then done here, as with one job or task.

    A process has one task at a time, so memory does not grow with their number. Of several errors the one of the first
    task is raised; ResourceError if a process dies. The processes end with the block."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(function: Callable[..., Any], arguments: list[tuple[Any, ...]], few: bool = False) -> Iterator[Any]:
        n_processes = 1 if few else min(jobs, len(arguments))
        if n_processes <= 1:
            yield from (function(*each) for each in arguments)
            return
        processes.extend(_started() for _ in range(n_processes - len(processes)))
        idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in processes:
            idle.put(process)

        def ask(each: tuple[Any, ...]) -> Any:
            process = idle.get()
            try:
                return _answer(process, (function, each))
            finally:
                idle.put(process)

        with ThreadPoolExecutor(n_processes) as pool:
            try:
                yield from pool.map(ask, arguments)
            except BaseException:  # nobody waits for the other tasks
                pool.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.kill()
                raise

    try:
        yield run
    finally:
        for process in processes:
            process.kill()
            with contextlib.suppress(BrokenPipeError), process:  # its pipes are closed
                pass


def _started() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false",
                                "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.Popen([sys.executable, "-P", "-m", "lineartime.data.workers"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, env=environment,
                            process_group=0)  # an interrupt from the keyboard is for the caller alone


def _answer(process: subprocess.Popen[bytes], task: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    """The result of a task. Raises its error, and ResourceError if the process has died."""
    assert process.stdin and process.stdout
    try:
        pickle.dump(task, process.stdin)
        process.stdin.flush()
        result, error = pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        raise ResourceError("a process that tokenises has died", f"exit code {process.wait()}",
                            "where memory was short use fewer --jobs; the same command goes on") from None
    if error is not None:
        kind, parts = error
        raise kind(*parts)
    return result


def _described(e: Exception) -> tuple[type[Exception], tuple[Any, ...]]:
    """What makes an error again in the caller's process: its class and arguments."""
    if isinstance(e, LineartimeError):
        return type(e), (e.what, e.where, e.todo)
    if isinstance(e, OSError):
        return OSError, (e.errno, e.strerror, e.filename)
    return (MemoryError, ()) if isinstance(e, MemoryError) else (RuntimeError, (traceback.format_exc(),))


def main() -> None:
    """Do the tasks that come on stdin, one after another, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    tasks: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(pickle.load(sys.stdin.buffer))
        os._exit(1)  # the caller is gone; a task that is being done is of no use

    threading.Thread(target=listen, daemon=True).start()
    while True:
        function, arguments = tasks.get()
        result = error = None
        try:
            result = function(*arguments)
        except Exception as e:
            error = _described(e)
        pickle.dump((result, error), answers)
        answers.flush()


if __name__ == "__main__":
    main()
