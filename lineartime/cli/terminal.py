"""What a command prints, lines and progress, and how it ends: an error is one line and a code."""

import io
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, TextIO, cast

from lineartime.base.errors import LineartimeError, Stopped, escaped
from lineartime.base.ranks import launched, speaks_first
from lineartime.base.words import part_of

OWN_MODULES: set[str] = set()  # modules of the user's that the command has imported: what they raise is told as theirs


class Screen:
    """stdout or stderr, where text from files cannot steer the terminal: control characters, and
    characters that the terminal's encoding lacks, are written as escapes such as `\\x1b`. lenient:
    drop what a full disk, or a reader that has gone, does not take."""

    def __init__(self, stream: TextIO, lenient: bool):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self.stream = stream
        self.dropped: tuple[type[Exception], ...] = (OSError,) if lenient else ()

    def write(self, text: str) -> int:
        with suppress(*self.dropped):
            self.stream.write(escaped(text))
        return len(text)

    def flush(self) -> None:
        with suppress(*self.dropped):
            self.stream.flush()

    def isatty(self) -> bool:
        """False, so that no library styles text: its escape sequences would be written as text."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Lines(logging.Handler):
    """Prints the library's log, a line per record: information on stdout, warnings on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            say(record.getMessage())
        else:  # a kernel that does not run is a note
            kind = "note" if record.name.startswith("lineartime.ops") else "warning"
            note(f"{kind}: {record.getMessage()}")


@contextmanager
def screens() -> Iterator[None]:
    """Inside the block, sys.stdout and sys.stderr are `Screen`s, which show the library's log too.
    Closed streams are opened on /dev/null first, so that no file of ours takes their numbers."""
    # The lowest free number is taken, so this ends when 0, 1 and 2 are all open.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")
    before = sys.stdout, sys.stderr
    out = Screen(sys.stdout or open(1, "w", encoding="utf-8"), lenient=False)
    err = Screen(sys.stderr or open(2, "w", encoding="utf-8"), lenient=True)
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
    logger, lines = logging.getLogger("lineartime"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        for screen, number in ((out, 1), (err, 2)):
            try:
                screen.stream.flush()
            except OSError:  # nothing is left to flush at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        sys.stdout, sys.stderr = before


def results_are_files() -> None:
    """Go on when stdout is closed or full: what counts is in files."""
    if isinstance(sys.stdout, Screen):
        sys.stdout.dropped = (OSError,)


def say(line: str) -> None:
    print(line, flush=True)


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say_stopping(name: str) -> None:
    """Say that a signal was heard. `StopSignal.listening` may call it at any moment."""
    with suppress(OSError):
        os.write(2, f"\n{name}: stops at the next safe moment and saves; another one ends it at once\n".encode())


class Terminal(AbstractContextManager["Terminal"]):
    """Progress on stderr: one live bar at a time on a terminal, elsewhere a line every 10 s."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(file=getattr(sys.stderr, "stream", sys.stderr))
        self.bar = Progress(TextColumn("{task.fields[shown]}", markup=False), BarColumn(),
                            TextColumn("{task.description}", markup=False), TimeElapsedColumn(), TextColumn("left"),
                            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
                            get_time=time.time, speed_estimate_period=600)
        self.what, self.words, self.held_out, self.last_line = "", "", "", time.time()

    def close(self, *error: object) -> None:
        self.bar.stop()
        for number in self.bar.task_ids:
            self.bar.remove_task(number)
        self.what = ""

    __exit__ = close

    def count(self, what: str, done: float, total: int | None, words: str = "") -> None:
        """Show how much of some work is done, of `total` if known, in place of other work."""
        shown = f"{what} {int(done):,}" + ("" if total is None else f"/{total:,}")
        if self.what != what:
            self.close()
            self.what, self.bar.live.transient = what, what != "step"  # the bar of training stays when it is over
            self.bar.add_task("", total=total, completed=int(done), shown=shown)  # they do not count in the speed
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=done, description=words, shown=shown)
        # Off a terminal, as in a log file: a line now and then.
        if self.bar.disable and time.time() - self.last_line >= 10:
            self.last_line = time.time()
            left = self.bar.tasks[0].time_remaining  # by the speed of the last minutes
            note("  ".join(filter(None, [shown, words, f"{timedelta(seconds=round(left))} left" if left else ""])))

    def step(self, record: dict[str, Any]) -> None:
        """Show a line of the metrics; the `on_step` callback of training."""
        step, steps = record["step"], record["steps"]
        if "held_out" in record:
            part = part_of(record["held_out"])
            self.held_out = f"  held-out {record['held_out']['loss']:.3f}" + f" ({part})" * bool(part)
            return
        if step == steps or not self.words:  # the first step and the last one are told at once
            self.last_line = 0.0
        self.words = f"loss {record['loss']:.3f}{self.held_out}  {record['clock']['tokens_per_s']:,.0f} tokens/s"
        self.count("step", step, steps, self.words)


def summary(name: str, scores: dict[str, Any]) -> str:
    """A line of the scores of `Evaluation.to_dict`."""
    scores = {name: float("inf") if value is None else value for name, value in scores.items()}
    if "masked" in scores:
        return (f"{name:<8} masked {scores['loss']:.3f} nats per masked token, perplexity {scores['perplexity']:.1f} "
                f"({scores['n_tokens']:,} of {scores['n_read']:,} tokens masked)")
    return (f"{name:<8} {scores['bits_per_byte']:.3f} bits per byte, {scores['loss']:.3f} nats per token, perplexity "
            f"{scores['perplexity']:.1f} per token and {scores['word_perplexity']:.1f} per word "
            f"({scores['n_tokens']:,} tokens, {scores['n_words']:,} {scores['word_count']} words)")


def exit_code(call: Callable[[], int | None], *, debug: bool = False) -> int:
    """Call a function; returns what it returns, 0 for None, or the exit code of its error, which
    is said in one line on stderr. debug: show a traceback with an error."""
    try:
        return call() or 0
    except LineartimeError as e:
        return fail(e, e.exit_code, debug)
    except KeyboardInterrupt as e:
        return fail(e, 130, debug, "interrupted")
    except BrokenPipeError:  # the reader of stdout has what it wants
        return 0
    except OSError as e:
        what = e.strerror or f"{type(e).__name__}: {e}"
        return fail(e, 6, debug, f"{what}: {e.filename!r}" if e.filename is not None else what)
    except Exception as e:
        if isinstance(e, RuntimeError):
            from lineartime.training.loop import out_of_memory  # with torch, which raised this or was imported anyway
        if isinstance(e, MemoryError) or (isinstance(e, RuntimeError) and out_of_memory(e)):
            return fail(e, 6, debug, "out of memory")
        refused = getattr(e, "format_message", None)  # what typer does not understand, such as an unknown option
        text = str(e).partition("\nException raised from")[0]  # the rest is the stack of PyTorch's C++
        own = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(e.__traceback__)
               if frame.f_globals.get("__name__") in OWN_MODULES]
        begin, end = (own[-1], "--debug shows more") if own else ("internal", "run again with --debug and report it")
        what = refused() if refused else f"{begin}: {type(e).__name__}: {text}; {end}"
        return fail(e, 2 if refused else 1, debug, what)


def fail(error: BaseException, code: int, debug: bool, message: str | None = None) -> int:
    """Say an error, or which signal ended the command, on the first rank that has one."""
    if debug:
        traceback.print_exception(error)
    ranks = launched()
    if not speaks_first(ranks, error):
        return code
    line = escaped(" ".join((message or str(error)).split()))
    if ranks.size > 1 and code in (1, 3, 4, 6):  # what one rank can have alone
        line += f" (rank {ranks.rank} on {socket.gethostname()})"
    begin = "" if isinstance(error, Stopped | KeyboardInterrupt) else "error: "  # a stop that was asked for is none
    with suppress(OSError):  # the code counts where stderr is full
        print(begin + line, file=sys.stderr if ranks.is_first else sys.__stderr__)
    return code
