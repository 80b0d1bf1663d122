"""Tests and measurements on one GPU, from a checkout without an installation: `python3 tools/gpu.py STAGE...`.

A stage ends by itself within its minutes: nothing is started for which the time left is too short, and what runs at the
end is stopped. The same command goes on where it stopped: calls whose rows are in OUT/rows.jsonl are left out. The most
telling calls come first. OUT gets rows.jsonl, summary.md, progress.jsonl (what was tried) and tests.txt. The stage
`tables` makes the paper's tables by `lineartime reproduce`: its rows are in OUT/tables.jsonl, its runs and logs in
OUT/reproduce.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lineartime.atomic_io import append_json_lines, read_json_lines, write_atomically  # noqa: E402

LINEARTIME = (sys.executable, "-m", "lineartime")
CALLS = Path(__file__).with_name("gpu.toml")
STAGES = ("tests", "kernels", "step", "decode", "tables")
COMMITTED_ROWS = ROOT / "lineartime" / "results" / "quality.jsonl"
NEEDED = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "matplotlib", "typer", "rich")
FOR_TESTS, FOR_TABLES = ("pytest", "hypothesis"), ("pyarrow",)
PEERS = {"flash-pytorch": "flash_pytorch", "fla:retention": "fla", "fla:gla": "fla"}
KERNEL = "triton"
"""What a kernel of ours is called in a row."""

AT_ONCE = 8
"""Processes that tests are run in side by side: most of their time a processor compiles kernels."""

FIRST_GUESS_S, TINY_GUESS_S = 75.0, 10.0
"""How long a call is thought to take before one has been measured."""

SAVE_S = 40.0
"""How long before the end of a stage what trains is asked to save: it first ends its step, or its compiling."""

DONE, STOPPED, COMPLETE = "done", "stopped at the end of the stage's time", "complete"
"""How a call can end well; of `tables` a call is complete when it has every row."""


@dataclass(frozen=True)
class Call:
    """One call of `lineartime benchmark`, whose rows are written together or not at all; or of `lineartime reproduce`,
    which goes on where it stopped."""

    stage: str
    name: str
    """The table that its rows are for, a slash, and what tells it from the table's others."""
    arguments: tuple[str, ...]


def read_calls(tiny: bool = False) -> list[Call]:
    """What gpu.toml lists, or its dry run, in its order."""
    listed = tomllib.loads(CALLS.read_text(encoding="utf-8"))
    stages = listed["tiny"] if tiny else {name: named for name, named in listed.items() if name != "tiny"}
    return [Call(stage, name, tuple(arguments.split())) for stage, named in stages.items()
            for name, arguments in named.items()]


class Out:
    """The folder that everything is written to."""

    def __init__(self, folder: Path, before: Path | None):
        self.folder = folder
        self.rows, self.progress = folder / "rows.jsonl", folder / "progress.jsonl"
        self.summary, self.tables, self.runs = folder / "summary.md", folder / "tables.jsonl", folder / "reproduce"
        folder.mkdir(parents=True, exist_ok=True)
        if before is not None and not self.rows.exists():
            shutil.copyfile(before, self.rows)

    def read(self, path: Path) -> list[dict]:
        """The rows of a file; a last line that was cut off is none."""
        return read_json_lines(path, dict, "a row") if path.exists() else []

    def measured(self) -> set[str]:
        return {*(row["cell"] for row in self.read(self.rows) if row.get("cell")),
                *(line["cell"] for line in self.read(self.progress) if begins(line["ended"], COMPLETE))}

    def n_tries(self, call: Call) -> int:
        """How often a call was tried; a table that was stopped goes on, so stopping it was no try."""
        ends = [line["ended"] for line in self.read(self.progress) if line["cell"] == call.name]
        return sum(call.stage != "tables" or not begins(ended, STOPPED) for ended in ends)

    def summarise(self, calls: Sequence[Call], note: str = "") -> None:
        """Write the summary anew: what is done, what is left, what the rows give."""
        measured, ends = self.measured(), {line["cell"]: line["ended"] for line in self.read(self.progress)}
        lines = ["# Measured by tools/gpu.py", "", "Written as it goes, from rows.jsonl beside it.", ""]
        for stage in STAGES[1:]:
            mine = [call for call in calls if call.stage == stage]
            left = [call.name for call in mine if call.name not in measured]
            lines.append(f"- {stage}: {len(mine) - len(left)} of {len(mine)} done"
                         + (f"; left: {', '.join(left)}" if left else ""))
            lines += [f"  - {name}: {ends[name]}" for name in left if name in ends]
        tests = self.folder / "tests.txt"
        if tests.exists():
            lines.append(f"- tests: {last_line(tests).strip('= ')}")
        if note:
            lines.append(f"- {note}")
        text = report("speed", "--rows", str(self.rows)) if self.read(self.rows) else ""
        if any(row["scale"] == "gpu" for row in self.read(self.tables)):
            text += "\n" + report("--scale", "gpu", "--rows", str(self.tables))
        write_atomically(self.summary, "\n".join(lines) + "\n\n" + text)


def begins(ended: str, *ways: str) -> bool:
    """Whether a call ended in one of these ways, whatever is said behind a comma."""
    return ended.partition(", ")[0] in ways


def report(*arguments: str) -> str:
    """What `lineartime report` prints."""
    done = subprocess.run([*LINEARTIME, "report", *arguments], env=environment(), capture_output=True, text=True)
    return done.stdout or done.stderr


def last_line(path: Path) -> str:
    return (path.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def end_with_parent(parent: int, number: int) -> None:
    """In a child: get this signal when this script is killed, so that nothing goes on measuring beside the next
    call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)
        if os.getppid() != parent:  # it was killed before this process could ask
            os._exit(1)


def run(command: Sequence[str], seconds: float, output: Path | None = None, save_s: float = 0.0) -> str:
    """Run a command of this checkout for at most so long; how it ended, "" for well.

    save_s: so long before that it is asked to save and end, where it can."""
    out = output.open("w", encoding="utf-8") if output else None
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=out, stderr=out or subprocess.PIPE, text=True,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM if save_s else signal.SIGKILL))
    try:
        _, errors = process.communicate(timeout=max(seconds - save_s, 1))
    except subprocess.TimeoutExpired:
        return STOPPED
    finally:
        if process.poll() is None and save_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=save_s)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if out:
            out.close()
    if process.returncode == 0:
        return ""
    lines = [line.strip() for line in (errors or "").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


def measure(call: Call, out: Out, device: str, commit: str | None, seconds: float) -> str:
    """One cell's rows into the file; how it ended."""
    aside = out.folder / ".cell.jsonl"
    aside.unlink(missing_ok=True)
    arguments = [argument for argument in call.arguments if argument.removesuffix(":compiled") not in absent_peers()]
    ended = run([*LINEARTIME, "benchmark", *arguments, "--device", device, "--json", str(aside)], seconds)
    if not ended:
        rows = out.read(aside)
        append_json_lines(out.rows, [{**row, "cell": call.name} for row in signed(rows, commit)])
        failed = [f"{row['label']}: {row['failed']}" for row in rows if row.get("failed")]
        ended = DONE + (f", but {'; '.join(failed)}" if failed else "")
    aside.unlink(missing_ok=True)
    return ended


def make_table(call: Call, out: Out, device: str, commit: str | None, seconds: float, *, more: Sequence[str]) -> str:
    """As many of a table's missing rows as there is time for; how it ended, and how many rows are new."""
    log, n_before = out.runs / f"{call.name}.log", len(out.read(out.tables))
    ended = run([*LINEARTIME, *call.arguments, "--rows", str(out.tables), "--out", str(out.runs), "--device", device,
                 *more], seconds, log, SAVE_S)
    rows = out.read(out.tables)
    if any(row["commit"] is None for row in rows):
        write_atomically(out.tables, "".join(json.dumps(row) + "\n" for row in signed(rows, commit)))
    ended = last_line(log) if ended.startswith("exit code") else ended or COMPLETE
    return f"{ended}, {len(rows) - n_before} rows"


def signed(rows: Sequence[dict], commit: str | None) -> list[dict]:
    """Rows with the commit where they have none, as rows from a checkout without git."""
    return [{**row, "commit": row["commit"] or commit} for row in rows]


def run_calls(stage: str, calls: Sequence[Call], out: Out, device: str, commit: str | None, deadline: float,
              guess_s: float, make: Callable[[Call, Out, str, str | None, float], str] | None = None) -> bool:
    """A stage's calls in their order, those that were tried before last; True where none of them failed.

    make: does a call within so many seconds, `measure` by default; what it returns begins with one of the ways a call
    can end, or says what failed."""
    mine, measured = [call for call in calls if call.stage == stage], out.measured()
    left = sorted((call for call in mine if call.name not in measured), key=out.n_tries)
    if len(left) < len(mine):
        say(f"{stage}: {len(mine) - len(left)} cells are measured already")
    well, longest = True, guess_s
    for number, call in enumerate(left):
        started = time.monotonic()
        if deadline - started < longest:
            rest = call.name if stage == "tables" else f"{len(left) - number} cells"
            say(f"{stage}: {deadline - started:.0f} s are left and a cell may take {longest:.0f}; the same command "
                f"goes on with {rest}")
            break
        ended = (make or measure)(call, out, device, commit, deadline - started)
        took = time.monotonic() - started
        if stage != "tables":  # which ends when it is asked to
            longest = max(longest if number else 0.0, 1.2 * took)
        append_json_lines(out.progress, [{"cell": call.name, "ended": ended, "seconds": round(took, 1)}])
        say(f"{stage}: {call.name} {ended} ({took:.0f} s)")
        well &= begins(ended, DONE, STOPPED, COMPLETE)
        out.summarise(calls)
    return well


def run_tables(calls: Sequence[Call], out: Out, device: str, commit: str | None, texts: Path | None, deadline: float,
               guess_s: float) -> bool:
    """The tables, each until it has every row or the time is over; True where none failed.

    texts: the folder with the texts of the scale; None where nothing is trained."""
    more = []
    if texts is not None:
        missing = absent(FOR_TABLES)
        if missing or not texts.is_dir():
            say("tables: not made, " + (f"{', '.join(missing)} is missing here" if missing else
                f"{texts} is not there; --texts names the folder with the texts of the scale"))
            return False
        more = ["--texts", str(texts.resolve())]
    if COMMITTED_ROWS.exists() and not out.tables.exists():
        shutil.copyfile(COMMITTED_ROWS, out.tables)
    out.runs.mkdir(exist_ok=True)
    return run_calls("tables", calls, out, device, commit, deadline, guess_s, partial(make_table, more=more))


def run_tests(out: Out, tiny: bool, seconds: float) -> bool:
    """The tests that need a GPU, in several processes, their output in tests.txt; a dry run only collects them."""
    missing = absent(FOR_TESTS)
    if missing:
        say(f"tests: not run, {', '.join(missing)} is missing here")
        return False
    started, text = time.monotonic(), out.folder / "tests.txt"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    ended = run([*command, "tests/ops/test_gpu.py", "--collect-only"], seconds, text)
    lines = text.read_text(encoding="utf-8").strip().splitlines()
    tests = [line for line in lines if "::" in line]
    if tiny or ended or not tests:
        say(f"tests: only collected: {last_line(text).strip('= ')}" + (f"; {ended}" if ended else ""))
        return bool(tests) and not ended
    n = max(min(AT_ONCE, (os.cpu_count() or 2) // 2, len(tests)), 1)
    parts, left = [out.folder / f".tests-{i}.txt" for i in range(n)], seconds - (time.monotonic() - started)
    with ThreadPoolExecutor(n) as pool:
        how = [each for each in pool.map(lambda i: run([*command, *tests[i::n]], left, parts[i]), range(n)) if each]
    counts = Counter({"passed": 0})
    for number, word in re.findall(r"(\d+) (passed|failed|error)", " ".join(map(last_line, parts))):
        counts[word] += int(number)
    lines = [line for part in parts for line in part.read_text(encoding="utf-8").strip().splitlines()]
    for part in parts:
        part.unlink()
    summary = ", ".join(f"{number} {word}" for word, number in counts.items()) + f" of {len(tests)}"
    text.write_text("\n".join([*lines, summary]) + "\n", encoding="utf-8")
    for line in [line for line in lines if line.startswith(("FAILED", "ERROR"))][:20]:
        say(f"tests: {line}")
    say(f"tests: {summary}" + (f"; {how[0]}" if how else ""))
    return counts["passed"] == len(tests)


def absent(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def absent_peers() -> list[str]:
    return [name for name, module in PEERS.items() if absent([module])]


def say(line: str) -> None:
    print(line, flush=True)


def check(stages: Sequence[str], before: Path | None, device: str) -> str:
    """What stands in the way of measuring, in one line; "" for nothing."""
    if unknown := [stage for stage in stages if stage not in STAGES]:
        return f"unknown stage: {unknown[0]}; it is one of {', '.join(STAGES)}"
    if before is not None and not before.is_file():
        return f"cannot read the rows: {before}"
    missing = absent(NEEDED)
    if missing:
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
    out = Out(given.out.resolve(), given.before)
    calls = read_calls(given.tiny)
    if peers := absent_peers():
        say(f"not installed, so left out: {', '.join(peers)}")
        calls = [call for call in calls if len(peers) < len(PEERS) or not call.name.startswith("gpu-peers/")]
    well, where = True, (out, given.device, given.commit)
    for stage in given.stages or STAGES:
        deadline, guess_s = started + 60 * given.minutes, TINY_GUESS_S if given.tiny else FIRST_GUESS_S
        if stage == "tests":
            well &= run_tests(out, given.tiny, deadline - time.monotonic())
        elif stage == "tables":
            well &= run_tables(calls, *where, None if given.tiny else given.texts, deadline, guess_s)
        else:
            well &= run_calls(stage, calls, *where, deadline, guess_s)
        note = ""
        if stage == "kernels" and not any(row.get("variant") == KERNEL for row in out.read(out.rows)):
            note = ("kernels: no kernel was measured; these are the references, as they are and as torch.compile "
                    "makes them")
            say(note)
        out.summarise(calls, note)
        started = time.monotonic()
    say(f"rows     {out.rows}\nsummary  {out.summary}")
    return 0 if well else 1


def stop(number: int, frame: FrameType | None) -> None:
    """What runs is ended by `run`; the rows so far stay."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sys.exit(main())
