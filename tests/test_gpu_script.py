"""benchmarks/gpu.py without a GPU: its cells are ones the benchmark knows, it ends in time, dies whole and goes on."""

import importlib.util
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

from lineartime.benchmark.op import OPS
from lineartime.benchmark.peers import parse_label
from lineartime.cli import app

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"

spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
gpu = importlib.util.module_from_spec(spec)
sys.modules["gpu"] = gpu
spec.loader.exec_module(gpu)


def script(*arguments, cwd=None, **environment):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, cwd=cwd,
                          env={**os.environ, **environment})


def test_every_cell_is_one_that_the_benchmark_knows():
    cells = [*gpu.cells_of_steps(), *gpu.cells_of_decoding(), *gpu.cells_of_kernels()]
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.stage for cell in cells} == set(gpu.STAGES) - {"tests"}
    verbs = typer.main.get_command(app).commands["benchmark"]
    for cell in [*cells, *gpu.tiny_cells()]:
        verb, *rest = cell.arguments
        verbs.commands[verb].make_context(verb, [*rest, "--device", "cuda", "--json", "rows.jsonl"])
        for name in itertools.takewhile(lambda each: not each.startswith("--"), rest):
            assert name in OPS if verb == "op" else parse_label(name)


def test_the_most_telling_comes_first():
    first = gpu.cells_of_steps()[0]
    assert first.name == "gpu/2048-bfloat16" and first.arguments[:6] == (
        "step", "flash:compiled", "flash", "flash:reference:compiled", "flash:reference", "transformer++:compiled")
    assert [cells()[0].name for cells in (gpu.cells_of_kernels, gpu.cells_of_decoding)] == [
        "gpu-op/gated_chunk_attention-8192", "gpu-decode-captured/64"]


def test_without_a_gpu_it_is_an_error_of_one_line(tmp_path):
    done = script("step", "--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "out").exists()
    assert done.stderr == "error: no CUDA device here; --device cpu --tiny tries this script without one\n"


@pytest.mark.parametrize(("arguments", "words"), [(["stpe"], "unknown stage: stpe; it is one of tests, kernels"),
                                                  (["--before", "missing"], "cannot read the rows: missing")])
def test_wrong_arguments_are_an_error_of_one_line(arguments, words):
    done = script(*arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_a_dry_run_measures_and_the_next_one_goes_on(tmp_path):
    out = tmp_path / "out"
    arguments = ["decode", "--out", "out", "--device", "cpu", "--tiny", "--commit", "abc"]
    late = script(*arguments, "--minutes", "0.01", cwd=tmp_path)
    assert late.returncode == 0 and "the same command goes on with 1 cells" in late.stdout
    assert "left: tiny-decode/1" in (out / "summary.md").read_text()
    done = script(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert {row["cell"] for row in rows} == {"tiny-decode/1"} and {row["model"] for row in rows} == {
        "flash", "transformer++"}
    summary = (out / "summary.md").read_text()
    assert "- decode: 1 of 1 cells" in summary and "### Decoding" in summary
    again = script(*arguments, cwd=tmp_path)
    assert again.returncode == 0 and "1 cells are measured already" in again.stdout
    assert len((out / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert sorted(path.name for path in out.iterdir()) == ["progress.jsonl", "rows.jsonl", "summary.md"]


def fake_measure(outcomes):
    """Stands in for `measure`: each cell ends as told, a "done" one with a row."""
    def measure(cell, out, device, commit, seconds):
        ended = outcomes[cell.name]
        if ended == "done":
            out.append(out.rows, [{"cell": cell.name}])
        out.append(out.progress, [{"cell": cell.name, "ended": ended, "seconds": 0.0}])
        return ended
    return measure


def test_what_failed_is_tried_again_after_what_was_never_tried(tmp_path, monkeypatch, capsys):
    cells = [gpu.Cell("step", name, ()) for name in "abc"]
    out = gpu.Out(tmp_path, None)
    monkeypatch.setattr(gpu.Out, "summarise", lambda self, cells, note="": None)
    monkeypatch.setattr(gpu, "measure", fake_measure({"a": "out of memory", "b": "done", "c": "done"}))
    out.append(out.progress, [{"cell": "a", "ended": "out of memory", "seconds": 1.0}])
    assert not gpu.run_cells("step", cells, out, "cpu", None, time.monotonic() + 100, 1.0)
    assert [line["cell"] for line in out.read(out.progress)] == ["a", "b", "c", "a"]
    assert out.measured() == {"b", "c"}


def test_tests_are_shared_out_and_counted(tmp_path, monkeypatch, capsys):
    """Each runs once; what failed is said, and what a process that ended early did not run is missed."""
    given, names = [], [f"tests/test_gpu.py::test_{i}" for i in range(7)]

    def run(command, seconds, output):
        ids = [part for part in command if "::" in part]
        given.extend(ids)
        text = "\n".join(names) + "\n7 tests collected" if "--collect-only" in command else f"{len(ids)} passed in 1.0s"
        if names[2] in ids:
            text = f"FAILED {names[2]} - why\n1 failed, {len(ids) - 1} passed in 1.0s"
        output.write_text(text + "\n")
        return ""

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 6)
    out = gpu.Out(tmp_path, None)
    assert not gpu.run_tests(out, False, 100) and sorted(given) == names
    assert f"tests: FAILED {names[2]} - why\ntests: 6 passed, 1 failed of 7\n" in capsys.readouterr().out
    assert (tmp_path / "tests.txt").read_text().endswith("\n6 passed, 1 failed of 7\n")
    assert [path.name for path in tmp_path.iterdir()] == ["tests.txt"]
    assert gpu.run_tests(out, True, 100) and "only collected: 7 tests collected" in capsys.readouterr().out


def test_nothing_is_started_when_too_little_time_is_left(tmp_path, monkeypatch, capsys):
    out = gpu.Out(tmp_path, None)
    monkeypatch.setattr(gpu, "measure", fake_measure({"a": "done"}))
    assert gpu.run_cells("step", [gpu.Cell("step", "a", ())], out, "cpu", None, time.monotonic() + 5, 10.0)
    assert out.measured() == set() and "goes on with 1 cells" in capsys.readouterr().out


def test_a_line_that_a_kill_cut_off_is_dropped_and_the_rest_stays(tmp_path):
    out = gpu.Out(tmp_path, None)
    out.append(out.rows, [{"cell": "a"}, {"cell": "b"}])
    with out.rows.open("a") as file:
        file.write('{"cell": "c", "mo')
    assert out.measured() == {"a", "b"}
    out.append(out.rows, [{"cell": "d"}])
    assert [row["cell"] for row in out.read(out.rows)] == ["a", "b", "d"]


def test_rows_of_an_earlier_call_are_taken_where_there_are_none(tmp_path):
    before = tmp_path / "before.jsonl"
    before.write_text('{"cell": "a"}\n')
    assert gpu.Out(tmp_path / "out", before).measured() == {"a"}
    before.write_text('{"cell": "b"}\n')
    assert gpu.Out(tmp_path / "out", before).measured() == {"a"}


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
    assert gpu.run([sys.executable, "-c", "print(1)"], 30) == ""
    assert gpu.run([sys.executable, "-c", "import sys; sys.exit('error: no memory')"], 30) == "error: no memory"
    started = time.monotonic()
    assert gpu.run([sys.executable, "-c", SLEEPER], 1.5, tmp_path / "pid") == "stopped at the end of the stage's time"
    assert time.monotonic() - started < 10
    wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_runs_dies_with_the_script(tmp_path, number):
    code = (f"import sys, signal; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu, pathlib\n"
            "signal.signal(signal.SIGTERM, gpu.stop)\n"
            f"gpu.run(['sleep', '301'], 300, pathlib.Path({str(tmp_path / 'log')!r}))")
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        for _ in range(200):
            if pids := children.read_text().split():
                break
            time.sleep(0.05)
        parent.send_signal(number)
        parent.wait()
    wait_until_gone(int(pids[0]))
