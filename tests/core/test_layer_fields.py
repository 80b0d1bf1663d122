"""A layer takes a ModelConfig, or fields that make one: every wrong value is refused in one line."""

import pytest
import torch

from lineartime import FeedForward, GatedAttentionUnit, ModelConfig, MultiHeadAttention, model_config
from lineartime.ablations import AblatedGatedAttentionUnit
from lineartime.errors import UsageError
from lineartime.layers import ResidualLayer

WRONG = [
    (GatedAttentionUnit, (64,), {}, "a layer takes a ModelConfig, or its fields by name"),
    (GatedAttentionUnit, (), {"kernel": "softmax"}, 'did you mean attn_kernel?'),
    (GatedAttentionUnit, (), {"attn_kernel": "sofmax"}, "attn_kernel"),
    (GatedAttentionUnit, (), {"norm": "rms"}, "norm"),
    (GatedAttentionUnit, (), {"first_to_all": True, "causal": False}, "first_to_all is for mixed chunk attention"),
    (GatedAttentionUnit, (), {"chunk_parts": "local"}, "chunk_parts is for mixed chunk attention"),
    (GatedAttentionUnit, (), {"document_mask": "paper"}, "document_mask is for mixed chunk attention"),
    (GatedAttentionUnit, (), {"chunk_pooling": "attention"}, "chunk_pooling is for mixed chunk attention"),
    (GatedAttentionUnit, (), {"chunk_size": 4, "key_conv": 3}, "this GAU is neither FLASH's nor FLASH-Quad's"),
    (GatedAttentionUnit, (), {"chunk_size": 0}, "chunk size"),
    (GatedAttentionUnit, (), {"query_key_dim": 7}, "RoPE needs an even width"),
    (GatedAttentionUnit, (), {"n_heads": 2}, "AblatedGatedAttentionUnit"),
    (GatedAttentionUnit, (model_config("transformer++"),), {}, "ffn = glu"),
    (MultiHeadAttention, (64, 4), {}, None),
    (MultiHeadAttention, (), {"attn_type": "linaer"}, "attn_type"),
    (MultiHeadAttention, (), {"d_model": 64, "n_heads": 5}, "d_model must be a multiple of n_heads"),
    (MultiHeadAttention, (), {"chunk_parts": "local"}, "chunk_parts is for mixed chunk attention"),
    (MultiHeadAttention, (model_config("flash"),), {}, "ffn = gau"),
    (FeedForward, (), {"ffn": "gau", "n_heads": 1}, "FeedForward"),
    (FeedForward, (), {"activation": "relu"}, "activation"),
]


@pytest.mark.parametrize(("layer", "given", "fields", "said"), WRONG)
def test_wrong_fields_are_refused_in_one_line(layer: type[ResidualLayer], given: tuple, fields: dict,
                                              said: str | None) -> None:
    with pytest.raises(UsageError if said else TypeError) as caught:
        layer(*given, **fields)
    if said:
        assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("made", "fields"), [
    (GatedAttentionUnit, {"d_model": 24, "chunk_size": 4}), (GatedAttentionUnit, {"d_model": 25}),
    (AblatedGatedAttentionUnit, {"d_model": 24, "n_heads": 2, "gate": False}), (FeedForward, {"d_model": 24}),
    *((MultiHeadAttention, {"d_model": 24, "n_heads": 2, **core}) for core in (
        {}, {"attn_kernel": "relu2"}, {"attn_type": "linear"}, {"attn_type": "mixed_chunk", "chunk_size": 4},
        {"attn_type": "rowmajor_axial", "chunk_size": 4})),
])
def test_a_layer_alone_is_that_of_its_configuration(made: type[ResidualLayer], fields: dict) -> None:
    """By fields or by a configuration; with initial values that are finite, and without moving torch's generator in a
    Transformer's layers."""
    torch.manual_seed(0)
    layer = made(**fields)
    assert isinstance(layer.config, ModelConfig) and all(p.isfinite().all() for p in layer.parameters())
    again = made(layer.config)
    again.load_state_dict(layer.state_dict())
    x_BTD = torch.randn(2, 9, layer.config.d_model)
    y_BTD = layer(x_BTD)
    assert y_BTD.shape == x_BTD.shape and torch.equal(again(x_BTD), y_BTD)


def test_the_stream_is_the_sum() -> None:
    """A layer's `add` gives x and its branch; `forward` is their sum, and delta is added before the norm."""
    torch.manual_seed(0)
    layer = GatedAttentionUnit(d_model=16, query_key_dim=8, chunk_size=4)
    x_BTD, delta_BTD = torch.randn(2, 2, 9, 16).unbind()
    from lineartime.layers import one_document_info

    info = one_document_info(x_BTD, layer.config)
    total_BTD, branch_BTD = layer.add(x_BTD, delta_BTD, info)
    assert torch.equal(total_BTD, x_BTD + delta_BTD)
    assert torch.equal(total_BTD + branch_BTD, layer(x_BTD + delta_BTD))
