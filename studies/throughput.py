"""Tokens per second by the length of documents: the shipped FLASH beside a Transformer++ of its size.

    python studies/throughput.py                                       measures; on an otherwise idle machine
    python studies/throughput.py --into docs/guides/documents.md       writes the table

Weights do not matter for time, so the Transformer++ has new ones. Both read documents as `lineartime embed` does; a
turn of each length takes 32,768 tokens, and the models take turns. Processor time, one thread."""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import lineartime  # noqa: E402
from benchmarks.markdown import markdown  # noqa: E402
from benchmarks.pages import fill_place  # noqa: E402
from lineartime.atomic_io import append_json_lines, read_json_lines  # noqa: E402
from lineartime.cli.exits import exit_code  # noqa: E402
from lineartime.config import model_config  # noqa: E402
from lineartime.data.pretrained import named_folder  # noqa: E402
from lineartime.documents.pooling import read_means  # noqa: E402
from lineartime.model import LanguageModel  # noqa: E402
from lineartime.release.provenance import provenance  # noqa: E402

ROWS = ROOT / "benchmarks" / "rows" / "throughput.jsonl"
COMMAND = "python studies/throughput.py"
LENGTHS, TOKENS, REPEATS = (512, 2048, 8192, 32768), 32768, 3
NAMES = {"small": "FLASH (`small`)", "transformer++": "Transformer++ of its size"}


def models() -> dict[str, LanguageModel]:
    """The shipped model, and a Transformer++ of the same width and vocabulary, a pair for each two of its layers."""
    small, _, _ = lineartime.load_model(named_folder("small"))
    config = small.config
    torch.manual_seed(0)
    other = LanguageModel(model_config("transformer++", n_layers=config.n_layers // 2, d_model=config.d_model,
                                       n_heads=config.d_model // 64, vocab_size=config.vocab_size,
                                       context=config.context, init_std=config.init_std))
    return {"small": small.eval(), "transformer++": other.eval()}


def seconds(model: LanguageModel, length: int) -> float:
    """Processor time of a turn."""
    documents = torch.randint(model.config.vocab_size, (TOKENS // length, length),
                              generator=torch.Generator().manual_seed(length)).tolist()
    started = time.process_time()
    n_read = sum(mean.n_tokens for mean in read_means(model, ([ids] for ids in documents)))
    assert n_read == TOKENS
    return time.process_time() - started


def measure(rows: Path) -> None:
    torch.set_num_threads(1)
    found: dict[tuple[str, int], list[float]] = {}
    both = models()
    for model in both.values():
        seconds(model, LENGTHS[0])  # not counted
    for turn in range(REPEATS):
        for length in LENGTHS:
            for name in list(both)[:: 1 if turn % 2 == 0 else -1]:
                found.setdefault((name, length), []).append(TOKENS / seconds(both[name], length))
                print(f"{name}, {length:,} tokens: {found[name, length][-1]:,.0f} tokens/s", flush=True)
    append_json_lines(rows, [
        {"task": "throughput", "model": name, "tokens": length, "tokens_per_s": each, "threads": 1,
         "n_parameters": sum(p.numel() for p in both[name].parameters())} | provenance() | {"command": COMMAND}
        for (name, length), each in found.items()])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, and the lowest and highest; a ratio is that of two turns side by side."""
    lines, by_name = [], {}
    for name, title in NAMES.items():
        own = {row["tokens"]: row["tokens_per_s"] for row in rows if row["model"] == name}
        by_name[name] = own
        n = next(row["n_parameters"] for row in rows if row["model"] == name)
        lines.append([f"{title}, {n / 1e6:.1f} M", *(
            f"{statistics.median(own[length]):,.0f} ({min(own[length]):,.0f}-{max(own[length]):,.0f})"
            for length in LENGTHS)])
    ratios = [[a / b for a, b in zip(by_name["small"][length], by_name["transformer++"][length], strict=True)]
              for length in LENGTHS]
    lines.append(["ratio", *(f"{statistics.median(each):.2f}" for each in ratios)])
    return markdown(["tokens per second", *(f"{length:,} tokens" for length in LENGTHS)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--into", type=Path, help="write the table into this page, in place of measuring")
    given = parser.parse_args()
    if given.into is None:
        measure(given.rows)
        return
    fill_place(given.into, "throughput", table(read_json_lines(given.rows, dict, "a row")))


if __name__ == "__main__":
    sys.exit(exit_code(main))
