"""The decoding benchmark's arithmetic and its rows on models that take no time."""

import json

import pytest
import torch

from lineartime.benchmark import decode as decode_module
from lineartime.benchmark.decode import benchmark_decode, flatness, print_decode, states_at
from lineartime.config import model_config
from lineartime.errors import UsageError
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
