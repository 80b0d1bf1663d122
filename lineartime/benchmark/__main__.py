"""One measurement in a process of its own: `measure.in_own_process` describes the job on stdin."""

import json
import sys
from collections.abc import Callable

from lineartime.benchmark.measure import Row
from lineartime.benchmark.memory import read_prompt
from lineartime.benchmark.step import train_step
from lineartime.config import ModelConfig

JOBS: dict[str, Callable[..., Row]] = {"train": train_step, "read": read_prompt}


def main() -> None:
    """Do the job that stdin describes; the answer is a line of JSON."""
    arguments = json.load(sys.stdin)
    job = JOBS[arguments.pop("job")]
    print(json.dumps(job(ModelConfig(**arguments.pop("config")), **arguments)))


if __name__ == "__main__":
    main()
