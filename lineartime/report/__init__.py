"""Measured rows as tables, sentences and pictures: nothing in them is typed by hand."""
