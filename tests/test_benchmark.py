"""The benchmarks' arithmetic and their rows on models that take no time; speeds themselves are no matter for a test."""

import json
import subprocess

import pytest
import torch

from lineartime.benchmark import decode as decode_module
from lineartime.benchmark import measure
from lineartime.benchmark.decode import benchmark_decode, flatness, print_decode, states_at
from lineartime.benchmark.measure import append_rows, peak_rss_bytes, provenance
from lineartime.benchmark.memory import benchmark_read, print_read
from lineartime.benchmark.step import benchmark_train, print_train
from lineartime.config import model_config
from lineartime.errors import ResourceError, UsageError
from lineartime.generate import prefill
from lineartime.info import describe
from lineartime.model import LanguageModel

TINY = {"d_model": 32, "n_layers": 2, "vocab_size": 64, "context": 512}
FLASH = model_config("flash", query_key_dim=16, chunk_size=16, **TINY)
QUAD = model_config("flash-quad", query_key_dim=16, **TINY)
TRANSFORMER = model_config("transformer", n_heads=2, **TINY)


def decode(**options):
    models = {"flash": LanguageModel(FLASH), "flash-quad": LanguageModel(QUAD)}
    return benchmark_decode(models, **{"lengths": [32, 64, 128], "quadratic_up_to": 64, "repeats": 3, "block_tokens": 4}
                            | options)


def test_decode_has_a_row_per_model_and_length():
    rows = decode()
    assert [(row["model"], row["context_tokens"]) for row in rows] == [
        ("flash", 32), ("flash", 64), ("flash", 128), ("flash-quad", 32), ("flash-quad", 64)]
    assert {row["state_bytes"] for row in rows[:3]} == {describe(FLASH).decoding.constant}
    # 16 tokens come after the context: a block that is not timed, and three that are.
    for row in rows[3:]:
        assert row["state_bytes"] >= describe(QUAD).decoding.at(row["context_tokens"] + 16)
    for row in rows:
        for clock in ("wall_ms_per_token", "cpu_ms_per_token"):
            assert 0 < row[clock]["min"] <= row[clock]["median"] <= row[clock]["max"]
        assert (row["device"], row["dtype"], row["threads"], row["warm_up_tokens"]) == ("cpu", "float32", 1, 4)
        assert row["config"]["d_model"] == 32 and row["process_peak_rss_mib"] > 10
        assert json.loads(json.dumps(row)) == row


def test_every_cell_decodes_in_turn_and_the_order_turns_round(monkeypatch):
    order = []
    step = decode_module.decode_step

    def spy(model, ids_B, state):
        order.append((model.config.chunk_size is not None, int(state.length_B)))
        return step(model, ids_B, state)

    monkeypatch.setattr(decode_module, "decode_step", spy)
    decode(lengths=[32, 64], repeats=2, block_tokens=1)
    cells = [(True, 32), (True, 64), (False, 32), (False, 64)]
    blocks = [order[4 * i : 4 * i + 4] for i in range(3)]
    assert blocks == [[(flash, n + i) for flash, n in (cells if i % 2 else cells[::-1])] for i in range(3)]


def test_states_are_those_of_reading_the_whole_context(monkeypatch):
    monkeypatch.setattr(decode_module, "PIECE_TOKENS", 24)
    model = LanguageModel(FLASH).double()
    states = dict(states_at(model, [20, 50, 120], seed=3))
    generator, prompt = torch.Generator().manual_seed(3), []
    for n_new in (20, 24, 6, 24, 24, 22):
        prompt += torch.randint(64, (1, n_new), generator=generator)[0].tolist()
    for length, state in states.items():
        expected = prefill(model, [prompt[:length]])[1]
        assert state.length_B.tolist() == [length]
        for mine, theirs in zip(state.caches, expected.caches, strict=True):
            torch.testing.assert_close(mine.kv_BSE, theirs.kv_BSE, rtol=0, atol=1e-12)
            assert mine.count_B == theirs.count_B


def test_decode_refuses_what_it_cannot_measure():
    with pytest.raises(UsageError, match="nothing to measure"):
        decode(lengths=[])
    with pytest.raises(UsageError, match="nothing to measure"):
        decode(repeats=0)
    with pytest.raises(UsageError, match="position table"):
        benchmark_decode({"transformer": LanguageModel(TRANSFORMER)}, [500], repeats=3, block_tokens=4)


def test_threads_are_given_back():
    decode(threads=2, repeats=1)
    assert torch.get_num_threads() == 1


def test_flatness_is_the_spread_of_medians():
    def row(model, median, device="cpu"):
        slow = {"median": 10 * median}
        fast, other = {"median": median}, "wall" if device == "cpu" else "cpu"
        clock = "cpu" if device == "cpu" else "wall"
        return {"model": model, "device": device, f"{clock}_ms_per_token": fast, f"{other}_ms_per_token": slow}

    assert flatness([row("a", 2.0), row("a", 2.1), row("b", 1.0), row("a", 1.9), row("b", 3.0)]) == {
        "a": pytest.approx(2.1 / 1.9 - 1), "b": 2.0}
    assert flatness([row("a", 2.0, "cuda"), row("a", 3.0, "cuda")]) == {"a": 0.5}


def test_print_decode(capsys):
    print_decode(decode(lengths=[32, 1024], quadratic_up_to=64))
    lines = capsys.readouterr().out.splitlines()
    assert "processor time, 1 thread, float32" in lines[0]
    assert [line.split()[:2] for line in lines if line.startswith("flash ")] == [["flash", "32"], ["flash", "1,024"]]
    assert any(line.startswith("flash: medians from 32 to 1,024 tokens lie within") for line in lines)


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
