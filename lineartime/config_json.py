"""A model's `config.json`: its specification, in the fields that `transformers` reads too, and what its head is for."""

import json
from typing import Any

from lineartime.base.errors import UsageError, raised_as
from lineartime.base.settings import require
from lineartime.config import MODEL_FIELDS, REMOVED, REMOVED_AT_START, ModelConfig, stored_config, to_dict

QUESTION_ANSWERING = "LineartimeForQuestionAnswering"


def model_config_json(config: ModelConfig, kind: str | None = None, **more: Any) -> str:
    """A model's `config.json`: its fields, and the fields that `transformers` requires.

    kind: the class that `transformers` loads, by default that of the language model. more: its further fields."""
    special = {"bos_token_id": config.end_of_document, "eos_token_id": config.end_of_document,
               "pad_token_id": config.vocab_size if config.causal else config.end_of_document}
    kind = kind or ("LineartimeForCausalLM" if config.causal else "LineartimeForMaskedLM")
    return json.dumps({"model_type": "lineartime", "architectures": [kind], "dtype": "float32",
                       "tie_word_embeddings": True, **special, **to_dict(config), **more}, indent=1) + "\n"


def architecture_of(config_json: str) -> str:
    """The class that `transformers` loads from a `config.json`, which is JSON; "" if it names none."""
    return str(next(iter(json.loads(config_json).get("architectures") or []), ""))


def model_config_from_json(text: str) -> ModelConfig:
    """The model that a `config.json` describes. Raises UsageError for invalid JSON, another library's model, or wrong
    fields, CheckpointError as `stored_config` does."""
    with raised_as(UsageError, "not valid JSON", "config.json", ValueError, RecursionError):
        fields = json.loads(text)
    require(isinstance(fields, dict) and fields.get("model_type") == "lineartime",
            "not a lineartime model", "config.json")
    return model_config_of(fields)


def model_config_of(fields: dict[str, Any]) -> ModelConfig:
    """The model that the fields of a `config.json` describe. Raises as `stored_config` does."""
    kept = {*MODEL_FIELDS, *REMOVED} - {*REMOVED_AT_START}
    return stored_config(ModelConfig(), {name: value for name, value in fields.items() if name in kept})
