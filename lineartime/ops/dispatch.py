"""Whether Triton kernels, `ops.windows` or the PyTorch reference run, and for which inputs.

`ops.windows` and `ops.cross_entropy` compute gradients in place, which autograd cannot follow. So
their backward passes ask `must_be_followed`, and then return `reference_gradients`: the same
numbers, at the time and memory of the reference."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lineartime.base.errors import UsageError
from lineartime.ops import compiled
from lineartime.ops.dtypes import matmul_dtype
from lineartime.ops.reference import Heads, HeadsFromZ

logger = logging.getLogger(__name__)
log_once = functools.cache(logger.warning)

HAS_TRITON = importlib.util.find_spec("triton") is not None
CHUNK_SIZES = (128, 256, 512)
QUERY_KEY_DIM = 128
COLUMNS = 64  # the attention kernels need `d_inner` to be a multiple of this
MAX_ROWS, MAX_TOKENS, MAX_COLUMNS = 2**16 - 1, 2**24 - 1, 2**22 - 1
"""The most rows of a batch, tokens of a row and columns of a projection in attention kernels. Rows
are programs of a grid's second axis; a tile's offsets have 32 bits."""
MUCH_SHARED_KIB = 227  # shared memory that a program can have on an H100 and on a B200; others have 99 to 163 KiB

TileClass = Literal["small", "hopper", "large"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


def unsupported_device(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why no kernel supports a device and a dtype; None if kernels do."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"kernels are for CUDA, not for {device.type}"
    if device.type == "cuda" and torch.version.hip is not None:
        return "kernels are for CUDA, not for ROCm"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return "kernels need a GPU of compute capability 8.0"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"kernels have no {str(dtype).removeprefix('torch.')}"
    return None


def unsupported_rows(uvz: Tensor, heads: HeadsFromZ) -> str | None:
    """Why no kernel attends over whole rows of a projection `[B, T, 2 E + S]`; None if one does."""
    s = heads.gamma_NS.shape[-1]
    width = None if s == QUERY_KEY_DIM else f"query_key_dim {s}, kernels have {QUERY_KEY_DIM}"
    return unsupported_sizes(uvz, (uvz.shape[-1] - s) // 2, None, width)


def unsupported_chunks(uvz: Tensor, heads: Heads, chunk_size: int, pooling: str, gated: bool = True) -> str | None:
    """Why no kernel runs mixed chunk attention; None if one does. PyTorch makes narrow heads. Not
    gated: of values alone."""
    s, other = heads[0].shape[-1], None
    if s > QUERY_KEY_DIM:
        other = f"query_key_dim {s}, kernels have at most {QUERY_KEY_DIM}"
    elif pooling == "written" and uvz.dtype == torch.float16:
        other = 'sums of chunk_pooling "written" do not fit float16'
    e = (uvz.shape[-1] - s * isinstance(heads, HeadsFromZ)) // (2 if gated else 1)
    return unsupported_sizes(uvz, e, chunk_size, other)


def unsupported_step(k_BCS: Tensor, v_BCE: Tensor) -> str | None:
    """Why no kernel makes a step with these keys and values of open chunks; None if one does."""
    s, (_, chunk_size, e) = k_BCS.shape[-1], v_BCE.shape
    width = None if s == QUERY_KEY_DIM else f"keys of width {s}, a decode step in a kernel has {QUERY_KEY_DIM}"
    return unsupported_sizes(v_BCE, e, chunk_size, width)


def unsupported_in_c(model: Any, x: Tensor) -> str | None:
    """Why no step of a language model, whose embeddings are x, runs in C; None if it may."""
    if is_watched():
        return "steps in C are eager"
    c = model.config
    if (c.layers or c.ffn != "gau" or c.attn_type != "mixed_chunk" or not c.attends_as_flash or c.n_heads > 1
            or c.token_shift or (c.dropout and model.training) or any(layer.impl for layer in model.layers)):
        return "layers of another kind than FLASH's, several heads, token_shift, dropout or a chosen impl"
    if not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16) or torch.is_autocast_enabled("cpu"):
        return "steps in C are for float32 and bfloat16 on a processor, without autocast"
    if is_transformed(x) or (torch.is_grad_enabled() and any(p.requires_grad for p in (x, *model.parameters()))):
        return "steps in C have no derivative"
    return None if compiled.library() is not None else compiled.in_words()


def unsupported_sizes(uvz: Tensor, e: int, chunk_size: int | None, other: str | None) -> str | None:
    """The first reason of the device, the `other` one, and the sizes of a projection; or None."""
    if reason := unsupported_device(uvz.device, uvz.dtype) or other:
        return reason
    if e % COLUMNS:
        return f"d_inner {e}, kernels have multiples of {COLUMNS}"
    if chunk_size not in (None, *CHUNK_SIZES):
        return f"chunk_size {chunk_size}, kernels have {', '.join(map(str, CHUNK_SIZES))}"
    n_rows, *n_tokens, n_columns = uvz.shape
    for what, count, limit in (("rows", n_rows, MAX_ROWS), ("tokens in a row", max(n_tokens, default=0), MAX_TOKENS),
                               ("columns", n_columns, MAX_COLUMNS)):
        if count > limit:
            return f"{count:,} {what}, kernels have {limit:,}"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU, as in the tests."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def use_kernels(impl: str | None, device: torch.device, unsupported: Callable[..., str | None], *inputs: Any) -> bool:
    """Whether kernels run: with "triton", or None on CUDA if `unsupported(*inputs)` is None.

    Raises UsageError for an unknown impl, and for "triton" if the inputs are not supported. On CUDA
    it is logged once."""
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


def use_windows(impl: str | None, shared: bool, x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether `ops.windows` runs in place of the reference: with impl None, eager on a processor,
    for whole rows, but not in float16 or under an autocast that changes x's dtype. Not in
    `torch.func` or forward mode, not where PyTorch watches each op, not without a compiler, and not
    for subclasses of tensors, whose memory may be elsewhere."""
    if impl is not None or shared or is_watched() or x.device.type != "cpu":
        return False
    if x.numel() == 0 or x.dtype == torch.float16 or matmul_dtype(x) != x.dtype or type(x) is not Tensor:
        return False
    return not is_transformed(x, *parameters) and compiled.library() is not None


def is_watched() -> bool:
    """Whether PyTorch compiles, traces, or hands each op to a mode, as for selective checkpoints:
    none sees what C writes."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0


def is_transformed(*inputs: Tensor | None) -> bool:
    """Whether `torch.func` or forward mode is at work, in which an op takes its reference."""
    return torch._C._are_functorch_transforms_active() or have_tangent(*inputs)


def have_tangent(*inputs: Tensor | None) -> bool:
    """Whether forward-mode differentiation carries a tangent of any of the inputs."""
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs)


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


def refuse_forward_mode(*inputs: Tensor | None) -> None:
    """Raise RuntimeError in forward-mode differentiation (`torch.func.jvp`, `jacfwd`): a custom op
    would drop the tangent, and the derivative would be zero."""
    if not torch.compiler.is_compiling() and have_tangent(*inputs):
        raise RuntimeError('a kernel has no forward-mode derivative: take impl = "reference"')


def tile_class(device: torch.device) -> TileClass:
    """Which tiles a device takes: "small" where a program has less than MUCH_SHARED_KIB of shared
    memory, "hopper" for compute capability 9.0, else "large", also on a CPU, where Triton's
    interpreter runs kernels. The device is asked for its memory, as some of 12.0 have less than
    others."""
    if device.type != "cuda":
        return "large"
    properties: Any = torch.cuda.get_device_properties(device)  # its stub has not all of it
    if properties.shared_memory_per_block_optin < MUCH_SHARED_KIB * 1024:
        return "small"
    return "hopper" if properties.major == 9 else "large"


def on_own_device(launch: Callable[Args, Result]) -> Callable[Args, Result]:
    """A function that launches kernels, with the device of its first tensor as the current one:
    Triton launches on the current device, wherever the tensors are."""
    @functools.wraps(launch)
    def guarded(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with torch.cuda.device_of(args[0]):
            return launch(*args, **kwargs)

    return guarded


def schema_of(inputs: type) -> str:
    """The fields of a NamedTuple as the arguments in an op's schema."""
    names = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool"}
    return ", ".join(f"{names[kind]} {name}" for name, kind in get_type_hints(inputs).items())
