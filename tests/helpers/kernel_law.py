"""The law for the kernels of both gated attentions: at most twice the reference's error against float64."""

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
S = 128
NAMES = ("out", "uvz", "gamma", "beta", "w")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(op, inputs: dict[str, Tensor], **how) -> list[Tensor]:
    """The output, and the gradients of uvz, gamma, beta and w for some gradient of it."""
    inputs = {name: x.detach() for name, x in inputs.items()}
    leaves = [inputs[name].requires_grad_() for name in NAMES[1:]]
    out = op(*inputs.values(), **how)
    given = random(*out.shape, seed=6).bfloat16().to(out.dtype)  # the same in every type
    return [out.detach(), *torch.autograd.grad(out, leaves, given)]


def error(a: Tensor, exact: Tensor) -> float:
    return float((a.double() - exact).norm())


def assert_held(kernel, reference, inputs: dict[str, Tensor], floor: float | None = None, **how) -> None:
    """The reference's dtypes and shapes, and at most twice as far from float64 as the reference is. floor: a relative
    error that is let pass."""
    exact = run(reference, {name: x.double() for name, x in inputs.items()}, **how)
    ours, theirs = (run(op, inputs, **how) for op in (kernel, reference))
    # Float32 is at its rounding in both, where twice is a matter of luck.
    floor = floor or (1e-6 if inputs["uvz"].dtype == torch.float32 else 0.0)
    for name, a, b, x in zip(NAMES, ours, theirs, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert error(a, x) <= max(2 * error(b, x), floor * float(x.norm())), name
