"""`python -m drills PART=TRIALS ...`: run the trials that the log `WORK/log.jsonl` lacks, and say
what came of all of them. Drills that were cut off go on."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from benchmarks.provenance import append_json_lines, rows_in
from drills import child, command_lines, corruptions, folders, kills, ranks

PARTS = {"kills": kills.trial, "corruptions": corruptions.trial, "commands": command_lines.trial, "ranks": ranks.trial}
BAD = ("lost", "silent", "internal", "hung")  # what is counted in any case
FINE = ("ok", "unnoticed")  # verdicts that break no promise


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {str(path): (found.st_mtime_ns, found.st_ino, found.st_size)
            for path in [folder, *folder.rglob("*")] for found in [path.lstat()]}


def run_trial(part: str, seed: int, number: int, work: Path) -> dict:
    """One trial, in an empty folder beside the canary; nothing outside may change."""
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
    shutil.rmtree(work / "canary", ignore_errors=True)
    (work / "canary" / "below").mkdir(parents=True)
    for name in ("file", "lock", "manifest.json", "model.safetensors", "below/file"):
        (work / "canary" / name).write_text("nobody may change this\n")


def part_of(text: str) -> tuple[str, int]:
    name, _, trials = text.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"one of {', '.join(PARTS)}, and how many: {name}=100")
    return name, int(trials or 100)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__)
    parser.add_argument("parts", nargs="+", type=part_of, metavar="PART=TRIALS",
                        help=f"{', '.join(PARTS)}; those of the trials from 0 on that the log lacks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this trial of the part and print it; the log stays as it is")
    parser.add_argument("--work", type=Path, default=Path("out/drills"), help="folder for the trials and the log")
    parser.add_argument("--rows", type=Path, help="file that gets a line for each part")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    child.warm_up()
    from benchmarks.provenance import commit

    work, log, version, rows = given.work.resolve(), given.work / "log.jsonl", commit(), []
    folders.make(work)
    make_canary(work)
    if given.only is not None:
        done = run_trial(given.parts[0][0], given.seed, given.only, work)
        print(json.dumps(done, indent=1), f"its folder is left: {work / 'trial'}", sep="\n")
        return int(done["verdict"] != "ok")
    logged = {(each["part"], each["number"]): each for each in rows_in(log)
              if (each["seed"], each["commit"]) == (given.seed, version)}
    for part, trials in given.parts:
        verdicts = Counter[str]()
        for number in range(trials):
            done = logged.get((part, number)) or run_trial(part, given.seed, number, work)
            verdicts[done["verdict"]] += 1
            if (part, number) not in logged:
                append_json_lines(log, [{"commit": version, **done}])
            if done["verdict"] not in FINE:
                print(f"{done['verdict']}: {done['what']}; {done['how']}\n    {done['message'].strip()[:300]!a}\n"
                      f"    again: make drills DRILLS={part} DRILLS_ARGS='--seed {given.seed} --only {number}'",
                      flush=True)
            if number % 20 == 19:
                print(f"{part}: {number + 1:,} of {trials:,}", file=sys.stderr, flush=True)
        rows.append({"part": part, "seed": given.seed, "trials": trials, "verdicts": dict(sorted(verdicts.items())),
                     "commit": version})
        names = [*BAD, *sorted(verdicts.keys() - {*BAD, "ok"})]
        print(f"{part}: {trials:,} tried, {', '.join(f'{verdicts[name]:,} {name}' for name in names)}", flush=True)
    shutil.rmtree(work / "trial", ignore_errors=True)
    if given.rows is not None:
        append_json_lines(given.rows, rows)
    return int(any(row["verdicts"].keys() - {*FINE} for row in rows))


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    os._exit(code)
