"""What a person sees while something runs: lines, bars, text as it comes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lineartime.config import RunConfig

if TYPE_CHECKING:
    from lineartime.evaluation import Evaluation


def say(line: str) -> None:
    print(line, flush=True)


def note(line: str) -> None:
    """A line about progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


class TrainingBar:
    """Progress of a run: a live bar on a terminal, a line now and then elsewhere; both on stderr."""

    def __init__(self, config: RunConfig):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.steps, self.live, self.last_line, self.held_out = config.train.steps, console.is_terminal, 0.0, ""
        self.bar = Progress(TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(),
                            TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("left"),
                            TimeRemainingColumn(), console=console, disable=not self.live)
        self.task = self.bar.add_task("starting", total=self.steps)

    def __enter__(self) -> "TrainingBar":
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def warn(self, message: str) -> None:
        self.bar.console.print(f"warning: {message}", highlight=False, soft_wrap=True)

    def show(self, record: dict[str, Any]) -> None:
        """Take in a line of the metrics."""
        step, clock = record["step"], record["clock"]
        if "held_out" in record:
            self.held_out = f"  held-out {record['held_out']['loss']:.3f}"
            return
        words = f"loss {record['loss']:.3f}{self.held_out}  {clock['tokens_per_s']:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, description=words)
        if not self.live and (clock["time"] - self.last_line >= 10 or step == self.steps):
            self.last_line = clock["time"]
            print(f"step {step}/{self.steps}  {words}", file=sys.stderr, flush=True)


class Terminal:
    """What a person sees of questions being read, trained on and answered."""

    def say(self, line: str) -> None:
        say(line)

    def training(self, config: RunConfig) -> "TrainingBar":
        return TrainingBar(config)

    @contextmanager
    def counting(self, what: str, total: int | None) -> "Iterator[Callable[[int], None]]":
        """A bar on stderr where that is a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        words = "{task.completed:,.0f}" if total is None else "{task.completed:,.0f}/{task.total:,.0f}"
        with Progress(TextColumn(f"{what} {words}"), BarColumn(), TimeElapsedColumn(), console=console,
                      disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda n: bar.update(task, completed=n)


class Stream:
    """Rows' text as their tokens come: printed at once for one row, at the end for several; cut at a stop text."""

    def __init__(self, tokenizer: "Any", prompts: list[str], stops: list[str]):
        self.prompts, self.stops = prompts, [text for text in stops if text]
        self.take_in = [tokenizer.stream() for _ in prompts]
        self.held = max([len(stop) - 1 for stop in self.stops], default=0)
        """Characters at the end that may be the beginning of a stop text."""
        self.text = [""] * len(prompts)
        self.printed = 0
        if len(prompts) == 1:
            print(prompts[0], end="", flush=True)

    def is_over(self, row: int, ids: list[int]) -> bool:
        """Take in a row's newest token; True if a stop text has come."""
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
        """Print what has not been printed."""
        if len(self.prompts) == 1:
            print(self.text[0][self.printed :])
            return
        for number, (prompt, text) in enumerate(zip(self.prompts, self.text, strict=True), 1):
            print(f"== {number}\n{prompt}{text}")


def prompt_progress(longest: int) -> "Any":
    """A progress bar for the reading of a long prompt."""
    if longest < 20_000 or not sys.stderr.isatty():
        return None
    return lambda n_read: print(f"\rreading the prompt: {n_read:,} of {longest:,} tokens",
                                end="" if n_read < longest else "\n", file=sys.stderr, flush=True)


def evaluate_with_bar(model: "Any", stream: "Any", context: int, precision: str, batch_rows: int,
                      stop: "Any" = None) -> "Evaluation":
    """`evaluate.evaluate` with a progress bar on stderr that a stop signal interrupts."""
    from rich.console import Console
    from rich.progress import Progress

    from lineartime.evaluation import evaluate as score

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("evaluating", total=stream.n_tokens)

        def progress(n_tokens: int) -> None:
            bar.update(task, completed=n_tokens)
            if stop is not None:
                stop.check("the last step is saved; the same command evaluates")

        return score(model, stream, context=context, batch_rows=batch_rows, precision=precision, progress=progress)


def summary(name: str, result: "Evaluation", task: str | None) -> str:
    """A score in words; it begins with the measure of the task that the data was prepared as."""
    if result.n_read is not None:
        return (f"{name:<8} masked {result.loss:.3f} nats per masked token, perplexity {result.perplexity:.1f} "
                f"({result.n_tokens:,} of {result.n_read:,} tokens masked)")
    words = "the published word count" if result.word_count == "published" else "counted words"
    if task == "pg19":
        return (f"{name:<8} perplexity {result.word_perplexity:.1f} per word ({result.n_words:,} words, {words}) and "
                f"{result.perplexity:.1f} per token, {result.bits_per_byte:.3f} bits per byte, {result.loss:.3f} nats "
                f"per token ({result.n_tokens:,} tokens)")
    if task == "wiki40b":
        return (f"{name:<8} perplexity {result.perplexity:.1f} per token and {result.word_perplexity:.1f} per word, "
                f"{result.bits_per_byte:.3f} bits per byte, {result.loss:.3f} nats per token "
                f"({result.n_tokens:,} tokens)")
    return (f"{name:<8} {result.bits_per_byte:.3f} bits per byte, {result.loss:.3f} nats per token, perplexity "
            f"{result.perplexity:.1f} per token and {result.word_perplexity:.1f} per word ({result.n_tokens:,} tokens)")
