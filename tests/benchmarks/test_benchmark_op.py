"""One op: its implementations are checked before they are timed, and take turns."""

import pytest
import torch

from benchmarks import measure
from benchmarks import op as op_module
from benchmarks.cells import shaped_config
from benchmarks.measure import print_rows
from benchmarks.op import (
    MODEL_OF,
    OPS,
    benchmark_op,
    measure_op,
)
from lineartime.config import to_dict
from lineartime.errors import UsageError

TINY = {"d_model": 32, "vocab_size": 50, "chunk_size": 16, "query_key_dim": 16, "pairs": {"n_heads": 2}}


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(measure, "choose_settings", lambda device: {})
    monkeypatch.setattr(torch, "compile", lambda function: function)


def config_of(name: str):
    return shaped_config(MODEL_OF.get(name, "flash"), shape=TINY, settings=["context=48"])


def measured(name: str, **options):
    every = {"precision": "float32", "repeats": 2, "threads": 1, "device": "cpu", "seed": 0}
    return [*next(measure_op(name, to_dict(config_of(name)), 2, **every | options))["found"].values()]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_implementation_agrees_with_the_reference_in_float64(name, precision):
    found = measured(name, precision=precision)
    assert len(found) >= 1 and all(row["cpu_ms"]["n"] == 2 for row in found)
    for row in found:
        assert (1e-9 if precision == "float32" else 1e-4) < row["check"]["error"] <= row["check"]["limit"]
        assert row["check"]["limit"] == (op_module.HEAD_LIMITS if OPS[name].head else op_module.LIMITS)[precision]
        for part in ("forward", "backward"):
            assert row[part]["ms"]["n"] == 2 and 0 < row[part]["ms"]["min"] < row["cpu_ms"]["max"]


def test_a_process_measures_an_op(capsys):
    rows = benchmark_op("softmax_attention", [config_of("softmax_attention")], tokens=96, repeats=3)
    assert [row["variant"] for row in rows] == ["unfused", "fused"] and len({row["run"] for row in rows}) == 1
    for row in rows:
        assert (row["benchmark"], row["unit"], row["batch_size"], row["context_tokens"]) == ("op", "call", 2, 48)
        assert row["cpu_ms"]["n"] == 3 and row["check"]["error"] < 1e-5 and "commit" in row and "settings" in row
        assert row["tokens_per_s"] == pytest.approx(96e3 / row["cpu_ms"]["median"])
    print_rows(rows)
    printed = capsys.readouterr().out
    assert "op: time of a call, processor time, threads: 1; 3 rounds" in printed
    assert "softmax_attention:fused" in printed


def test_what_cannot_be_measured_is_refused():
    for wrong in ({"name": "attention"}, {"precisions": ["float16"]}, {"repeats": 0}):
        with pytest.raises(UsageError):
            benchmark_op(**{"name": "add_norm", "configs": [config_of("add_norm")]} | wrong)
