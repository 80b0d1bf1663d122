"""What one training step computes: the learning rate and the clipped gradient."""

import pytest
import torch
from torch import Tensor

from lineartime.config import TrainConfig, model_config
from lineartime.model import LanguageModel, token_losses
from lineartime.objectives import NextToken
from lineartime.training import compute_gradient, learning_rate_at

CONTEXT, N_ROWS = 8, 6
TASK = NextToken(None, None, None)


def small() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(model_config("flash", "wiki40b", n_layers=2, d_model=8, query_key_dim=4, chunk_size=4,
                                       vocab_size=11, context=CONTEXT))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.double()


def rows() -> Tensor:
    return torch.randint(11, (N_ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1))


def train_config(rows_per_micro_batch: int = 2, **fields: object) -> TrainConfig:
    return TrainConfig(tokens_per_step=N_ROWS * CONTEXT, micro_batch_tokens=rows_per_micro_batch * CONTEXT, **fields)


def gradient_of(model: LanguageModel, rows_BT: Tensor) -> list[Tensor]:
    loss = token_losses(model, rows_BT).mean()
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


def norm_of(gradient: list[Tensor]) -> float:
    return float(sum(g.square().sum() for g in gradient)) ** 0.5


def test_learning_rate_rises_to_the_peak_and_falls_towards_zero() -> None:
    config = TrainConfig(steps=10, warmup_steps=4, learning_rate=0.5)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert [learning_rate_at(step, config) / 0.5 for step in range(10)] == pytest.approx(expected)
    assert learning_rate_at(0, TrainConfig(steps=1, warmup_steps=0, learning_rate=0.5)) == 0.5
    assert learning_rate_at(2, TrainConfig(steps=3, warmup_steps=3, learning_rate=0.5)) == 0.5


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 3, 6])
def test_local_clipping_is_of_each_micro_batch(rows_per_micro_batch: int) -> None:
    """Some micro-batches are clipped and some are not: the limit lies between their norms where there are several."""
    model, rows_BT = small(), rows()
    parts = [gradient_of(model, part_BT) for part_BT in rows_BT.split(rows_per_micro_batch)]
    norms = [norm_of(part) for part in parts]
    limit = sum(norms) / len(norms) * (1.0 if len(norms) > 1 else 0.5)
    factors = [min(1.0, limit / norm) for norm in norms]
    assert min(factors) < 1.0 and (len(norms) == 1 or max(factors) == 1.0)
    config = train_config(rows_per_micro_batch, clip=limit)
    loss, norm = compute_gradient(model, TASK, [rows_BT], rows_per_micro_batch, config)
    for i, parameter in enumerate(model.parameters()):
        expected = sum(factor * part[i] for factor, part in zip(factors, parts, strict=True)) / len(parts)
        assert torch.allclose(parameter.grad, expected, rtol=0, atol=1e-12)
    assert loss == pytest.approx(token_losses(model, rows_BT).mean().item(), rel=1e-12)
    assert norm == pytest.approx(sum(norms) / len(norms), rel=1e-12)


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 6])
@pytest.mark.parametrize("limit", [0.01, 1e6, None])
def test_global_clipping_does_not_depend_on_micro_batches(rows_per_micro_batch: int, limit: float | None) -> None:
    model, rows_BT = small(), rows()
    whole = gradient_of(model, rows_BT)
    factor = min(1.0, limit / norm_of(whole)) if limit is not None else 1.0
    config = train_config(rows_per_micro_batch, clip=limit, clip_scope="global")
    _, norm = compute_gradient(model, TASK, [rows_BT], rows_per_micro_batch, config)
    assert norm == pytest.approx(norm_of(whole), rel=1e-12)
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        assert torch.allclose(parameter.grad, factor * expected, rtol=0, atol=1e-12)
