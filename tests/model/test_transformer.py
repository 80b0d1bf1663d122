"""The feed-forward layer against its formula, and what weights start as."""

import pytest
import torch
import torch.nn.functional as F

from lineartime.config import PRESETS, model_config
from lineartime.model.language_model import LanguageModel, init_weights
from lineartime.model.mhsa import FeedForward
from token_by_token import dense, normed


@pytest.mark.parametrize("norm", ["layer_norm", "scale_norm"])
@pytest.mark.parametrize("ffn", ["mlp", "glu"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_feed_forward(activation: str, ffn: str, norm: str) -> None:
    """x + W_o act(W_u x); as a GLU x + W_o (act(W_u x) * W_v x) (Eqs. 1-2)."""
    layer = FeedForward(d_model=24, expansion_factor=2, norm=norm, activation=activation, ffn=ffn).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    w = dict(layer.named_parameters())
    x_TD = torch.randn(11, 24, dtype=torch.float64, generator=generator)
    inner, e = dense(normed(x_TD, w), w, "in_proj"), layer.config.d_inner
    act = inner[:, :e] * (0.5 * (1 + torch.erf(inner[:, :e] / 2**0.5)) if activation == "gelu"
                          else torch.sigmoid(inner[:, :e]))
    expected = x_TD + dense(act * inner[:, e:] if ffn == "glu" else act, w, "out_proj")
    assert torch.allclose(layer(x_TD[None])[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("task", "init_std"), [("c4", 0.02), ("wiki40b", 0.07)])
@pytest.mark.parametrize(("preset", "options"), [
    *((preset, {}) for preset in PRESETS if preset != "flash+"),
    ("transformer++", {"attn_kernel": "relu2", "gate": True}),
    ("mc-tfm++", {"attn_kernel": "relu2"}), ("flash", {"chunk_pooling": "attention", "overlap": True}),
    ("flash-quad", {"gate": False}), ("flash", {"causal": False, "first_to_all": True}),
], ids=lambda x: "-".join(x) if isinstance(x, dict) else x)
def test_initial_values(preset: str, options: dict, task: str, init_std: float) -> None:
    """Norm scales are 1, ScaledSin's scalar d^-1/2, biases and offsets 0, everything else normal(0,
    0.02): but for matrices and embeddings where `init_std` says so. What flash+ has besides is
    tested below."""
    torch.manual_seed(0)
    fields = options | {"init_std": init_std} | ({"n_heads": 4} if PRESETS[preset].ffn != "gau" else {})
    model = LanguageModel(model_config(preset, task, n_layers=2, d_model=64, vocab_size=500, context=600, **fields))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    drawn = []
    for name, parameter in model.named_parameters():
        *_, owner, kind = ("model." + name).split(".")
        if owner in ("norm", "summary_norm") and kind in ("weight", "scalar"):
            assert (parameter == 1).all(), name
        elif name == "abs_pos.scalar":
            assert parameter == 64**-0.5
        elif kind in ("bias", "beta", "head_bias"):
            assert (parameter == 0).all(), name
        else:
            std = init_std if kind == "weight" and parameter.dim() == 2 else 0.02
            drawn.append(parameter.detach().flatten() / std)
            assert abs(parameter.std() / std - 1) < 4 / (2 * parameter.numel()) ** 0.5, name
            assert abs(parameter.mean()) < 4 * std / parameter.numel() ** 0.5, name
    assert abs(torch.cat(drawn).std() - 1) < 0.01


@pytest.mark.parametrize("preset", ["flash", "mc-tfm++", "flash-quad", "transformer++"])
def test_initial_values_of_options_beyond_the_paper(preset: str) -> None:
    """Taps normal(0, 0.3), and 1 more on the token itself; gates near a half; gains of 1. The other
    weights of the first layer are those without the options."""
    gau, chunks = PRESETS[preset].ffn == "gau", PRESETS[preset].chunk_size is not None
    fields = {"n_layers": 1, "d_model": 256, "vocab_size": 500} | ({"query_key_dim": 256} if gau else {"n_heads": 4})
    options = {"key_conv": 3}
    if chunks:
        options["linear_gate"] = True
    if not gau:
        options["qk_norm"] = not chunks
    plain = LanguageModel(model_config(preset, **fields))
    torch.manual_seed(0)
    init_weights(plain)
    for causal in (True, False):
        made = LanguageModel(model_config(preset, causal=causal, **fields, **options))
        torch.manual_seed(0)
        init_weights(made)
        old, new = dict(plain.layers[0].named_parameters()), dict(made.layers[0].named_parameters())
        taps_KS = new.pop("key_conv.taps")
        taps_KS = taps_KS - F.one_hot(torch.tensor(2 if causal else 1), 3)[:, None]
        assert abs(taps_KS.mean()) < 0.05 and abs(taps_KS.std() - 0.3) < 0.03
        if chunks:
            assert abs(new.pop("linear_gate.weight").std() - 0.1) < 0.02 and not new.pop("linear_gate.bias").any()
        if not (gau or chunks):
            assert all((new.pop(f"{name}_norm.weight") == torch.ones(64)).all() for name in ("query", "key"))
        assert new.keys() == old.keys() and all(torch.equal(old[name], new[name]) for name in old)
