"""How ranks divide a step: whose micro-batches and parts of rows a rank computes, and which parameters it updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.base.ranks import ALONE, Ranks, gather
from lineartime.config import TrainConfig
from lineartime.model.language_model import LanguageModel
from lineartime.training.ordered import ParameterPart, exchange, gather_parts, parts_of, sum_over_row
from lineartime.training.shard import OrderedReduceScatter, padded, shard_model, sharded_parts, write_back


@dataclass(frozen=True)
class Division:
    """This rank's share of every step.

    Ranks have whole copies of the model and exchange gradients at the end of a step (`distributed.ordered`); or the
    model is sharded, and every backward pass exchanges them (`distributed.shard`). A process on its own has all parts,
    and exchanges nothing."""

    parts: list[ParameterPart]
    """What this rank updates of each parameter."""
    ranks: Ranks = ALONE
    reduce_scatter: OrderedReduceScatter | None = None
    """Adds the gradients of a model for which `shard` is set; with one rank it is not used."""

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has the whole model."""
        return self.reduce_scatter is not None and self.ranks.size > 1

    def n_targets(self, counts: Sequence[int]) -> int:
        """The number of targets in the micro-batches of all ranks. counts: those of this rank."""
        return int(gather(torch.tensor(counts), self.ranks.in_column).sum())

    def begin_micro_batch(self, share: float) -> None:
        """Tell a sharded model the share of the step's targets that the next micro-batch has."""
        if self.reduce_scatter is not None:
            self.reduce_scatter.share = share

    def add_row(self, gradient: list[Tensor]) -> list[Tensor]:
        """The gradient of a micro-batch's rows, from that of this rank's part of them."""
        if not self.is_sharded:
            sum_over_row(gradient, self.ranks.in_row)
        return gradient

    def scale(self, gradient: list[Tensor], share: float) -> None:
        """Multiply a micro-batch's gradient in place by its share; if sharded, `OrderedReduceScatter` has done it."""
        if share != 1 and not self.is_sharded:
            torch._foreach_mul_(gradient, share)

    def add_ranks(self, gradient: list[Tensor]) -> list[Tensor]:
        """The step's gradient of this rank's parts, from the sum over its own micro-batches."""
        if self.is_sharded:
            return gradient
        return exchange([part.uncut(g) for part, g in zip(self.parts, gradient, strict=True)], self.ranks)

    def mean_norm(self, norms: Sequence[Tensor]) -> Tensor:
        """The mean norm of the micro-batches of all ranks, `[]`, on the CPU. norms: those of this rank."""
        return gather(torch.stack(list(norms)).cpu(), self.ranks.in_column).mean()

    def total_loss(self, losses: Sequence[Tensor]) -> float:
        """The sum over the micro-batches and parts of rows of all ranks, in the order of the rows of the step."""
        # By place in a column, place in a row, micro-batch. A rank of a sharded model has every W-th micro-batch.
        losses_CRM = gather(torch.stack(list(losses)).cpu(), self.ranks).unflatten(0, (-1, self.ranks.in_row.size))
        return losses_CRM.permute((2, 0, 1) if self.is_sharded else (0, 2, 1)).flatten().sum().item()

    def set_gradient(self, gradient: list[Tensor]) -> None:
        """Give the optimizer's parameters their gradients."""
        for part, g in zip(self.parts, gradient, strict=True):
            part.own.grad = (g if g.numel() == part.own.numel() else padded(g)).view_as(part.own)

    def share_updates(self) -> None:
        """Bring the parts that the optimizers of all ranks have updated into this rank's model."""
        if self.reduce_scatter is None:
            gather_parts([part.uncut(part.whole.detach()) for part in self.parts], self.ranks)
        else:
            write_back(self.parts)


def divide(model: LanguageModel, config: TrainConfig, ranks: Ranks, device: torch.device) -> Division:
    """Place a model on the device, or if it is to be sharded this rank's share of it; returns the rank's `Division`."""
    if not config.shard:
        model.to(device)
        return Division(parts_of(model, ranks, config.optimizer == "muon"), ranks)
    reduce_scatter = shard_model(model, config.seed, ranks, device)
    return Division(sharded_parts(model, ranks), ranks, reduce_scatter)
