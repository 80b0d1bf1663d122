"""The attention ops and the loss, one function each. A kernel will stand beside the reference under its signature."""

from lineartime.ops.baselines import performer_attention, rowmajor_axial_attention
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.reference import first_to_all_attention, mixed_chunk_attention, quadratic_attention

__all__ = ["first_to_all_attention", "linear_cross_entropy", "mixed_chunk_attention", "performer_attention",
           "quadratic_attention", "rowmajor_axial_attention"]
