"""The run that a flat table of settings describes: what the machine, its data, the weights that it begins with, and the
run that is in its folder already give to it. Only a choice of the size imports torch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineartime.atomic_io import read_bytes, read_json
from lineartime.config import ModelConfig, stored_train
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
from lineartime.run_config import (
    RECIPE_FIELDS,
    SHAPE_FIELDS,
    SIZES,
    RunConfig,
    check_names,
    run_config,
    size_settings,
)
from lineartime.settings import replace_fields, require

if TYPE_CHECKING:
    import torch

RUN_FILE = "run.json"
RESULT_FILE = "result.json"


def sized_config(settings: Mapping[str, Any], device: "torch.device | str | None" = None) -> tuple[RunConfig, str]:
    """The run of a flat table of settings, see `config_for_data`, and its size in words. Where they name no `size`, it
    is as large as the run that is in the folder, or as fits the machine, but never the paper's.

    Wrong settings are refused before torch is imported. Raises as `config_for_data` and `pick_device` do."""
    settings = named(settings)
    shapes = [name for name in SHAPE_FIELDS if name in settings]
    but = f", but for {', '.join(shapes)}" if shapes else ""
    if "size" in settings:
        return config_for_data(settings), f"{settings['size']}{but}"
    if stored := stored_sizes(settings):
        return config_for_data(stored | settings), "that of the run in this folder"
    config_for_data({"size": next(iter(SIZES)), **settings})
    from lineartime.runtime import pick_device

    size, why = fitting_size(pick_device(device))
    return (config_for_data({"size": size, **settings}),
            f"{size}{but}, for {why}; to choose another, name a size: {', '.join(SIZES)}")


def stored_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a size has, of the run in the folder `out` that has the same preset, task and weights; none
    without one, see `saved_run`."""
    there = saved_run(Path(settings["out"]))
    preset = settings.get("model", there.get("preset"))
    asked = preset, settings.get("task", "wiki40b"), settings.get("from")
    if not there or (there.get("preset"), there.get("task"), there.get("from")) != asked:
        return {}
    fields = {**there["train"], **({} if "from" in settings else there["model"])}
    return {name: fields[name] for size in SIZES for name in size_settings(size, preset, {}) if name in fields}


def fitting_size(device: "torch.device") -> tuple[str, str]:
    """The largest size that trains on this machine within hours, but never the paper's; and why, in words."""
    from lineartime.runtime import available_bytes

    if device.type == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(device).total_memory
        return "base" if memory >= 20 * 2**30 else "small", f"a GPU of {memory / 2**30:.0f} GiB"
    n_cores, available = len(os.sched_getaffinity(0)), available_bytes()
    enough = available is None or available >= 8 * 2**30
    memory_words = "" if available is None else f" and {available / 2**30:.0f} GiB of free memory"
    return "small" if n_cores >= 8 and enough else "tiny", f"a processor with {n_cores} cores{memory_words}"


def named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with paths as text. Raises as `check_names` does."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    check_names(settings)
    return settings


def config_for_data(settings: Mapping[str, Any]) -> RunConfig:
    """The run of a flat table of settings (see `run_config`). The prepared data give the vocabulary's size and the
    end-of-document token if the settings do not. With `from` the weights give the model; their tokenizer must be the
    data's, which may have more tokens. A run that is saved in the folder keeps its `RECIPE_FIELDS` if the settings do
    not name them, and knows its weights' model, so that they need not be there.

    Raises UsageError as `run_config` does, for a vocabulary smaller than the data's, for data of several tokenizers or
    of another than the weights', and for data without [MASK] if the model is not causal; UsageError and DataError as
    `read_manifest` does."""
    settings = named(settings)
    there = saved_run(Path(settings["out"]))
    tokenizer, source = None, None
    if "from" in settings and there.get("from") == settings["from"]:
        source = replace_fields(ModelConfig(), there["from_model"])
    elif "from" in settings:
        source, tokenizer = read_source(settings["from"])
    asked = run_config(settings, source).train  # wrong settings are refused before the data are looked for
    if there and there["train"]["warmup_steps"] <= asked.steps:
        kept = there["model"] | there["train"]
        settings = {name: kept[name] for name in RECIPE_FIELDS if name in kept} | settings
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
        replace_fields(ModelConfig(), description["model"])
        stored_train(description["train"])
    except (CheckpointError, UsageError, LookupError, TypeError):
        return {}
    whole = "warmup_steps" in description["train"]
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
