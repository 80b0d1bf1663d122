"""Tests and measurements on one GPU, from a checkout without an installation: `python3 tools/gpu.py STAGE...`.

A stage ends by itself within its minutes: nothing is started for which the time left is too short, and what runs at the
end is stopped. The same command goes on where it stopped: calls whose rows are in OUT/rows.jsonl are left out. The most
telling calls come first. OUT gets rows.jsonl, summary.md, calls.jsonl (how each ended), log.txt (what the newest said)
and tests.txt. The stage `tables` makes the paper's tables by `lineartime reproduce`: its rows are in OUT/tables.jsonl,
its runs and logs in OUT/reproduce.
"""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lineartime.atomic_io import read_json_lines, write_atomically  # noqa: E402
from lineartime.benchmark import environment  # noqa: E402
from lineartime.benchmark.cells import (  # noqa: E402
    DONE,
    LINEARTIME,
    Calls,
    last_line,
    measure_call,
    named_calls,
    run,
    run_calls,
)

CALLS = Path(__file__).with_name("gpu.toml")
STAGES = ("tests", "kernels", "step", "decode", "tables")
COMMITTED_ROWS = ROOT / "lineartime" / "results" / "quality.jsonl"
NEEDED = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "matplotlib", "typer", "rich")
FOR_TESTS, FOR_TABLES, PEERS = ("pytest", "hypothesis"), ("pyarrow",), ("flash_pytorch", "fla")

AT_ONCE = 8
"""Processes that tests are run in side by side: most of their time a processor compiles kernels."""

FIRST_GUESS_S, TINY_GUESS_S = 75.0, 10.0
"""How long a call is thought to take before one has been measured."""

SAVE_S = 40.0
"""How long before the end of a stage what trains is asked to save: it first ends its step, or its compiling."""


def calls_of(stage: str, tiny: bool = False) -> dict[str, list[str]]:
    """What gpu.toml lists for a stage, or its dry run; what compares with peers only where there is one."""
    calls = named_calls([f"tiny-{stage}" if tiny else stage], CALLS)
    return {name: words for name, words in calls.items()
            if not name.startswith("gpu-peers/") or len(absent(PEERS)) < len(PEERS)}


def rows_in(path: Path) -> list[dict]:
    """The rows of a file; a last line that was cut off is none."""
    return read_json_lines(path, dict, "a row") if path.exists() else []


def done_in(out: Path) -> set[str]:
    """The calls that need not be made again: those whose rows are there, and tables that have every row."""
    return {*(row["cell"] for row in rows_in(out / "rows.jsonl") if row.get("cell")),
            *(line["cell"] for line in rows_in(out / "calls.jsonl") if line["ended"] == DONE)}


def make_table(name: str, words: Sequence[str], seconds: float, *, out: Path, more: Sequence[str]) -> str:
    """As many of a table's missing rows as there is time for; how it ended."""
    (out / "reproduce").mkdir(exist_ok=True)
    return run([*LINEARTIME, *words, "--rows", str(out / "tables.jsonl"), "--out", str(out / "reproduce"), *more],
               seconds, out / "reproduce" / f"{name}.log", SAVE_S)


def run_stage(stage: str, calls: Calls, out: Path, device: str, deadline: float, guess_s: float,
              texts: Path | None) -> bool:
    """A stage's calls; True where none failed. texts: of the tables, the folder with those of the scale; None where
    nothing is trained."""
    call = partial(measure_call, rows=out / "rows.jsonl", more=["--device", device], log=out / "log.txt")
    if stage == "tables":
        missing = absent(FOR_TABLES) if texts else []
        if missing or (texts and not texts.is_dir()):
            say("tables: not made, " + (f"{', '.join(missing)} is missing here" if missing else
                f"{texts} is not there; --texts names the folder with the texts of the scale"))
            return False
        if COMMITTED_ROWS.exists() and not (out / "tables.jsonl").exists():
            shutil.copyfile(COMMITTED_ROWS, out / "tables.jsonl")
        call = partial(make_table, out=out, more=["--device", device, *(["--texts", str(texts)] if texts else [])])
    return run_calls(calls, call, done_in(out), out / "calls.jsonl", say, deadline=deadline, guess_s=guess_s)


def run_tests(out: Path, tiny: bool, seconds: float) -> bool:
    """The tests that need a GPU, in several processes, their output in tests.txt; a dry run only collects them."""
    if missing := absent(FOR_TESTS):
        say(f"tests: not run, {', '.join(missing)} is missing here")
        return False
    started, text = time.monotonic(), out / "tests.txt"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    ended = run([*command, "tests/ops/test_gpu.py", "--collect-only"], seconds, text)
    tests = [line for line in text.read_text(encoding="utf-8").splitlines() if "::" in line]
    if tiny or ended != DONE or not tests:
        say(f"tests: only collected: {last_line(text).strip('= ')}")
        return bool(tests) and ended == DONE
    n = max(min(AT_ONCE, (os.cpu_count() or 2) // 2, len(tests)), 1)
    parts, left = [out / f".tests-{i}.txt" for i in range(n)], seconds - (time.monotonic() - started)
    with ThreadPoolExecutor(n) as pool:
        [*pool.map(lambda i: run([*command, *tests[i::n]], left, parts[i]), range(n))]
    counts = Counter({"passed": 0})
    for number, word in re.findall(r"(\d+) (passed|failed|error)", " ".join(map(last_line, parts))):
        counts[word] += int(number)
    said = "".join(part.read_text(encoding="utf-8") for part in parts)
    for part in parts:
        part.unlink()
    summary = ", ".join(f"{number} {word}" for word, number in counts.items()) + f" of {len(tests)}"
    text.write_text(f"{said}{summary}\n", encoding="utf-8")
    for line in re.findall(r"^(?:FAILED|ERROR).*", said, re.MULTILINE)[:20]:
        say(f"tests: {line}")
    say(f"tests: {summary}")
    return counts["passed"] == len(tests)


def summarise(out: Path, tiny: bool) -> None:
    """Write the summary anew: what is done, what is left, what the rows give."""
    done, lines = done_in(out), ["# Measured by tools/gpu.py", ""]
    for stage in STAGES[1:]:
        calls = calls_of(stage, tiny)
        left = [name for name in calls if name not in done]
        lines.append(f"- {stage}: {len(calls) - len(left)} of {len(calls)} done"
                     + (f"; left: {', '.join(left)}" if left else ""))
    if (out / "tests.txt").exists():
        lines.append(f"- tests: {last_line(out / 'tests.txt').strip('= ')}")
    reports = [["speed", "--rows", str(out / "rows.jsonl")]] if rows_in(out / "rows.jsonl") else []
    if any(row["scale"] == "gpu" for row in rows_in(out / "tables.jsonl")):
        reports.append(["--scale", "gpu", "--rows", str(out / "tables.jsonl")])
    for arguments in reports:
        made = subprocess.run([*LINEARTIME, "report", *arguments], env=environment(), capture_output=True, text=True)
        lines += ["", made.stdout or made.stderr]
    write_atomically(out / "summary.md", "\n".join(lines) + "\n")


def absent(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def say(line: str) -> None:
    print(line, flush=True)


def check(stages: Sequence[str], before: Path | None, device: str) -> str:
    """What stands in the way of measuring, in one line; "" for nothing."""
    if unknown := [stage for stage in stages if stage not in STAGES]:
        return f"unknown stage: {unknown[0]}; it is one of {', '.join(STAGES)}"
    if before is not None and not before.is_file():
        return f"cannot read the rows: {before}"
    if missing := absent(NEEDED):
        return f"missing here: {', '.join(missing)}; name a Python that has them"
    code = "import torch; print(torch.__version__, torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    if not found:
        return "torch cannot be imported"
    if tuple(int(part) for part in found[0].split(".")[:2]) < (2, 11):
        return f"torch 2.11 or newer is needed: this is {found[0]}"
    if device == "cuda" and found[1] != "True":
        return "no CUDA device here; --device cpu --tiny tries this script without one"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and measurements on one GPU, resumable, from a checkout.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for rows and summary")
    parser.add_argument("--before", type=Path, help="rows of an earlier call, taken where OUT has none")
    parser.add_argument("--texts", type=Path, default=ROOT / "out" / "texts",
                        help="folder with the texts of the tables, out/texts of the checkout by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="of each stage")
    parser.add_argument("--commit", help="written into rows where the checkout has no git")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run of models of a few weights")
    given = parser.parse_args()
    started = time.monotonic()
    if wrong := check(given.stages, given.before, given.device):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    out, texts = given.out.resolve(), None if given.tiny else given.texts.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.before and not (out / "rows.jsonl").exists():
        shutil.copyfile(given.before, out / "rows.jsonl")
    os.chdir(ROOT)
    if given.commit:
        os.environ["LINEARTIME_COMMIT"] = given.commit
    well = True
    for stage in given.stages or STAGES:
        deadline = started + 60 * given.minutes
        if stage == "tests":
            well &= run_tests(out, given.tiny, deadline - time.monotonic())
        else:
            well &= run_stage(stage, calls_of(stage, given.tiny), out, given.device, deadline,
                              TINY_GUESS_S if given.tiny else FIRST_GUESS_S, texts)
        summarise(out, given.tiny)
        started = time.monotonic()
    say(f"rows     {out / 'rows.jsonl'}\nsummary  {out / 'summary.md'}")
    return 0 if well else 1


def stop(number: int, frame: FrameType | None) -> None:
    """What runs is ended by `run`; the rows so far stay."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sys.exit(main())
