"""What the programs of a kernel's launch read and write, and a launch with its programs in another
order: Triton's interpreter runs them one after another, so that a race never shows in it."""

import random
from contextlib import contextmanager

import numpy as np
from triton.runtime import interpreter as triton_interpreter

Builder, Executor = triton_interpreter.InterpreterBuilder, triton_interpreter.GridExecutor


class Launch:
    def __init__(self, kernel, arguments):
        self.kernel, self.loads, self.stores, self.read_again = kernel, [], [], False
        storages = [each.untyped_storage() for each in arguments if hasattr(each, "untyped_storage")]
        self.bounds = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]

    def faults(self):
        """What makes the result depend on the order of programs, or threads; addresses outside."""
        found = []
        stores, loads = ([np.unique(np.concatenate(each)) if each else np.zeros(0, np.uint64) for each in kind]
                         for kind in (self.stores, self.loads))
        owner = np.concatenate([np.full(len(at), program) for program, at in enumerate(stores)])
        stored = np.concatenate(stores)
        order = np.argsort(stored, kind="stable")
        stored, owner = stored[order], owner[order]
        if (stored[1:] == stored[:-1]).any():
            found.append("two programs store in one place")
        for program, at in enumerate(loads):
            place = np.searchsorted(stored, at).clip(max=max(len(stored) - 1, 0))
            if len(stored) and ((stored[place] == at) & (owner[place] != program)).any():
                found.append("a program reads what another stores")
                break
        if self.read_again:
            found.append("a program reads what it has stored")
        every = np.unique(np.concatenate([*loads, *stores]))
        inside = np.zeros(len(every), bool)
        for first, end in self.bounds:
            inside |= (every >= first) & (every < end)
        return found + ["an address lies outside of all tensors"] * (not inside.all())


@contextmanager
def watched(monkeypatch):
    launches = []
    load, store, place, call = (Builder.create_masked_load, Builder.create_masked_store, Builder.set_grid_idx,
                                Executor.__call__)

    def addresses(pointers, mask):
        return np.asarray(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)], np.uint64).ravel()

    def watched_load(self, pointers, mask, *rest):
        launch, at = launches[-1], addresses(pointers, mask)
        launch.loads[-1].append(at)
        launch.read_again |= any(np.isin(at, stored).any() for stored in launch.stores[-1])
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        launches[-1].stores[-1].append(addresses(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    def begin_program(self, *at):
        launches[-1].loads.append([])
        launches[-1].stores.append([])
        return place(self, *at)

    def begin_launch(self, *arguments, **named):
        launches.append(Launch(self.fn.__name__, [*arguments, *named.values()]))
        return call(self, *arguments, **named)

    def refused(self, *rest):
        raise AssertionError(f"{launches[-1].kernel} has an atomic operation, whose order is not fixed")

    with monkeypatch.context() as patch:
        patch.setattr(Builder, "create_masked_load", watched_load)
        patch.setattr(Builder, "create_masked_store", watched_store)
        patch.setattr(Builder, "set_grid_idx", begin_program)
        patch.setattr(Builder, "create_atomic_rmw", refused)
        patch.setattr(Builder, "create_atomic_cas", refused)
        patch.setattr(Executor, "__call__", begin_launch)
        yield launches


@contextmanager
def in_order(monkeypatch, order):
    """Programs of the launches inside run "backwards", from the last place, or "shuffled"."""
    dim, place, drawn = Builder.set_grid_dim, Builder.set_grid_idx, random.Random(0)
    places = []

    def begin_launch(self, *sizes):
        places[:] = np.ndindex(*sizes)
        if order == "shuffled":
            drawn.shuffle(places)
        return dim(self, *sizes)

    with monkeypatch.context() as patch:
        patch.setattr(Builder, "set_grid_dim", begin_launch)
        patch.setattr(Builder, "set_grid_idx", lambda self, *at: place(self, *places.pop()))
        yield
