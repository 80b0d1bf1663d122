"""Seconds and memory of every verb on a small input, beside the rows: `python -m benchmarks.verb_times [REPEATS]`.

Each verb is a process of its own, so that what it imports counts. A line says by how much a median is above that of the
newest row of the same processor, and marks more than a fifth. `--write` adds the measured rows."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import ROOT, Row
from benchmarks.append import append_json_lines, rows_in
from lineartime.data.prepare_config import SAMPLE
from lineartime.release.provenance import provenance

ROWS = ROOT / "benchmarks/rows/verbs.jsonl"
UNITS = ("wall_s", "cpu_s", "peak_mib")
MUCH = 1.2
"""How many times its row a verb must take to be marked."""
FEW = "--tokens-per-step 2048 --steps 1 --set eval_tokens=2048 --set micro_batch_tokens=2048"
BEFORE = ("prepare book.txt --out data --tokenizer small --held-out 0.1",
          f"train --from small --data data --out run {FEW}",
          "finetune small --task classify --documents texts.csv --validation texts.csv --out labels --context 512 "
          "--learning-rates 1e-4 --set steps=1 --set tokens_per_step=2048 --set micro_batch_tokens=2048")
VERBS = {"prepare": "prepare book.txt --out {new} --tokenizer small --held-out 0.1",
         "train": f"train --from small --data data --out {{new}} {FEW}",
         "evaluate": "evaluate small --data data", "generate": "generate small Reader --max-new-tokens 1",
         "embed": "embed small book.txt --out {new}.jsonl", "classify": "classify labels book.txt --out {new}.jsonl",
         "export": "export run --out {new}"}
"""The measured commands; {new} is a name that is not there yet."""


def run(line: str, folder: Path) -> dict[str, float]:
    """Run a command in a folder: its seconds, seconds of processor and most memory, its workers' too."""
    arguments = [sys.executable, "-m", "lineartime", *line.split()]
    with open(folder / "said", "w+", encoding="utf-8") as said:
        begun = time.perf_counter()
        process = subprocess.Popen(arguments, cwd=folder, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{line}\n{said.read()}")
    return {"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}


def measure(folder: Path, repeats: int) -> list[Row]:
    """A row for each verb: of each unit the median, the least and the most."""
    (folder / "book.txt").write_text(SAMPLE.read_text(encoding="utf-8")[:100_000], encoding="utf-8")
    (folder / "texts.csv").write_text("text,label\n" + "One thing,a\nAnother thing,b\n" * 4, encoding="utf-8")
    for line in BEFORE:
        run(line, folder)
    facts, rows = provenance() | {"command": f"python -m benchmarks.verb_times {repeats} --write"}, []
    for verb, line in VERBS.items():
        times = [run(line.format(new=f"{verb}-{number}"), folder) for number in range(repeats)]
        spread = {unit: [round(f([each[unit] for each in times]), 2) for f in (statistics.median, min, max)]
                  for unit in UNITS}
        rows.append({"benchmark": "verbs", "verb": verb, "repeats": repeats, **spread, **facts})
    return rows


def compared(row: Row, before: Row | None) -> str:
    """A line for a person."""
    words = [f"{row['verb']:<9}"]
    for unit in UNITS:
        median, least, most = row[unit]
        ratio = None if before is None else median / before[unit][0]
        words.append(f"{unit} {median:>7.2f} ({least:.2f} to {most:.2f})" + ("" if ratio is None else f" {ratio:.2f}x")
                     + (" MORE" if ratio and ratio > MUCH else ""))
    return "  ".join(words)


if __name__ == "__main__":
    given = [each for each in sys.argv[1:] if each != "--write"]
    stored = {(row["cpu"], row["verb"]): row for row in rows_in(ROWS)}
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), int(given[0]) if given else 5)
    for row in found:
        print(compared(row, stored.get((row["cpu"], row["verb"]))))
    if "--write" in sys.argv:
        append_json_lines(ROWS, found)
