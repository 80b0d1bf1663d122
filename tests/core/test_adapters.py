"""What attaches to `in_proj` and `out_proj` from outside: low-rank adapters and weight-only quantisation.

Both see plain `nn.Linear` modules: one tensor in, one tensor out, called as modules."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lineartime.generation.generate import decode_step, prefill
from lineartime.model import LanguageModel
from marks import rest
from tiny_models import CONFIGS, random_ids, random_model

MODELS = ["flash", "transformer++", "flash long memory",
          *rest("flash-quad", "flash heads", "mc-tfm++", "performer", "combiner")]
PROJECTIONS = ("in_proj", "out_proj")


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


class Int8(nn.Module):
    """A linear layer whose matrix is integers with a scale per output."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.scale = nn.Buffer(base.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight, self.bias = nn.Buffer((base.weight.detach() / self.scale).round().to(torch.int8)), base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def replace_projections(model: LanguageModel, make) -> int:
    """Put `make(projection)` in place of every projection; how many there were."""
    found = [(layer, name) for layer in model.layers for name in PROJECTIONS]
    for layer, name in found:
        assert isinstance(getattr(layer, name), nn.Linear | LowRank)
        setattr(layer, name, make(getattr(layer, name)))
    return len(found)


def decoded(model: LanguageModel, ids_BT: Tensor) -> Tensor:
    """The logits behind every token from the sixth on, one token at a time."""
    logits_BV, state = prefill(model, ids_BT[:, :6].tolist())
    return torch.stack([logits_BV, *(decode_step(model, ids_B, state) for ids_B in ids_BT[:, 6:].T)], dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_low_rank_adapters_attach_train_and_merge(name: str) -> None:
    model, ids_BT = random_model(CONFIGS[name]), random_ids(2, 11)
    before, generator = model(ids_BT), torch.Generator().manual_seed(0)
    assert replace_projections(model, lambda base: LowRank(base, generator)) == 2 * len(model.layers)
    adapted = model(ids_BT)
    assert (adapted - before).abs().max() > 1e-3
    adapted.square().mean().backward()
    for layer in model.layers:
        for name in PROJECTIONS:
            adapter = getattr(layer, name)
            assert all(p.grad is not None and p.grad.abs().max() > 0 for p in (adapter.a, adapter.b))
    assert (decoded(model, ids_BT) - adapted[:, 5:]).abs().max() <= 1e-11 * adapted.abs().max()
    replace_projections(model, lambda adapter: adapter.merged())
    assert (model(ids_BT) - adapted).abs().max() <= 1e-11 * adapted.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_integer_weights_run_and_decode(name: str) -> None:
    model, ids_BT = random_model(CONFIGS[name]), random_ids(2, 11)
    before = model(ids_BT).detach()
    replace_projections(model, Int8)
    after = model(ids_BT).detach()
    assert 0 < (after - before).norm() / before.norm() < 0.2
    assert (decoded(model, ids_BT) - after[:, 5:]).abs().max() <= 1e-11 * after.abs().max()
