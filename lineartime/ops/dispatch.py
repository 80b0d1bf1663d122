"""Where kernels run, and what none of them does."""

import functools
import importlib.util
import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lineartime.errors import UsageError

HAS_TRITON = importlib.util.find_spec("triton") is not None
CHUNK_SIZES = (128, 256, 512)
QUERY_KEY_DIM = 128
COLUMNS = 64
"""What `d_inner` is a multiple of."""
MAX_WIDTH = 8192
"""Of the rows that the norm takes."""


def device_refuses(device: torch.device, dtype: torch.dtype) -> str:
    """What keeps every kernel from a device and a type, in words; "" for nothing."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"kernels are for CUDA, not for {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return "kernels need a GPU of compute capability 8.0"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"kernels have no {str(dtype).removeprefix('torch.')}"
    return ""


def norm_refuses(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """`device_refuses`, or what keeps the norm's kernels from rows of this width."""
    too_wide = "" if width <= MAX_WIDTH else f"rows of {width} numbers, the norm's kernels have {MAX_WIDTH}"
    return device_refuses(device, dtype) or too_wide


def kernels_refuse(device: torch.device, dtype: torch.dtype, s: int, e: int, chunk_size: int | None) -> str:
    """`device_refuses`, or what keeps the attention kernels from these sizes.

    chunk_size: None for attention over the whole row."""
    if refusal := device_refuses(device, dtype):
        return refusal
    if s != QUERY_KEY_DIM:
        return f"query_key_dim {s}, kernels have {QUERY_KEY_DIM}"
    if e % COLUMNS:
        return f"d_inner {e}, kernels have multiples of {COLUMNS}"
    if chunk_size not in (None, *CHUNK_SIZES):
        return f"chunk_size {chunk_size}, kernels have {', '.join(map(str, CHUNK_SIZES))}"
    return ""


def interpreted() -> bool:
    """Whether Triton runs kernels on the processor, as the tests have it."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def want_kernels(impl: str | None, device: torch.device) -> bool:
    """Whether kernels are to run if they can. impl: "triton" or "reference"; by default kernels on CUDA."""
    if impl not in (None, "reference", "triton"):
        raise UsageError("unknown implementation", str(impl), "it is reference or triton")
    return impl == "triton" or (impl is None and device.type == "cuda")


def use_kernels(impl: str | None, device: torch.device, refusal: str) -> bool:
    """Whether to run kernels: where they are wanted and nothing is refused.

    Raises UsageError for kernels that are asked for and cannot be. Where they are not asked for, one line says so."""
    wanted = want_kernels(impl, device)
    if impl == "triton" and refusal:
        raise UsageError("kernels cannot run here", refusal, 'take impl = "reference"')
    if wanted and refusal:
        say_once(refusal)
    return wanted and not refusal


@functools.cache
def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say_once(refusal: str) -> None:
    """One line for each reason why definitions run in place of kernels."""
    if not torch.compiler.is_compiling():
        say(f"note: attention runs as its definition, not in kernels: {refusal}")


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
