"""Weights of a bfloat16 model packed once into oneDNN's layout, for fast decoding on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lineartime.model.language_model import LanguageModel


@contextmanager
def packed_weights(model: LanguageModel) -> Iterator[bool]:
    """Inside it, linear layers of a bfloat16 model on a CPU read weights packed in oneDNN's layout. Without it every
    call packs them again, which takes longer than the matmul of one token. The results are the same.

    For inference: no gradients. The packed weights are a copy, which doubles the memory and does not follow changes of
    the weights. Yields whether it has packed any: not for another dtype or device, nor without oneDNN."""
    packed: list[tuple[nn.Module, str]] = []

    def replace(module: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
        # Another thread may have packed it, and a library or a subclass may have its own.
        if name not in vars(module) and getattr(type(module), name) in (nn.Linear.forward, LanguageModel.logits):
            packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)  # a copy in oneDNN's layout
            multiply = partial(multiply_packed, packed_weight, None if bias is None else bias.detach())
            setattr(module, name, multiply)
            packed.append((module, name))

    try:
        if can_pack(model.embed.weight):
            for module in model.modules():
                if isinstance(module, nn.Linear) and type(module.weight.data) is Tensor:  # not quantised
                    replace(module, "forward", module.weight, module.bias)
            replace(model, "logits", model.embed.weight, model.head_bias)
        yield bool(packed)
    finally:
        for module, name in packed:
            vars(module).pop(name, None)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight: bfloat16 on a CPU that oneDNN supports."""
    return (weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiply_packed(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """`F.linear` with a packed weight."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product

