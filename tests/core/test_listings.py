"""The transcribed listings reproduce what the paper's own code computed under TensorFlow."""

import pytest
import torch
from torch import Tensor

import listings
from conformance_cases import SETTINGS, Case, errors_of


def output(case: Case, x: Tensor | None, var: dict[str, Tensor]) -> Tensor:
    settings = case.settings
    kind = case.name.split("_")[0]
    if kind == "norm":
        return listings.norm(x, listings.below(var, "norm"), norm_type=settings["norm_type"])
    if kind == "scaledsin":
        return listings.get_scaledsin(x, var)
    if kind == "rope":
        axis = settings["axis"]
        return listings.rope(x, axis[0] if len(axis) == 1 else axis)
    if kind == "rel":
        return listings.rel_pos_bias(settings["n"], listings.below(var, "rel_pos_bias"))
    if kind == "segmask":
        return listings.segment_ids_to_mask(case.inputs["seg"], settings["causal"])
    norm_type = settings.get("norm_type", "layer_norm")
    if kind == "gau":
        return listings.GAU(x, settings["causal"], var, norm_type)
    assert kind == "flash"
    return listings.FLASH(x, settings["causal"], case.inputs["seg"], var, norm_type)


@pytest.mark.parametrize("name", SETTINGS)
def test_listing_reproduces_the_recorded_case(name: str) -> None:
    case = Case(name)
    leaves = {key: value.double().requires_grad_() for key, value in case.var.items()}
    if "x" in case.inputs:
        leaves["x"] = case.inputs["x"].double().requires_grad_()
    var = {key: value for key, value in leaves.items() if key != "x"}
    out = output(case, leaves.get("x"), var)
    # The recorded masks have a dummy weight added with factor zero, and no gradient to check.
    errors = errors_of(case, out, leaves) if out.requires_grad else {"out": float((out - case.out).abs().max())}
    assert max(errors.values()) <= case.largest_error, errors


def test_every_weight_of_a_case_has_a_gradient() -> None:
    for name in SETTINGS:
        case = Case(name)
        expected = set(case.var) | ({"x"} if "x" in case.inputs else set())
        assert set(case.grads) == expected, name


@pytest.mark.parametrize("n", [1, 2, 7, 511])
def test_toeplitz_construction_is_a_lookup_of_the_distance(n: int) -> None:
    w = torch.arange(2 * n - 1, dtype=torch.float64)
    rows, columns = torch.arange(n)[:, None], torch.arange(n)[None, :]
    assert torch.equal(listings.rel_pos_bias(n, {"weight": w}), w[columns - rows + n - 1])


@pytest.mark.parametrize("causal", [False, True])
def test_main_text_and_appendix_agree_up_to_the_mean(causal: bool) -> None:
    """For one document the appendix averages over the chunks in sight what the main text adds up, and divides by n."""
    generator = torch.Generator().manual_seed(1)
    g, n = 5, 4
    q, k = (torch.randn(2, g, n, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    v = torch.randn(2, g, n, 3, dtype=torch.float64, generator=generator)
    mask = listings.segment_ids_to_mask(torch.zeros(2, g, n, dtype=torch.int32), causal)
    kv = torch.einsum("bgnk,bgne->bgke", k, v) / n
    mean = torch.einsum("bgnk,bhke,bgh->bgne", q, kv, mask)
    chunks_in_sight = torch.arange(g, dtype=torch.float64) if causal else torch.full((g,), float(g))
    total = listings.global_linear_attn(q, k, v, causal)
    torch.testing.assert_close(mean * n * chunks_in_sight[:, None, None], total, rtol=1e-12, atol=1e-12)
