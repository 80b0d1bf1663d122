"""Low-rank adapters in place of `in_proj` and `out_proj`, which are called as modules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lineartime.model.language_model import LanguageModel
from lineartime.weights.generation.generate import decode_step, prefill
from marks import rest
from tiny_models import CONFIGS, random_ids, random_model


class LowRank(nn.Module):
    """W x + b + 2 B A x: LoRA."""

    def __init__(self, base: nn.Linear, generator: torch.Generator):
        super().__init__()
        self.base = base
        self.a, self.b = (nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 4)
                          for shape in ((2, base.in_features), (base.out_features, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * F.linear(F.linear(x, self.a), self.b)

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.base.weight += 2 * self.b @ self.a
        return self.base


def replace_projections(model: LanguageModel, make: Callable) -> None:
    """Put `make(projection)` in place of every projection."""
    for layer in model.layers:
        for name in ("in_proj", "out_proj"):
            setattr(layer, name, make(getattr(layer, name)))


@pytest.mark.parametrize("name", ["flash", "transformer++", "flash+",
                                  *rest("flash-quad", "flash heads", "mc-tfm++", "performer", "combiner")])
def test_low_rank_adapters_attach_train_and_merge(name: str) -> None:
    model, ids_BT = random_model(CONFIGS[name]), random_ids(2, 11)
    before, generator = model(ids_BT), torch.Generator().manual_seed(0)
    replace_projections(model, lambda base: LowRank(base, generator))
    adapted = model(ids_BT)
    assert (adapted - before).abs().max() > 1e-3
    adapted.square().mean().backward()
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    assert len(adapters) == 2 * len(model.layers)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for each in adapters for p in (each.a, each.b))
    logits_BV, state = prefill(model, ids_BT[:, :6].tolist())
    decoded = torch.stack([logits_BV, *(decode_step(model, ids_B, state) for ids_B in ids_BT[:, 6:].T)], dim=1)
    assert (decoded - adapted[:, 5:]).abs().max() <= 1e-11 * adapted.abs().max()
    replace_projections(model, lambda adapter: adapter.merged())
    assert (model(ids_BT) - adapted).abs().max() <= 1e-11 * adapted.abs().max()
