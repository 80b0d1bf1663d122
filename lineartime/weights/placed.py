"""Layers on several devices, or with weights that wait on a processor or on disk, as `device_map` of transformers asks.

accelerate hangs hooks on modules, which move weights and arguments where `forward` is called. A model calls a layer's
`add` and `extend`, and layers read parameters of modules that they do not call."""

import functools
from collections.abc import Callable
from typing import Any

from lineartime.model import LanguageModel
from lineartime.settings import require


def use_hooks(model: LanguageModel) -> None:
    """Let the methods of layers that accelerate has placed run as their `forward` would: on the layer's device, with
    all of its weights there. The head is on the device of the embedding, whose weights it shares.

    Raises UsageError if the weights of the embedding, or others outside of layers, wait elsewhere."""
    waiting = [name for name, p in model.named_parameters() if p.is_meta and not name.startswith("layers.")]
    require(not waiting, "only layers wait on a processor or on disk", f"device_map: {', '.join(waiting)}",
            "give the embedding, the norm and the head a device that computes")
    model.head_bias.data = model.head_bias.data.to(model.embed.weight.device)
    for layer in model.residual_layers():
        if hasattr(layer, "_hf_hook"):
            hooks = [(module, take_hook(module)) for module in layer.modules() if hasattr(module, "_hf_hook")]
            for name in {"add", "extend", "empty_cache"} & {*dir(layer)}:
                setattr(layer, name, between(hooks, getattr(layer, name)))


def take_hook(module: Any) -> Any:
    """Take a hook off a module, whose weights stay where they are; returns the hook."""
    hook = module._hf_hook
    module.forward = module._old_forward
    del module._hf_hook, module._old_forward
    return hook


def between(hooks: list[tuple[Any, Any]], method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a layer with the hooks of its modules before and after it. The first are the layer and its hook,
    which moves arguments too."""
    (layer, of_layer), *inner = hooks

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = of_layer.pre_forward(layer, *args, **kwargs)
        for module, hook in inner:
            hook.pre_forward(module)
        out = method(*args, **kwargs)
        for module, hook in inner:
            hook.post_forward(module, None)
        return of_layer.post_forward(layer, out)

    return run
