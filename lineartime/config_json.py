"""A model's `config.json`: its specification, in the fields that `transformers` reads too, and what its head is for."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from lineartime.config import MODEL_FIELDS, ModelConfig, to_dict
from lineartime.errors import UsageError
from lineartime.settings import require, require_name

QUESTION_ANSWERING, CLASSIFICATION = "LineartimeForQuestionAnswering", "LineartimeForSequenceClassification"
ENCODER = {"pooling": "mean"}
"""The further fields in the `config.json` of a model that gives documents vectors."""
PROBLEMS = {"one": "single_label_classification", "several": "multi_label_classification", "number": "regression"}
"""What a document's label is (one class, any number of classes, a number), as `transformers` calls it."""


@dataclass(frozen=True)
class Head:
    """What a model says of a document: its head has an output for each label. Raises UsageError for wrong values."""

    problem_type: str
    """One of the values of PROBLEMS."""
    labels: tuple[str, ...]
    label_mean: float = 0.0
    label_std: float = 1.0
    """Of numbers: the output times `label_std`, plus `label_mean`, is the number."""
    pairs: bool = False
    """Whether a document was a pair of texts in training."""
    max_tokens: int | None = None
    """What documents were cut to in training."""

    def __post_init__(self) -> None:
        require_name("problem_type", self.problem_type, PROBLEMS.values())
        require(len({*self.labels}) == len(self.labels) > 0, "labels are missing or the same", str(self.labels)[:80])
        require(self.problem_type != PROBLEMS["number"] or len(self.labels) == 1, "a number has one output",
                f"{len(self.labels)} labels")
        require(math.isfinite(self.label_mean) and self.label_std > 0, "wrong value",
                f"label_mean = {self.label_mean}, label_std = {self.label_std}")

    def fields(self) -> dict[str, Any]:
        """The fields of a `config.json`, for `head_from_json` and `transformers`."""
        scale = {"label_mean": self.label_mean, "label_std": self.label_std}
        return {"problem_type": self.problem_type, "id2label": {str(i): name for i, name in enumerate(self.labels)},
                "label2id": {name: i for i, name in enumerate(self.labels)},
                **(scale if self.problem_type == PROBLEMS["number"] else {}), **({"pairs": True} if self.pairs else {}),
                **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}


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


def is_encoder(config_json: str) -> bool:
    """Whether a `config.json`, which is JSON, is that of a model that gives documents vectors."""
    return json.loads(config_json).items() >= ENCODER.items()


def head_from_json(config_json: str) -> Head:
    """The head of a model that labels documents, by the rules of `transformers` for what a `config.json`, which is
    JSON, leaves out. Raises UsageError for labels that are none."""
    fields = json.loads(config_json)
    try:
        names = {int(number): str(name) for number, name in (
            fields.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}).items()}
        labels = tuple(names[i] for i in range(len(names)))
        kind = fields.get("problem_type") or PROBLEMS["number" if len(labels) == 1 else "one"]
        max_tokens = fields.get("max_tokens")
        return Head(kind, labels, float(fields.get("label_mean") or 0), float(fields.get("label_std") or 1),
                    fields.get("pairs") is True, None if max_tokens is None else int(max_tokens))
    except (KeyError, ValueError, TypeError, AttributeError):
        raise UsageError("labels are missing or wrong", "config.json", "correct problem_type and id2label") from None


def model_config_from_json(text: str) -> ModelConfig:
    """The model that a `config.json` describes. Raises UsageError for invalid JSON, another library's model, or wrong
    fields."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError("not valid JSON", "config.json", str(e)) from None
    require(isinstance(fields, dict) and fields.get("model_type") == "lineartime",
            "not a lineartime model", "config.json")
    return replace(ModelConfig(), **{name: value for name, value in fields.items() if name in MODEL_FIELDS})
