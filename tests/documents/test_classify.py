"""Fine-tuning on labels and `lineartime classify`: stopped and resumed, ended early, scored, asked; bad input."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lineartime
from command_line import assert_refused
from dying_saves import Died, die
from fake_hub import Hub
from lineartime import finetuning
from lineartime.config_json import Head
from lineartime.documents import metrics, report, results, tasks
from lineartime.documents.classify import head_of, label_losses, prediction_of, targets_of
from lineartime.documents.tasks import DocumentTask, LabelObjective
from lineartime.documents.texts import TokenizedTexts, drawn_stretch
from lineartime.errors import DataError, Stopped, UsageError, escaped
from lineartime.finetune_config import Fields, FineTuning
from lineartime.finetuning import finetune, runs_of
from lineartime.model import DocumentClassifier
from lineartime.run import Run
from lineartime.run_config import RunConfig
from lineartime.run_files import read_metrics
from lineartime.training import StopSignal
from made_documents import CONTEXT, made_rows, write_model, write_rows
from marks import rest
from rendered_markdown import ODD, rendered
from tiny_checkpoints import write_checkpoint
from tiny_runs import assert_same, what_is_left

CPU = torch.device("cpu")
ONE = Head("single_label_classification", ("a", "b", "c"))
SEVERAL = Head("multi_label_classification", ("a", "b", "c"))
NUMBER = Head("regression", ("number",), 5.0, 2.0)
RATES = ("lr-3e-02", "lr-1e-03")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classify")
    write_model(folder / "model")
    for kind in ("one", "several", "number"):
        for part, n in (("train", 24), ("dev", 12), ("test", 9)):
            write_rows(folder / f"{part}-{kind}.jsonl", made_rows(n, len(part), kind))
    return folder


def plan(folder, out, kind="one", **changes):
    fields = {"learning_rates": (3e-2, 1e-3), "epochs": 4, "task": "classify", "labels": kind, "patience": 20,
              "settings": {"tokens_per_step": 8 * CONTEXT, "micro_batch_tokens": 4 * CONTEXT, "eval_every": 3,
                           "save_every": 5, "clip": None}, **changes}
    return FineTuning(folder / "model", (folder / f"train-{kind}.jsonl",), (folder / f"dev-{kind}.jsonl",), out,
                      test=(folder / f"test-{kind}.jsonl",), **fields)


@pytest.fixture(scope="module")
def done(folder):
    """A fine-tuning that nothing disturbed."""
    finetune(plan(folder, folder / "done"), device=CPU)
    return folder / "done"


def assert_same_outcome(out, done):
    for name in RATES:
        assert_same(out / name, what_is_left(done / name), but=["run.json"])
    assert os.readlink(out / "best") == os.readlink(done / "best")
    for name in ("result.json", report.REPORT_FILE):
        assert (out / name).read_bytes() == (done / name).read_bytes()


def test_it_learns_and_the_folder_holds_the_best(folder, done):
    result = json.loads((done / "result.json").read_text())
    rates = result["learning_rates"]
    best = max(rates, key=lambda name: rates[name]["score"])
    assert result["best"] == f"lr-{best}" == "lr-3e-02" and rates[best]["score"] > 0.9
    assert result["without_reading"]["macro_f1"] < 0.2 and result["test"]["accuracy"] > 0.8
    step = rates[best]["best_step"]
    scores = {line["step"]: (line["held_out"]["score"], -line["held_out"]["loss"])
              for line in read_metrics(done / f"lr-{best}") if "held_out" in line}
    assert [*scores] == [3, 6, 9, 12] and scores[step] == max(scores.values())
    assert os.readlink(done / "best") == f"lr-{best}/step-{step:08d}"
    model, tokenizer, facts = lineartime.load_classifier(done)
    assert facts["step"] == step and model.head.labels == ("sea", "town", "wood")
    found = lineartime.classify(model, tokenizer, [row["text"] for row in made_rows(9, 4)])
    right = [each.label == row["label"] for each, row in zip(found, made_rows(9, 4), strict=True)]
    assert np.mean(right) == result["test"]["accuracy"]
    text = (done / report.REPORT_FILE).read_text()
    assert "9 test documents. No choice was made on these." in text
    assert f"| {best} (best) | {step} of 12 |" in text and "| without reading |" in text
    assert result["TF-IDF"]["macro_f1"] == 1 and "| TF-IDF |  |" in text  # its words tell the class; it has no loss


def test_a_model_of_pairs_asks_for_them(folder, tmp_path, call):
    rows = write_rows(tmp_path / "rows.jsonl", [{**row, "second": row["text"]} for row in made_rows(8, 1)])
    given = {"fields": Fields(pair="second"), "epochs": 1, "learning_rates": (1e-3,)}
    finetune(replace(plan(folder, tmp_path / "out", **given), data=(rows,), validation=(rows,), test=()), device=CPU)
    assert "so the scores are somewhat too good" in (tmp_path / "out" / report.REPORT_FILE).read_text()
    assert_refused(*call("classify", tmp_path / "out", rows)[::2], 2, "learned from pairs of texts", "--pair-field")
    assert len(call("classify", tmp_path / "out", rows, "--pair-field", "second")[1].splitlines()) == 8
    model, tokenizer, _ = lineartime.load_classifier(tmp_path / "out")
    with pytest.raises(UsageError, match="learned from pairs of texts: text 2"):
        lineartime.classify(model, tokenizer, [("a", "b"), "a"])


def test_several_labels(folder, tmp_path):
    result = finetune(plan(folder, tmp_path / "out", "several", learning_rates=(3e-2,), epochs=6), device=CPU)
    model, tokenizer, _ = lineartime.load_classifier(tmp_path / "out")
    found = lineartime.classify(model, tokenizer, [row["text"] for row in made_rows(9, 4, "several")])
    assert result["test"]["macro_f1"] > 0.8 and result["TF-IDF"]["macro_f1"] == 1
    assert model.head.labels == ("odd", "sea", "town", "wood")
    assert any(len(each.label) == 2 for each in found)


def test_numbers(folder, tmp_path, call):
    result = finetune(plan(folder, tmp_path / "out", "number", learning_rates=(3e-2,), epochs=6), device=CPU)
    test, without = result["test"], result["without_reading"]
    assert test["r2"] == test["score"] > 0.8 > 0.1 > without["r2"] and result["TF-IDF"]["r2"] > 0.8
    assert test["mean_absolute_error"] < without["mean_absolute_error"]
    out = call("classify", tmp_path / "out", folder / "test-number.jsonl")[1]
    found = [json.loads(line)["label"] for line in out.splitlines()]
    said = np.abs(np.subtract(found, [row["label"] for row in made_rows(9, 4, "number")])).mean()
    assert said == pytest.approx(test["mean_absolute_error"], rel=1e-4)
    text = (tmp_path / "out" / report.REPORT_FILE).read_text()
    assert text.startswith("# Labels of documents\n\nR^2 0.") and "Classes" not in text


@pytest.mark.parametrize(("kind", "labels", "words"), [
    ("number", [0.1] * 3, "0.1"), ("one", ["a", "a"], "a"), ("several", [("a", "b"), ("b", "a")], "a, b"),
    ("several", [(), ()], "none")])
def test_labels_that_are_all_the_same(kind, labels, words):
    with pytest.raises(DataError, match=f"all documents have the same label: x; it is {words}; give others too"):
        head_of(TokenizedTexts(labels=labels), kind, "x")


def test_without_scikit_learn_nothing_is_trained(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(UsageError, match=r"a package is missing that scores labels: .*; pip install 'scikit-learn"):
        finetune(plan(folder, tmp_path / "out"), device=CPU)
    assert not (tmp_path / "out").exists()


def test_the_same_settings_are_complete_and_others_refused(folder, done, tmp_path):
    best = os.readlink(done / "best")
    (done / "best").unlink()  # a disk that failed at the link leaves none
    assert finetune(plan(folder, done), device=CPU)["already"] and os.readlink(done / "best") == best
    model, tokenizer, _ = lineartime.load_model(folder / "model")
    model.head_bias.data += 1
    (tmp_path / "other").mkdir()
    other = (write_rows(tmp_path / "other.jsonl", made_rows(7, 5)),)
    changed = [plan(folder, done, **each) for each in ({"epochs": 6}, {"patience": 2}, {"max_tokens": 9})]
    changed += [replace(plan(folder, done), **each) for each in (
        {"run": write_checkpoint(tmp_path / "other", model, tokenizer)}, {"validation": other}, {"test": other},
        {"data": (write_rows(tmp_path / "shuffled.jsonl", made_rows(24, 6)),)})]
    for each in changed:
        with pytest.raises(UsageError, match="another fine-tuning is here"):
            finetune(each, device=CPU)


def test_a_stop_saves_and_the_same_call_goes_on(folder, done, tmp_path):
    stop, out = StopSignal(), tmp_path / "out"

    def at(record):
        if "held_out" in record and record["step"] == 9:
            stop.number = signal.SIGTERM

    with pytest.raises(Stopped):
        finetune(plan(folder, out), device=CPU, stop=stop, on_step=at)
    with pytest.raises(UsageError):  # nothing stands for the folder before it is complete
        lineartime.load_model(out)
    finetune(plan(folder, out), device=CPU)
    assert_same_outcome(out, done)


@pytest.mark.parametrize(("module", "place"), [
    (finetuning, "write_json"), *rest((tasks, "load_step"), (report, "write_report"))])
def test_an_end_at_any_moment_loses_nothing_that_was_saved(folder, done, tmp_path, monkeypatch, module, place):
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(module, place, die)
        finetune(plan(folder, out), device=CPU)
    assert not (out / "result.json").exists()
    finetune(plan(folder, out), device=CPU)
    assert_same_outcome(out, done)


def test_a_run_ends_when_it_has_no_better_score(folder, tmp_path, monkeypatch):
    """The scores are given; the best checkpoint stays, whatever is saved."""
    scores = {3: (0.2, 1.0), 6: (0.9, 1.0), 9: (0.5, 1.5), 12: (0.9, 1.1), 15: (0.9, 0.1)}
    steps, stop = [0], StopSignal()

    def evaluate(self, model, progress=None):
        return {**dict(zip(("score", "loss"), scores[steps[-1]], strict=True)), "accuracy": 0.0, "macro_f1": 0.0}

    def at(record):
        if "loss" in record:
            steps.append(record["step"])
        elif record["step"] == 9:
            stop.number = signal.SIGTERM

    monkeypatch.setattr(LabelObjective, "evaluate", evaluate)
    how = plan(folder, tmp_path / "out", learning_rates=(1e-2,), patience=2, epochs=5)
    with pytest.raises(Stopped):
        finetune(how, device=CPU, on_step=at, stop=stop)
    finetune(how, device=CPU)  # the best checkpoint is older than the one that it goes on from
    run = tmp_path / "out" / "lr-1e-02"
    assert [line["step"] for line in read_metrics(run) if "held_out" in line] == [3, 6, 9, 12]
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000006", "step-00000012"]
    assert os.readlink(tmp_path / "out" / "best") == "lr-1e-02/step-00000006"


def test_a_run_goes_on_while_the_loss_falls(tmp_path):
    """As of several labels, whose macro F1 stays at 0 until the first class is named."""
    config = RunConfig(lineartime.model_config("flash"), lineartime.TrainConfig(), "x", "classify", "", "")
    run = Run(tmp_path, config, {})

    def since(*scored):
        lines = [{"step": step, "held_out": {"score": score, "loss": loss}, "clock": {"time": 1.0}}
                 for step, (score, loss) in enumerate(scored, 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run.best_so_far(), run.best

    assert since((0.0, 3.0), (0.0, 2.0), (0.0, 1.0)) == (0, 3)
    assert since((0.5, 3.0), (0.0, 2.0), (0.0, 1.0)) == (0, 1)  # the best stays
    assert since((0.5, 1.0), (0.6, 2.0), (0.55, 1.5)) == (1, 2)  # neither is the best so far
    assert since((0.5, 1.0), (0.5, 1.0), (0.5, 1.0)) == (2, 1)


def objective_of(train, head, seed=0, **fields):
    how = FineTuning("", ("x",), ("x",), Path("x"), "classify", settings={"seed": seed, "tokens_per_step": 4 * CONTEXT})
    config = lineartime.model_config("flash", context=CONTEXT, **fields)
    return LabelObjective(runs_of(how, config, len(train))["1e-03"], head, train, train)


def test_batches_are_a_function_of_seed_and_step():
    train = TokenizedTexts([np.arange(1, n + 1, dtype=np.uint16) + 50 * n for n in (5, 32, 33, 100, 7, 64, 1, 20)],
                           ["a", "b"] * 4)
    head = head_of(train, "one", "")
    assert not np.array_equal(*(objective_of(train, head, seed).batch(0)[0] for seed in (0, 1)))
    windows = []
    for step in range(60):
        ids_BT, targets_B = objective_of(train, head).batch(step)
        for ids, n, target in zip(ids_BT, (ids_BT >= 0).sum(1), targets_B, strict=True):
            row = next(i for i, each in enumerate(train.ids) if ids[0] in each.tolist())
            first = train.ids[row].tolist().index(ids[0])
            assert head.labels[target] == train.labels[row] and first % CONTEXT == 0
            assert np.array_equal(ids[:n], train.ids[row][first : first + CONTEXT])
            windows.append((row, first))
    for row in range(8):  # thirty epochs, each with one window of each document
        assert len([first for each, first in windows if each == row]) == 30
    assert {first for row, first in windows if row == 3} == {0, 32, 64, 96}


def test_windows_are_drawn_by_their_tokens():
    drawn = [drawn_stretch(40, 32, 7, epoch, 3) for epoch in range(2000)]
    assert {(each.start, each.stop) for each in drawn} == {(0, 32), (32, 40)}
    assert np.mean([each.start == 32 for each in drawn]) == pytest.approx(0.2, abs=0.03)


def test_the_loss_of_several_labels_and_of_numbers():
    logits_BL = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.from_numpy(targets_of(SEVERAL, [("a",), (), ("b", "c"), ("c",), ("a", "b", "c")]))
    assert torch.equal(label_losses(SEVERAL, logits_BL, targets).mean(),
                       F.binary_cross_entropy_with_logits(logits_BL, targets))
    numbers = torch.from_numpy(targets_of(NUMBER, [5.0, 7.0, 3.0, 5.0, 9.0]))
    assert torch.allclose(label_losses(NUMBER, logits_BL[:, :1], numbers).mean() * 4,
                          F.mse_loss(logits_BL[:, 0], numbers))


@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_of_a_row_does_not_depend_on_its_batch(causal):
    """Padding and neighbours count for nothing: each row is its document alone, as it is read when it is classified."""
    train = TokenizedTexts([np.arange(n, dtype=np.uint16) + 20 for n in (5, 32, 17, 1)], ["a", "b", "c", "a"])
    task = objective_of(train, ONE, causal=causal, n_layers=1, d_model=16, vocab_size=259,
                        query_key_dim=8, chunk_size=8, init_std=0.2)
    model = DocumentClassifier(task.config.model, ONE).double()
    ids_BT, targets_B = map(torch.from_numpy, task.batch(0))
    losses_B = task.losses(model, ids_BT, targets_B)
    for ids_T, target, loss in zip(ids_BT, targets_B, losses_B, strict=True):
        logits_1L = model.score(model.hidden(ids_T[ids_T >= 0][None])[0].mean(0, keepdim=True))
        assert abs(loss - F.cross_entropy(logits_1L, target[None])) < 1e-12
    assert task.n_targets(ids_BT, targets_B) == 4


def test_scores():
    logits_NL = np.array([[2, 0, 0], [0, 3, 0], [0, 1, 0], [0, 0, 9]], np.float64)
    scores = metrics.score_labels(ONE, logits_NL, targets_of(ONE, ["a", "b", "c", "c"]))
    assert scores["accuracy"] == 0.75 and scores["macro_f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    without_c = metrics.score_labels(ONE, logits_NL[:2], targets_of(ONE, ["a", "b"]))
    assert without_c["macro_f1"] == 1  # a class that no document has, nor is said to have, does not count
    assert prediction_of(SEVERAL, np.array([1.0, -1.0, 2.0])).label == ("a", "c")
    single, said_N1 = Head(SEVERAL.problem_type, ("a",)), np.array([[1.0], [1.0], [-1.0], [-1.0], [-1.0]])
    targets = targets_of(single, [("a",), (), (), (), ()])
    scores = metrics.score_labels(single, said_N1, targets)
    assert scores["macro_f1"] == pytest.approx(2 / 3) and scores["accuracy"] == 0.8
    assert prediction_of(NUMBER, np.array([1.5])) == (1.5, {})
    had = targets_of(SEVERAL, [("a",), ("a", "b"), ("a",)])
    worse, better = ({"score": 0.5, "held_out": {"loss": loss}} for loss in (2.0, 1.0))
    assert DocumentTask.rank(None, better) > DocumentTask.rank(None, worse)  # of equal scores the lower loss counts
    assert metrics.simplest(SEVERAL, had, had)["accuracy"] == pytest.approx(2 / 3)  # a, which most have, and no other


def test_a_class_has_its_precision_and_recall():
    logits_NL = np.array([[2, 0, 0], [0, 3, 0], [0, 1, 0], [0, 0, 9]], np.float64)
    lines = "\n".join(report.class_lines(ONE, targets_of(ONE, ["a", "b", "c", "c"]), logits_NL))
    assert "| b | 0.500 | 1.000 | 0.667 | 1 |" in lines and "| c | 1.000 | 0.500 | 0.667 | 2 |" in lines


def test_a_report_has_names_as_they_are_and_no_more(tmp_path):
    head, logits_NL = Head(ONE.problem_type, tuple(ODD)), np.roll(np.eye(len(ODD)), 1, 0) * 2 - 1
    targets = targets_of(head, ODD)
    scores = metrics.score_labels(head, logits_NL, targets)
    rates = {"1e-03": {"best_step": 1, "steps": 2, "held_out": scores}}
    report.write_report(tmp_path, "accuracy 0.5 on 9 documents", {
        "task": "classify", "best": "lr-1e-03", "learning_rates": rates, "without_reading": scores}, scores,
        ["without_reading"], report.class_lines(head, targets, logits_NL))
    words, more = rendered((tmp_path / report.REPORT_FILE).read_text())
    assert not more
    assert {escaped(" ".join(name.split())) for name in ODD} <= {*words.splitlines()}


def test_classify_writes_what_python_says(folder, done, tmp_path, call, monkeypatch):
    model, tokenizer, _ = lineartime.load_classifier(done)
    texts = [row["text"] for row in made_rows(9, 4)]
    found = lineartime.classify(model, tokenizer, texts)
    code, out, err = call("classify", done, folder / "test-one.jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["label"] for row in rows] == [each.label for each in found], err
    assert call("info", done)[0] == 0  # of the best
    assert [row["scores"] for row in rows] == [each.scores for each in found]
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(results, "write_rows", die)
        call("classify", done, folder / "test-one.jsonl", "--out", tmp_path / "x.jsonl")
    vectors = ("embed", done, folder / "test-one.jsonl", "--out", tmp_path / "x.jsonl")
    assert_refused(*call(*vectors)[::2], 2, "unfinished", "x.jsonl.part")  # its rows are labels
    assert call("classify", done, folder / "test-one.jsonl", "--out", tmp_path / "x.jsonl")[0] == 0
    assert [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()] == rows


def test_the_command_line_finetunes(folder, tmp_path, call, monkeypatch):
    monkeypatch.setattr(metrics, "by_tf_idf", by_tf_idf := Mock(wraps=metrics.by_tf_idf))
    line = ["finetune", folder / "model", "--task", "classify", "--documents", folder / "train-one.jsonl",
            "--validation", folder / "dev-one.jsonl", "--out", tmp_path / "out", "--learning-rates", "1e-2",
            "--epochs", 1, "--max-tokens", 20]
    code, out, err = call(*line)
    assert code == 0 and "<- best" in out and "cut       " in out and "documents to 20 tokens" in out, err
    assert "report   " in out and "without reading accuracy" in out
    assert "\nTF-IDF       accuracy 1.000, macro F1 1.000, on the same held-out texts\n" in out
    assert "endoftext" not in repr(by_tf_idf.call_args)
    assert "complete: " in call(*line)[1]
    for words in ([], ["--max-tokens", 20]):
        err = call("classify", tmp_path / "out", folder / "test-one.jsonl", *words)[2]
        assert ("in training documents were cut to 20 tokens" in err) == (not words), err


def test_documents_of_stdin_the_hub_and_a_store(folder, tmp_path, call, monkeypatch):
    dev = [json.loads(line) for line in (folder / "dev-one.jsonl").read_text().splitlines()]
    monkeypatch.setitem(sys.modules, "datasets", Hub({"me/reviews": {"dev": dev}}))
    fsspec.filesystem("memory").pipe_file("/reviews/test.jsonl", (folder / "test-one.jsonl").read_bytes())
    line = ["finetune", folder / "model", "--task", "classify", "--documents", "-", "--stdin", "jsonl", "--validation",
            "hub:me/reviews/dev", "--test", "memory://reviews", "--out", tmp_path / "out", "--learning-rates", "1e-2",
            "--epochs", 1]
    code, out, err = call(*line, stdin=(folder / "train-one.jsonl").read_text())
    assert code == 0 and "24 to train on" in out and "; 12 held out, 9 to test" in out, err


def test_bad_input_is_one_line(folder, done, tmp_path, call):
    def refuse(code, *words, more=(), **rows):
        paths = {"documents": folder / "train-one.jsonl", "validation": folder / "dev-one.jsonl"}
        for name, content in rows.items():
            paths[name] = write_rows(tmp_path / f"{name}.jsonl", content)
        named = [part for name, path in paths.items() for part in (f"--{name}", path)]
        line = ["finetune", folder / "model", "--task", "classify", *named, "--out", tmp_path / "out", *more]
        assert_refused(*call(*line)[::2], code, *words)
        assert not (tmp_path / "out").exists()

    good = made_rows(6)
    refuse(3, "no label", "documents.jsonl:2", documents=[good[0], {**good[1], "label": None}])
    refuse(3, "the same label", "sea", documents=[good[0], good[3]])
    hill = [good[0], {**good[1], "label": "hill"}]
    refuse(3, "a label that no training document has", "validation.jsonl:2", "'hill'", validation=hill)
    refuse(3, "a label that no training document has", "test.jsonl:2", test=hill)
    for option, value, words in (
            ("--labels", "many", "'many' is not one of"), ("--set", "chunk_size=8", "unknown setting of training"),
            ("--set", "eval_tokens=9", "all held-out texts are scored"),
            ("--task", "classification", "is not one of 'questions'"), ("--stride", 3, "not an option of --task cl"),
            ("--patience", 0, "patience = 0"), ("--max-tokens", 0, "max_tokens = 0"), ("--context", 1, "context = 1")):
        refuse(2, words, more=[option, value])
    (tmp_path / "taken").write_text("notes")
    refuse(2, "not a folder", "taken", more=["--out", tmp_path / "taken"])
    text = folder / "test-one.jsonl"
    lineartime.prepare([text], tmp_path / "data", tokenizer=folder / "model", held_out=0.2)
    named = ["--task", "classify", "--validation", text, "--out", tmp_path / "out"]
    for arguments, words in (
            (["finetune", folder / "model", *named], "--documents"),
            (["finetune", done, *named, "--documents", text], "has a head already"),
            (["finetune", folder / "model", "--documents", "x", "--out", "y"], "--task questions"),
            (["classify", folder / "model", text], "not fine-tuned on labels"),
            (["classify", done, text, "--out", tmp_path / "x.npy"], "it takes .jsonl"),
            (["evaluate", done, "--data", tmp_path / "data"], "this model is for documents"),
            (["generate", done, "x"], "only a causal language model"),
            (["read", tmp_path / "taken", "--model", done, "--out", tmp_path / "s"], "only a causal language model"),
            (["answer", done, "--question", "?", "--document", text], "not fine-tuned on questions"),
            (["train", "--from", done / "best", "--data", folder, "--out", "t"], "labels documents")):
        assert_refused(*call(*arguments)[::2], 2, words)
    with pytest.raises(UsageError, match="this model has no labels: LanguageModel; see load_classifier"):
        lineartime.classify(*lineartime.load_model(folder / "model")[:2], ["a text"])
    with pytest.raises(UsageError, match="files are missing: task = classify; give data and validation"):
        finetune(replace(plan(folder, tmp_path / "out"), validation=()), device=CPU)
    result = json.loads((done / "result.json").read_text())
    del result["learning_rates"][result["best"].removeprefix("lr-")]["best_step"]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "result.json").write_text(json.dumps(result))
    (tmp_path / "copy" / result["best"]).symlink_to(done / result["best"])
    assert_refused(*call("classify", tmp_path / "copy", text)[::2], 4, "damaged", "'best_step' is missing")
