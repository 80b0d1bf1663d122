"""Weights of a bfloat16 model laid out once for products with few rows, as in decoding on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lineartime.model import LanguageModel


@contextmanager
def packed_weights(model: LanguageModel) -> Iterator[bool]:
    """Inside, each product of a bfloat16 model on a CPU reads weights in oneDNN's own layout; else every call lays them
    out anew, which takes longer than the product of one token. The numbers are the same.

    For inference: no gradients, and weights must not change inside, as a copy of them is read, which takes as much
    memory again. Gives whether weights are packed: not in another type, on another device or without oneDNN."""
    packed = [(module, module.weight, module.bias) for module in model.modules()
              if isinstance(module, nn.Linear) and type(module.weight.data) is Tensor]  # not quantised
    if not can_pack(model.embed.weight):
        packed = []
    for module, weight, bias in packed:
        module.forward = partial(multiply_packed, pack(weight), bias.detach())  # type: ignore[method-assign]
    if packed:
        head = partial(multiply_packed, pack(model.embed.weight), model.head_bias.detach())
        model.logits = head  # type: ignore[method-assign]
    try:
        yield bool(packed)
    finally:
        for module, _, _ in packed:
            del module.forward
        if packed:
            del model.logits


def can_pack(weight: Tensor) -> bool:
    """Whether a product with this weight is oneDNN's, in a layout of its own."""
    return (weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
    return packed


def multiply_packed(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """`F.linear`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product

