"""One op: its implementations take turns."""

import pytest
import torch

from benchmarks.cells import shaped_config
from benchmarks.measure import Setup
from benchmarks.op import OPS, benchmark_op

TINY = {"d_model": 32, "vocab_size": 50, "chunk_size": 16, "query_key_dim": 16}


@pytest.mark.parametrize("name", OPS)
def test_implementations_have_times(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    config = shaped_config(OPS[name], shape=TINY, settings={"context": 48})
    rows = benchmark_op(name, config, Setup(repeats=2), tokens=96, precision="bfloat16")
    assert [row["variant"] for row in rows] == ["reference", "compiled"]
    for row in rows:
        assert (row["benchmark"], row["unit"], row["batch_size"], row["context_tokens"]) == ("op", "call", 2, 48)
        assert row["cpu_ms"]["n"] == 2 and 0 < row["cpu_ms"]["min"] < row["cpu_ms"]["max"]
