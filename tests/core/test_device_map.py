"""Layers on several devices: everything a layer reads is brought to its device, and weights that wait are there while
it runs. The hooks are those of accelerate in little; make ecosystem has the real ones."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lineartime.errors import UsageError
from lineartime.weights.device_map import run_methods_on_device
from tiny_models import CONFIGS, FLASH, case_of, random_model

CASES = pytest.mark.parametrize("name", [
    case_of(name, rest=name not in ("flash", "transformer++", "performer", "combiner", "flash write gate"))
    for name in CONFIGS])
IDS = torch.tensor([[3, 0, 5, 7, 2, 9, 1, 4, 8, 6], [0, 0, 2, 5, 5, 1, 12, 11, 3, 10]])


class Hook:
    """A hook of a module that computes on `device`; its parameters wait elsewhere meanwhile, if they wait."""

    def __init__(self, module, device, waits):
        self.device = device
        self.values = {name: p.data for name, p in module._parameters.items() if p is not None} if waits else {}
        self.post_forward(module, None)

    def pre_forward(self, module, *args, **kwargs):
        for name, value in self.values.items():
            module._parameters[name] = torch.nn.Parameter(value)
        return tuple(arg.to(self.device) if hasattr(arg, "to") else arg for arg in args), kwargs

    def post_forward(self, module, output):
        for name, value in self.values.items():
            module._parameters[name] = torch.nn.Parameter(value.to("meta"))
        return output


def hooks(layer, device, waits=False):
    """Hooks of a layer and, as accelerate has it, of modules with weights that wait."""
    for module in layer.modules():
        if module is layer or waits:
            module._hf_hook, module._old_forward = Hook(module, device, waits), module.forward


class OneDevice(TorchDispatchMode):
    """An operation on tensors of two devices raises; only copies may have both."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        copies = op.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        assert copies or len({tensor.device for tensor in tensors}) < 2, op
        return op(*args, **(kwargs or {}))


def on_two_devices(config):
    """A model with its second block on "meta", where shapes and devices are computed and no values."""
    model = random_model(config)
    for i, layer in enumerate(model.layers):
        later = i >= len(model.layers) // 2
        hooks(layer.to("meta") if later else layer, "meta" if later else "cpu")
    run_methods_on_device(model)
    model.norm.to("meta")
    return model


@CASES
def test_what_a_layer_reads_is_on_its_device(name, monkeypatch):
    """And so is its cache."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # "meta" has none
    model = on_two_devices(CONFIGS[name])
    with OneDevice():
        assert model.hidden(IDS, padding_mask_BT=IDS > 0).device.type == "meta"
        if name not in ("flash", "performer", "flash-quad", "flash long memory"):
            return
        state = model.decoding_state(2)
        for t in range(3):
            model.extend(IDS[:, t : t + 1], torch.ones(2, dtype=torch.long), state)
        assert [{x.device.type for x in cache.tensors().values()} for cache in state.caches] == [{"cpu"}, {"meta"}]
        state.select(torch.tensor([1, 0, 0]))


@CASES
def test_weights_that_wait_are_there_while_their_layer_runs(name):
    model, there = random_model(CONFIGS[name]), random_model(CONFIGS[name])
    there.load_state_dict(model.state_dict())
    for layer in model.layers:
        hooks(layer, "cpu", waits=True)
    run_methods_on_device(model)
    with torch.no_grad():
        assert torch.equal(model(IDS), there(IDS))
        if model.config.causal:
            n_new_B, states = torch.tensor([6, 3]), [each.decoding_state(2) for each in (model, there)]
            for _ in range(2):
                assert torch.equal(*[each.extend(IDS[:, :6], n_new_B, state)
                                     for each, state in zip((model, there), states, strict=True)])
    assert all(p.is_meta for p in model.layers.parameters())


def test_the_embedding_does_not_wait():
    model = random_model(FLASH)
    model.embed.to("meta")
    with pytest.raises(UsageError, match=r"only layers wait .*: device_map: embed.weight; give"):
        run_methods_on_device(model)
