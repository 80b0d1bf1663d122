"""`lineartime generate`: text from a model."""

import os
import sys
from typing import Annotated

from lineartime.atomic_io import MAX_BYTES
from lineartime.cli.options import Device, Precision
from lineartime.cli.terminal import Terminal
from lineartime.errors import UsageError
from lineartime.run_config import named_folder
from lineartime.settings import require

LONG_PROMPT = 20_000
"""Tokens of a prompt, at least, that is read with a progress bar."""


def generate(
    model: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`.", "MODEL"],
    prompts: Annotated[tuple[str, ...], "Texts to continue; `-` reads one from stdin. Without any, a new document "
                       "begins.", "PROMPTS"] = (),
    *,
    max_new_tokens: Annotated[int, "Most tokens to add."] = 200,
    temperature: Annotated[float, "How freely tokens are drawn; 0 always takes the likeliest."] = 0.8,
    top_k: Annotated[int | None, "Draw from the k likeliest tokens only."] = None,
    top_p: Annotated[float | None, "Draw only from the likeliest tokens that together reach probability p."] = None,
    seed: Annotated[int, "The same seed gives the same text."] = 0,
    capture: Annotated[bool, "Run each token as one CUDA graph, which is faster on a GPU."] = False,
    precision: Precision = "float32",
    device: Device = None,
) -> None:
    """Continue prompts.
    One prompt is printed as it grows; several are continued together and printed one after another."""
    require(seed >= 0, "seed must not be negative", f"{seed}")
    run, texts = named_folder(model), [read_prompt(text) for text in prompts] or [""]
    import torch

    from lineartime.generation.generate import check_sampling, generate
    from lineartime.load import load_model
    from lineartime.model import LanguageModel
    from lineartime.runtime import pick_device

    check_sampling(max_new_tokens, temperature, top_k, top_p)
    loaded, tokenizer, _ = load_model(run)
    if not loaded.config.causal or type(loaded) is not LanguageModel:
        raise UsageError("only a causal language model continues text", run,
                         "see answer, classify and embed, and transformers for masked models")
    loaded.decoding_state(0)  # refuses a model that does not decode, before its prompt is printed
    ids = [[tokenizer.end_of_document, *tokenizer.encode(text)] for text in texts]
    longest, streams = max(len(row) for row in ids), [tokenizer.stream(text) for text in texts]
    if len(texts) == 1:
        print(texts[0], end="", flush=True)

    def add(row: int, new_ids: list[int]) -> bool:
        """Add the text of a row's newest token; no text ends a row."""
        text = streams[row](new_ids[-1])
        texts[row] += text
        if len(texts) == 1:
            print(text, end="", flush=True)
        return False

    with Terminal() as terminal:
        def show(n_read: int) -> None:
            terminal.count("tokens of the prompt", n_read, longest)
            if n_read >= longest:
                terminal.close()

        generate(loaded.to(pick_device(device), getattr(torch, precision)), ids, stop=add,
                 on_prompt=show if longest >= LONG_PROMPT else None, max_new_tokens=max_new_tokens,
                 temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, capture=capture)
    if len(texts) == 1:
        print()
        return
    for number, text in enumerate(texts, 1):
        print(f"== {number}\n{text}")


def read_prompt(text: str) -> str:
    """A prompt of the command line; `-` reads it from stdin."""
    if text == "-":
        name, data = "stdin", sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        name, data = "the command line", os.fsencode(text)
    require(len(data) <= MAX_BYTES, "the prompt is too long", name, f"it takes {MAX_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError("the prompt is not UTF-8", f"{name}, byte {e.start}") from None
