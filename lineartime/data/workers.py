"""Processes that read, check and tokenise text, so that all cores work.

A worker is a program of its own (`python -m lineartime.data.workers`) and not a fork: the caller may have threads, and
its main module is not imported again. It takes tasks and gives results as lines of JSON; text and ids are in files."""

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lineartime import errors
from lineartime.atomic_io import hash_of
from lineartime.data import corpora
from lineartime.data.read_text import read_pieces
from lineartime.data.splits import Reader, Source, check_source
from lineartime.data.units import Unit, encode_unit

Run = Callable[[list[dict[str, Any]], bool], Iterator[tuple[int, Any]]]
"""Takes tasks, and whether they are too small for other processes."""


def reader_of(reading: dict[str, Any]) -> Reader:
    """`read_pieces` with the field, the longest line and the converter of a task."""
    return functools.partial(read_pieces, field=reading["field"], max_line_bytes=reading["max_line_bytes"],
                             convert=corpora.converter(reading["task"]))


def do(task: dict[str, Any], kept: dict[str, Any], go_on: Callable[[], None] = lambda: None) -> Any:
    """The result of a task. kept: what one task leaves for the next. go_on is called often and may end the process."""
    if task["do"] == "hash":
        return hash_of(Path(task["path"]))
    reader = reader_of(task["reading"])
    if task["do"] == "check":
        source = Source(task["split"], task["name"], Path(task["path"]))
        return check_source(reader, source, task["slice_characters"], go_on)[1:]
    return encode_unit(Unit(**task["unit"]), reader, task["tokenizer"], Path(task["folder"]), kept, go_on)


@contextlib.contextmanager
def worker_pool(jobs: int) -> Iterator[Run]:
    """A function that does tasks in at most `jobs` processes and yields (number of the task, result), as they end.

    A single task is done in this process, and so is everything with one job. Each process has one task at a time, so
    memory does not grow with their number. Of several errors the one of the first task is raised, as its class;
    ResourceError if a process dies. The processes end with the block."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(tasks: list[dict[str, Any]], few: bool) -> Iterator[tuple[int, Any]]:
        n_processes = 1 if few else min(jobs, len(tasks))
        if n_processes <= 1:
            kept: dict[str, Any] = {}
            yield from ((number, do(task, kept)) for number, task in enumerate(tasks))
            return
        processes.extend(_started() for _ in range(n_processes - len(processes)))
        yield from _results(processes[:n_processes], tasks)

    try:
        yield run
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            with process:
                pass


def _started() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false",
                                "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-P", "-m", "lineartime.data.workers", str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0,
                            process_group=0)  # an interrupt from the keyboard is for this process alone


def _results(processes: Iterable[subprocess.Popen[bytes]], tasks: list[dict[str, Any]]) -> Iterator[tuple[int, Any]]:
    waiting = iter(enumerate(tasks))
    busy: dict[int, int] = {}
    failed: tuple[int, dict[str, Any]] | None = None
    with selectors.DefaultSelector() as selector:

        def give(process: subprocess.Popen[bytes]) -> None:
            number, task = next(waiting, (None, None))
            if number is None:
                return
            busy[process.pid] = number
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):  # what it leaves on stdout says more
                data = memoryview(json.dumps(task).encode() + b"\n")
                while data:
                    data = data[process.stdin.write(data):]

        for process in processes:
            assert process.stdout
            selector.register(process.stdout, selectors.EVENT_READ, process)
            give(process)
        while busy:
            for key, _ in selector.select():
                process = key.data
                reply = json.loads(_line(process))
                number = busy.pop(process.pid)
                if "error" in reply:
                    failed = min(failed or (number, reply), (number, reply), key=lambda each: each[0])
                else:
                    yield number, reply["result"]
                if failed is None:
                    give(process)
    if failed:
        raise _error(failed[1])


def _line(process: subprocess.Popen[bytes]) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = process.stdout.read(1 << 16)  # type: ignore[union-attr]
        if not data:
            raise errors.ResourceError("a process that tokenises has died", f"exit code {process.wait()}",
                                       "where memory was short use fewer --jobs; the same command goes on")
        line += data
    return bytes(line)


def _reply(e: BaseException) -> dict[str, Any]:
    if isinstance(e, errors.LineartimeError):
        where = None if e.where is None else str(e.where)
        return {"error": type(e).__name__, "arguments": [e.what, where, e.todo]}
    if isinstance(e, OSError):
        name = e.filename if e.filename is None else os.fsdecode(e.filename)
        return {"error": "OSError", "arguments": [e.errno, e.strerror, name]}
    if isinstance(e, MemoryError):
        return {"error": "MemoryError", "arguments": []}
    return {"error": "RuntimeError", "arguments": [traceback.format_exc()]}


def _error(reply: dict[str, Any]) -> BaseException:
    kinds: dict[str, Any] = {"OSError": OSError, "MemoryError": MemoryError, "RuntimeError": RuntimeError}
    return (kinds.get(reply["error"]) or getattr(errors, reply["error"]))(*reply["arguments"])


def main() -> None:
    """Do the tasks that come on stdin until it ends, or until the process that started this one is gone."""
    parent = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what a library prints is no reply

    def go_on() -> None:
        if os.getppid() != parent:
            os._exit(1)

    kept: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        try:
            reply = {"result": do(json.loads(line), kept, go_on)}
        except Exception as e:
            reply = _reply(e)
        data = memoryview(json.dumps(reply).encode() + b"\n")
        while data:
            data = data[replies.write(data):]


if __name__ == "__main__":
    main()
