"""Labelled documents that a tiny model can learn from, and the model."""

import json

import numpy as np

from lineartime.config import model_config
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.model.language_model import LanguageModel
from tiny_checkpoints import write_checkpoint

CONTEXT = 32
WORDS = {"sea": "waves and fish ", "wood": "trees oak ", "town": "STREETS 123 "}


def write_model(folder, causal=True, **fields):
    """A model as it is before training, in a folder that is made."""
    import torch

    torch.manual_seed(0)
    config = model_config("flash", n_layers=1, d_model=16, vocab_size=259, context=CONTEXT, end_of_document=256,
                          query_key_dim=8, chunk_size=8, causal=causal, init_std=0.2, **fields)
    folder.mkdir(parents=True)
    return write_checkpoint(folder, LanguageModel(config), byte_tokenizer(mlm=True))


def made_rows(n, seed=0, kind="one"):
    """Some documents are longer than a row."""
    random = np.random.Generator(np.random.Philox(key=seed))
    rows = []
    for i in range(n):
        name = list(WORDS)[i % 3]
        text = WORDS[name] * int(random.integers(1, 6))
        label = {"one": name, "several": [name] if i % 2 else [name, "odd"],
                 "number": 100.0 + 7 * list(WORDS).index(name)}[kind]
        rows.append({"text": text + ("odd! " * 4 if kind == "several" and not i % 2 else ""), "label": label})
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
