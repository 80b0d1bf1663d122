"""The attention ops, one function each. A kernel will stand beside the reference under the same signature."""

from lineartime.ops.reference import mixed_chunk_attention, quadratic_attention

__all__ = ["mixed_chunk_attention", "quadratic_attention"]
