"""FLASH, FLASH-Quad and their baselines, as in "Transformer Quality in Linear Time" (Hua et al.,
ICML 2022). Each public name is imported when it is first used: the command line starts at once."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.base.errors import LineartimeError
    from lineartime.config import PRESETS, ModelConfig, TrainConfig, model_config
    from lineartime.data.prepare import prepare
    from lineartime.data.tokens import open_split
    from lineartime.folders import model_folder
    from lineartime.model.decoding.cache import Cache, LastTokens
    from lineartime.model.decoding.state import DecodingState
    from lineartime.model.gau import GatedAttentionUnit
    from lineartime.model.language_model import LanguageModel
    from lineartime.model.layers import ResidualLayer, SequenceInfo
    from lineartime.model.mhsa import FeedForward, MultiHeadAttention
    from lineartime.tasks.pooling import embed
    from lineartime.tasks.qa.finetune import finetune
    from lineartime.tasks.qa.finetune_config import FineTuning
    from lineartime.tasks.qa.questions import read_questions
    from lineartime.tasks.qa.spans import evaluate_questions
    from lineartime.training.evaluation import evaluate
    from lineartime.training.language import train
    from lineartime.use.scoring import score
    from lineartime.weights.generation.generate import generate, read
    from lineartime.weights.generation.step import DecodeStep
    from lineartime.weights.load import load_model, load_span_model

    __version__: str

__all__ = [
    "PRESETS", "Cache", "DecodeStep", "DecodingState", "FeedForward", "FineTuning", "GatedAttentionUnit",
    "LanguageModel", "LastTokens", "LineartimeError", "ModelConfig", "MultiHeadAttention", "ResidualLayer",
    "SequenceInfo", "TrainConfig", "embed", "evaluate", "evaluate_questions", "finetune", "generate", "load_model",
    "load_span_model", "model_config", "model_folder", "open_split", "prepare", "read", "read_questions", "score",
    "train"]
_HOME = dict.fromkeys(("PRESETS", "ModelConfig", "TrainConfig", "model_config"), "config") | {
    "LineartimeError": "base.errors", "model_folder": "folders", "prepare": "data.prepare", "open_split": "data.tokens",
    "ResidualLayer": "model.layers", "SequenceInfo": "model.layers", "LastTokens": "model.decoding.cache",
    "Cache": "model.decoding.cache", "DecodingState": "model.decoding.state",
    "GatedAttentionUnit": "model.gau", "MultiHeadAttention": "model.mhsa", "FeedForward": "model.mhsa",
    "LanguageModel": "model.language_model", "load_model": "weights.load", "load_span_model": "weights.load",
    "generate": "weights.generation.generate", "read": "weights.generation.generate",
    "DecodeStep": "weights.generation.step", "train": "training.language", "evaluate": "training.evaluation",
    "FineTuning": "tasks.qa.finetune_config", "finetune": "tasks.qa.finetune", "embed": "tasks.pooling",
    "read_questions": "tasks.qa.questions", "evaluate_questions": "tasks.qa.spans", "score": "use.scoring"}
"""Where each public name is defined."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from lineartime.base.words import installed_version

        return installed_version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
