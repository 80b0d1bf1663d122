"""One row across ranks: losses and every gradient against one process, faults, bytes, refusals."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import context_ranks
import lineartime
from context_ranks import OFTEN, ON_PUSH, REFUSED, SHARED, run_of
from lineartime.base.errors import UsageError
from lineartime.base.ranks import Ranks, in_rows
from lineartime.config import check_context_parallel
from lineartime.folders import read_metrics
from lineartime.training.language import train
from lineartime.training.ordered import require_fitting
from tiny_models import BIDIRECTIONAL, CONFIGS, UNPACKED, random_ids, random_model
from tiny_runs import SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared rows")


@pytest.fixture(scope="module")
def results(folder, data):
    """What four ranks measured, all in one launch."""
    out = folder / "results.json"
    paths = [str(Path(lineartime.__file__).parents[1]), str(Path(context_ranks.__file__).parent)]
    # The store is held here, as torchrun does: a port that is free now may not stay so.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WORLD_SIZE": str(context_ranks.WORLD),
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = subprocess.run([sys.executable, context_ranks.__file__, str(out), str(data)], text=True,
                          capture_output=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(("kind", "n"), [("errors", 2 * (2 * len(OFTEN) + len(ON_PUSH) + 3)), ("steps", 4)])
def test_losses_gradients_and_steps_beside_each_other_are_those_of_one_process(results, kind, n):
    assert len(results[kind]) == n
    assert {name: error for name, error in results[kind].items() if not error < 1e-12} == {}


def test_bytes_do_not_depend_on_the_length_of_a_row(results):
    for name, lengths in results["bytes"].items():
        for forward, backward, formula in lengths:
            assert forward == backward == formula, name
        assert lengths[0] == lengths[1]


def test_a_model_learns_the_same_where_ranks_share_its_rows(folder, data, results):
    settings = {"model": "flash", "data": str(data), **SETTINGS, **context_ranks.SHARDED, "steps": 3}
    train({**settings, "out": str(folder / "shared-1")}, device="cpu")
    losses = [[line["loss"] for line in read_metrics(folder / f"shared-{n}") if "loss" in line] for n in (1, 2, 4)]
    assert len(losses[0]) == 3
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)


def test_what_ranks_share_and_what_is_refused_by_name():
    for name in SHARED:
        assert run_of(name, context_parallel=3).train.context_parallel == 3
    for name in (*REFUSED, *UNPACKED, *BIDIRECTIONAL):
        with pytest.raises(UsageError, match=r"context_parallel .*set context_parallel = 1"):
            run_of(name, context_parallel=2)
        assert run_of(name, context_parallel=1)
    with pytest.raises(UsageError, match="context = 24, 4 parts, chunk_size = 4; make context a multiple"):
        run_of("flash", context_parallel=4)
    with pytest.raises(UsageError, match="shorter than key_conv: 4 tokens, key_conv = 5"):
        run_of("flash key conv", {"key_conv": 5}, context_parallel=6)
    check_context_parallel(replace(CONFIGS["performer"], context=26), 13)


def test_a_number_of_ranks_that_is_no_multiple_and_a_token_mask_are_refused():
    with pytest.raises(UsageError, match="6 ranks, context_parallel = 4; start 4 with torchrun, or a multiple"):
        in_rows(Ranks(0, 6), 4)
    with pytest.raises(UsageError, match="1 rank, context_parallel = 2"):
        in_rows(Ranks(), 2)
    with pytest.raises(UsageError, match="6 ranks, 2 of which share a row, 4 micro-batches in a step; run 2, 4, 8,"):
        require_fitting(4, False, in_rows(Ranks(0, 6), 2))
    require_fitting(4, False, in_rows(Ranks(0, 8), 2))
    model, ids_BT = random_model(CONFIGS["flash"]), random_ids(2, 24)
    with pytest.raises(UsageError, match="no mask of tokens"):
        model(ids_BT, token_mask_BT=ids_BT > 0, ranks=Ranks(0, 2))
    with pytest.raises(UsageError, match="whole chunks"):
        model(ids_BT[:, :20], ranks=Ranks(0, 2))
