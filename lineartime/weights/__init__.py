"""Weights that a run begins with, and what `transformers` reads beside weights."""
