"""Whole training steps: who, the same step, in which order, and the rows."""

import dataclasses

import pytest
import torch

from benchmarks import measure, peers, step
from benchmarks.cells import SHAPES, shaped_config
from benchmarks.measure import Setup
from benchmarks.peers import parse_label
from lineartime.base.errors import UsageError
from lineartime.config import ModelConfig, to_dict
from lineartime.model.language_model import LanguageModel
from lineartime.use.info import describe
from workers_here import work_here

TINY = {"d_model": 32, "vocab_size": 64, "chunk_size": 16, "query_key_dim": 16, "gau": {"n_layers": 2},
        "pairs": {"n_layers": 1, "n_heads": 2}}


def tiny(preset: str, task: str = "wiki40b", context: int = 64) -> ModelConfig:
    return shaped_config(preset, task, TINY, {"context": context})


def cells(*labels, contexts=(64,), precisions=("float32",), **options):
    return step.step_cases(labels, contexts, precisions, **{"tokens": 128, "config_of": tiny} | options)


def benchmark_step(*args, **options):
    return [row for rows in step.benchmark_step(*args, **options) for row in rows]


here = pytest.fixture(lambda monkeypatch: work_here(monkeypatch))


def test_a_label_is_a_model_and_how_it_runs():
    label = parse_label("transformer++:compile:unfused")
    assert (label.text, label.variant, label.preset) == ("transformer++:unfused:compiled", "compiled", "transformer++")
    assert parse_label(label.text) == label
    assert parse_label("flash:checkpoint").variant == "eager+checkpointed"
    assert parse_label("flash:compile:reference").text == "flash:reference:compiled"
    assert parse_label("flash-pytorch").preset == "flash"
    for wrong in ("flush", "flash:fused", "performer:unfused", "flash-pytorch:checkpoint", "flash-pytorch:reference",
                  "transformer:unfused:reference", "flash:", "flash:windowed"):
        with pytest.raises(UsageError):
            parse_label(wrong)


def test_rows_say_what_was_measured(here):
    given = [*step.benchmark_step(cells("flash", "transformer++:unfused", "flash-pytorch", contexts=(64, 32)),
                                  Setup(repeats=3))]
    rows = [row for some in given for row in some]
    assert [(row["label"], row["context_tokens"]) for row in rows] == [
        (label, context) for context in (64, 32) for label in ("flash", "transformer++:unfused", "flash-pytorch")]
    assert [(len(some), len({row["run"] for row in some})) for some in given] == [(3, 1), (3, 1)]
    for row in rows:
        assert row["benchmark"] == "step" and row["unit"] == "step" and row["tokens_per_step"] == 128
        assert row["clock"] == "cpu" and row["cpu_ms"]["n"] == row["wall_ms"]["n"] == row["repeats"] == 3
        assert row["tokens_per_s"] == pytest.approx(128e3 / row["cpu_ms"]["median"])
        assert row["peak_mib"] > row["above_import_mib"] >= 0 and row["warm_up"] >= 2
        assert row["check"]["error"] <= row["check"]["limit"] and row["settings"]["chosen"] == "here"
    flash, unfused, peer = rows[:3]
    assert flash["config"] == to_dict(tiny("flash"))
    assert peer["n_parameters"] == pytest.approx(flash["n_parameters"], rel=0.05)
    assert (unfused["model"], unfused["variant"], unfused["attention"]) == ("transformer++", "eager", "unfused")
    assert peer["config"] is None and peer["peer"]["package"] == "FLASH-pytorch"
    assert flash["n_parameters"] == describe(tiny("flash")).n_parameters


def test_cells_take_turns_and_the_order_turns_round(here, monkeypatch):
    benchmark_step(cells("flash", "performer"), Setup(repeats=2))
    turns = [label for label, order in here if order and "warm" in order]
    assert turns == ["performer", "flash", "flash", "performer", "performer", "flash"]  # two in a first round
    orders = [order for _, order in here if order and "warm" in order]
    assert orders == [{"warm": 0, "release": False, "timed": i >= 2} for i in range(6)]
    here.clear()
    monkeypatch.setattr(measure, "available_bytes", lambda: 0)
    rows = benchmark_step(cells("flash", "performer"), Setup(repeats=2))
    assert [order for _, order in here if order and "warm" in order] == [
        {"warm": 1, "release": True, "timed": True}] * 4
    assert rows[0]["settings"]["between_steps"] == "gives memory back" and rows[0]["cpu_ms"]["n"] == 2


def test_what_does_another_step_is_not_timed(here, monkeypatch):
    whole = LanguageModel.forward

    def wrong(self, *args, **kwargs):
        return whole(self, *args, **kwargs) * (1.0 if self.activation_checkpointing else 1.01)  # the reference has it

    monkeypatch.setattr(LanguageModel, "forward", wrong)
    rows = benchmark_step(cells("flash", "flash-pytorch"), Setup(repeats=1))
    assert "not the same step" in rows[0]["failed"] and "cpu_ms" not in rows[0]
    assert rows[0]["n_parameters"] == describe(tiny("flash")).n_parameters
    assert "failed" not in rows[1]


@pytest.mark.parametrize(("name", "factor", "said"), [
    ("embed.weight", 1.01, "embed.weight"), ("layers.1.scale_offset.gamma", 1.01, "layers.1.scale_offset.gamma"),
    ("abs_pos.scalar", 1.05, "abs_pos.scalar"),
    ("layers.1.linear_gate.bias", -1.0, "layers.*.linear_gate.bias")])
def test_a_wrong_gradient_of_one_parameter_is_found(here, monkeypatch, name, factor, said):
    """Numbers that are alone in their parameter are found among those of all layers."""
    made = peers.build

    def spoiled(label, config):
        model = made(label, config)
        for layer in model.layers if "gate" in name else ():  # so that the linear half counts
            torch.nn.init.ones_(layer.scale_offset.gamma[2:])
        if not hasattr(spoiled, "reference"):
            spoiled.reference = True
            return model
        model.get_parameter(name).register_hook(lambda gradient: gradient * factor)
        return model

    monkeypatch.setattr(peers, "build", spoiled)
    config = dataclasses.replace(tiny("flash"), linear_gate="gate" in name)
    (row,) = benchmark_step(cells("flash", config_of=lambda _: config), Setup(repeats=1))
    assert said in row["failed"]


def small(preset: str, **settings) -> ModelConfig:
    return shaped_config(preset, shape=SHAPES["small"], settings={"context": 32, **settings})


def test_models_of_transformers_take_the_same_step(here):
    labels = ["flash", "llama", "qwen3.5-hybrid", "mamba2", "lfm2", "modernbert"]
    *rows, masked = benchmark_step(cells(*labels, config_of=small, tokens=64), Setup(repeats=1))
    assert "not causal" in masked["failed"]
    for row in rows:
        assert row["n_parameters"] == pytest.approx(rows[0]["n_parameters"], rel=0.03)
        assert row["check"]["error"] <= row["check"]["limit"] and row["losses"][1] < row["losses"][0]
        assert row["label"] == "flash" or row["peer"]["package"] == "transformers"
    of_masked = cells("modernbert", "llama", config_of=lambda preset: small(preset, causal=False), tokens=64)
    for some in (of_masked, [dataclasses.replace(case, reads=True) for case in of_masked]):
        row, causal = benchmark_step(some, Setup(repeats=1))
        assert row["cpu_ms"]["n"] == 1 and "is causal" in causal["failed"]
        assert row["benchmark"] == ("forward" if some[0].reads else "step")
    (row,) = benchmark_step(cells("llama"), Setup(repeats=1))
    assert "another size" in row["failed"]


def test_a_loss_that_does_not_fall_is_found(here, monkeypatch):
    monkeypatch.setattr(step, "make_optimizer", lambda parts, train: torch.optim.SGD([torch.zeros(1)]))
    (row,) = benchmark_step(cells("flash"), Setup(repeats=1))
    assert "the loss does not fall" in row["failed"]


@pytest.mark.parametrize("name", ["llama", "qwen3.5-hybrid", "mamba2", "lfm2"])
def test_the_cache_of_a_peer_has_what_was_read(name):
    peer, ids_BT = peers.build(parse_label(name), small("flash")).eval(), torch.arange(24).view(2, 12)
    _, cache = peer.extend(ids_BT[:, :-1])
    torch.testing.assert_close(peer.extend(ids_BT[:, -1:], cache)[0], peer(ids_BT)[:, -1])


def test_processes_measure_a_step():
    (row,) = benchmark_step(cells("flash"), Setup(repeats=2))
    assert row["settings"]["float32_matmul"] == "highest" and row["check"]["error"] <= row["check"]["limit"]
    assert 0 < row["above_import_mib"] < row["peak_mib"] and row["cpu_ms"]["n"] == 2
