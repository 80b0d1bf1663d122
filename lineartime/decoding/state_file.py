"""A decoding state as a file, in the format of safetensors, which is as large as the state. It has the hash of the
model, and one of all that is in it: a state of another model and a damaged file are refused."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from lineartime.atomic_io import open_regular, replaced
from lineartime.checkpoint import tensors_sha256
from lineartime.config import to_dict
from lineartime.decoding.cache import DecodingState
from lineartime.errors import CheckpointError, UsageError
from lineartime.model import LanguageModel


def save_state(path: Path, state: DecodingState, facts: Mapping[str, Any], of_model: str = "") -> None:
    """Replace a file by a state. facts: what else is kept, for JSON. of_model: the model's hash, if it is known. Raises
    as `DecodingState.save` does."""
    if state.model is None:
        raise UsageError("the state does not know its model", path, "say state.model = model")
    tensors = state.tensors()
    content = json.dumps([of_model or model_sha256(state.model), state.text, state.tokenizer_sha256, facts])
    # One entry: safetensors writes several in any order, and the same state has the same bytes.
    metadata = {"state": json.dumps([content_sha256(tensors, content), content])}
    with replaced(path) as file:
        file.write(safetensors.torch.save(tensors, metadata))


def load_state(path: Path, model: LanguageModel, names: Collection[str] = ()) -> tuple[DecodingState, dict[str, Any]]:
    """A state of `model` that was saved, and the facts beside it, which must have these names. Raises CheckpointError
    for a file that is damaged, and for one of another model, command or version."""
    try:
        open_regular(path).close()
        with safetensors.safe_open(path, "pt") as file:
            # Copies: views of the file lie at any byte, and matmuls of them round otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            sha256, content = json.loads(file.metadata()["state"])
        if sha256 != content_sha256(tensors, content):
            raise ValueError("its hash is not that of its content")
    except OSError as e:
        raise CheckpointError("cannot read the state", path, e.strerror or str(e)) from None
    except (ValueError, LookupError, TypeError, safetensors.SafetensorError) as e:
        raise CheckpointError("damaged", path, str(e)) from None
    of_model, text, tokenizer_sha256, facts = json.loads(content)
    if {*facts} != {*names}:
        raise CheckpointError("the state of another command", path, "generate takes that of read, score its own")
    if of_model != model_sha256(model):
        raise CheckpointError("the state of another model or precision", path, "name the model that has read it")
    state = model.decoding_state(len(tensors["seq_lens_B"]))
    if tensors.keys() != state.tensors().keys():
        raise CheckpointError("the state of another version", path, "read the text again")
    state.take({name: tensor.to(model.embed.weight.device) for name, tensor in tensors.items()})
    state.text, state.tokenizer_sha256 = text, tokenizer_sha256
    return state, facts


def model_sha256(model: LanguageModel) -> str:
    """The hash of the weights as they are, in their precision, and of the configuration."""
    return tensors_sha256(model.state_dict(), json.dumps(to_dict(model.config)))


def content_sha256(tensors: Mapping[str, Tensor], text: str) -> str:
    """The hash of tensors with their names, types and shapes, and of a text."""
    named = dict(sorted(tensors.items()))
    return tensors_sha256(named, text + str([(name, x.dtype, [*x.shape]) for name, x in named.items()]))
