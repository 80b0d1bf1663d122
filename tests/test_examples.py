"""The examples run, and do what they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lineartime

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize(("causal", "chunk_size"), [(True, 16), (False, 16), (True, 512)])
def test_the_minimal_file_gives_the_logits_of_the_package(causal: bool, chunk_size: int) -> None:
    """Of random weights of every kind, so large that each part counts; 512 is the other form of the
    position bias."""
    torch.manual_seed(0)
    config = lineartime.model_config("flash", n_layers=2, d_model=64, query_key_dim=32, vocab_size=100,
                                     chunk_size=chunk_size, causal=causal)
    model = lineartime.LanguageModel(config).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    minimal = example("flash_minimal")["Flash"](100, 64, 2, chunk_size, causal, s=32).double()
    minimal.load_state_dict(model.state_dict())
    ids_BT = torch.randint(100, (2, 3 * chunk_size))
    expected_BTV = model(ids_BT)
    assert (minimal(ids_BT) - expected_BTV).abs().max() <= 1e-12 * expected_BTV.abs().max()


def test_a_gau_in_a_model_of_ones_own() -> None:
    right, change = example("gau_in_your_model")["main"]()
    assert right > 0.95 and change < 1e-5


def test_a_training_loop(tmp_path: Path) -> None:
    before, after = example("train_loop")["main"](10, tmp_path / "data")
    assert after < before - 0.3


def test_a_long_prompt() -> None:
    """The state after a prompt is as large as after a shorter one."""
    (short, bytes_short, _), (long, bytes_long, _) = example("long_prompt")["main"](1_400)
    assert (short, long) == (1_000, 1_400) and bytes_short == bytes_long


@torch.no_grad()
def test_mossformer_without_its_witness() -> None:
    """A padded row is the row alone, whatever the padding has. Parts of any length are the whole
    row, and the state stays as small. The witness: tests/ecosystem/test_mossformer.py."""
    torch.manual_seed(0)
    made = example("mossformer")
    x_BTD, n_bytes = torch.randn(2, 200, 64).double(), []
    for causal in (True, False):
        layer = made["MossFormerLayer"](64, group_size=32, causal=causal).double().eval()
        nn.init.normal_(layer.qk_offset_scale["gamma"])
        padded_BTD = torch.cat([x_BTD[:, :90], torch.full((2, 30, 64), torch.nan).double()], 1)
        change = layer(padded_BTD, padded_BTD.isnan()[..., 0])[:, :90] - layer(x_BTD[:, :90])
        assert change.abs().max() <= 1e-12
    layer = made["MossFormerLayer"](64, group_size=32, causal=True, look_ahead=0).double().eval()
    nn.init.normal_(layer.qk_offset_scale["gamma"])
    whole_BTD = layer(x_BTD)
    for sizes in ([1] * 40 + [24, 64, 8, 64], [33, 100, 67]):
        state: dict[str, torch.Tensor] = {}
        parts = [layer(part, state=state) for part in x_BTD.split(sizes, 1)]
        assert (torch.cat(parts, 1) - whole_BTD).abs().max() <= 1e-12
        n_bytes.append(sum(each.nbytes for each in state.values()))
    assert n_bytes[0] == n_bytes[1] and made["main"]() < 1e-4


@pytest.mark.rest
@pytest.mark.filterwarnings("default")
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    before, after = example("transformers_trainer")["main"](4, tmp_path)
    assert 3 < after < before - 0.005


@pytest.mark.filterwarnings("default")
def test_labels_of_documents(tmp_path: Path) -> None:
    assert example("labels_of_documents")["main"](6, tmp_path, n_held_out=12) >= 0.75


def test_an_example_is_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 120, path.name
