"""A pretrained model's weights in another model: for a new head, row length or chunk size."""

import torch
from torch import Tensor

from lineartime.base.errors import CheckpointError
from lineartime.base.settings import require
from lineartime.config import MODEL_FIELDS, ModelConfig
from lineartime.model.language_model import LanguageModel, empty_model
from lineartime.weights import checkpoint


def check_shapes(source: ModelConfig, config: ModelConfig) -> None:
    """Raise UsageError, with the fields that differ, if a model has other tensors than its weights,
    or rows longer than their position tables."""
    shapes, wanted = ({name: p.shape for name, p in empty_model(each).named_parameters()} for each in (source, config))
    where = ", ".join(f"{name} = {getattr(config, name)}, the weights have {getattr(source, name)}"
                      for name in MODEL_FIELDS if getattr(source, name) != getattr(config, name))
    require(shapes == wanted, "the weights have other shapes", where, "leave it out; what changes no shape may be set")
    empty_model(config).check_length(config.context)


@torch.no_grad()
def copy_weights(model: LanguageModel, pretrained: LanguageModel) -> None:
    """Give a model a pretrained model's weights. A span head that this lacks stays as it is.

    Weights of the same name and shape are copied. A position table is cut to a shorter context. A
    table of position biases keeps its values by distance; greater distances get the value of the
    greatest. Queries are scaled so that q k / n keeps its value. The heads that first_to_all adds
    stay as they are. Raises CheckpointError with the names of weights that do not fit."""
    old, old_modules = dict(pretrained.named_parameters()), dict(pretrained.named_modules())
    biases = {f"{name}.weight": (new, old_modules[name]) for name, new in model.named_modules()
              if name.endswith("rel_pos_bias") and hasattr(new, "weight") and name in old_modules}
    for new_bias, old_bias in biases.values():
        offset = torch.arange(1 - new_bias.n, new_bias.n, device=new_bias.weight.device)
        if hasattr(old_bias, "weight"):  # a table; the form by RoPE has a value for every distance
            offset = offset.clamp(1 - old_bias.n, old_bias.n - 1)
        new_bias.weight.copy_(old_bias.at(offset))
    # The head is new, and a position bias has been copied already.
    left = [(name, p) for name, p in model.named_parameters()
            if name not in biases and (name in old or not name.startswith("span_head."))]
    wrong = [f"{name} is missing" if name not in old else f"{name} is {list(old[name].shape)}, not {list(p.shape)}"
             for name, p in left if name not in old or not copy_weight(name, p, old[name])]
    require(not wrong, "the pretrained weights do not fit", checkpoint.first_five(wrong),
            "keep more of the pretrained configuration", CheckpointError)
    for new, before in zip(model.residual_layers(), pretrained.residual_layers(), strict=False):
        new.keep_scores(before.config)


def copy_weight(name: str, new: Tensor, old: Tensor) -> bool:
    """Copy one weight, of which a model may need a part, or have more. Returns whether it fits."""
    heads, n = (".scale_offset.gamma", ".scale_offset.beta"), min(len(new), len(old))
    fits = (new.shape == old.shape or (name == "abs_pos.weight" and len(new) < len(old))
            or (name.endswith(heads) and len(new) > len(old)))
    if fits:
        new[:n] = old[:n]
    return fits
