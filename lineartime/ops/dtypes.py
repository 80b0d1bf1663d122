"""The types in which sums and matmuls are taken."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 where its type is shorter; sums, norms and scores are taken in this type."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The type of a matmul with `x`: that of autocast where it is on, else the type of `x`."""
    has_autocast = torch.amp.is_autocast_available(x.device.type) and x.dtype != torch.float64
    if has_autocast and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
