"""A run of the command line that a test watches and disturbs, in a process forked from that of `warm_command`.

The process says in the file `events` what it is doing, a line as it begins and one as it ends, and can be asked to wait
at one of these lines until the file `go` is there."""

import os
import resource
import time
from pathlib import Path

from dying_saves import limited
from lineartime.cli import verbs
from lineartime.training import language, loop, objectives, run
from lineartime.weights import checkpoint

WATCHED = [(checkpoint, "lock"), (run.Run, "resume"), (loop, "compute_gradient"), (objectives, "evaluate_data"),
           (checkpoint, "save"), (checkpoint, "_write_checkpoint"), (language, "finish"), (language, "evaluate_data"),
           (language, "generate"), (language, "plot_run")]


class Events:
    """Stands around the functions of a run and says when they are entered and left."""

    def __init__(self, folder, wait_at):
        self.folder, self.wait_at, self.seen = Path(folder), wait_at, {}
        for owner, name in WATCHED:
            label = {"evaluate_data": "final evaluate" if owner is language else "evaluate"}.get(name, name)
            setattr(owner, name, self.watched(getattr(owner, name), label))

    def watched(self, function, label):
        def call(*args, **kwargs):
            self.seen[label] = self.seen.get(label, 0) + 1
            self.say(f"{label} {self.seen[label]}")
            try:
                return function(*args, **kwargs)
            finally:
                self.say(f"end of {label} {self.seen[label]}")
        return call

    def say(self, event):
        with open(self.folder / "events", "a") as file:
            file.write(event + "\n")
        if event == self.wait_at:
            wait_for((self.folder / "go").exists)


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def with_memory(function, more):
    """The function with at most so many more bytes than the process has when it is called."""
    def call(*args, **kwargs):
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(resource.RLIMIT_AS, has + more):
            return function(*args, **kwargs)
    return call


def run_watched(folder, wait_at=None, memory=None):
    """The command line of this process, in training with at most `memory` more bytes."""
    if memory is not None:
        # From the start, as `ulimit -v` would: `runtime.choose_settings` asks whether memory is limited.
        resource.setrlimit(resource.RLIMIT_AS, (2**46, resource.getrlimit(resource.RLIMIT_AS)[1]))
        loop.fit = with_memory(loop.fit, memory)
    events = Events(folder, wait_at)
    try:
        verbs.main()
    finally:
        events.say("over")


class Launches:
    """Launches of one command, one after another; what it prints is in the file `printed`."""

    def __init__(self, processes, folder, arguments, **limits):
        self.processes, self.folder, self.arguments, self.limits = processes, folder, arguments, limits
        folder.mkdir(exist_ok=True)

    def start(self, wait_at=None):
        """The process's number."""
        for name in ("events", "go"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "events").touch()
        with open(os.devnull) as none, open(self.folder / "printed", "w") as out:
            return self.processes.start(self.arguments, [none.fileno(), out.fileno(), out.fileno()],
                                        folder=str(self.folder), wait_at=wait_at, **self.limits)

    def run(self):
        return self.processes.wait(self.start())

    def wait_for(self, event):
        """Wait for an event, or for so many of them, or for the end."""
        wait_for(lambda: {event, "over"} & {*self.events(), len(self.events())})

    def events(self):
        return (self.folder / "events").read_text().splitlines()

    def printed(self):
        return (self.folder / "printed").read_text()
