"""Time per generated token after contexts of different lengths."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from rich.console import Console

from lineartime.benchmark.measure import Row, Stopwatch, clock_of, peak_rss_bytes, provenance, spread, what_is_timed
from lineartime.cache import DecodingState
from lineartime.config import to_dict
from lineartime.errors import UsageError
from lineartime.generate import PIECE_TOKENS, decode_step
from lineartime.info import describe, mib, table
from lineartime.model import LanguageModel

LENGTHS = tuple(1024 * 2**i for i in range(7))
"""1K to 64K tokens."""


def benchmark_decode(models: Mapping[str, LanguageModel], lengths: Sequence[int] = LENGTHS, *,
                     quadratic_up_to: int = 8192, repeats: int = 20, block_tokens: int = 16, threads: int = 1,
                     seed: int = 0, progress: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Time per generated token of one row after contexts of `lengths` tokens; a row per model and length.

    models: label to model, on the device and in the type to measure; any weights will do. The context is read piece by
    piece, which leaves the state that generating it would leave. Then blocks of `block_tokens` greedy tokens are timed,
    one per cell in turn, `repeats` times, after one that is not timed. quadratic_up_to: models whose state grows
    are not measured beyond it. Raises UsageError past the end of a position table."""
    if not lengths or min(lengths) < 1 or min(repeats, block_tokens, threads) < 1:
        raise UsageError("nothing to measure", f"lengths = {list(lengths)}, repeats = {repeats}, "
                         f"block_tokens = {block_tokens}, threads = {threads}", "they take whole numbers from 1")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cells = []
        for label, model in models.items():
            model.eval()
            longest = quadratic_up_to if describe(model.config).decoding.per_token else max(lengths)
            mine = sorted(n for n in set(lengths) if n <= longest)
            model.check_length(max(mine, default=0) + (repeats + 1) * block_tokens)
            for n, state in states_at(model, mine, seed):
                progress(f"{label}: {n:,} tokens read")
                cells.append((label, model, n, state))
        next_ids = [torch.zeros(1, dtype=torch.long, device=model.embed.weight.device) for _, model, _, _ in cells]
        watches = [Stopwatch(ids_1.device) for ids_1 in next_ids]
        for repeat in range(-1, repeats):
            # Turned round every time, so that no cell always follows the same one.
            for i in range(len(cells))[:: -1 if repeat % 2 else 1]:
                _, model, _, state = cells[i]
                watch = watches[i] if repeat >= 0 else Stopwatch(watches[i].device)
                with watch.running(units=block_tokens):
                    for _ in range(block_tokens):
                        next_ids[i] = decode_step(model, next_ids[i], state).argmax(-1)
            progress(f"block {repeat + 1} of {repeats}")
    finally:
        torch.set_num_threads(threads_before)
    facts = provenance()
    return [{"benchmark": "decode", "model": label, "context_tokens": n, "wall_ms_per_token": spread(watch.wall_ms),
             "cpu_ms_per_token": spread(watch.cpu_ms), "state_bytes": state.n_bytes, "batch_size": 1,
             "repeats": repeats, "block_tokens": block_tokens, "warm_up_tokens": block_tokens, "threads": threads,
             "device": watch.device.type, "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
             "process_peak_rss_mib": peak_rss_bytes() / 2**20, "config": to_dict(model.config), **facts}
            for (label, model, n, state), watch in zip(cells, watches, strict=True)]


@torch.inference_mode()
def states_at(model: LanguageModel, lengths: Sequence[int], seed: int) -> Iterator[tuple[int, DecodingState]]:
    """A copy of the decoding state at each of the rising `lengths` of one row of random tokens."""
    device, generator = model.embed.weight.device, torch.Generator().manual_seed(seed)
    state, n_read = model.decoding_state(1), 0
    for length in lengths:
        while n_read < length:
            n_new = min(PIECE_TOKENS, length - n_read)
            ids_1N = torch.randint(model.config.vocab_size, (1, n_new), generator=generator).to(device)
            model.extend(ids_1N, torch.tensor([n_new], device=device), state)
            n_read += n_new
        yield length, copy.deepcopy(state)


def flatness(rows: Sequence[Row]) -> dict[str, float]:
    """By model: the largest over the smallest median time per token of all contexts, less 1."""
    medians: dict[str, list[float]] = {}
    for row in rows:
        medians.setdefault(row["model"], []).append(row[clock_of(row) + "_ms_per_token"]["median"])
    return {label: max(values) / min(values) - 1 for label, values in medians.items()}


def print_decode(rows: Sequence[Row]) -> None:
    """Print `benchmark_decode`'s rows as a table, and how flat each model's are."""
    console, first = Console(highlight=False), rows[0]
    console.print(f"Milliseconds per generated token, one row, {what_is_timed(first)};\n"
                  f"{first['repeats']} blocks of {first['block_tokens']} tokens", markup=False)
    made = table("model", "context", "median", "min", "max", "state", width=14)
    for row in rows:
        times = row[clock_of(row) + "_ms_per_token"]
        made.add_row(row["model"], f"{row['context_tokens']:,}",
                     *(f"{times[key]:.2f}" for key in ("median", "min", "max")), mib(row["state_bytes"]))
    console.print(made)
    for label, flat in flatness(rows).items():
        mine = [row["context_tokens"] for row in rows if row["model"] == label]
        console.print(f"{label}: medians from {min(mine):,} to {max(mine):,} tokens lie within {flat:.1%}",
                      markup=False)
