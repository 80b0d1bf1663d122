"""Errors raised on purpose. Each has a message of one line, `WHAT: WHERE; what to do`, which the
command line prints without a traceback, and an exit code."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal or turn the order of its text, but for line feeds and tabs."""


def escaped(text: str) -> str:
    """Text with its control characters as escapes such as `\\x1b`: it cannot steer a terminal."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class LineartimeError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1

    def __init__(self, what: str, where: object = None, todo: str | None = None):
        self.what, self.where, self.todo = what, where, todo
        message = what if where is None else f"{what}: {where}"
        super().__init__(escaped(" ".join((message if todo is None else f"{message}; {todo}").splitlines())))


class UsageError(LineartimeError):
    """Wrong arguments or a wrong configuration."""

    exit_code = 2


class DataError(LineartimeError):
    """Text or prepared tokens that cannot be used; `where` is the file with the line or byte."""

    exit_code = 3


class CheckpointError(LineartimeError):
    """A damaged or missing checkpoint, or one of another run."""

    exit_code = 4


class NumericsError(LineartimeError):
    """A loss, gradient, weight or other number that is not finite, or is not what it must be."""

    exit_code = 5


class ResourceError(LineartimeError):
    """The environment: disk, memory, a lock held by another run."""

    exit_code = 6


class RankError(LineartimeError):
    """Another process of a run ended, or did not answer."""

    exit_code = 7


class Stopped(LineartimeError):
    """A command that a signal stopped, after it saved what it keeps; exit code 130 or 143."""

    def __init__(self, what: str, where: str, number: int):
        super().__init__(what, where)
        self.exit_code = 128 + number


def reason_of(error: BaseException) -> str:
    """Why another library's error was raised, in words."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def found_in(file: object) -> Iterator[None]:
    """Inside the block, our errors also name the file that has what is wrong."""
    try:
        yield
    except LineartimeError as e:
        raise type(e)(e.what, f"{e.where} in {file}", e.todo) from None


@contextmanager
def raised_as(kind: type[LineartimeError], what: str, where: object, *caught: type[Exception],
              todo: str | None = None) -> Iterator[None]:
    """Inside the block, errors of the types `caught` become ours, with their reason or `todo`."""
    try:
        yield
    except caught as e:
        raise kind(what, where, todo or reason_of(e)) from None
