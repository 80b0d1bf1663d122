"""The run that a flat table of settings describes: what its data, the weights that it begins with, and the run that is
in its folder already give to it. Nothing here imports torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lineartime.atomic_io import read_bytes, read_json
from lineartime.config import ModelConfig
from lineartime.config_json import (
    CLASSIFICATION,
    QUESTION_ANSWERING,
    architecture_of,
    is_encoder,
    model_config_from_json,
)
from lineartime.data.mixture import read_mixture
from lineartime.data.pretrained import weights_folder
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, added_tokens, load_tokenizer
from lineartime.data.tokens import read_manifests, require_mask
from lineartime.errors import CheckpointError, UsageError
from lineartime.run_config import RunConfig, check_names, run_config
from lineartime.settings import replace_fields, require

RUN_FILE = "run.json"
RESULT_FILE = "result.json"


def config_for_data(settings: Mapping[str, Any]) -> RunConfig:
    """The run of a flat table of settings (see `run_config`). The prepared data give the vocabulary's size and the
    end-of-document token if the settings do not. With `from` the weights give the model; their tokenizer must be the
    data's, which may have more tokens. A run that is saved in the folder keeps its warm-up if the settings name none,
    and knows its weights' model, so that they need not be there.

    Raises UsageError as `run_config` does, for a vocabulary smaller than the data's, for data of several tokenizers or
    of another than the weights', and for data without [MASK] if the model is not causal; UsageError and DataError as
    `read_manifest` does."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    check_names(settings)
    there = saved_run(Path(settings["out"]))
    tokenizer, source = None, None
    if "from" in settings and there.get("from") == settings["from"]:
        source = replace_fields(ModelConfig(), there["from_model"])
    elif "from" in settings:
        source, tokenizer = read_source(settings["from"])
    asked = run_config(settings, source).train  # wrong settings are refused before the data are looked for
    if there and there["train"]["warmup_steps"] <= asked.steps:
        settings = {"warmup_steps": there["train"]["warmup_steps"], **settings}
    manifest = read_manifests(settings["data"])[0]
    if source is None:
        settings = {"vocab_size": manifest.vocab_size, "end_of_document": manifest.end_of_document, **settings}
    else:
        if tokenizer is not None and tokenizer.sha256 != manifest.tokenizer["sha256"]:
            require_more_tokens(tokenizer, settings)
        vocab_size = max(source.vocab_size, manifest.vocab_size)
        require(settings.get("vocab_size", vocab_size) == vocab_size,
                "the vocabulary is that of the weights and the data",
                f"vocab_size = {settings.get('vocab_size')}, not {vocab_size}", "leave it out")
        settings["vocab_size"] = vocab_size
    config = run_config(settings, source)
    require(config.model.vocab_size >= manifest.vocab_size, "vocab_size is smaller than the tokenizer's",
            f"{config.model.vocab_size} < {manifest.vocab_size}", "leave it out")
    if not config.model.causal:
        require_mask(manifest.tokenizer.get("mask"), settings["data"])
    return config


def saved_run(out: Path) -> dict[str, Any]:
    """The description of the run that a folder holds; empty without one, and for one that has saved nothing yet or is
    damaged, of which `Run` speaks."""
    if not ((out / RESULT_FILE).exists() or any(out.glob("step-*"))):
        return {}
    try:
        description = read_json(out / RUN_FILE)
    except CheckpointError:
        return {}
    whole = isinstance(description.get("train"), dict) and type(description["train"].get("warmup_steps")) is int
    return description if whole and isinstance(description.get("from_model", {}), dict) else {}


def read_source(name: str) -> tuple[ModelConfig, Tokenizer]:
    """The model and the tokenizer of weights that a run can begin with, see `weights_folder`.

    Raises UsageError where there are none, and for a model that answers questions; CheckpointError for files that
    cannot be read."""
    folder = weights_folder(name)
    config, text = read_config(folder)
    for head, does in ((QUESTION_ANSWERING, "answers questions"), (CLASSIFICATION, "labels documents")):
        require(architecture_of(text) != head, f"this model {does}", name, "begin with a language model")
    require(not is_encoder(text), "this model gives documents vectors", name, "begin with a language model")
    return config, load_tokenizer(folder / TOKENIZER_FILE)


def read_config(folder: Path) -> tuple[ModelConfig, str]:
    """The model of a folder of weights, and the text of its config.json. Raises CheckpointError if it cannot be read,
    UsageError if it is no model's."""
    try:
        text = read_bytes(folder / "config.json").decode()
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError("cannot read", folder / "config.json", getattr(e, "strerror", None) or str(e)) from None
    try:
        return model_config_from_json(text), text
    except UsageError as e:
        raise UsageError(e.what, folder / "config.json", e.todo) from None


def require_more_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Raise UsageError unless the data's tokenizer is that of the weights, or has further tokens besides."""
    new = load_tokenizer(read_mixture(settings["data"])[0].folder / TOKENIZER_FILE)
    require(added_tokens(tokenizer, new) is not None, "the weights and the data have different tokenizers",
            f"{tokenizer.sha256[:12]} of {settings['from']} and {new.sha256[:12]} of {settings['data']}",
            f"prepare the data with --tokenizer {settings['from']}")
