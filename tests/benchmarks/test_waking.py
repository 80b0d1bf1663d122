"""studies/waking.py changes what it says in a step of training, and nothing where a model is asked."""

import random
import subprocess
import sys

import pytest
import torch

from lineartime.model import LanguageModel
from lineartime.ops.reference import gated_chunk_attention, gated_head_attention, toeplitz
from scripts import ROOT, loaded

waking = loaded("studies", "waking")
IDS = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0))


def model_of(name, **fields):
    torch.manual_seed(0)
    model = LanguageModel(waking.config_of(name, waking.TASKS["pairs"], fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


@pytest.mark.parametrize("name", ["flash", "flash+"])
def test_without_its_local_half_a_model_is_its_global_part(name, monkeypatch):
    monkeypatch.setattr(waking, "DROPPED_SHARE", 1.0)
    model = model_of(name)
    alone = model_of(name, chunk_parts="global")
    alone.load_state_dict(model.state_dict())
    with waking.waking("dropout", 0, lambda _: None):
        dropped = model(IDS)
        with torch.no_grad():
            whole = model(IDS)
    torch.testing.assert_close(dropped, alone(IDS), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(dropped, whole)
    torch.testing.assert_close(whole, model(IDS).detach(), msg="nothing stays changed")


def test_steps_differ_and_a_seed_repeats_them():
    def losses(seed, variant):
        model, found = model_of("flash"), []
        with waking.waking(variant, seed, lambda _: None) as after_step:
            for _ in range(24):
                found.append(model(IDS).square().mean().item())
                after_step({"held_out": {}})  # no step
                after_step({"loss": 0.0})
        return found

    for variant, n_kinds in (("dropout", 2), ("chunks", 3)):
        first = losses(0, variant)
        assert len({*first}) == n_kinds and losses(0, variant) == first != losses(1, variant)


def test_smaller_chunks_keep_the_bias_of_two_tokens():
    w = torch.arange(31.0)
    draw = random.Random(0)
    sizes = {waking.chunks(draw, w, 16)[1]: waking.chunks(random.Random(i), w, 16) for i in range(20)}
    assert {*sizes} == {16, 8, 4}
    for smaller, size in sizes.values():
        assert torch.equal(toeplitz(smaller, size), toeplitz(w, 16)[:size, :size])


def test_a_position_bias_is_the_last_tensor_of_both_ops():
    """What `waking` replaces."""
    for attention in (gated_chunk_attention, gated_head_attention):
        names = list(attention.__annotations__)
        assert names[names.index("chunk_size") - 1] == "w"


def test_the_page_has_the_table_of_the_rows(tmp_path):
    page, text = tmp_path / "memory.md", (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "studies" / "waking.py", "--into", page], check=True)
    assert page.read_text(encoding="utf-8") == text
