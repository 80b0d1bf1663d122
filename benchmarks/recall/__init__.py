"""Recall as an instrument: can a model find what stands earlier in its row?"""
