"""Linear cross-entropy: head and loss in one op, with logits of one chunk of tokens at a time."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.dispatch import is_transformed, must_be_followed, reference_gradients
from lineartime.ops.dtypes import at_least_float32, autocast_off, matmul_dtype

BLOCK_LOGITS = 2**18  # logits whose softmax is made at once on a processor: as many as stay in its cache


@torch.compiler.disable
def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor, *,
                         chunk_tokens: int | None = None) -> Tensor:
    """-ln p of each target, with p = softmax(x W^T + b): losses_N in nats, in float32 at least.

    Equal to `F.cross_entropy(F.linear(x, W, b), targets, reduction="none")` in value and gradients,
    with logits in memory for `chunk_tokens` tokens at a time. The dtype of matmuls is autocast's if
    it is on, else that of x; logarithms, sums and the gradients of W and b are in float32 at least.

    targets_N: integers below V. chunk_tokens: by default 1024 on a CPU, whatever the vocabulary
    (fewer under-use the matmul, more overflow the cache), and on a GPU 2^27 / V but at least 1024,
    to limit launches.

    Losses are nearly always summed or averaged. So the forward pass also computes the gradients of
    the plain sum, and a backward pass with equal weights of all losses only scales them. A backward
    pass with other weights, or a second backward pass, recomputes the logits. `torch.compile` does
    not trace into this op. For a second derivative, and in `torch.func`, all logits are in memory
    at once.

    PyTorch from 2.13 has `F.linear_cross_entropy`, which cannot replace this op: losses per token
    cost another matmul, and it knows no autocast."""
    dtype = matmul_dtype(x_ND)
    if chunk_tokens is None:
        chunk_tokens = 1024 if x_ND.device.type == "cpu" else max(2**27 // len(weight_VD), 1024)
    if is_transformed(x_ND, weight_VD, bias_V):
        return all_at_once(x_ND, weight_VD, bias_V, targets_N, dtype)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x_ND, weight_VD, bias_V)):
        return LinearCrossEntropy.apply(x_ND, weight_VD, bias_V, targets_N, dtype, chunk_tokens)
    return chunk_by_chunk(x_ND, weight_VD, bias_V, targets_N, dtype, chunk_tokens)[0]


def all_at_once(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference of `linear_cross_entropy`, with matmuls in `dtype`."""
    with autocast_off(x_ND):
        logits_NV = F.linear(x_ND.to(dtype), weight_VD.to(dtype), bias_V.to(dtype))
        return F.cross_entropy(at_least_float32(logits_NV), targets_N, reduction="none")


class LinearCrossEntropy(torch.autograd.Function):
    """`linear_cross_entropy` with gradients of x, W and b."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor, dtype: torch.dtype,
                chunk_tokens: int) -> Tensor:
        ctx.save_for_backward(x_ND, weight_VD, bias_V, targets_N)
        ctx.how = dtype, chunk_tokens, ctx.needs_input_grad[:3]
        losses_N, *ctx.gradients_of_sum = chunk_by_chunk(x_ND, weight_VD, bias_V, targets_N, *ctx.how)
        return losses_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
        (dtype, chunk, wanted), gradients = ctx.how, ctx.gradients_of_sum
        if must_be_followed(gradient_N):
            definition = partial(all_at_once, targets_N=targets_N, dtype=dtype)
            return *reference_gradients(definition, (x_ND, weight_VD, bias_V), gradient_N, wanted), None, None, None
        ctx.gradients_of_sum = None  # scaled in place below, so they cannot be used twice
        scale = gradient_N[:1].sum()
        are_equal = gradient_N.stride() == (0,) or bool((gradient_N == gradient_N[:1]).all())  # an expanded scalar is
        if gradients is None or not are_equal:
            gradients = chunk_by_chunk(x_ND, weight_VD, bias_V, targets_N, dtype, chunk, wanted, gradient_N)[1:]
            scale = torch.ones_like(scale)
        return *(None if g is None else g.to(torch.promote_types(g.dtype, t.dtype)).mul_(scale).to(t.dtype)
                 for g, t in zip(gradients, (x_ND, weight_VD, bias_V), strict=True)), None, None, None


@torch.no_grad()
def chunk_by_chunk(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor, dtype: torch.dtype,
                   chunk_tokens: int, wanted: tuple[bool, ...] = (False, False, False),
                   gradient_N: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """losses_N, and the `wanted` gradients of x, W and b: of the sum, by `gradient_N` if given."""
    n_tokens, vocab_size = len(x_ND), len(weight_VD)
    weight_VD, bias_V = weight_VD.to(dtype), bias_V.to(dtype)
    # Buffers: logits of a chunk in the matmul's dtype, and of a block of rows in the sums'.
    narrow_CV = weight_VD.new_empty(min(chunk_tokens, n_tokens), vocab_size)
    like = at_least_float32(narrow_CV[:0])  # for its dtype alone
    block = max(BLOCK_LOGITS // vocab_size, 1) if x_ND.device.type == "cpu" else chunk_tokens
    wide_RV = None if like.dtype == dtype else like.new_empty(min(block, len(narrow_CV)), vocab_size)
    losses_N = like.new_empty(n_tokens)
    dx_ND = weight_VD.new_empty(x_ND.shape) if wanted[0] else None
    dweight_VD = like.new_zeros(weight_VD.shape) if wanted[1] else None
    dbias_V = like.new_zeros(vocab_size) if wanted[2] else None
    part_VD = torch.empty_like(weight_VD) if wanted[1] and wide_RV is not None else None  # where sums are wider
    with autocast_off(x_ND):
        for start in range(0, n_tokens, chunk_tokens):
            at = slice(start, start + chunk_tokens)
            x_CD, logits_CV = x_ND[at].to(dtype), narrow_CV[: len(x_ND[at])]
            torch.addmm(bias_V, x_CD, weight_VD.t(), out=logits_CV)
            for first in range(0, len(x_CD), block):
                logits_RV = logits_CV[first : first + block]
                rows = slice(start + first, start + first + len(logits_RV))
                wide = logits_RV if wide_RV is None else wide_RV[: len(logits_RV)].copy_(logits_RV)
                take_losses(wide, targets_N[rows, None], losses_N[rows])
                if any(wanted):
                    differentiate_logits(wide, targets_N[rows, None], losses_N[rows], dbias_V,
                                         None if gradient_N is None else gradient_N[rows, None])
                    if wide_RV is not None:
                        logits_RV.copy_(wide)
            # From the gradient of the logits that of x, and the chunk's part of that of W.
            if dx_ND is not None:
                torch.mm(logits_CV, weight_VD, out=dx_ND[at])
            if dweight_VD is not None and part_VD is not None:
                dweight_VD.add_(torch.mm(logits_CV.t(), x_CD, out=part_VD))
            elif dweight_VD is not None:
                dweight_VD.addmm_(logits_CV.t(), x_CD)
    return losses_N, dx_ND, dweight_VD, dbias_V


def take_losses(logits_RV: Tensor, target_R1: Tensor, loss_R: Tensor) -> None:
    """Write -ln p of the targets to loss_R, and p, the softmax, over the logits."""
    # -ln p = max - logit + ln(sum of e^(logit - max)). That sum is 1 / the largest p.
    loss_R1 = logits_RV.amax(1, keepdim=True) - logits_RV.gather(1, target_R1)
    torch.softmax(logits_RV, dim=-1, out=logits_RV)
    torch.sub(loss_R1[:, 0], logits_RV.amax(1).log_(), out=loss_R)


def differentiate_logits(p_RV: Tensor, target_R1: Tensor, loss_R: Tensor, dbias_V: Tensor | None,
                         gradient_R1: Tensor | None) -> None:
    """Make p the gradient of the logits, times `gradient_R1` if given, and add it to b's."""
    # p, less 1 at the target, is e^-loss - 1 by `expm1`: p - 1 would be only rounding near 1.
    p_RV.scatter_(1, target_R1, loss_R[:, None].neg().expm1_())
    if gradient_R1 is not None:
        p_RV.mul_(gradient_R1)
    if dbias_V is not None:
        dbias_V.add_(p_RV.sum(0))
