"""The verbs that measure, as a person calls them."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import app
from command_line import Call, assert_refused
from command_line import call as call  # a fixture

SIZES = ["--set", "n_layers=1", "--set", "d_model=16", "--set", "query_key_dim=8"]


def test_a_split_is_scored_by_what_was_there_before(tmp_path: Path, call: Call) -> None:
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    data, run, scores = tmp_path / "data", tmp_path / "run", tmp_path / "scores.json"
    assert call("prepare", tmp_path / "book.txt", "--out", data, "--tokenizer", "bytes", "--held-out", "0.2")[0] == 0
    assert call("train", "flash", "--data", data, "--out", run, "--steps", 1, *SIZES, "--set", "chunk_size=8",
                "--context", 32, "--tokens-per-step", 64, "--set", "micro_batch_tokens=64", "--set",
                "warmup_steps=1")[0] == 0
    verb = ("recurrence", run, "--data", data)
    code, out, _ = call(*verb, "--chunk", 16, "--context", 64, "--out", scores, app=app)
    assert code == 0 and "rare bigram" in out and "nats per token" in out and "chunks of 16" in out
    written = json.loads(scores.read_text())
    assert (written["chunk"], written["context"], written["split"]) == (16, 64, "validation")
    _, out, _ = call("evaluate", run, "--data", data, "--context", 64, "--json")
    assert written["loss"] == pytest.approx(json.loads(out)["loss"], rel=1e-12)
    _, out, _ = call(*verb, "--json", app=app)
    assert json.loads(out)["chunk"] == 8 and json.loads(out)["context"] == 32  # the model's own
    for code, word, options in ((2, "chunk = 0", ["--chunk", 0]), (2, "whole numbers", ["--context", 0]),
                                (6, "cannot write", ["--out", tmp_path / "a" / "b"])):
        got, _, err = call(*verb, *options, app=app)
        assert_refused(got, err, code, word)


def test_a_benchmark_writes_a_row_per_measurement(tmp_path: Path, call: Call) -> None:
    code, _, err = call("decode", "flash", "transformer++", "--lengths", "64,128", "--repeats", 2, *SIZES,
                        "--set", "n_heads=2", "--set", "chunk_size=16", "--set", "vocab_size=50",
                        "--json", tmp_path / "rows.jsonl", app=app)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["model"], row["context_tokens"]) for row in rows} == {
        (model, n) for model in ("flash", "transformer++") for n in (64, 128)}
    assert all(row["commit"] and row["command"] for row in rows)
    code, _, err = call("decode", "flash", "--lengths", "1024,many", app=app)
    assert_refused(code, err, 2, "1024,many")
