"""What measures: speed and memory, the paper's tables and figures, recall. It imports lineartime,
never the reverse.

`python -m benchmarks VERB` runs from a checkout; README.md here lists what each verb makes."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]  # one measurement, as the verbs write it to a file of rows
