"""Training objectives: the batch of a step, the loss of a batch, and the held-out score."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from lineartime.base.ranks import ALONE, Ranks
from lineartime.data.tokens import Mixture, TokenStream, batch_rows
from lineartime.model.language_model import LanguageModel, masked_token_losses, token_losses
from lineartime.training.evaluation import evaluate_data
from lineartime.training.masking import NO_TARGET, masked_batch
from lineartime.training.ordered import own_rows
from lineartime.training.run_config import RunConfig


class Objective(Protocol):
    """The four methods that `loop.fit` calls. A batch is a tuple of arrays, by row first."""

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """This rank's rows of a step, each whole: a pure function of seed, step and rank."""

    def n_targets(self, *batch: Tensor) -> int:
        """The targets in these rows, each of which has a loss: the weight of a micro-batch."""

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        """A loss in nats for each target, of any shape, float32 or more; `ranks` share the rows."""

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """The held-out scores, among them "loss". progress takes what is scored, and may raise."""


class NextToken:
    """Language modelling: predict each token of a row from the tokens before it."""

    scores: tuple[str, ...] = ("loss", "bits_per_byte")

    def __init__(self, config: RunConfig, train_stream: TokenStream | Mixture, held_out: TokenStream | Mixture,
                 ranks: Ranks = ALONE):
        self.config, self.train_stream, self.held_out, self.ranks = config, train_stream, held_out, ranks

    def batch_arguments(self, step: int) -> dict[str, Any]:
        """The arguments of `batch_rows` and `masked_batch` for this rank's rows of a step."""
        config = self.config
        own = own_rows(config.rows_per_step, config.micro_batch_rows, config.train.shard, self.ranks)
        return {"seed": config.train.seed, "step": step, "context": config.model.context,
                "rows_per_step": config.rows_per_step, "chosen": own}

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        return (batch_rows(self.train_stream, **self.batch_arguments(step)),)

    def n_targets(self, *batch: Tensor) -> int:
        return batch[0][:, 1:].numel()

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        return token_losses(model, batch[0], ranks)

    def evaluate(self, model: LanguageModel, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        config = self.config
        whole, by_source = evaluate_data(
            model, self.held_out, context=config.model.context, max_tokens=config.train.eval_tokens, spread=True,
            precision=config.train.precision, batch_rows=config.micro_batch_rows, ranks=self.ranks, progress=progress)
        found = {name: getattr(whole, name) for name in self.scores}
        each = {text: {name: getattr(of_text, name) for name in self.scores} for text, of_text in by_source.items()}
        part = {"n_tokens": whole.n_read or whole.n_tokens, "of_tokens": self.held_out.n_tokens}
        return found | part | ({"by_source": each} if each else {})


class MaskedTokens(NextToken):
    """Masked language modelling, if not causal: predict masked tokens from the whole row."""

    scores = ("loss",)  # masked tokens are no text, so they have no bits per byte

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """Inputs and targets `[R, T]`; the target of a token that is not predicted is -1."""
        return masked_batch(self.train_stream, **self.batch_arguments(step))

    def n_targets(self, *batch: Tensor) -> int:
        return int((batch[1] != NO_TARGET).sum())

    def losses(self, model: nn.Module, *batch: Tensor, ranks: Ranks = ALONE) -> Tensor:
        inputs_BT, targets_BT = batch
        return masked_token_losses(model, inputs_BT, targets_BT, ranks)
