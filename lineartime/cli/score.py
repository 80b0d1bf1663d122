"""`lineartime score`: the bits of a text as it comes."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lineartime.base.errors import DataError
from lineartime.base.files import check_place
from lineartime.base.stores import file_blocks, require_there, stdin_blocks
from lineartime.cli.options import Device, Precision
from lineartime.cli.terminal import note, say_stopping
from lineartime.data.read_text import PIECE
from lineartime.folders import named_folder

if TYPE_CHECKING:
    from lineartime.use.scoring import Row, ScoringState

SAVE_SECONDS = 30.0
"""Between two saves of the state."""


def score(
    model: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`.", "MODEL"],
    file: Annotated[str, "A file of text or its address, which may be packed, or `-` for stdin.", "FILE"],
    *,
    per: Annotated[Literal["line", "token", "document"], "What a row scores; a document is the whole text."] = "line",
    state: Annotated[Path | None, "File for the state, written every 30 seconds and at the end. The same command then "
                     "goes on after what it has read. A last line that has no end yet waits there."] = None,
    as_json: Annotated[bool, "Print rows of JSON.", "--json"] = False,
    precision: Precision = "float32",
    device: Device = None,
) -> None:
    """Score a text as it comes, in bits. Every line is scored given all before it; what is
    unexpected has many bits. A row has a number, the bits, the bytes, the bits per byte, and how
    the line begins. FLASH reads an endless stream in constant memory."""
    if state is not None:
        check_place(state)
    require_there([file])
    folder = named_folder(model)
    from lineartime.training.runtime import pick_device
    from lineartime.training.stop import StopSignal
    from lineartime.use.scoring import open_state
    from lineartime.use.scoring import score as rows_of
    from lineartime.weights.load import load_model

    loaded, tokenizer, _ = load_model(folder)
    loaded.to(pick_device(device))
    now = open_state(loaded, tokenizer, state)
    begun = saved = time.monotonic()
    n_before = now.n_tokens

    def blocks() -> Iterator[bytes]:
        """The next text. It is asked for when the rows of all before it are printed, and the state
        is whole."""
        nonlocal saved
        for block in stdin_blocks(PIECE, ticks=True) if file == "-" else file_blocks(file, now.n_read):
            yield block
            sys.stdout.flush()
            if state is not None and time.monotonic() - saved >= SAVE_SECONDS:
                now.save(state)
                saved = time.monotonic()
            if stop.number is not None:
                return

    with StopSignal().listening(say_stopping) as stop:
        rows = rows_of(loaded, tokenizer, blocks(), per=per, precision=precision, state=now, keep=state is not None,
                       name="stdin" if file == "-" else file)
        try:
            for row in rows:
                print(line_of(row, per, as_json))
        except DataError:
            if state is not None and file == "-":  # what came before the wrong byte does not come again
                now.save(state)
            raise
        sys.stdout.flush()
        if state is not None:
            now.save(state)
        note_scored(now, now.n_tokens - n_before, time.monotonic() - begun, state)
        stop.check("nothing is kept" if state is None else f"the same command goes on with {state}")


def line_of(row: "Row", per: str, as_json: bool) -> str:
    """What is printed of a row."""
    per_byte, text = row.bits / max(row.n_bytes, 1), repr(row.text) if per == "token" else row.text
    if as_json:
        return json.dumps({"number": row.number, "bits": round(row.bits, 4), "bytes": row.n_bytes,
                           "bits_per_byte": round(per_byte, 4), "text": row.text})
    return f"{row.number:>9} {row.bits:>10.2f} {row.n_bytes:>7} {per_byte:>8.3f}  {text}"


def note_scored(now: "ScoringState", n_new: int, seconds: float, state: Path | None) -> None:
    """Print to stderr what is scored so far, and how fast. n_new: tokens of this call."""
    per_byte, perplexity = now.bits / max(now.n_bytes, 1), 2 ** (now.bits / max(now.n_tokens, 1))
    note(f"scored   {now.n_lines:,} lines, {now.n_tokens:,} tokens, {now.n_bytes:,} bytes: {per_byte:.3f} bits per "
         f"byte, perplexity {perplexity:.1f} per token; {n_new / max(seconds, 1e-9):,.0f} tokens/s")
    if now.shown:
        note(f"the last line has no end yet; what came of it waits in {state}")
