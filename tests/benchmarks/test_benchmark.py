"""What the benchmarks share: times, memory, where a row comes from, processes; speeds are no matter for a test."""

import subprocess

import pytest
import torch

from benchmarks import measure
from benchmarks.decode import benchmark_read, print_read, read_prompt
from benchmarks.measure import (
    Worker,
    add_times,
    compared_ms,
    in_own_process,
    mark,
    print_rows,
    provenance,
    rows_of_commit,
    spread,
    spreads,
)
from lineartime.atomic_io import append_json_lines
from lineartime.config import model_config, to_dict
from lineartime.errors import ResourceError
from lineartime.info import describe
from lineartime.runtime import peak_bytes, peak_rss_bytes

CPU = torch.device("cpu")
TINY = {"d_model": 32, "n_layers": 2, "vocab_size": 64, "context": 512}
FLASH = model_config("flash", query_key_dim=16, chunk_size=16, **TINY)
QUAD = model_config("flash-quad", query_key_dim=16, **TINY)


def test_spread_has_quartiles():
    assert spread([4.0, 1.0, 3.0, 2.0, 100.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "max": 100.0,
                                                   "n": 5}
    assert spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "min": 7.0, "max": 7.0, "n": 1}


def test_times_say_which_clock_counts(monkeypatch):
    seconds = iter([1.0, 3.0, 6.0])
    monkeypatch.setattr(measure.time, "process_time", lambda: next(seconds) / 1e3)
    times = {}
    add_times(times, [mark(CPU) for _ in range(3)])
    assert times.keys() == {"wall_ms", "cpu_ms"} and times["cpu_ms"] == pytest.approx([2.0, 3.0])
    found = spreads(times, 1)
    assert found["clock"] == "cpu" and found["cpu_ms"]["n"] == 2 and "gpu_ms" not in found
    assert compared_ms(found)["median"] == pytest.approx(2.5)
    times["gpu_ms"] = [5.0]
    assert spreads(times, 1)["clock"] == "gpu" and compared_ms(spreads(times, 1))["median"] == 5.0


def test_rows_are_printed_with_the_columns_that_they_have(capsys):
    shared = {"benchmark": "step", "unit": "step", "run": "r1", "threads": 2, "device": "cpu", "repeats": 3}
    print_rows([{**shared, "label": "flash", "context_tokens": 2048, **spreads({"cpu_ms": [1234.5]}, 2469)},
                {**shared, "label": "flash:compiled", "context_tokens": 4096, "failed": "out of memory"}])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "step: time of a step, processor time, 2 threads; 3 rounds, run r1"
    assert head.split() == ["context", "ms", "quartiles", "tokens/s"]
    assert lines[0].split() == ["flash", "2,048", "1,234.50", "1,234.50", "to", "1,234.50", "2,000"]
    assert lines[1].split() == ["flash:compiled", "4,096"] and lines[2] == "flash:compiled failed: out of memory"


def test_a_job_goes_on_when_it_is_told_and_says_why_it_died():
    asked = {"config": to_dict(FLASH), "n_tokens": 64, "threads": 1, "device": "cpu", "seed": 0}
    worker = Worker(read_prompt, asked)
    assert worker.ask()["wall_seconds"] > 0
    failed = worker.ask()  # there is no second answer
    assert "failed" in failed and worker.ask() == failed
    worker.close()
    assert "unexpected keyword argument 'colour'" in in_own_process(read_prompt, {"colour": 1})["failed"]
    killed = Worker(read_prompt, {})
    killed.process.kill()
    assert "memory" in killed.ask()["failed"]
    killed.close()


def test_a_prompt_that_cannot_be_read_is_an_error(monkeypatch):
    monkeypatch.setattr("benchmarks.measure.in_own_process", lambda job, arguments: {"failed": "no memory"})
    with pytest.raises(ResourceError, match="no memory"):
        benchmark_read(FLASH, 100)


def test_reading_takes_memory_that_grows_only_with_a_cache(capsys):
    flash, quad = (benchmark_read(config, 8192) for config in (FLASH, QUAD))
    assert [now["tokens"] for now in flash["tenths"]] == [2048, 4096, 6144, 8192]
    assert flash["growth_mib"] < 8 and flash["state_bytes"] == describe(FLASH).decoding.constant
    assert quad["growth_mib"] > 80
    print_read(flash)
    assert "8,192 tokens read" in capsys.readouterr().out


def test_provenance_names_what_a_number_needs():
    row = provenance()
    assert {"commit", "command", "cpu", "cores", "memory_gib", "gpu", "load_average", "python", "torch"} <= set(row)
    assert row["torch"] == torch.__version__ and row["cores"] >= 1
    assert not row["command"].startswith("/")


def test_commit_is_that_of_the_checkout_or_none(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    monkeypatch.setattr("lineartime.release.provenance.ROOT", tmp_path)
    git("init", "-q")
    (tmp_path / "lineartime" / "release").mkdir(parents=True)
    file = tmp_path / "lineartime" / "release" / "provenance.py"
    file.write_text("a\n")
    rows = tmp_path / "benchmarks" / "rows" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.touch()
    monkeypatch.setenv("LINEARTIME_COMMIT", "abc")
    assert measure.commit() == "abc"
    monkeypatch.delenv("LINEARTIME_COMMIT")
    assert measure.commit() is None  # a repository around an installed package is not the package's
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = measure.commit()
    assert head is not None and len(head) == 40
    rows.write_text("{}\n")
    assert measure.commit() == head  # a row is no change of the program
    file.write_text("b\n")
    assert measure.commit() == head + "+changes"


def test_peak_memory_rises_with_what_is_touched_and_can_begin_again():
    before = peak_rss_bytes()
    held = torch.ones(before // 4 + 2**26)  # more than the process has ever had
    assert peak_rss_bytes() >= before + 2**26
    del held
    assert peak_bytes(CPU) >= before + 2**26
    measure.release_memory(CPU)
    measure.forget_peak(CPU)
    assert peak_bytes(CPU) < before + 2**26


def test_rows_of_this_commit_are_those_that_need_not_be_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(measure, "commit", lambda: "abc")
    assert rows_of_commit(path) == []
    append_json_lines(path, [{"commit": "abc", "a": 1}, {"commit": "abd", "a": 2}, {"commit": "abc+changes", "a": 3}])
    with path.open("a") as file:
        file.write('{"commit": "abc", "a":')  # killed while writing
    assert rows_of_commit(path) == [{"commit": "abc", "a": 1}]
    monkeypatch.setattr(measure, "commit", lambda: "abc+changes")  # nobody knows whether the changes are the same
    assert rows_of_commit(path) == []
