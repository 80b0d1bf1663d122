"""Training in many processes, launched by `torchrun`: PyTorch's collectives behind a few functions."""
