"""The package's layers are the paper's: the recorded cases, and the tables' parameter counts."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lineartime.config import model_config
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import LanguageModel
from lineartime.model.layers import RelPosBias, ScaledSin, make_norm
from lineartime.ops.ablations import paper_chunk_weights, paper_linear_attention
from lineartime.ops.reference import mixed_chunk_attention, rope, rotary, toeplitz, turn

Weights = dict[str, Tensor]
FOLDER = Path(__file__).parents[1] / "conformance"
SETTINGS: dict[str, dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())
PARAMETERS = {
    "norm/gamma": "norm.weight", "norm/beta": "norm.bias",  # LayerNorm
    "norm/scalar": "norm.scalar",  # ScaleNorm
    "dense/kernel": "in_proj.weight", "dense/bias": "in_proj.bias",  # columns u, v, base
    "gamma": "scale_offset.gamma", "beta_1": "scale_offset.beta",  # GAU: q, k; FLASH: quad_q, quad_k, lin_q, lin_k
    "rel_pos_bias/weight": "rel_pos_bias.weight",  # n < 512
    "rel_pos_bias/a": "rel_pos_bias.a", "rel_pos_bias/b": "rel_pos_bias.b",  # n >= 512
    "dense_1/kernel": "out_proj.weight", "dense_1/bias": "out_proj.bias",
    "scaledsin_scalar": "abs_pos.scalar",
}
"""Where the weights of the paper's listings stand in the package's layers."""


class Case:
    """One recorded case: what went in, what came out, and the gradients of sum(out * cotangent).

    From n = 512 on the listing's position bias is rotated by float32 angles, which alone move a
    recorded array by up to 1.7e-5."""

    def __init__(self, name: str) -> None:
        self.settings = SETTINGS[name]
        arrays = {key: torch.from_numpy(value) for key, value in np.load(FOLDER / f"{name}.npz").items()}

        def part(prefix: str) -> Weights:
            return {key.removeprefix(prefix).removesuffix(":0"): value for key, value in arrays.items()
                    if key.startswith(prefix)}

        self.largest_error = 1e-5 if self.settings.get("n", 0) < 512 else 2e-5
        self.inputs, self.var, self.grads = part("in/"), part("var/"), part("grad/")
        self.out, self.cotangent = arrays["out"], arrays["cotangent"]
        tensors = self.var | ({"x": self.inputs["x"]} if "x" in self.inputs else {})
        self.leaves = {key: tensor.clone().requires_grad_() for key, tensor in tensors.items()}

    def check(self, out: Tensor) -> None:
        """The output and every recorded gradient, in float32. A recorded output may be only the
        first rows of a large one: the cotangent is zero below them."""
        out = out[: len(self.out)]
        found = torch.autograd.grad((out * self.cotangent).sum(), [self.leaves[name] for name in self.grads],
                                    materialize_grads=True)
        errors = {name: error(gradient, self.grads[name]) for name, gradient in zip(self.grads, found, strict=True)}
        errors["out"] = error(out.detach(), self.out)
        assert max(errors.values()) <= self.largest_error, errors


def cases(prefix: str) -> pytest.MarkDecorator:
    found = [name for name in SETTINGS if name.startswith(prefix)]
    assert found, prefix
    return pytest.mark.parametrize("name", found)


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry expected; or over the largest entry found."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    return difference / largest if largest else difference


def call(layer: nn.Module, var: Weights, *args: object, scope: str = "") -> Tensor:
    """The layer with the listing's weights in place of its own, so that gradients arrive under the
    listing's names. TensorFlow's kernels are [in, out], torch's are not; a scalar is [1]."""
    weights = {PARAMETERS[name].removeprefix(scope): w.T if name.endswith("/kernel") else w if w.dim() else w[None]
               for name, w in var.items() if name != "x"}
    return functional_call(layer, weights, args, strict=True)


def gated_attention_unit(var: Weights, n: int, causal: bool, norm_type: str, *, chunks: bool,
                         document_mask: str = "paper") -> GatedAttentionUnit:
    """A layer of the listing's sizes, its weights on the meta device: all come from the listing."""
    d, s = var["dense/kernel"].shape[0], var["gamma"].shape[1]
    with torch.device("meta"):
        fields = {"chunk_size": n, "document_mask": document_mask} if chunks else {"attn_scale_len": n}
        config = model_config("flash" if chunks else "flash-quad", d_model=d, query_key_dim=s, causal=causal,
                              expansion_factor=var["dense_1/kernel"].shape[0] // d, norm=norm_type, abs_pos="learned",
                              **fields)
        return GatedAttentionUnit(config)


def test_scaled_sin() -> None:
    case = Case("scaledsin")
    _, n, d = case.inputs["x"].shape
    case.check(call(ScaledSin(d), case.leaves, torch.arange(n)[None], scope="abs_pos.")[0])


@cases("rope")
def test_rope_over_one_axis_and_over_two(name: str) -> None:
    """Positions are counted through the chunks."""
    case = Case(name)
    _, *axes, _, width = case.inputs["x"].shape
    sin, cos = rotary(torch.arange(math.prod(axes)).view(axes), width, torch.float32)
    case.check(rope(case.leaves["x"], turn(sin.unsqueeze(-2), cos.unsqueeze(-2))))


@cases("rel_pos_bias")
def test_relative_position_bias(name: str) -> None:
    case = Case(name)
    n = case.settings["n"]
    case.check(toeplitz(call(RelPosBias(n), case.leaves, n, scope="rel_pos_bias."), n))


@cases("norm")
def test_norm(name: str) -> None:
    case = Case(name)
    layer = make_norm(model_config("flash", norm=case.settings["norm_type"], d_model=case.inputs["x"].shape[-1]))
    case.check(call(layer, case.leaves, case.leaves["x"], scope="norm."))


@cases("gau")
def test_flash_quad_layer(name: str) -> None:
    case = Case(name)
    layer = gated_attention_unit(case.var, case.settings["n"], case.settings["causal"], case.settings["norm_type"],
                                 chunks=False)
    case.check(call(layer, case.leaves, case.leaves["x"]))


@cases("segmask")
def test_segment_mask(name: str) -> None:
    case = Case(name)
    weight_BGG = paper_chunk_weights(case.inputs["seg"], case.settings["causal"])
    assert weight_BGG.dtype == torch.float64 and error(weight_BGG, case.out) <= case.largest_error


def test_padding_does_not_widen_a_chunk() -> None:
    """Its range of documents stays, though padding has the id -1."""
    q, k, v = torch.randn(3, 1, 4, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k[:, 3, 2:] = 0
    ids_BGC = torch.tensor([[0] * 8 + [1] * 8, [0] * 8 + [1] * 6 + [-1] * 2]).view(2, 4, 4)
    whole, padded = paper_linear_attention(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), causal=False,
                                           segment_ids_BGC=ids_BGC)
    assert torch.equal(whole, padded)


@cases("flash")
def test_flash_layer(name: str) -> None:
    """The exact mask, the default, is the paper's for rows of one document, also without ids."""
    case = Case(name)
    norm_type, x = case.settings.get("norm_type", "layer_norm"), case.leaves["x"]
    ids_BT = case.inputs["seg"].flatten(1)
    for mask, ids in [("paper", ids_BT), *[("exact", None)] * ("docs1" in name)]:
        layer = gated_attention_unit(case.var, x.shape[2], case.settings["causal"], norm_type, chunks=True,
                                     document_mask=mask)
        case.check(call(layer, case.leaves, x.flatten(1, 2), ids).view_as(x))


@pytest.mark.parametrize("causal", [True, False])
def test_mixed_chunk_attention(causal: bool) -> None:
    """Code 1, which divides by no length and no count, with `rel_pos_bias` of Code 4."""
    random = torch.Generator().manual_seed(0)
    *heads, v, w = (torch.randn(*shape, dtype=torch.float64, generator=random)
                    for shape in (*[(2, 3, 4, 6)] * 4, (2, 3, 4, 5), (7,)))
    a = (torch.einsum("bgns,bgms->bgnm", *heads[:2]) + toeplitz(w, 4)).relu() ** 2
    kv = torch.einsum("bgcs,bgce->bgse", heads[3], v)
    a, kv = (a.tril(), kv.cumsum(1) - kv) if causal else (a, kv.sum(1, keepdim=True).expand(-1, 3, -1, -1))
    expected = torch.einsum("bgnm,bgme->bgne", a, v) + torch.einsum("bgcs,bgse->bgce", heads[2], kv)
    assert error(mixed_chunk_attention(*heads, v, w, scale_len=1, causal=causal, pooling="sum"), expected) < 1e-14


ABLATIONS_IN_MILLIONS = [
    # Tables 1 and 2.
    ("flash-quad", {"n_layers": 22}, 105), ("flash-quad", {"n_layers": 22, "n_heads": 8}, 105),
    ("flash-quad", {"n_layers": 22, "gate": False}, 131), ("transformer++", {"attn_kernel": "relu2"}, 110),
    ("transformer++", {"n_heads": 1}, 110), ("transformer++", {"gate": True, "expansion_factor": 3.25}, 106),
    # Figure 3 and Table 4, which print no count: their models are comparable in size.
    ("flash-quad", {"n_layers": 15, "d_model": 512}, 41), ("flash-quad", {"n_layers": 46, "d_model": 1024}, 329),
    ("transformer+", {"n_layers": 8, "d_model": 512, "n_heads": 8}, 42),
    ("transformer++", {"n_layers": 24, "d_model": 1024, "n_heads": 16}, 335),
    ("flash", {"query_key_dim": 512, "causal": False, "chunk_size": 128, "cls_softmax": True, "first_to_all": True},
     119),
    ("flash", {"chunk_parts": "global", "chunk_size": 64}, 112), ("flash", {"chunk_pooling": "attention"}, 112),
    ("flash", {"overlap": True}, 112), ("flash", {"chunk_size": 2048, "context": 2048}, 112)]


def test_parameter_counts_are_the_papers() -> None:
    """Of the ablations; those of the presets are in test_info.py."""
    for model, fields, millions in ABLATIONS_IN_MILLIONS:
        with torch.device("meta"):
            model = LanguageModel(model_config(model, **fields))
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions, fields
