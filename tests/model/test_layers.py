"""A layer alone: what it takes, the feed-forward layer's formula, initial values, and adapters in
place of its projections."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime import FeedForward, GatedAttentionUnit, MultiHeadAttention
from lineartime.base.errors import UsageError
from lineartime.config import PRESETS, ModelConfig, model_config
from lineartime.model.gau_options import heads_of_z
from lineartime.model.language_model import LanguageModel, init_weights
from lineartime.model.layers import ResidualLayer
from lineartime.ops.reference import add_norm, make_heads, turn
from lineartime.weights.generation.generate import decode_step, prefill
from marks import rest
from tiny_models import CONFIGS, difference, drawn, random_ids, random_model
from token_by_token import activation as activated
from token_by_token import dense, normed

GAU = GatedAttentionUnit(d_model=16, query_key_dim=8, context=32)
WRONG = [
    (GatedAttentionUnit, (64,), {}, "a layer takes a ModelConfig, or its fields by name"),
    (GatedAttentionUnit, (), {"kernel": "softmax"}, "unknown setting: kernel; did you mean attn_kernel?"),
    (GatedAttentionUnit, (), {"dim": 8}, "unknown setting: dim; did you mean d_model?"),
    (GatedAttentionUnit, (), {"norm": "rms"}, "norm"),
    (GatedAttentionUnit, (model_config("flash-quad"),), {"d_model": 64}, "not both: d_model"),
    (GatedAttentionUnit, (model_config("performer"),), {}, "ffn = mlp"),
    (MultiHeadAttention, (model_config("flash"),), {}, "ffn = gau"),
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_dtype_that_autocast_converts_and_a_projection_of_its_own_dtype() -> None:
    """Under autocast any floating type but float64 will do, and another projection converts: of a
    quantised one `weight` is a function."""
    with torch.autocast("cpu", torch.bfloat16):
        assert GAU(torch.zeros(1, 3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
        for wrong in (torch.long, torch.double):
            with pytest.raises(UsageError, match="wrong dtype"):
                GAU(torch.zeros(1, 3, 16, dtype=wrong))

    class Converting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(self.weight.dtype)).to(x.dtype)

    layer = FeedForward(d_model=16)
    quantised, x_BTD = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}), torch.randn(1, 3, 16)
    assert 0 < (quantised(x_BTD) - layer(x_BTD)).norm() < 0.05 * (layer(x_BTD) - x_BTD).norm()
    layer.in_proj = Converting(16, layer.in_proj.out_features).double()
    assert layer(torch.zeros(1, 3, 16)).dtype == torch.float32


def test_norms_and_heads_of_a_short_type_are_rounded_once() -> None:
    """From float32, whatever the parameters' type; squares of float16 may exceed it."""
    x_BTS, gamma, beta, sin, cos = torch.randn(5, 9, 50, 64, generator=torch.Generator().manual_seed(0))
    x_BTS = (300 * x_BTS).half()

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return add_norm(x, None, weight, bias)[1]

    def options(z: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        by, angles = SimpleNamespace(gamma=gamma, beta=beta), turn(sin[..., None, :], cos[..., None, :])
        return torch.stack(heads_of_z(CONFIGS["flash"], z, z, by, None, angles)[0])

    angles = sin[..., :32], cos[..., :32]
    for made, parameters in ((norm, (gamma[0, 0], beta[0, 0])), (norm, (gamma[0, 0, :1],)),
                             (make_heads, (gamma[0, :4], beta[0, :4], *angles)),
                             (options, (gamma[0, :4].half(), beta[0, :4].half(), *angles))):
        exact_BTS = made(x_BTS.double(), *(each.double() for each in parameters)).half()
        with torch.autocast("cpu", torch.float16):
            assert (made(x_BTS, *parameters) == exact_BTS).double().mean() > 0.99
    total_BTS, _ = add_norm(gamma, x_BTS, gamma[0, 0], beta[0, 0])  # a short branch does not narrow the stream
    assert torch.equal(total_BTS, gamma + x_BTS) and total_BTS.dtype == torch.float32


@pytest.mark.parametrize("norm", ["layer_norm", "scale_norm"])
@pytest.mark.parametrize("ffn", ["mlp", "glu"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_feed_forward(activation: str, ffn: str, norm: str) -> None:
    """x + W_o act(W_u x); as a GLU x + W_o (act(W_u x) * W_v x) (Eqs. 1-2)."""
    layer = drawn(FeedForward(d_model=24, expansion_factor=2, norm=norm, activation=activation, ffn=ffn).double())
    w, x_TD = dict(layer.named_parameters()), torch.randn(11, 24, dtype=torch.float64)
    inner, e = dense(normed(x_TD, w), w, "in_proj"), layer.config.d_inner
    act = activated(layer.config, inner[:, :e])
    expected = x_TD + dense(act * inner[:, e:] if ffn == "glu" else act, w, "out_proj")
    assert torch.allclose(layer(x_TD[None])[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("task", "init_std"), [("c4", 0.02), ("wiki40b", 0.07)])
@pytest.mark.parametrize(("preset", "options"), [
    *((preset, {}) for preset in PRESETS), ("transformer++", {"attn_kernel": "relu2", "gate": True}),
    ("transformer++", {"key_conv": 3, "qk_norm": True}), ("mc-tfm++", {"key_conv": 3, "linear_gate": True}),
    ("flash", {"key_conv": 3, "linear_gate": True}), ("flash-quad", {"key_conv": 3}),
    ("mc-tfm++", {"attn_kernel": "relu2"}), ("flash", {"chunk_pooling": "attention", "overlap": True}),
    ("flash-quad", {"gate": False}), ("flash", {"causal": False, "first_to_all": True}),
], ids=lambda x: "-".join(x) if isinstance(x, dict) else x)
def test_initial_values(preset: str, options: dict, task: str, init_std: float) -> None:
    """Norm scales are 1, ScaledSin's scalar d^-1/2, biases and offsets 0, all else normal(0, 0.02),
    or in matrices and embeddings `init_std`. Of options beyond the paper taps are normal(0, 0.3),
    and 1 more on the token itself, gates near a half; they are drawn last in a layer."""
    fields = options | {"init_std": init_std} | ({"n_heads": 4} if PRESETS[preset].ffn != "gau" else {})
    config = model_config(preset, task, n_layers=2, d_model=64, vocab_size=500, context=600, **fields)
    off = {name: type(options[name])(0) for name in ("key_conv", "linear_gate", "qk_norm") if name in options}
    model, without = LanguageModel(config), LanguageModel(replace(config, **off))
    for each in (model, without):
        torch.manual_seed(0)
        init_weights(each)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    drawn = []
    for name, parameter in model.named_parameters():
        *_, owner, kind = ("model." + name).split(".")
        if owner.endswith("norm") and kind in ("weight", "scalar"):
            assert (parameter == 1).all(), name
        elif name == "abs_pos.scalar":
            assert parameter == 64**-0.5
        elif kind in ("bias", "beta", "head_bias"):
            assert (parameter == 0).all(), name
        else:
            if kind == "taps":
                parameter = parameter - F.one_hot(torch.tensor(2 if task == "wiki40b" else 1), 3)[:, None]
            of_matrix = init_std if kind == "weight" and parameter.dim() == 2 else 0.02
            std = 0.3 if kind == "taps" else 0.1 if owner == "linear_gate" else of_matrix
            drawn.append(parameter.detach().flatten() / std)
            assert abs(parameter.std() / std - 1) < 4 / (2 * parameter.numel()) ** 0.5, name
            assert abs(parameter.mean()) < 4 * std / parameter.numel() ** 0.5, name
    assert abs(torch.cat(drawn).std() - 1) < 0.01
    weights = dict(model.layers[0].named_parameters())
    assert all(torch.equal(weights[name], parameter) for name, parameter in without.layers[0].named_parameters())


@pytest.mark.parametrize("name", ["flash", "transformer++", "flash+",
                                  *rest("flash-quad", "flash heads", "mc-tfm++", "performer", "combiner")])
@torch.no_grad()
def test_projections_are_called_as_modules(name: str) -> None:
    """So that adapters attach, in decoding too: a model of which each gives half as much again."""
    model, larger = random_model(CONFIGS[name]), random_model(CONFIGS[name])
    for layer, other in zip(model.layers, larger.layers, strict=True):
        for adapted, plain in ((layer.in_proj, other.in_proj), (layer.out_proj, other.out_proj)):
            adapted.register_forward_hook(lambda module, given, out: 1.5 * out)
            for parameter in plain.parameters():
                parameter *= 1.5
    ids_BT = random_ids(2, 11)
    expected_BTV = larger(ids_BT)
    logits_BV, state = prefill(model, ids_BT[:, :6].tolist())
    decoded = torch.stack([logits_BV, *(decode_step(model, ids_B, state) for ids_B in ids_BT[:, 6:].T)], dim=1)
    assert difference(model(ids_BT), expected_BTV) <= 1e-11 and difference(decoded, expected_BTV[:, 5:]) <= 1e-11
