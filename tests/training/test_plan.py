"""`lineartime info MODEL --plan N` against the memory that runs show."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.step import random_batch
from lineartime.data.tokens import read_manifest
from lineartime.model import LanguageModel
from lineartime.plan import LiveBytes, plan, print_plan
from lineartime.run_config import run_config
from marks import rest
from ranks_here import RanksHere
from tiny_runs import prepare_text

WITHIN = 0.15
BASE = {"data": "d", "out": "o", "vocab_size": 300, "d_model": 192, "n_layers": 4, "context": 512,
        "tokens_per_step": 2048, "micro_batch_tokens": 2048}


def planned(n_ranks=1, **settings):
    return plan(run_config({**BASE, **settings}), n_ranks)


@pytest.mark.parametrize("settings", [{"model": "flash"}, *rest(
    {"model": "flash", "activation_checkpointing": True},
    {"model": "mc-tfm++", "n_heads": 4, "precision": "bfloat16"})])
def test_tensors_without_data_are_as_many_bytes_as_tensors_with_data(settings):
    config = run_config({**BASE, **settings})
    found = plan(config, 1)
    model = LanguageModel(replace(config.model, end_of_document=None if config.model.by_document else 0))
    model.activation_checkpointing = config.train.activation_checkpointing
    parameters = list(model.parameters())
    task, (rows_BT,) = random_batch(config.model, config.micro_batch_rows, torch.device("cpu"))
    with LiveBytes(parameters) as live, torch.autocast("cpu", torch.bfloat16, enabled="precision" in settings):
        for _ in range(2):
            task.losses(model, rows_BT.clone()).sum().backward()
            for p in parameters:
                p.grad = None
    assert found.gradients + found.activations == pytest.approx(live.most, rel=0.02)


def test_bytes_are_those_of_new_storages_while_they_are_alive():
    weight = torch.zeros(1000, 500)
    with LiveBytes([weight]) as live:
        x = torch.zeros(10, 1000)
        y = x @ weight.t().t()  # a view is no new storage
        assert live.now == live.most == 4 * (10_000 + 5_000)
        del y
        assert live.now == 4 * 10_000 and live.most == 4 * 15_000
        del x
    assert live.now == 0


@pytest.mark.rest
def test_what_several_processes_have():
    n = 4 * sum(p.numel() for p in LanguageModel(run_config({**BASE, "model": "flash"}).model).parameters())
    settings = {"model": "flash", "tokens_per_step": 8 * 512, "micro_batch_tokens": 512}
    alone, four, eight = (planned(n_ranks, **settings) for n_ranks in (1, 4, 8))
    n_matrices = 4 * BASE["n_layers"] * 192 * (2 * 2 * 192 + 128 + 2 * 192)  # of u, v and z, and of the output
    assert planned(1, **settings, optimizer="muon").moments == 2 * n - n_matrices
    assert planned(8, **settings, optimizer="muon").moments > (2 * n - n_matrices) / 8
    assert alone.weights == four.weights == n and alone.moments == 2 * n
    assert four.moments == pytest.approx(n / 2, rel=1e-3) and eight.moments == pytest.approx(n / 4, rel=1e-3)
    # Eight micro-batches of one process wait as three sums, two of one of four processes as one.
    assert alone.gradients - eight.gradients == 3 * n and four.gradients - eight.gradients == n
    sharded = planned(4, **settings, shard=True, clip_scope="global")
    per_layer = (n - planned(1, **settings, n_layers=3).weights)
    outside = n - 4 * per_layer
    assert sharded.moments == four.moments and sharded.holes == 0
    assert sharded.weights == pytest.approx(n / 4 + 3 * per_layer + outside, rel=1e-3)
    longer = {**settings, "model": "mc-tfm++", "context": 4096, "tokens_per_step": 4096, "micro_batch_tokens": 4096}
    assert planned(4, **longer, context_parallel=4).activations < 0.3 * planned(1, **longer).activations


LARGER = {"d_model": 256, "n_layers": 6, "context": 512, "tokens_per_step": 4096, "micro_batch_tokens": 4096,
          "steps": 3, "warmup_steps": 1, "eval_every": 100, "eval_tokens": 512}


ON_RANKS = {"micro_batch_tokens": 1024, "d_model": 512, "n_layers": 12}


@pytest.mark.parametrize(("n_ranks", "model", "settings"), [
    *rest((2, "flash", {"micro_batch_tokens": 1024, "shard": True, "clip_scope": "global"})),
    *(pytest.param(*case, marks=pytest.mark.campaign) for case in (
        (1, "transformer++", {"n_heads": 4}), (1, "flash", {"activation_checkpointing": True}),
        (1, "mc-tfm++", {"n_heads": 4, "precision": "bfloat16"}),
        (4, "flash", {"context": 4096, "context_parallel": 4}), (4, "flash", ON_RANKS),
        (4, "flash", ON_RANKS | {"shard": True, "clip_scope": "global"})))])
def test_a_run_needs_what_is_planned(n_ranks, model, settings, tmp_path):
    data, settings = prepare_text(tmp_path), {**LARGER, **settings}
    here = RanksHere([sys.executable, "-m", "lineartime"], tmp_path)
    pairs = [part for name, value in settings.items() for part in ("--set", f"{name}={str(value).lower()}")]
    try:
        codes = here.run(n_ranks, ["train", model, "--data", data, "--out", tmp_path / "run", *pairs])
    finally:
        here.close()
    assert codes == [0] * n_ranks, here.printed()
    shown = json.loads((tmp_path / "run" / "result.json").read_text())["peak_mib"]
    said = subprocess.run([sys.executable, "-m", "lineartime", "info", model, "--plan", str(n_ranks), *pairs,
                           "--set", f"vocab_size={read_manifest(data).vocab_size}"], text=True, capture_output=True)
    planned = float(re.search(r"most at once +([\d,.]+) MiB", said.stdout)[1].replace(",", ""))
    assert planned == pytest.approx(shown, rel=WITHIN), said.stdout


def test_the_table(capsys):
    print_plan(run_config({**BASE, "model": "flash"}), 1)
    printed = capsys.readouterr().out
    numbers = [float(text.replace(",", "")) for text in re.findall(r"([\d,.]+) MiB", printed)]
    assert len(numbers) == 7 and numbers[-1] == pytest.approx(sum(numbers[:-1]), abs=0.5)
    assert "Memory of each of 1 process, float32, micro-batches of 4 x 512 tokens" in printed
