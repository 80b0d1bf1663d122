"""How a process is run: it ends when it is asked to, and with the one that started it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cells import run

ROOT = Path(__file__).parents[2]
SAVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), pathlib.Path(sys.argv[1]).touch(), sys.exit(143)))
print("listens", flush=True)
time.sleep(300)
"""


def wait_until_gone(pid):
    for _ in range(100):
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_a_command_that_is_asked_to_stop_saves(tmp_path):
    log = tmp_path / "log"
    code = run([sys.executable, "-c", SAVER, tmp_path / "saved"], log, save_s=20, stop=lambda: "listens" in
               log.read_text())
    assert code == 143 and (tmp_path / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("save_s", [0, 20])
def test_what_runs_dies_with_the_process_that_runs_it(tmp_path, number, save_s):
    code = ("import sys, signal, pathlib; from benchmarks import cells\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
            f"cells.run(['sleep', '301'], pathlib.Path({str(tmp_path / 'log')!r}), save_s={save_s})")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        for _ in range(2000):
            if pids := children.read_text().split():
                break
            time.sleep(0.05)
        parent.send_signal(number)
        try:
            parent.wait(60)
        finally:
            parent.kill()
    wait_until_gone(int(pids[0]))
