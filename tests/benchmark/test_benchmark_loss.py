"""The benchmark of the loss: its rows, its check, and its count of memory against bytes that can be added up."""

import json

import pytest
import torch

from lineartime.benchmark import loss as loss_module
from lineartime.benchmark.loss import benchmark_loss, counted_bytes, implementations, plain, print_loss
from lineartime.benchmark.measure import compare, provenance
from lineartime.errors import NumericsError, UsageError
from lineartime.ops.cross_entropy import linear_cross_entropy

SIZES = {"vocab_size": 300, "d_model": 16, "tokens": 700, "many_tokens": 5000}


def test_rows(capsys):
    rows = benchmark_loss(**SIZES, repeats=2, precisions=["bfloat16"])
    assert [row["variant"] for row in rows] == list(implementations())
    for row in rows:
        assert json.loads(json.dumps(row)) == row and provenance().keys() <= row.keys()
        assert (row["benchmark"], row["unit"], row["clock"], row["dtype"]) == ("loss", "call", "cpu", "bfloat16")
        assert row["cpu_ms"]["n"] == 2 and row["tokens_per_s"] == pytest.approx(7e5 / row["cpu_ms"]["median"])
        assert row["check"]["error"] <= row["check"]["limit"] and row["settings"]["float32_matmul"] == "highest"
        assert row["above_import_mib"] < row["peak_mib"]
    assert len({row["run"] for row in rows}) == 1
    ours = rows[1]["many_tokens"]
    assert rows[0]["many_tokens"]["measured_mib"] is None and ours["measured_mib"] > 0 and ours["tokens"] == 5000
    print_loss(rows)
    printed = capsys.readouterr().out
    assert "Head and loss of 700 tokens, vocabulary 300, width 16" in printed
    assert all(row["variant"] in printed for row in rows)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_count_grows_with_the_logits_or_not(precision):
    """Plain: three matrices of logits at once, in bfloat16 that or more. By chunks: a gradient of x for each token."""
    v, d, n = 4096, 32, 2**14
    logits, x, head = 4 * n * v, 4 * n * d, 4 * v * (d + 1)
    assert 3 * logits <= counted_bytes(plain, [n, v, d], precision) <= 3.6 * logits
    chunk = 1024 * v * (4 if precision == "float32" else 6)
    ours = [counted_bytes(linear_cross_entropy, [k * n, v, d], precision) for k in (1, 2, 3)]
    assert chunk + head < ours[0] < chunk + 2 * head + 2 * x + 2**20
    assert ours[2] - ours[1] <= 1.6 * x  # the gradient, and in bfloat16 what it is made from


def test_a_tenth_of_the_memory_at_2_18_tokens():
    sizes = [2**18, 32_000, 768]
    inputs = 4 * (2**18 * 768 + 32_000 * 769) + 8 * 2**18
    with_logits, without = (counted_bytes(loss, sizes, "float32") for loss in (plain, linear_cross_entropy))
    assert (without + inputs) * 10 < with_logits + inputs
    assert without < 2**30


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = {"loss": torch.ones(1).double(), "gradient of x": torch.ones(3).double()}
    assert compare("ours", right, right, 1e-5)["error"] == 0
    for value in (1.1, torch.nan):
        with pytest.raises(NumericsError, match="ours, gradient of x: relative error"):
            compare("ours", right | {"gradient of x": torch.full((3,), value)}, right, 1e-5)
    monkeypatch.setattr(loss_module, "linear_cross_entropy", lambda *inputs: 2 * plain(*inputs))
    with pytest.raises(NumericsError, match="by chunks, "):
        next(loss_module.measure_loss([50, 30, 8], 100, "float32", 1, 1, "cpu", 0))


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"repeats": 0}, {"precisions": ["float16"]}])
def test_usage_errors(wrong):
    with pytest.raises(UsageError):
        benchmark_loss(**(SIZES | wrong))
