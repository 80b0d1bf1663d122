"""The gradient of one step: its micro-batches' gradients, clipped, and added in their order.

    g = sum over m of share_m clip(g_m)      clip_scope "local", the paper's
    g = clip(sum over m of share_m g_m)      clip_scope "global"

g_m is the gradient of the mean loss of micro-batch m, share_m its share of the step's targets. A
process on its own computes all of this. Several divide it, see `Division`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lineartime.base.errors import NumericsError
from lineartime.base.ranks import ALONE, Ranks, gather
from lineartime.config import TrainConfig
from lineartime.model.language_model import LanguageModel
from lineartime.training import ordered, shard
from lineartime.training.objectives import Objective
from lineartime.training.ordered import ParameterPart


def compute_gradient(model: nn.Module, objective: Objective, batch: Sequence[Tensor], n_rows: int,
                     config: TrainConfig, *, division: "Division | None" = None,
                     between: Callable[[int], None] = lambda number: None) -> tuple[float, float]:
    """Leave the clipped gradient of a batch's mean loss in `.grad`; returns loss and gradient norm.

    batch: the tensors of `Objective.batch`; a micro-batch is `n_rows` of their rows. division: this
    rank's part of the step, by default all of it; `.grad` of what its parts update is set. between
    is called with each micro-batch's number before it, and may raise. The loss is in nats per
    target. The norm is before clipping, or the mean of micro-batches that are clipped one by one.
    Raises NumericsError, and leaves `.grad` unusable, if the loss or norm is not finite."""
    division = division or Division(ordered.parameter_parts(model))
    parameters = [part.parameter for part in division.parts]
    clear_gradients(part.updated for part in division.parts)  # of the step before
    micro_batches = list(zip(*(tensor.split(n_rows) for tensor in batch), strict=True))
    counts = [objective.n_targets(*micro_batch) for micro_batch in micro_batches]
    n_targets = max(int(gather(torch.tensor(counts), division.ranks.in_column).sum()), 1)  # of the whole step
    # No rank of a sharded model has a micro-batch's whole gradient.
    clips_each = config.clip_scope == "local" and not config.shard
    # For each micro-batch: loss.backward(), clip, and add its share of the gradient.
    sums: ordered.Sums = []
    losses, norms = [], []
    for number, (micro_batch, count) in enumerate(zip(micro_batches, counts, strict=True)):
        between(number)
        share = count / n_targets
        if division.reduce_scatter is not None:
            division.reduce_scatter.share = share
        clear_gradients(parameters)
        with torch.autocast(micro_batch[0].device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = objective.losses(model, *micro_batch, ranks=division.ranks.in_row).sum() / max(count, 1)
        loss.backward()
        losses.append(share * loss.detach())
        gradient = division.row_gradient()
        # By its own norm and before it is averaged: one bad micro-batch takes no other's share.
        if clips_each:
            norms.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient))))
            clip_to(config.clip, gradient, norms[-1])
        if share != 1 and not division.is_sharded:  # there `OrderedReduceScatter` has done it
            torch._foreach_mul_(gradient, share)
        ordered.add_in_order(sums, gradient)
    # From here on a rank has the gradient of the parts alone that it updates.
    gradient = ordered.merge_all(sums)
    if not division.is_sharded:
        gradient = ordered.exchange([p.uncut(g) for p, g in zip(division.parts, gradient, strict=True)], division.ranks)
    if clips_each:
        norm = gather(torch.stack(norms).cpu(), division.ranks.in_column).mean()
    else:
        norm = ordered.norm_of(gradient, division.parts, division.ranks)
        clip_to(config.clip, gradient, norm)
    clear_gradients(parameters)
    for part, g in zip(division.parts, gradient, strict=True):
        whole = g if g.numel() == part.updated.numel() else shard.padded_to_vector(g)
        part.updated.grad = whole.view_as(part.updated)
    found = {"loss": division.total_loss(losses), "gradient norm": norm.item()}
    for name, value in found.items():
        if not math.isfinite(value):
            raise NumericsError(f"the {name} is not finite", f"{name} = {value}")
    return found["loss"], found["gradient norm"]


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Unlike `model.zero_grad`, it also clears parameters that FSDP2 has gathered."""
    for p in parameters:
        p.grad = None


def clip_to(largest: float | None, gradient: list[Tensor], norm: Tensor) -> None:
    """Scale a gradient of this norm in place so that its norm is at most `largest`."""
    if largest is not None:
        torch._foreach_mul_(gradient, (largest / norm).clamp(max=1.0).to(gradient[0].device))


@dataclass(frozen=True)
class Division:
    """This rank's share of every step: the parts of parameters that it updates.

    Ranks have whole copies of the model and exchange gradients at a step's end
    (`training.ordered`); or the model is sharded, and every backward pass exchanges them by
    `reduce_scatter` (`training.shard`). A process on its own has all, and exchanges nothing."""

    parts: list[ParameterPart]
    ranks: Ranks = ALONE
    reduce_scatter: shard.OrderedReduceScatter | None = None

    @property
    def is_sharded(self) -> bool:
        return self.reduce_scatter is not None and self.ranks.size > 1

    def row_gradient(self) -> list[Tensor]:
        """What this rank holds of the gradient of a micro-batch's whole rows, from `.grad`."""
        parameters = [part.parameter for part in self.parts]  # zeros where the loss does not depend on one
        gradient = [shard.local(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters]
        if not self.is_sharded:
            ordered.sum_over_row(gradient, self.ranks.in_row)
        return gradient

    def total_loss(self, losses: Sequence[Tensor]) -> float:
        # By column, row, micro-batch. A rank of a sharded model has every W-th micro-batch.
        losses_CRM = gather(torch.stack(list(losses)).cpu(), self.ranks).unflatten(0, (-1, self.ranks.in_row.size))
        return losses_CRM.permute((2, 0, 1) if self.is_sharded else (0, 2, 1)).flatten().sum().item()

    def share_updates(self) -> None:
        """Bring what the optimizers of all ranks have updated into this rank's model."""
        if self.reduce_scatter is None:
            ordered.gather_parts([part.uncut(part.parameter.detach()) for part in self.parts], self.ranks)
        else:
            shard.write_back(self.parts)


def divide(model: LanguageModel, config: TrainConfig, ranks: Ranks, device: torch.device) -> Division:
    """Place a model on the device, or this rank's shard of it; returns the rank's `Division`."""
    if not config.shard:
        model.to(device)
        return Division(ordered.parameter_parts(model, ranks, config.optimizer == "muon"), ranks)
    reduce_scatter = shard.shard_model(model, config.seed, ranks, device)
    return Division(shard.sharded_parts(model, ranks), ranks, reduce_scatter)
