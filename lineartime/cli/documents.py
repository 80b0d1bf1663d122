"""`lineartime embed` and `classify`, and `finetune` for them: documents of any length, read whole."""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from lineartime.cli.arguments import Device, Strict, pick_device
from lineartime.cli.terminal import (
    Terminal,
    counted_documents,
    interrupted_at_once,
    note,
    results_are_files,
    say_stopping,
)
from lineartime.data.pretrained import named_folder
from lineartime.errors import UsageError
from lineartime.finetune_config import Fields

if TYPE_CHECKING:
    from lineartime.data.tokenizer import Tokenizer
    from lineartime.documents.examples import Example
    from lineartime.documents.examples import Stdin as StdinKind
    from lineartime.documents.pooling import Mean, Reading
    from lineartime.model import LanguageModel

Files = Annotated[list[str], typer.Argument(
    help="Text files, files of records (.csv, .jsonl, .parquet), folders, hub:NAME/SPLIT, or `-` for stdin.")]
Stdin = Annotated[str, typer.Option(help="What `-` reads: text, one document; or jsonl, one in each line.")]
TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]
PairField = Annotated[str | None, typer.Option(help="Field or column of a second text, for pairs.")]
MaxTokens = Annotated[int | None, typer.Option(
    help="Cut documents to so many tokens; by default each is read whole, however long.")]
BatchRows = Annotated[int, typer.Option(help="Rows read at once; changes only rounding, speed and memory.")]
Precision = Annotated[str, typer.Option(help="float32 or bfloat16.")]


def embed(
    model: Annotated[str, typer.Argument(
        help="A run, a checkpoint, an exported folder, a folder of `finetune`, or a shipped model: small.")],
    files: Files,
    out: Annotated[Path | None, typer.Option(
        help="File for the vectors: .jsonl, .npy or .parquet; by default JSON lines on stdout.")] = None,
    text_field: TextField = "text",
    pair_field: PairField = None,
    stdin: Stdin = "text",
    max_tokens: MaxTokens = None,
    batch_rows: BatchRows = 8,
    precision: Precision = "float32",
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Read documents whole and write a vector for each, the mean of its tokens' last states, in order.
    The same command goes on with a file that is not whole."""
    folder = named_folder(model)
    check_paths(files, out, (".jsonl", ".parquet", ".npy"))
    with interrupted_at_once():
        from lineartime.documents.embed import embedded_row, embedded_schema
        from lineartime.documents.pooling import Reading
        from lineartime.load import load_model

    reading, fields = Reading(max_tokens, batch_rows, precision), Fields(text_field, pair_field)
    loaded, tokenizer, _ = load_model(folder, strict=strict)
    write_results(loaded.to(pick_device(device)), tokenizer, Inputs(files, fields, stdin), reading,
                  Output("embed", out, embedded_row, embedded_schema))


def classify(
    model: Annotated[str, typer.Argument(help="A folder of `finetune --task classify`, or a checkpoint of one.")],
    files: Files,
    out: Annotated[Path | None, typer.Option(
        help="File for the labels: .jsonl or .parquet; by default JSON lines on stdout.")] = None,
    text_field: TextField = "text",
    pair_field: PairField = None,
    stdin: Stdin = "text",
    max_tokens: MaxTokens = None,
    batch_rows: BatchRows = 8,
    precision: Precision = "float32",
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Read documents whole and write the labels of each, with their probabilities, in order.
    The same command goes on with a file that is not whole."""
    folder = named_folder(model)
    check_paths(files, out, (".jsonl", ".parquet"))
    with interrupted_at_once():
        from lineartime.documents.classify import labelled_row, labelled_schema
        from lineartime.documents.pooling import Reading
        from lineartime.load import load_classifier

    reading, fields = Reading(max_tokens, batch_rows, precision), Fields(text_field, pair_field)
    loaded, tokenizer, _ = load_classifier(folder, strict=strict)
    if loaded.head.pairs and pair_field is None:
        raise UsageError("this model learned from pairs of texts", folder, "name the second text with --pair-field")
    loaded.to(pick_device(device))
    trained = loaded.head.max_tokens
    if trained is not None and (max_tokens is None or max_tokens > trained):
        note(f"in training documents were cut to {trained:,} tokens; --max-tokens {trained} reads them so")
    write_results(loaded, tokenizer, Inputs(files, fields, stdin), reading, Output(
        "classify", out, partial(labelled_row, loaded), partial(labelled_schema, loaded.head)))


def check_paths(files: list[str], out: Path | None, endings: tuple[str, ...]) -> None:
    """Raise UsageError as `check_inputs` and `check_out` do."""
    from lineartime.documents.examples import check_inputs
    from lineartime.documents.results import check_out

    check_inputs(files, out)
    if out is not None:
        check_out(out, endings)


class Inputs(NamedTuple):
    """What is read, see `read_examples`."""

    files: list[str]
    fields: Fields
    stdin: str


class Output(NamedTuple):
    """What a verb writes."""

    verb: str
    out: Path | None
    """None: JSON lines on stdout."""
    row_of: Callable[["Example", "Mean"], dict[str, Any]]
    schema: Callable[[], Any]
    """The columns of a `.parquet`."""


@dataclass
class ReadCounts:
    """What has been read so far."""

    n_bytes: int = 0
    n_documents: int = 0
    n_tokens: int = 0
    n_cut: int = 0
    started: float = field(default_factory=time.monotonic)

    def counted(self, text: Iterable[str]) -> Iterator[str]:
        """The pieces of a text, whose bytes are counted."""
        for piece in text:
            self.n_bytes += len(piece.encode())
            yield piece

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / max(time.monotonic() - self.started, 1e-9)


def write_results(model: "LanguageModel", tokenizer: "Tokenizer", inputs: Inputs, reading: "Reading",
                  output: Output) -> None:
    """Read all documents, and write a row for each to stdout or a file, which may have the first ones already: of the
    same verb, fields and reading."""
    from lineartime.documents.examples import STDIN, WaitingInput, check_examples, read_examples
    from lineartime.documents.pooling import named_means
    from lineartime.documents.results import description_of, part_of, unfinished_rows
    from lineartime.training import StopSignal

    counts, total, (files, fields, stdin), out = ReadCounts(), bytes_of(inputs.files), inputs, output.out
    saved = ("nothing is kept of what was printed" if out is None else
             f"what is read is in {part_of(out)}; stdin cannot be gone on with" if STDIN in files else
             "what is read is kept; the same command goes on")
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        def show(n_read: int) -> None:
            counts.n_tokens = n_read
            terminal.reading(counts.n_bytes, total, counts.n_documents, counts.tokens_per_s)
            stop.check(saved)

        def checked(n_documents: int) -> None:
            terminal.count("documents checked", n_documents, None)
            stop.check("nothing is read yet")

        def rows(examples: "Iterable[Example]") -> Iterator[dict[str, Any]]:
            read = (example._replace(text=counts.counted(example.text)) for example in examples)
            for example, mean in named_means(model, tokenizer, read, reading, progress=show, is_idle=piped.is_idle):
                yield output.row_of(example, mean)
                counts.n_documents, counts.n_cut = counts.n_documents + 1, counts.n_cut + mean.is_cut

        piped = WaitingInput(lambda: stop.check(saved))
        examples = read_examples(files, fields, stdin=cast("StdinKind", stdin), source=piped)
        check_examples(files, fields, checked)
        if out is None:
            for row in rows(examples):
                print(json.dumps(row), flush=True)
        else:
            results_are_files()
            description = description_of(model, tokenizer, files, {
                "verb": output.verb, "text": fields.text, "pair": fields.pair, "max_tokens": reading.max_tokens,
                "precision": reading.precision})
            with unfinished_rows(out, description, output.schema) as (n_done, counts.n_cut, add):
                if n_done:
                    note(f"going on behind the first {counted_documents(n_done)}")
                for row in rows(itertools.islice(examples, n_done, None)):
                    add(row)
    note(f"read     {counted_documents(counts.n_documents)}, {counts.n_tokens:,} tokens in "
         f"{time.monotonic() - counts.started:,.1f} s: {counts.tokens_per_s:,.0f} tokens/s")
    if counts.n_cut:
        note(f"cut      {counted_documents(counts.n_cut)} to {reading.max_tokens:,} tokens")
    if out is not None:
        note(f"written  {out}")


def bytes_of(files: list[str]) -> int | None:
    """The bytes of the inputs, about those of their text; None where that is not known."""
    from lineartime.documents.examples import files_of

    paths = [path for name in files for path in files_of(name)]
    plain = all(path.suffix in (".txt", ".md", ".csv", ".jsonl") and path.is_file() for path in paths)
    return sum(path.stat().st_size for path in paths) if paths and plain else None
