"""The Transformer's layers against their formulas, written out per head and position; and what weights start as."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.config import PRESETS, model_config
from lineartime.mhsa import FeedForward, MultiHeadAttention
from lineartime.model import LanguageModel, init_weights

T, D, H = 11, 24, 4
K = D // H
NORMS = pytest.mark.parametrize("norm", ["layer_norm", "scale_norm"])


def random_layer(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Give every parameter a value from normal(0, 0.5); returns them by name."""
    layer.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def random_x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def normed(x: Tensor, norm: str, w: dict[str, Tensor]) -> Tensor:
    if norm == "scale_norm":
        return w["norm.scalar"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    x = x - x.mean(-1, keepdim=True)
    return w["norm.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() + w["norm.bias"]


def turned(x_K: Tensor, position: int) -> Tensor:
    """RoPE of one head at one position: pairs (k, k + K / 2) turned by position x 10000^(-2 k / K)."""
    out_K = x_K.clone()
    for k in range(K // 2):
        angle, a, b = position * 10000 ** (-2 * k / K), x_K[k], x_K[k + K // 2]
        out_K[k] = a * math.cos(angle) - b * math.sin(angle)
        out_K[k + K // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out_K


@NORMS
@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("documents", [None, [0] * 4 + [1] * 7])
def test_multi_head_attention(norm: str, with_rope: bool, causal: bool, documents: list[int] | None) -> None:
    layer = MultiHeadAttention(d_model=D, n_heads=H, causal=causal, norm=norm, rel_pos="rope" if with_rope else None)
    w, x_TD = random_layer(layer), random_x(T, D)
    qkv_TF = normed(x_TD, norm, w) @ w["in_proj.weight"].T + w["in_proj.bias"]
    q_THK, k_THK, v_THK = (part_TD.view(T, H, K) for part_TD in qkv_TF.split(D, dim=1))
    out_THK = torch.zeros(T, H, K, dtype=torch.float64)
    for i in range(T):
        keys = [j for j in range(T) if (j <= i or not causal) and (documents is None or documents[j] == documents[i])]
        for h in range(H):
            q_K, k_LK = q_THK[i, h], k_THK[keys, h]
            if with_rope:
                q_K, k_LK = turned(q_K, i), torch.stack([turned(k_THK[j, h], j) for j in keys])
            out_THK[i, h] = (k_LK @ q_K / K**0.5).softmax(0) @ v_THK[keys, h]
    expected = x_TD + out_THK.flatten(1) @ w["out_proj.weight"].T + w["out_proj.bias"]

    segment_ids_BT = None if documents is None else torch.tensor([documents])
    assert torch.allclose(layer(x_TD[None], segment_ids_BT)[0], expected, rtol=0, atol=1e-12)


@NORMS
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_feed_forward(norm: str, activation: str) -> None:
    """x + W_o act(W_u x); as a GLU x + W_o (act(W_u x) * W_v x): Eqs. 1-2 with no activation on the second factor."""
    x_TD = random_x(T, D)

    def act(x: Tensor) -> Tensor:
        return x * (0.5 * (1 + torch.erf(x / 2**0.5)) if activation == "gelu" else torch.sigmoid(x))

    for glu in (False, True):
        layer = FeedForward(d_model=D, expansion_factor=2, norm=norm, activation=activation,
                            ffn="glu" if glu else "mlp")
        w = random_layer(layer)
        inner = normed(x_TD, norm, w) @ w["in_proj.weight"].T + w["in_proj.bias"]
        e = layer.config.d_inner
        inner = act(inner[:, :e]) * inner[:, e:] if glu else act(inner)
        expected = x_TD + inner @ w["out_proj.weight"].T + w["out_proj.bias"]
        assert torch.allclose(layer(x_TD[None])[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("init_std", [0.02, 0.07])
@pytest.mark.parametrize("task", ["c4", "wiki40b"])
@pytest.mark.parametrize(("preset", "options"), [
    *((preset, {}) for preset in PRESETS if preset != "flash+"),
    ("transformer++", {"attn_kernel": "relu2", "gate": True}),
    ("mc-tfm++", {"attn_kernel": "relu2"}), ("flash", {"chunk_pooling": "attention", "overlap": True}),
    ("flash-quad", {"gate": False}), ("flash", {"causal": False, "first_to_all": True}),
], ids=lambda x: "-".join(x) if isinstance(x, dict) else x)
def test_initial_values(preset: str, options: dict, task: str, init_std: float) -> None:
    """Norm scales are 1, ScaledSin's scalar d^-1/2, biases and offsets 0, everything else normal(0, 0.02): but for
    matrices and embeddings where `init_std` says so. What flash+ has besides is tested below."""
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
    """Taps normal(0, 0.3), and 1 more on the token itself; gates near a half; a gain of 0.3; constant linear scales; a
    Transformer's W_k equal to its W_q.
    The other weights of the first layer are those without the options."""
    gau, chunks = PRESETS[preset].ffn == "gau", PRESETS[preset].chunk_size is not None
    fields = {"n_layers": 1, "d_model": 256, "vocab_size": 500} | ({"query_key_dim": 256} if gau else {"n_heads": 4})
    options = {"key_conv": 3}
    if chunks:
        options |= {"linear_scale_init": 0.7, "linear_gate": True, "linear_norm": True}
    if gau:
        options["local_scale_init"] = 0.6
    else:
        options["keys_start_as_queries"] = True
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
            assert (new.pop("linear_norm.gain") == 0.3).all()
            assert (new["scale_offset.gamma"][2 if gau else 0 :] == 0.7).all()
        if gau:
            assert (new["scale_offset.gamma"][:2] == 0.6).all()
            others = model_config(preset, causal=False, local_scale_init=0.6, first_to_all=chunks,
                                  chunk_pooling="attention" if chunks else "mean", **fields)
            layer = LanguageModel(others).layers[0]
            scales = [layer.scale_offset.gamma[:2], layer.scale_offset.gamma[4:]]
            if chunks:
                scales.append(layer.chunk_scale_offset.gamma)
            assert all((scale == 0.6).all() for scale in scales) and not (layer.scale_offset.gamma[2:4] == 0.6).any()
        if gau or chunks:
            assert new.pop("scale_offset.gamma").shape == old.pop("scale_offset.gamma").shape
        if not gau:
            query, _, value = old["in_proj.weight"].split(256)
            old["in_proj.weight"] = torch.cat([query, query, value])
        assert new.keys() == old.keys() and all(torch.equal(old[name], new[name]) for name in old)
