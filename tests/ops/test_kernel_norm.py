"""The kernel of residual addition and norm, in Triton's interpreter, held to its reference, which is the modules'."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_law import error, random
from lineartime.config import model_config
from lineartime.model.layers import make_norm
from lineartime.ops import dispatch, norm, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AUTOCAST = "autocast"


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype | str, layer_norm: bool,
                with_delta: bool = True) -> list[Tensor | None]:
    """x, delta, weight and bias. Under autocast what comes from a product is bfloat16, all else float32."""
    wide, narrow = (torch.float32, torch.bfloat16) if dtype == AUTOCAST else (dtype, dtype)
    x = random(*shape, seed=0).mul(2).add(0.5).to(wide)
    delta = random(*shape, seed=1).to(narrow) if with_delta else None
    if not layer_norm:
        return [x, delta, random(seed=2).add(1.5).to(wide), None]
    return [x, delta, random(shape[-1], seed=2).add(1).to(wide), random(shape[-1], seed=3).to(wide)]


def run(op, inputs: list[Tensor | None], dtype: torch.dtype | str) -> list[Tensor | None]:
    """The sum, its norm, and the gradients of all inputs for some gradient of these two."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == AUTOCAST):
        outputs = op(*leaves)
    given = [random(*out.shape, seed=4 + n).to(out.dtype) for n, out in enumerate(outputs)]
    wanted = [x for x in leaves if x is not None]
    made = iter(torch.autograd.grad(outputs, wanted, given))
    return [*(out.detach() for out in outputs), *(None if x is None else next(made) for x in leaves)]


def assert_held(inputs: list[Tensor | None], dtype: torch.dtype | str) -> None:
    """Outputs and gradients have the reference's types, and at most twice its error."""
    exact = run(reference.add_norm, [None if x is None else x.double() for x in inputs], torch.float64)
    ours, theirs = run(norm.add_norm, inputs, dtype), run(reference.add_norm, inputs, dtype)
    # Float32 is at its rounding in both, where twice is a matter of luck.
    floor = 1e-6 if dtype in (torch.float32, AUTOCAST) else 0.0
    for name, a, b, x in zip(("sum", "norm", "dx", "ddelta", "dweight", "dbias"), ours, theirs, exact, strict=True):
        if a is None or b is None or x is None:
            assert a is b is x is None
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert error(a, x) <= max(2 * error(b, x), floor * float(x.norm())), name


EVERY_TYPE = [((3, 5, 48), True, layer_norm, dtype) for layer_norm in (True, False) for dtype in (*DTYPES, AUTOCAST)]
EVERY_SHAPE = [(shape, True, True, AUTOCAST) for shape in ((7, 100), (1, 1), (300, 8), (2, 1, 3, 1030),
                                                               (3, dispatch.MAX_WIDTH))]
ALONE = [((3, 5, 48), False, layer_norm, dtype) for layer_norm, dtype in ((True, AUTOCAST), (False, torch.bfloat16))]


@pytest.mark.parametrize(("shape", "with_delta", "layer_norm", "dtype"), [*EVERY_TYPE, *EVERY_SHAPE, *ALONE])
def test_held_to_float64(shape: tuple[int, ...], with_delta: bool, layer_norm: bool, dtype: torch.dtype | str) -> None:
    assert_held(make_inputs(shape, dtype, layer_norm, with_delta), dtype)


def test_programs_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a share of the weight's gradient, the last with less of it."""
    monkeypatch.setattr(norm, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(norm, "TILE", 128)
    for rows, layer_norm in ((1, True), (11, False), (41, True), (41, False)):
        assert_held(make_inputs((rows, 50), torch.bfloat16, layer_norm), torch.bfloat16)


def test_weights_and_streams_of_another_type() -> None:
    """Float32 weights of a model whose activations are short, without autocast; and a stream that is shorter than what
    is added."""
    for layer_norm in (True, False):
        x, delta, *weights = make_inputs((5, 48), torch.bfloat16, layer_norm)
        assert_held([x, delta, *(None if w is None else w.float() for w in weights)], torch.bfloat16)
    x, delta, *weights = make_inputs((5, 48), torch.float32, True)
    assert_held([x.bfloat16(), delta, *weights], torch.float32)


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_of_one_output(which: int, layer_norm: bool) -> None:
    """Of the stream alone, and of the norm alone as in a model's last. The gradient that comes in is one number,
    expanded, as from a sum."""
    def one(op):
        leaves = [x if x is None else x.detach().requires_grad_() for x in make_inputs((3, 48), AUTOCAST, layer_norm)]
        with torch.autocast("cpu", torch.bfloat16):
            out = op(*leaves)[which]
        return torch.autograd.grad(out, [x for x in leaves if x is not None],
                                   torch.ones((), dtype=out.dtype).expand(3, 48), allow_unused=True)

    for ours, theirs in zip(one(norm.add_norm), one(reference.add_norm), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype and error(ours, theirs.double()) <= 1e-2 * float(theirs.norm())


@pytest.mark.parametrize("name", ["layer_norm", "scale_norm"])
@pytest.mark.parametrize("dtype", [*DTYPES, AUTOCAST])
def test_the_definition_is_the_modules(name: str, dtype: torch.dtype | str) -> None:
    """To the bit; under autocast behind the cast that a linear layer begins with."""
    module = make_norm(model_config("flash", norm=name, d_model=48))
    weights = make_inputs((1, 48), dtype, name == "layer_norm")[2:]
    for parameter, value in zip(module.parameters(), weights, strict=False):
        parameter.data = value
    x, delta, *_ = make_inputs((5, 48), dtype, True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == AUTOCAST):
        total, normed = reference.add_norm(x, delta, *weights)
        product = random(7, 48, seed=5).to(total.dtype)
        assert torch.equal(total, x + delta) and total.dtype == x.dtype
        assert torch.equal(F.linear(normed, product), F.linear(module(total), product))
        if dtype == AUTOCAST:
            assert module(total).dtype == torch.float32 and normed.dtype == torch.bfloat16
        else:
            assert torch.equal(normed, module(total)) and normed.dtype == x.dtype
        alone = reference.add_norm(total, None, *weights)
        assert alone[0] is total and torch.equal(alone[1], normed)
