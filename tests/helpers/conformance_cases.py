"""The recorded cases of conformance/: reading them, and what agreement with them means."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "conformance"
SETTINGS: dict[str, dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())


def largest_error(n: int = 0) -> float:
    """The tolerance for a case of n, see `error`. From n = 512 on the listing's position bias is rotated by float32
    angles, which alone move a recorded array by up to 1.7e-5."""
    return 1e-5 if n < 512 else 2e-5


class Case:
    """One recorded case: what went in, what came out, and the gradients of sum(out * cotangent)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = SETTINGS[name]
        arrays = {key: torch.from_numpy(value) for key, value in np.load(FOLDER / f"{name}.npz").items()}

        def part(prefix: str) -> dict[str, Tensor]:
            return {key.removeprefix(prefix).removesuffix(":0"): value for key, value in arrays.items()
                    if key.startswith(prefix)}

        self.largest_error = largest_error(self.settings.get("n", 0))
        self.inputs, self.var, self.grads = part("in/"), part("var/"), part("grad/")
        self.out, self.cotangent = arrays["out"], arrays["cotangent"]


def names(prefix: str) -> list[str]:
    found = [name for name in SETTINGS if name.startswith(prefix)]
    assert found, prefix
    return found


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry expected; where zero is expected, the largest entry found."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    return difference / largest if largest else difference


def errors_of(case: Case, out: Tensor, leaves: dict[str, Tensor]) -> dict[str, float]:
    """The error of the output and of every recorded gradient; `leaves` are the tensors under the listing's names.

    A recorded output may be only the first rows of a large one: the cotangent is zero below them."""
    out = out[: len(case.out)]
    assert set(case.grads) <= set(leaves), set(case.grads) - set(leaves)
    wanted = {name: leaves[name] for name in case.grads}
    found = torch.autograd.grad((out * case.cotangent).sum(), list(wanted.values()), materialize_grads=True)
    errors = {"out": error(out.detach(), case.out)}
    for name, gradient in zip(wanted, found, strict=True):
        errors[name] = error(gradient, case.grads[name])
    return errors
