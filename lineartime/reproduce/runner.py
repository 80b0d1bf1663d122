"""The runs of a table: what is missing is prepared, trained, fine-tuned and timed, and each ends in a row.

A run is a process of its own, `lineartime train` with the settings of its cell, and goes on where it stopped. Rows are
added as they come, so that a kill costs what the newest checkpoints lack and nothing else.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lineartime import checkpoint
from lineartime.atomic_io import append_json_lines, read_json, write_atomically
from lineartime.benchmark import ROOT
from lineartime.benchmark.measure import provenance, spread
from lineartime.benchmark.peers import parse_label
from lineartime.benchmark.step import StepCase, benchmark_step
from lineartime.config import ModelConfig, run_config
from lineartime.data.tokens import read_manifest
from lineartime.errors import LineartimeError, NumericsError, ResourceError, UsageError
from lineartime.info import describe
from lineartime.reproduce.records import Record, measured_together, read_records, records_of
from lineartime.reproduce.scales import Cell, Questions, Text, caption_of, cells_of
from lineartime.reproduce.tables import ScaleName
from lineartime.run import RESULT_FILE, read_metrics, read_run
from lineartime.runtime import end_with_parent
from lineartime.training import StopSignal

TOLD_EVERY_S = 30.0
"""Between two lines of one run's progress."""

STOPPED = "what ran has saved; the same command goes on"


@dataclass(frozen=True)
class Job:
    """One run: a cell's settings with one seed."""

    cell: Cell
    seed: int

    @property
    def label(self) -> str:
        return f"{self.cell.row}, {self.cell.column}, seed {self.seed}"

    @property
    def folder(self) -> str:
        """Named for a person, and by all that decides the run."""
        settings = self.cell.settings(self.seed)
        digest = hashlib.sha256(json.dumps([self.cell.text.name, settings], sort_keys=True).encode()).hexdigest()[:10]
        return f"{settings['model']}-{self.cell.text.name}-{settings['context']}-{digest}"


@dataclass(frozen=True)
class Place:
    """Where a table's runs read and write, on what, and how many at a time."""

    texts: Path | None
    out: Path
    rows: Path
    device: str
    jobs: int
    seeds: int | None
    """Of each cell only the first so many."""
    tell: Callable[[str], None]

    def data(self, text: Text) -> Path:
        return self.out / "data" / text.name

    @property
    def threads(self) -> int:
        """Of one run: the processor's cores shared out, unless the environment says."""
        return int(os.environ.get("OMP_NUM_THREADS") or max((os.cpu_count() or 1) // self.jobs, 1))

    def below_texts(self, name: str) -> str:
        """A file or folder of the texts, or what is on the hub. Raises UsageError where no texts are named."""
        if name.startswith("hub:"):
            return name
        if self.texts is None:
            raise UsageError("no texts are named", name, "give --texts the folder that holds it")
        return str(self.texts / name)


def missing_jobs(cells: Sequence[Cell], rows: Sequence[Record], seeds: int | None = None) -> list[Job]:
    """The runs that have no row yet: every cell with its first seed, then with its second, ...; of the first `seeds`
    only."""
    return [Job(cell, seed) for seed in range(max(len(cell.seeds) for cell in cells)) for cell in cells
            if cell.table.kind == "train" and seed in cell.seeds[:seeds]
            and not records_of(cell, rows, "finetune" if cell.questions else "train", seed)]


def missing_times(cells: Sequence[Cell], rows: Sequence[Record]) -> list[list[Cell]]:
    """The columns whose steps have not been timed side by side."""
    columns: dict[str, list[Cell]] = {}
    for cell in cells:
        columns.setdefault(cell.column, []).append(cell)
    return [column for column in columns.values() if measured_together(column, rows) is None]


def reproduce(table: str, scale: ScaleName, place: Place, stop: StopSignal) -> int:
    """Run what a table at a scale still lacks; returns how many rows were added.

    Raises UsageError and DataError for text that is not there, Stopped after the runs have saved, and what a run that
    failed said."""
    cells = cells_of(table, scale)
    with checkpoint.lock(place.out):
        rows = read_records(place.rows)
        jobs, columns = missing_jobs(cells, rows, place.seeds), missing_times(cells, rows)
        place.tell(f"{table} at scale {scale}: {len(cells)} cells; {len(jobs)} runs and {len(columns)} columns of step "
                   "times are missing")
        for text in dict.fromkeys(job.cell.text for job in jobs):
            prepare(text, place, stop)
        n_rows = sum(len(time_steps(column, place, stop)) for column in columns)
        for row in run_all(jobs, rows, place, stop):
            n_rows += 1
            place.tell(f"  {row['settings']['model']}, context {row['settings']['context']:,}: {result_text(row)}")
    return n_rows


def plan_lines(table: str, scale: ScaleName, rows: Sequence[Record]) -> list[str]:
    """What a table at a scale has and lacks: a line for each cell, and one for each column's step times."""
    cells = cells_of(table, scale)
    jobs, columns = missing_jobs(cells, rows), missing_times(cells, rows)
    lines = [f"{table} at scale {scale}: {caption_of(cells[0].table, cells[0].scale)}"]
    for cell in cells:
        seeds = [str(job.seed) for job in jobs if job.cell is cell]
        what = f"{cell.row}, {cell.column}, {cell.text.name}"
        if cell.table.kind == "train":
            lines.append(f"  {what}: " + (f"missing seed {', '.join(seeds)}" if seeds else "there"))
    missing = ", ".join(column[0].column for column in columns)
    return [*lines, f"  step times, side by side: {f'missing in {missing}' if missing else 'there'}"]


def prepare(text: Text, place: Place, stop: StopSignal) -> None:
    """Tokenise a text, unless that is done."""
    source, out = "--hub" if text.folder is None else place.below_texts(text.folder), place.data(text)
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = call(["prepare", source, "--task", text.task, "--vocab-size", str(text.vocab_size), "--out", str(out),
                   *(["--mlm"] if text.mlm else [])], f"text {text.name}", out.with_suffix(".log"), place,
                  lambda: stop.number is not None)
    stop.check(STOPPED)
    if failed is not None:
        raise failed


def run_all(jobs: Sequence[Job], rows: Sequence[Record], place: Place, stop: StopSignal) -> Iterator[Record]:
    """Every job's rows, written as they come. Where one fails the others save and end, as when asked to stop."""
    ending = threading.Event()

    def over() -> bool:
        return ending.is_set() or stop.number is not None

    def work(number: int, job: Job) -> list[Record]:
        if over():
            return []
        place.tell(f"[{number}/{len(jobs)}] {job.label}")
        return run_job(job, rows, place, over)

    with ThreadPoolExecutor(place.jobs) as pool:
        futures = [pool.submit(work, number, job) for number, job in enumerate(jobs, 1)]
        try:
            for future in as_completed(futures):
                made = future.result()
                append_json_lines(place.rows, made)
                yield from made
        finally:
            ending.set()
    stop.check(STOPPED)


def result_text(row: Record) -> str:
    """A run's result in words."""
    if "failed" in row:
        return row["failed"]
    if row["kind"] == "finetune":
        return f"F1 {row['f1']:.2f}, EM {row['exact_match']:.2f}"
    return f"{row['held_out']['loss']:.4f} nats per token after {row['train_s']['wall']:,.0f} s"


def run_job(job: Job, rows: Sequence[Record], place: Place, over: Callable[[], bool]) -> list[Record]:
    """Train, and fine-tune where the cell says so; the rows that are new, none where it was stopped."""
    cell, folder = job.cell, place.out / "runs" / job.folder
    run, settings = folder / "run", cell.settings(job.seed)
    made: list[Record] = []
    given = {**settings, "data": str(place.data(cell.text)), "out": str(run)}
    shared = {"scale": cell.scale.name, "text": cell.text.name, "settings": settings, "device": place.device,
              "dtype": run_config(given).train.precision, "threads": place.threads}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "settings.toml", toml(given))
    failed = call(["train", str(folder / "settings.toml"), "--device", place.device], job.label, folder / "train.log",
                  place, over)
    if not over() and not records_of(cell, rows, "train", job.seed):
        said = trained(run) if failed is None else as_result(failed)
        made.append({"kind": "train", **shared, **said, **provenance(), "command": command_of(cell)})
    if over() or failed is not None or cell.questions is None:
        return made
    failed = call(finetune_arguments(run, cell.questions, place), f"{job.label}, questions", folder / "finetune.log",
                  place, over)
    if not over():
        said = finetuned(folder / "questions") if failed is None else as_result(failed)
        made.append({"kind": "finetune", **shared, "questions": asdict(cell.questions), **said, **provenance(),
                     "command": command_of(cell)})
    return made


def command_of(cell: Cell) -> str:
    """What makes a cell's rows, without the folders of the machine that it ran on."""
    return f"lineartime reproduce {cell.table.name} --scale {cell.scale.name}"


def finetune_arguments(run: Path, questions: Questions, place: Place) -> list[str]:
    options = {"context": questions.context, **questions.options}
    return ["finetune", str(run), "--questions", place.below_texts(questions.train), "--validation",
            place.below_texts(questions.validation), "--out", str(run.with_name("questions")), "--device", place.device,
            *(part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))),
            *(part for name, value in questions.settings.items() for part in ("--set", f"{name}={value}"))]


def trained(run: Path) -> Record:
    """What a finished run has to say."""
    result, lines, described = read_json(run / RESULT_FILE), read_metrics(run), read_run(run)
    manifest, train = read_manifest(Path(described["data"])), described["train"]
    n_tokens = train["steps"] * train["tokens_per_step"]
    data = {"sha256": manifest.sha256, "vocab_size": manifest.vocab_size,
            **{f"{name}_tokens": split.tokens for name, split in manifest.splits.items()}}
    return {"n_parameters": describe(ModelConfig(**described["model"])).n_parameters, "data": data, "tokens": n_tokens,
            "epochs": n_tokens / manifest.splits["train"].tokens,
            "curve": [[line["step"], line["held_out"]["loss"]] for line in lines if "held_out" in line],
            "held_out": result["held_out"], "peak_mib": result["peak_mib"],
            **times_of(lines, train["tokens_per_step"])}


def finetuned(folder: Path) -> Record:
    """What a finished fine-tuning has to say: its best learning rate's scores."""
    result = read_json(folder / RESULT_FILE)
    best, scores = folder / result["best"], result["learning_rates"][result["best"].removeprefix("lr-")]
    return {**{name: scores[name] for name in ("f1", "exact_match", "n_questions")}, "best": result["best"],
            "learning_rates": result["learning_rates"], "word_overlap": result["word_overlap"],
            **times_of(read_metrics(best), read_run(best)["train"]["tokens_per_step"])}


def times_of(lines: Sequence[dict[str, Any]], tokens_per_step: int) -> Record:
    """Time of all steps, and of one, by the clock and by the processor; as busy as the machine was."""
    clocks = [line["clock"] for line in lines if "held_out" not in line]
    seconds = {"cpu": [clock["cpu_s"] for clock in clocks],
               "wall": [tokens_per_step / clock["tokens_per_s"] for clock in clocks]}
    return {"train_s": {name: sum(values) for name, values in seconds.items()},
            "step_ms": {name: spread([1e3 * value for value in values]) for name, values in seconds.items()}}


def as_result(failed: LineartimeError) -> Record:
    """A failure that a table shows: the numbers went bad, or memory ran out. Raises any other."""
    if isinstance(failed, NumericsError) or (isinstance(failed, ResourceError) and failed.what == "out of memory"):
        return {"failed": str(failed)}
    raise failed


def call(arguments: Sequence[str], label: str, log: Path, place: Place,
         over: Callable[[], bool]) -> LineartimeError | None:
    """Run a verb of ours in a process of its own, its output in a file; returns the error it ended with.

    When it is over, the process is asked to save and end."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(place.threads)}
    with open(log, "a+", encoding="utf-8", errors="replace") as file:
        begin = file.seek(0, os.SEEK_END)
        process = subprocess.Popen([sys.executable, "-m", "lineartime", *arguments], stdout=file, stderr=file,
                                   env=environment, start_new_session=True,
                                   preexec_fn=partial(end_with_parent, os.getpid()))
        asked, told, last = False, time.monotonic(), ""
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if over() and not asked:
                process.send_signal(signal.SIGTERM)
                asked = True
            if time.monotonic() - told > TOLD_EVERY_S:
                line, told = last_line(file, begin), time.monotonic()
                if line != last:
                    place.tell(f"  {label}: {line}")
                last = line
        said = last_line(file, begin).removeprefix("error: ")
    code = process.returncode
    if code == 0:
        return None
    if code == -signal.SIGKILL:
        return ResourceError("out of memory", label, "the system killed it, or somebody did")
    kinds = {each.exit_code: each for each in LineartimeError.__subclasses__() if each.exit_code > 1}
    what, _, rest = said.partition(": ")
    return kinds.get(code, LineartimeError)(what, f"{rest} ({label}; all it said is in {log})")


def last_line(file: Any, begin: int) -> str:
    """The last line that was written into a file from a place on."""
    file.seek(begin)
    lines = [line.strip() for line in file.read().splitlines() if line.strip()]
    return lines[-1] if lines else "starts"


def toml(settings: dict[str, Any]) -> str:
    """Settings as TOML; its numbers, truth values and plain strings are those of JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def time_steps(column: Sequence[Cell], place: Place, stop: StopSignal) -> list[Record]:
    """Time a training step of every cell of a column, in turn; the rows, which are written."""
    def progress(line: str) -> None:
        stop.check("the rows that are there are written; the same command goes on")
        place.tell(f"  {column[0].column}: {line}")

    timed = []
    for cell in column:
        settings = cell.settings(None)
        config = run_config({**settings, "data": "-", "out": "-", "vocab_size": cell.text.vocab_size})
        label = settings["model"] + (":compiled" if config.train.compile else "")
        timed.append(StepCase(parse_label(label), config.model, config.train.micro_batch_tokens,
                               config.train.precision))
    measured = benchmark_step(timed, threads=place.threads, device=place.device, progress=progress)
    rows = [{**row, "kind": "step", "scale": cell.scale.name, "text": cell.text.name, "settings": cell.settings(None),
             "machine": row.get("settings"), "command": command_of(cell)}
            for cell, row in zip(column, measured, strict=True)]
    append_json_lines(place.rows, rows)
    return rows
