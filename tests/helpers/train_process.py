"""Processes that train, forked from one that has imported everything: `lineartime train` without the start-up.

`python train_process.py` answers each line of JSON. A process says in the file `events` what it is doing, a line as it
begins and one as it ends, and can be asked to wait at one of these lines until the file `go` is there."""

import gc
import json
import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

import lineartime
from lineartime import checkpoint, objectives, run
from lineartime.cli import verbs
from lineartime.training import language, loop

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
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (has + more, before[1]))
        try:
            return function(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    return call


def do_train(arguments, folder, wait_at=None, memory=None):
    """The command line, with what it prints in the file `printed`, and in training at most `memory` more bytes."""
    if memory is not None:
        # From the start, as `ulimit -v` would: `runtime.choose_settings` asks whether memory is limited.
        resource.setrlimit(resource.RLIMIT_AS, (2**46, resource.getrlimit(resource.RLIMIT_AS)[1]))
        loop.fit = with_memory(loop.fit, memory)
    printed = os.open(Path(folder) / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    events = Events(folder, wait_at)
    sys.argv = ["lineartime", *arguments]
    try:
        verbs.main()
    finally:
        events.say("over")


class Processes:
    """Asks for a process, and gives its pid, or how it ended (a negative number is a signal)."""

    def __init__(self):
        environment = {**os.environ, "PYTHONPATH": str(Path(lineartime.__file__).parents[1])}
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=environment)

    def ask(self, **request):
        self.server.stdin.write(json.dumps(request, default=str) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, **arguments):
        return self.ask(arguments=arguments)

    def wait(self, pid):
        return self.ask(wait=pid)

    def close(self):
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait(30)


class Launches:
    """Launches of one command, one after another."""

    def __init__(self, processes, folder, arguments, **limits):
        self.processes, self.folder, self.arguments, self.limits = processes, folder, arguments, limits
        folder.mkdir(exist_ok=True)

    def start(self, wait_at=None):
        for name in ("events", "go", "printed"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "events").touch()
        return self.processes.start(arguments=self.arguments, folder=self.folder, wait_at=wait_at, **self.limits)

    def run(self):
        return self.processes.wait(self.start())

    def wait_for(self, event):
        """Wait for an event, or for so many of them, or for the end."""
        wait_for(lambda: {event, "over"} & {*self.events(), len(self.events())})

    def events(self):
        return (self.folder / "events").read_text().splitlines()

    def printed(self):
        return (self.folder / "printed").read_text()


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                end_with(partial(do_train, **request["arguments"]))
        print(json.dumps(answer), flush=True)


def end_with(function):
    """End a forked process as the function ends, without what Python does at exit: that belongs to its parent."""
    code = 1
    try:
        function()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm_up():
    """What is imported at the first use. No backward pass: autograd does not survive a fork."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    torch.optim.AdamW([parameter], fused=True).step()
    import matplotlib.figure

    matplotlib.figure.Figure().subplots()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up()
    gc.collect()
    gc.freeze()  # so that processes go on sharing what is imported
    serve()
