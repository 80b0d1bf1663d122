"""The whole study of recall, `python -m benchmarks reproduce recall`: it measures what is missing."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.paper.runner import STOPPED, Place, call, prepare
from benchmarks.paper.scales import SCALES, Text
from benchmarks.recall.study import (
    TEXT,
    Cell,
    best_rate,
    config_of,
    models_of,
    read_rows,
    read_study,
    task_of,
    training,
)
from lineartime import checkpoint
from lineartime.errors import ResourceError
from lineartime.training import StopSignal


def text_of() -> Text:
    """The text that the task in text reads."""
    return SCALES["cpu"].texts["wiki40b"]


def missing(task: str, place: Place) -> list[str]:
    """The models that lack a row of a task: every learning rate with the first seed, the best with the others."""
    study, rows = read_study()["study"], read_rows(place.rows)
    about = task_of(task, place.data(text_of()) if task == TEXT else None)
    found = []
    for model in models_of(task):
        key = Cell(model, task, config_of(model, about, {}), training(task, about, {})).key
        there = {(row["learning_rate"], row["seed"]): row for row in rows
                 if all(row.get(name) == key[name] for name in ("task", "model", "settings", "training"))}
        first = [there[rate, 0] for rate in study["learning_rates"] if (rate, 0) in there]
        if len(first) < len(study["learning_rates"]) or any(
                (best_rate(first), seed) not in there for seed in range(1, study["seeds"])):
            found.append(model)
    return found


def tasks_of(place: Place) -> list[str]:
    """The tasks that can be measured: that in text where its text is named."""
    return [task for task in read_study()["tasks"] if task != TEXT or place.texts is not None]


def plan_lines(place: Place) -> list[str]:
    """What the rows of each task lack. Of the task in text that is known once its text has been prepared."""
    lines = [f"{task}: {'; '.join(missing(task, place)) or 'complete'}" for task in tasks_of(place)
             if task != TEXT or place.data(text_of()).is_dir()]
    if place.texts is None:
        return [*lines, f"{TEXT}: left out without --texts, the folder that holds it"]
    if not place.data(text_of()).is_dir():
        lines.append(f"{TEXT}: its text has not been prepared in {place.out}; the same command without --plan does it")
    return lines


def reproduce_recall(place: Place, stop: StopSignal) -> int:
    """Measure what the rows lack; returns how many were added. Raises as `runner.reproduce` does."""
    with checkpoint.lock(place.out):
        if place.texts is not None:
            prepare(text_of(), place, stop)
        tasks = tasks_of(place)
        if TEXT not in tasks:
            place.tell("the task in text is left out: give --texts the folder that holds it")
        todo = [(task, model) for task in tasks for model in missing(task, place)]
        before = len(read_rows(place.rows))
        place.tell(f"recall: {len(todo)} models have rows to measure")
        (place.out / "recall").mkdir(parents=True, exist_ok=True)
        seconds: list[float] = []

        def measure(task: str, model: str) -> None:
            began = time.monotonic()
            data = ["--data", str(place.data(text_of()))] if task == TEXT else []
            name = f"{task}-{model}".replace(" ", "-").replace(",", "")
            failed = call(["recall", model, "--task", task, "--json", str(place.rows), *data], f"{model}, {task}",
                          place.out / "recall" / f"{name}.log", place, stop)
            if failed:
                raise ResourceError("recall cannot be measured", f"{model}, {task}", failed)
            seconds.append(time.monotonic() - began)

        with ThreadPoolExecutor(place.jobs) as pool:
            futures = {pool.submit(measure, *each): each for each in todo}
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    future.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
                if stop.number is None:
                    left = (len(todo) - done) * statistics.fmean(seconds) / place.jobs / 60
                    label = ", ".join(reversed(futures[future]))
                    place.tell(f"[{done}/{len(todo)}] {label}: done; {left:,.0f} minutes are left")
        stop.check(STOPPED)
        return len(read_rows(place.rows)) - before
