"""Weights that a run begins with, and what `transformers` reads beside weights."""

from lineartime.weights.flash_pytorch import from_flash_pytorch

__all__ = ["from_flash_pytorch"]
