"""Windows of a row: parts that one process differentiates one after the other, so that the activations of one window
are in memory, however long the row.

A window needs the states that the windows before it leave, as a rank's part of a row does (`distributed.context`), and
its gradient needs the gradients that the windows after it give to those states. So the windows are read twice: first in
the order of the row, without a gradient, for their states; then from the last to the first, each with its gradient. The
sum is the gradient of the whole row, to rounding."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lineartime.base.ranks import RENDEZVOUS, Ranks

GROUP = "windows of a row"
"""In place of a process group's name. Always the same, for compiled code depends on it."""
ONE_AT_A_TIME = threading.Lock()
"""Threads that train share the name, and would read each other's states."""


def differentiate_windows(read: Callable[[Ranks], object], loss: Callable[[Ranks], Tensor], n: int) -> Tensor:
    """Add the gradient of the sum of the losses of `n` windows to `.grad`; returns the losses, `[n]`, without it.

    read(window) computes the model's layers for a window, loss(window) the same and a loss of shape `[]`. The window is
    given as a rank among all. For causal models, without activation checkpointing."""
    windows = [Ranks(i, n, GROUP) for i in range(n)]
    losses = []
    with ONE_AT_A_TIME:
        carried = RENDEZVOUS[GROUP] = Carried(n)  # `ranks.gather` finds it by the group's name
        try:
            with torch.no_grad():  # the states: the last window hands on none
                for window in windows[:-1]:
                    carried.place = 0
                    read(window)
            n_forward = len(carried.given)
            for window in reversed(windows):
                carried.place = 0
                loss_of_window = loss(window)  # its exchanges are those of the first reading again
                loss_of_window.backward()  # and then as many, of gradients
                assert carried.place == 2 * n_forward, f"window {window.rank} left out an exchange"
                losses.append(loss_of_window.detach())
                for of_windows in carried.given[:n_forward]:  # no window before it reads them
                    of_windows[window.rank] = None
        finally:
            del RENDEZVOUS[GROUP]
    return torch.stack(losses[::-1])


class Carried:
    """What windows give to each other. Every window has the same exchanges in the same order: those of the forward
    pass, then those of the backward pass."""

    def __init__(self, n: int):
        self.n = n
        self.given: list[list[Tensor | None]] = []
        """Of each exchange, what each window gave; None if it has not been there, or is not needed any more."""
        self.place = 0
        """The number of the next exchange."""

    def gather(self, values: Tensor, rank: int) -> Tensor:
        """What every window gave in this exchange, `[n, ...]`, 0 for those that are None; see `ranks.gather`. The
        forward pass reads what earlier windows gave, the backward pass what later ones gave."""
        if self.place == len(self.given):
            self.given.append([None] * self.n)
        of_windows = self.given[self.place]
        of_windows[rank], self.place = values, self.place + 1
        return torch.stack([torch.zeros_like(values) if each is None else each for each in of_windows])
