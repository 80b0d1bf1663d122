"""The benchmarks' arithmetic and their rows on models that take no time; speeds themselves are no matter for a test."""

import json
import subprocess

import pytest
import torch

from lineartime.benchmark import measure
from lineartime.benchmark.measure import append_rows, peak_rss_bytes, provenance
from lineartime.benchmark.memory import benchmark_read, print_read
from lineartime.benchmark.step import benchmark_train, print_train
from lineartime.config import model_config
from lineartime.errors import ResourceError
from lineartime.info import describe

TINY = {"d_model": 32, "n_layers": 2, "vocab_size": 64, "context": 512}
FLASH = model_config("flash", query_key_dim=16, chunk_size=16, **TINY)
QUAD = model_config("flash-quad", query_key_dim=16, **TINY)


def test_train_rows():
    rows = benchmark_train({"flash": FLASH}, [64], tokens=256, repeats=2)
    assert [(row["model"], row["context_tokens"], row["tokens_per_step"]) for row in rows] == [("flash", 64, 256)]
    row = rows[0]
    assert row["cpu_ms_per_step"]["min"] <= row["cpu_ms_per_step"]["median"] <= row["cpu_ms_per_step"]["max"]
    assert row["tokens_per_s"] == pytest.approx(256e3 / row["cpu_ms_per_step"]["median"])
    assert row["peak_mib"] > 50 and row["config"]["context"] == 64


def test_a_measurement_that_dies_is_a_row(capsys, monkeypatch):
    def kill(*args, **kwargs):
        return subprocess.CompletedProcess(args, returncode=-9, stdout="", stderr="")

    rows = benchmark_train({"flash": FLASH}, [64], tokens=64, repeats=2, device="no-such-device")
    assert "no-such-device" in rows[0]["failed"] or "device" in rows[0]["failed"]
    print_train(rows)
    assert "failed" in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", kill)
    assert "memory" in measure.in_own_process("read", {})["failed"]
    with pytest.raises(ResourceError, match="memory"):
        benchmark_read(FLASH, 100)


def test_print_train(capsys):
    row = {"benchmark": "train", "model": "flash", "context_tokens": 2048, "tokens_per_s": 12345.6, "peak_mib": 900.2,
           "cpu_ms_per_step": {"median": 700.0, "min": 650.0, "max": 777.0}, "device": "cpu", "threads": 1,
           "dtype": "float32", "repeats": 3}
    print_train([row])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["flash", "2,048", "12,346", "700", "650", "777", "900", "MiB"]


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

    monkeypatch.setattr(measure, "ROOT", tmp_path)
    git("init", "-q")
    (tmp_path / "lineartime" / "benchmark").mkdir(parents=True)
    file = tmp_path / "lineartime" / "benchmark" / "measure.py"
    file.write_text("a\n")
    assert measure.commit() is None  # a repository around an installed package is not the package's
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = measure.commit()
    assert head is not None and len(head) == 40
    file.write_text("b\n")
    assert measure.commit() == head + "+changes"


def test_peak_memory_rises_with_what_is_touched():
    before = peak_rss_bytes()
    held = torch.ones(before // 4 + 2**26)  # more than the process has ever had
    assert peak_rss_bytes() >= before + 2**26
    del held
    assert peak_rss_bytes() >= before + 2**26


def test_rows_are_appended_as_json_lines(tmp_path):
    append_rows(tmp_path / "rows.jsonl", [{"a": 1}])
    append_rows(tmp_path / "rows.jsonl", [{"a": 2}, {"a": 3}])
    assert [json.loads(line)["a"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [1, 2, 3]
    with pytest.raises(ResourceError, match="cannot write"):
        append_rows(tmp_path, [{"a": 1}])
