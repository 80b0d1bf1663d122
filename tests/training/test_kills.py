"""`lineartime train` killed, or told to stop, at any moment: the same command ends in the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marks import rest
from tiny_runs import EVAL_EVERY, STEPS, assert_same, command, steps_done, steps_saved, what_is_left
from train_process import Launches, wait_for

WATCHED = {"lock", "resume", "compute_gradient", "evaluate", "save", "finish", "final evaluate", "generate", "plot_run"}


@pytest.fixture(scope="module")
def reference(processes, data, tmp_path_factory):
    """What the command leaves if nothing happens, and how many events there are on the way."""
    folder = tmp_path_factory.mktemp("reference")
    launches = Launches(processes, folder, command(data, folder / "run"))
    assert launches.run() == 0, launches.printed()
    assert {event.rsplit(" ", 1)[0] for event in launches.events()} >= WATCHED
    files = what_is_left(folder / "run")
    assert {"loss.png", "metrics.jsonl", "result.json", "run.json", "sample.txt", "latest"} < set(files)
    return files, len(launches.events())


@pytest.fixture
def launches(processes, data, tmp_path):
    return Launches(processes, tmp_path, command(data, tmp_path / "run"))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def half_done(out):
    """What a save that was cut off has left, written aside or on its way out."""
    return {(path.name, path.stat().st_ino) for path in [*out.glob(".tmp-step-*"), *out.glob(".trash-step-*")]}


def test_killed_at_any_moment_it_ends_in_the_same_bytes(processes, data, reference, tmp_path):
    """Four kills, of which one at least inside a save; `make drills` has them by the hundred."""
    expected, n_events = reference
    random.seed(0)
    kills, inside, runs, launched = 0, 0, 0, 0
    while kills < 4 or inside < 1:
        runs += 1
        out = tmp_path / str(runs) / "run"
        launches = Launches(processes, out.parent, command(data, out))
        while True:
            saved, before, launched = steps_saved(out), half_done(out), launched + 1
            pid = launches.start()
            # Not after so many seconds: this machine may be ten times slower than a moment ago.
            if launched % 3 == 0:
                launches.wait_for(f"_write_checkpoint {random.randint(1, 3)}")
                time.sleep(random.uniform(0, 0.01))
            else:
                launches.wait_for(random.randrange(n_events * 2 // 3))
                time.sleep(random.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            status = processes.wait(pid)
            assert status in (0, -signal.SIGKILL), launches.printed()
            assert steps_saved(out) >= saved, "a checkpoint is lost"
            if status == 0:
                break
            kills += 1
            inside += bool(half_done(out) - before)
            assert steps_done(out) >= steps_saved(out), "metrics are lost"
        assert_same(out, expected, but={"loss.png"})  # lost if killed after the result, before it


def stopped_at(launches, event, *signals):
    """The exit status of a launch that was sent signals while it was at an event."""
    pid = launches.start(wait_at=event)
    launches.wait_for(event)
    for number in signals:
        os.kill(pid, number)
    (launches.folder / "go").touch()
    return launches.processes.wait(pid)


@pytest.mark.parametrize(("moment", "number"), [
    # A moment of each stage: before, in and between steps, in a save, and in the score after them.
    ("lock 1", signal.SIGINT), ("compute_gradient 8", signal.SIGTERM), ("save 1", signal.SIGINT),
    ("final evaluate 1", signal.SIGTERM),
    *rest(("resume 1", signal.SIGTERM), ("compute_gradient 1", signal.SIGINT), ("evaluate 2", signal.SIGTERM),
          (f"evaluate {STEPS // EVAL_EVERY}", signal.SIGINT), ("end of save 2", signal.SIGTERM),
          ("generate 1", signal.SIGTERM))], ids=str)
def test_a_stop_saves_and_the_same_command_resumes(moment, number, launches, out, reference):
    # `timeout` sends the same signal to the process and to its group: twice is once.
    assert stopped_at(launches, moment, *[number] * (2 if moment == "compute_gradient 8" else 1)) == 128 + number, (
        launches.printed())
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else "SIGTERM"
    assert launches.printed().count(f"stopped by {name}: ") == 1 and "error: " not in launches.printed()
    assert steps_saved(out) == steps_done(out)
    assert not list(out.glob(".*")) and not (out / "result.json").exists()
    assert launches.run() == 0, launches.printed()
    assert_same(out, reference[0])


def test_a_second_signal_ends_at_once(launches, out, reference):
    pid = launches.start(wait_at="compute_gradient 4")
    launches.wait_for("compute_gradient 4")
    os.kill(pid, signal.SIGTERM)
    time.sleep(1)
    os.kill(pid, signal.SIGTERM)  # nobody says go, so it waits for ever otherwise
    assert launches.processes.wait(pid) == -signal.SIGTERM
    assert steps_saved(out) == 2
    assert launches.run() == 0, launches.printed()
    assert_same(out, reference[0])


def test_a_stop_while_it_starts(launches, out, reference):
    """A whole process, while Python reads the modules: there is nothing to save, and nothing in the way."""
    with subprocess.Popen([sys.executable, "-m", "lineartime", *launches.arguments], stderr=subprocess.PIPE,
                          text=True) as process:
        wait_for(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
        process.send_signal(signal.SIGTERM)
        try:
            _, printed = process.communicate(timeout=60)
        finally:
            process.kill()
        # Before it listens, SIGTERM ends a process at once; a shell says 143 for both.
        assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), printed
    assert "Traceback" not in printed
    assert launches.run() == 0, launches.printed()
    assert_same(out, reference[0])
