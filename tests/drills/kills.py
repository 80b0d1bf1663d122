"""Commands that are disturbed and then run to the end: they leave what undisturbed ones do."""

import errno
import json
import resource
import shutil
import signal
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from disk import disturbed
from drills import child, folders
from drills.folders import MADE, Command, verb

SIGNALS = (signal.SIGKILL, *child.SIGNALS)


class Scenario(NamedTuple):
    """A command, which leaves everything in `out`. begins_with: a folder of `made`, copied to `it`
    first. when_done: what it says, with code 2, where all is complete."""

    command: Command
    begins_with: str | None = None
    when_done: str = ""


THERE = "the output exists already"
SCENARIOS: dict[str, Scenario] = {
    "train": Scenario(verb(*folders.train("{made}/data", "{it}"))),
    "train, resumed": Scenario(verb(*folders.train("{made}/data", "{it}")), "unfinished"),
    "train, masked": Scenario(verb(*folders.train("{made}/masked-data", "{it}", causal="false", steps=4))),
    "prepare": Scenario(verb(*folders.prepare("{made}/text.txt", "{it}"))),
    "prepare, compressed lines": Scenario(verb(
        *folders.prepare("{made}/text.jsonl.gz", "{out}/deep/data", "--tokenizer", "bytes"))),
    "export": Scenario(verb("export", "{made}/run", "--out", "{out}/models/new"), when_done=THERE),
    "finetune": Scenario(verb(*folders.finetune(MADE, "{it}"))),
    "evaluate --predictions": Scenario(verb(
        "evaluate", "{made}/finetuned", "--questions", "{made}/dev.json", "--context", "48", "--max-answer-tokens", "6",
        "--predictions", "{out}/predictions.json"), when_done=THERE),
    "plot": Scenario(verb("plot", "{it}"), "run"),
    "plot, side by side": Scenario(verb("plot", "a={made}/run", "b={made}/run2", "--out", "{out}/both.png")),
    "train --from": Scenario(verb(*folders.train_from("{made}/run", "{made}/data", "{it}"))),
}
OFTEN = ["train", "train, resumed", "prepare", "finetune", "export"]
ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT]


def begin(made: Path, folder: Path, scenario: Scenario) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "out"
    out.mkdir(parents=True)
    if scenario.begins_with:
        shutil.copytree(made / scenario.begins_with, out / "it", symlinks=True)
    return out


@cache
def calm(made: Path, folder: Path, scenario: Scenario) -> tuple[dict[str, object], float, int, int]:
    """What the undisturbed command leaves, its seconds, changes of the disk and largest file."""
    out = begin(made, folder, scenario)
    do = scenario.command(made, out / "it", out)
    first = child.run(disturbed(do, out, folder / "changes"), folder)
    assert first.code == 0, first
    what, changes = folders.left(out), int((folder / "changes").read_text())
    out = begin(made, folder, scenario)
    again = child.run(do, folder)
    assert folders.left(out) == what, "it leaves other bytes the second time"
    largest = max((path.stat().st_size for path in out.rglob("*") if path.is_file()), default=1)
    return what, again.seconds, changes, largest


def trial(made: Path, folder: Path, random: Random, scenarios: dict[str, Scenario] = SCENARIOS,
          often: Sequence[str] = OFTEN) -> dict[str, object]:
    name = random.choice([*scenarios, *often * 2])
    scenario = scenarios[name]
    expected, seconds, changes, largest = calm(made, folder, scenario)
    out = begin(made, folder, scenario)
    do = scenario.command(made, out / "it", out)
    told: list[str] = []

    def result(verdict: str, message: str = "", **more: object) -> dict[str, object]:
        return {"verdict": verdict, "what": name, "how": "; ".join(told), "message": message, **more}

    for _ in range(random.choice([1, 1, 1, 2, 3])):
        kind = random.choice(["instant", "instant", "change", "change", "change", "fails", "fails", "full", "two"])
        number = random.choice([signal.SIGKILL, signal.SIGKILL, *SIGNALS])
        at = random.randint(1, changes)
        error, stays, share = random.choice(ERRORS), random.random() < 0.5, random.random()
        if kind == "instant":
            told.append(f"{number.name} after {share:.3f} of its time")
            ended = [child.run(do, folder, at=(share * seconds, number))]
        elif kind == "full":
            limit = int(share**2 * largest)
            told.append(f"files of at most {limit} bytes")
            ended = [child.run(do, folder, child.Streams(limits={resource.RLIMIT_FSIZE: limit}))]
        elif kind == "two":
            told.append(f"two at once, the second after {share * 0.5:.3f} of the time")
            first = child.start(do, folder)
            time.sleep(share * 0.5 * seconds)
            second = child.start(do, folder)
            ended = [child.wait(first), child.wait(second)]
        else:
            how: dict[str, Any] = {"number": number} if kind == "change" else {"error": error, "stays": stays}
            told.append(f"{number.name} at change {at}" if kind == "change" else
                        f"{errno.errorcode[error]} at change {at}{' and all later ones' if stays else ''}")
            ended = [child.run(disturbed(do, out, at=at, **how), folder)]
        for each in ended:
            by_signal = kind in ("instant", "change")
            wrong = None if by_signal and -each.code in SIGNALS else child.misbehaviour(each)
            if wrong or (not by_signal and each.code not in (0, 6) and not was_done(each, scenario)):
                return result(wrong or "code", f"{each.code}: {each.err[-600:]}", code=each.code)
    last = child.run(do, folder)
    if last.code != 0 and not was_done(last, scenario):
        return result("lost", f"the same command again ends in {last.code}: {last.err[-600:]}", code=last.code)
    found = folders.left(out)
    if found == expected:
        return result("ok")
    lost = sorted(path for path, content in expected.items() if found.get(path) != content)
    more = sorted(found.keys() - expected.keys())
    return result("lost" if lost else "leftover", json.dumps({"more": more, "fewer or different": lost}))


def was_done(ended: child.Ended, scenario: Scenario) -> bool:
    return bool(scenario.when_done) and ended.code == 2 and scenario.when_done in ended.err
