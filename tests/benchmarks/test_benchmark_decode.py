"""The decoding benchmark's arithmetic and its rows on models that take no time."""

import pytest
import torch

from benchmarks import decode as decode_module
from benchmarks.cells import SHAPES, shaped_config
from benchmarks.measure import Setup
from lineartime.config import model_config
from lineartime.model.attention.combiner import RowCache
from lineartime.model.language_model import LanguageModel
from lineartime.use.info import describe
from lineartime.weights.generation.generate import prefill
from workers_here import work_here

TINY = {"d_model": 32, "n_layers": 2, "vocab_size": 64, "context": 512}
FLASH = model_config("flash", query_key_dim=16, chunk_size=16, **TINY)
QUAD = model_config("flash-quad", query_key_dim=16, **TINY)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(decode_module, "BLOCK_TOKENS", 24)
    monkeypatch.setattr(decode_module, "FEW", 3)
    work_here(monkeypatch)
    yield
    torch.set_num_threads(1)


def decode(configs=None, contexts=(32, 64, 128), repeats=2, **options):
    return decode_module.benchmark_decode(configs or {"flash": FLASH, "flash-quad": QUAD}, contexts, Setup(repeats),
                            **{"quadratic_up_to": 64, "precisions": ["float32"]} | options)


def test_a_row_per_model_and_context():
    rows = decode()
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


def test_a_compiled_step_is_the_eager_one(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda step, mode: step)
    (row,) = decode({"flash": FLASH}, [32], compiled=True)
    assert row["variant"] == "compiled" and row["label"] == "flash:compiled" and row["cpu_ms"]["n"] == 2
    for config in (FLASH, QUAD):
        model, ids_B = LanguageModel(config), torch.tensor([1, 2])
        torch.manual_seed(0)
        state = decode_module.filled_state(model, 30, 2, 64)
        step = decode_module.compiled_step(model, state, 64)
        for _ in range(3):  # over the end of a chunk
            torch.testing.assert_close(step(ids_B), decode_module.decode_step(model, ids_B, state))


@pytest.mark.parametrize("name", ["flash", "flash-quad", "transformer++", "mc-tfm++", "performer", "combiner"])
def test_a_filled_state_is_like_one_that_was_read(name):
    heads = {} if name.startswith("flash") else {"n_heads": 2}
    chunks = {"chunk_size": 16} if name in ("flash", "mc-tfm++", "combiner") else {}
    model, n_tokens = LanguageModel(model_config(name, **heads, **chunks, **TINY)).bfloat16(), 55
    _, read = prefill(model, torch.randint(TINY["vocab_size"], (2, n_tokens)).tolist())
    read.reserve(64)
    filled = decode_module.filled_state(model, n_tokens, 2, 64)
    assert filled.seq_lens_B.tolist() == read.seq_lens_B.tolist() == [n_tokens] * 2
    for ours, theirs in zip(filled.caches, read.caches, strict=True):
        for (part, mine), (other, yours) in zip(ours.tensors().items(), theirs.tensors().items(), strict=True):
            assert part == other and mine.dtype == yours.dtype
            if isinstance(theirs, RowCache) and part in theirs.growing:
                assert mine.shape[1] == n_tokens // 16 <= yours.shape[1]
            else:
                assert mine.shape == yours.shape
            if not mine.is_floating_point():
                assert torch.equal(mine, yours)
    for _ in range(2):
        assert decode_module.decode_step(model, torch.tensor([1, 2]), filled).isfinite().all()


def test_a_peer_decodes_beside_ours():
    config = shaped_config("flash", shape=SHAPES["small"])
    ours, theirs = decode({"flash": config, "llama": config}, [32], batch_size=3)
    assert theirs["block_tokens"] == decode_module.PEER_TOKENS and theirs["peer"]["model_type"] == "llama"
    assert theirs["state_bytes"] == 3 * 32 * 2 * 2 * 64 * 4  # rows, tokens, layers, keys and values, width, bytes
    assert ours["state_bytes"] == 3 * describe(config).decoding.at(32)
    assert theirs["cpu_ms"]["n"] == ours["cpu_ms"]["n"] == 2
