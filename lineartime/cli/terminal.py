"""Terminal output: lines, progress bars, and streamed text."""

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO, cast

from lineartime.base.errors import escaped

if TYPE_CHECKING:
    from rich.progress import Progress


class Screen:
    """stdout or stderr, where text from files cannot steer the terminal: control characters, and
    characters that the terminal's encoding lacks, are written as escapes such as `\\x1b`."""

    def __init__(self, stream: TextIO, lenient: bool):
        """lenient: what cannot be written, because the reader has gone or the disk is full, is
        dropped."""
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
        """False, so that no library styles text: its escape sequences would be written as text
        too."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def screens() -> Iterator[None]:
    """Inside the block, sys.stdout and sys.stderr are `Screen`s. Closed streams are opened on
    /dev/null first, so that no file of ours takes their numbers."""
    # The lowest free number is taken, so this ends when 0, 1 and 2 are all open.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")
    before = sys.stdout, sys.stderr
    out = Screen(sys.stdout or open(1, "w", encoding="utf-8"), lenient=False)
    err = Screen(sys.stderr or open(2, "w", encoding="utf-8"), lenient=True)
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
    try:
        yield
    finally:
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
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def say_stopping(name: str) -> None:
    """Say that a signal was heard; the `tell` of `StopSignal.listening`, which may be called at any
    moment."""
    with suppress(OSError):
        os.write(2, f"\n{name}: stops at the next safe moment and saves; another one ends it at once\n".encode())


class Lines(logging.Handler):
    """Prints the library's log, a line per record: information on stdout, warnings on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING:
            say(record.getMessage())
        else:  # a kernel that does not run is a note
            kind = "note" if record.name.startswith("lineartime.ops") else "warning"
            note(f"{kind}: {record.getMessage()}")


@contextmanager
def shown_log() -> Iterator[None]:
    """Print the library's log inside the block."""
    logger, lines = logging.getLogger("lineartime"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)


class Terminal:
    """Progress of the library's functions on stderr: one live bar at a time on a terminal;
    elsewhere a line every ten seconds. Both tell the time left."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(file=getattr(sys.stderr, "stream", sys.stderr))
        self.bar: Progress | None = None
        self.what, self.last_line, self.words, self.held_out = "", time.time(), "", ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live bar."""
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.what = None, ""

    def count(self, what: str, done: float, total: int | None, words: str = "") -> None:
        """Show how much of some work is done, of `total` if that is known; it replaces what was
        shown of other work."""
        if self.bar is None or self.what != what:
            self.close()
            self.bar, self.what = self.new_bar(what, done, total), what
        shown = f"{what} {int(done):,}" + ("" if total is None else f"/{total:,}")
        self.bar.update(self.bar.task_ids[0], completed=done, description=words, shown=shown)
        # Off a terminal, as in a log file: a line now and then.
        if not self.console.is_terminal and time.time() - self.last_line >= 10:
            self.last_line = time.time()
            left = self.bar.tasks[0].time_remaining  # by the speed of the last minutes
            note("  ".join(filter(None, [shown, words, f"{timedelta(seconds=round(left))} left" if left else ""])))

    def new_bar(self, what: str, done: float, total: int | None) -> "Progress":
        """A live bar, which is shown on a terminal alone. That of training stays there when it is
        over."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        left = [] if total is None else [TextColumn("left"), TimeRemainingColumn()]
        bar = Progress(TextColumn("{task.fields[shown]}", markup=False), BarColumn(),
                       TextColumn("{task.description}", markup=False), TimeElapsedColumn(), *left, console=self.console,
                       transient=what != "step", disable=not self.console.is_terminal, get_time=time.time,
                       speed_estimate_period=600)
        task = bar.add_task("", total=total, shown=what)
        bar.tasks[task].completed = done  # what was done before is not counted in the speed
        bar.start()
        return bar

    def counting(self, what: str, total: int | None = None) -> Callable[[int], None]:
        """The `progress` callback for a function that passes a count alone."""
        return lambda done: self.count(what, done, total)

    def step(self, record: dict[str, Any]) -> None:
        """Show a line of the metrics; the `on_step` callback of training."""
        step, steps = record["step"], record["steps"]
        if "held_out" in record:
            self.held_out = f"  held-out {record['held_out']['loss']:.3f}"
            return
        if step == steps or not self.words:  # the first step and the last one are told at once
            self.last_line = 0.0
        self.words = f"loss {record['loss']:.3f}{self.held_out}  {record['clock']['tokens_per_s']:,.0f} tokens/s"
        self.count("step", step, steps, self.words)


def counted(n: int, what: str = "document") -> str:
    """A number of things in words, such as "1 document"."""
    return f"{n:,} {what}" + "s" * (n != 1)


def summary(name: str, scores: dict[str, Any]) -> str:
    """A line of the scores of `Evaluation.to_dict`."""
    scores = {name: float("inf") if value is None else value for name, value in scores.items()}
    if "masked" in scores:
        return (f"{name:<8} masked {scores['loss']:.3f} nats per masked token, perplexity {scores['perplexity']:.1f} "
                f"({scores['n_tokens']:,} of {scores['n_read']:,} tokens masked)")
    return (f"{name:<8} {scores['bits_per_byte']:.3f} bits per byte, {scores['loss']:.3f} nats per token, perplexity "
            f"{scores['perplexity']:.1f} per token and {scores['word_perplexity']:.1f} per word "
            f"({scores['n_tokens']:,} tokens, {scores['n_words']:,} {scores['word_count']} words)")
