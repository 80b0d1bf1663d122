"""`device_map` of transformers: layers on several devices, or with weights that wait on a processor or on disk.

accelerate puts hooks on modules that move weights and arguments when `forward` is called. Our models call a layer's
`add` and `extend` instead, and layers read parameters of modules that they do not call."""

import functools
from collections.abc import Callable
from typing import Any

from lineartime.model import LanguageModel
from lineartime.settings import require


def run_methods_on_device(model: LanguageModel) -> None:
    """Make the methods of layers that accelerate has placed run as `forward` would: on the layer's device, with all
    of its weights there. The head moves to the device of the embedding, whose weights it shares.

    Raises UsageError if the weights of the embedding, or others outside of layers, wait elsewhere."""
    # A weight that waits elsewhere is a meta tensor; only layers have hooks that bring it back.
    waiting = [name for name, p in model.named_parameters() if p.is_meta and not name.startswith("layers.")]
    require(not waiting, "only layers wait on a processor or on disk", f"device_map: {', '.join(waiting)}",
            "give the embedding, the norm and the head a device that computes")
    model.head_bias.data = model.head_bias.data.to(model.embed.weight.device)
    for layer in model.residual_layers():
        if hasattr(layer, "_hf_hook"):
            hooks = [(module, remove_hook(module)) for module in layer.modules() if hasattr(module, "_hf_hook")]
            for name in {"add", "extend", "empty_cache"} & {*dir(layer)}:
                setattr(layer, name, with_hooks(hooks, getattr(layer, name)))


def remove_hook(module: Any) -> Any:
    """Remove accelerate's hook from a module and return it. The weights stay where they are."""
    hook = module._hf_hook
    module.forward = module._old_forward
    del module._hf_hook, module._old_forward
    return hook


def with_hooks(hooks: list[tuple[Any, Any]], method: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's method that fetches all of the layer's weights first and gives them back at the end.

    hooks: the layer's modules and their hooks, the layer itself first; its hook moves the arguments too."""
    (layer, layer_hook), *inner = hooks

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = layer_hook.pre_forward(layer, *args, **kwargs)
        for module, hook in inner:
            hook.pre_forward(module)
        out = method(*args, **kwargs)
        for module, hook in inner:
            hook.post_forward(module, None)
        return layer_hook.post_forward(layer, out)

    return run
