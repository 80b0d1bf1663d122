"""Changes of the disk that a process makes: they are counted, and one of them fails or is the process's last."""

import builtins
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate")
"""Audit events of changes, see the documentation of `sys.addaudithook`."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Disk:
    """Stands between this process and its changes below `folder`, from now on.

    at: the change, from 1, at which it happens: `number` is a signal sent to this process, or `error` the errno that
    the change fails with; with `stays` every change from there on fails. A write that is cut off is half done.
    `count` is how many changes there were."""

    def __init__(self, folder: Path, *, at: int = 0, number: int = 0, error: int = 0, stays: bool = False):
        self.folder, self.at, self.number, self.error, self.stays = os.path.realpath(folder), at, number, error, stays
        self.count, self.short = 0, False
        self.real = {"write": os.write, "fsync": os.fsync, "open": io.open}
        sys.addaudithook(self.heard)
        os.write, os.fsync = self.write, self.fsync
        io.open = builtins.open = self.opened

    def heard(self, event: str, arguments: tuple) -> None:
        if event not in EVENTS or (event == "open" and not (arguments[2] or 0) & WRITING):
            return
        path = arguments[1 if event == "os.symlink" else 0]
        if not isinstance(path, int) and (not os.fsdecode(path).startswith("/") or
                                          os.fsdecode(path).startswith(self.folder)):
            self.change()

    def change(self, partly=None) -> None:
        """One more change. partly: does half of it."""
        self.count += 1
        if self.count == self.at or (self.stays and self.count > self.at > 0):
            if partly is not None and self.number == signal.SIGKILL:
                partly()
            if self.number:
                os.kill(os.getpid(), self.number)
            else:
                raise OSError(self.error, os.strerror(self.error))

    def written(self, data, write) -> int:
        """Write data; returns the number of bytes. A disk that fails takes half of them first, and then the next write
        fails."""
        half = bytes(data)[: len(data) // 2]
        if self.error and self.count + 1 == self.at and half and not self.short:
            self.short, self.at, self.count = True, self.at + 1, self.count + 1
            return write(half)
        self.change(lambda: write(half))
        return write(data)

    def write(self, descriptor: int, data: bytes) -> int:
        return self.written(data, lambda part: self.real["write"](descriptor, part))

    def fsync(self, descriptor) -> None:
        self.change()
        self.real["fsync"](descriptor)

    def opened(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        """`open`, whose files for writing count every write that reaches the system."""
        if not {*mode} & {*"wax+"} or file == os.devnull:  # where ranks but the first print
            return self.real["open"](file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = File(self, file, "".join({*mode} & {*"rwax+"}), closefd, opener)
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)


class File(io.FileIO):
    """A file that tells the disk of its writes."""

    def __init__(self, disk: Disk, *arguments):
        super().__init__(*arguments)
        self.disk = disk

    def write(self, data) -> int:
        return self.disk.written(data, super().write)


SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def disturbed(do: Callable[[], object], folder: Path, counts: Path | None = None, **how) -> Callable[[], object]:
    """A function on a `Disk`. counts: a file that gets how often it has changed the disk below `folder`."""
    def call() -> None:
        disk = Disk(folder, **how)
        try:
            do()
        finally:
            if counts is not None:
                counts.write_text(str(disk.count))

    return call
