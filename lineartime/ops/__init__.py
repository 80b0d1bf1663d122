"""The attention ops, one function each. A kernel will stand beside the reference under the same signature."""

from lineartime.ops.baselines import performer_attention, rowmajor_axial_attention
from lineartime.ops.reference import first_to_all_attention, mixed_chunk_attention, quadratic_attention

__all__ = ["first_to_all_attention", "mixed_chunk_attention", "performer_attention", "quadratic_attention",
           "rowmajor_axial_attention"]
