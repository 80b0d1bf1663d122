"""FLASH, FLASH-Quad and their baselines, as in "Transformer Quality in Linear Time" (Hua et al., ICML 2022).

The public names are below; each is imported when it is first used, so that the command line starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.config import PRESETS, ModelConfig, TrainConfig, model_config
    from lineartime.gau import GatedAttentionUnit
    from lineartime.mhsa import FeedForward, MultiHeadAttention
    from lineartime.model import LanguageModel
    from lineartime.release.pretrained import model_folder
    from lineartime.run import load_model

__all__ = ["PRESETS", "FeedForward", "GatedAttentionUnit", "LanguageModel", "ModelConfig", "MultiHeadAttention",
           "TrainConfig", "load_model", "model_config", "model_folder"]
_HOME = {"PRESETS": "config", "ModelConfig": "config", "TrainConfig": "config", "model_config": "config",
         "GatedAttentionUnit": "gau", "MultiHeadAttention": "mhsa", "FeedForward": "mhsa", "LanguageModel": "model",
         "load_model": "run", "model_folder": "release.pretrained"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
