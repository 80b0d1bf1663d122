"""benchmarks/gpu.py without a GPU, and how calls are made: each is one that exists, ends in time, dies whole."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from benchmarks import gpu
from benchmarks.__main__ import app
from benchmarks.append import append_json_lines
from benchmarks.cells import DONE, SAVED, STOPPED, measure_call, named_calls, run, run_calls
from benchmarks.op import OPS
from benchmarks.paper.scales import cells_of
from benchmarks.paper.tables import TABLES
from benchmarks.peers import parse_label
from lineartime.atomic_io import read_json_lines

ROOT = Path(__file__).parents[2]
MEASURED = ("kernels", "step", "decode")


def script(*arguments, cwd=None, **environment):
    return subprocess.run([sys.executable, "-m", "benchmarks.gpu", *arguments], capture_output=True, text=True,
                          cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def test_every_cell_is_one_that_the_benchmark_knows():
    lists = [stage for name in MEASURED for stage in (name, f"tiny-{name}")]
    assert sum(len(named_calls([name], gpu.CALLS)) for name in lists) == len(named_calls(lists, gpu.CALLS)) > 40
    verbs = typer.main.get_command(app)
    for verb, *rest in named_calls(lists, gpu.CALLS).values():
        verbs.commands[verb].make_context(verb, [*rest, "--device", "cuda", "--json", "rows.jsonl"])
        for name in itertools.takewhile(lambda each: not each.startswith("--"), rest):
            assert name in OPS if verb == "op" else parse_label(name)


def test_every_table_is_made_and_the_most_telling_first():
    tables = gpu.calls_of("tables")
    assert list(tables)[:4] == ["lm_pg19", "flash_ablation", "gap", "chunk_size"] and sorted(tables) == sorted(TABLES)
    verb = typer.main.get_command(app).commands["reproduce"]
    for _, *rest in [*tables.values(), *gpu.calls_of("tables", tiny=True).values()]:
        given = verb.make_context("reproduce", [*rest, "--rows", "rows.jsonl"]).params
        assert given["scale"] == "gpu" and set(given["tables"]) <= set(TABLES)
    first = cells_of("lm_pg19", "gpu")[:2]
    assert [(cell.row, cell.column) for cell in first] == [("FLASH", "8192"), ("Transformer++", "8192")]


def test_without_a_gpu_it_is_an_error_of_one_line(tmp_path):
    done = script("step", "--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "out").exists()
    assert done.stderr == "error: no CUDA device here; --device cpu --tiny tries this script without one\n"


def test_a_dry_run_measures_and_the_next_one_goes_on(tmp_path):
    out = tmp_path / "out"
    arguments = ["decode", "--out", "out", "--device", "cpu", "--tiny", "--commit", "abc"]
    late = script(*arguments, "--minutes", "0.01", cwd=tmp_path)
    assert late.returncode == 0 and "the same command goes on with tiny-decode/1" in late.stdout
    assert "left: tiny-decode/1" in (out / "summary.md").read_text()
    done = script(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert {row["cell"] for row in rows} == {"tiny-decode/1"} and {row["model"] for row in rows} == {
        "flash", "transformer++"}
    summary = (out / "summary.md").read_text()
    assert "- decode: 1 of 1 done" in summary and "### Decoding" in summary
    again = script(*arguments, cwd=tmp_path)
    assert again.returncode == 0 and "tiny-decode" not in again.stdout
    assert len((out / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert sorted(path.name for path in out.iterdir()) == ["calls.jsonl", "log.txt", "rows.jsonl", "summary.md"]


def go_through(calls, tried, outcomes, done=(), **limits):
    """Calls of one letter that end as told; whether well, which were made, and what was told."""
    made, told = [], []

    def call(name, arguments, seconds):
        made.append(name)
        return outcomes.get(name, DONE)

    return run_calls({name: () for name in calls}, call, done, tried, told.append, **limits), made, told


def test_what_failed_is_tried_again_after_what_was_never_tried(tmp_path):
    tried = tmp_path / "calls.jsonl"
    assert go_through("ab", tried, {"a": "out of memory"})[:2] == (False, ["a", "b"])
    assert go_through("abc", tried, {"a": STOPPED}, done="b")[:2] == (True, ["c", "a"])
    assert go_through("ad", tried, {"d": SAVED})[:2] == (True, ["d", "a"])
    assert go_through("aed", tried, {})[1] == ["e", "d", "a"]  # what saved goes on in its place
    ends = [(line["cell"], line["ended"]) for line in read_json_lines(tried, dict, "a call")]
    assert ends[:4] == [("a", "out of memory"), ("b", DONE), ("c", DONE), ("a", STOPPED)]


def test_nothing_is_started_when_too_little_time_is_left(tmp_path):
    limits = {"deadline": time.monotonic() + 5, "guess_s": 10.0}
    well, made, told = go_through("ab", tmp_path / "calls.jsonl", {}, **limits)
    assert well and made == [] and told[0].endswith("and a call may take 10; the same command goes on with a, b")


def test_tests_that_have_passed_are_not_run_again(tmp_path, monkeypatch, capsys):
    """Names with spaces too."""
    said = iter(["[gw0] [ 1%] PASSED tests/a.py::test_b[x y] \n[gw1] [ 2%] PASSED tests/a.py::test_c \n"
                 "[gw0] [ 3%] FAILED tests/a.py::test_d \n", "= 2 deselected, no tests ran in 1.0s =\n"])
    given = []

    def fake_run(command, seconds, output):
        given.append([word for word in command if word.startswith("--deselect")])
        output.write_text(next(said))
        return "something"

    monkeypatch.setattr(gpu.cells, "run", fake_run)
    assert not gpu.run_tests(tmp_path, False, 100)
    assert gpu.run_tests(tmp_path, False, 100)
    assert given == [[], ["--deselect=tests/a.py::test_b[x y]", "--deselect=tests/a.py::test_c"]]
    assert "tests: 2 had passed before" in capsys.readouterr().out


def test_a_dry_run_plans_the_tables(tmp_path):
    done = script("tables", "--out", "out", "--device", "cpu", "--tiny", cwd=tmp_path)
    assert done.returncode == 0 and "tiny-plan: done (" in done.stdout, done.stdout
    planned = (tmp_path / "out" / "reproduce" / "tiny-plan.log").read_text()
    assert "lm_pg19 at scale gpu" in planned and "FLASH, 8192, pg19_medium-32000" in planned
    assert "- tables: 1 of 1 done" in (tmp_path / "out" / "summary.md").read_text()
    again = script("tables", "--out", "out", "--device", "cpu", "--tiny", cwd=tmp_path)
    assert again.returncode == 0 and "tiny-plan" not in again.stdout


def test_rows_of_a_call_are_written_together_or_not_at_all(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"

    def fake_run(command, seconds, log):
        append_json_lines(Path(command[command.index("--json") + 1]), [{"model": "flash"}, {"model": "combiner"}])
        return ended

    monkeypatch.setattr(gpu.cells, "run", fake_run)
    for ended in ("exit code 3", DONE):
        assert measure_call("small/8192", ["step"], 10.0, rows, ["--device", "cpu"]) == ended
    assert gpu.rows_in(rows) == [{"model": "flash", "cell": "small/8192"}, {"model": "combiner", "cell": "small/8192"}]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


SLEEPER = "import subprocess, sys; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); p.wait()"


def wait_until_gone(pid):
    for _ in range(100):
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_a_command_ends_in_time_with_all_that_it_started(tmp_path):
    assert run([sys.executable, "-c", "print(1)"]) == DONE
    failing = [sys.executable, "-c", "import sys; sys.exit('error: no memory')"]
    assert run(failing, 30) == "exit code 1" and run(failing, 30, tmp_path / "log") == "error: no memory"
    started = time.monotonic()
    assert run([sys.executable, "-c", SLEEPER], 1.5, tmp_path / "pid") == STOPPED
    assert time.monotonic() - started < 10
    wait_until_gone(int((tmp_path / "pid").read_text()))


SAVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), pathlib.Path(sys.argv[1]).touch(), sys.exit(143)))
print("listens", flush=True)
time.sleep(300)
"""


def test_a_command_is_asked_to_save_before_it_is_killed(tmp_path):
    started, saves = time.monotonic(), [sys.executable, "-c", SAVER, tmp_path / "saved"]
    assert run(saves, 24, tmp_path / "log", save_s=20) == SAVED
    assert (tmp_path / "saved").exists() and time.monotonic() - started < 15
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    started = time.monotonic()
    assert run([sys.executable, "-c", deaf], 2, tmp_path / "log", save_s=1) == SAVED
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(("number", "save_s"), [(signal.SIGTERM, 0), (signal.SIGKILL, 0), (signal.SIGTERM, 20),
                                                (signal.SIGKILL, 20)])
def test_what_runs_dies_with_the_script(tmp_path, number, save_s):
    code = (f"import sys, signal; sys.path.insert(0, {str(ROOT)!r}); from benchmarks import gpu; import pathlib\n"
            "signal.signal(signal.SIGTERM, gpu.stop)\n"
            f"gpu.cells.run(['sleep', '301'], 300, pathlib.Path({str(tmp_path / 'log')!r}), {save_s})")
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        for _ in range(200):
            if pids := children.read_text().split():
                break
            time.sleep(0.05)
        parent.send_signal(number)
        try:
            parent.wait(60)
        finally:
            parent.kill()
    wait_until_gone(int(pids[0]))
