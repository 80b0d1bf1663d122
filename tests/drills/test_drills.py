"""A share of the drills, and the drills themselves: they see what they look for."""

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from random import Random

import pytest

from disk import disturbed
from drills import child, corruptions, kills

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(map(str, [ROOT, ROOT / "tests", ROOT / "tests/helpers"]))
SHARE = ["kills=3", "corruptions=6", "commands=10", "ranks=1"]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.rest
def test_a_share_of_the_drills(tmp_path):
    done = subprocess.run([sys.executable, "-m", "drills", *SHARE, "--work", tmp_path], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": PATHS})
    assert done.returncode == 0, done.stdout + done.stderr
    for part in SHARE:
        assert f"{part.replace('=', ': ')} tried, 0 lost, 0 silent, 0 internal, 0 hung" in done.stdout


def test_a_child_that_waits_is_interrupted_and_one_that_does_not_heed_it_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "GRACE", 0.5)
    ended = child.run(lambda: time.sleep(60), tmp_path, seconds=0.2)
    assert (ended.over, ended.killed, ended.code) == ("waiting", False, 130) and child.misbehaviour(ended) == "hung"

    def deaf():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)

    ended = child.run(deaf, tmp_path, seconds=0.2)
    assert (ended.over, ended.killed, ended.code) == ("waiting", True, -signal.SIGKILL)


@pytest.mark.parametrize(("code", "err", "mib", "verdict"), [
    (0, "", 0, None), (3, "error: no\n", 0, None), (0, "warning: so\n" * 10, 0, None), (0, "a\n" * 11, 0, "noisy"),
    (1, "error: no\n", 0, "internal"), (-11, "", 0, "internal"), (2, "error: internal: no\n", 0, "internal"),
    (2, "Traceback\nerror: no\n", 0, "noisy"), (2, "", 0, "noisy"), (0, "", 5000, "memory"), (120, "", 0, "internal")])
def test_what_no_process_may_do(code, err, mib, verdict):
    assert child.misbehaviour(child.Ended(code, "", err, 0.1, mib)) == verdict


def write_three(folder):
    (folder / "a").write_text("one")
    with open(folder / "b", "w") as file:
        file.write("two")
    os.rename(folder / "a", folder / "c")


@pytest.mark.parametrize(("how", "code"), [({"number": signal.SIGKILL}, -signal.SIGKILL),
                                           ({"error": errno.ENOSPC, "stays": True}, 1)])
def test_a_change_of_the_disk_is_the_last(how, code, tmp_path):
    """Opened, written, opened, written, renamed. A file is there, empty, once it is open."""
    for at, left in enumerate([{}, {"a": "o"}, {"a": "one"}, {"a": "one", "b": "t"}, {"a": "one", "b": "two"}], 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        ended = child.run(disturbed(partial(write_three, folder), folder, at=at, **how), folder)
        assert ended.code == code and {path.name: path.read_text() for path in folder.iterdir()} == left, ended


def seen(verdicts, trial):
    """Whether at most thirty trials have all these verdicts."""
    missing = set(verdicts)
    for number in range(30):
        missing.discard(trial(Random(number))["verdict"])
        if not missing:
            return True
    return False


def test_a_command_that_loses_rows_is_seen(tmp_path):
    """It appends without a look at what a kill has left."""
    def careless(made, it, out):
        def append():
            path = out / "rows"
            there = len(path.read_text().splitlines()) if path.exists() else 0
            for row in range(there, 20):
                with open(path, "a", buffering=1) as file:
                    file.write(f"row {row}\n")

        return append

    scenarios = {"careless": kills.Scenario(careless)}
    assert seen({"ok", "lost"}, lambda random: kills.trial(tmp_path, tmp_path / "trial", random, scenarios, []))


def test_a_reader_that_believes_a_damaged_file_is_seen(tmp_path):
    """It copies whatever lines are there."""
    def careless(made, it, out):
        return child.as_verb(lambda: (out / "rows").write_bytes(it.read_bytes()))

    (tmp_path / "made/parts").mkdir(parents=True)
    (tmp_path / "made/parts/rows.ids").write_text("".join(f"row {number}\n" for number in range(20)))
    pair = corruptions.Subject("parts/rows.ids", "parts/rows.ids", {"copy": careless}), "copy"
    assert seen({"ok", "silent"}, lambda random: corruptions.trial(
        tmp_path / "made", tmp_path / "trial", random, [pair]))
