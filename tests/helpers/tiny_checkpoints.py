"""A checkpoint of a small random model, as `transformers` sees one."""

import torch
from safetensors.torch import save_file

from lineartime.config import model_config
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.folders import model_config_json
from lineartime.model.language_model import LanguageModel
from tiny_models import drawn


def random_model(config):
    """No weight is zero, and layers outweigh the embedding."""
    return drawn(LanguageModel(config), 1, of_layers=0.8, of_others=0.2)


def write_checkpoint(folder, model, tokenizer, *architecture):
    """What `transformers` sees of a checkpoint that training writes."""
    (folder / "config.json").write_text(model_config_json(model.config, *architecture))
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    save_file({name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors")
    return folder


def write_model(folder, causal=True, **fields):
    torch.manual_seed(0)
    config = model_config("flash", n_layers=1, d_model=16, vocab_size=259, context=32, end_of_document=256,
                          query_key_dim=8, chunk_size=8, causal=causal, init_std=0.2, **fields)
    folder.mkdir(parents=True)
    return write_checkpoint(folder, LanguageModel(config), byte_tokenizer(mlm=True))
