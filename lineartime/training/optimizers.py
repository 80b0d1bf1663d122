"""What updates the weights: AdamW, or Muon for the matrices of layers; and the learning rate."""

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lineartime.config import TrainConfig
from lineartime.model.language_model import LanguageModel
from lineartime.training.ordered import ParameterPart, is_matrix


def make_optimizer(parts: Sequence[ParameterPart], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW as in Tables 6-7 for what this process updates and is not Muon's. Matrices and
    embeddings decay; biases, norms, scales and position biases do not."""
    parts = [part for part in parts if not part.by_muon]
    decayed = [part.updated for part in parts if is_matrix(part.name, part.parameter)]
    others = [part.updated for part in parts if not is_matrix(part.name, part.parameter)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                             eps=config.adam_epsilon, fused=True)


class Muon(torch.optim.Muon):
    """PyTorch's Muon for the matrices of layers that this process updates.

    An update is as large as AdamW's, so that rates and decay fit both. Each matrix is updated by
    itself, also those that share a parameter for one matmul (`LanguageModel.in_sizes`). Momenta are
    in AdamW's `state`, so that one state is saved."""

    def __init__(self, model: LanguageModel, parts: Sequence[ParameterPart], config: TrainConfig,
                 state: MutableMapping[Tensor, Any]):
        sizes = model.in_sizes()
        own = [part for part in parts if part.by_muon and part.start < part.stop]
        self.kept = state
        # Rows of a parameter as parameters of their own, in the same memory.
        self.matrices = {part.updated: [nn.Parameter(rows) for rows in part.updated.detach().split(
            sizes.get(part.name, (len(part.updated),)))] for part in own}
        super().__init__([{"params": [matrix for matrices in self.matrices.values() for matrix in matrices]}],
                         lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")

    def update(self) -> None:
        """Update the matrices by the `.grad` of their parameters."""
        for parameter, matrices in self.matrices.items():
            assert parameter.grad is not None
            kept = self.kept[parameter]
            if "momentum_buffer" not in kept:
                kept["momentum_buffer"] = torch.zeros_like(parameter)
            # Split anew at every step, because `Run.resume` puts other tensors into the state.
            sizes = [len(matrix) for matrix in matrices]
            gradients, momentum = parameter.grad.split(sizes), kept["momentum_buffer"].split(sizes)
            for matrix, g, m in zip(matrices, gradients, momentum, strict=True):
                matrix.grad = g
                self.state[matrix]["momentum_buffer"] = m
        self.step()
        self.zero_grad()  # of the rows, which would keep the whole gradient in memory through the next step


def update_weights(adamw: torch.optim.AdamW, muon: Muon, rate: float, config: TrainConfig) -> None:
    """Update all parts once by their gradients: AdamW's at `rate`, Muon's in proportion."""
    for group in adamw.param_groups:
        group["lr"] = rate
    for group in muon.param_groups:
        group["lr"] = rate * (config.muon_learning_rate or config.learning_rate) / config.learning_rate
    adamw.step()
    muon.update()


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """The learning rate of update `step` (from 0): linear warm-up to the peak, then `schedule`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    left, after_warmup = config.steps - step, max(config.steps - config.warmup_steps, 1)
    if config.schedule == "linear":
        return config.learning_rate * left / after_warmup
    if config.schedule == "cosine":
        return config.learning_rate * (1 - math.cos(math.pi * left / after_warmup)) / 2
    if config.schedule == "wsd" and step > config.decay_from:
        return config.learning_rate * left / (config.steps - config.decay_from)
    return config.learning_rate
