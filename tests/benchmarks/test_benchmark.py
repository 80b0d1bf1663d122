"""What all measurements share: times, memory, where a row comes from, rows in files, processes."""

import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import measure
from benchmarks.measure import Worker, add_times, mark, spreads
from benchmarks.provenance import append_json_lines, commit, cpu_model, provenance
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


def test_a_processor_without_a_name_is_its_kind(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path, **how: "processor: 0\nCPU architecture: 8\n")  # of an ARM
    assert cpu_model() == platform.machine()


def test_commit_is_that_of_the_checkout_or_none(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    assert {"commit", "command", "cpu", "cores", "memory_gib", "gpu", "load_average", "torch"} <= set(provenance())
    monkeypatch.setattr("benchmarks.provenance.ROOT", tmp_path)
    git("init", "-q")
    file = tmp_path / "benchmarks" / "provenance.py"
    rows, page = (tmp_path / "benchmarks" / name for name in ("rows/rows.jsonl", "tables/speed.md"))
    study = tmp_path / "studies" / "zoology.py"
    for path in (file, rows, page, study):
        path.parent.mkdir(parents=True)
        path.write_text("a\n")
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


def test_what_has_a_row_is_not_measured_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert measure.add_missing(path, {"model": "a"}, "do", lambda: {"x": 1})["x"] == 1
    assert measure.add_missing(path, {"model": "a"}, "do", lambda: {"x": 2})["x"] == 1
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["command"] == "do" and row["seconds"] >= 0 and "commit" in row


@pytest.mark.parametrize(("left", "kept"), [('{"a": 1}\n{"a": 2', [1]), ('{"a"', []), ('{"a": 1}\n{"a": 2}', [1, 2])])
def test_a_line_that_was_cut_off_is_taken_out_and_a_whole_one_is_not(left, kept, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(left)
    append_json_lines(path, [{"a": 9}])
    assert read_json_lines(path, lambda row: row["a"], "a row") == [*kept, 9]
    assert path.read_text().count("\n") == len(kept) + 1
