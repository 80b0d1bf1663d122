"""`python -m drills PART=TRIALS ...`: run the trials that the log lacks, and say what came of all of them."""

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
from pathlib import Path
from random import Random

from drills import child, command_lines, corruptions, folders, kills
from lineartime.atomic_io import write_atomically
from lineartime.benchmark.measure import commit

PARTS = {"kills": kills.trial, "corruptions": corruptions.trial, "commands": command_lines.trial}
BAD = ("lost", "silent", "internal", "hung")
"""Verdicts that every table shows; any other verdict but "ok" is counted beside them."""
FINE = ("ok", "unnoticed")
"""Verdicts that break no promise."""
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


def counted(trials: list[dict]) -> dict[str, int]:
    """How many trials have each verdict, the good ones left out."""
    counts = Counter(each["verdict"] for each in trials if each["verdict"] != "ok")
    return {name: counts[name] for name in [*BAD, *sorted(counts.keys() - BAD)]}


def figures(part: str, trials: list[dict]) -> str:
    """The line of a part."""
    return f"{part}: {len(trials):,} tried, " + ", ".join(f"{n:,} {name}" for name, n in counted(trials).items())


def fill_page(page: Path, trials: dict[str, list[dict]], seed: int, version: str | None) -> None:
    """Put the figures of all parts into a page, between its two marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    lines = ["| part | tried | lost | silent | internal | hung | other |", "|---|---:|---:|---:|---:|---:|---|"]
    for part, done in trials.items():
        counts = counted(done)
        other = ", ".join(f"{n:,} {name}" for name, n in counts.items() if name not in BAD) or "none"
        lines.append(f"| {part} | {len(done):,} | {' | '.join(f'{counts[name]:,}' for name in BAD)} | {other} |")
    said = f"<sub>Commit {(version or 'unknown')[:10]}, seed {seed}. Made by `make drills`.</sub>"
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
                        help=f"{', '.join(PARTS)}; the log shall have the trials from 0 on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this trial of the part and print it; the log stays as it is")
    parser.add_argument("--work", type=Path, default=Path("out/drills"), help="folder for the trials and the log")
    parser.add_argument("--into", type=Path, help="page that gets the figures")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    work, version = given.work.resolve(), commit()
    child.warm_up()
    folders.make(work)
    make_canary(work)
    if given.only is not None:
        done = run_trial(given.parts[0][0], given.seed, given.only, work)
        print(json.dumps(done, indent=1), f"its folder is left: {work / 'trial'}", sep="\n")
        return int(done["verdict"] != "ok")
    log = work / "log.jsonl"
    ours = {name: [each for each in read_log(log) if [each[key] for key in ("part", "seed", "commit")] ==
                   [name, given.seed, version]] for name, _ in given.parts}
    with open(log, "a", encoding="utf-8") as file:
        if file.tell() and not log.read_bytes().endswith(b"\n"):
            file.write("\n")
        for part, trials in given.parts:
            missing = sorted({*range(trials)} - {each["number"] for each in ours[part]})
            begun, told = time.monotonic(), 0.0
            for i, number in enumerate(missing):
                if time.monotonic() - told > 10:
                    told, left = time.monotonic(), (time.monotonic() - begun) * (len(missing) / max(i, 1) - 1)
                    print(f"{part}: {i:,} of {len(missing):,}" + (f", {left / 60:.0f} min left" if i else ""),
                          file=sys.stderr, flush=True)
                done = {"commit": version, **run_trial(part, given.seed, number, work)}
                ours[part].append(done)
                file.write(json.dumps(done) + "\n")
                file.flush()
                if done["verdict"] not in FINE:
                    print(f"{done['verdict']}: {done['what']}; {done['how']}\n    {done['message'].strip()[:300]!a}\n"
                          f"    again: make drills DRILLS={part} DRILLS_ARGS='--seed {given.seed} --only {number}'",
                          flush=True)
            print(figures(part, ours[part]), flush=True)
    shutil.rmtree(work / "trial", ignore_errors=True)
    if given.into is not None:
        fill_page(given.into, ours, given.seed, version)
    return int(any(each["verdict"] not in FINE for trials in ours.values() for each in trials))


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    os._exit(code)
