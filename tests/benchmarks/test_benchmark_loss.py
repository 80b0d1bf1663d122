"""The benchmark of the loss: its rows, its check, and its count of memory against bytes that can be added up."""

import json

import pytest

from benchmarks import loss as loss_module
from benchmarks import measure
from benchmarks.loss import counted_bytes, losses, plain
from benchmarks.op import HEAD_LIMITS, MANY_TOKENS, benchmark_op, measure_op
from lineartime.config import model_config, to_dict
from lineartime.errors import NumericsError

CONFIG = model_config("flash", n_layers=1, vocab_size=300, d_model=16, context=700)


def test_rows():
    rows = benchmark_op("linear_cross_entropy", [CONFIG], tokens=700, repeats=2, precisions=["bfloat16"])
    assert [row["variant"] for row in rows] == list(losses())
    for row in rows:
        assert json.loads(json.dumps(row)) == row and measure.provenance().keys() <= row.keys()
        assert (row["benchmark"], row["unit"], row["clock"], row["dtype"]) == ("op", "call", "cpu", "bfloat16")
        assert row["cpu_ms"]["n"] == 2 and row["tokens_per_s"] == pytest.approx(7e5 / row["cpu_ms"]["median"])
        assert 1e-4 < row["check"]["error"] <= row["check"]["limit"] == HEAD_LIMITS["bfloat16"]
        assert row["settings"]["float32_matmul"] == "highest" and row["above_import_mib"] < row["peak_mib"]
    assert len({row["run"] for row in rows}) == 1
    plain_mib, ours_mib = (row["many_tokens"]["counted_mib"] for row in rows[:2])
    logits_mib = MANY_TOKENS * 300 * 4 / 2**20
    assert ours_mib < logits_mib / 5 and 3 * logits_mib <= plain_mib <= 4 * logits_mib
    assert all(row["many_tokens"] == {"tokens": MANY_TOKENS, "counted_mib": None} for row in rows[2:])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_count_grows_with_the_logits_or_not(precision):
    """Plain: three matrices of logits at once, in bfloat16 that or more. By chunks: a gradient of x for each token."""
    v, d, n = 4096, 32, 2**14
    logits, x, head = 4 * n * v, 4 * n * d, 4 * v * (d + 1)
    sizes = [{"n_tokens": k * n, "vocab_size": v, "d_model": d} for k in (1, 2, 3)]
    assert 3 * logits <= counted_bytes("plain", sizes[0], precision) <= 3.6 * logits
    chunk = 1024 * v * (4 if precision == "float32" else 6)
    ours = [counted_bytes("by chunks", each, precision) for each in sizes]
    assert chunk + head < ours[0] < chunk + 2 * head + 2 * x + 2**20
    assert ours[2] - ours[1] <= 1.6 * x  # the gradient, and in bfloat16 what it is made from


def test_a_tenth_of_the_memory_at_2_18_tokens():
    sizes = {"n_tokens": 2**18, "vocab_size": 32_000, "d_model": 768}
    inputs = 4 * (2**18 * 768 + 32_000 * 769) + 8 * 2**18
    with_logits, without = (counted_bytes(name, sizes, "float32") for name in ("plain", "by chunks"))
    assert (without + inputs) * 10 < with_logits + inputs
    assert without < 2**30


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(measure, "choose_settings", lambda device: {})
    monkeypatch.setattr(loss_module, "linear_cross_entropy", lambda *inputs: 1.0001 * plain(*inputs))
    with pytest.raises(NumericsError, match="by chunks, "):
        next(measure_op("linear_cross_entropy", to_dict(CONFIG), 1, "float32", 1, 1, "cpu", 0))
