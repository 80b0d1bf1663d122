"""The runs of a table: what is missing is prepared, trained, fine-tuned and timed, and each ends in
a row, which is added as it comes. A run is a process of its own, `lineartime train` with the
settings of its cell, and goes on where it stopped."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cells import LINEARTIME, last_line, run
from benchmarks.measure import Setup, spread
from benchmarks.paper.results import Record, by_key, read_records, records_of
from benchmarks.paper.tables import Cell, Kind, ScaleName, Settings, Text, cells_of
from benchmarks.peers import parse_label
from benchmarks.provenance import append_json_lines, commit, provenance
from benchmarks.step import StepCase, benchmark_step
from lineartime.base.errors import LineartimeError, NumericsError, ResourceError, UsageError
from lineartime.base.files import json_sha256, read_json, write_atomically
from lineartime.base.settings import require
from lineartime.config import ModelConfig
from lineartime.data.tokens import read_manifest
from lineartime.folders import read_fine_tuning, read_metrics, read_result, read_run
from lineartime.model.language_model import number_of_parameters
from lineartime.training.run_config import run_config
from lineartime.training.runtime import StopSignal
from lineartime.weights import checkpoint

Records = Mapping[str, list[Record]]  # of `by_key`
PEER = (sys.executable, "-m", "benchmarks.paper.peer")
CONTEXT_USE = (sys.executable, "-m", "benchmarks.context_use")
STOPPED = "what ran has saved; the same command goes on"
KILLED = "the system killed it, or somebody did"


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
        """Named by all that decides the run."""
        settings = self.cell.settings(self.seed)
        digest = json_sha256([self.cell.text.name, settings])[:10]
        return f"{settings['model']}-{self.cell.text.name}-{settings['context']}-{digest}"


@dataclass(frozen=True)
class Place:
    """Where a table's runs read and write, on what, and how many at a time."""

    texts: Path | None
    out: Path
    rows: Path
    device: str
    jobs: int
    tell: Callable[[str], None]

    def data(self, text: Text) -> Path:
        return self.out / "data" / text.name

    @property
    def threads(self) -> int:
        """Of one run: the processor's cores shared out, unless the environment says."""
        return int(os.environ.get("OMP_NUM_THREADS") or max((os.cpu_count() or 1) // self.jobs, 1))

    def below_texts(self, name: str) -> str:
        """A file or folder of the texts, or a name on the hub. Raises UsageError without texts."""
        if name.startswith("hub:"):
            return name
        if self.texts is None:
            raise UsageError("no folder of texts is given", name, "give --texts the folder that holds it")
        return str(self.texts / name)


def missing_jobs(cells: Sequence[Cell], records: Records) -> list[Job]:
    """The runs that have no row yet: every cell with its first seed, then with its second, ..."""
    return [Job(cell, seed) for seed in range(max((len(cell.seeds) for cell in cells), default=0)) for cell in cells
            if cell.table.kind == "train" and seed in cell.seeds
            and not found(cell, records, "finetune" if cell.questions else "train", seed)]


def found(cell: Cell, records: Records, kind: Kind, seed: int) -> list[Record]:
    """A cell's records that have what its table evaluates; a run of another table may lack it. One
    that was killed is no record: it is tried again."""
    return [record for record in records_of(cell, records, kind, seed) if KILLED not in record.get("failed", "")
            if record.get("failed") or kind != "train" or cell.table.evaluations.keys() <= record.keys()]


def missing_times(cells: Sequence[Cell], records: Records) -> list[list[Cell]]:
    """The columns whose steps have not been timed side by side."""
    columns: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.table.timed:
            columns.setdefault(cell.column, []).append(cell)
    return [column for column in columns.values() if not set.intersection(
        *({record["run"] for record in records_of(cell, records, "step")} for cell in column))]


def reproduce(table: str, scale: ScaleName, place: Place, stop: StopSignal) -> int:
    """Run what a table at a scale still lacks; returns how many rows were added. Raises UsageError
    and DataError for missing text, Stopped once runs have saved, and what a failed run said."""
    cells = cells_of(table, scale)
    with checkpoint.lock(place.out):
        records = by_key(read_records(place.rows))
        jobs, columns = missing_jobs(cells, records), missing_times(cells, records)
        place.tell(f"{table} at scale {scale}: {len(cells)} cells; {len(jobs)} runs and {len(columns)} columns of step "
                   "times are missing")
        for text in dict.fromkeys(job.cell.text for job in jobs):
            prepare(text, place, stop)
        n_rows = sum(len(time_steps(column, place, stop)) for column in columns)
        return n_rows + run_all(jobs, records, place, stop)


def prepare(text: Text, place: Place, stop: StopSignal) -> None:
    """Tokenise a text, unless that is done."""
    source, out = place.below_texts(text.folder), place.data(text)
    sources = [f"{source}/train", f"{source}/validation"] if source.startswith("hub:") else [source]
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = call(["prepare", *sources, "--task", text.task, "--vocab-size", str(text.vocab_size), "--out", str(out),
                   *(["--mlm"] if text.mlm else [])], f"text {text.name}", out.with_suffix(".log"), place, stop)
    stop.check(STOPPED)
    require(failed is None, "a text cannot be prepared", text.name, failed, ResourceError)


def run_all(jobs: Sequence[Job], records: Records, place: Place, stop: StopSignal) -> int:
    """Every job's rows, written as they come; how many. Where one fails the others save and end."""
    n_rows, began = 0, time.monotonic()
    with ThreadPoolExecutor(place.jobs) as pool:
        futures = {pool.submit(run_job, job, records, place, stop): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                rows = future.result()
                append_json_lines(place.rows, rows)
                n_rows += len(rows)
                left = (len(jobs) - done) * (time.monotonic() - began) / done / 60
                if rows:
                    place.tell(f"[{done}/{len(jobs)}] {futures[future].label}: {rows[-1].get('failed', 'done')}; "
                               f"{left:,.0f} minutes are left")
        except BaseException:
            stop.number = stop.number or signal.SIGTERM
            raise
    stop.check(STOPPED)
    return n_rows


def run_job(job: Job, records: Records, place: Place, stop: StopSignal) -> list[Record]:
    """Train and evaluate, and fine-tune where the cell says so; the new rows, if not stopped."""
    cell, folder = job.cell, place.out / "runs" / job.folder
    out, file, evaluations = folder / "run", folder / "settings.toml", cell.table.evaluations
    trained_by = commit()  # another may be checked out at the end
    given = {**cell.settings(job.seed), "size": "paper", "data": str(place.data(cell.text)), "out": str(out)}
    peer = given.pop("peer", None)
    folder.mkdir(parents=True, exist_ok=True)
    # Numbers, truth values and plain strings are written alike in TOML and JSON.
    write_atomically(file, "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))

    def stage(name: str, arguments: Sequence[str], program: Sequence[str] | None = None) -> str | None:
        return call(arguments, f"{job.label}, {name}", folder / f"{name}.log", place, stop, program)

    def rows_of(kind: Kind, failed: str | None, result: Callable[[], Record]) -> list[Record]:
        if stop.number is not None or found(cell, records, kind, job.seed):
            return []
        return [{"device": place.device, "dtype": run_config(given).train.precision, "threads": place.threads,
                 **({"questions": cell.questions} if kind == "finetune" else {}),
                 **({"failed": failed} if failed else result()), **provenance(), **facts_of(cell, kind, job.seed),
                 "commit": trained_by}]

    failed = (stage("train", [peer, str(file), place.device, *" ".join(evaluations.values()).split()], PEER) if peer
              else stage("train", ["train", str(file), "--device", place.device]))
    for name, options in evaluations.items():
        scores = folder / f"{name}.json"
        if not failed and not scores.exists():  # a peer has scored itself
            failed = stage(name, [str(out), "--data", given["data"], *options.split(), "--device", place.device,
                                  "--out", str(scores)], CONTEXT_USE)
    rows = rows_of("train", failed, lambda: trained(out, evaluations))
    if cell.questions and not failed:
        failed = stage("finetune", finetune_arguments(out, cell.questions, place))
        rows += rows_of("finetune", failed, lambda: finetuned(folder / "questions"))
    return rows


def facts_of(cell: Cell, kind: Kind, seed: int | None) -> Record:
    """What a row has of its cell, and the command that makes it, without this machine's folders."""
    return {"kind": kind, "scale": cell.scale.name, "text": cell.text.name, "settings": cell.settings(seed),
            "command": f"python -m benchmarks reproduce {cell.table.name} --scale {cell.scale.name}"}


def finetune_arguments(pretrained: Path, questions: Settings, place: Place) -> list[str]:
    options = {"context": questions["context"], **questions.get("options", {})}
    return ["finetune", str(pretrained), "--questions", place.below_texts(questions["train"]), "--validation",
            place.below_texts(questions["validation"]), "--out", str(pretrained.with_name("questions")), "--device",
            place.device,
            *(part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))),
            *(part for name, value in questions.get("settings", {}).items() for part in ("--set", f"{name}={value}"))]


def trained(folder: Path, evaluations: Iterable[str]) -> Record:
    """What a finished run and its evaluations say."""
    said = {name: read_json(folder.with_name(f"{name}.json")) for name in evaluations}
    result, described = read_result(folder), read_run(folder)
    manifest, n_tokens = read_manifest(Path(described["data"])), result["steps"] * described["train"]["tokens_per_step"]
    return {"n_parameters": number_of_parameters(ModelConfig(**described["model"])),
            "data": {"sha256": manifest.sha256, "vocab_size": manifest.vocab_size,
                     **{f"{name}_tokens": split.tokens for name, split in manifest.splits.items()}},
            "tokens": n_tokens, "epochs": n_tokens / manifest.splits["train"].tokens,
            "curve": [[line["step"], line["held_out"]["loss"]] for line in read_metrics(folder) if "held_out" in line],
            **{name: result[name] for name in ("n_parameters", "state_size", "peer") if name in result},
            "held_out": result["held_out"], "peak_mib": result.get("peak_mib"), **times_of(folder),
            **{name: {key: value for key, value in each.items() if key not in ("checkpoint", "step")}
               for name, each in said.items()}}


def finetuned(folder: Path) -> Record:
    result = read_fine_tuning(folder)
    scores = result["learning_rates"][result["best"].removeprefix("lr-")]
    return {**{name: scores[name] for name in ("f1", "exact_match", "n_questions")},
            **{name: result[name] for name in ("best", "learning_rates")},
            **times_of(folder / result["best"])}


def times_of(folder: Path) -> Record:
    """Seconds of all steps and milliseconds of one, by clock and processor, both disturbed."""
    clocks = [line["clock"] for line in read_metrics(folder) if "held_out" not in line]
    n_tokens = read_run(folder)["train"]["tokens_per_step"]
    seconds = {"cpu": [clock["cpu_s"] for clock in clocks],
               "wall": [n_tokens / clock["tokens_per_s"] for clock in clocks]}
    return {"train_s": {name: sum(values) for name, values in seconds.items()},
            "step_ms": {name: spread([1e3 * value for value in values]) for name, values in seconds.items()}}


def call(arguments: Sequence[str], label: str, log: Path, place: Place, stop: StopSignal,
         program: Sequence[str] | None = None) -> str | None:
    """Run a verb of `lineartime`, or of `program`, in a process of its own; asked to stop, it saves
    and ends. Returns the error that a table shows: the numbers went bad, or memory ran out. Raises
    any other."""
    if stop.number is not None:
        return None
    place.tell(f"  {label}: starts")
    code = run([*(program or LINEARTIME), *arguments], log, stop=lambda: stop.number is not None,
               tell=lambda line: place.tell(f"  {label}: {line}"), threads=place.threads)
    if code == 0 or stop.number is not None:
        return None
    if code == -signal.SIGKILL:
        return str(ResourceError("out of memory", label, KILLED))
    what, _, rest = last_line(log).removeprefix("error: ").partition(": ")
    kinds = {each.exit_code: each for each in LineartimeError.__subclasses__() if each.exit_code > 1}
    error = kinds.get(code or 0, LineartimeError)(what, f"{rest} ({label}; all it said is in {log})")
    if isinstance(error, NumericsError) or what == "out of memory":
        return str(error)
    raise error


def time_steps(column: Sequence[Cell], place: Place, stop: StopSignal) -> list[Record]:
    """Time a training step of every cell of a column, in turn; the rows, which are written."""
    def progress(line: str) -> None:
        stop.check(STOPPED)
        place.tell(f"  {column[0].column}: {line}")

    cases = []
    for cell in column:
        config = run_config({**cell.settings(None), "data": "-", "out": "-", "vocab_size": cell.text.vocab_size})
        train, label = config.train, parse_label(config.preset + (":compiled" if config.train.compile else ""))
        cases.append(StepCase(label, config.model, train.micro_batch_tokens, train.precision, train.optimizer))
    threads = 1 if place.device == "cpu" else place.threads  # processor time of several has their waiting in it
    # A column has one context, and its cells one type.
    (measured,) = benchmark_step(cases, Setup(threads=threads, device=place.device, progress=progress))
    rows = [{**row, "machine": row.get("settings"), **facts_of(cell, "step", None)}
            for cell, row in zip(column, measured, strict=True)]
    append_json_lines(place.rows, rows)
    return rows
