"""The paper's tables and figures made again: what is in them, how large, and the runs themselves."""
