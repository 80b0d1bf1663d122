"""The gradient of one step: those of its micro-batches, clipped, and added in their order.

    g = sum over m of share_m clip(g_m)      clip_scope "local", the paper's
    g = clip(sum over m of share_m g_m)      clip_scope "global"

g_m is the gradient of the mean loss of micro-batch m, share_m the share of the step's targets that are in it."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lineartime.base.errors import NumericsError
from lineartime.base.ranks import Ranks
from lineartime.config import TrainConfig
from lineartime.training.division import Division
from lineartime.training.objectives import Objective
from lineartime.training.ordered import Sums, merge_all, norm_of, parts_of, push
from lineartime.training.shard import local


def compute_gradient(model: nn.Module, objective: Objective, batch: Sequence[Tensor], n_rows: int,
                     config: TrainConfig, *, division: Division | None = None,
                     between: Callable[[int], None] = lambda number: None) -> tuple[float, float]:
    """Leave the clipped gradient of a batch's mean loss in `.grad`; returns loss (nats per target) and gradient norm.

    batch: the tensors of `Objective.batch`; a micro-batch is `n_rows` of their rows. division: this rank's part of the
    step; by default all of it. Its parts' `own.grad` is set. between is called before each
    micro-batch, with its number, and may raise.
    The norm is that before clipping; of micro-batches that are clipped one by one it is the mean of theirs. Raises
    NumericsError, and leaves `.grad` unusable, if the loss or norm is not finite."""
    division = division or Division(parts_of(model))
    parameters = [part.whole for part in division.parts]
    forget(part.own for part in division.parts)  # the gradients of the step before
    micro_batches = list(zip(*(part.split(n_rows) for part in batch), strict=True))
    counts = [objective.n_targets(*micro_batch) for micro_batch in micro_batches]
    n_targets = max(division.n_targets(counts), 1)  # of the whole step, on all ranks
    clip_each = config.clip_scope == "local" and not config.shard  # sharded, no rank has a micro-batch's whole gradient
    # One micro-batch after the other: its gradient is clipped, multiplied by its share, and added to the tree.
    sums: Sums = []
    losses, norms = [], []
    for number, (micro_batch, count) in enumerate(zip(micro_batches, counts, strict=True)):
        between(number)
        share = count / n_targets
        division.begin_micro_batch(share)
        forget(parameters)
        losses.append(share * backward(model, objective, micro_batch, count, config.precision, division.ranks.in_row))
        # A parameter that the loss does not depend on has no gradient, which counts as zeros.
        gradient = division.add_row([local(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters])
        # Clipped by its own norm before it is averaged, so that one bad micro-batch cannot use up the others' share.
        if clip_each:
            norms.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient))))
            scale_to(gradient, norms[-1], config.clip)
        division.scale(gradient, share)
        push(sums, gradient)
    # From here on a rank has the gradient of only the parts that it updates.
    gradient = division.add_ranks(merge_all(sums))
    norm = division.mean_norm(norms) if clip_each else norm_of(gradient, division.parts, division.ranks)
    if not clip_each:
        scale_to(gradient, norm, config.clip)
    forget(parameters)
    division.set_gradient(gradient)
    loss = division.total_loss(losses)
    for name, value in (("loss", loss), ("gradient norm", norm.item())):
        if not math.isfinite(value):
            raise NumericsError(f"the {name} is not finite", f"{name} = {value}")
    return loss, norm.item()


def backward(model: nn.Module, objective: Objective, micro_batch: Sequence[Tensor], count: int, precision: str,
             ranks: Ranks) -> Tensor:
    """Add the gradient of the mean loss of a micro-batch's `count` targets to `.grad`; returns the loss, `[]`.

    ranks: those that share the rows; each has the loss of its part."""
    with torch.autocast(micro_batch[0].device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        loss = objective.losses(model, *micro_batch, ranks=ranks).sum() / max(count, 1)
    loss.backward()
    return loss.detach()


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients. Not `model.zero_grad`, which misses those of parameters that FSDP2 has gathered."""
    for p in parameters:
        p.grad = None


def scale_to(gradient: list[Tensor], norm: Tensor, clip: float | None) -> None:
    """Scale a gradient of this norm in place so that its norm is at most `clip`."""
    if clip is not None:
        torch._foreach_mul_(gradient, (clip / norm).clamp(max=1.0).to(gradient[0].device))
