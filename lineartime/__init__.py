"""FLASH, FLASH-Quad and their baselines, as in "Transformer Quality in Linear Time" (Hua et al., ICML 2022).

The public names are below; each is imported when it is first used, so that the command line starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.config import PRESETS, ModelConfig, TrainConfig, model_config
    from lineartime.context_use import measure_context_use
    from lineartime.data.prepare import prepare
    from lineartime.data.tokens import open_split
    from lineartime.errors import LineartimeError
    from lineartime.evaluation import evaluate
    from lineartime.finetune_config import FineTuning
    from lineartime.finetuning import finetune
    from lineartime.gau import GatedAttentionUnit
    from lineartime.generation.generate import generate, read
    from lineartime.generation.step import DecodeStep
    from lineartime.load import load_model, load_span_model
    from lineartime.mhsa import FeedForward, MultiHeadAttention
    from lineartime.model import LanguageModel
    from lineartime.model_names import model_folder
    from lineartime.pooling import embed
    from lineartime.qa.questions import read_questions
    from lineartime.qa.spans import evaluate_questions
    from lineartime.scoring import score
    from lineartime.training import train

    __version__: str

__all__ = ["PRESETS", "DecodeStep", "FeedForward", "FineTuning", "GatedAttentionUnit", "LanguageModel",
           "LineartimeError", "ModelConfig", "MultiHeadAttention", "TrainConfig", "embed", "evaluate",
           "evaluate_questions", "finetune", "generate", "load_model", "load_span_model",
           "measure_context_use", "model_config", "model_folder", "open_split", "prepare", "read", "read_questions",
           "score", "train"]
_HOME = {"PRESETS": "config", "ModelConfig": "config", "TrainConfig": "config", "model_config": "config",
         "GatedAttentionUnit": "gau", "MultiHeadAttention": "mhsa", "FeedForward": "mhsa", "LanguageModel": "model",
         "prepare": "data.prepare", "open_split": "data.tokens", "train": "training", "load_model": "load",
         "load_span_model": "load", "evaluate": "evaluation", "measure_context_use": "context_use",
         "generate": "generation.generate", "read": "generation.generate", "DecodeStep": "generation.step",
         "FineTuning": "finetune_config", "finetune": "finetuning", "read_questions": "qa.questions",
         "evaluate_questions": "qa.spans", "model_folder": "model_names", "embed": "pooling",
         "score": "scoring", "LineartimeError": "errors"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version  # of tens of milliseconds

        try:
            return version(__name__)
        except PackageNotFoundError:
            return "unknown"  # a checkout that is not installed
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
