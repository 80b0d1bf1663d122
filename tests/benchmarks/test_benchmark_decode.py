"""The decoding benchmark's arithmetic and its rows on models that take no time."""

import json

import pytest
import torch

from benchmarks import decode as decode_module
from benchmarks.decode import (
    benchmark_decode,
    filled_state,
    read_state,
)
from lineartime.attention.combiner import RowCache
from lineartime.config import model_config
from lineartime.errors import NumericsError, UsageError
from lineartime.info import describe
from lineartime.model import LanguageModel

TINY = {"d_model": 32, "n_layers": 2, "vocab_size": 64, "context": 512}
FLASH = model_config("flash", query_key_dim=16, chunk_size=16, **TINY)
QUAD = model_config("flash-quad", query_key_dim=16, **TINY)
TRANSFORMER = model_config("transformer", n_heads=2, **TINY)


def decode(configs=None, contexts=(32, 64, 128), **options):
    return benchmark_decode(configs or {"flash": FLASH, "flash-quad": QUAD}, contexts,
                            **{"quadratic_up_to": 64, "read_up_to": 32, "precisions": ["float32"]} | options)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(decode_module, "BLOCK_TOKENS", 24)
    monkeypatch.setattr(decode_module, "FEW", 3)


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_module, "BLOCK_TOKENS", 24)
        return decode()


def test_nothing_to_measure_is_said():
    with pytest.raises(UsageError, match="nothing to measure: 128 tokens; raise --quadratic-up-to"):
        decode({"flash-quad": QUAD}, (128,))


def test_a_row_per_model_and_context(rows):
    assert [(row["label"], row["context_tokens"], row["context"]) for row in rows] == [
        ("flash", 32, "filled"), ("flash", 32, "read"), ("flash", 64, "filled"), ("flash", 128, "filled"),
        ("flash-quad", 32, "filled"), ("flash-quad", 32, "read"), ("flash-quad", 64, "filled")]
    assert len({row["run"] for row in rows}) == 1
    for row in rows:
        for clock in ("wall_ms", "cpu_ms"):
            assert 0 < row[clock]["min"] <= row[clock]["median"] <= row[clock]["max"] and row[clock]["n"] == 2
        assert row["slowest_token_ms"]["max"] > row["cpu_ms"]["max"]
        assert (row["device"], row["dtype"], row["threads"], row["clock"], row["unit"]) == (
            "cpu", "float32", 1, "cpu", "token")
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["cpu_ms"]["median"])
        assert row["config"]["d_model"] == 32 and row["peak_mib"] > 10 and row["n_parameters"] > 1000
        assert row["check"]["error"] < row["check"]["limit"] == 1e-4
        assert json.loads(json.dumps(row)) == row


def test_state_bytes_are_those_of_a_state(rows):
    for row in rows:
        config = FLASH if row["label"] == "flash" else QUAD
        expected = describe(config).decoding.at(row["context_tokens"])
        room = 0 if row["label"] == "flash" else describe(QUAD).decoding.per_token * (8 + 2 * 24)
        assert (row["state_bytes"], row["allocated_state_bytes"]) == (expected, expected + room)


def test_every_token_of_every_cell_is_timed_once_in_turns(monkeypatch):
    """A block's pieces make up the block; the cells take turns, in the order turned round every time; a token of
    another state, which is not timed, comes before each piece."""
    order = []
    step = decode_module.decode_step

    def spy(model, ids_B, state):
        order.append(int(state.seq_lens_B[0]))
        return step(model, ids_B, state)

    monkeypatch.setattr(decode_module, "decode_step", spy)
    rows = decode({"flash": FLASH}, [32, 128], read_up_to=0, repeats=1)
    before = 4 + 2 * 3  # the check, and the first tokens of each cell
    expected = []
    for piece in range(8):
        for context in (32, 128)[:: -1 if piece % 2 else 1]:
            expected += [0, *range(context + 3 + 4 * piece, context + 3 + 4 * (piece + 1))]
    assert order[before:] == expected
    assert [row["block_tokens"] for row in rows] == [32, 32]


ALL = {"flash": FLASH, "flash-quad": QUAD, "transformer++": model_config("transformer++", n_heads=2, **TINY),
       "mc-tfm++": model_config("mc-tfm++", n_heads=2, chunk_size=16, **TINY),
       "performer": model_config("performer", n_heads=2, **TINY),
       "combiner": model_config("combiner", n_heads=2, chunk_size=16, **TINY)}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n_tokens", [48, 55])
def test_a_filled_state_is_like_one_that_was_read(name, n_tokens):
    """Of the same shapes, types and lengths; and finite numbers follow from it."""
    model = LanguageModel(ALL[name]).bfloat16()
    filled, read = filled_state(model, n_tokens, 2, 64), read_state(model, n_tokens, 2, 64)
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
    growing = [part for part in filled.caches[0].tensors() if part in filled.caches[0].growing]
    for part in growing:
        assert (filled.caches[0].tensors()[part][:, : 48 // (16 if name == "combiner" else 1)] != 0).all()


def test_a_wrong_decode_step_is_not_timed(monkeypatch):
    step = decode_module.decode_step
    monkeypatch.setattr(decode_module, "decode_step", lambda *args: step(*args) * 1.001)
    with pytest.raises(NumericsError, match="decoded logits differ"):
        decode(contexts=[32])


def test_refuses_what_it_cannot_measure():
    with pytest.raises(UsageError, match="nothing to measure"):
        decode(contexts=[])
    with pytest.raises(UsageError, match="nothing to measure"):
        decode(repeats=0)
    with pytest.raises(UsageError, match="unknown precision: float16"):
        decode(precisions=["float16"])
    with pytest.raises(UsageError, match="position table"):
        decode({"transformer": TRANSFORMER}, [500], quadratic_up_to=512)
