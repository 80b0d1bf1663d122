"""The attention ops and the loss, one function each. `reference` and `baselines` have their definitions.

Four have kernels too, under the same signatures. For these, impl is "reference" or "triton"; by default kernels run on
CUDA, where they can, and what keeps them from it is told once. `limits` says what they can."""

from typing import Any

from torch import Tensor

from lineartime.ops import reference
from lineartime.ops.baselines import performer_attention, rowmajor_axial_attention
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.dispatch import HAS_TRITON, kernels_refuse, norm_refuses, use_kernels
from lineartime.ops.reference import first_to_all_attention, mixed_chunk_attention, quadratic_attention

if HAS_TRITON:
    from lineartime.ops import decode_step, mixed_chunk, norm, quadratic

__all__ = ["add_norm", "chunk_decode_step", "first_to_all_attention", "gated_chunk_attention",
           "gated_quadratic_attention", "linear_cross_entropy", "mixed_chunk_attention", "performer_attention",
           "quadratic_attention", "rowmajor_axial_attention"]


def gated_chunk_attention(uvz_BTF: Tensor, gamma_4S: Tensor, *inputs: Tensor, chunk_size: int, impl: str | None = None,
                          **settings: Any) -> Tensor:
    """`reference.gated_chunk_attention`, or the same in kernels."""
    refusal = refused(uvz_BTF, gamma_4S, chunk_size)
    module = mixed_chunk if use_kernels(impl, uvz_BTF.device, refusal) else reference
    return module.gated_chunk_attention(uvz_BTF, gamma_4S, *inputs, chunk_size=chunk_size, **settings)


def gated_quadratic_attention(uvz_BTF: Tensor, gamma_2S: Tensor, *inputs: Tensor, impl: str | None = None,
                              **settings: Any) -> Tensor:
    """`reference.gated_quadratic_attention`, or the same in kernels."""
    module = quadratic if use_kernels(impl, uvz_BTF.device, refused(uvz_BTF, gamma_2S, None)) else reference
    return module.gated_quadratic_attention(uvz_BTF, gamma_2S, *inputs, **settings)


def chunk_decode_step(uvz_BF: Tensor, gamma_4S: Tensor, beta_4S: Tensor, sin_BR: Tensor, cos_BR: Tensor,
                      bias_C: Tensor, k_quad_BCS: Tensor, *inputs: Tensor, impl: str | None = None) -> Tensor:
    """`reference.chunk_decode_step`, or the same in a kernel."""
    refusal = refused(uvz_BF, gamma_4S, k_quad_BCS.shape[1])
    module = decode_step if use_kernels(impl, uvz_BF.device, refusal) else reference
    return module.chunk_decode_step(uvz_BF, gamma_4S, beta_4S, sin_BR, cos_BR, bias_C, k_quad_BCS, *inputs)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, *, eps: float = 1e-5,
             impl: str | None = None) -> tuple[Tensor, Tensor]:
    """`reference.add_norm`, or the same in kernels."""
    module = norm if use_kernels(impl, x.device, norm_refuses(x.device, x.dtype, x.shape[-1])) else reference
    return module.add_norm(x, delta, weight, bias, eps=eps)


def refused(uvz: Tensor, gamma_NS: Tensor, chunk_size: int | None) -> str:
    """What keeps the attention kernels from these inputs; "" for nothing."""
    s = gamma_NS.shape[-1]
    return kernels_refuse(uvz.device, uvz.dtype, s, (uvz.shape[-1] - s) // 2, chunk_size)
