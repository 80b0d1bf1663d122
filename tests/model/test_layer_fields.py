"""A layer takes a ModelConfig, or fields that make one: wrong values are refused in one line."""

import pytest
import torch

from lineartime import FeedForward, GatedAttentionUnit, ModelConfig, MultiHeadAttention, model_config
from lineartime.base.errors import UsageError
from lineartime.model.layers import ResidualLayer

WRONG = [
    (GatedAttentionUnit, (64,), {}, "a layer takes a ModelConfig, or its fields by name"),
    (GatedAttentionUnit, (), {"kernel": "softmax"}, "unknown setting: kernel; did you mean attn_kernel?"),
    (GatedAttentionUnit, (), {"norm": "rms"}, "norm"),
    (GatedAttentionUnit, (model_config("flash-quad"),), {"d_model": 64}, "not both: d_model"),
    (GatedAttentionUnit, (model_config("performer"),), {}, "ffn = mlp"),
    (MultiHeadAttention, (model_config("flash"),), {}, "ffn = gau"),
    (FeedForward, (model_config("flash"),), {}, "FeedForward"),
]


def test_wrong_fields_are_refused_in_one_line() -> None:
    for layer, given, fields, said in WRONG:
        with pytest.raises(UsageError) as caught:
            layer(*given, **fields)
        assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("made", "fields"), [
    (GatedAttentionUnit, {"d_model": 24, "chunk_size": 4}), (GatedAttentionUnit, {"d_model": 25}),
    (GatedAttentionUnit, {"d_model": 24, "key_conv": 3, "attn_kernel": "softmax"}),
    (GatedAttentionUnit, {"d_model": 24, "chunk_size": 4, "overlap": True, "gate": False, "n_heads": 4}),
    (GatedAttentionUnit, {"d_model": 24, "chunk_size": 4, "key_conv": 3, "linear_gate": True, "linear_rope": False,
                          "chunk_pooling": "written"}),
    (FeedForward, {"d_model": 25}), (MultiHeadAttention, {"d_model": 24, "n_heads": 2}),
    (MultiHeadAttention, {"d_model": 24, "n_heads": 2, "attn_type": "mixed_chunk", "chunk_size": 4})])
def test_a_layer_alone_is_that_of_its_configuration(made: type[ResidualLayer], fields: dict) -> None:
    """By fields or by a configuration, with initial values that are finite."""
    torch.manual_seed(0)
    layer = made(**fields)
    assert isinstance(layer.config, ModelConfig) and all(p.isfinite().all() for p in layer.parameters())
    again = made(layer.config)
    again.load_state_dict(layer.state_dict())
    x_BTD = torch.randn(2, 9, layer.config.d_model)
    y_BTD = layer(x_BTD)
    assert y_BTD.shape == x_BTD.shape and torch.equal(again(x_BTD), y_BTD)


GAU = GatedAttentionUnit(d_model=16, query_key_dim=8, context=32)


def test_wrong_inputs_are_refused_in_one_line() -> None:
    wrong = [(torch.zeros(3, 16), r"wrong shape of a layer's input: \[3, 16\]; give \[batch, tokens, 16\]"),
             (torch.zeros(1, 3, 8), r"wrong shape of a layer's input: \[1, 3, 8\]; give"),
             (torch.zeros(1, 3, 16).long(), "wrong dtype of a layer's input: torch.int64, the weights are"),
             (torch.zeros(1, 3, 16).bfloat16(), "torch.bfloat16, the weights are torch.float32; convert the")]
    cases = [(layer, x, said) for x, said in wrong
             for layer in (GAU, MultiHeadAttention(d_model=16, n_heads=2), FeedForward(d_model=16))]
    cases.append((GAU, torch.zeros(1, 40, 16), "row longer than the position table: 40 tokens, the table has 32; make"))
    for layer, x, said in cases:
        with pytest.raises(UsageError, match=said) as caught:
            layer(x)
        assert "\n" not in str(caught.value)


def test_a_dtype_that_autocast_converts_and_a_projection_of_its_own_dtype() -> None:
    """Under autocast any floating type but float64 will do, and another projection converts."""
    with torch.autocast("cpu", torch.bfloat16):
        assert GAU(torch.zeros(1, 3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
        for wrong in (torch.long, torch.double):
            with pytest.raises(UsageError, match="wrong dtype"):
                GAU(torch.zeros(1, 3, 16, dtype=wrong))

    class Converting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(self.weight.dtype)).to(x.dtype)

    layer = FeedForward(d_model=16)
    layer.in_proj = Converting(16, layer.in_proj.out_features).double()
    assert layer(torch.zeros(1, 3, 16)).dtype == torch.float32
