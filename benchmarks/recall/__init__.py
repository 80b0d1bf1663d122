"""Recall as an instrument: can a model find in a row what was written there before, and how far back?"""
