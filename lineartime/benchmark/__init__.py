"""Speed and memory, measured so that numbers can be compared: one JSON row each, with what is needed to repeat it."""

from typing import Any

Row = dict[str, Any]
"""One measurement, as `lineartime benchmark --json` writes it."""
