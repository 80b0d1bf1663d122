"""Speed and memory, measured so that numbers can be compared: one JSON row each, with what is needed to repeat it."""
