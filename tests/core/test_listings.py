"""The transcribed listings reproduce what the paper's own code computed under TensorFlow."""

import pytest
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
