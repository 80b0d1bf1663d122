"""`lineartime embed` and `classify`, and `finetune` for them: documents of any length, read whole."""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
    write_results("embed", loaded.to(pick_device(device)), tokenizer, files, fields, stdin, reading, out,
                  embedded_row, embedded_schema)


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
    write_results("classify", loaded, tokenizer, files, fields, stdin, reading, out,
                  lambda example, mean: labelled_row(loaded, example, mean), lambda: labelled_schema(loaded.head))


def check_paths(files: list[str], out: Path | None, endings: tuple[str, ...]) -> None:
    """Raise UsageError as `check_inputs` and `check_out` do."""
    from lineartime.documents.examples import check_inputs
    from lineartime.documents.results import check_out

    check_inputs(files, out)
    if out is not None:
        check_out(out, endings)


def write_results(verb: str, model: "LanguageModel", tokenizer: "Tokenizer", files: list[str], fields: Fields,
                  stdin: str, reading: "Reading", out: Path | None,
                  row_of: Callable[["Example", "Mean"], dict[str, Any]], schema: Callable[[], Any]) -> None:
    """Read all documents, and write a row for each to stdout or a file, which may have the first ones already: of the
    same verb, fields and reading. stdin: see `read_examples`."""
    from lineartime.documents.examples import STDIN, WaitingInput, check_examples, read_examples
    from lineartime.documents.pooling import named_means
    from lineartime.documents.results import description_of, part_of, unfinished_rows
    from lineartime.training import StopSignal

    n_bytes, n_documents, n_tokens, n_cut, started = 0, 0, 0, 0, time.monotonic()
    total = bytes_of(files)
    saved = ("nothing is kept of what was printed" if out is None else
             f"what is read is in {part_of(out)}; stdin cannot be gone on with" if STDIN in files else
             "what is read is kept; the same command goes on")

    def counted(text: Iterable[str]) -> Iterator[str]:
        nonlocal n_bytes
        for piece in text:
            n_bytes += len(piece.encode())
            yield piece

    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        def show(n_read: int) -> None:
            nonlocal n_tokens
            n_tokens = n_read
            terminal.reading(n_bytes, total, n_documents, n_read / max(time.monotonic() - started, 1e-9))
            stop.check(saved)

        def write(examples: "Iterable[Example]", add: Callable[[dict[str, Any]], None]) -> None:
            nonlocal n_documents, n_cut
            read = (example._replace(text=counted(example.text)) for example in examples)
            for example, mean in named_means(model, tokenizer, read, reading, progress=show, is_idle=piped.is_idle):
                add(row_of(example, mean))
                n_documents, n_cut = n_documents + 1, n_cut + mean.is_cut

        def checked(n_documents: int) -> None:
            terminal.count("documents checked", n_documents, None)
            stop.check("nothing is read yet")

        piped = WaitingInput(lambda: stop.check(saved))
        examples = read_examples(files, fields, stdin=cast("StdinKind", stdin), source=piped)
        check_examples(files, fields, checked)
        if out is None:
            write(examples, lambda row: print(json.dumps(row), flush=True))
        else:
            results_are_files()
            description = description_of(model, tokenizer, files, {
                "verb": verb, "text": fields.text, "pair": fields.pair, "max_tokens": reading.max_tokens,
                "precision": reading.precision})
            with unfinished_rows(out, description, schema) as (n_done, n_cut, add):
                if n_done:
                    note(f"going on behind the first {counted_documents(n_done)}")
                write(itertools.islice(examples, n_done, None), add)
    seconds = time.monotonic() - started
    note(f"read     {counted_documents(n_documents)}, {n_tokens:,} tokens in {seconds:,.1f} s: "
         f"{n_tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if n_cut:
        note(f"cut      {counted_documents(n_cut)} to {reading.max_tokens:,} tokens")
    if out is not None:
        note(f"written  {out}")


def bytes_of(files: list[str]) -> int | None:
    """The bytes of the inputs, about those of their text; None where that is not known."""
    from lineartime.documents.examples import files_of

    paths = [path for name in files for path in files_of(name)]
    plain = all(path.suffix in (".txt", ".md", ".csv", ".jsonl") and path.is_file() for path in paths)
    return sum(path.stat().st_size for path in paths) if paths and plain else None
