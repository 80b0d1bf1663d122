"""`lineartime` in processes forked from one that has imported everything: what a test starts without the start-up.

`python warm_command.py SOCKET --info flash` hands its arguments, folder, environment, descriptors and signals on to
such a process and ends as that does; it imports little. Tests of the start-up itself use `python -m lineartime`."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

SIGNALS = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGUSR1: signal.SIGKILL,
           signal.SIGUSR2: signal.SIGSTOP}
"""What the process that runs the command gets for a signal to the one that asked for it; some cannot be handed on."""


class WarmCommand:
    """The process that is forked; `command` stands for `python -m lineartime`."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        path = os.path.join(self.folder.name, "socket")
        helpers = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [helpers.parents[1], helpers]))}
        self.server = subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.DEVNULL, env=environment,
                                       stdout=subprocess.PIPE)
        assert self.server.stdout.readline() == b"ready\n"
        self.path, self.command = path, [sys.executable, "-S", "-E", __file__, path, "--"]
        self.answers = {}

    def start(self, arguments, descriptors, **watched):
        """A process that runs the command with these standard streams, watched as in `train_process`; its number."""
        pid, answers = asked(self.path, arguments, descriptors, watched)
        self.answers[pid] = answers
        return pid

    def wait(self, pid):
        """How a process has ended that `start` gave; a negative number is a signal."""
        with self.answers.pop(pid) as answers:
            return int(answers.readline())

    def close(self):
        self.server.terminate()
        self.server.wait(30)
        self.server.stdout.close()
        self.folder.cleanup()


def asked(path, arguments, descriptors, watched=None):
    """The number of a new process that runs the command, and what will say how it ends."""
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.connect(path)
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "watched": watched}
        socket.send_fds(pipe, [json.dumps(request).encode() + b"\n"], descriptors)
        answers = pipe.makefile()
    return int(answers.readline()), answers


def ask(path, arguments):
    """Be the process that runs the command, as far as anybody outside can tell."""
    pid, answers = asked(path, arguments, [0, 1, 2])
    for number, sent in SIGNALS.items():
        signal.signal(number, lambda _, frame, sent=sent: os.kill(pid, sent))
    code = int(answers.readline())
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path):
    """Fork for every request; return, in the process that is to run a command. End with the process that started this
    one: it may die of a test that hangs."""
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(5)
        print("ready", flush=True)
        while os.getppid() == parent:
            with suppress(TimeoutError):
                pipe, _ = listener.accept()
                pipe.setblocking(True)
                if os.fork() == 0:
                    listener.close()
                    return attend(pipe)
                pipe.close()
                with suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
        os._exit(0)


def attend(pipe):
    """Start what one request asks for and say how it ends; return, in the process that runs it, how it is watched."""
    text, descriptors, _, _ = socket.recv_fds(pipe, 1 << 16, 3)
    while not text.endswith(b"\n"):
        more = pipe.recv(1 << 16)
        if not more:
            os._exit(1)  # who asked is gone
        text += more
    pid = os.fork()
    if pid:
        pipe.sendall(f"{pid}\n".encode())
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        pipe.sendall(b"%d\n" % (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
        pipe.recv(1)  # the number stays the process's until who asked is gone, and may be sent signals
        os._exit(0)
    pipe.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    request = json.loads(text)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["lineartime", *request["arguments"]]
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, encoding="utf-8", closefd=False) for n, mode in enumerate("rww"))
    return request["watched"]


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


if __name__ == "__main__":
    if sys.argv[2:]:
        ask(sys.argv[1], sys.argv[3:])
    import matplotlib.figure
    import torch

    import train_process  # everything that a run imports
    from lineartime.cli import verbs

    # What is imported at the first use. No backward pass: autograd does not survive a fork.
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).step()
    matplotlib.figure.Figure().subplots()
    gc.collect()
    gc.freeze()  # so that processes go on sharing what is imported
    watched = serve(sys.argv[1])
    # The first to ask torch 2.11's pool of threads after a fork makes it anew. Two of autograd's at once find none.
    torch.set_num_threads(1)
    end_with(partial(train_process.run_watched, **watched) if watched else verbs.main)
