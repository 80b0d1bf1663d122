"""The loss over a large vocabulary, several ways, and a count of the memory that it takes where it does not fit."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.dtypes import at_least_float32

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Losses of the tokens or their sum, of x `[N, D]`, the head's weight `[V, D]`, its bias `[V]` and targets `[N]`."""


def plain(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """The loss with all logits in memory."""
    return F.cross_entropy(at_least_float32(F.linear(x_ND, weight_VD, bias_V)), targets_N, reduction="none")


def of_torch(reduction: str) -> Loss:
    """`F.linear_cross_entropy` by chunks of its own choice. Autocast does not reach it, so inputs are cast before."""
    def loss(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
        device = x_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
        x_ND, weight_VD, bias_V = (t.to(dtype) for t in (x_ND, weight_VD, bias_V))
        options = torch.nn.LinearCrossEntropyOptions()
        return at_least_float32(F.linear_cross_entropy(x_ND, weight_VD, targets_N, linear_bias=bias_V,
                                                       reduction=reduction, options=options))
    return loss


def losses() -> dict[str, Loss]:
    """By name; PyTorch's own where it has one."""
    found: dict[str, Loss] = {"plain": plain, "by chunks": linear_cross_entropy}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found |= {"torch": of_torch("none"), "torch sum": of_torch("sum")}
    return found


def head_inputs(n_tokens: int, vocab_size: int, d_model: int) -> dict[str, Tensor]:
    """Of the head and the loss: logits are of about 1."""
    return {"x": torch.randn(n_tokens, d_model), "weight": torch.randn(vocab_size, d_model) / d_model**0.5,
            "bias": torch.randn(vocab_size), "targets": torch.randint(vocab_size, (n_tokens,))}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have made and that still live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if id(storage) not in given and storage not in self.seen:
                    self.seen.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.forget, storage.nbytes())
        self.most = max(self.most, self.live)
        return result

    def forget(self, n_bytes: int) -> None:
        self.live -= n_bytes


def counted_bytes(name: str, sizes: Mapping[str, int], precision: str) -> int | None:
    """The most bytes that tensors take in one forward and backward pass of a loss, inputs left out, without a number
    computed; None for PyTorch's own, which does not show what it does. sizes: arguments of `head_inputs`."""
    if name.startswith("torch"):
        return None
    with FakeTensorMode():
        x_ND, weight_VD, bias_V, targets_N = head_inputs(**sizes).values()
        wanted = [t.requires_grad_() for t in (x_ND, weight_VD, bias_V)]
        with LiveBytes() as count, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            torch.autograd.grad(losses()[name](x_ND, weight_VD, bias_V, targets_N).sum(), wanted)
    return count.most
