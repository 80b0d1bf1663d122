"""Tasks of recall ask for what their rows hold; a study trains and resumes."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch

from benchmarks.__main__ import app
from benchmarks.recall import study
from benchmarks.recall.measure import LEARNED, Recall, asked, learn, passed
from benchmarks.recall.tasks import FIRST_PAIR, FIRST_VALUE, N_VALUES, TASKS, ZOOLOGY_VOCABULARY, text_task
from command_line import Call, assert_refused
from lineartime.base.errors import DataError
from lineartime.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from lineartime.model.language_model import LanguageModel
from lineartime.training.language import train
from tiny_runs import SETTINGS, prepare_text


def drawn(name: str, n_facts: int, length: int, n_rows: int = 5):
    return TASKS[name].draw(n_rows, n_facts, length, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.counted == "facts"])
def test_the_answer_stands_in_the_row_before_the_question(name):
    task = TASKS[name]
    for n_facts in task.n_facts:
        for times in task.times:
            ids_BT, asked_BQ, answer_BQ = drawn(name, n_facts, times * task.length)
            assert ids_BT.shape == (5, times * task.length) and 0 <= ids_BT.min() and ids_BT.max() < task.vocab_size
            assert asked_BQ.max() < times * task.length
            if name == "copying":
                assert torch.equal(ids_BT[:, 1 : n_facts + 1], answer_BQ)
                continue
            for ids_T, asked_Q, answer_Q in zip(ids_BT, asked_BQ, answer_BQ, strict=True):
                before, question_Q = ids_T[: asked_Q[0]].tolist(), ids_T[asked_Q]
                if name == "joint":
                    facts = {*before}
                    wanted = {*(FIRST_PAIR + N_VALUES * question_Q + answer_Q - FIRST_VALUE).tolist()}
                else:
                    facts, wanted = {*pairwise(before)}, {*zip(question_Q.tolist(), answer_Q.tolist(), strict=True)}
                assert wanted <= facts


@pytest.mark.parametrize(("name", "letters"), [
    ("parity", [[0, 1], [1, 0]]), ("s5", [[1, 0, 2, 3, 4], [1, 2, 3, 4, 0]])])
def test_a_word_is_asked_for_the_product_of_its_letters_so_far(name, letters):
    letters = [torch.eye(len(letter), dtype=torch.long)[letter] for letter in letters]
    matrices = {}  # by number of an answer
    for draw, first in (TASKS[name].draw, 0), (TASKS[name].test, 35):
        ids_BT, asked_BQ, answer_BQ = draw(8, 5, 40, torch.Generator().manual_seed(3))
        assert asked_BQ.tolist() == [[*range(first, first + 5)]] * 8
        for ids_T, answer_Q in zip(ids_BT.tolist(), answer_BQ.tolist(), strict=True):
            made = [*accumulate((letters[i] for i in ids_T), torch.matmul)][first : first + 5]
            for answer, matrix in zip(answer_Q, made, strict=True):
                assert torch.equal(matrices.setdefault(answer, matrix), matrix)
    assert len({tuple(matrix.flatten().tolist()) for matrix in matrices.values()}) == len(matrices)


def test_zoologys_rows_are_as_its_paper_says():
    n_rows, n, length, half = 400, 8, 128, ZOOLOGY_VOCABULARY // 2
    ids_BT, asked_BQ, answer_BQ = drawn("zoology", n, length, n_rows)
    keys_BN, values_BN = ids_BT[:, 0 : 2 * n : 2], ids_BT[:, 1 : 2 * n : 2]
    assert 1 <= keys_BN.min() and keys_BN.max() < half <= values_BN.min()
    assert torch.equal(ids_BT.gather(1, asked_BQ), keys_BN) and torch.equal(answer_BQ, values_BN)
    gap_BN = (asked_BQ - 2 * n) / 2
    assert torch.equal(gap_BN, gap_BN.round()) and all(len({*row.tolist()}) == n for row in asked_BQ)
    weights = torch.arange(1, 57).double() ** -0.99
    first_share = (gap_BN[:, 0] == 0).double().mean().item()  # the first is drawn from all
    assert abs(first_share - (weights / weights.sum())[0].item()) < 0.06


def test_numbers_stand_behind_names_in_the_text_and_the_names_at_its_end(tmp_path):
    out = prepare_text(tmp_path)
    task, tokenizer = text_task(out), load_tokenizer(out / TOKENIZER_FILE)
    once = text_task(out, "once").test
    for draw in (task.draw, task.test, once):
        for n_facts in task.n_facts:
            ids_BT, asked_BQ, answer_BQ = draw(3, n_facts, 768, torch.Generator().manual_seed(1))
            n_asked = n_facts if draw is once else 32
            assert ids_BT.shape == (3, 768) and asked_BQ.shape == (3, n_asked) and (asked_BQ[:, -1] == 767).all()
            assert not (ids_BT == tokenizer.end_of_document).any()
            for row in range(3):
                facts = {*re.findall(r"[A-Z][a-z]{2}\d", tokenizer.decode(ids_BT[row].tolist()))}
                assert len({fact[1:3] for fact in facts}) == len(facts) == n_facts
                asked = {tokenizer.decode(ids_BT[row, : place + 1].tolist())[-3:] + tokenizer.decode([answer])
                         for place, answer in zip(asked_BQ[row].tolist(), answer_BQ[row].tolist(), strict=True)}
                assert asked == facts if draw is once else asked <= facts
            assert tokenizer.decode([task.answers[3]]) == "3" and set(answer_BQ.flatten().tolist()) <= set(task.answers)
    with pytest.raises(DataError, match="too few tokens for a row"):
        task.draw(1, 8, 100, torch.Generator())


@pytest.mark.parametrize("name", TASKS)
def test_no_test_row_is_trained_on_and_all_seeds_train_on_the_same(name):
    """A generator takes 32 bits of its seed: step 7's batch and the test rows share a stream."""
    task = TASKS[name]
    batch, other = (Recall(task, task.length, study.training(name, task, {"seed": seed})).batch for seed in (0, 1))
    trained = {row.tobytes() for step in (6, 7, 8) for row in batch(step)[0]}
    model = LanguageModel(study.config_of("flash", task, {}))
    for n_facts in task.n_facts:
        assert not trained & {row.numpy().tobytes() for row in asked(model, task, n_facts, task.length, 48)[1].ids_BT}
    assert (batch(7)[0] == other(7)[0]).all()


def test_a_model_that_can_recall_learns_it_and_the_same_seed_does_the_same():
    """One fact: the value that stands in the row is the answer to every question."""
    task = replace(TASKS["pairs"], n_facts=(1,))
    config = study.config_of("transformer++, conv", task, {"d_model": 32, "context": 40})
    settings = study.training("pairs", task, {"steps": 120, "warmup_steps": 10, "learning_rate": 6e-3, "context": 40,
                                              "tokens_per_step": 320, "seed": 1})
    curves = [[*learn(study.new_model("transformer++, conv", config, 1), Recall(task, 40, settings))] for _ in range(2)]
    assert curves[0] == curves[1] and len(curves[0]) == 24 and curves[0][-1][0] == 120
    assert curves[0][0][1] > 4 and curves[0][-1][1] < 0.5 and curves[0][-1][2] > 0.9, curves[0][-1]
    by_muon = Recall(task, 40, replace(settings, optimizer="muon"))
    assert next(learn(study.new_model("transformer++, conv", config, 1), by_muon))[:2] != curves[0][0][:2]


def test_what_is_asked_is_what_a_perfect_model_knows():
    task = TASKS["pairs"]

    def oracle(ids_BT, at_K, shift=0):
        rows = task.draw(4, 8, 256, torch.Generator().manual_seed((1 << 62) + 7))
        hidden = torch.zeros(*ids_BT.shape, task.vocab_size)
        at = rows.asked_BQ[..., None].expand(-1, -1, task.vocab_size)
        answers = torch.nn.functional.one_hot(rows.answer_BQ, task.vocab_size).float()
        return hidden.scatter(1, at, answers).roll(shift, 1)[: len(ids_BT)].flatten(0, 1)[at_K]

    assert asked(oracle, task, 8, 256, 4)[0].all()
    assert not asked(oracle, replace(task, answers=(0, 1)), 8, 256, 4)[0].any(), "only those tokens may answer"
    assert asked(partial(oracle, shift=1), task, 8, 256, 4)[0].double().mean() < 0.5


@pytest.mark.parametrize(("right", "step"), [([0.1, 0.95, 0.97], 20), ([0.95, 0.2, 0.91], 30), ([0.95, 0.2], None),
                                             ([], None), ([LEARNED], 10)])
def test_learned_is_what_stays_learned(right, step):
    assert passed([[10 * i, 0.0, value] for i, value in enumerate(right, 1)]) == step


def test_a_study_goes_on_where_it_stopped(call: Call, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(study, "RATES", [1e-3, 6e-3])
    monkeypatch.setattr(study, "SEEDS", 2)
    sizes = ("steps=24", "warmup_steps=2", "d_model=16", "layers=gau", "tokens_per_step=128")
    command = ["recall", "flash", "flash-quad", "--task", "pairs", *(f"--set={size}" for size in sizes), "--json", rows]
    code, out, err = call(*command, app=app)
    assert code == 0, err
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    for model, lengths in ("flash", {"128", "256", "512", "1024"}), ("flash-quad", {"128"}):  # its positions end there
        *first, last = [row for row in measured if row["model"] == model]
        best = max(first, key=study.score)["learning_rate"]
        tried = [row["learning_rate"] for row in first]
        assert last["learning_rate"] == best and min(tried) < best < max(tried) and tried[:2] == [1e-3, 6e-3]
        assert [row["seed"] for row in (*first, last)] == [0] * len(first) + [1]
        assert first[0]["accuracy"].keys() == lengths
    assert "learned from step" in out and str(tmp_path) not in rows.read_text()
    kept = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(kept[:4]) + kept[4][:50])
    assert call(*command, app=app)[0] == 0
    assert [line[: line.index('"curve"')] for line in rows.read_text().splitlines()] == [
        line[: line.index('"curve"')] for line in kept]
    assert call(*command, app=app)[0] == 0 and len(rows.read_text().splitlines()) == len(kept)


def test_kin_of_transformers_learn_as_ours_do(call: Call, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    for name, new in {"study.RATES": [1e-2], "study.SEEDS": 1, "measure.N_SCORES": 3, "measure.TEST_ROWS": 12}.items():
        monkeypatch.setattr(f"benchmarks.recall.{name}", new)
    monkeypatch.setattr(study, "rates_to_try", lambda first: [] if first else study.RATES)
    command = ["--task", "pairs", "--set=steps=24", "--set=warmup_steps=1", "--set=context=96",
               "--set=tokens_per_step=384", "--json", rows]
    code, _, err = call("recall", "flash", "gru", "gated-deltanet", "mamba2", *command, app=app)
    assert code == 0, err
    ours, gru, *theirs = map(json.loads, rows.read_text().splitlines())
    assert gru["state_size"] is None and gru["accuracy"].keys() == ours["accuracy"].keys()  # and it need not decode
    assert [row["learning_rate"] for row in theirs] == [1e-2, 1e-2]
    for row in theirs:
        assert row["state_size"] == ours["state_size"] == 2 * 64 * 128
        assert abs(row["n_parameters"] / ours["n_parameters"] - 1) < 0.03
        assert row["accuracy"].keys() == ours["accuracy"].keys() and row["settings"]["peer"]
        assert row["curve"][0][1] > row["curve"][-1][1] + 0.5
    assert_refused(*call("recall", "mamba2", *command, "--set", "d_model=32", app=app)[::2], 2,
                   "a peer has sizes of its own: mamba2: d_model; leave out --set")
    monkeypatch.setattr("benchmarks.peers.installed_version", lambda package: None)
    assert_refused(*call("recall", "mamba2", *command, app=app)[::2], 2,
                   "a peer is not installed: mamba2; pip install transformers")


def test_a_trained_model_is_asked_in_text(tmp_path, call: Call, monkeypatch):
    data, out, rows = prepare_text(tmp_path), tmp_path / "run", tmp_path / "rows.jsonl"
    train({"model": "flash", "data": str(data), "out": str(out), **SETTINGS, "steps": 2, "warmup_steps": 1})
    monkeypatch.setattr(study, "text_task", lambda *given: replace(text_task(*given), times=(1,), test_rows=9))
    code, printed, err = call("recall", out, "--task", "once", "--data", data, "--json", rows, "--set", "context=640",
                              app=app)
    assert code == 0 and printed.startswith("run, once, 4, 8, 16, 32 facts: 640: "), err
    assert printed.splitlines()[0].endswith("; a guess 0.1")
    row = json.loads(rows.read_text())
    assert row["accuracy"].keys() == {"640"} and row["model"] == "run" and row["curve"] == []
    assert all(0 <= right < 0.5 for right in row["accuracy"]["640"].values())
    for model, more, words in (
            ("flash", ["--task", "once", "--data", data], "once is asked of trained models alone: flash; give their "
             "folders, or small"),
            (out, ["--task", "text", "--data", data, "--set", "steps=5"], "not a setting of recall by a trained model: "
             "steps"),
            ("flash", ["--set", "eval_every=3"], "not a setting of recall: eval_every"),
            (out, [], "a trained model is asked in text alone")):
        assert_refused(*call("recall", model, *more, "--json", rows, app=app)[::2], 2, words)
