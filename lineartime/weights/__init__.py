"""Weights that a run begins with, and what `transformers` reads beside weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.weights.flash_pytorch import from_flash_pytorch

__all__ = ["from_flash_pytorch"]


def __getattr__(name: str) -> Any:
    """`from_flash_pytorch` is imported when it is first used: it loads torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lineartime.weights import flash_pytorch

    return getattr(flash_pytorch, name)
