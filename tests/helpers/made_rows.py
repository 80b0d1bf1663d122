"""Rows of `python -m benchmarks reproduce` without runs: tests know their numbers, which follow from the cell."""

import json
import math

from benchmarks.paper.tables import cells_of
from benchmarks.recurrence import KINDS, SEEN

MACHINE = {"time": "2026-01-02T03:04:05Z", "commit": "0123456789" * 4, "command": "python -m benchmarks reproduce",
           "cpu": "a CPU", "cores": 2, "memory_gib": 24.0, "gpu": None, "load_average": 0.5, "python": "3.12.0",
           "torch": "2.13.0", "lineartime": "0.1.0", "device": "cpu", "dtype": "bfloat16", "threads": 1}


def made_rows(*tables, scale="cpu"):
    """All rows of whole tables: each cell trained with its seeds, fine-tuned where it is, timed beside its column."""
    rows = {}
    for table in tables:
        for cell in cells_of(table, scale):
            made = [step_row(cell)]
            for seed in cell.seeds if cell.table.kind == "train" else ():
                made += [train_row(cell, seed), *([finetune_row(cell, seed)] if cell.questions else [])]
            for row in made:
                rows.setdefault(json.dumps([row["kind"], row["text"], row["settings"]], sort_keys=True), row)
    return list(rows.values())


def place(cell):
    """Which row of its table a cell is in: the later, the better and the faster it is."""
    return list(cell.table.models).index(cell.row)


def final_loss(cell, seed=0):
    """Nats per token: 0.05 less with each row and with each doubling of the context, 0.01 more with each seed."""
    first = 2.0 if cell.text.mlm else 4.0
    return first - 0.05 * place(cell) - 0.05 * math.log2(cell.where.context / 512) + 0.01 * seed


def step_ms(cell):
    """Half as fast at four times the context, but for the rows of a linear model."""
    grows = 0.0 if "flash" in cell.model.preset and cell.model.preset != "flash-quad" else 0.5
    return (300 - 20 * place(cell)) * (cell.where.context / 512) ** grows


def times(ms):
    return {"median": ms, "q1": 0.97 * ms, "q3": 1.03 * ms, "min": 0.95 * ms, "max": 1.2 * ms, "n": 5}


def train_row(cell, seed):
    settings, loss = cell.settings(seed), final_loss(cell, seed)
    steps = settings.get("steps", 1000)
    curve = [[steps * part // 10, loss + 3 * (1 / part - 0.1)] for part in range(1, 11)]
    held_out = {"loss": loss} | ({} if cell.text.mlm else {"word_perplexity": math.exp(2 * loss), "n_words": 500})
    return {"kind": "train", "scale": cell.scale.name, "text": cell.text.name, "settings": settings,
            "n_parameters": 1_800_000, **evaluations(cell, loss), "curve": curve, "held_out": held_out,
            "tokens": steps * settings.get("tokens_per_step", 2**18), **MACHINE}


def evaluations(cell, loss):
    """What the table evaluates: 0.01 nats less at twice the context, 1 less where the token was before."""
    made = {}
    if "context_use" in cell.table.evaluations:
        made["context_use"] = {"contexts": [512 * 2**i for i in range(6)],
                               "losses": [loss - 0.01 * i for i in range(6)], "n_tokens": 900, "documents": []}
    if "recurrence" in cell.table.evaluations:
        classes = [{"kind": kind, "seen": seen, "n_tokens": 300, "loss": loss - 1 + i} for kind in KINDS
                   for i, seen in enumerate(SEEN)]
        made["recurrence"] = {"classes": classes}
    return made


def finetune_row(cell, seed):
    return {"kind": "finetune", "scale": cell.scale.name, "text": cell.text.name, "settings": cell.settings(seed),
            "questions": cell.questions, "f1": 10.0 + place(cell) + seed, "word_overlap": {"f1": 26.0},
            "step_ms": {"cpu": times(400.0)}, **MACHINE}


def step_row(cell):
    settings = cell.settings(None)
    return {"kind": "step", "scale": cell.scale.name, "text": cell.text.name, "settings": settings, "benchmark": "step",
            "model": cell.model.preset, "context_tokens": settings["context"],
            "tokens_per_step": settings["micro_batch_tokens"], "n_parameters": 1_800_000, "clock": "cpu",
            "cpu_ms": times(step_ms(cell)), "wall_ms": times(1.5 * step_ms(cell)), "peak_mib": 900.0,
            "run": f"{cell.table.name} {cell.column}", **MACHINE}
