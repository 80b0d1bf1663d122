"""A checkpoint of a small random model, as `transformers` sees one."""

import torch
from safetensors.torch import save_file

from lineartime.config_json import model_config_json
from lineartime.model import LanguageModel


def random_model(config):
    """No weight is zero, and layers outweigh the embedding."""
    model = LanguageModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.8 if name.startswith("layers") else 0.2, generator=generator)
    return model


def write_checkpoint(folder, model, tokenizer):
    """What `transformers` sees of a checkpoint that training writes."""
    (folder / "config.json").write_text(model_config_json(model.config))
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    return folder
