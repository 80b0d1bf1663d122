"""A job in a process of its own, for `measure.Worker`: orders are lines of JSON on stdin, answers on stdout."""

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator

from lineartime.benchmark import Row
from lineartime.benchmark.decode import read_prompt
from lineartime.benchmark.op import measure_op
from lineartime.benchmark.step import reference, training_steps
from lineartime.errors import LineartimeError
from lineartime.training import out_of_memory

JOBS: dict[str, Callable[..., Iterator[Row]]] = {
    "op": measure_op, "read": read_prompt, "reference": reference, "step": training_steps}


def main() -> None:
    """Do the job of the first line; each line more is sent to its generator, whose answer is a line."""
    # What a library prints must not stand between answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            for answer in answers_to(json.loads(line) for line in sys.stdin):
                print(json.dumps(answer), file=answers, flush=True)
        except (LineartimeError, RuntimeError, MemoryError) as e:
            if not isinstance(e, LineartimeError) and not out_of_memory(e):
                raise
            reason = str(e) if isinstance(e, LineartimeError) else "out of memory"
            print(json.dumps({"failed": reason}), file=answers)


def answers_to(orders: Iterator[Row]) -> Iterator[Row]:
    """What a job answers to the first order, which names it, and then to each more; ends when either does."""
    first = next(orders)
    job = JOBS[first.pop("job")](**first)
    yield next(job)
    for order in orders:
        assert isinstance(job, Generator)
        try:
            yield job.send(order)
        except StopIteration:
            return


if __name__ == "__main__":
    main()
