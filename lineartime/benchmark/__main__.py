"""A job in a process of its own, for `measure.Worker`: orders are lines of JSON on stdin, answers on stdout."""

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

from lineartime.benchmark import Row
from lineartime.benchmark.loss import measure_loss
from lineartime.benchmark.measure import measure_gemm
from lineartime.benchmark.memory import read_prompt
from lineartime.benchmark.op import measure_op
from lineartime.benchmark.step import reference, training_steps
from lineartime.errors import LineartimeError
from lineartime.training import out_of_memory

JOBS: dict[str, Callable[..., Iterator[Row]]] = {
    "gemm": measure_gemm, "loss": measure_loss, "op": measure_op, "read": read_prompt, "reference": reference,
    "step": training_steps}


def main() -> None:
    """Do the job of the first line; each line more is sent to its generator, whose answer is a line."""
    # What a library prints must not stand between answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            arguments = json.loads(sys.stdin.readline())
            for answer in goes_on(JOBS[arguments.pop("job")](**arguments)):
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
        except (LineartimeError, RuntimeError, MemoryError) as e:
            if isinstance(e, LineartimeError):
                reason = str(e)
            elif out_of_memory(e):
                reason = "out of memory"
            else:
                raise
            answers.write(json.dumps({"failed": reason}) + "\n")


def goes_on(job: Iterator[Row]) -> Iterator[Row]:
    """The answers of a job to the orders on stdin, until there are no more of either."""
    yield next(job)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        assert isinstance(job, Generator)
        try:
            yield job.send(order)
        except StopIteration:
            return


if __name__ == "__main__":
    main()
