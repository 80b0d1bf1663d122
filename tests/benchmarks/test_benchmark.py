"""What all measurements share: times, where a row comes from, rows in files, processes; and ops."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import text_files
from benchmarks import ROOT, measure
from benchmarks.cells import run, shaped_config
from benchmarks.measure import Setup, Worker, add_times, mark, spreads
from benchmarks.op import OPS, benchmark_op
from benchmarks.provenance import append_json_lines, commit, provenance
from benchmarks.step import training_steps
from lineartime.base.files import read_json_lines


def test_times_have_quartiles_and_say_which_clock_counts(monkeypatch):
    assert measure.spread([4.0, 1.0, 3.0, 2.0, 100.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0,
                                                           "max": 100.0, "n": 5}
    seconds = iter([1.0, 3.0, 6.0])
    monkeypatch.setattr(measure.time, "process_time", lambda: next(seconds) / 1e3)
    times = {}
    add_times(times, [mark(torch.device("cpu")) for _ in range(3)])
    assert times.keys() == {"wall_ms", "cpu_ms"} and times["cpu_ms"] == pytest.approx([2.0, 3.0])
    found = spreads(times, 5)
    assert found["clock"] == "cpu" and found["cpu_ms"]["n"] == 2 and found["tokens_per_s"] == pytest.approx(2000)
    assert spreads(times | {"gpu_ms": [5.0]}, 5)["clock"] == "gpu"


def test_a_process_that_dies_says_why():
    wrong, killed = Worker(training_steps, {"colour": 1}), Worker(training_steps, {})
    assert "unexpected keyword argument 'colour'" in wrong.ask()["failed"]
    wrong.close()
    killed.process.kill()
    assert "memory" in killed.ask()["failed"] and "memory" in killed.ask()["failed"]
    killed.close()


def test_commit_is_that_of_the_checkout_or_none(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    assert {"commit", "command", "cpu", "cores", "memory_gib", "gpu", "load_average", "torch"} <= set(provenance())
    monkeypatch.setattr("benchmarks.provenance.ROOT", tmp_path)
    git("init", "-q")
    names = ("benchmarks/provenance.py", "benchmarks/rows/rows.jsonl", "benchmarks/tables/speed.md", "studies/one.py")
    file, rows, page, study = (tmp_path / name for name in names)
    text_files.make(tmp_path, dict.fromkeys(names, "a\n"))
    monkeypatch.setenv("LINEARTIME_COMMIT", "abc")
    assert commit() == "abc"
    monkeypatch.delenv("LINEARTIME_COMMIT")
    assert commit() is None  # a repository around an installed package is not the package's
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = commit()
    assert head is not None and len(head) == 40
    for path in (rows, page, study, file):
        path.write_text("b\n")
        assert commit() == head + "+changes" * (path in (study, file))
        git("checkout", "-q", ".")


@pytest.mark.parametrize(("left", "kept"), [('{"a": 1}\n{"a": 2', [1]), ('{"a"', []), ('{"a": 1}\n{"a": 2}', [1, 2])])
def test_a_line_that_was_cut_off_is_taken_out_and_a_whole_one_is_not(left, kept, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(left)
    append_json_lines(path, [{"a": 9}])
    assert read_json_lines(path, lambda row: row["a"], "a row") == [*kept, 9]
    assert path.read_text().count("\n") == len(kept) + 1


@pytest.mark.parametrize("name", OPS)
def test_implementations_have_times(name, monkeypatch):
    sizes = {"d_model": 32, "vocab_size": 50, "chunk_size": 16, "query_key_dim": 16}
    monkeypatch.setattr(torch, "compile", lambda function: function)
    config = shaped_config(OPS[name], shape=sizes, settings={"context": 48})
    rows = benchmark_op(name, config, Setup(repeats=2), tokens=96, precision="bfloat16")
    assert [row["variant"] for row in rows] == ["reference", "compiled"]
    for row in rows:
        assert (row["benchmark"], row["unit"], row["batch_size"], row["context_tokens"]) == ("op", "call", 2, 48)
        assert row["cpu_ms"]["n"] == 2 and 0 < row["cpu_ms"]["min"] < row["cpu_ms"]["max"]


SAVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), pathlib.Path(sys.argv[1]).touch(), sys.exit(143)))
print("listens", flush=True)
time.sleep(300)
"""


def test_a_command_that_is_asked_to_stop_saves(tmp_path):
    log = tmp_path / "log"
    code = run([sys.executable, "-c", SAVER, tmp_path / "saved"], log, stop=lambda: "listens" in log.read_text())
    assert code == 143 and (tmp_path / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_runs_dies_with_the_process_that_runs_it(tmp_path, number):
    code = ("import sys, signal, pathlib; from benchmarks import cells\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
            f"cells.run(['sleep', '301'], pathlib.Path({str(tmp_path / 'log')!r}),"
            " stop=lambda: print('it runs', flush=True))")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()  # a signal that comes while it forks may be lost
        pids = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.send_signal(number)
        try:
            parent.wait(60)
        finally:
            parent.kill()
    with suppress(ProcessLookupError):  # it is gone, and nobody has to wait
        assert select.select([os.pidfd_open(int(pids[0]))], [], [], 30)[0], "it is still there"
