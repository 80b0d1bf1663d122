"""The paper's tables and figures made again: their cells, scales and runs."""
