"""What kernels can, and what none of them does."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


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
