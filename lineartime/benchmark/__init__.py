"""Speed and memory, measured so that numbers can be compared: one JSON row each, with what is needed to repeat it."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
"""One measurement, as `lineartime benchmark --json` writes it."""
