"""Runs begun by an earlier version go on, and end in the same numbers."""

import json
import shutil
from pathlib import Path

import pytest

import lineartime
from lineartime.config import ModelConfig, TrainConfig, stored_config
from lineartime.folders import read_metrics
from lineartime.training.run_config import RunConfig
from tiny_runs import prepare_text

OLD = Path(__file__).parent / "run_of_1ec0ebd4"


@pytest.mark.parametrize("name", ["flash+", "flash-quad"])  # with muon and scale_norm
def test_a_run_of_1ec0ebd4_goes_on_to_the_losses_that_it_had_there(name, tmp_path, monkeypatch):
    """That commit made the folders, stopped at step 4 of 8, and then went on; float32 on one thread of a CPU."""
    monkeypatch.chdir(tmp_path)
    prepare_text(tmp_path)
    shutil.copytree(OLD / name, tmp_path / name)
    expected = json.loads((tmp_path / name / "expected.json").read_text())
    stored = json.loads((tmp_path / name / "run.json").read_text())
    model, trained = stored_config(ModelConfig(), stored["model"]), stored_config(TrainConfig(), stored["train"])
    config = RunConfig(model, trained, stored["preset"], stored["task"], stored["data"], name)
    lineartime.train(config, device="cpu")
    assert json.loads((tmp_path / name / "run.json").read_text()) == stored
    found = [{name: value for name, value in line.items() if name != "clock"} for line in read_metrics(Path(name))]
    for line, old in zip(found, expected["metrics"], strict=True):  # sums have another order, here and elsewhere
        assert line.pop("held_out", {}) == pytest.approx(old.pop("held_out", {}), rel=1e-5)
        assert line == pytest.approx(old, rel=1e-5)
