"""A stop that is asked for by a signal: the run saves at the next safe moment and ends."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch

from lineartime.base.errors import Stopped
from lineartime.base.ranks import ALONE, Ranks, gather
from lineartime.base.words import Progress


class StopSignal:
    """The first SIGTERM or SIGINT requests a stop at a safe moment; the second ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    def check(self, note: str) -> None:
        """Raise Stopped, with `note`, if a stop was requested."""
        if self.number is not None:
            name = signal.Signals(self.number).name
            raise Stopped(f"stopped by {'Ctrl-C (SIGINT)' if name == 'SIGINT' else name}", note, self.number)

    def agree(self, ranks: Ranks) -> bool:
        """Whether a stop was requested of any rank: one answer for all, so that they stop at the
        same place. A signal that comes while they ask counts the next time."""
        # The largest number of a signal is the same on all ranks, and 0 if no rank was asked.
        number = int(gather(torch.tensor(self.number or 0), ranks).max())
        self.number = number or self.number
        return number > 0

    def watch(self, note: str, progress: Progress | None, what: str, total: int | None,
              ranks: Ranks = ALONE) -> Callable[[int], None]:
        """A callback that takes a count, reports it to `progress`, and raises Stopped if a stop was
        requested. All ranks call it equally often."""
        def counted(done: int) -> None:
            if progress is not None:
                progress(what, done, total)
            if self.agree(ranks):
                self.check(note)

        return counted

    @contextmanager
    def listening(self, tell: Callable[[str], None] = lambda name: None) -> Iterator["StopSignal"]:
        """Handle the signals in the block; their handler calls tell with the name of the first."""
        def asked(number: int, frame: FrameType | None) -> None:
            if self.number is not None:
                return
            self.number = number
            tell(signal.Signals(number).name)
            time.sleep(0.1)  # programs such as `timeout` send the same signal twice
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)

        with ExitStack() as at_end:
            for each in (signal.SIGTERM, signal.SIGINT):
                at_end.callback(signal.signal, each, signal.signal(each, asked))
            yield self
