"""The loss without the logits, against the loss with them: value, gradients, memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from lineartime.model.language_model import LanguageModel, token_losses
from lineartime.ops.cross_entropy import linear_cross_entropy
from tiny_models import FLASH, random_ids

EXACT = {torch.float64: 1e-13, torch.float32: 1e-6}  # what a float may be off, relative to the largest


def example(n, v, d, dtype=torch.float64, seed=0, scale=3.0):
    """x, W, b that want gradients, and targets; logits of about `scale`."""
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((n, d), (v, d), (v,)))
    targets = torch.randint(v, (n,), generator=generator)
    return *(t.to(dtype).requires_grad_() for t in (x, scale * w / d**0.5, b)), targets


def plain(x, w, b, targets):
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="none")


def gradients(losses, inputs, weights=None):
    """Of the sum, or with a weight for each loss."""
    total = losses.sum() if weights is None else (losses * weights).sum()
    return torch.autograd.grad(total, [t for t in inputs if t.requires_grad])


def wide(inputs):
    """The same numbers in float64, which the plain loss takes exactly enough."""
    return [t.detach().double().requires_grad_(t.requires_grad) for t in inputs[:3]]


def close(found, expected, tolerance):
    scale = max(expected.abs().max().item(), 1e-30) if expected.numel() else 1.0
    assert found.shape == expected.shape
    assert expected.numel() == 0 or (found.double() - expected).abs().max().item() <= tolerance * scale


@settings(max_examples=40)
@given(n=st.integers(0, 70), v=st.integers(1, 90), d=st.integers(1, 40), chunk=st.integers(1, 80),
       seed=st.integers(0, 99), dtype=st.sampled_from(list(EXACT)), weighted=st.booleans(),
       scale=st.sampled_from([3.0, 3e5]), wanted=st.sets(st.integers(0, 2), min_size=1))
def test_value_and_gradients_are_those_of_the_plain_loss(n, v, d, chunk, seed, dtype, weighted, scale, wanted):
    """Of logits far from zero too; and only what is wanted gets a gradient."""
    *inputs, targets = example(n, v, d, dtype, seed, scale)
    x, w, b = (t.requires_grad_(i in wanted) for i, t in enumerate(inputs))
    weights = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=dtype) if weighted else None
    losses = linear_cross_entropy(x, w, b, targets, chunk_tokens=chunk)
    expected = plain(*(same := wide([x, w, b])), targets)
    assert losses.dtype == dtype and losses.isfinite().all()
    close(losses, expected, EXACT[dtype])
    for found, gradient in zip(gradients(losses, [x, w, b], weights), gradients(expected, same, weights), strict=True):
        assert found.dtype == dtype
        close(found, gradient, EXACT[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_lose_nothing_but_their_own_rounding(dtype):
    """Losses are float32; the gradient of W is added up in float32, so chunks do not matter."""
    x, w, b, targets = example(200, 70, 30, dtype)
    expected = plain(*(same := wide([x, w, b])), targets)
    exact, rounding = gradients(expected, same), torch.finfo(dtype).eps
    for chunk in (200, 1):
        losses = linear_cross_entropy(x, w, b, targets, chunk_tokens=chunk)
        assert losses.dtype == torch.float32
        close(losses, expected, rounding)
        found = gradients(losses, [x, w, b])
        assert [g.dtype for g in found] == [dtype] * 3
        for gradient, true in zip(found, exact, strict=True):
            close(gradient, true, 2 * rounding)


def test_a_mean_in_float16_is_scaled_before_it_is_rounded():
    """The sum of so many gradients exceeds float16."""
    given = [t.half().requires_grad_() for t in (torch.ones(200_000, 1), torch.zeros(2, 1), torch.zeros(2))]
    found = torch.autograd.grad(linear_cross_entropy(*given, torch.ones(200_000).long()).mean(), given)
    assert [g[:2].flatten().tolist() for g in found[1:]] == [[0.5, -0.5]] * 2


@pytest.mark.parametrize("weighted", [False, True])
def test_under_autocast_products_are_bfloat16_and_the_rest_is_not(weighted):
    x, w, b, targets = example(96, 200, 32, torch.float32)
    weights = torch.rand(96) if weighted else None
    expected = plain(*(same := wide([x, w, b])), targets)
    exact = gradients(expected, same, weights)
    with torch.autocast("cpu", torch.bfloat16):
        usual, losses = plain(x, w, b, targets), linear_cross_entropy(x, w, b, targets, chunk_tokens=7)
    assert losses.dtype == torch.float32 and torch.allclose(losses, usual, rtol=0, atol=1e-5)
    for found, theirs, true in zip(gradients(losses, [x, w, b], weights), gradients(usual, [x, w, b], weights), exact,
                                   strict=True):
        assert found.dtype == torch.float32
        error, usual_error = ((g - true).norm() / true.norm() for g in (found, theirs))
        assert 1e-5 < error < 1.2 * usual_error < 0.02
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        close(linear_cross_entropy(*same, targets), expected, 1e-13)


def test_backward_twice_is_twice_the_same():
    inputs, weights = example(9, 6, 5), torch.tensor([1, 2, 3, 4, 5, 4, 3, 2, 1], dtype=torch.float64)
    for reduce in (Tensor.sum, Tensor.mean, lambda losses: losses @ weights, lambda losses: losses @ (0 * weights + 2)):
        total = reduce(linear_cross_entropy(*inputs, chunk_tokens=4))
        first = torch.autograd.grad(total, inputs[:3], retain_graph=True)
        kept = [g.clone() for g in first]
        second = torch.autograd.grad(total, inputs[:3], retain_graph=True)
        expected = torch.autograd.grad(reduce(plain(*inputs)), inputs[:3])
        for a, b, c, wanted in zip(first, kept, second, expected, strict=True):
            assert torch.equal(a, b)
            close(b, wanted, 1e-13)
            close(c, wanted, 1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch itself calls it for forward mode
def test_transforms_of_torch_func():
    """Also where the gradient of the losses is constant, as that of a mean is."""
    *inputs, targets = example(9, 6, 5)
    x, w, b = (t.detach() for t in inputs)
    for reduce in (Tensor.mean, lambda losses: losses.square().sum()):
        ours, theirs = (torch.func.hessian(lambda b, op=op, reduce=reduce: reduce(op(x, w, b, targets)))(b)
                        for op in (linear_cross_entropy, plain))
        close(ours, theirs, 1e-13)
    with forward_ad.dual_level():
        ours, theirs = (forward_ad.unpack_dual(op(x, w, forward_ad.make_dual(b, b), targets)).tangent
                        for op in (linear_cross_entropy, plain))
    close(ours, theirs, 1e-13)


def test_targets_outside_the_vocabulary_are_refused():
    x, w, b, targets = example(6, 5, 4)
    for target in (5, -1, -100):
        targets[3] = target
        with pytest.raises(RuntimeError, match="out of bounds"):
            linear_cross_entropy(x, w, b, targets)


def test_without_a_gradient_nothing_is_kept_for_one(monkeypatch):
    x, w, b, targets = example(30, 12, 8)
    expected = linear_cross_entropy(x, w, b, targets, chunk_tokens=7)
    monkeypatch.setattr(torch.Tensor, "scatter_", None)  # what the gradient begins with
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            losses = linear_cross_entropy(x, w, b, targets, chunk_tokens=7)
        assert torch.equal(losses, expected) and not losses.requires_grad
    assert torch.equal(linear_cross_entropy(*(t.detach() for t in (x, w, b)), targets, chunk_tokens=7), expected)
    with pytest.raises(TypeError):
        linear_cross_entropy(x, w, b, targets)


def test_inside_compiled_code():
    def loss(x, w, b, targets):
        return linear_cross_entropy(x.tanh(), w, b, targets, chunk_tokens=7)

    *inputs, targets = example(30, 12, 8)
    weights = torch.rand(30, dtype=torch.float64)
    found, expected = (gradients(each(*inputs, targets), inputs, weights)
                       for each in (torch.compile(loss, backend="aot_eager"), loss))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Made(TorchDispatchMode):
    """The sizes of the tensors that operations make."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in (*args, *(kwargs or {}).values()) if torch.is_tensor(t)}
        self.sizes += [t.numel() for t in (result if isinstance(result, tuple | list) else [result])
                       if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in given]
        return result


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_logits_are_never_in_memory(autocast, weighted):
    n, v, d, chunk = 640, 50, 8, 32

    def made(loss, n):
        x, w, b, targets = example(n, v, d, torch.float32)
        with Made() as seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            gradients(loss(x, w, b, targets), [x, w, b], torch.rand(n) if weighted else None)
        return seen.sizes

    def ours(*inputs):
        return linear_cross_entropy(*inputs, chunk_tokens=chunk)

    assert max(made(plain, n)) == n * v
    assert max(made(ours, n)) == n * d  # x's gradient
    # However many chunks there are, they share their logits.
    n_logits = [made(ours, n).count(chunk * v) for n in (chunk, n, 2 * n)]
    assert n_logits == [(1 + autocast) * (1 + weighted)] * 3


def test_a_model_makes_no_logits_for_its_losses():
    """Training and evaluation; against the model's logits."""
    model = LanguageModel(FLASH)
    ids_BT = random_ids(8, 25)
    expected = F.cross_entropy(model(ids_BT[:, :-1]).flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    calls = []
    model.logits = lambda *_: calls.append(1)
    losses = token_losses(model, ids_BT)
    assert losses.shape == (8, 24) and not calls
    close(losses.detach().flatten(), expected.detach().double(), 1e-6)
