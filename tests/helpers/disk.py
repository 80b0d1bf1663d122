"""Changes of the disk that this process makes below a folder: counted, failing, the process's last,
or taken back by a power loss where they were not flushed."""

import builtins
import io
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

CHANGES = {"open": 0, "os.rename": 0, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.symlink": 1, "os.truncate": 0}
"""Audit events of changes, see the documentation of `sys.addaudithook`, and where the path is."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
WATCHING: list["Disk"] = []
Write = Callable[[bytes], int]


@cache
def listen() -> None:
    """Tell the disks of all changes. A hook cannot be taken away again."""
    sys.addaudithook(lambda event, arguments: [
        disk.heard(event, arguments) for disk in WATCHING[:]] if event in CHANGES else None)


class Disk:
    """Stands between this process and its changes below `folder` in a `with` block, and counts."""

    def __init__(self, folder: Path):
        self.folder, self.count = os.path.realpath(folder), 0

    def __enter__(self) -> "Disk":
        listen()
        self.real = {"write": os.write, "fsync": os.fsync, "open": io.open}
        WATCHING.append(self)
        os.write, os.fsync = self.write, self.fsync
        io.open = builtins.open = self.open
        return self

    def __exit__(self, *error: object) -> None:
        WATCHING.remove(self)
        os.write, os.fsync = self.real["write"], self.real["fsync"]
        io.open = builtins.open = self.real["open"]

    def change(self, name: str, *paths: object, partly: Callable[[], object] | None = None) -> None:
        """One more change is about to be made. partly: does half of it."""
        self.count += 1

    def written(self, path: object, data: bytes, write: Write) -> int:
        self.change("write", path, partly=lambda: write(bytes(data)[: len(data) // 2]))
        return write(data)

    def heard(self, event: str, arguments: tuple) -> None:
        path = arguments[CHANGES[event]]
        if isinstance(path, int) or (event == "open" and not (arguments[2] or 0) & WRITING):
            return
        if not os.fsdecode(path).startswith("/") or os.fsdecode(path).startswith(self.folder):
            self.change(event, *arguments[:2])

    def write(self, descriptor: int, data: bytes) -> int:
        return self.written(None, data, lambda part: self.real["write"](descriptor, part))

    def fsync(self, descriptor: int) -> None:
        self.change("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        self.real["fsync"](descriptor)

    def open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        """`open`, whose files for writing count every write that reaches the system."""
        if not {*mode} & {*"wax+"} or file == os.devnull:  # where ranks but the first print
            return self.real["open"](file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = File(self, file, "".join({*mode} & {*"rwax+"}), closefd, opener)
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)


class File(io.FileIO):
    def __init__(self, disk: Disk, *arguments):
        super().__init__(*arguments)
        self.disk = disk

    def write(self, data) -> int:
        return self.disk.written(self.name, data, super().write)


class Faults(Disk):
    """At change `at`, from 1, this process gets the signal `number`, or the change fails with the
    errno `error`; with `stays` so does every later one but removals. A write is half done."""

    def __init__(self, folder: Path, at: int = 0, *, number: int = 0, error: int = 0, stays: bool = False):
        super().__init__(folder)
        self.at, self.number, self.error, self.stays, self.short = at, number, error, stays, False

    def change(self, name, *paths, partly=None):
        super().change(name)
        removes = self.error and self.stays and name in ("os.remove", "os.rmdir")  # it goes on on a full disk
        if not removes and (self.count == self.at or (self.stays and self.count > self.at > 0)):
            if partly is not None and self.number == signal.SIGKILL:
                partly()
            if self.number:
                os.kill(os.getpid(), self.number)
            else:
                raise OSError(self.error, os.strerror(self.error))

    def written(self, path, data, write):
        """A disk that fails takes half of the data first, and then the next write fails."""
        half = bytes(data)[: len(data) // 2]
        if self.error and self.count + 1 == self.at and half and not self.short:
            self.short, self.at, self.count = True, self.at + 1, self.count + 1
            return write(half)
        return super().written(path, data, write)


class Died(BaseException):
    """Nobody catches it for good, as nobody survives SIGKILL."""


class PowerLoss(Disk):
    """Before the `last`-th change the process dies (every later one raises too), then the disk
    loses what was not flushed. A write that is the last is half done. `loss` is what survives
    beside the flushed: "nothing" of the rest (files empty, directory entries as they were), "names"
    (entries as they are, files cut in half), or "all". Nothing is ever really flushed."""

    def __init__(self, folder: Path, last: int, loss: str):
        super().__init__(folder)
        self.last, self.loss = last, loss
        self.unflushed: set[Path] = set()
        self.made: list[tuple[Path | None, Path]] = []  # entries no directory has flushed: before, now

    def change(self, name, *paths, partly=None):
        super().change(name)
        path, *others = (Path(each) if isinstance(each, str | Path) else each for each in paths)
        if self.count >= self.last:
            if self.count == self.last:
                WATCHING.remove(self)
                if partly:
                    partly()
                    self.unflushed.add(path)
                self.lose()
                WATCHING.append(self)
            raise Died
        if name in ("open", "write"):
            self.unflushed.add(path)
        if name == "fsync":
            self.unflushed.discard(path)
            self.made = self.after_flush(path)
        elif name in ("os.mkdir", "open"):
            self.made.append((None, path))
        elif name == "os.symlink":
            self.made.append((None, others[0]))
        elif name == "os.rename":
            self.made.append((path, others[0]))
            self.unflushed = {moved(each, path, others[0]) for each in self.unflushed}

    def fsync(self, descriptor):
        self.change("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))

    def after_flush(self, folder: Path) -> list[tuple[Path | None, Path]]:
        """The entries that are not flushed once those of a folder are."""
        kept: list[tuple[Path | None, Path]] = []
        for source, path in self.made:
            if path.parent != folder:
                kept.append((source, path))
            elif source is not None:
                kept = [(old and moved(old, source, path), moved(new, source, path)) for old, new in kept]
        return kept

    def lose(self) -> None:
        if self.loss == "all":
            return
        for path in self.unflushed:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2 if self.loss == "names" else 0)
        if self.loss == "names":
            return
        for source, path in reversed(self.made):
            if not os.path.lexists(path):
                continue
            if source is not None:
                os.rename(path, source)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


def disturbed(do: Callable[[], object], folder: Path, counts: Path | None = None, **how) -> Callable[[], object]:
    """A function on a disk with `Faults`. counts: a file that gets the number of changes."""
    def call() -> None:
        disk = Faults(folder, **how)
        try:
            with disk:
                do()
        finally:
            if counts is not None:
                counts.write_text(str(disk.count))

    return call


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
