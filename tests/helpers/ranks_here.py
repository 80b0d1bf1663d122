"""Ranks of one machine, with the environment that `torchrun` gives them."""

import datetime
import os
import signal
import subprocess
from contextlib import suppress

import torch
from torch.distributed import TCPStore

from lineartime.weights import checkpoint
from tiny_runs import content


class RanksHere:
    """`lineartime`, or `command`, in several processes, each of which prints into `rank-N.txt`."""

    def __init__(self, command, folder):
        self.command, self.folder, self.attempt = command, folder, 0
        # As torchrun does, hold the store that outlives the ranks.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                              timeout=datetime.timedelta(seconds=60))
        self.port = self.store.port
        self.processes = []

    def start(self, n_ranks, arguments, **of_rank):
        """of_rank: arguments in place of these for single ranks, by `rank_N`."""
        self.attempt += 1
        common = {**os.environ, "WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
                  "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                  "TORCHELASTIC_RESTART_COUNT": str(self.attempt)}
        self.processes = []
        for rank in range(n_ranks):
            with open(self.printed_by(rank), "w", encoding="utf-8") as out:
                self.processes.append(subprocess.Popen(
                    [*self.command, *map(str, of_rank.get(f"rank_{rank}", arguments))], stdout=out, stderr=out,
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def end(self, timeout=120):
        return [process.wait(timeout) for process in self.processes]

    def run(self, n_ranks, arguments, **of_rank):
        self.start(n_ranks, arguments, **of_rank)
        return self.end()

    def printed_by(self, rank):
        return self.folder / f"rank-{rank}.txt"

    def printed(self):
        return "".join(self.printed_by(rank).read_text() for rank in range(len(self.processes)))

    def errors(self):
        return [line for line in self.printed().splitlines() if line.startswith(("error: ", "stopped by "))]

    def close(self):
        for process in self.processes:
            process.send_signal(signal.SIGUSR1)  # a warm command, see `warm_command.SIGNALS`, may have stopped
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


def state_of(out):
    folder = (out / "latest").resolve()
    moments = {f"moments of {name}": x.flatten() for name, x in checkpoint.read_tensors(folder, "optimizer").items()}
    logs = {name: content(out / name) for name in ("metrics.jsonl", "result.json")}
    return {**checkpoint.read_tensors(folder, "model"), **moments, **logs}


def differences(out, expected):
    def same(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b

    found = state_of(out)
    return [name for name in sorted({*found, *expected}) if not same(found.get(name), expected.get(name))]
