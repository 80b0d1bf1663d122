"""Memory while a long prompt is read."""

import itertools
import time
from array import array
from collections.abc import Iterator

import numpy as np
import torch

from lineartime.benchmark import Row
from lineartime.benchmark.measure import measured_alone, print_table, provenance, require_positive
from lineartime.config import ModelConfig, to_dict
from lineartime.generation.generate import prefill
from lineartime.info import mib
from lineartime.model import LanguageModel
from lineartime.runtime import peak_bytes


def benchmark_read(config: ModelConfig, n_tokens: int = 1_000_000, *, threads: int = 1, device: str = "cpu",
                   seed: int = 0) -> Row:
    """Memory and time while a prompt of `n_tokens` is read by a model with random weights, in a process of its own.

    The row has the most memory the process has had, whenever a tenth of the prompt has been read: what a model with a
    state of constant size needs does not grow after the first. Raises ResourceError where the process dies."""
    require_positive(tokens=n_tokens, threads=threads)
    asked = {"config": to_dict(config), "n_tokens": n_tokens, "threads": threads, "device": device, "seed": seed}
    answer = measured_alone("read", asked, "reading the prompt", f"{n_tokens:,} tokens")
    return {"benchmark": "read", "prompt_tokens": n_tokens, **answer, "threads": threads, "device": device,
            "dtype": "float32", "config": to_dict(config), **provenance()}


def read_prompt(config: Row, n_tokens: int, threads: int, device: str, seed: int) -> Iterator[Row]:
    """One process's part of `benchmark_read`."""
    fields = ModelConfig(**config)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = LanguageModel(fields).to(device).eval()
    prompt = array("q")  # eight bytes a token: a list of them would take room that hides what the reading takes
    prompt.frombytes(np.random.default_rng(seed).integers(fields.vocab_size, size=n_tokens).tobytes())
    tenths: list[Row] = []
    started = time.perf_counter()

    def sample(n_read: int) -> None:
        if n_read * 10 >= n_tokens * (len(tenths) + 1):
            peak_mib = peak_bytes(torch.device(device)) / 2**20
            tenths.append({"tokens": n_read, "peak_mib": peak_mib, "seconds": time.perf_counter() - started})

    cpu = time.process_time()
    _, state = prefill(model, [prompt], sample)
    yield {"wall_seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu, "tenths": tenths,
           "growth_mib": tenths[-1]["peak_mib"] - tenths[0]["peak_mib"], "state_bytes": state.n_bytes}


def print_read(row: Row) -> None:
    """Print `benchmark_read`'s row."""
    steps = itertools.pairwise([{"tokens": 0, "seconds": 0.0}, *row["tenths"]])
    print_table(f"{row['prompt_tokens']:,} tokens read in {row['wall_seconds']:,.0f} s; peak memory grew by "
                f"{row['growth_mib']:,.1f} MiB after the first tenth; the state is {mib(row['state_bytes'])}",
                {"tokens read": "{tokens:,}", "peak memory": "{peak_mib:,.1f} MiB", "tokens/s": "{speed:,.0f}"},
                [now | {"speed": (now["tokens"] - before["tokens"]) / (now["seconds"] - before["seconds"])}
                 for before, now in steps])
