"""A forked process that runs the command line under limits, and how it ended."""

import ctypes
import gc
import importlib
import io
import os
import pkgutil
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECONDS, GRACE, MEMORY_MIB = 20.0, 5.0, 1024
"""Limits of a trial: time, working or waiting; time to end after SIGINT; further memory."""
ADDRESSES, FILE_BYTES = 3 << 30, 256 << 20  # what a child can have at most, so that the machine is safe from it
PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROGRESS = re.compile(r"(block|step) \d+(/| of )\d+")  # how a line of progress begins


class Ended(NamedTuple):
    code: int  # negative for a signal
    out: str  # bytes that are no UTF-8 are escaped
    err: str
    seconds: float
    mib: int  # memory at the peak beyond that of the imported program
    over: str = ""  # what it did when it was over the time limit and got a SIGINT: "working" or "waiting"
    killed: bool = False  # whether it did not heed that


@dataclass
class Streams:
    """What the child's standard streams are; stdin that is None is closed."""

    stdin: bytes | Path | None = b""
    stdout: Path | None = None
    closed: bool = False  # stdout, as by `>&-`
    broken: bool = False  # stdout is a pipe that nobody reads
    encoding: str = "utf-8"
    limits: dict[int, int] = field(default_factory=dict)


def warm_up() -> None:
    """Import all that a verb imports, before the forks: no backward pass, no threads."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                   "TORCH_CPP_LOG_LEVEL": "FATAL"}  # which the command line sets for ranks before it imports torch
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import lineartime

    for module in pkgutil.walk_packages(lineartime.__path__, "lineartime."):
        if not re.search(r"__main__|lineartime\.ops\.|onnx", module.name):
            importlib.import_module(module.name)
    transformers.logging.set_verbosity_error()  # its warnings are many lines
    settle()


def settle() -> None:
    """What is imported or made at the first use, and what forked processes go on sharing."""
    import matplotlib.figure
    import torch

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).step()
    matplotlib.figure.Figure().subplots()
    gc.collect()
    gc.freeze()


class Child(NamedTuple):
    pid: int
    out: int
    err: int


def start(do: Callable[[], object], folder: Path, streams: Streams | None = None) -> Child:
    streams, parent = streams or Streams(), os.getpid()
    pipes = [os.pipe(), os.pipe()]
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for reader, writer in pipes:
            os.close(writer)
            os.set_blocking(reader, False)
        return Child(pid, pipes[0][0], pipes[1][0])
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        redirect(folder, streams, pipes[0][1], pipes[1][1])
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limits = {resource.RLIMIT_AS: has + ADDRESSES, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0}
        for what, limit in (limits | streams.limits).items():
            resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))
        os.chdir(folder)
        tempfile.tempdir = str(folder)
        code = called(do)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def called(do: Callable[[], object]) -> int:
    """The exit code that a Python process would have which does this and ends."""
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # one that came before the command ends the process
        signal.signal(signal.SIGINT, signal.default_int_handler)
        do()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt as e:
        code = 130
        if any("lineartime" in Path(frame.filename).parts for frame in traceback.extract_tb(e.__traceback__)):
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
        code = 1
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except Exception:
        print("Exception ignored while flushing sys.stdout", file=sys.stderr)
        code = 120
    sys.stderr.flush()
    return code


def redirect(folder: Path, streams: Streams, out: int, err: int) -> None:
    if isinstance(streams.stdin, bytes):
        given = os.memfd_create("stdin")
        os.write(given, streams.stdin)
        os.lseek(given, 0, os.SEEK_SET)
        os.dup2(given, 0)
    elif streams.stdin is not None:
        os.dup2(os.open(streams.stdin, os.O_RDONLY | os.O_NONBLOCK), 0)
    os.dup2(out if streams.stdout is None else os.open(streams.stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(err, 2)
    if streams.broken:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
    encoding = streams.encoding
    sys.stdin = open(0, encoding=encoding, closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding, "backslashreplace", write_through=True)
    if streams.closed:
        os.close(1)
        sys.stdout = None
    if streams.stdin is None:
        os.close(0)
        sys.stdin = None


def wait(child: Child, *, at: tuple[float, int] | None = None, seconds: float = SECONDS) -> Ended:
    """Wait for the child to end. at: after how many seconds it is sent which signal. Over the time
    limit it gets a SIGINT, and after `GRACE` a SIGKILL."""
    pid, started = child.pid, time.monotonic()
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    over, over_at, killed, ended = "", 0.0, False, False
    since = used = waited = 0.0
    watched = os.pidfd_open(pid)
    printed = {child.out: bytearray(), child.err: bytearray()}
    poll = select.poll()
    for descriptor in (watched, *printed):
        poll.register(descriptor, select.POLLIN)
    try:
        while not ended:
            for descriptor, _ in poll.poll(1000 * min(max(at[0] - since, 0) if at else 0.5, 0.5)):
                ended = ended or descriptor == watched
                if descriptor in printed and not take(descriptor, printed[descriptor]):
                    poll.unregister(descriptor)
            before, since = since, time.monotonic() - started
            used_before, (used, sleeps) = used, used_by(pid)
            waited += since - before if sleeps and used == used_before else 0
            if at and since >= at[0]:
                send(pid, at[1])
                at = None
            elif over and since > over_at + GRACE:
                killed = True
                send(pid, signal.SIGKILL)
            elif not over and max(used, waited) > seconds:
                over, over_at = "working" if used > seconds else "waiting", since
                send(pid, signal.SIGINT)
        _, status, usage = os.wait4(pid, 0)
        for descriptor, text in printed.items():
            while take(descriptor, text):
                pass
    except BaseException:
        send(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        with suppress(ProcessLookupError, PermissionError):  # what the child has started and left
            os.killpg(pid, signal.SIGKILL)
        for descriptor in (watched, *printed):
            os.close(descriptor)
    out, err = (bytes(text).decode(errors="backslashreplace") for text in printed.values())
    return Ended(os.waitstatus_to_exitcode(status), out, err, time.monotonic() - started,
                 max(usage.ru_maxrss - baseline, 0) // 1024, over, killed)


def take(descriptor: int, text: bytearray) -> bool:
    data = b""
    with suppress(BlockingIOError):
        data = os.read(descriptor, 1 << 16)
    text += data[: max((1 << 20) - len(text), 0)]
    return bool(data)


def used_by(pid: int) -> tuple[float, bool]:
    """A child's processor time in seconds, and whether it sleeps, not only waits for its turn."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, False
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "S"


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def run(do: Callable[[], object], folder: Path, streams: Streams | None = None, **options) -> Ended:
    return wait(start(do, folder, streams), **options)


def verb(arguments: list[str]) -> Callable[[], None]:
    """The command line with these arguments, perhaps with surrogates for other bytes."""
    def call() -> None:
        from lineartime.cli import verbs

        sys.argv = ["lineartime", *arguments]
        verbs.main()

    return call


def as_verb(function: Callable[[], object]) -> Callable[[], None]:
    """A function as a verb: its errors end the process as they end the command line."""
    def call() -> None:
        from lineartime.cli.terminal import exit_code

        sys.exit(exit_code(lambda: function() and None))

    return call


def last_words(err: str) -> int:
    return sum(line.startswith(("error: ", "stopped by ", "interrupted")) for line in err.splitlines())


ALLOWED = {0, 2, 3, 4, 5, 6, 130, 143}


def misbehaviour(ended: Ended) -> str | None:
    """What no process may do whatever happens to it: the verdict, or None."""
    if ended.over or ended.mib > MEMORY_MIB:
        return "hung" if ended.over else "memory"
    if re.search(r"\binternal\b", ended.err) or ended.code not in ALLOWED:
        return "internal"
    silent = ended.code != 0 and last_words(ended.err) != 1
    n_lines = sum(PROGRESS.match(line) is None for line in ended.err.splitlines())
    return "noisy" if silent or "Traceback" in ended.err or n_lines > 10 else None
