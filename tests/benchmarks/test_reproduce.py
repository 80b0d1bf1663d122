"""The paper's tables as runs: their settings, and that they are made, resumed and refused."""

import dataclasses
import json
import time
import tomllib
from pathlib import Path

import pytest

import text_files
from benchmarks.cells import run
from benchmarks.paper import peer, runner, tables
from benchmarks.paper.results import by_key, read_records, records_of
from benchmarks.paper.tables import SCALE_NAMES, TABLES, Scale, Text, cells_of
from benchmarks.peers import build_peer
from lineartime.base.errors import DataError, LineartimeError, ResourceError, Stopped
from lineartime.config import TASKS, TrainConfig, model_config
from lineartime.data.prepare_config import SAMPLE
from lineartime.training.loop import Callbacks
from lineartime.training.ordered import parameter_parts
from lineartime.training.run_config import run_config
from lineartime.training.runtime import StopSignal
from workers_here import work_here


def config_of(cell):
    return run_config({name: value for name, value in cell.settings().items() if name != "peer"}
                      | {"data": "-", "out": "-"})


def test_every_cell_is_a_run_that_can_be_configured():
    assert {column.task for table in TABLES.values() for column in table.columns.values()} == {*TASKS, "triviaqa"}
    assert tables.PAPER.keys() == TABLES.keys()
    for cell in (cell for name in SCALE_NAMES for table in TABLES for cell in cells_of(table, name)):
        assert config_of(cell).model.context == cell.settings()["context"]


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
    sizes = {cell.row: config_of(cell).model for cell in cells_of("gau_vs_transformer", "paper") if cell.column == "LM"}
    expected = {}
    for n, d_model, n_heads, n_gau in ((8, 512, 8, 15), (12, 768, 12, 22), (24, 1024, 16, 46)):
        expected |= {f"MHSA+{kind} {n}+{n} x {d_model}": (n, d_model, n_heads) for kind in ("MLP", "GLU")}
        expected[f"GAU {n_gau} x {d_model}"] = (n_gau, d_model, 1)
    assert {row: (m.n_layers, m.d_model, m.n_heads) for row, m in sizes.items()} == expected


TINY = Scale("cpu", "tiny", {"wiki40b": Text("pg19", 300, "books")}, {}, seeds=2,
             shape={"d_model": 16, "chunk_size": 8, "gau": {"n_layers": 1, "query_key_dim": 8},
                    "pairs": {"n_layers": 1, "n_heads": 2}},
             train={"tokens_per_step": 1024, "micro_batch_tokens": 512, "steps": 6, "warmup_steps": 2, "eval_every": 2,
                    "eval_tokens": 600, "save_every": 2, "learning_rate": 5e-3, "optimizer": "muon"})


@pytest.fixture
def place(tmp_path, monkeypatch):
    book = SAMPLE.read_text(encoding="utf-8")
    text_files.make(tmp_path / "texts", {"books/train/1.txt": book[:30_000],
                                         "books/validation/2.txt": book[50_000:54_000]})
    monkeypatch.setitem(tables.SCALES, "cpu", TINY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = {"cpu": [("Transformer++", "512"), ("FLASH", "512")]}
    monkeypatch.setitem(TABLES, "speedup", dataclasses.replace(TABLES["speedup"], cells=cells))
    return runner.Place(tmp_path / "texts", tmp_path / "out", tmp_path / "rows.jsonl", "cpu", 2, print)


@pytest.fixture
def warm(warm_command, monkeypatch):
    """Runs start at once. Evaluations take seconds, as outside of tests, and can be stopped."""
    monkeypatch.setattr(runner, "LINEARTIME", warm_command)


def test_a_table_is_made_and_only_once(place, warm, monkeypatch):
    work_here(monkeypatch)
    updated = []  # matrices, where a step is timed: by the optimizer of TINY
    monkeypatch.setattr("lineartime.training.optimizers.Muon.update", lambda muon: updated.append(len(muon.matrices)))
    monkeypatch.setitem(tables.SCALES, "cpu", dataclasses.replace(TINY, seeds=1))
    assert runner.reproduce("speedup", "cpu", place, StopSignal()) == 4  # two runs, two step times
    assert updated and all(updated)
    before = place.rows.read_text()
    rows, cells = by_key(read_records(place.rows)), cells_of("speedup", "cpu")
    for cell in cells:
        (row,) = records_of(cell, rows, "train", 0)
        assert [step for step, _ in row["curve"]] == [2, 4, 6] and all(2 < loss < 7 for _, loss in row["curve"])
        assert row["settings"] == cell.settings(0) and row["tokens"] == 6 * 1024
        assert row["data"]["train_tokens"] > 5000 and row["epochs"] == row["tokens"] / row["data"]["train_tokens"]
        assert row["held_out"]["bits_per_byte"] > 1 and row["peak_mib"] > 100 and row["commit"] is not None
        assert row["step_ms"]["cpu"]["n"] == 6 and 0 < row["train_s"]["cpu"] and row["threads"] == 1
    assert runner.missing_times(cells, rows) == []
    assert str(place.out) not in before and str(place.texts) not in before  # rows are made to be given away
    assert runner.reproduce("speedup", "cpu", place, StopSignal()) == 0
    assert place.rows.read_text() == before
    monkeypatch.setitem(tables.SCALES, "cpu", TINY)
    # A stop asked for while a run trains: it saves, no row is made of it, and it goes on.
    stop = StopSignal()

    def stop_soon(line):
        stop.number = 15 if ", train: " in line else stop.number

    with pytest.raises(Stopped, match="goes on"):
        runner.reproduce("speedup", "cpu", dataclasses.replace(place, tell=stop_soon), stop)
    assert place.rows.read_text() == before
    assert runner.reproduce("speedup", "cpu", place, StopSignal()) == 2
    assert [len(records_of(cell, by_key(read_records(place.rows)), "train")) for cell in cells] == [2, 2]


def test_a_run_is_evaluated_as_its_table_says_and_what_is_done_is_not_done_again(place, warm, monkeypatch):
    monkeypatch.setitem(TABLES, "speedup", dataclasses.replace(
        TABLES["speedup"], cells={"cpu": [("FLASH", "512")]}, evaluations={
            "context_use": "--contexts 32,64", "long": "--contexts 64,128"}))
    (cell,), (job, _) = cells_of("speedup", "cpu"), runner.missing_jobs(cells_of("speedup", "cpu"), {})
    runner.prepare(cell.text, place, StopSignal())
    folder = place.out / "runs" / job.folder
    for stopped in ("context_use", "long"):
        stop = StopSignal()

        def stop_there(line, stopped=stopped, stop=stop):
            stop.number = 15 if line.endswith(f", {stopped}: starts") else stop.number

        assert runner.run_job(job, {}, dataclasses.replace(place, tell=stop_there), stop) == []
        assert (folder / "run" / "result.json").exists() and not (folder / "long.json").exists()
        assert (folder / "context_use.json").exists() == (stopped == "long")
    made = {path: path.stat().st_mtime_ns for path in [*folder.glob("*.json"), folder / "run" / "result.json"]}
    (row,) = runner.run_job(job, {}, place, StopSignal())
    assert made == {path: path.stat().st_mtime_ns for path in made} and len(made) == 2
    assert row["kind"] == "train" and row["context_use"]["contexts"] == [32, 64]
    assert row["long"]["contexts"] == [64, 128]
    place.rows.write_text(json.dumps(row) + "\n")
    assert str(place.out) not in place.rows.read_text()
    records = by_key(read_records(place.rows))
    assert [each.seed for each in runner.missing_jobs([cell], records)] == [1]
    # A row of the same run that another table made has no evaluations: only they are missing.
    less = by_key([{name: value for name, value in row.items() if name != "long"}])
    assert runner.missing_jobs([cell], less)[0] == job
    assert [row["kind"] for row in runner.run_job(job, less, place, StopSignal())] == ["train"]


def test_a_peer_is_trained_beside_ours(place, monkeypatch):
    ours = dataclasses.replace(TABLES["speedup"].models["FLASH"], fields={})
    theirs = dataclasses.replace(ours, fields={"peer": "mamba2", "optimizer": "muon"})
    table = dataclasses.replace(TABLES["speedup"], models={"FLASH": ours, "Mamba-2": theirs}, timed=False,
                                evaluations={"context_use": "--contexts 16,32"})
    monkeypatch.setitem(TABLES, "speedup", dataclasses.replace(table, cells={"cpu": [("Mamba-2", "512")]}))
    monkeypatch.setitem(tables.SCALES, "cpu", dataclasses.replace(TINY, seeds=1))
    monkeypatch.setitem(tables.PEERS, "mamba2", {"model_type": "mamba2", "num_hidden_layers": 1, "num_heads": 2,
                                                 "head_dim": 16, "n_groups": 1, "state_size": 4, "chunk_size": 64})
    started = []

    def here(command, log, **_):
        started.append(command[2])
        if command[2] == "benchmarks.paper.peer":
            settings = tomllib.loads(Path(command[4]).read_text(encoding="utf-8"))
            assert command[6:] == ["--contexts", "16,32"]
            peer.train(command[3], settings, command[5], Callbacks(), (16, 32))
            return 0
        return run(command, log)

    monkeypatch.setattr(runner, "run", here)
    assert runner.reproduce("speedup", "cpu", place, StopSignal()) == 1 and len(started) == 2
    (cell,) = cells_of("speedup", "cpu")
    (row,) = records_of(cell, by_key(read_records(place.rows)), "train", 0)
    assert row["settings"]["peer"] == "mamba2" and row["peer"]["package"] == "transformers"
    assert row["n_parameters"] != row["state_size"] == 32 * 4 and row["context_use"]["contexts"] == [16, 32]
    assert [step for step, _ in row["curve"]] == [2, 4, 6] and row["held_out"]["loss"] < row["curve"][0][1]
    assert not records_of(dataclasses.replace(cell, row="FLASH"), by_key(read_records(place.rows)), "train")


@pytest.mark.parametrize("name", ["mamba2", "gated-deltanet"])
def test_muon_has_the_matrices_of_a_peer_one_by_one(name):
    (cell,) = (cell for cell in cells_of("kin", "cpu") if "0.016" in cell.row and cell.settings().get("peer") == name)
    model = build_peer(name, dataclasses.replace(config_of(cell).model, tied_head=False), tables.PEERS[name])
    parts, sizes = parameter_parts(model, muon=True), model.in_sizes()
    own = {part.name: len(part.parameter) for part in parts if part.by_muon}
    assert len(sizes) == 6 and all(sum(sizes[each]) == own[each] for each in sizes)
    others = {part.name.split(".")[-2] for part in parts if not part.by_muon and part.parameter.dim() > 1}
    assert {"head"} < others <= {"embed_tokens", "embeddings", "conv1d", "head"}


@pytest.mark.parametrize(("code", "said", "result"), [
    (0, "", None), (5, "error: the loss is not finite: step 3", "the loss is not finite: step 3"),
    (6, "error: out of memory: context = 8192", "out of memory: context"), (-9, "a line", "out of memory: a run"),
    (6, "error: the disk is full: x", ResourceError), (3, "error: no such text: x", DataError),
    (1, "", LineartimeError)])
def test_what_a_run_ends_with_is_a_row_or_an_error(place, monkeypatch, code, said, result):
    place.out.mkdir()
    program = place.out / "program"
    program.write_text(f"echo '{said}'\n" + ("kill -9 $$\n" if code == -9 else f"exit {code}\n"))
    monkeypatch.setattr(runner, "LINEARTIME", ["sh", program])
    arguments = ["train"], "a run", place.out / "log", place, StopSignal()
    if isinstance(result, type):
        with pytest.raises(result, match="a run; all it said is in", check=lambda error: type(error) is result):
            runner.call(*arguments)
    else:
        ended = runner.call(*arguments)
        assert ended == result if result is None else ended.startswith(result)


def test_a_run_that_diverges_is_a_row_and_one_that_cannot_start_is_an_error(place, warm, monkeypatch):
    diverging = dataclasses.replace(TINY, seeds=1, train={**TINY.train, "learning_rate": 1e30})
    monkeypatch.setitem(tables.SCALES, "cpu", diverging)
    jobs = runner.missing_jobs(cells_of("speedup", "cpu")[1:], {})
    runner.prepare(jobs[0].cell.text, place, StopSignal())
    assert runner.run_all(jobs, {}, place, StopSignal()) == 1
    (row,) = read_records(place.rows)
    assert "not finite" in row["failed"] and "curve" not in row and row["settings"]["learning_rate"] == 1e30
    assert runner.missing_jobs([jobs[0].cell], by_key([row | {"failed": f"no memory: {runner.KILLED}"}])) == jobs
    with pytest.raises(DataError, match="no/books"):
        runner.prepare(jobs[0].cell.text, dataclasses.replace(place, texts=Path("no")), StopSignal())


def test_one_run_that_cannot_go_on_ends_the_others(place, monkeypatch):
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
