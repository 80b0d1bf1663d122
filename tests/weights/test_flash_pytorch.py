"""Weights of FLASH-pytorch: each kind of module once, and what is refused. `make ecosystem` has all
arguments, decoding and padding."""

import pytest
import torch
from flash_pytorch import FLASH, GAU, FLASHTransformer
from rotary_embedding_torch import RotaryEmbedding

from lineartime.base.errors import UsageError
from lineartime.weights import from_flash_pytorch

LAYER = {"dim": 16, "query_key_dim": 8}


@pytest.mark.parametrize("theirs", [
    GAU(**LAYER, add_residual=False), FLASH(**LAYER, group_size=8, rotary_pos_emb=RotaryEmbedding(dim=4, theta=5000)),
    FLASHTransformer(**LAYER, group_size=8, causal=True, num_tokens=50, depth=2)], ids=lambda each: type(each).__name__)
def test_the_outputs_are_theirs(theirs: torch.nn.Module) -> None:
    """By copies of the weights, which leave theirs as they are."""
    for name, parameter in theirs.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.normal_(parameter)
    rows = torch.randint(50, (2, 20)) if isinstance(theirs, FLASHTransformer) else torch.randn(2, 20, 16)
    ours, wanted = from_flash_pytorch(theirs, 20), theirs(rows)
    assert ours.training and torch.allclose(ours(rows), wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())
    for parameter in ours.parameters():
        parameter.data.zero_()
    assert torch.equal(theirs(rows), wanted)


@pytest.mark.parametrize(("theirs", "length", "words"), [
    (torch.nn.Linear(4, 4), None, "not a module of FLASH-pytorch: Linear"),
    (GAU(**LAYER), None, "a GAU there divides by each row's length"),
    (GAU(**LAYER), 512, "more than 511"), (FLASH(**LAYER, group_size=512), None, "biases for 512 tokens"),
    (GAU(**LAYER, laplace_attn_fn=True), 20, "laplace_attn_fn = True"),
    (FLASH(**LAYER, reduce_group_non_causal_attn=False), None, "reduce_group_non_causal_attn = False"),
    (FLASH(**LAYER, norm_klass=torch.nn.BatchNorm1d), None, "norm = BatchNorm1d"),
    (FLASH(**LAYER, rotary_pos_emb=RotaryEmbedding(dim=4, freqs_for="pixel")), None, "frequencies of RoPE"),
    (FLASH(**LAYER, rotary_pos_emb=RotaryEmbedding(dim=4, interpolate_factor=2.0)), None, "frequencies of RoPE"),
    (GAU(**LAYER, expansion_factor=0.5), 20, "expansion_factor must be at least 1")])
def test_what_no_field_expresses_is_refused_in_a_line(theirs: torch.nn.Module, length: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words) as found:
        from_flash_pytorch(theirs, length)
    assert "\n" not in str(found.value)
