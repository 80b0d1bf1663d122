"""Runs begun by an earlier version go on, and end in the same numbers; numbers stored without a shape are read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lineartime
from lineartime.config import ModelConfig, TrainConfig, model_config, stored_config
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.folders import read_metrics
from lineartime.model.language_model import LanguageModel
from lineartime.training.run_config import RunConfig
from lineartime.weights.load import load_model
from tiny_checkpoints import random_model, write_checkpoint
from tiny_runs import prepare_text

OLD = Path(__file__).parent / "run_of_3e437fd"


@pytest.mark.parametrize("norm", ["layer_norm", "scale_norm"])
def test_a_run_of_3e437fd_goes_on_to_the_losses_that_it_had_there(norm, tmp_path, monkeypatch):
    """That commit made the folders, stopped at step 4 of 8, and then went on; float32 on one thread of a CPU."""
    monkeypatch.chdir(tmp_path)
    prepare_text(tmp_path)
    shutil.copytree(OLD / norm, tmp_path / norm)
    expected = json.loads((tmp_path / norm / "expected.json").read_text())
    stored = json.loads((tmp_path / norm / "run.json").read_text())
    model, trained = stored_config(ModelConfig(), stored["model"]), stored_config(TrainConfig(), stored["train"])
    config = RunConfig(model, trained, stored["preset"], stored["task"], stored["data"], norm)
    lineartime.train(config, device="cpu")
    assert json.loads((tmp_path / norm / "run.json").read_text()) == stored
    found = [{name: value for name, value in line.items() if name != "clock"} for line in read_metrics(Path(norm))]
    for line, old in zip(found, expected["metrics"], strict=True):  # sums have another order, here and elsewhere
        assert line.pop("held_out", {}) == pytest.approx(old.pop("held_out", {}), rel=1e-5)
        assert line == pytest.approx(old, rel=1e-5)


@pytest.mark.parametrize("norm", ["layer_norm", "scale_norm"])
def test_an_exported_model_whose_numbers_have_no_shape_opens_everywhere(norm, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("lineartime.hf")  # transformers know the models from here on
    sizes = {"n_layers": 2, "d_model": 8, "query_key_dim": 4, "context": 8, "vocab_size": 257, "end_of_document": 256}
    model = random_model(model_config("flash", **sizes, chunk_size=1, norm=norm))  # its position bias has shape [1]
    folder = write_checkpoint(tmp_path, model, byte_tokenizer())
    weights = load_file(folder / "model.safetensors")
    bare = [name for name, tensor in weights.items() if tensor.numel() == 1]
    assert "layers.0.rel_pos_bias.weight" in bare and "abs_pos.scalar" in bare
    save_file({name: tensor.reshape(()) if name in bare else tensor for name, tensor in weights.items()},
              folder / "model.safetensors")
    ids = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = model(ids)
    opened = load_model(folder)[0]
    assert {name: p.shape for name, p in opened.named_parameters()} == {
        name: p.shape for name, p in LanguageModel(model.config).named_parameters()}
    assert torch.equal(opened(ids), expected)
    scalars = {name: tensor.reshape(()) if name.endswith("scalar") else tensor for name, tensor in weights.items()}
    save_file(scalars, folder / "model.safetensors", {"format": "pt"})
    found, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(found.eval()(ids).logits, expected)
