"""Terminal output: lines, progress bars, and streamed text."""

import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from lineartime.errors import escaped

if TYPE_CHECKING:
    from rich.progress import Progress


class Screen(io.TextIOWrapper):
    """stdout or stderr, where text from files cannot steer the terminal: control characters, and characters that the
    terminal's encoding lacks, are written as escapes such as `\\x1b`."""

    def __init__(self, stream: TextIO, lenient: bool):
        """lenient: what cannot be written, because the reader has gone or the disk is full, is dropped."""
        stream.flush()
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", line_buffering=stream.isatty())
        self.stream = stream
        self.dropped: tuple[type[Exception], ...] = (OSError,) if lenient else ()

    def write(self, text: str) -> int:
        with suppress(*self.dropped):
            super().write(escaped(text))
        return len(text)

    def flush(self) -> None:
        with suppress(*self.dropped):
            super().flush()

    def isatty(self) -> bool:
        """False, so that no library styles text: its escape sequences would be written as text too."""
        return False


@contextmanager
def screens() -> Iterator[None]:
    """Inside the block, sys.stdout and sys.stderr are `Screen`s. Closed streams are opened on /dev/null first, so that
    no file of ours takes their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8")
    whole = sys.stdout, sys.stderr
    sys.stdout = Screen(sys.stdout or open(1, "w", encoding="utf-8"), lenient=False)
    sys.stderr = Screen(sys.stderr or open(2, "w", encoding="utf-8"), lenient=True)
    try:
        yield
    finally:
        for screen, number in ((sys.stdout, 1), (sys.stderr, 2)):
            try:
                screen.flush()
                screen.stream.flush()
            except OSError:  # nothing is left to flush at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            screen.detach()
        sys.stdout, sys.stderr = whole


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
    """Say that a signal was heard; the `tell` of `StopSignal.listening`, which may be called at any moment."""
    with suppress(OSError):
        os.write(2, f"\n{name}: stops at the next safe moment and saves; another one ends it at once\n".encode())


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """End the process at the first SIGINT inside the block: a library that is being imported may drop the
    KeyboardInterrupt that Python would raise, and the process would go on."""
    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(sys.stderr.fileno(), b"error: interrupted\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Lines(logging.Handler):
    """Print the library's log, a line per record: information on stdout, warnings on stderr."""

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
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


def duration(seconds: float) -> str:
    """A time in words, to one unit."""
    if seconds < 10:
        return "a few seconds"
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"about {seconds / length:,.0f} {unit}"
    return f"about {seconds:.0f} seconds"


class Terminal:
    """Progress of the library's functions on stderr: one live bar at a time on a terminal; elsewhere a line every ten
    seconds. Both tell the time left."""

    def __init__(self, *, stay: bool = False) -> None:
        """stay: whether finished bars stay visible, as those of training always do."""
        from rich.console import Console

        self.console, self.stay = Console(file=getattr(sys.stderr, "stream", sys.stderr)), stay
        self.bar: Progress | None = None
        self.what, self.last_line, self.held_out, self.words, self.stepped = "", time.time(), "", "", False

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live bar."""
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.what, self.held_out, self.words = None, "", "", ""

    def begin(self, what: str, total: int | None) -> "Progress":
        """The live bar of `what`, which replaces any other bar."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        if self.bar is None or self.what != what:
            self.close()
            of = "{task.completed:,.0f}" if total is None else "{task.completed:,.0f}/{task.total:,.0f}"
            left = [TextColumn("left"), TimeRemainingColumn()] if total is not None else []
            self.bar = Progress(TextColumn(f"{what} {of}", markup=False), BarColumn(),
                                TextColumn("{task.description}", markup=False),
                                TimeElapsedColumn(), *left, console=self.console,
                                transient=not self.stay and what != "step", disable=not self.console.is_terminal,
                                get_time=time.time, speed_estimate_period=300)
            self.task = self.bar.add_task("", total=total)
            self.bar.start()
            self.what = what
        return self.bar

    def count(self, what: str, done: int, total: int | None) -> None:
        """Show progress; the `progress` callback of functions that pass a description, an amount and a total."""
        self.begin(what, total).update(self.task, completed=done)
        self.say_now_and_then(f"{what} {done:,}" + ("" if total is None else f"/{total:,}"))

    def say_now_and_then(self, line: str, left: str | None = None) -> None:
        """Print a line where there is no terminal, ten seconds after the one before, with the time left: by default by
        the speed of the bar."""
        if not self.console.is_terminal and time.time() - self.last_line >= 10:
            self.last_line = time.time()
            if left is None and self.bar is not None and (seconds := self.bar.tasks[0].time_remaining):
                left = duration(seconds)
            note(line if left is None else f"{line}  {left} left")

    def counting(self, what: str, total: int | None = None) -> "Callable[[int], None]":
        """The `progress` callback for a function that passes a count alone."""
        return lambda done: self.count(what, done, total)

    def reading(self, n_bytes: int, total: int | None, n_documents: int, tokens_per_s: float) -> None:
        """Show how much text is read."""
        words = f"{counted_documents(n_documents)} done, {tokens_per_s:,.0f} tokens/s"
        self.begin("bytes of text", total).update(self.task, completed=n_bytes, description=words)
        self.say_now_and_then(f"{n_bytes:,}" + ("" if total is None else f"/{total:,}") + f" bytes of text  {words}")

    def step(self, record: dict[str, Any], left: str | None = None) -> None:
        """Show a line of the metrics; the `on_step` callback of training. left: see `say_now_and_then`."""
        step, steps, clock = record["step"], record["steps"], record["clock"]
        bar = self.begin("step", steps)
        if "held_out" in record:
            self.held_out = f"  held-out {record['held_out']['loss']:.3f}"
            return
        self.words = f"loss {record['loss']:.3f}{self.held_out}  {clock['tokens_per_s']:,.0f} tokens/s"
        bar.update(self.task, completed=step, description=self.words)
        if step == steps or not self.stepped:
            self.last_line = 0.0
        self.stepped = True
        self.say_now_and_then(f"step {step}/{steps}  {self.words}", left)

    def micro_batch(self, step: int, steps: int, number: int, of: int, left: str | None) -> None:
        """Show how far a step is; called before each micro-batch."""
        bar, where = self.begin("step", steps), f"micro-batch {number + 1}/{of}"
        if of > 1:
            shown = f"{self.words}  {number + 1}/{of}" if self.words else where
            bar.update(self.task, completed=step, description=shown)
        self.say_now_and_then(f"step {step}/{steps}  {where}  {self.words}".rstrip(), left)


class TextStreamer:
    """Print generated text, cut at a stop text: one row as its tokens arrive, several rows at the end."""

    def __init__(self, tokenizer: "Any", prompts: list[str], stops: list[str]):
        self.prompts, self.stops = prompts, [text for text in stops if text]
        self.take_in = [tokenizer.stream() for _ in prompts]
        self.held = max([len(stop) - 1 for stop in self.stops], default=0)
        """Characters that are not printed yet, because they may begin a stop text."""
        self.text = [""] * len(prompts)
        self.printed = 0
        if len(prompts) == 1:
            print(prompts[0], end="", flush=True)

    def is_over(self, row: int, ids: list[int]) -> bool:
        """Add a row's newest token; returns whether the row's text has reached a stop text."""
        new = self.take_in[row](ids[-1])
        begin = max(len(self.text[row]) - self.held, 0)
        self.text[row] += new
        found = [at for stop in self.stops if (at := self.text[row].find(stop, begin)) >= 0]
        if found:
            self.text[row] = self.text[row][: min(found)]
        if len(self.prompts) == 1:
            end = max(len(self.text[0]) - (0 if found else self.held), self.printed)
            print(self.text[0][self.printed : end], end="", flush=True)
            self.printed = end
        return bool(found)

    def finish(self) -> None:
        """Print the remaining text."""
        if len(self.prompts) == 1:
            print(self.text[0][self.printed :])
            return
        for number, (prompt, text) in enumerate(zip(self.prompts, self.text, strict=True), 1):
            print(f"== {number}\n{prompt}{text}")


def counted_documents(n: int) -> str:
    """The number of documents in words, such as "1 document"."""
    return f"{n:,} document" + "s" * (n != 1)


def prompt_progress(terminal: Terminal, longest: int) -> Callable[[int], None] | None:
    """A progress callback for a prompt of 20,000 tokens or more, otherwise None."""
    def show(n_read: int) -> None:
        terminal.count("tokens of the prompt", n_read, longest)
        if n_read >= longest:
            terminal.close()

    return show if longest >= 20_000 else None


def summary(name: str, scores: dict[str, Any], task: str | None) -> str:
    """A line of the scores of `Evaluation.to_dict`; the usual measure of the data's task comes first."""
    loss, perplexity, tokens = scores["loss"], scores["perplexity"], f"{scores['n_tokens']:,}"
    if "masked" in scores:
        return (f"{name:<8} masked {loss:.3f} nats per masked token, perplexity {perplexity:.1f} "
                f"({tokens} of {scores['n_read']:,} tokens masked)")
    by_word, bits = scores["word_perplexity"], f"{scores['bits_per_byte']:.3f} bits per byte"
    if task == "pg19":
        words = "the published word count" if scores["word_count"] == "published" else "counted words"
        return (f"{name:<8} perplexity {by_word:.1f} per word ({scores['n_words']:,} words, {words}) and "
                f"{perplexity:.1f} per token, {bits}, {loss:.3f} nats per token ({tokens} tokens)")
    if task == "wiki40b":
        return (f"{name:<8} perplexity {perplexity:.1f} per token and {by_word:.1f} per word, {bits}, {loss:.3f} nats "
                f"per token ({tokens} tokens)")
    return (f"{name:<8} {bits}, {loss:.3f} nats per token, perplexity {perplexity:.1f} per token and {by_word:.1f} per "
            f"word ({tokens} tokens)")
