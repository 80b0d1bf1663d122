"""`lineartime train` killed, or told to stop, at any moment ends in the same bytes."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from marks import rest
from tiny_runs import assert_same, command, steps_done, steps_saved, what_is_left


@pytest.fixture(scope="module")
def reference(processes, data, tmp_path_factory):
    """What the command leaves if nothing happens, and how often it changes the disk."""
    folder = tmp_path_factory.mktemp("reference")
    out = folder / "run"
    code = processes.run(command(data, out), folder / "printed", folder=out, counts=folder / "changes")
    assert code == 0, (folder / "printed").read_text()
    files = what_is_left(out)
    assert {"loss.png", "metrics.jsonl", "result.json", "run.json", "sample.txt", "latest"} < set(files)
    return files, int((folder / "changes").read_text())


def half_done(out):
    """What a save that was cut off has left, written aside or on its way out."""
    return {(path.name, path.stat().st_ino) for path in [*out.glob(".tmp-step-*"), *out.glob(".trash-step-*")]}


def test_killed_at_any_change_of_the_disk_it_ends_in_the_same_bytes(processes, data, reference, tmp_path):
    """Four kills, of which one at least inside a save; `make drills` has them by the hundred."""
    expected, n_changes = reference
    random.seed(0)
    kills, inside, printed = 0, 0, tmp_path / "printed"
    while kills < 4 or inside < 1:
        out = tmp_path / f"{kills}" / "run"
        while True:
            saved, before = steps_saved(out), half_done(out)
            code = processes.run(command(data, out), printed, folder=out, at=random.randrange(1, n_changes * 2 // 3),
                                 number=signal.SIGKILL)
            assert code in (0, -signal.SIGKILL), printed.read_text()
            assert steps_saved(out) >= saved, "a checkpoint is lost"
            if code == 0:
                break
            kills += 1
            inside += bool(half_done(out) - before)
            assert steps_done(out) >= steps_saved(out), "metrics are lost"
        assert_same(out, expected, but={"loss.png"})  # lost if killed after the result, before it


@pytest.mark.parametrize(("share", "number", "twice"), [
    # In the first steps, in the middle, and in the score after the last.
    (0.1, signal.SIGINT, False), (0.5, signal.SIGTERM, False), (0.5, signal.SIGTERM, True),
    *rest((0.3, signal.SIGTERM, False), (0.7, signal.SIGINT, False), (0.9, signal.SIGTERM, False))], ids=str)
def test_a_stop_saves_and_the_same_command_resumes(share, number, twice, processes, data, tmp_path, reference):
    """twice: the second signal comes at the next change of the disk, and ends it at once."""
    out, printed, expected = tmp_path / "run", tmp_path / "printed", reference[0]
    at = round(share * reference[1])
    code = processes.run(command(data, out), printed, folder=out, at=at, number=number, stays=twice)
    assert code == (-number if twice else 128 + number), printed.read_text()
    assert printed.read_text().count(f"\n{signal.Signals(number).name}: stops at the next safe moment") == 1
    if not twice:
        name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else "SIGTERM"
        assert printed.read_text().count(f"stopped by {name}: ") == 1 and "error: " not in printed.read_text()
        assert steps_saved(out) == steps_done(out)
        assert not list(out.glob(".*")) and not (out / "result.json").exists()
    assert processes.run(command(data, out), printed) == 0, printed.read_text()
    assert_same(out, expected)


def test_a_stop_while_it_starts(data, tmp_path):
    """A whole process, while Python reads the modules: there is nothing to save."""
    arguments, maps = [sys.executable, "-m", "lineartime", *command(data, tmp_path / "run")], ""
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        while "libtorch" not in maps and process.poll() is None:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGTERM)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
        # Before it listens, SIGTERM ends a process at once; a shell says 143 for both.
        assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), said
    assert "Traceback" not in said and not list((tmp_path / "run").glob("step-*"))
