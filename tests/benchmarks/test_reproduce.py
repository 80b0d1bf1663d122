"""The paper's tables as runs: what they are set to, which they share, and that they are made, resumed and refused."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import text_files
from benchmarks.__main__ import app
from benchmarks.paper import runner, scales
from benchmarks.paper.records import by_key, read_records, records_of
from benchmarks.paper.scales import SCALES, Scale, Text, cells_of
from benchmarks.paper.tables import SCALE_NAMES, TABLES
from lineartime.cli import verbs
from lineartime.config import PRESETS, TrainConfig, model_config
from lineartime.data.prepare import SAMPLE
from lineartime.data.tokens import read_manifest
from lineartime.errors import DataError, LineartimeError, ResourceError, Stopped, UsageError
from lineartime.run_config import run_config
from lineartime.training import StopSignal
from made_questions import write_questions
from workers_here import work_here

EVERY = [cell for name in SCALE_NAMES for table in TABLES for cell in cells_of(table, name)]
CONV, FIXED = "FLASH, three changes", "FLASH, three and a gate, fixed"


def config_of(cell):
    return run_config({**cell.settings(), "data": "-", "out": "-"})


def test_every_cell_is_a_run_that_can_be_configured():
    for cell in EVERY:
        assert config_of(cell).model.context == cell.settings()["context"]
        plain = cell.scale.texts[cell.where.task]
        own = {"more_tokens": {"vocab_size": 4096}, "memory": {"vocab_size": 4096, "folder": "pg19_medium"}}
        own = own.get(cell.table.name, {}) if cell.scale.name == "cpu" else {}
        assert cell.text == dataclasses.replace(plain, **own)


def test_the_papers_scale_is_the_papers_settings():
    for cell in (cell for table in ("lm_wiki40b", "mlm_c4", "lm_pg19") for cell in cells_of(table, "paper")):
        config, plain = config_of(cell), model_config(cell.model.preset, cell.where.task)
        same = dataclasses.replace(config.model, context=plain.context, prefix_sum=plain.prefix_sum)
        assert same == plain and config.model.context == cell.where.context
        default = TrainConfig()
        for name in ("tokens_per_step", "steps", "warmup_steps", "learning_rate", "weight_decay", "adam_beta2"):
            assert getattr(config.train, name) == getattr(default, name)
        assert config.train.clip == (None if cell.row == "Transformer" else 0.1)
        assert config.train.micro_batch_tokens == max(4096, cell.where.context)
        assert cell.text.folder is None
    counts = {row: config_of(cell).model for cell in cells_of("gau_vs_transformer", "paper")
              for row in [cell.row] if cell.column == "LM"}
    assert {row: (m.n_layers, m.d_model, m.n_heads) for row, m in counts.items()} == {
        "MHSA+MLP 8+8 x 512": (8, 512, 8), "MHSA+GLU 8+8 x 512": (8, 512, 8), "GAU 15 x 512": (15, 512, 1),
        "MHSA+MLP 12+12 x 768": (12, 768, 12), "MHSA+GLU 12+12 x 768": (12, 768, 12), "GAU 22 x 768": (22, 768, 1),
        "MHSA+MLP 24+24 x 1024": (24, 1024, 16), "MHSA+GLU 24+24 x 1024": (24, 1024, 16),
        "GAU 46 x 1024": (46, 1024, 1)}


def test_the_study_of_memory_compares_models_that_differ_in_what_its_rows_say():
    configs = {cell.row: config_of(cell) for cell in cells_of("memory", "cpu")}
    for config in configs.values():
        assert config.train == dataclasses.replace(configs["FLASH"].train, compile=config.train.compile)
        assert (config.model.context, config.model.chunk_size) in ((4096, 128), (4096, None))
        assert config.train.steps * config.train.tokens_per_step == 16_384_000
    options = {"FLASH": {}, "FLASH (LocalOnly)": {"chunk_parts": "local"},
               CONV: {"key_conv": 3, "linear_scale_init": 1.0, "linear_rope": False}}
    options[FIXED] = options[CONV] | {"linear_gate": True, "chunk_pooling": "fixed", "linear_divisor": 128.0}
    options["FLASH+ with scales of 1"] = options[CONV] | {"linear_gate": True, "chunk_pooling": "written"}
    flash, plus = (dataclasses.asdict(PRESETS[name]) for name in ("flash", "flash+"))
    options["FLASH+"] = {name: value for name, value in plus.items() if value != flash[name]}
    options["FLASH, both halves"] = options["FLASH+ with scales of 1"] | {"local_key_conv": True,
                                                                          "local_scale_init": 1.0}
    for row, fields in options.items():
        assert configs[row].model == dataclasses.replace(configs["FLASH"].model, **fields)
    plain = configs["Transformer++"].model
    assert configs["Transformer++ with a key convolution"].model == dataclasses.replace(plain, key_conv=3)
    for row in ("FLASH", "FLASH+", "Transformer++"):
        assert configs[f"{row}, width 256"].model == dataclasses.replace(configs[row].model, d_model=256,
                                                                         init_std=0.035)
    assert len(configs) == 12
    jobs = runner.missing_jobs(cells_of("memory", "cpu"), {})
    assert [job.seed for job in jobs] == [0] * 12 + [1] * 8 + [2] * 8  # one seed of every row comes first


TINY = Scale("cpu", "tiny", {task: Text("pg19", 300, "books", mlm=task in ("c4", "triviaqa"))
                             for task in ("wiki40b", "c4", "pg19", "triviaqa")},
             {"train": "q/train.json", "validation": "q/dev.json", "context": 64,
              "options": {"learning_rates": "1e-3", "epochs": 1},
              "settings": {"tokens_per_step": 128, "micro_batch_tokens": 128}}, seeds=2,
             shape={"d_model": 16, "chunk_size": 8, "gau": {"n_layers": 1, "query_key_dim": 8},
                    "pairs": {"n_layers": 1, "n_heads": 2}},
             train={"tokens_per_step": 1024, "micro_batch_tokens": 512, "steps": 6, "warmup_steps": 2, "eval_every": 2,
                    "eval_tokens": 600, "save_every": 2, "learning_rate": 5e-3},
             of_task={"triviaqa": {"context": 64}})


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A scale of seconds in the place of the smallest, its text, and two cells of a table."""
    book = SAMPLE.read_text(encoding="utf-8")
    text_files.make(tmp_path / "texts", {"books/train/1.txt": book[:30_000],
                                         "books/validation/2.txt": book[50_000:54_000]})
    monkeypatch.setitem(scales.SCALES, "cpu", TINY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = {"cpu": [("Transformer++", "512"), ("FLASH", "512")]}
    monkeypatch.setitem(TABLES, "speedup", dataclasses.replace(TABLES["speedup"], cells=cells))
    told = []
    place = runner.Place(tmp_path / "texts", tmp_path / "out", tmp_path / "rows.jsonl", "cpu", 2, None, told.append)
    return place, told


@pytest.fixture
def warm(warm_command, monkeypatch):
    """Runs start at once, but evaluations take a second, in which they can be stopped. The run that is asked to stop
    starts as they all do outside of tests."""
    wait = 'case "$*" in *" -- evaluate "*) sleep 1;; esac; exec "$@"'
    monkeypatch.setattr(runner, "LINEARTIME", ["sh", "-c", wait, "sh", *warm_command])


@pytest.fixture
def here(monkeypatch):
    """Steps are timed in this process, which goes on with the threads that it had."""
    work_here(monkeypatch)
    yield
    torch.set_num_threads(1)


def test_a_table_is_made_and_only_once(tiny, warm, here):
    place, told = tiny
    first = dataclasses.replace(place, seeds=1)
    assert runner.reproduce("speedup", "cpu", first, StopSignal()) == 4  # two runs, two step times
    before = place.rows.read_text()
    rows, cells = by_key(read_records(place.rows)), cells_of("speedup", "cpu")
    for cell in cells:
        (row,) = records_of(cell, rows, "train", 0)
        assert [step for step, _ in row["curve"]] == [2, 4, 6] and all(2 < loss < 7 for _, loss in row["curve"])
        assert row["settings"] == cell.settings(0) and row["tokens"] == 6 * 1024
        assert row["data"]["train_tokens"] > 5000 and row["epochs"] == row["tokens"] / row["data"]["train_tokens"]
        assert row["held_out"]["bits_per_byte"] > 1 and row["peak_mib"] > 100 and row["commit"] is not None
        assert row["step_ms"]["cpu"]["n"] == 6 and 0 < row["train_s"]["cpu"] and row["threads"] == 1
        assert row["command"] == "python -m benchmarks reproduce speedup --scale cpu"
        described = json.loads(next(place.out.glob(f"runs/{row['settings']['model']}-*/run/run.json")).read_text())
        assert described["train"]["seed"] == 0 and described["model"]["d_model"] == 16
    assert runner.missing_times(cells, rows) == []
    assert str(place.out) not in before and str(place.texts) not in before  # rows are made to be given away
    assert runner.reproduce("speedup", "cpu", first, StopSignal()) == 0
    assert place.rows.read_text() == before
    # A stop asked for while a run trains: it saves, no row is made of it, and the same command goes on.
    stop = StopSignal()

    def stop_soon(line):
        told.append(line)
        if ", train: " in line:
            stop.number = 15

    with pytest.raises(Stopped, match="goes on"):
        runner.reproduce("speedup", "cpu", dataclasses.replace(place, tell=stop_soon), stop)
    assert place.rows.read_text() == before
    assert runner.reproduce("speedup", "cpu", place, StopSignal()) == 2
    assert [len(records_of(cell, by_key(read_records(place.rows)), "train")) for cell in cells] == [2, 2]
    assert all("there" in line for line in runner.plan_lines("speedup", "cpu", read_records(place.rows))[1:])


def test_a_run_is_evaluated_as_its_table_says_and_what_is_done_is_not_done_again(tiny, warm, monkeypatch):
    """One row of a run, also when it was stopped between training and either evaluation."""
    place, _ = tiny
    monkeypatch.setitem(TABLES, "speedup", dataclasses.replace(
        TABLES["speedup"], cells={"cpu": [("FLASH", "512")]}, evaluations={
            "context_use": "--contexts 32,64", "recurrence": "--chunk 16 --context 128"}))
    (cell,), (job,) = cells_of("speedup", "cpu"), runner.missing_jobs(cells_of("speedup", "cpu"), {}, seeds=1)
    runner.prepare(cell.text, place, StopSignal())
    folder = place.out / "runs" / job.folder
    for stopped in ("context_use", "recurrence"):
        stop = StopSignal()

        def stop_there(line, stopped=stopped, stop=stop):
            stop.number = 15 if line.endswith(f", {stopped}: starts") else stop.number

        assert runner.run_job(job, {}, dataclasses.replace(place, tell=stop_there), stop) == []
        assert (folder / "run" / "result.json").exists() and not (folder / "recurrence.json").exists()
        assert (folder / "context_use.json").exists() == (stopped == "recurrence")
    made = {path: path.stat().st_mtime_ns for path in [*folder.glob("*.json"), folder / "run" / "result.json"]}
    (row,) = runner.run_job(job, {}, place, StopSignal())
    assert made == {path: path.stat().st_mtime_ns for path in made} and len(made) == 2
    assert row["kind"] == "train" and row["context_use"]["contexts"] == [32, 64]
    assert (row["recurrence"]["chunk"], row["recurrence"]["context"]) == (16, 128)
    assert row["context_use"]["split"] == row["recurrence"]["split"] == "validation"
    assert row["recurrence"]["n_tokens"] == row["held_out"]["n_tokens"]
    place.rows.write_text(json.dumps(row) + "\n")
    assert str(place.out) not in place.rows.read_text()
    records = by_key(read_records(place.rows))
    assert runner.missing_jobs([cell], records, seeds=1) == []
    # A row of the same run that another table made has no evaluations: only they are missing.
    less = by_key([{name: value for name, value in row.items() if name != "recurrence"}])
    assert runner.missing_jobs([cell], less, seeds=1) == [job]
    assert [row["kind"] for row in runner.run_job(job, less, place, StopSignal())] == ["train"]


@pytest.mark.parametrize(("code", "said", "result"), [
    (0, "", None), (5, "error: the loss is not finite: step 3", "the loss is not finite: step 3"),
    (6, "error: out of memory: context = 8192", "out of memory: context"), (-9, "a line", "out of memory: a run"),
    (6, "error: the disk is full: x", ResourceError), (3, "error: no such text: x", DataError),
    (1, "", LineartimeError)])
def test_what_a_run_ends_with_is_a_row_or_an_error(tiny, monkeypatch, code, said, result):
    place, told = tiny
    place.out.mkdir()
    program = place.out / "program"
    program.write_text(f"#!/bin/sh\necho '{said}'\n" + ("kill -9 $$\n" if code == -9 else f"exit {code}\n"))
    program.chmod(0o755)
    monkeypatch.setattr(runner, "LINEARTIME", [program])
    arguments = ["train"], "a run", place.out / "log", place, StopSignal()
    if isinstance(result, type):
        with pytest.raises(result) as raised:
            runner.call(*arguments)
        assert type(raised.value) is result and f"a run; all it said is in {place.out / 'log'}" in str(raised.value)
    else:
        ended = runner.call(*arguments)
        assert ended == result if result is None else ended.startswith(result)
    assert told == ["  a run: starts"]


def test_a_run_of_several_processes_ends_in_the_row_of_one(tiny):
    place, _ = tiny
    job, rows = runner.Job(cells_of("speedup", "cpu")[1], 0), []
    for n in (1, 2):
        of_n = dataclasses.replace(place, ranks=n, out=place.out / str(n))
        runner.prepare(job.cell.text, of_n, StopSignal())
        rows += runner.run_job(job, {}, of_n, StopSignal())
    assert rows[0]["curve"] == rows[1]["curve"] and rows[0]["held_out"] == rows[1]["held_out"]
    described = [json.loads(next((place.out / str(n)).glob("runs/*/run/latest/MANIFEST.json")).read_text())
                 for n in (1, 2)]
    assert [len([name for name in each["files"] if "optimizer" in name]) for each in described] == [1, 3]
    bad = place.out / "bad.toml"
    bad.write_text((next((place.out / "2").glob("runs/*/settings.toml"))).read_text().replace("0.005", "1e30"))
    said = runner.call(["train", str(bad), "--out", str(place.out / "bad")], "a run", place.out / "log", of_n,
                       StopSignal())
    assert "is not finite" in said


def test_a_run_that_diverges_is_a_row_and_one_that_cannot_start_is_an_error(tiny, warm, monkeypatch):
    place, _ = tiny
    diverging = dataclasses.replace(TINY, seeds=1, train={**TINY.train, "learning_rate": 1e30})
    monkeypatch.setitem(scales.SCALES, "cpu", diverging)
    jobs = runner.missing_jobs(cells_of("speedup", "cpu")[1:], {})
    runner.prepare(jobs[0].cell.text, place, StopSignal())
    assert runner.run_all(jobs, {}, place, StopSignal()) == 1
    (row,) = read_records(place.rows)
    assert "not finite" in row["failed"] and "curve" not in row and row["settings"]["learning_rate"] == 1e30
    with pytest.raises(UsageError, match="texts"):
        runner.prepare(jobs[0].cell.text, dataclasses.replace(place, texts=None), StopSignal())
    with pytest.raises(DataError, match="no/books"):
        runner.prepare(jobs[0].cell.text, dataclasses.replace(place, texts=Path("no")), StopSignal())


@pytest.mark.campaign
def test_questions_follow_the_training_and_are_a_row_of_their_own(tiny, warm, monkeypatch):
    """One job gives two rows; where a kill took the second, the first is not made again."""
    place, _ = tiny
    (place.texts / "q").mkdir()
    for name, first, n in (("train", 0, 8), ("dev", 100, 3)):
        write_questions(place.texts / "q" / f"{name}.json", first, n)
    asked = dataclasses.replace(TINY, seeds=1, questions={
        **TINY.questions, "options": {"learning_rates": "1e-2,1e-3", "epochs": 1, "max_answer_tokens": 6}})
    monkeypatch.setitem(scales.SCALES, "cpu", asked)
    cell = next(cell for cell in cells_of("triviaqa", "cpu") if cell.row == "FLASH s=512 + first-to-all")
    job = runner.Job(cell, 0)
    runner.prepare(cell.text, place, StopSignal())
    assert read_manifest(place.data(cell.text)).tokenizer["mask"] is not None
    pretrained, answered = runner.run_job(job, {}, place, StopSignal())
    assert (pretrained["kind"], answered["kind"]) == ("train", "finetune") and "curve" in pretrained
    folder = place.out / "runs" / job.folder / "questions"
    result = json.loads((folder / "result.json").read_text())
    assert set(result["learning_rates"]) == {"1e-02", "1e-03"} and answered["n_questions"] == 9
    scores = result["learning_rates"][answered["best"].removeprefix("lr-")]
    assert answered["f1"] == scores["f1"] == max(each["f1"] for each in result["learning_rates"].values())
    described = json.loads((folder / answered["best"] / "run.json").read_text())
    assert described["train"]["tokens_per_step"] == 128 and answered["train_s"]["cpu"] > 0
    assert [row["kind"] for row in runner.run_job(job, by_key([pretrained]), place, StopSignal())] == ["finetune"]


def test_a_run_that_is_asked_to_stop_saves_and_ends(tiny):
    place, _ = tiny
    cell = cells_of("speedup", "cpu")[0]
    runner.prepare(cell.text, place, StopSignal())
    settings = {**cell.settings(0), "steps": 2000, "data": str(place.data(cell.text)), "out": str(place.out / "run")}
    (place.out / "settings.toml").write_text(
        "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))

    metrics = place.out / "run" / "metrics.jsonl"

    class Soon(StopSignal):
        number = property(lambda self: 15 if metrics.exists() and "loss" in metrics.read_text() else None,
                          lambda self, number: None)

    assert runner.call(["train", str(place.out / "settings.toml")], "a run", place.out / "log", place, Soon()) is None
    assert "saved" in (place.out / "log").read_text().splitlines()[-1]
    assert (metrics.parent / "latest").exists() and not (metrics.parent / "result.json").exists()


def test_one_run_that_cannot_go_on_ends_the_others(tiny, monkeypatch):
    place, _ = tiny
    ended = []

    def run_job(job, records, place, stop):
        if job.cell.row == "FLASH":
            raise DataError("no such text", "x")
        for _ in range(400):
            if stop.number is not None:
                ended.append(job.cell.row)
                return []
            time.sleep(0.05)

    monkeypatch.setattr(runner, "run_job", run_job)
    jobs = [runner.Job(cell, 0) for cell in cells_of("speedup", "cpu")]
    with pytest.raises(DataError, match="no such text"):
        runner.run_all(jobs, {}, place, StopSignal())
    assert ended == ["Transformer++"]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["lm_pg18"], 2, "unknown table: lm_pg18; did you mean lm_pg19?"),
    (["gap", "--scale", "tpu"], 2, "unknown scale: tpu"),
    (["gap", "--jobs", "0"], 2, "jobs = 0"),
    (["gap", "--seeds", "0"], 2, "seeds = 0"),
    (["gap", "--texts", "nowhere"], 3, "no such folder of texts: nowhere"),
    (["gap", "--out", "OUT"], 2, "give --texts"),
    (["gap", "--plan", "--rows", "BAD"], 3, "not a row of a run"),
    (["gap", "--device", "tpu", "--out", "OUT"], 2, "unknown device"),
])
def test_bad_input_is_one_line(arguments, code, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "BAD").write_text("{}\n{}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmarks", "reproduce", *arguments])
    with pytest.raises(SystemExit) as e:
        verbs.main(app)
    error = capsys.readouterr().err.splitlines()
    assert e.value.code == code and message in error[-1] and error[-1].startswith("error: ")


def test_a_plan_says_what_is_missing(tmp_path):
    out = CliRunner().invoke(app, ["reproduce", "gap", "--plan", "--rows", str(tmp_path / "none.jsonl")]).output
    assert len(re.findall("missing seed 0, 1, 2", out)) == 8 and "missing in LM 2048, MLM 2048" in out
    assert SCALES["cpu"].caption in out
