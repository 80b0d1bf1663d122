"""Whole training steps: who, the same step, in which order, and the rows; decoding, with models
that take no time; and the verbs that measure, as a person calls them."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import typer

import benchmarks.cells
from benchmarks import decode, llama, measure, peers, step, verbs
from benchmarks.__main__ import app
from benchmarks.cells import LISTS, SHAPES, named_calls, shaped_config
from benchmarks.measure import Setup
from benchmarks.op import OPS
from benchmarks.peers import parse_label
from benchmarks.provenance import append_json_lines, rows_in
from command_line import Call, assert_refused
from lineartime.base.errors import ResourceError, UsageError
from lineartime.config import PRESETS, ModelConfig, model_config, to_dict
from lineartime.folders import named_folder
from lineartime.model.language_model import LanguageModel
from lineartime.use.info import describe
from lineartime.weights.generation.generate import prefill
from lineartime.weights.load import load_model
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
    label = parse_label("transformer++:compiled:unfused")
    assert (label.text, label.variant, label.preset) == ("transformer++:unfused:compiled", "compiled", "transformer++")
    assert parse_label(label.text) == label
    assert parse_label("flash:checkpointed").variant == "eager+checkpointed"
    assert parse_label("flash:compiled:reference").text == "flash:reference:compiled"
    assert parse_label("flash-pytorch").preset == "flash"
    for wrong in ("flush", "flash:fused", "performer:unfused", "flash-pytorch:checkpointed", "flash-pytorch:reference",
                  "transformer:unfused:reference", "flash:", "flash:windowed", "llama.cpp:compiled"):
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


def test_processes_measure_a_step():
    (row,) = benchmark_step(cells("flash"), Setup(repeats=2))
    assert row["settings"]["float32_matmul"] == "highest" and row["check"]["error"] <= row["check"]["limit"]
    assert 0 < row["above_import_mib"] < row["peak_mib"] and row["cpu_ms"]["n"] == 2


SIZES = {"d_model": 32, "n_layers": 2, "vocab_size": 64, "context": 512}
FLASH = model_config("flash", query_key_dim=16, chunk_size=16, **SIZES)
QUAD = model_config("flash-quad", query_key_dim=16, **SIZES)


@pytest.fixture
def short_blocks(here, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK_TOKENS", 24)
    monkeypatch.setattr(decode, "FEW", 3)
    yield
    torch.set_num_threads(1)


def benchmark_decode(configs=None, contexts=(32, 64, 128), repeats=2, **options):
    return decode.benchmark_decode(configs or {"flash": FLASH, "flash-quad": QUAD}, contexts, Setup(repeats),
                                   **{"quadratic_up_to": 64, "precisions": ["float32"]} | options)


def test_a_row_per_model_and_context(short_blocks):
    rows = benchmark_decode()
    assert [(row["label"], row["context_tokens"], row["context"]) for row in rows] == [
        ("flash", 32, "filled"), ("flash", 64, "filled"), ("flash", 128, "filled"),
        ("flash-quad", 32, "filled"), ("flash-quad", 64, "filled")]
    for row in rows:
        for clock in ("wall_ms", "cpu_ms"):
            assert 0 < row[clock]["min"] <= row[clock]["median"] <= row[clock]["max"] and row[clock]["n"] == 2
        assert row["slowest_token_ms"]["max"] > row["cpu_ms"]["max"]
        assert (row["device"], row["dtype"], row["threads"], row["clock"], row["unit"]) == (
            "cpu", "float32", 1, "cpu", "token")
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["cpu_ms"]["median"])
        assert row["peak_mib"] > 10
        config = FLASH if row["label"] == "flash" else QUAD
        assert row["state_bytes"] == describe(config).decoding.at(row["context_tokens"])


def test_a_compiled_step_is_the_eager_one(short_blocks, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, mode: step)
    (row,) = benchmark_decode({"flash": FLASH}, [32], compiled=True)
    assert row["variant"] == "compiled" and row["label"] == "flash:compiled" and row["cpu_ms"]["n"] == 2
    for config in (FLASH, QUAD):
        model, ids_B = LanguageModel(config), torch.tensor([1, 2])
        torch.manual_seed(0)
        state = decode.filled_state(model, 30, 2, 64)
        step = decode.compiled_step(model, state, 64)
        for _ in range(3):  # over the end of a chunk
            torch.testing.assert_close(step(ids_B), decode.decode_step(model, ids_B, state))


@pytest.mark.parametrize("name", ["flash", "flash-quad", "transformer++", "mc-tfm++", "performer", "combiner"])
def test_a_filled_state_is_like_one_that_was_read(short_blocks, name):
    heads = {} if name.startswith("flash") else {"n_heads": 2}
    chunks = {"chunk_size": 16} if name in ("flash", "mc-tfm++", "combiner") else {}
    model, n_tokens = LanguageModel(model_config(name, **heads, **chunks, **SIZES)).bfloat16(), 55
    _, read = prefill(model, torch.randint(SIZES["vocab_size"], (2, n_tokens)).tolist())
    read.reserve(64)
    filled = decode.filled_state(model, n_tokens, 2, 64)
    assert filled.seq_lens_B.tolist() == read.seq_lens_B.tolist() == [n_tokens] * 2
    for ours, theirs in zip(filled.caches, read.caches, strict=True):
        for (part, mine), (other, yours) in zip(ours.tensors().items(), theirs.tensors().items(), strict=True):
            assert part == other and mine.dtype == yours.dtype and mine.shape == yours.shape
            if not mine.is_floating_point():
                assert torch.equal(mine, yours)
    for _ in range(2):
        assert decode.decode_step(model, torch.tensor([1, 2]), filled).isfinite().all()


def test_a_state_has_its_size(short_blocks):
    (ours,) = benchmark_decode({"flash": (config := shaped_config("flash", shape=SHAPES["small"]))}, [32], batch_size=3)
    assert ours["state_bytes"] == 3 * describe(config).decoding.at(32) and ours["cpu_ms"]["n"] == 2


def test_llama_cpp_is_as_large_as_the_shipped_model(monkeypatch, tmp_path):
    config, shipped = shaped_config("flash", shape=SHAPES["shipped"]), load_model(named_folder("small"))[0].config
    assert shipped == dataclasses.replace(config, context=shipped.context, init_std=shipped.init_std, end_of_document=0)
    theirs, ours = sum(map(math.prod, llama.shapes_of(llama.sizes_of(config)).values())), describe(config).n_parameters
    assert theirs == pytest.approx(ours, rel=0.02)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UsageError, match="npm install"):
        benchmark_decode({"llama.cpp": config})


def test_every_named_call_can_be_made() -> None:
    commands, labels, names = typer.main.get_command(app).commands, set(), []
    for name, (verb, *rest) in named_calls([*LISTS]).items():
        names.append(name)
        given = commands[verb].make_context(verb, [*rest, "--device", "cpu", "--json", "rows.jsonl"]).params
        for label in given.get("labels") or given.get("models") or []:
            labels.add(parse_label(label).model)
        assert verb != "op" or given["name"] in OPS
        assert given.get("shape") in (None, *SHAPES)
    assert len(names) == sum(map(len, LISTS.values())) and labels >= set(PRESETS)
    small = [describe(shaped_config(name, shape=SHAPES["small"])).n_parameters for name in ("flash", "transformer++")]
    assert small[0] == pytest.approx(small[1], rel=0.01)
    assert list(named_calls(["paper-latency"])) == [f"paper-latency/{n}-bfloat16" for n in (512, 1024, 2048, 4096)]


def test_named_calls_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """The rows of one get its name, all of them or none; another one's failure does not stop it."""
    rows, told = tmp_path / "rows.jsonl", list[str]()
    monkeypatch.setitem(LISTS, "short", {"a/wrong": "step flash --contexts many", "b/16": "decode flash"})

    def run(command: list[str]) -> int:
        append_json_lines(Path(command[-1]), [{"model": model, "threads": 1, "device": "cpu"} for model in "xy"])
        return 2 * ("many" in command)

    monkeypatch.setattr(benchmarks.cells, "run", run)
    monkeypatch.setattr(verbs, "note", told.append)
    for made in (["a/wrong", "b/16"], ["a/wrong"]):
        told.clear()
        with pytest.raises(ResourceError, match="calls failed: a/wrong"):
            verbs.benchmark_run(("short",), rows, 1, "cpu")
        assert [line.partition(" (")[0] for line in told] == made
    assert [(row["cell"], row["model"]) for row in rows_in(rows)] == [("b/16", "x"), ("b/16", "y")]
    assert [*tmp_path.iterdir()] == [rows]
    assert_refused(*call("run", "shrt", app=app)[::2], 2, "unknown name of cells: shrt; did you mean short?")


def test_a_measurement_is_printed_and_kept(here, tmp_path: Path, call: Call, monkeypatch) -> None:
    sizes = ("n_layers=1", "d_model=16", "query_key_dim=8", "n_heads=2", "chunk_size=8")
    code, out, err = call("step", "flash", "transformer++", "--contexts", 16, "--tokens", 32, "--repeats", 2,
                          *(f"--set={size}" for size in sizes), "--json", tmp_path / "rows.jsonl", app=app)
    assert code == 0 and "step: time of a step" in out and "round 2 of 2" in err, err
    assert [row["label"] for row in rows_in(tmp_path / "rows.jsonl")] == ["flash", "transformer++"]
    assert_refused(*call("step", "flash", "--contexts", "16,many", app=app)[::2], 2, "16,many")
    for wrong, words in (("--repeats", "repeats = 0"), ("--precision", "precision: 0"), ("--threads", "threads = 0")):
        assert_refused(*call("step", "flash", wrong, "0", app=app)[::2], 2, words)
    monkeypatch.setattr(verbs.step, "benchmark_step", pytest.fail)  # what cannot be kept is not measured
    assert_refused(*call("step", "flash", "--json", tmp_path / "rows.jsonl/x", app=app)[::2], 6, "cannot write")
