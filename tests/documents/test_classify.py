"""Fine-tuning on labels and `lineartime classify`: stopped and resumed, ended early, scored, asked; bad input."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pyarrow import parquet

import lineartime
from command_line import assert_refused
from command_line import call as call  # a fixture
from lineartime import finetuning
from lineartime.config_json import Head
from lineartime.documents import metrics, report, tasks
from lineartime.documents.classify import class_weights, head_of, label_losses, prediction_of, targets_of
from lineartime.documents.pooling import document_ids
from lineartime.documents.tasks import LabelObjective
from lineartime.documents.texts import TokenizedTexts, drawn_stretch
from lineartime.errors import CheckpointError, DataError, Stopped, UsageError, escaped
from lineartime.finetune_config import Fields, FineTuning
from lineartime.finetuning import finetune, runs_of
from lineartime.model import DocumentClassifier
from lineartime.run import Run, read_metrics
from lineartime.run_config import RunConfig
from lineartime.training import StopSignal
from made_documents import CONTEXT, made_rows, write_model, write_rows
from rendered_markdown import ODD, rendered
from tiny_runs import assert_same, what_is_left

CPU = torch.device("cpu")
ONE = Head("single_label_classification", ("a", "b", "c"))
SEVERAL = Head("multi_label_classification", ("a", "b", "c"))
NUMBER = Head("regression", ("number",), 5.0, 2.0)


@pytest.fixture(scope="module", autouse=True)
def quick_pictures():
    """A picture is the numbers that it is drawn from; test_guide.py draws them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_confusion", "draw_calibration", "draw_numbers"):
            patch.setattr(report, name, lambda path, *drawn: path.write_text(str(drawn)))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classify")
    write_model(folder / "model")
    for kind in ("one", "several", "number"):
        for part, n in (("train", 24), ("dev", 11 if kind == "number" else 12), ("test", 9)):
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


RATES = ("lr-3e-02", "lr-1e-03")


def assert_same_outcome(out, done):
    for name in RATES:
        assert_same(out / name, what_is_left(done / name), but=["run.json"])
    assert os.readlink(out / "best") == os.readlink(done / "best")
    for name in ("predictions.jsonl", "result.json", report.REPORT_FILE, report.CONFUSION_FILE):
        assert (out / name).read_bytes() == (done / name).read_bytes()


# The whole way


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
    assert all(scores[earlier] < scores[step] for earlier in scores if earlier < step)
    assert os.readlink(done / "best") == f"lr-{best}/step-{step:08d}"
    model, tokenizer, facts = lineartime.load_classifier(done)
    assert facts["step"] == step and model.head.labels == ("sea", "town", "wood")
    rows = made_rows(9, 4)
    found = lineartime.classify(model, tokenizer, [row["text"] for row in rows])
    accuracy = np.mean([each.label == row["label"] for each, row in zip(found, rows, strict=True)])
    assert accuracy == pytest.approx(result["test"]["accuracy"])
    lines = [json.loads(line) for line in (done / "predictions.jsonl").read_text().splitlines()]
    assert [line["predicted"] for line in lines] == [each.label for each in found]
    text = (done / report.REPORT_FILE).read_text()
    assert "9 test documents" in text and f"| {best} (best) | {step} of 12 |" in text and "## Most wrong" in text
    assert all((done / name).exists() for name in (report.CONFUSION_FILE, report.CALIBRATION_FILE))
    assert "are longer than a row" not in text and result["documents"]["longer_than_a_row"] > 3


def test_a_model_of_pairs_asks_for_them(folder, tmp_path, call):
    rows = write_rows(tmp_path / "rows.jsonl", [{**row, "second": row["text"]} for row in made_rows(8, 1)])
    given = {"fields": Fields(pair="second"), "epochs": 1, "learning_rates": (1e-3,)}
    finetune(replace(plan(folder, tmp_path / "out", **given), data=(rows,), validation=(rows,), test=()),
                       device=CPU)
    assert lineartime.load_classifier(tmp_path / "out")[0].head.pairs
    for model in (tmp_path / "out", tmp_path / "out" / "best"):
        assert_refused(*call("classify", model, rows)[::2], 2, "learned from pairs of texts", "--pair-field")
    assert len(call("classify", tmp_path / "out", rows, "--pair-field", "second")[1].splitlines()) == 8
    model, tokenizer, _ = lineartime.load_classifier(tmp_path / "out")
    with pytest.raises(UsageError, match="learned from pairs of texts: text 2"):
        lineartime.classify(model, tokenizer, [("a", "b"), "a"])


def test_a_copy_of_the_best_weights_under_another_name_is_not_called_damaged(done, tmp_path, call):
    shutil.copytree(done / "best", tmp_path / "mine")
    assert_refused(*call("classify", tmp_path / "mine", tmp_path)[::2], 4, "a checkpoint under another name",
                   "give it its name back, such as step-00000042, or copy with `lineartime export`")


def test_a_model_without_labels_is_refused(folder):
    model, tokenizer, _ = lineartime.load_model(folder / "model")
    with pytest.raises(UsageError, match="this model has no labels: LanguageModel; see load_classifier"):
        lineartime.classify(model, tokenizer, ["a text"])


@pytest.mark.parametrize("kind", ["several", "number"])
def test_several_labels_and_numbers(folder, tmp_path, kind):
    result = finetune(plan(folder, tmp_path / "out", kind, learning_rates=(3e-2,), epochs=6), device=CPU)
    model, tokenizer, _ = lineartime.load_classifier(tmp_path / "out")
    found = lineartime.classify(model, tokenizer, [row["text"] for row in made_rows(9, 4, kind)])
    if kind == "number":
        # The mean in training is another one than that of what is held out.
        assert result["test"]["r2"] > 0.8 and -0.02 < result["without_reading"]["r2"] < -0.01
        assert "Without reading: the mean in training" in (tmp_path / "out" / report.REPORT_FILE).read_text()
        assert all(90 < each.label < 130 and not each.scores for each in found)
        assert (tmp_path / "out" / report.NUMBERS_FILE).exists()
    else:
        assert result["test"]["macro_f1"] > 0.8 and model.head.labels == ("odd", "sea", "town", "wood")
        assert any(len(each.label) == 2 for each in found) and (tmp_path / "out" / report.CONFUSION_FILE).exists()
        assert "one that has two is in both rows" in (tmp_path / "out" / report.REPORT_FILE).read_text()


def test_the_same_settings_are_complete_and_others_refused(folder, done):
    best = os.readlink(done / "best")
    (done / "best").unlink()  # a disk that failed at the link leaves none
    assert finetune(plan(folder, done), device=CPU)["already"] and os.readlink(done / "best") == best
    for changes in ({"epochs": 6}, {"balance": True}, {"patience": 2}, {"max_tokens": 9}, {"context": 16}):
        with pytest.raises(UsageError, match="another fine-tuning is here"):
            finetune(plan(folder, done, **changes), device=CPU)


@pytest.mark.parametrize("when", [7, "evaluation", "second rate"])
def test_a_stop_saves_and_the_same_call_goes_on(folder, done, tmp_path, when):
    stop, seen = StopSignal(), []

    def at(record):
        seen.append(record)
        if when == record["step"] or (when == "evaluation" and "held_out" in record and record["step"] == 9) or (
                when == "second rate" and len([r for r in seen if r["step"] == 8]) == 2):
            stop.number = signal.SIGTERM

    out = tmp_path / "out"
    with pytest.raises(Stopped):
        finetune(plan(folder, out), device=CPU, stop=stop, on_step=at)
    with pytest.raises(UsageError):  # nothing stands for the folder before it is complete
        lineartime.load_model(out)
    finetune(plan(folder, out), device=CPU)
    assert_same_outcome(out, done)


@pytest.mark.parametrize("place", ["step", "load_step", "write_labels_report", "write_json"])
def test_an_end_at_any_moment_loses_nothing_that_was_saved(folder, done, tmp_path, monkeypatch, place):
    class Killed(BaseException):
        pass

    def killed(*arguments, **more):
        raise Killed

    def at(record):
        if place == "step" and record["step"] == 11:
            raise Killed

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if place != "step":
            owner = {"load_step": tasks, "write_json": finetuning}.get(place, report)
            patch.setattr(owner, place, killed)
        finetune(plan(folder, out), device=CPU, on_step=at)
    assert not (out / "result.json").exists()
    finetune(plan(folder, out), device=CPU)
    assert_same_outcome(out, done)


def test_a_run_ends_when_it_has_no_better_score(folder, tmp_path, monkeypatch):
    """The scores are given; the best checkpoint stays, whatever is saved and wherever the run is killed."""
    class Killed(BaseException):
        pass

    scores = {3: (0.2, 1.0), 6: (0.9, 1.0), 9: (0.5, 1.5), 12: (0.9, 1.1), 15: (0.9, 0.1)}

    def evaluate(self, model, progress=None):
        score, loss = scores[steps[-1]]
        return {"loss": loss, "score": score}

    def at(record):
        if "loss" in record:
            steps.append(record["step"])
        if record["step"] == kill_at[0] and "held_out" not in record:
            kill_at[0] = None
            raise Killed

    monkeypatch.setattr(LabelObjective, "evaluate", evaluate)
    how = plan(folder, tmp_path / "out", learning_rates=(1e-2,), patience=2, epochs=5)
    for kill in (8, 11, None):
        steps, kill_at = [9] if kill is None else [6], [kill]
        if kill is not None:
            with pytest.raises(Killed):
                finetune(how, device=CPU, on_step=at)
            continue
        finetune(how, device=CPU, on_step=at)
    run = tmp_path / "out" / "lr-1e-02"
    assert [line["step"] for line in read_metrics(run) if "held_out" in line] == [3, 6, 9, 12]
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000006", "step-00000012"]
    assert os.readlink(tmp_path / "out" / "best") == "lr-1e-02/step-00000006"
    assert json.loads((run / "result.json").read_text())["best_step"] == 6


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


# The task


def test_batches_are_a_function_of_seed_and_step(folder):
    train = TokenizedTexts(ids=[np.arange(1, n + 1, dtype=np.uint16) + 50 * n for n in (5, 32, 33, 100, 7, 64, 1, 20)],
                      labels=["a", "b"] * 4)
    head = head_of(train, "one", "")

    def task(seed=0):
        settings = {"seed": seed, "tokens_per_step": 4 * CONTEXT}
        how = FineTuning("", ("x",), ("x",), Path("x"), "classify", settings=settings)
        config = runs_of(how, lineartime.model_config("flash", context=CONTEXT), 8, 9)["1e-03"]
        return LabelObjective(config, head, train, train, None)

    batches = [task().batch(step) for step in range(100)]
    assert not np.array_equal(task(1).batch(0)[0], batches[0][0])
    windows = []
    for step, (ids_BT, targets_B) in enumerate(batches):
        assert ids_BT.shape == (4, CONTEXT) and np.array_equal(task().batch(step)[0], ids_BT)
        lengths = (ids_BT >= 0).sum(1).tolist()
        assert lengths == sorted(lengths, reverse=True)
        for ids, n, target in zip(ids_BT, lengths, targets_B, strict=True):
            row = next(i for i, each in enumerate(train.ids) if ids[0] in each.tolist())
            first = train.ids[row].tolist().index(ids[0])
            assert head.labels[target] == train.labels[row] and first % CONTEXT == 0
            assert np.array_equal(ids[:n], train.ids[row][first : first + CONTEXT])
            windows.append((row, first))
    for row, ids in enumerate(train.ids):  # fifty epochs, each with one window of each document
        firsts = [first for each, first in windows if each == row]
        assert len(firsts) == 50 and set(firsts) <= set(range(0, len(ids), CONTEXT))
    assert {first for row, first in windows if row == 3} == {0, 32, 64, 96}


def test_windows_are_drawn_by_their_tokens():
    drawn = [drawn_stretch(40, 32, 7, epoch, 3) for epoch in range(2000)]
    assert {(each.start, each.stop) for each in drawn} == {(0, 32), (32, 40)}
    assert np.mean([each.start == 32 for each in drawn]) == pytest.approx(0.2, abs=0.03)


def test_losses():
    logits_BL = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one = torch.tensor([0, 2, 1, 1, 0])
    weight_L = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    expected = F.cross_entropy(logits_BL, one, weight_L, reduction="none")
    assert torch.equal(label_losses(ONE, logits_BL, one, weight_L), expected)
    several = torch.from_numpy(targets_of(SEVERAL, [("a",), (), ("b", "c"), ("c",), ("a", "b", "c")]))
    assert torch.equal(label_losses(SEVERAL, logits_BL, several).mean(),
                       F.binary_cross_entropy_with_logits(logits_BL, several))
    numbers = torch.from_numpy(targets_of(NUMBER, [5.0, 7.0, 3.0, 5.0, 9.0]))
    assert torch.allclose(label_losses(NUMBER, logits_BL[:, :1], numbers).mean() * 4,
                          F.mse_loss(logits_BL[:, 0], numbers))


@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_of_a_row_does_not_depend_on_its_batch(folder, causal):
    """Padding and neighbours count for nothing: each row is its document alone, as it is read when it is classified."""
    train = TokenizedTexts([np.arange(n, dtype=np.uint16) + 20 for n in (5, 32, 17, 1)], ["a", "b", "c", "a"])
    how = FineTuning("", ("x",), ("x",), "x", "classify", settings={"tokens_per_step": 4 * CONTEXT})
    config = runs_of(how, replace(lineartime.load_model(folder / "model")[0].config, causal=causal), 4, 9)["1e-03"]
    task = LabelObjective(config, ONE, train, train, [0.5, 2.0, 3.0])
    model = DocumentClassifier(config.model, ONE).double()
    ids_BT, targets_B = map(torch.from_numpy, task.batch(0))
    losses_B = task.losses(model, ids_BT, targets_B)
    for ids_T, target, loss in zip(ids_BT, targets_B, losses_B, strict=True):
        whole = ids_T[ids_T >= 0]
        logits_1L = model.score(model.hidden(whole[None])[0].mean(0, keepdim=True))
        expected = F.cross_entropy(logits_1L, target[None]) * task.weights[target]
        assert abs(loss - expected) < 1e-12
    assert task.n_targets(ids_BT, targets_B) == 4


def test_weights_make_every_class_count_the_same():
    labels = ["a"] * 6 + ["b"] * 3 + ["c"]
    weights = class_weights(ONE, targets_of(ONE, labels))
    assert [weights[i] * n for i, n in enumerate((6, 3, 1))] == pytest.approx([10 / 3] * 3)
    several = class_weights(SEVERAL, targets_of(SEVERAL, [("a", "b"), ("a",), ("a",), ("c",)]))
    assert several == pytest.approx([1 / 3, 3, 3])
    assert class_weights(SEVERAL, targets_of(SEVERAL, [("a", "b"), ("a",), ("a",)])) == pytest.approx([1, 2, 1])


def test_classes_are_in_order():
    assert head_of(TokenizedTexts(labels=["10", "9", "-1"]), "one", "").labels == ("-1", "9", "10")
    assert head_of(TokenizedTexts(labels=["b", "a", "10"]), "one", "").labels == ("10", "a", "b")
    assert head_of(TokenizedTexts(labels=[("a",), ()]), "several", "").labels == ("a",)
    assert head_of(TokenizedTexts(labels=["--1", "2"]), "one", "").labels == ("--1", "2")
    assert head_of(TokenizedTexts(labels=["1" * 5000, "2"]), "one", "").labels == ("1" * 5000, "2")
    assert head_of(TokenizedTexts(labels=[1.0, 3.0]), "number", "") == Head("regression", ("number",), 2.0, 1.0)


@pytest.mark.parametrize(("kind", "labels", "words"), [
    ("several", [("a", "b"), ("b", "a")], "the same labels"), ("number", [0.1] * 3, "the same number"),
    ("number", [1e308, -1e308, 1e308], "too large"), ("number", [1e39, 0.0], "too large"),
    ("number", [0.0, 1e-60], "too near each other")])
def test_labels_that_teach_nothing_are_refused(kind, labels, words):
    with pytest.raises(DataError, match=words):
        head_of(TokenizedTexts(labels=labels), kind, "x.csv")


def test_scores():
    logits_NL = np.array([[2, 0, 0], [0, 3, 0], [0, 1, 0], [0, 0, 9]], np.float64)
    scores = metrics.score_labels(ONE, logits_NL, targets_of(ONE, ["a", "b", "c", "c"]))
    assert scores["accuracy"] == 0.75 and scores["macro_f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    without_c = metrics.score_labels(ONE, logits_NL[:2], targets_of(ONE, ["a", "b"]))
    assert without_c["macro_f1"] == 1  # a class that no document has, nor is said to have, does not count
    p = np.exp(logits_NL).max(1) / np.exp(logits_NL).sum(1)
    p_right = [(p[0], 1), (p[1], 1), (p[2], 0), (p[3], 1)]  # 0.79, 0.91, 0.58 and 1.00: the second and the last share
    gap = abs(p_right[0][0] - 1) + abs(p_right[2][0]) + 2 * abs((p[1] + p[3]) / 2 - 1)
    assert scores["calibration_error"] == pytest.approx(gap / 4)
    assert prediction_of(SEVERAL, np.array([1.0, -1.0, 2.0])).label == ("a", "c")
    assert metrics.confusion(ONE, logits_NL, targets_of(ONE, ["a", "b", "c", "c"])).tolist() == [
        [1, 0, 0], [0, 1, 0], [0, 1, 1]]
    said_NL = np.array([[1, -1, 1], [-1, 1, -1], [-1, -1, -1]], np.float64)  # a and c; b; nothing
    assert metrics.confusion(SEVERAL, said_NL, targets_of(SEVERAL, [("a", "b"), ("b",), ("c",)])).tolist() == [
        [1, 0, 1], [1, 1, 1], [0, 0, 0]]
    single, said_N1 = Head(SEVERAL.problem_type, ("a",)), np.array([[1.0], [1.0], [-1.0], [-1.0], [-1.0]])
    scores = metrics.score_labels(single, said_N1, targets_of(single, [("a",), (), (), (), ()]))
    assert scores["macro_f1"] == pytest.approx(2 / 3) and scores["accuracy"] == 0.8
    rows = metrics.by_class(single, said_N1, targets_of(single, [("a",), (), (), (), ()]))
    assert rows == [("a", 0.5, 1.0, pytest.approx(2 / 3), 1)]
    assert prediction_of(NUMBER, np.array([1.5])) == (1.5, {})
    assert metrics.in_words(metrics.score_labels(NUMBER, np.array([[1.0]]), np.array([1.5]))).startswith("R^2 -, mean")
    perfect = metrics.score_labels(NUMBER, np.array([[1.0], [2.0]]), np.array([1.0, 2.0]))
    assert (perfect["r2"], perfect["loss"], perfect["mean_absolute_error"]) == (1, 0, 0)


def test_a_missing_library_is_said_before_anything_is_read(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(UsageError, match=r"pip install .scikit-learn>=1\.6"):
        finetune(plan(folder, tmp_path / "out"), device=CPU)
    assert not (tmp_path / "out").exists()


def test_a_report_has_names_as_they_are_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_WRONG", len(ODD))
    lines = report.table(["class"], [["new\nline"], ["<b>a|b</b>"], ["\x1b[1m"]])
    assert lines[2:] == ["| new line |", r"| &lt;b>a\|b&lt;/b> |", r"| \\x1b\[1m |"]
    for kind in ("one", "several"):
        labels = ODD if kind == "one" else [(name,) for name in ODD]
        head = Head(ONE.problem_type if kind == "one" else SEVERAL.problem_type, tuple(ODD))
        documents = TokenizedTexts([np.arange(3)] * len(ODD), labels, [f"a/{name}.txt" for name in ODD],
                              [" ".join(name.split()) for name in ODD])
        logits_NL = np.roll(np.eye(len(ODD)), 1, 0) * 2 - 1
        scores = metrics.score_labels(head, logits_NL, targets_of(head, labels))
        rates = {"1e-03": {"best_step": 1, "steps": 2, "held_out": scores}}
        report.write_labels_report(tmp_path, head, documents, logits_NL, {
            "best": "lr-1e-03", "learning_rates": rates, "without_reading": scores, "known": {"validation": 0}})
        words, more = rendered((tmp_path / report.REPORT_FILE).read_text())
        assert more == [report.CONFUSION_FILE, report.CALIBRATION_FILE]
        for name in ODD:
            shown = escaped(" ".join(name.split()))
            assert {shown, f"a/{shown}.txt"} <= {*words.splitlines()}, name


def test_what_was_seen_in_training_is_said(folder, tmp_path, caplog):
    rows = made_rows(8, 1)
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", content) for name, content in (
        ("train", [*rows, {"text": "a class of its own", "label": "hill"}]),
        ("dev", [{**rows[0], "text": "held out"}, rows[1]]),
        ("test", [rows[0], rows[1], {**rows[0], "text": "held out"}, {**rows[0], "text": "new"}]))}
    out = tmp_path / "out"
    short = plan(folder, out, epochs=1, learning_rates=(1e-3,))
    result = finetune(replace(short, data=(paths["train"],), validation=(paths["dev"],),
                                        test=(paths["test"],)), device=CPU)
    assert result["known"] == {"validation": 1, "test": 3}
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "1 of 2 validation documents are also in training", "3 of 4 test documents are also in training or validation",
        "one training document only: 1 of 4 classes, hill"]
    text = (out / report.REPORT_FILE).read_text()
    assert "3 of them are also in training or validation, so the scores" in text and "No choice" not in text


# The verb


def test_classify_writes_what_python_says(folder, done, tmp_path, call):
    model, tokenizer, _ = lineartime.load_classifier(done)
    texts = [row["text"] for row in made_rows(9, 4)]
    found = lineartime.classify(model, tokenizer, texts)
    code, out, err = call("classify", done, folder / "test-one.jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["label"] for row in rows] == [each.label for each in found], err
    assert [row["scores"] for row in rows] == [each.scores for each in found]
    assert call("classify", done, folder / "test-one.jsonl", "--out", tmp_path / "x.parquet")[0] == 0
    assert parquet.read_table(tmp_path / "x.parquet").to_pylist() == rows
    code, out, _ = call("classify", done, "-", stdin=texts[0])
    assert json.loads(out)["scores"] == rows[0]["scores"]
    whole = [i for pieces in document_ids(tokenizer, [texts[0]]) for i in pieces]
    assert json.loads(out)["tokens"] == len(whole)
    lines = (folder / "test-one.jsonl").read_text(encoding="utf-8")
    code, out, err = call("classify", done, "-", "--stdin", "jsonl", stdin=lines)
    assert code == 0 and [json.loads(line) | {"file": rows[0]["file"]} for line in out.splitlines()] == rows, err


def test_the_command_line_finetunes(folder, tmp_path, call):
    line = ["finetune", folder / "model", "--task", "classify", "--documents", folder / "train-one.jsonl",
            "--validation", folder / "dev-one.jsonl", "--out", tmp_path / "out", "--learning-rates", "1e-2",
            "--epochs", 1, "--max-tokens", 20, "--balance"]
    code, out, err = call(*line)
    assert code == 0 and "<- best" in out and "cut       " in out and "documents to 20 tokens" in out, err
    assert "report   " in out and "without reading accuracy" in out
    code, out, _ = call(*line)
    assert code == 0 and "complete: " in out
    said = "in training documents were cut to 20 tokens"
    for words, is_said in (((), True), (("--max-tokens", 30), True), (("--max-tokens", 20), False)):
        code, _, err = call("classify", tmp_path / "out", folder / "test-one.jsonl", *words)
        assert code == 0 and (said in err) == is_said, (words, err)


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
    refuse(3, "no field 'label'", "documents.jsonl:1", documents=[{"text": "x"}])
    refuse(3, "one class only", "sea", documents=[good[0], good[3]])
    refuse(3, "an empty document", "documents.jsonl:2", documents=[good[0], {**good[1], "text": " "}])
    refuse(3, "a label that no training document has", "validation.jsonl:2", "'hill'",
           validation=[good[0], {**good[1], "label": "hill"}])
    refuse(3, "a label that no training document has", "test.jsonl:1", test=[{**good[1], "label": "hill"}])
    refuse(3, "a label that is no number", more=["--labels", "number"])
    refuse(3, "the same number", more=["--labels", "number"], documents=[{"text": "x", "label": 1}] * 2,
           validation=[{"text": "x", "label": 2}])
    refuse(2, "the same input twice", more=["--documents", folder / "train-one.jsonl"])
    refuse(2, "unknown kind of labels", more=["--labels", "many"])
    refuse(2, "unknown setting of training", more=["--set", "chunk_size=8"])
    refuse(2, "tokens_per_step", more=["--set", "tokens_per_step=100"])
    refuse(2, "not sharded", more=["--set", "shard=true"])
    refuse(2, "unknown task", more=["--task", "classification"])
    for option, value in (("--questions", folder / "x.json"), ("--stride", 3), ("--negatives", 0.5)):
        refuse(2, "for another task", option, more=[option, value])
    refuse(2, "for another task", "--labels", "--task embed", more=["--labels", "several", "--task", "embed"])
    refuse(2, "no classes to balance", more=["--labels", "number", "--balance"])
    refuse(2, "patience = 0", more=["--patience", 0])
    refuse(2, "max_tokens = 0", more=["--max-tokens", 0])
    refuse(2, "context = 1", more=["--context", 1])
    (tmp_path / "taken").write_text("notes")
    refuse(2, "not a folder", "taken", more=["--out", tmp_path / "taken"])
    named = ["--task", "classify", "--validation", folder / "dev-one.jsonl", "--out", tmp_path / "out"]
    assert_refused(*call("finetune", folder / "model", *named)[::2], 2, "--documents")
    assert_refused(*call("finetune", done, *named, "--documents",
                         folder / "train-one.jsonl")[::2], 2, "has a head already")
    assert_refused(*call("finetune", folder / "model", "--documents", "x", "--out", "y")[::2], 2, "--documents",
                   "--task questions")
    text = folder / "test-one.jsonl"
    assert_refused(*call("classify", "nowhere", text)[::2], 2, "no weights here")
    assert_refused(*call("classify", folder / "model", text)[::2], 2, "not fine-tuned on labels")
    assert_refused(*call("classify", done, text, "--out", tmp_path / "x.npy")[::2], 2, ".jsonl, .parquet")
    assert_refused(*call("generate", done, "x")[::2], 2, "this one labels")
    assert_refused(*call("classify", done, "-", "--stdin", "lines")[::2], 2, "unknown kind of stdin", "text, jsonl")
    assert_refused(*call("classify", done, "-", "--pair-field", "b")[::2], 2, "no pair of texts", "--stdin jsonl")
    assert_refused(*call("answer", done, "--question", "?", "--document", text)[::2], 2, "not fine-tuned on questions")
    assert_refused(*call("train", "--from", done / "best", "--data", folder, "--out", tmp_path / "t")[::2], 2,
                   "labels documents")


def test_a_damaged_folder_is_named(folder, done, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done, out, symlinks=True)
    whole = json.loads((out / "result.json").read_text())
    for text in ("", "{}", json.dumps({**whole, "learning_rates": {"3e-02": {"score": None}}})):
        (out / "result.json").write_text(text)
        with pytest.raises(CheckpointError, match="damaged"):
            lineartime.load_model(out)
    (out / "result.json").write_text("{")
    finetune(plan(folder, out), device=CPU)  # it is written again
    assert_same_outcome(out, done)
    fields = json.loads((out / "best" / "config.json").read_text())
    exported = tmp_path / "exported"
    exported.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(out / "best" / name, exported / name)
    for change in ({"id2label": {"0": "a", "2": "b"}}, {"id2label": "a"}, {"problem_type": "x"},
                   {"id2label": {"0": "a", "1": "a"}}):
        (exported / "config.json").write_text(json.dumps({**fields, **change}))
        with pytest.raises(UsageError, match=r"config\.json"):
            lineartime.load_model(exported)
    (exported / "config.json").write_text(json.dumps(fields))
    assert isinstance(lineartime.load_model(exported)[0], DocumentClassifier)
