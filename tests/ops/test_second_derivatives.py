"""Derivatives of derivatives: the default gives the reference's numbers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_law import random
from lineartime import ops
from lineartime.ops import reference
from lineartime.ops.cross_entropy import linear_cross_entropy
from tiny_models import CONFIGS, OWN_GRID, random_ids, random_model, with_end

B, T, E, S, C = 2, 10, 6, 4, 4
SIN, COS = reference.rotary(torch.arange(T)[None], S, torch.float64)
IDS = torch.tensor([[0] * 3 + [1] * 6 + [2], [0] * 7 + [-1] * 3])
TARGETS = torch.tensor([3, 0, 6, 2, 2])


def made(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [random(*shape, seed=i).double() / 2 for i, shape in enumerate(shapes)]


def of_chunks(impl: str | None, uvz: Tensor, gamma: Tensor, beta: Tensor, w: Tensor, **how: object) -> Tensor:
    made_by = reference.HeadsFromZ(gamma, beta, SIN[:, : uvz.shape[1]], COS[:, : uvz.shape[1]])
    return ops.gated_chunk_attention(uvz, made_by, w, chunk_size=C, causal=True, impl=impl, **how)


Z = made((B, T, 2 * E + S), (4, S), (4, S), (2 * C - 1,), (B, S, E))
HEADS = made((B, T, 2 * E), (B, T, S), (B, T, S), (2 * C - 1,), (B, T))
OPS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "chunks": (of_chunks, Z[:4]),
    "chunks, documents": (partial(of_chunks, segment_ids_BT=IDS, pooling="sum"), Z[:4]),
    "one tensor as two heads": (lambda impl, uv, q, k, w: ops.gated_chunk_attention(
        uv, (q, k, q, k), w, chunk_size=C, causal=True, impl=impl), HEADS[:4]),
    "heads, written": (lambda impl, uv, q, k, w, gate: ops.gated_chunk_attention(
        uv, (q, k, q, k * gate.sigmoid()[..., None]), w, chunk_size=C, causal=True, pooling="written",
        gate_BT=gate.sigmoid(), impl=impl), HEADS),
    "carried": (lambda impl, uvz, gamma, beta, w, kv: of_chunks(
        impl, uvz[:, :8], gamma, beta, w, exchange=reference.CarriedState(kv, torch.full((B,), 5.0))), Z),
    "loss": (lambda impl, x, weight, bias: linear_cross_entropy(x, weight, bias, TARGETS, chunk_tokens=2)
             if impl is None else F.cross_entropy(F.linear(x, weight, bias), TARGETS, reduction="none"),
             made((5, 6), (7, 6), (7,)))}


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        error, size = (float(x.detach().norm()) for x in (a - b, b))
        assert size > 0 and error <= 1e-12 * size


@pytest.mark.parametrize("name", OPS)
def test_a_gradient_penalty_of_an_op(name: str) -> None:
    """`autograd.grad` of the penalty, `backward`, and finite differences."""
    op, inputs = OPS[name]
    found: dict[str | None, list[Tensor]] = {}
    for impl in (None, "reference"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(op(impl, *leaves).square().sum(), leaves, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(penalty, leaves, retain_graph=True)
        penalty.backward()
        found[impl] = [*first, *second, *(x.grad for x in leaves)]
    assert_equal(found[None], found["reference"])
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(lambda *x: op(None, *x), leaves, random(*op(None, *leaves).shape, seed=7)
                                        .double(), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("name", OPS)
def test_a_batch_of_gradients_of_an_op(name: str) -> None:
    """`is_grads_batched`, and `jacobian(vectorize=True)`, also of a jacobian."""
    op, inputs = OPS[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = op(None, *leaves)
    given = random(3, *out.shape, seed=8).double()
    each = [torch.autograd.grad(out, leaves, g, retain_graph=True) for g in given]
    together = torch.autograd.grad(out, leaves, given, is_grads_batched=True)
    assert_equal(list(together), [torch.stack(gradients) for gradients in zip(*each, strict=True)])
    ours, theirs = (torch.autograd.functional.hessian(lambda w, impl=impl: op(impl, *inputs[:-1], w).square().sum(),
                                                      inputs[-1], vectorize=impl is None)
                    for impl in (None, "reference"))
    assert_equal([ours], [theirs])


@pytest.mark.parametrize("name", ["flash", "flash+", "flash-quad", "transformer++", "flash, own grid"])
def test_hessian_and_maml_of_a_model(name: str) -> None:
    """The Hessian of a bias and of a scale; the gradient of the loss after a step of descent."""
    model, ids = random_model(with_end((CONFIGS | OWN_GRID)[name], 3)), random_ids(2, 11)
    parameters = dict(model.named_parameters())

    def loss_at(impl: str | None, **changed: Tensor) -> Tensor:
        """By the model's own loss, which by default is `linear_cross_entropy`; or by logits."""
        model.set_impl(impl)
        given, more = {**parameters, **changed}, {"targets": ids[:, 1:]} if impl is None else {}
        out = torch.func.functional_call(model, given, (ids[:, :-1],), more)
        return out.mean() if impl is None else F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())

    scale = next(name for name in parameters if name.endswith(("gamma", "norm.weight")))
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused softmax attention has no second derivative
        for key in ("head_bias", scale):
            ours, vectorized, theirs = [torch.autograd.functional.hessian(
                lambda x, impl=impl, key=key: loss_at(impl, **{key: x}), parameters[key].detach(), vectorize=vectorize)
                for impl, vectorize in ((None, False), (None, True), ("reference", False))]
            assert_equal([ours, vectorized], [theirs, theirs])
        by_func = torch.func.grad(lambda x: loss_at(None, head_bias=x))(parameters["head_bias"].detach())
        assert_equal([by_func], [torch.autograd.grad(loss_at(None), parameters["head_bias"])[0]])
        outer = []
        for impl in (None, "reference"):
            first = torch.autograd.grad(loss_at(impl), list(parameters.values()), create_graph=True)
            moved = {key: p - 0.3 * g for (key, p), g in zip(parameters.items(), first, strict=True)}
            outer.append(torch.autograd.grad(loss_at(impl, **moved), list(parameters.values())))
        assert_equal(*map(list, outer))
