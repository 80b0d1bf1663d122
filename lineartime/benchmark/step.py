"""Time and memory of training steps at several contexts, the models in turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from rich.console import Console

from lineartime.benchmark.measure import (
    Row,
    Stopwatch,
    clock_of,
    in_own_process,
    peak_rss_bytes,
    provenance,
    spread,
    what_is_timed,
)
from lineartime.config import ModelConfig, to_dict
from lineartime.errors import UsageError
from lineartime.info import table
from lineartime.model import LanguageModel, token_losses


def benchmark_train(configs: Mapping[str, ModelConfig], contexts: Sequence[int], *, tokens: int = 8192,
                    repeats: int = 3, precision: str = "float32", threads: int = 1, device: str = "cpu", seed: int = 0,
                    progress: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Time and memory of forward, loss and backward of a micro-batch; a row per model and context.

    configs: label to model, whose context is replaced. tokens: in a micro-batch, one row where the context is longer.
    Every measurement is a process of its own, which takes one step that is not timed and then one that is; the cells
    are gone through `repeats` times. A process that dies gives a row with "failed" and no times."""
    if not contexts or min(*contexts, tokens, repeats, threads) < 1:
        raise UsageError("nothing to measure", f"contexts = {list(contexts)}, tokens = {tokens}, repeats = {repeats}, "
                         f"threads = {threads}", "they take whole numbers from 1")
    cells = [(label, replace(config, context=context)) for label, config in configs.items() for context in contexts]
    answers: list[list[Row]] = [[] for _ in cells]
    for repeat in range(repeats):
        for (label, config), mine in zip(cells, answers, strict=True):
            if not any("failed" in answer for answer in mine):
                progress(f"{label}, context {config.context:,}: {repeat + 1} of {repeats}")
                mine.append(in_own_process("train", {
                    "config": to_dict(config), "tokens": tokens, "precision": precision, "threads": threads,
                    "device": device, "seed": seed}))
    facts, rows = provenance(), []
    for (label, config), mine in zip(cells, answers, strict=True):
        row: Row = {"benchmark": "train", "model": label, "context_tokens": config.context}
        failed = [answer["failed"] for answer in mine if "failed" in answer]
        if failed:
            row["failed"] = failed[0]
        else:
            n_tokens = mine[0]["n_tokens"]
            clock = clock_of({"device": device})
            for name in ("wall", "cpu"):
                row[f"{name}_ms_per_step"] = spread([answer[f"{name}_ms"] for answer in mine])
            row |= {"tokens_per_step": n_tokens, "peak_mib": max(answer["peak_mib"] for answer in mine),
                    "tokens_per_s": n_tokens * 1e3 / row[f"{clock}_ms_per_step"]["median"]}
        rows.append({**row, "repeats": repeats, "warm_up_steps": 1, "threads": threads, "device": device,
                     "dtype": precision, "config": to_dict(config), **facts})
    return rows


def train_step(config: ModelConfig, tokens: int, precision: str, threads: int, device: str, seed: int) -> Row:
    """One process's part of `benchmark_train`."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, n_rows = LanguageModel(config).to(device), max(tokens // config.context, 1)
    rows_BT = torch.randint(config.vocab_size, (n_rows, config.context + 1), device=device)
    watch = Stopwatch(torch.device(device))
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with watch.running():
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = token_losses(model, rows_BT).mean()
            loss.backward()
    peak = peak_rss_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()
    return {"wall_ms": watch.wall_ms[-1], "cpu_ms": watch.cpu_ms[-1], "peak_mib": peak / 2**20,
            "n_tokens": n_rows * config.context}


def print_train(rows: Sequence[Row]) -> None:
    """Print `benchmark_train`'s rows as a table."""
    console, first = Console(highlight=False), rows[0]
    console.print(f"Forward, loss and backward, {what_is_timed(first)}; median of {first['repeats']} processes",
                  markup=False)
    made = table("model", "context", "tokens/s", "ms per step", "min", "max", "peak memory", width=14)
    for row in rows:
        if "failed" in row:
            made.add_row(row["model"], f"{row['context_tokens']:,}", "failed", row["failed"])
            continue
        times = row[clock_of(row) + "_ms_per_step"]
        made.add_row(row["model"], f"{row['context_tokens']:,}", f"{row['tokens_per_s']:,.0f}",
                     *(f"{times[key]:,.0f}" for key in ("median", "min", "max")), f"{row['peak_mib']:,.0f} MiB")
    console.print(made)
