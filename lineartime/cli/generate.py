"""`lineartime generate`: text from a model."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lineartime.atomic_io import MAX_BYTES, read_bytes
from lineartime.cli.options import Device, Precision, ShippedModel, Strict
from lineartime.cli.terminal import Terminal
from lineartime.data.pretrained import model_folder, named_folder
from lineartime.errors import UsageError
from lineartime.settings import require, require_precision

if TYPE_CHECKING:
    from lineartime.data.tokenizer import Tokenizer

LONG_PROMPT = 20_000
"""Tokens of a prompt, at least, that is read with a progress bar."""
OTHERS = {"SpanModel": "this one answers: see `lineartime answer`",
          "DocumentClassifier": "this one labels: see `lineartime classify`",
          "DocumentEncoder": "this one gives vectors: see `lineartime embed`"}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: Annotated[int, "Most tokens to add."] = 200
    temperature: Annotated[float, "How freely tokens are drawn; 0 always takes the likeliest."] = 0.8
    top_k: Annotated[int | None, "Draw from the k likeliest tokens only."] = None
    top_p: Annotated[float | None, "Draw only from the likeliest tokens that together reach probability p."] = None
    seed: Annotated[int, "The same seed gives the same text."] = 0
    capture: Annotated[bool, "Run each token as one CUDA graph, which is faster on a GPU."] = False

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed must not be negative", f"{self.seed}")


def generate(
    arguments: Annotated[tuple[str, ...], "The model: a run, one of its checkpoints, an exported folder, or the "
                         "shipped model `small`. Then prompts: `-` reads one from stdin; without any, a new document "
                         "begins.", "MODEL [PROMPT]"] = (),
    *,
    shipped: ShippedModel = None,
    prompt_file: Annotated[tuple[Path, ...], "File with a prompt; may be given again."] = (),
    sampling: Sampling,
    stop: Annotated[tuple[str, ...], "End the text where this would come; may be given again."] = (),
    precision: Precision = "float32",
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Continue prompts.
    One prompt is printed as it grows; several are continued together and printed one after another."""
    require_precision(precision)
    require(shipped is not None or bool(arguments), "generate needs a model", "none is named",
            "name a run, or the shipped model small")
    run = named_folder(arguments[0]) if shipped is None else model_folder(shipped)
    texts = read_prompts(arguments[1:] if shipped is None else arguments, prompt_file)
    import torch

    from lineartime.generation.generate import check_sampling, generate
    from lineartime.load import load_model
    from lineartime.runtime import pick_device

    check_sampling(sampling.max_new_tokens, sampling.temperature, sampling.top_k, sampling.top_p)
    model, tokenizer, _ = load_model(run, strict=strict)
    if not model.config.causal or type(model).__name__ in OTHERS:
        raise UsageError("only a causal model continues text", run,
                         OTHERS.get(type(model).__name__, "this one fills in masks; open it in transformers"))
    model.decoding_state(0)  # refuses a model that does not decode, before its prompt is printed
    ids = [[tokenizer.end_of_document, *tokenizer.encode(text)] for text in texts]
    longest, stream = max(len(row) for row in ids), TextStreamer(tokenizer, texts, stop)
    with Terminal() as terminal:
        def show(n_read: int) -> None:
            terminal.count("tokens of the prompt", n_read, longest)
            if n_read >= longest:
                terminal.close()

        generate(model.to(pick_device(device), getattr(torch, precision)), ids, stop=stream.is_over,
                 on_prompt=show if longest >= LONG_PROMPT else None, **asdict(sampling))
    stream.finish()


def read_prompts(prompts: Sequence[str], files: Sequence[Path] = ()) -> list[str]:
    """The prompts of a command line, in order: arguments (`-` for stdin), then files; without any, one empty prompt."""
    require(prompts.count("-") <= 1, "stdin is read once", "-", "name it once")
    found = []
    for text in prompts:
        name = "stdin" if text == "-" else "the command line"
        found.append((name, sys.stdin.buffer.read(MAX_BYTES + 1) if text == "-" else os.fsencode(text)))
        require(len(found[-1][1]) <= MAX_BYTES, "the prompt is too long", name, f"it takes {MAX_BYTES:,} bytes")
    for path in files:
        try:
            found.append((str(path), read_bytes(path)))
        except OSError as e:
            raise UsageError("cannot read the prompt", path, e.strerror) from None
    texts = []
    for name, data in found:
        try:
            texts.append(data.decode("utf-8-sig"))
        except UnicodeDecodeError as e:
            raise UsageError("the prompt is not UTF-8", f"{name}, byte {e.start}") from None
    return texts or [""]


class TextStreamer:
    """Print generated text, cut at a stop text: one row as its tokens arrive, several rows at the end."""

    def __init__(self, tokenizer: "Tokenizer", prompts: list[str], stops: Iterable[str]):
        self.prompts, self.stops = prompts, [text for text in stops if text]
        self.streams = [tokenizer.stream(text) for text in prompts]
        self.text = [""] * len(prompts)
        # Characters that are not printed yet, because a stop text may begin with them; and how many are printed.
        self.n_held, self.n_printed = max([len(stop) - 1 for stop in self.stops], default=0), 0
        if len(prompts) == 1:
            print(prompts[0], end="", flush=True)

    def is_over(self, row: int, ids: list[int]) -> bool:
        """Add a row's newest token; returns whether the row's text has reached a stop text."""
        begin = max(len(self.text[row]) - self.n_held, 0)
        self.text[row] += self.streams[row](ids[-1])
        found = [at for stop in self.stops if (at := self.text[row].find(stop, begin)) >= 0]
        if found:
            self.text[row] = self.text[row][: min(found)]
        if len(self.prompts) == 1:
            self.print_to(len(self.text[0]) - (0 if found else self.n_held))
        return bool(found)

    def print_to(self, end: int) -> None:
        """Print the only row's text up to a character."""
        end = max(end, self.n_printed)
        print(self.text[0][self.n_printed : end], end="", flush=True)
        self.n_printed = end

    def finish(self) -> None:
        """Print the remaining text."""
        if len(self.prompts) == 1:
            self.print_to(len(self.text[0]))
            print()
            return
        for number, (prompt, text) in enumerate(zip(self.prompts, self.text, strict=True), 1):
            print(f"== {number}\n{prompt}{text}")
