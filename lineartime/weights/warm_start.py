"""`lineartime train --from`: the weights that a run begins with are checked, and read part by part."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime.base.errors import UsageError
from lineartime.base.settings import require
from lineartime.base.stores import hash_of
from lineartime.config import ModelConfig, StartingWeights, to_dict
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, added_tokens, load_tokenizer
from lineartime.folders import CONFIG_FILE, WEIGHTS, WEIGHTS_FILE, named_folder
from lineartime.model.language_model import empty_model
from lineartime.weights import checkpoint
from lineartime.weights.load import SHARDS_FILE, check_shared, is_exported, newest_checkpoint

VOCABULARY = ("embed.weight", "head_bias")
"""The parameters that have a row for each token."""


def find_weights(source: StartingWeights) -> tuple[Path, dict[str, Any]]:
    """The folder of the weights, which match its manifest if it has one, and the facts that `run.json` has of them.

    Raises UsageError and CheckpointError as `load_model` does."""
    folder = named_folder(source.name).resolve()  # `latest` is a link
    require((folder / WEIGHTS_FILE).exists() or not (folder / SHARDS_FILE).exists(), "weights in several files",
            str(folder), "save them in one: save_pretrained(..., max_shard_size='1TB')")
    if is_exported(folder):
        check_shared(folder, (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE))
    elif (folder / checkpoint.MANIFEST).exists():
        checkpoint.check(folder)
    else:
        folder = newest_checkpoint(folder).path
    # Weights of a sharded run lie in several files; their manifest has the hash of each.
    one_file = folder / WEIGHTS_FILE
    hashed = hash_of(one_file if one_file.exists() else folder / checkpoint.MANIFEST)
    return folder, {"from": source.name, "from_sha256": hashed["sha256"], "from_model": to_dict(source.model)}


def shapes_of(config: ModelConfig) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in empty_model(config).named_parameters()}


def check_shapes(source: ModelConfig, config: ModelConfig) -> None:
    """Raise UsageError, with the fields that differ, if a model has other tensors than the weights, but for tokens that
    the vocabulary has gained, or if its rows are longer than their position tables."""
    old = replace(source, vocab_size=config.vocab_size)
    if shapes_of(old) == shapes_of(config):
        empty_model(config).check_length(config.context)
        return
    changed = [f.name for f in dataclasses.fields(ModelConfig) if getattr(old, f.name) != getattr(config, f.name)]
    raise UsageError("the weights have other shapes", ", ".join(
        f"{name} = {getattr(config, name)}, the weights have {getattr(old, name)}" for name in changed),
        "leave it out; what changes no shape may be set")


def first_weights(folder: Path, source: ModelConfig, tokenizer: Tokenizer,
                  wanted: Mapping[str, tuple[Sequence[int], int, int]]) -> dict[str, Tensor]:
    """`checkpoint.read_parts` of the weights in `folder`. A token that their vocabulary lacks begins with the mean of
    the rows that its text has in the old tokenizer, or of all rows if its text has none.

    tokenizer: that of the data. Raises CheckpointError as `read_parts` does."""
    old = load_tokenizer(folder / TOKENIZER_FILE)
    new = (added_tokens(old, tokenizer) or {}) if old.sha256 != tokenizer.sha256 else {}
    parts = checkpoint.read_parts(folder, WEIGHTS, {name: part for name, part in wanted.items()
                                                    if not new or name not in VOCABULARY})
    for name in set(wanted) - set(parts):
        shape, start, stop = wanted[name]
        # The vocabulary has grown: read the old tensor whole, fill in the new rows, and cut out the wanted part.
        old_shape = (source.vocab_size, *shape[1:])
        old_part = {name: (old_shape, 0, math.prod(old_shape))}
        rows = checkpoint.read_parts(folder, WEIGHTS, old_part)[name].view(old_shape)
        whole = torch.zeros(*shape)
        whole[: len(rows)] = rows
        for token, text in new.items():
            whole[token] = rows[old.encode(text) or slice(None)].mean(0)
        parts[name] = whole.flatten()[start:stop]
    return parts
