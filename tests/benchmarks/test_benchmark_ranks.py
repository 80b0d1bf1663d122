"""`torchrun ... python -m benchmarks step`: what a row says of several ranks."""

import json
import subprocess
import sys

import pytest

from benchmarks.ranks import numbers_sent
from lineartime.config import ModelConfig
from ranks_here import RanksHere

SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 50, "query_key_dim": 8, "chunk_size": 16}
SETS = [part for name, value in SIZES.items() for part in ("--set", f"{name}={value}")]


@pytest.fixture
def ranks(tmp_path):
    here = RanksHere([sys.executable, "-m", "benchmarks"], tmp_path)
    yield here
    here.close()


def test_ranks_that_share_a_row(ranks, tmp_path):
    arguments = ["step", "flash", "mc-tfm++:checkpoint", "--contexts", "64", "--tokens", "128", "--repeats",
                 "2", "--context-parallel", "2", "--json", tmp_path / "rows.jsonl", *SETS]
    assert ranks.run(4, arguments) == [0] * 4, ranks.printed()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["flash", "mc-tfm++:checkpointed"]
    for row in rows:
        assert row["ranks"] == 4 and row["context_parallel"] == 2 and row["tokens_per_step"] == 128
        assert row["check"]["error"] < 1e-4 and row["wall_ms"]["n"] == 2
        assert row["sent_per_layer_by_formula_bytes"] == 4 * numbers_sent(ModelConfig(**row["config"]))
    # A layer that is computed again sends again: forward, again forward, backward.
    flash, twice = ([row["sent_per_layer_bytes"], row["sent_per_layer_by_formula_bytes"]] for row in rows)
    assert flash[0] == flash[1] and twice[0] == 1.5 * twice[1]
    printed = ranks.printed()
    assert printed.count("step: time of a step") == 1 and "profiler" not in printed


def test_ranks_with_rows_of_their_own(ranks, tmp_path):
    arguments = ["step", "transformer++", "--contexts", "32", "--tokens", "64", "--repeats", "1",
                 "--json", tmp_path / "rows.jsonl", *SETS]
    assert ranks.run(2, arguments) == [0] * 2, ranks.printed()
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row["sent_per_layer_bytes"] == 0 and row["sent_bytes"] > 4 * row["n_parameters"]


@pytest.mark.parametrize(("arguments", "error"), [
    (["step", "flash", "--contexts", "32", "--tokens", "96"], "rows cannot be shared out equally: 3 rows, 2 ranks"),
    (["step", "transformer++", "--contexts", "32", "--context-parallel", "2"], "context_parallel is for mixed chunk"),
    (["step", "flash", "--contexts", "48", "--context-parallel", "2"], "equally many whole chunks"),
    (["step", "flash:windowed", "--contexts", "64", "--tokens", "128"], "windows are measured in one process"),
    (["decode", "flash"], "this verb runs in one process: decode")])
def test_what_ranks_cannot_measure_is_refused(ranks, arguments, error):
    assert ranks.run(2, [*arguments, *SETS]) == [2, 2]
    assert len(ranks.errors()) == 1 and error in ranks.printed()


def test_one_process_shares_no_row():
    done = subprocess.run([sys.executable, "-m", "benchmarks", "step", "flash", "--context-parallel", "2"],
                          text=True, capture_output=True)
    assert done.returncode == 2 and "1 rank, context_parallel = 2; start 2 with torchrun" in done.stderr
