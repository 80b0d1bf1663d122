"""Speed and memory, measured so that numbers can be compared: one JSON row each, with what is needed to repeat it."""

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
"""One measurement, as `lineartime benchmark --json` writes it."""


def environment() -> dict[str, str]:
    """Of a process that imports this package, from wherever it is started."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
