"""`lineartime generate`, text from a model, and `read`, a text that it goes on from."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lineartime.base.errors import UsageError, raised_as
from lineartime.base.files import check_new
from lineartime.base.settings import require
from lineartime.base.stores import packing_of, require_there, size_of
from lineartime.cli.options import Device, Precision
from lineartime.cli.terminal import Terminal, note
from lineartime.data.read_text import ending_of, is_one_document, read_small, text_of
from lineartime.folders import named_folder

if TYPE_CHECKING:
    from lineartime.data.tokenizer import Tokenizer
    from lineartime.model.language_model import LanguageModel

LONG_PROMPT = 20_000
"""Tokens of a prompt, at least, that is read with a progress bar."""


def generate(
    model: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`.", "MODEL"],
    prompts: Annotated[tuple[str, ...], "Texts to continue, by default a new document; `-` is stdin.", "PROMPTS"] = (),
    *,
    prompt_file: Annotated[tuple[str, ...], "File with a prompt, or its address; may be given again."] = (),
    state: Annotated[Path | None, "Go on from the text that `lineartime read` read: each prompt follows it."] = None,
    stop: Annotated[tuple[str, ...], "Stop before this text; it is not printed. May be given again."] = (),
    max_new_tokens: Annotated[int, "Most tokens to add."] = 200,
    temperature: Annotated[float, "How freely tokens are drawn; 0 always takes the likeliest."] = 0.8,
    top_k: Annotated[int | None, "Draw from the k likeliest tokens only."] = None,
    top_p: Annotated[float | None, "Draw only from the likeliest tokens that together reach probability p."] = None,
    seed: Annotated[int, "The same seed gives the same text."] = 0,
    precision: Precision = "float32",
    device: Device = None,
) -> None:
    """Continue prompts. One is printed as it grows; several are printed one after another."""
    require(seed >= 0, "seed must not be negative", f"{seed}")
    require("" not in stop, "a stop text is empty", "--stop", "leave it out")
    run, texts = named_folder(model), [*map(read_prompt, prompts), *map(read_small, prompt_file)] or [""]
    from lineartime.model.decoding.state import DecodingState
    from lineartime.weights.generation.generate import check_sampling, generate, ids_of_prompts

    check_sampling(max_new_tokens, temperature, top_k, top_p)
    loaded, tokenizer = load_writer(run, device, precision)
    shared = None if state is None else DecodingState.load(state, loaded)
    ids, last_word = ids_of_prompts(texts, tokenizer, shared), ""
    if shared is not None:  # the ids begin with its last word
        last_word, shared.text = shared.text, ""
    streams, held = [tokenizer.stream(last_word + text) for text in texts], [""] * len(texts)
    if len(texts) == 1:
        print(texts[0], end="", flush=True)

    def add(row: int, new_ids: list[int]) -> bool:
        """Add the text of a row's newest token; returns whether a stop text ends the row."""
        text, held[row], is_over = before_stop(held[row] + streams[row](new_ids[-1]), stop)
        texts[row] += text
        if len(texts) == 1:
            print(text, end="", flush=True)
        return is_over

    try:
        with Terminal() as terminal:
            generate(loaded, ids, stop=add, on_prompt=prompt_progress(terminal, max(len(row) for row in ids)),
                     max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                     state=shared)
    finally:  # an error has a line of its own, behind what there is of the texts
        for number, (text, rest) in enumerate(zip(texts, held, strict=True), 1):
            print(rest if len(texts) == 1 else f"== {number}\n{text}{rest}")


def load_writer(folder: Path, device: str | None, precision: str) -> tuple["LanguageModel", "Tokenizer"]:
    """A model that continues text, on its device, and its tokenizer. Others are refused."""
    import torch

    from lineartime.model.language_model import LanguageModel
    from lineartime.training.runtime import pick_device
    from lineartime.weights.load import load_model

    loaded, tokenizer, _ = load_model(folder)
    require(loaded.config.causal and type(loaded) is LanguageModel, "only a causal language model continues text",
            str(folder), "transformers opens masked models")
    loaded.decoding_state(0)  # refuses a model that does not decode, before its prompt is printed
    return loaded.to(pick_device(device), getattr(torch, precision)), tokenizer


def read(
    book: Annotated[str, "A text file or its address, which may be packed, or `-` for stdin.", "BOOK"],
    *,
    model: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`."],
    out: Annotated[Path, "File for the state."],
    precision: Precision = "float32",
    device: Device = None,
) -> None:
    """Read a text once, for generate --state to go on from. The file has all that the model keeps
    of the text. With FLASH it is equally large for texts of any length."""
    check_new(out)
    require(not ending_of(book) or is_one_document(book), "a file of rows is many documents", book, "read one text")
    require_there([book])
    folder = named_folder(model)
    from lineartime.weights.generation.generate import read as read_text

    loaded, tokenizer = load_writer(folder, device, precision)
    n_file_bytes = None if book == "-" or packing_of(book) else size_of(book)
    begun = time.monotonic()
    with Terminal() as terminal:
        def show(n_bytes: int, n_tokens: int) -> None:
            speed = n_tokens / max(time.monotonic() - begun, 1e-9)
            terminal.count("bytes", n_bytes, n_file_bytes, f"{n_tokens:,} tokens  {speed:,.0f} tokens/s")

        state = read_text(loaded, tokenizer, text_of(book), progress=show)
    check_new(out)  # another process may have written it since
    state.save(out)
    note(f"written  {out}: {int(state.seq_lens_B):,} tokens in {out.stat().st_size / 1e6:.1f} MB")


def prompt_progress(terminal: Terminal, n_tokens: int) -> Callable[[int], None] | None:
    """The `on_prompt` that shows how much of a long prompt is read; None for a short prompt."""
    def show(n_read: int) -> None:
        terminal.count("tokens of the prompt", n_read, n_tokens)
        if n_read >= n_tokens:
            terminal.close()

    return show if n_tokens >= LONG_PROMPT else None


def before_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str, bool]:
    """The text before the first stop text, "" and True. Without one: the text in which no stop text
    has begun, the rest, which more text may make a stop text, and False."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], "", True
    end = next((i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)), len(text))
    return text[:end], text[end:], False


def read_prompt(given: str) -> str:
    """A prompt of the command line: a text, or `-` for stdin."""
    if given == "-":
        return read_small(given)
    with raised_as(UsageError, "the prompt is not UTF-8", "the command line", UnicodeDecodeError):
        return os.fsencode(given).decode("utf-8-sig")
