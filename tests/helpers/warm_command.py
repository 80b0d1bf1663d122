"""`lineartime` without the start-up, in processes forked from one that has imported everything:
`python warm_command.py SOCKET -- info flash` hands its arguments, folder, environment, descriptors
and signals on to such a process and ends as that does."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SIGNALS = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGUSR1: signal.SIGKILL,
           signal.SIGUSR2: signal.SIGSTOP}
"""What the command's process gets for a signal to the one that asked; some cannot be handed on."""


class WarmCommand:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.path = os.path.join(self.folder.name, "socket")
        helpers = Path(__file__).parent
        paths = os.pathsep.join(map(str, [helpers.parents[1], helpers.parent, helpers]))
        self.server = subprocess.Popen([sys.executable, __file__, self.path], stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths})
        assert self.server.stdout.readline() == b"ready\n"
        self.command = [sys.executable, "-S", "-E", __file__, self.path, "--"]

    def run(self, arguments, printed, **disturbed):
        """Run the command; its exit code, negative for a signal. printed: the file for output.
        disturbed: keywords of `disk.disturbed`, or `memory`: so many bytes more in training."""
        with open(os.devnull) as none, open(printed, "w") as out:
            _, answers = asked(self.path, arguments, [none.fileno(), out.fileno(), out.fileno()], disturbed)
        with answers:
            return int(answers.readline())

    def close(self):
        self.server.terminate()
        self.server.wait(30)
        self.server.stdout.close()
        self.folder.cleanup()


def asked(path, arguments, descriptors, disturbed=None):
    """The number of a new process that runs the command, and what will say how it ends."""
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.connect(path)
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ),
                   "disturbed": disturbed or {}}
        socket.send_fds(pipe, [json.dumps(request, default=str).encode() + b"\n"], descriptors)
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
    """Fork for every request; return it, in the process that is to run a command. End with the
    parent, which may die of a test that hangs."""
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
    """Start what a request asks for and say how it ends; return it, in the process that runs it."""
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
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, encoding="utf-8", closefd=False) for n, mode in enumerate("rww"))
    return request


def with_memory(function, more):
    from disk import limited

    def call(*args, **kwargs):
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(resource.RLIMIT_AS, has + more):
            return function(*args, **kwargs)

    # From the start, as `ulimit -v` would: `choose_settings` asks whether memory is limited.
    resource.setrlimit(resource.RLIMIT_AS, (2**46, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return call


def main(path):
    import torch
    from drills import child

    from disk import disturbed
    from lineartime.cli import verbs  # noqa: F401
    from lineartime.training import language, loop  # noqa: F401  # everything that a run imports

    child.settle()
    request = serve(path)
    # The first to ask torch 2.11's pool of threads after a fork makes it anew. Two of autograd's at
    # once find none.
    torch.set_num_threads(1)
    do, how = child.verb(request["arguments"]), request["disturbed"]
    if "memory" in how:
        loop.fit = with_memory(loop.fit, how["memory"])
    elif how:
        do = disturbed(do, **{name: Path(value) if isinstance(value, str) else value for name, value in how.items()})
    # Without what Python does at exit: that belongs to the parent.
    os._exit(child.called(do))


if __name__ == "__main__":
    if sys.argv[2:]:
        ask(sys.argv[1], sys.argv[3:])
    main(sys.argv[1])
