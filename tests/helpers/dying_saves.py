"""A process that dies while it saves, and a disk that loses what was not flushed to it."""

import io
import json
import os
import resource
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from lineartime.weights import checkpoint

IN_OS, OURS = ("mkdir", "rename", "symlink", "unlink"), ("_remove_tree", "fsync")
"""What a save changes the disk by, beside the files that it writes: functions of `os`, and our own."""
RUN = "run-of-the-tests"


def state(step):
    """What the tests save at a step: tensors and files."""
    generator = torch.Generator().manual_seed(step)
    weights = {"w": torch.randn(16, 8, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()}
    moments = {"m.w": torch.randn(16, 8, generator=generator), "step": torch.tensor(step)}
    files = {"config.json": '{"d_model": 8}', "state.json": json.dumps({"step": step, "note": "schöne Zahl"})}
    return {"tensors": {"model": weights, "optimizer": moments}, "files": files}


def save(run_dir, step, keep=2):
    return checkpoint.save(Path(run_dir), step, run=RUN, keep=keep, **state(step))


class HookedFile(io.FileIO):
    """A new file, whose writes are operations."""

    def __init__(self, path, call):
        super().__init__(path, "x")
        self.path, self.call = Path(path), call

    def write(self, data):
        return self.call("write", super().write, data, path=self.path)


@contextmanager
def hooked(call):
    """Every change of the disk by a save becomes `call(name, do, *args, path=of a file)`, which may `do(*args)`."""
    files, fsync = {}, os.fsync

    def opened(path, mode="r", **how):
        if mode != "xb":
            return open(path, mode, **how)
        file = call("create", HookedFile, path, call, path=Path(path))
        files[file.fileno()] = file.path
        return io.BufferedWriter(file)

    with ExitStack() as stack:
        hooked_os = SimpleNamespace(**vars(os))
        stack.enter_context(mock.patch.object(checkpoint, "os", hooked_os))
        for place, names in ((hooked_os, IN_OS), (checkpoint, OURS)):
            for name in names:
                do = getattr(place, name)
                stack.enter_context(mock.patch.object(
                    place, name, lambda *args, name=name, do=do: call(name, do, *args, path=None)))
        stack.enter_context(mock.patch.object(checkpoint, "open", opened, create=True))
        stack.enter_context(mock.patch.object(
            os, "fsync", lambda number: call("flush", fsync, number, path=files[number]) if number in files else None))
        yield


@contextmanager
def limited(kind, most):
    """Inside the block this process may have at most so much of a resource, such as `resource.RLIMIT_FSIZE`."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


class Died(BaseException):
    """Nobody catches it for good, as nobody survives SIGKILL."""


def die(*_, **__):
    raise Died


class Disk:
    """Stands in for the operations of a save: before the `last`-th the process dies, then the disk loses what was not
    flushed. Dead is a process that does nothing more: every later operation raises too.

    A write that is the last is half done. `loss` is what survives beside the flushed: "nothing" of the rest (files
    empty, directory entries as they were), "names" (directory entries as they are, files cut in half), or "all" (no
    power loss). Nothing is ever really flushed: only a power loss could tell, and this is it."""

    def __init__(self, last, loss):
        self.last, self.loss, self.count = last, loss, 0
        self.unflushed, self.changes = set(), []

    def operation(self, name, do, *args, path):
        self.count += 1
        if self.count >= self.last:
            if self.count == self.last:
                if name == "write":
                    do(bytes(args[0])[: len(args[0]) // 2])
                    self.unflushed.add(path)
                self.lose()
            raise Died
        result = None if name in ("flush", "fsync") else do(*args)
        if name in ("create", "write"):
            self.unflushed.add(path)
        elif name == "flush":
            self.unflushed.discard(path)
        elif name == "fsync":
            self.flush_directory(args[0])
        if name in ("mkdir", "create"):
            self.changes.append((None, Path(args[0])))
        elif name == "symlink":
            self.changes.append((None, args[1]))
        elif name == "rename":
            self.changes.append(args)
            self.unflushed = {moved(path, *args) for path in self.unflushed}
        return result

    def flush_directory(self, folder):
        kept = []
        for source, path in self.changes:
            if path.parent != folder:
                kept.append((source, path))
            elif source is not None:
                kept = [(old and moved(old, source, path), moved(new, source, path)) for old, new in kept]
        self.changes = kept

    def lose(self):
        if self.loss == "all":
            return
        for path in self.unflushed:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2 if self.loss == "names" else 0)
        if self.loss == "names":
            return
        for source, path in reversed(self.changes):
            if not os.path.lexists(path):
                continue
            if source is not None:
                os.rename(path, source)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def moved(path, source, target):
    return target / path.relative_to(source) if path.is_relative_to(source) else path
