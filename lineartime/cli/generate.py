"""`lineartime generate`: text from a model."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lineartime.atomic_io import MAX_BYTES, read_bytes
from lineartime.cli.arguments import Device, ShippedModel, Strict, pick_device
from lineartime.cli.terminal import Terminal, TextStreamer, prompt_progress
from lineartime.data.pretrained import model_folder, named_folder
from lineartime.errors import UsageError
from lineartime.settings import require_precision


def generate(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="RUN|PROMPT", show_default=False,
        help="A run, one of its checkpoints, an exported folder, or a shipped model: small. Then prompts: `-` reads "
             "one from stdin, none begins a document.")] = None,
    shipped: ShippedModel = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help="File with a prompt; may be given again.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the likeliest k tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(
        help="Draw from the likeliest tokens that together reach probability p.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End where this text comes; may be given again.")] = None,
    precision: Annotated[str, typer.Option(help="Type of the weights: float32, or bfloat16, which is faster.")
                         ] = "float32",
    capture: Annotated[bool, typer.Option("--capture", help="Each token is one CUDA graph.")] = False,
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Continue prompts.
    One prompt streams to the terminal; several are decoded together and printed one after another."""
    if seed < 0:
        raise UsageError("seed must not be negative", f"{seed}")
    require_precision(precision)
    arguments = arguments or []
    if shipped is None and not arguments:
        raise UsageError("generate needs a model", "none is named", "name a run, or the shipped model small")
    run = named_folder(arguments[0]) if shipped is None else model_folder(shipped)
    prompts = arguments[1:] if shipped is None else arguments
    texts = read_prompts(prompts, prompt_file or [])
    import torch

    from lineartime.generation.generate import check_sampling, generate
    from lineartime.load import load_model

    check_sampling(max_new_tokens, temperature, top_k, top_p)
    model, tokenizer, _ = load_model(run, strict=strict)
    others = {"SpanModel": "this one answers: see `lineartime answer`",
              "DocumentClassifier": "this one labels: see `lineartime classify`",
              "DocumentEncoder": "this one gives vectors: see `lineartime embed`"}
    if not model.config.causal or type(model).__name__ in others:
        raise UsageError("only a causal model continues text", run,
                         others.get(type(model).__name__, "this one fills in masks; open it in transformers"))
    model.decoding_state(0)  # refuses a model that does not decode, before its prompt is printed
    first = tokenizer.end_of_document
    ids = [[first, *tokenizer.encode(text)] for text in texts]
    stream = TextStreamer(tokenizer, texts, stop or [])
    with Terminal() as terminal:
        generate(model.to(pick_device(device), getattr(torch, precision)), ids, max_new_tokens=max_new_tokens,
                 temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stream.is_over, capture=capture,
                 on_prompt=prompt_progress(terminal, max(len(row) for row in ids)))
    stream.finish()


def read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    """The prompts of a command line, in order: arguments (`-` for stdin), then files; without any, one empty prompt."""
    def decode(data: bytes, name: str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UsageError("the prompt is not UTF-8", f"{name}, byte {e.start}") from None

    if prompts.count("-") > 1:
        raise UsageError("stdin is read once", "-", "name it once")
    texts = []
    for text in prompts:
        name = "stdin" if text == "-" else "the command line"
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if text == "-" else os.fsencode(text)
        if len(data) > MAX_BYTES:
            raise UsageError("the prompt is too long", name, f"it takes {MAX_BYTES:,} bytes")
        texts.append(decode(data, name))
    for path in files:
        try:
            texts.append(decode(read_bytes(path), str(path)))
        except OSError as e:
            raise UsageError("cannot read the prompt", path, e.strerror) from None
    return texts or [""]
