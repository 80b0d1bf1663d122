"""Packed weights give the same numbers, only while they are asked for, and only where they are faster."""

import pytest
import torch

from lineartime.config import model_config
from lineartime.model.language_model import LanguageModel
from lineartime.weights.generation.generate import decode_step, generate, prefill
from lineartime.weights.generation.onednn import can_pack, packed_weights

SIZES = {"d_model": 64, "n_layers": 2, "vocab_size": 50, "context": 64}
CONFIGS = {
    "flash": model_config("flash", **SIZES, query_key_dim=16, chunk_size=16),
    "transformer++": model_config("transformer++", **SIZES, n_heads=4),
    "combiner": model_config("combiner", **SIZES, n_heads=4, chunk_size=16),
}
PACKS = can_pack(torch.zeros(1, dtype=torch.bfloat16))
"""Whether this machine's oneDNN computes in bfloat16; without it everything is as it is without packing."""


def bfloat16_model(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(CONFIGS[name]).to(torch.bfloat16).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt and of a token; and every product of the model is one of packed weights."""
    model, prompt = bfloat16_model(name), [list(range(1, 40))]
    logits_BV, state = prefill(model, prompt)
    next_BV = decode_step(model, torch.tensor([3]), state)
    with packed_weights(model) as packed:
        assert packed == PACKS
        with monkeypatch.context() as patch:
            if packed:
                patch.setattr(torch.nn.functional, "linear", lambda *args: pytest.fail("weights not packed"))
            packed_BV, state = prefill(model, prompt)
            next_packed_BV = decode_step(model, torch.tensor([3]), state)
    for ours, theirs in ((packed_BV, logits_BV), (next_packed_BV, next_BV)):
        assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()
    assert next_BV.abs().max() > 0.1


def test_afterwards_the_model_reads_its_own_weights_again() -> None:
    model = bfloat16_model("flash")
    keys = model.state_dict().keys()
    with pytest.raises(RuntimeError, match="inside"), packed_weights(model):
        raise RuntimeError("inside")
    assert model.state_dict().keys() == keys
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not prefill(model, [[1, 2, 3]])[0].any()
    assert "logits" not in vars(model) and all("forward" not in vars(module) for module in model.modules())


def test_of_two_threads_each_takes_its_own_weights_away() -> None:
    model, other = bfloat16_model("flash"), bfloat16_model("flash")
    model.layers[0].out_proj = torch.nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)  # as an adapter may have
    first, second = packed_weights(model), packed_weights(model)
    assert (first.__enter__(), second.__enter__()) == (PACKS, False)
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert vars(model).keys() == vars(other).keys()
    assert all("forward" not in vars(module) for module in model.modules())


def test_generate_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = bfloat16_model("flash"), []
    monkeypatch.setattr("lineartime.weights.generation.generate.decode_step",
                        lambda *args, **kwargs: seen.append("logits" in vars(model)) or decode_step(*args, **kwargs))
    generate(model, [[1, 2]], max_new_tokens=3)
    assert seen == [PACKS, PACKS] and "logits" not in vars(model)
    model.layers[0].out_proj.__class__ = type("Adapted", (torch.nn.Linear,), {"forward": lambda self, x: 2 * x})
    with packed_weights(model):  # a subclass with a forward of its own keeps it
        assert "forward" not in vars(model.layers[0].out_proj)
    with packed_weights(model.float()) as packed:  # other types are left alone
        assert not packed and all("forward" not in vars(module) for module in model.modules())
