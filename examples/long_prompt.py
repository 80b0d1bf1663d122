"""A text that goes on after a long prompt: the prompt is read in constant memory, and a token costs
the same after it.

    python examples/long_prompt.py [TOKENS]

It reads the beginning of the book that ships with the package, and measures what a token takes and
how large the state is after 1,000 tokens and after TOKENS."""

import sys
import time
from importlib import resources

import torch

import lineartime
from lineartime.weights.generation.generate import decode_step, prefill


def main(n_tokens: int = 20_000) -> list[tuple[int, int, float]]:
    """Print the text; of each prompt its tokens, the bytes of the state after it, and milliseconds
    a token."""
    model, tokenizer, _ = lineartime.load_model("small")
    book = resources.files("lineartime").joinpath("text", "jane_eyre.txt").read_text(encoding="utf-8")
    ids = [tokenizer.end_of_document, *tokenizer.encode(book)]
    found = []
    for length in (1_000, n_tokens):
        began = time.perf_counter()
        logits_BV, state = prefill(model, [ids[:length]])  # chunk by chunk: memory does not grow with the prompt
        read_s = time.perf_counter() - began
        state_bytes = sum(each.numel() * each.element_size() for cache in state.caches
                          for each in cache.tensors().values())
        new: list[int] = []
        began = time.perf_counter()
        for _ in range(40):
            new.append(int(logits_BV[0].argmax()))
            logits_BV = decode_step(model, torch.tensor([new[-1]]), state)
        token_ms = 1e3 * (time.perf_counter() - began) / len(new)
        found.append((length, state_bytes, token_ms))
        print(f"{length:,} tokens were read in {read_s:.1f} s; the state has {state_bytes:,} bytes; a token takes "
              f"{token_ms:.1f} ms\n    ... {tokenizer.decode(ids[length - 20:length])!r}\n    "
              f"{tokenizer.decode(new)!r}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
