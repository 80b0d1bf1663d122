"""Processes forked from one that has imported everything, which is asked for them by lines of JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lineartime


class ForkServer:
    """The asking end. The other is a script that answers each line with a pid, or with how a process ended."""

    def __init__(self, script):
        environment = {**os.environ, "PYTHONPATH": str(Path(lineartime.__file__).parents[1])}
        self.server = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=environment)

    def ask(self, **request):
        self.server.stdin.write(json.dumps(request, default=str) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def wait(self, pid):
        return self.ask(wait=pid)

    def close(self):
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait(30)
