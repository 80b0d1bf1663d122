"""One op: its implementations are checked before they are timed, and take turns."""

import pytest
import torch

from benchmarks.cells import shaped_config
from benchmarks.measure import Setup
from benchmarks.op import HEAD_LIMITS, LIMITS, MODEL_OF, OPS, benchmark_op
from workers_here import work_here

TINY = {"d_model": 32, "vocab_size": 50, "chunk_size": 16, "query_key_dim": 16, "pairs": {"n_heads": 2}}


def config_of(name: str):
    return shaped_config(MODEL_OF.get(name, "flash"), shape=TINY, settings={"context": 48})


@pytest.mark.parametrize("name", OPS)
def test_every_implementation_agrees_with_the_reference_in_float64(name, monkeypatch):
    work_here(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    rows = benchmark_op(name, [config_of(name)], Setup(repeats=2), tokens=96, precisions=["float32", "bfloat16"])
    assert {row["variant"] for row in rows} >= ({"plain", "by chunks"} if OPS[name].head else {"reference", "compiled"})
    for row in rows:
        assert (1e-9 if row["dtype"] == "float32" else 1e-4) < row["check"]["error"] <= row["check"]["limit"]
        assert row["check"]["limit"] == (HEAD_LIMITS if OPS[name].head else LIMITS)[row["dtype"]]
        assert (row["benchmark"], row["unit"], row["batch_size"], row["context_tokens"]) == ("op", "call", 2, 48)
        for part in ("forward", "backward"):
            assert row[part]["ms"]["n"] == row["cpu_ms"]["n"] == 2
            assert 0 < row[part]["ms"]["min"] < row["cpu_ms"]["max"]


def test_another_function_is_not_timed(monkeypatch):
    work_here(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function: lambda *tensors: [x * 1.01 for x in function(*tensors)])
    reference, other = benchmark_op("add_norm", [config_of("add_norm")], Setup(repeats=1), tokens=96)
    assert "failed" not in reference and "not what the reference gives" in other["failed"]
