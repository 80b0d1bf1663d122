"""`python -m drills PART=TRIALS ...`: run the trials that the rows lack, and say what came of all of them.

Every trial is a line of `WORK/log.jsonl`; blocks of a hundred are rows of `--rows`, which can be committed, so that
drills go on in another checkout and at another commit."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from random import Random

from benchmarks.append import append_json_lines
from drills import child, command_lines, corruptions, documents, folders, kills, ranks
from lineartime.atomic_io import write_atomically

PARTS = {"kills": kills.trial, "corruptions": corruptions.trial, "commands": command_lines.trial,
         "documents": documents.trial, "ranks": ranks.trial}
BAD = ("lost", "silent", "internal", "hung")
"""Verdicts that every table shows; any other verdict but "ok" is counted beside them."""
FINE = ("ok", "unnoticed")
"""Verdicts that break no promise."""
BLOCK = 100
"""Trials in a row."""
BEGIN, END = "<!-- drills: begin -->", "<!-- drills: end -->"


def read_log(path: Path) -> Iterator[dict]:
    """The trials of the log; a line that was cut off is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """What changes when anything below a folder does."""
    return {str(path): (found.st_mtime_ns, found.st_ino, found.st_size)
            for path in [folder, *folder.rglob("*")] for found in [path.lstat()]}


def run_trial(part: str, seed: int, number: int, work: Path) -> dict:
    """One trial, in an empty folder beside the canary; what is outside the folder must stay as it is."""
    made, canary = work / "made", work / "canary"
    shutil.rmtree(work / "trial", ignore_errors=True)
    before, started = (snapshot(made), snapshot(canary)), time.monotonic()
    try:
        done = PARTS[part](made, work / "trial", Random(f"{part} {seed} {number}"))
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        done = {"verdict": "broken drill", "what": "", "how": "", "message": f"{e!r}, {at.filename}:{at.lineno}"}
    if (snapshot(made), snapshot(canary)) != before:
        done |= {"verdict": "outside", "message": f"changed outside its folder; {done['message']}"}
        make_canary(work)
    return {"part": part, "seed": seed, "number": number, **done, "seconds": round(time.monotonic() - started, 2)}


def make_canary(work: Path) -> None:
    """A folder that no trial may touch."""
    shutil.rmtree(work / "canary", ignore_errors=True)
    (work / "canary" / "below").mkdir(parents=True)
    for name in ("file", "lock", "manifest.json", "model.safetensors", "below/file"):
        (work / "canary" / name).write_text("nobody may change this\n")


def counted(blocks: list[dict]) -> dict[str, int]:
    """How many trials have each verdict, the good ones left out."""
    counts: Counter[str] = Counter()
    for block in blocks:
        counts.update(block["verdicts"])
    return {name: counts[name] for name in [*BAD, *sorted(counts.keys() - {*BAD, "ok"})]}


def n_tried(blocks: list[dict]) -> int:
    return sum(block["trials"] for block in blocks)


def figures(part: str, blocks: list[dict]) -> str:
    """The line of a part."""
    return f"{part}: {n_tried(blocks):,} tried, " + ", ".join(f"{n:,} {name}" for name, n in counted(blocks).items())


def fill_page(page: Path, blocks: dict[str, list[dict]]) -> None:
    """Put the figures of all parts into a page, between its two marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    lines = ["| part | tried | lost | silent | internal | hung | other |", "|---|---:|---:|---:|---:|---:|---|"]
    for part, done in blocks.items():
        counts = counted(done)
        other = ", ".join(f"{n:,} {name}" for name, n in counts.items() if name not in BAD) or "none"
        lines.append(f"| {part} | {n_tried(done):,} | {' | '.join(f'{counts[name]:,}' for name in BAD)} | {other} |")
    commits = dict.fromkeys(str(block["commit"])[:10] for done in blocks.values() for block in done)
    said = f"<sub>Commits {', '.join(commits)}. Made by `make drills` from tests/drills/rows.jsonl.</sub>"
    write_atomically(page, "\n\n".join([before + BEGIN, "\n".join(lines), said, END]) + rest.partition(END)[2])


def part_of(text: str) -> tuple[str, int]:
    """`PART=TRIALS`, by default a hundred trials."""
    name, _, trials = text.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"one of {', '.join(PARTS)}, and how many: {name}=100")
    return name, int(trials or 100)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__)
    parser.add_argument("parts", nargs="+", type=part_of, metavar="PART=TRIALS",
                        help=f"{', '.join(PARTS)}; those of the trials from 0 on that the rows lack")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this trial of the part and print it; the log stays as it is")
    parser.add_argument("--work", type=Path, default=Path("out/drills"), help="folder for the trials and the log")
    parser.add_argument("--rows", type=Path, help="rows of blocks of trials; by default WORK/rows.jsonl")
    parser.add_argument("--into", type=Path, help="page that gets the figures")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    child.warm_up()
    from benchmarks.measure import commit

    work, version = given.work.resolve(), commit()
    folders.make(work)
    make_canary(work)
    if given.only is not None:
        done = run_trial(given.parts[0][0], given.seed, given.only, work)
        print(json.dumps(done, indent=1), f"its folder is left: {work / 'trial'}", sep="\n")
        return int(done["verdict"] != "ok")
    rows, log = given.rows or work / "rows.jsonl", work / "log.jsonl"
    blocks = {name: [row for row in read_log(rows) if (row["part"], row["seed"]) == (name, given.seed)]
              for name, _ in given.parts}
    logged = {(each["part"], each["number"]): each for each in read_log(log)
              if (each["seed"], each["commit"]) == (given.seed, version)}
    for part, trials in given.parts:
        there = {number for block in blocks[part] for number in range(block["first"], block["first"] + block["trials"])}
        missing = [number for number in range(trials) if number not in there]
        begun, done_here, told = time.monotonic(), 0, 0.0
        for _, numbers in groupby(missing, lambda number: number // BLOCK):
            verdicts: Counter[str] = Counter()
            first = None
            for number in numbers:
                first = number if first is None else first
                if time.monotonic() - told > 10:
                    told, n_left = time.monotonic(), len(missing) - done_here
                    left = f", {(told - begun) / done_here * n_left / 60:.0f} min left" if done_here else ""
                    print(f"{part}: {trials - n_left:,} of {trials:,}{left}", file=sys.stderr, flush=True)
                done_here += 1
                done = logged.get((part, number)) or run_trial(part, given.seed, number, work)
                verdicts[done["verdict"]] += 1
                if (part, number) not in logged:
                    append_json_lines(log, [{"commit": version, **done}])
                if done["verdict"] not in FINE:
                    print(f"{done['verdict']}: {done['what']}; {done['how']}\n    {done['message'].strip()[:300]!a}\n"
                          f"    again: make drills DRILLS={part} DRILLS_ARGS='--seed {given.seed} --only {number}'",
                          flush=True)
            blocks[part].append({"part": part, "seed": given.seed, "first": first, "trials": sum(verdicts.values()),
                                 "verdicts": dict(sorted(verdicts.items())), "commit": version})
            append_json_lines(rows, blocks[part][-1:])
        print(figures(part, blocks[part]), flush=True)
    shutil.rmtree(work / "trial", ignore_errors=True)
    if given.into is not None:
        fill_page(given.into, blocks)
    return int(any(counted(done)[name] for done in blocks.values() for name in counted(done) if name not in FINE))


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    os._exit(code)
