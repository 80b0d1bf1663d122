"""`lineartime embed` and `classify`: documents of any length, read whole."""

import itertools
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lineartime.cli.options import Device, Precision
from lineartime.cli.terminal import Terminal, counted, note, results_are_files, say_stopping
from lineartime.data.files import require_there
from lineartime.data.read_text import require_encoding, small_bytes
from lineartime.data.rows import UTF8
from lineartime.errors import UsageError
from lineartime.finetune_config import Encoding, Fields, MaxTokens, PairField, Stdin, TextField
from lineartime.model_names import named_folder
from lineartime.settings import require

if TYPE_CHECKING:
    from lineartime.data.tokenizer import Tokenizer
    from lineartime.documents.pooling import Mean
    from lineartime.model import LanguageModel


@dataclass(frozen=True)
class ReadOptions:
    """What `embed` and `classify` take alike."""

    files: Annotated[tuple[str, ...], "What to read: text files, files of records (.csv, .jsonl, .parquet), folders, "
                     "addresses such as s3://BUCKET/FOLDER, hub:NAME/SPLIT, or `-` for stdin.", "FILES"]
    out: Annotated[Path | None, "File for the results: .jsonl, or for vectors also .npy; by default they are printed "
                   "as JSON lines."] = None
    text_field: TextField = "text"
    pair_field: PairField = None
    encoding: Encoding = UTF8
    stdin: Stdin = "text"
    max_tokens: MaxTokens = None
    batch_rows: Annotated[int, "Rows read at once; changes only rounding, speed and memory."] = 8
    precision: Precision = "float32"
    device: Device = None


def embed(
    model: Annotated[str, "A run, a checkpoint, an exported folder, a folder of `finetune`, or the shipped model "
                     "`small`.", "MODEL"],
    options: ReadOptions,
) -> None:
    """Give documents of any length vectors.
    Each document is read whole; its vector is the mean of its tokens' last hidden states. After a stop the same command
    goes on with the file of --out."""
    folder = named_folder(model)
    check_paths(options, (".jsonl", ".npy"))
    from lineartime.documents.embed import found_vector
    from lineartime.load import load_model

    loaded, tokenizer, _ = load_model(folder)
    write_results("embed", loaded, tokenizer, options, found_vector)


def classify(
    model: Annotated[str, "A folder of `finetune --task classify`, or a checkpoint of one.", "MODEL"],
    options: ReadOptions,
) -> None:
    """Label documents of any length.
    Each document is read whole; its labels are written with their probabilities. After a stop the same command goes on
    with the file of --out."""
    folder = named_folder(model)
    check_paths(options, (".jsonl",))
    from lineartime.documents.classify import found_label
    from lineartime.load import load_classifier

    loaded, tokenizer, _ = load_classifier(folder)
    if loaded.head.pairs and options.pair_field is None:
        raise UsageError("this model learned from pairs of texts", folder, "name the second text with --pair-field")
    trained = loaded.head.max_tokens
    if trained is not None and (options.max_tokens is None or options.max_tokens > trained):
        note(f"in training documents were cut to {trained:,} tokens; --max-tokens {trained} reads them so")
    write_results("classify", loaded, tokenizer, options, partial(found_label, loaded))


def check_paths(options: ReadOptions, endings: tuple[str, ...]) -> None:
    """Raise UsageError as `check_out` does, and without a file; DataError for a missing one."""
    from lineartime.documents.results import check_out

    require(bool(options.files), "nothing to read", "no file is named", "name files or folders, or - for stdin")
    if options.out is not None:
        check_out(options.out, endings)
    require_encoding(options.encoding)
    require_there(options.files)


def write_results(verb: str, model: "LanguageModel", tokenizer: "Tokenizer", options: ReadOptions,
                  found_of: "Callable[[Mean], dict[str, Any]]") -> None:
    """Read all documents, and write a row for each to stdout or a file. The file may have the first rows already, from
    the same verb, fields and reading. found_of: gives what a row says of a document's mean."""
    from lineartime.documents.examples import MAX_STDIN, read_examples
    from lineartime.documents.pooling import Reading, named_means
    from lineartime.documents.results import description_of, part_of, unfinished_rows
    from lineartime.runtime import pick_device
    from lineartime.training import StopSignal

    files, out = options.files, options.out
    fields = Fields(options.text_field, options.pair_field, encoding=options.encoding, stdin=options.stdin)
    reading = Reading(options.max_tokens, options.batch_rows, options.precision)
    n_read = n_tokens = 0
    begun = time.monotonic()
    model.to(pick_device(options.device))
    saved = ("nothing is kept of what was printed" if out is None else f"what is read is in {part_of(out)}"
             + ("" if "-" in files else "; the same command goes on"))
    # Stdin is read first: a signal that comes while it is waited for ends the process at once.
    inputs = [small_bytes(name, MAX_STDIN) if name == "-" else name for name in files]
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        def speed() -> str:
            return f"{n_tokens / max(time.monotonic() - begun, 1e-9):,.0f} tokens/s"

        def show(n: int) -> None:
            nonlocal n_tokens
            n_tokens = n
            terminal.count("documents", n_read, n_documents, speed())
            stop.check(saved if out is None or n_read or n_done else "no document is read; the command begins anew")

        # All are looked through first, so that a wrong document is refused before a model has read those before it.
        checked = stop.watch("nothing is read yet", terminal.count, "documents checked", None)
        n_documents = 0
        for n_documents, _ in enumerate(read_examples(inputs, fields), 1):
            checked(n_documents)
        kept: Any = nullcontext((0, lambda row: print(json.dumps(row), flush=True)))
        if out is not None:
            results_are_files()
            kept = unfinished_rows(out, description_of(model, tokenizer, files, {
                "verb": verb, "text": fields.text, "pair": fields.pair, "encoding": fields.encoding,
                "max_tokens": reading.max_tokens, "precision": reading.precision}))
        with kept as (n_done, add):
            if n_done:
                note(f"going on behind the first {counted(n_done)}")
                n_documents -= n_done
            left = itertools.islice(read_examples(inputs, fields), n_done, None)
            for example, mean in named_means(model, tokenizer, left, reading, progress=show):
                add({"file": example.file, "number": example.number, "tokens": mean.n_tokens, "cut": mean.is_cut,
                     **found_of(mean)})
                n_read += 1
    note(f"read     {counted(n_read)}, {n_tokens:,} tokens: {speed()}")
    if out is not None:
        note(f"written  {out}")
