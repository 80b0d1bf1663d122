"""The dtypes of sums and matmuls."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x`, converted to float32 from bfloat16 or float16; the dtype of sums, norms and scores."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a dtype: itself if it has that one, where `x.to` is an op that does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def float16_as_float32(x: Tensor) -> Tensor:
    """`x`, converted to float32 from float16; bfloat16, which has float32's range, stays."""
    return as_dtype(x, wide_dtype(x))


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of results that may exceed 65,504: float32 for float16, else that of `x`."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul with `x`: autocast's if it is on, else its own; float64 stays."""
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def autocast_off(x: Tensor) -> torch.autocast:
    """A context without autocast on the device of `x`. The meta device has none."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
