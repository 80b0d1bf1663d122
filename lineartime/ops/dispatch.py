"""Which implementation of an op runs: the PyTorch reference, or Triton kernels and for which inputs."""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lineartime.errors import UsageError

logger = logging.getLogger(__name__)

HAS_TRITON = importlib.util.find_spec("triton") is not None
CHUNK_SIZES = (128, 256, 512)
QUERY_KEY_DIM = 128
COLUMNS = 64
"""What `d_inner` is a multiple of in the attention kernels."""
MAX_WIDTH = 8192
"""The widest row of the norm's kernels."""


def unsupported_device(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel runs on a device and a dtype; None where they do."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"kernels are for CUDA, not for {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return "kernels need a GPU of compute capability 8.0"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"kernels have no {str(dtype).removeprefix('torch.')}"
    return None


def unsupported_norm(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why the norm's kernels do not take rows of this width; None where they do."""
    too_wide = None if width <= MAX_WIDTH else f"rows of {width} numbers, the norm's kernels have {MAX_WIDTH}"
    return unsupported_device(device, dtype) or too_wide


def unsupported_attention(uvz: Tensor, gamma_NS: Tensor, chunk_size: int | None) -> str | None:
    """Why the attention kernels do not take a projection uvz `[..., 2 E + S]`; None where they do.

    gamma_NS: the scales, whose last axis is S. chunk_size: None for attention over the whole row."""
    if reason := unsupported_device(uvz.device, uvz.dtype):
        return reason
    s = gamma_NS.shape[-1]
    e = (uvz.shape[-1] - s) // 2
    if s != QUERY_KEY_DIM:
        return f"query_key_dim {s}, kernels have {QUERY_KEY_DIM}"
    if e % COLUMNS:
        return f"d_inner {e}, kernels have multiples of {COLUMNS}"
    if chunk_size not in (None, *CHUNK_SIZES):
        return f"chunk_size {chunk_size}, kernels have {', '.join(map(str, CHUNK_SIZES))}"
    return None


def interpreted() -> bool:
    """Whether Triton runs kernels on the processor, as the tests have it."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def use_kernels(impl: str | None, device: torch.device, unsupported: Callable[..., str | None], *inputs: Any) -> bool:
    """Whether kernels run: with impl "triton", or with None on CUDA, where `unsupported(*inputs)` gives no reason.

    Raises UsageError for an unknown impl, and with the reason where "triton" is asked for. Where kernels are the
    default, the reason is logged once."""
    if impl not in (None, "reference", "triton"):
        raise UsageError("unknown implementation", str(impl), "it is reference or triton")
    if impl == "reference" or (impl is None and device.type != "cuda"):
        return False
    reason = unsupported(*inputs)
    if reason and impl == "triton":
        raise UsageError("kernels cannot run here", reason, 'take impl = "reference"')
    if reason and not torch.compiler.is_compiling():
        log_once(f"the PyTorch reference runs in place of kernels: {reason}")
    return not reason


@functools.cache
def log_once(line: str) -> None:
    logger.warning(line)


def refuse_forward_mode(*inputs: Tensor | None) -> None:
    """Raise RuntimeError where a derivative is carried forward (`torch.func.jvp`, `jacfwd`): a custom op would drop it
    without a word, and give zero. What `torch.func.grad` asks of a custom op torch itself refuses."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise RuntimeError("a kernel has no forward-mode derivative: use the function of this name in ops.reference")


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU has matrix units that take their operands from shared memory (compute capability 9.0)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
