"""Tiles of a row: parts that one process computes one by one, as if each had a rank of its own.

The bits of a sum depend on its order, and those of a matmul may depend on its shape. So the result is the same on 1, 2,
4, ... ranks that share a row if each computes tiles of the same size, with sums over tiles in a fixed order. In every
layer a tile needs the states of others. Therefore every tile of a process has a thread; one runs at a time, up to the
next exchange (`gather`), in the order of the row. A tile's model shares the storage of the weights and has gradients of
its own."""

import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lineartime.distributed.ranks import RENDEZVOUS, Ranks, gather

Result = TypeVar("Result")
Model = TypeVar("Model", bound=nn.Module)


def twins_of(model: Model, n: int) -> list[Model]:
    """`n` models that share the storage of the model's parameters, without compiled code."""
    return [copy.deepcopy(model, {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()})
            for _ in range(n)]


def by_tile(compute: Callable[[int, Ranks], Result], n: int, ranks: Ranks) -> list[Result]:
    """`compute(i, tile)` of each of this rank's `n` consecutive tiles, in the order of the row.

    ranks: those that share the row. tile: the tile as a rank among all tiles of the row."""
    if n == 1:
        return [compute(0, ranks)]
    turns = Turns(n, ranks)
    tiles = [Ranks(ranks.rank * n + i, ranks.size * n, turns.name) for i in range(n)]
    results: list[Any] = [None] * n

    def run(i: int) -> None:
        try:
            turns.wait(i)
            with torch.autograd.set_multithreading_enabled(False):  # CUDA's one thread for backward passes would wait
                results[i] = compute(i, tiles[i])
            assert not turns.given, f"tile {i} left out an exchange"
        except BaseException as e:
            turns.error = turns.error or e
        turns.pass_on(i)

    threads = [threading.Thread(target=run, args=(i,), name=f"tile {tile.rank}") for i, tile in enumerate(tiles)]
    RENDEZVOUS[turns.name] = turns
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        del RENDEZVOUS[turns.name]
    if turns.error is not None:
        raise turns.error
    return results


class Turns:
    """Whose turn it is among `n` threads, and what they give to the others."""

    def __init__(self, n: int, ranks: Ranks):
        self.n, self.ranks, self.name = n, ranks, f"tiles {id(self)}"
        self.turn, self.changed = 0, threading.Condition()
        self.given: list[Tensor] = []
        self.all = torch.empty(0)
        self.error: BaseException | None = None

    def wait(self, i: int) -> None:
        """Return when it is the turn of thread i. Raises the error of another thread at once: the turn may be with a
        thread that has ended, and never come."""
        with self.changed:
            self.changed.wait_for(lambda: self.turn == i or self.error is not None)
        if self.error is not None:
            raise self.error

    def pass_on(self, i: int) -> None:
        """End the turn of thread i."""
        with self.changed:
            self.turn = (i + 1) % self.n
            self.changed.notify_all()

    def gather(self, values: Tensor, rank: int) -> Tensor:
        """The values of every tile of all ranks; see `ranks.gather`."""
        i = rank % self.n
        assert len(self.given) == i, f"a tile before tile {i} left out an exchange"
        self.given.append(values)
        if i == self.n - 1:
            self.all, self.given = gather(torch.stack(self.given), self.ranks).flatten(0, 1), []
        self.pass_on(i)
        self.wait(i)
        return self.all
