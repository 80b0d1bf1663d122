"""Fine-tuning from the command line: a run per learning rate, stopped, evaluated; bad input."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from test_questions import triviaqa

import lineartime
from benchmarks.paper import runner
from command_line import assert_refused
from lineartime.base.errors import CheckpointError
from lineartime.config import TrainConfig, model_config
from lineartime.folders import read_metrics
from lineartime.model.language_model import SpanModel
from lineartime.tasks.qa import finetune
from lineartime.tasks.qa.finetune import SpanObjective
from lineartime.tasks.qa.finetune_config import FineTuning
from lineartime.tasks.qa.questions import read_questions, score_answers
from lineartime.tasks.qa.spans import WindowConfig, training_windows
from lineartime.training.plot import read_curves
from lineartime.training.run_config import RunConfig
from made_questions import write_questions
from tiny_runs import assert_same, command, steps_done, steps_saved, what_is_left


@pytest.fixture(scope="module")
def folder(tmp_path_factory, processes, masked_data):
    """A pretrained run that sees both ways, one that does not, and questions."""
    folder = tmp_path_factory.mktemp("finetune")
    for name, causal in (("pretrained", "false"), ("causal", "true")):
        assert processes.run(command(masked_data, folder / name, causal=causal, steps=3), folder / "printed") == 0
    write_questions(folder / "qa/train.json", 0, 12)
    write_questions(folder / "qa/dev.json", 100, 4)
    return folder


SETTINGS = ["--learning-rates", "1e-2,2.5e-3", "--context", "48", "--epochs", "2", "--max-answer-tokens", "6",
            "--set", "chunk_size=4", "--set", "tokens_per_step=384", "--set", "eval_tokens=200"]


def arguments(folder, out, *more, run="pretrained"):
    return ["finetune", folder / run, "--questions", folder / "qa/train.json", "--validation", folder / "qa/dev.json",
            "--out", out, *SETTINGS, *more]


@pytest.fixture(scope="module")
def done(folder, processes):
    """A fine-tuning that nothing disturbed."""
    assert processes.run(arguments(folder, folder / "done"), folder / "printed") == 0
    return folder / "done"


def test_the_folder_holds_the_best_run(folder, done, call):
    result = json.loads((done / "result.json").read_text())
    rates = result["learning_rates"]
    assert set(rates) == {"1e-02", "2.5e-03"}
    best = max(rates, key=lambda name: (rates[name]["f1"], rates[name]["exact_match"]))
    assert result["best"] == f"lr-{best}" and os.readlink(done / "best") == f"lr-{best}/latest"
    assert os.readlink(done / "predictions.json") == f"lr-{best}/predictions.json"
    predictions = json.loads((done / "predictions.json").read_text())
    asked = list(read_questions([folder / "qa/dev.json"]))
    assert list(predictions) == [question.id for question in asked]
    assert all(predictions[question.id] in question.documents[0].text() for question in asked)
    assert score_answers(asked, predictions)["f1"] == pytest.approx(rates[best]["f1"])
    assert result["train_questions"]["questions"] == 36
    model, _, facts = lineartime.load_model(done)
    assert isinstance(model, SpanModel) and f"lr-{best}" in facts["checkpoint"]
    assert (model.config.chunk_size, model.config.cls_softmax, model.config.context) == (4, True, 48)
    assert json.loads((done / "best/config.json").read_text())["architectures"] == ["LineartimeForQuestionAnswering"]
    train = json.loads((done / "lr-1e-02" / "run.json").read_text())["train"]
    assert (train["clip"], train["learning_rate"], train["warmup_steps"]) == (None, 0.01, round(0.1 * train["steps"]))
    scores = [line["held_out"] for line in read_metrics(done / "lr-1e-02") if "held_out" in line]
    assert all({"f1", "loss"} < score.keys() and 0 < score["n_questions"] < 12 for score in scores) and scores
    assert {score["of_questions"] for score in scores} == {12}
    curves = read_curves(done / "lr-1e-02")
    assert curves.unit == "nats per window" and curves.held_out[-1][1] == rates["1e-02"]["loss"]
    code, printed, _ = call("evaluate", done, "--questions", folder / "qa/dev.json", "--max-answer-tokens", 6, "--json",
                            "--predictions", folder / "again.json")
    assert code == 0 and json.loads(printed)["f1"] == pytest.approx(rates[best]["f1"])
    assert json.loads((folder / "again.json").read_text()) == predictions


def test_it_learns_what_can_be_learned(folder):
    """Answers are names, and the question has the town's number."""
    out = folder / "learned"
    plan = FineTuning(folder / "pretrained", folder / "qa/train.json", folder / "qa/dev.json", out, context=48,
                      learning_rates=(0.02,), epochs=12, max_answer_tokens=6,
                      settings={"chunk_size": 4, "tokens_per_step": 384, "eval_tokens": 200})
    result = finetune.finetune(plan)
    first, *_, last = [line["loss"] for line in read_metrics(out / "lr-2e-02") if "loss" in line]
    assert last < first - 0.7
    assert result["learning_rates"]["2e-02"]["f1"] > 10


def test_the_questions_of_a_score_in_training_lie_at_equal_distances():
    for n in (1, 2, 12, 1000):
        order = finetune.spread_out(range(n))
        assert sorted(order) == [*range(n)]
        for first in range(1, n + 1):
            assert max(np.diff([0, *sorted(order[:first]), n])) <= 2.5 * n / first


@pytest.mark.parametrize(("preset", "settings", "clip"), [
    ("flash", {}, None), ("flash-quad", {}, 0.1), ("transformer++", {}, 0.1), ("flash-quad", {"clip": None}, None)])
def test_flash_alone_is_not_clipped(tmp_path, preset, settings, clip):
    """A wish of the user's counts for every model."""
    asked = FineTuning("run", "train", "validation", tmp_path, learning_rates=(1e-3,), settings=settings)
    (run,) = finetune.runs_of(asked, model_config(preset, context=48), 9).values()
    assert run.train.clip == clip


def test_the_same_command_says_complete_and_another_is_refused(folder, done, masked_data, call):
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.name != "run.lock"}
    code, out, _ = call(*arguments(folder, done))
    assert code == 0 and "complete" in out
    for more in (["--learning-rates", "1e-2"], ["--set", "seed=1"], ["--negatives", "1"]):
        assert_refused(*call(*arguments(folder, done, *more))[::2], 2, "another fine-tuning is here")
    assert call(*command(masked_data, folder / "second", causal="false", steps=3, seed=1))[0] == 0
    assert_refused(*call(*arguments(folder, done, run="second"))[::2], 2, "another fine-tuning is here")
    assert_refused(*call(*arguments(folder, folder / "pretrained"))[::2], 2, "another run is here")
    evidence = folder / "evidence/wikipedia/102.txt"
    whole = evidence.read_text()
    evidence.write_text(whole + " So it is.")
    code, _, err = call(*arguments(folder, done))
    evidence.write_text(whole)
    assert_refused(code, err, 2, "validation_sha256")
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.name != "run.lock"} == before


def test_a_signal_ends_the_process_with_one_line(folder, processes, tmp_path):
    out, printed = tmp_path / "out/lr-1e-02", tmp_path / "printed"
    line = arguments(folder, tmp_path / "out", "--epochs", "500")
    assert processes.run(line, printed, folder=out, at=20, number=signal.SIGTERM) == 143, printed.read_text()
    assert printed.read_text().count("\nstopped by SIGTERM: ") == 1 and "Traceback" not in printed.read_text()
    assert steps_done(out) == steps_saved(out) > 0


def test_batches_are_a_function_of_seed_and_step(folder):
    _, tokenizer, _ = lineartime.load_model(folder / "pretrained")
    windows = WindowConfig(48)
    rows = training_windows(tokenizer, read_questions([folder / "qa/train.json"]), windows, negatives=1, seed=0)

    def task(seed=0):
        config = RunConfig(lineartime.model_config("flash", causal=False, context=48),
                                    TrainConfig(tokens_per_step=480, micro_batch_tokens=48, seed=seed), "", "", "", "")
        return SpanObjective(config, SimpleNamespace(train=rows))

    batches = [task().batch(step) for step in range(len(rows))]  # ten epochs of ten rows a step
    for step, arrays in enumerate(batches):
        assert all((a == b).all() for a, b in zip(arrays, task().batch(step), strict=True))
    assert not np.array_equal(task(1).batch(0)[0], batches[0][0])
    drawn = [row[role > 0].tobytes() for ids, roles in batches for row, role in zip(ids, roles, strict=True)]
    assert sorted(drawn) == sorted(10 * [ids.astype(np.int64).tobytes() for ids in rows.ids])


def test_finetune_refuses_in_one_line(folder, tmp_path, call):
    out = tmp_path / "out"

    def refuse(code, *words, run="pretrained", more=()):
        assert_refused(*call(*arguments(folder, out, *more, run=run))[::2], code, *words)
        assert not out.exists()

    refuse(2, "sees both ways", run="causal")
    for option, value, words in (
            ("--set", "learning_rate=1", "learning_rate"), ("--set", "d_model=8", "d_model"),
            ("--set", "shard=true", "shard"), ("--set", "window_tokens=1", "a setting that is gone"),
            ("--set", "context_parallel=2", "context_parallel"), ("--set", "chunk_size=0", "chunk_size"),
            ("--set", "tokens_per_step=100", "tokens_per_step"), ("--set", "context=32", "give --context"),
            ("--learning-rates", "1e-3,x", "wrong value"), ("--learning-rates", "1e-3,0.001", "twice"),
            ("--learning-rates", "nan", "learning_rate = nan"), ("--context", "8", "context"),
            ("--negatives", "2", "negatives"), ("--epochs", "0", "epochs"), ("--epochs", "inf", "epochs = inf"),
            ("--stride", "0", "stride")):
        refuse(2, words, more=[option, value])
    refuse(3, "missing.json", more=["--validation", folder / "missing.json"])
    refuse(3, "twice", more=["--questions", folder / "qa/train.json"])
    line = ["finetune", folder / "pretrained", "--out", out, *SETTINGS, "--questions"]
    nothing = triviaqa(tmp_path, Answer=None)
    for more, code, words in (
            ([folder / "qa/train.json", "--validation", nothing], 3, ["no question has an answer"]),
            ([nothing, "--validation", folder / "qa/dev.json"], 3, ["no window holds an answer", "1 have no label"]),
            ([folder / "qa/train.json"], 2, ["--validation"])):
        assert_refused(*call(*line, *more)[::2], code, *words)
    assert not out.exists()


def test_evaluate_refuses_in_one_line(folder, done, masked_data, tmp_path, call, monkeypatch):
    dev = folder / "qa/dev.json"
    monkeypatch.setattr(SpanModel, "forward", None)  # before the model answers
    for arguments, words in (
            ([folder / "pretrained", "--questions", dev], "not fine-tuned"), ([done], "--data"),
            ([done, "--questions", dev, "--data", masked_data], "--data; it goes without --questions"),
            ([done, "--questions", dev, "--split", "test"], "--split; it goes without --questions"),
            ([done, "--data", masked_data], "this model answers questions"),
            ([done, "--data", masked_data, "--stride", 9], "--stride; it goes with --questions"),
            ([done, "--questions", triviaqa(tmp_path, Answer=None)], "--predictions"),
            ([done, "--questions", dev, "--predictions", tmp_path / "no" / "p.json"], "p.json"),
            ([done, "--questions", dev, "--predictions", dev], "exists already"),
            ([done, "--questions", dev, "--context", 0], "context"),
            ([done, "--questions", dev, "--batch-rows", 0], "batch_rows")):
        assert_refused(*call("evaluate", *arguments)[::2], 2, words)
    assert_refused(*call("generate", done, "x")[::2], 2, "only a causal language model")


def test_a_damaged_result_or_checkpoint_is_named(folder, done, tmp_path, call):
    out = tmp_path / "out"
    shutil.copytree(done, out, symlinks=True)
    ask = ["evaluate", out, "--questions", folder / "qa/dev.json"]
    whole = json.loads((out / "result.json").read_text())
    for text in ("{", "{}", json.dumps({**whole, "best": "lr-1"}), json.dumps({**whole, "train_questions": {}})):
        (out / "result.json").write_text(text)
        assert_refused(*call(*ask)[::2], 4, "damaged", "result.json")
        with pytest.raises(CheckpointError, match="damaged"):
            runner.finetuned(out)
        assert_refused(*call(*arguments(folder, out))[::2], 4, "damaged", "result.json")
    (out / "result.json").unlink()
    of_run = out / "lr-1e-02/result.json"
    kept = of_run.read_text()
    of_run.write_text(kept.replace('"f1"', '"f2"'))
    assert_refused(*call(*arguments(folder, out))[::2], 4, "damaged", str(of_run))
    of_run.write_text(kept)
    assert call(*arguments(folder, out))[0] == 0
    for name in ("lr-1e-02", "lr-2.5e-03"):
        assert_same(out / name, what_is_left(done / name), but=["run.json"])
    for name in ("predictions.json", "result.json"):
        assert (out / name).read_bytes() == (done / name).read_bytes()
