"""One op: its implementations take turns."""

import pytest
import torch

from benchmarks.cells import shaped_config
from benchmarks.measure import Setup
from benchmarks.op import MODEL_OF, OPS, benchmark_op
from workers_here import work_here

TINY = {"d_model": 32, "vocab_size": 50, "chunk_size": 16, "query_key_dim": 16, "pairs": {"n_heads": 2}}


@pytest.mark.parametrize("name", OPS)
def test_forward_and_backward_have_times(name, monkeypatch):
    work_here(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    config = shaped_config(MODEL_OF.get(name, "flash"), shape=TINY, settings={"context": 48})
    made = benchmark_op(name, [config], Setup(repeats=2), tokens=96, precisions=["float32", "bfloat16"])
    rows = [row for some in made for row in some]
    assert [row["variant"] for row in rows] == ["reference", "compiled"] * 2
    for row in rows:
        assert (row["benchmark"], row["unit"], row["batch_size"], row["context_tokens"]) == ("op", "call", 2, 48)
        for part in ("forward", "backward"):
            assert row[part]["ms"]["n"] == row["cpu_ms"]["n"] == 2
            assert 0 < row[part]["ms"]["min"] < row["cpu_ms"]["max"]
