"""Tests and measurements on one GPU, from a checkout without an installation: `python3 -m benchmarks.gpu STAGE...`.

A stage ends by itself within its minutes: nothing is started for which the time left is too short, and what runs at the
end is stopped. The same command goes on where it stopped: calls whose rows are in OUT/rows.jsonl are left out. The most
telling calls come first. OUT gets rows.jsonl, summary.md, calls.jsonl (how each ended), log.txt (what the newest said)
and tests.txt. The stage `tables` makes the paper's tables by `python -m benchmarks reproduce`: its rows are in
OUT/tables.jsonl, its runs and logs in OUT/reproduce.
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
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import ROOT, Row, cells
from lineartime.atomic_io import read_json_lines, write_atomically

CALLS = Path(__file__).with_name("gpu.toml")
COMMITTED_ROWS = ROOT / "benchmarks" / "rows" / "quality.jsonl"
STAGES = ("tests", "kernels", "step", "decode", "tables")
FIRST_GUESS_S, TINY_GUESS_S = 75.0, 10.0
"""How long a call is thought to take before one has been measured."""
SAVE_S = 40.0
"""How long before the end of a stage what trains is asked to save: it first ends its step, or its compiling."""

say = partial(print, flush=True)


def calls_of(stage: str, tiny: bool = False) -> dict[str, list[str]]:
    """What gpu.toml lists for a stage, or for its dry run."""
    return cells.named_calls([f"tiny-{stage}" if tiny else stage], CALLS)


def rows_in(path: Path) -> list[Row]:
    """The rows of a file; a last line that was cut off is none."""
    return read_json_lines(path, dict, "a row") if path.exists() else []


def done_in(out: Path) -> set[str]:
    """The calls that need not be made again: those whose rows are there, and tables that have every row."""
    return {*(row["cell"] for row in rows_in(out / "rows.jsonl") if row.get("cell")),
            *(line["cell"] for line in rows_in(out / "calls.jsonl") if line["ended"] == cells.DONE)}


def make_table(name: str, words: Sequence[str], seconds: float, *, out: Path, more: Sequence[str]) -> str:
    """As many of a table's missing rows as there is time for; how it ended."""
    (out / "reproduce").mkdir(exist_ok=True)
    command = [*cells.BENCHMARKS, *words, "--rows", str(out / "tables.jsonl"), "--out", str(out / "reproduce"), *more]
    return cells.run(command, seconds, out / "reproduce" / f"{name}.log", SAVE_S)


def run_stage(stage: str, out: Path, device: str, deadline: float, texts: Path, tiny: bool) -> bool:
    """A stage's calls; True where none failed. texts: of the tables, the folder with those of the scale."""
    call = partial(cells.measure_call, rows=out / "rows.jsonl", more=["--device", device], log=out / "log.txt")
    if stage == "tables":
        if not tiny and not texts.is_dir():
            say(f"tables: not made, {texts} is not there; --texts names the folder with the texts of the scale")
            return False
        if COMMITTED_ROWS.exists() and not (out / "tables.jsonl").exists():
            shutil.copyfile(COMMITTED_ROWS, out / "tables.jsonl")
        more = ["--device", device, *([] if tiny else ["--texts", str(texts)])]
        call = partial(make_table, out=out, more=more)
    return cells.run_calls(calls_of(stage, tiny), call, done_in(out), out / "calls.jsonl", say, deadline=deadline,
                           guess_s=TINY_GUESS_S if tiny else FIRST_GUESS_S)


def run_tests(out: Path, tiny: bool, seconds: float) -> bool:
    """The tests that need a GPU, their output in tests.txt; a dry run only collects them.

    In several processes: most of their time a processor compiles kernels. Those that have passed are in
    tests-passed.txt and are not run again."""
    text, passed = out / "tests.txt", out / "tests-passed.txt"
    before = passed.read_text(encoding="utf-8").splitlines() if passed.exists() else []
    how = ["--collect-only"] if tiny else ["-v", "-n", "8"]
    command = [sys.executable, "-m", "pytest", "tests/ops/test_gpu.py", "-m", "gpu", "-p", "no:cacheprovider", *how,
               *(f"--deselect={name}" for name in before),
               "-W", "default"]  # another version of a library may warn, and that fails nothing here
    ended = cells.run(command, seconds, text)
    new = re.findall(r"PASSED (\S.*?) *$", text.read_text(encoding="utf-8"), re.MULTILINE)
    passed.write_text("".join(f"{name}\n" for name in [*before, *new]), encoding="utf-8")
    say(f"tests: {len(before)} had passed before; {cells.last_line(text).strip('= ')}; see {text}")
    nothing_left = bool(before) and "no tests ran" in cells.last_line(text)
    return ended == cells.DONE or nothing_left


def summarise(out: Path, tiny: bool) -> None:
    """Write the summary anew: what is done, what is left, what the rows give."""
    done, lines = done_in(out), ["# Measured by benchmarks/gpu.py", ""]
    for stage in STAGES[1:]:
        calls = calls_of(stage, tiny)
        left = [name for name in calls if name not in done]
        lines.append(f"- {stage}: {len(calls) - len(left)} of {len(calls)} done"
                     + (f"; left: {', '.join(left)}" if left else ""))
    if (out / "tests.txt").exists():
        lines.append(f"- tests: {cells.last_line(out / 'tests.txt').strip('= ')}")
    reports = [["speed", "--rows", str(out / "rows.jsonl")]] if rows_in(out / "rows.jsonl") else []
    if any(row["scale"] == "gpu" for row in rows_in(out / "tables.jsonl")):
        reports.append(["--scale", "gpu", "--rows", str(out / "tables.jsonl")])
    for arguments in reports:
        made = subprocess.run([*cells.BENCHMARKS, "report", *arguments], cwd=ROOT, capture_output=True, text=True)
        lines += ["", made.stdout or made.stderr]
    write_atomically(out / "summary.md", "\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and measurements on one GPU, resumable, from a checkout.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for rows and summary")
    parser.add_argument("--texts", type=Path, default=ROOT / "out" / "texts",
                        help="folder with the texts of the tables, out/texts of the checkout by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="of each stage")
    parser.add_argument("--commit", help="written into rows where the checkout has no git")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run of models of a few weights")
    given = parser.parse_args()
    unknown = [f"unknown stage: {stage}; it is one of {', '.join(STAGES)}" for stage in given.stages
               if stage not in STAGES]
    unknown += [] if importlib.util.find_spec("torch") else ["torch is missing here; name a Python that has it"]
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if not unknown and given.device == "cuda" and subprocess.run([sys.executable, "-c", code]).returncode:
        unknown = ["no CUDA device here; --device cpu --tiny tries this script without one"]
    if unknown:
        print(f"error: {unknown[0]}", file=sys.stderr)
        return 2
    out, texts, well = given.out.resolve(), given.texts.resolve(), True
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    if given.commit:
        os.environ["LINEARTIME_COMMIT"] = given.commit
    for stage in given.stages or STAGES:
        deadline = time.monotonic() + 60 * given.minutes
        well &= (run_tests(out, given.tiny, 60 * given.minutes) if stage == "tests" else
                 run_stage(stage, out, given.device, deadline, texts, given.tiny))
        summarise(out, given.tiny)
    say(f"rows     {out / 'rows.jsonl'}\nsummary  {out / 'summary.md'}")
    return 0 if well else 1


def stop(number: int, _: object) -> None:
    """What runs is ended by `run`; the rows so far stay."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sys.exit(main())
