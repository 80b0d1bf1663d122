"""What a backward pass of our own does when it is differentiated itself: it calls the reference.

`ops.windows` and `ops.cross_entropy` compute gradients in place, which autograd cannot follow. So
their backward passes ask `must_be_followed`, and then return `reference_gradients`: the same
numbers, at the time and memory of the reference."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def must_be_followed(dout: Tensor) -> bool:
    """Whether autograd must be able to follow the backward pass that is running, whose incoming
    gradient is dout: with `create_graph=True`, and for a batch of gradients at once
    (`is_grads_batched`, `jacobian(vectorize=True)`)."""
    batched = torch._C._functorch.is_legacy_batchedtensor(dout) or torch._C._are_functorch_transforms_active()
    return torch.is_grad_enabled() or batched


def reference_gradients(reference: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor,
                        wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of `reference(*inputs)` by autograd: one for each input, None where it is not
    wanted. They are functions of the inputs and of dout, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [x.view_as(x) for x in inputs]  # an input may be given twice, or be made from another one
        found = torch.autograd.grad(reference(*own), [x for x, want in zip(own, wanted, strict=True) if want], dout,
                                    create_graph=again)
    gradients = iter(found)
    return [next(gradients) if want else None for want in wanted]
