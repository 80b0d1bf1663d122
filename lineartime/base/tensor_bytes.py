"""The bytes of tensors, and their hash."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on any device."""
    whole = tensor.detach().cpu().contiguous()  # one number is contiguous at any stride, but `view` needs stride 1
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def tensors_sha256(named: Mapping[str, Tensor], text: str = "") -> str:
    """The hash of a text and of tensors on any device, in their order."""
    digest = hashlib.sha256(text.encode())
    for tensor in named.values():
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
