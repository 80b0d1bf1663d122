"""The example of MossFormer2's layer against the class in ClearerVoice's wheel (make ecosystem).
One module of the wheel is read: the package itself imports what is not installed."""

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.ecosystem
LAYER = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "mossformer.py"))["MossFormerLayer"]
SIZES = {"group_size": 32, "query_key_dim": 64, "expansion_factor": 4.0}


def both(causal, look_ahead, dtype):
    """Their layer, with weights that all count, and ours with the same ones."""
    from rotary_embedding_torch import RotaryEmbedding

    package = sys.modules["mossformer2_ss"] = ModuleType("mossformer2_ss")
    package.__path__ = [str(Path(importlib.util.find_spec("clearvoice").origin).parent / "models" / "mossformer2_ss")]
    from mossformer2_ss.mossformer2_block import FLASH_ShareA_FFConvM, ScaleNorm

    torch.manual_seed(0)
    theirs = FLASH_ShareA_FFConvM(dim=64, causal=causal, rotary_pos_emb=RotaryEmbedding(dim=32), norm_klass=ScaleNorm,
                                  **SIZES)
    for name, weight in theirs.named_parameters():
        if "freqs" not in name:
            nn.init.normal_(weight, std=1.0 if "gamma" in name else 0.25)
    for conv in [each for each in theirs.modules() if isinstance(each, nn.Conv1d) and look_ahead == 0]:
        conv.padding = (16,)  # all 17 weights are moved to the past
        conv.register_forward_hook(lambda module, inputs, out: out[..., :-16])
    ours = LAYER(64, causal=causal, look_ahead=look_ahead, **SIZES)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype).eval(), ours.to(dtype).eval()


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("causal", "look_ahead"), [(False, 8), (True, 8), (True, 0)])
def test_clearvoice_has_the_same_layer(causal, look_ahead, dtype, most):
    theirs, ours = both(causal, look_ahead, dtype)
    for n_frames in (5, 64, 333):
        x, state = torch.randn(2, n_frames, 64, dtype=dtype), {}
        expected = theirs(x)
        assert (expected - x).std() > 0.1 and (ours(x) - expected).abs().max() <= most
        if look_ahead == 0:
            parts = torch.cat([ours(part, state=state) for part in x.split(50, 1)], 1)
            assert (parts - expected).abs().max() <= most


@torch.no_grad()
def test_clearvoice_hears_padding():
    (theirs, ours), x = both(False, 8, torch.float64), torch.randn(1, 90, 64, dtype=torch.float64)
    frames = torch.arange(90)[None] < 50
    assert (theirs(x, mask=frames)[:, :50] - theirs(x[:, :50])).abs().max() > 0.5
    assert (ours(x, ~frames)[:, :50] - theirs(x[:, :50])).abs().max() <= 1e-12
