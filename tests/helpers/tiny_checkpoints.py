"""A checkpoint of a small random model, as `transformers` sees one."""

from safetensors.torch import save_file

from lineartime.config_json import model_config_json
from lineartime.model.language_model import LanguageModel
from tiny_models import drawn


def random_model(config):
    """No weight is zero, and layers outweigh the embedding."""
    return drawn(LanguageModel(config), 1, of_layers=0.8, of_others=0.2)


def write_checkpoint(folder, model, tokenizer):
    """What `transformers` sees of a checkpoint that training writes."""
    (folder / "config.json").write_text(model_config_json(model.config))
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    return folder
