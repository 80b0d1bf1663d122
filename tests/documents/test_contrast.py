"""Fine-tuning for vectors: the loss, its negatives, pairs and halves, stopped and resumed, what the model is then."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lineartime
from command_line import assert_refused
from lineartime.config import model_config
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.documents import vectors
from lineartime.documents.examples import text_examples
from lineartime.documents.tasks import PairObjective
from lineartime.documents.texts import read_texts
from lineartime.documents.vectors import contrastive_losses, score_pairs
from lineartime.errors import DataError
from lineartime.finetune_config import Fields, FineTuning
from lineartime.finetuning import finetune, runs_of
from lineartime.model import DocumentEncoder
from lineartime.run_files import read_metrics
from made_documents import CONTEXT, write_model, write_rows

CPU = torch.device("cpu")


def made_pairs(n, first):
    """The second text is in the other half of the alphabet; some texts are longer than a row."""
    return [{"text": f"{chr(97 + i % 13) * 2} " * (3 + i % 17), "other": f"{chr(110 + i % 13)} " * (4 + i % 19)}
            for i in range(first, first + n)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrast")
    write_model(folder / "model")
    for part, n, first in (("train", 26, 0), ("dev", 13, 26), ("test", 13, 52)):
        write_rows(folder / f"{part}.jsonl", made_pairs(n, first))
    return folder


def plan(folder, out, **changes):
    fields = {"learning_rates": (1e-2,), "epochs": 10, "fields": Fields("text", "other"),
              "settings": {"tokens_per_step": 13 * CONTEXT, "eval_every": 5, "save_every": 3, "clip": None}, **changes}
    return FineTuning(folder / "model", (folder / "train.jsonl",), (folder / "dev.jsonl",), out, task="embed",
                      test=(folder / "test.jsonl",), **fields)


@pytest.fixture(scope="module")
def done(folder):
    finetune(plan(folder, folder / "done"), device=CPU)
    return folder / "done"


def test_the_loss_is_the_cross_entropy_of_finding_the_partner_both_ways():
    generator = torch.Generator().manual_seed(1)
    a_BD, b_BD = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator).unbind()
    same_B2 = torch.tensor([[0, 1], [2, 3], [4, 1], [5, 6], [2, 7]])  # 0 and 2 share the second text, 1 and 4 the first
    losses_B2 = contrastive_losses(a_BD, b_BD, same_B2)
    for i in range(5):
        others = [j for j in range(5) if j == i or {i, j} not in ({0, 2}, {1, 4})]
        for side, (x_BD, y_BD) in enumerate(((a_BD, b_BD), (b_BD, a_BD))):
            logits = torch.stack([F.cosine_similarity(x_BD[i], y_BD[j], dim=0) / vectors.TEMPERATURE for j in others])
            expected = -logits.log_softmax(0)[others.index(i)]
            assert torch.allclose(losses_B2[i, side], expected, atol=1e-12)
    assert torch.allclose(contrastive_losses(3 * a_BD, b_BD / 7, same_B2), losses_B2, atol=1e-12)


def test_scores_are_those_of_all_pairs_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    a_ND, b_ND = torch.randn(2, 9, 4, dtype=torch.float64, generator=generator).unbind()
    same_N2 = np.arange(18).reshape(9, 2)
    whole = score_pairs(a_ND, b_ND, same_N2)
    cosine_NN = F.normalize(a_ND, dim=1) @ F.normalize(b_ND, dim=1).T
    ranks = [1 + int((row > row[i]).sum()) for i, row in enumerate(cosine_NN)]
    assert whole["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert whole["loss"] == pytest.approx(contrastive_losses(a_ND, b_ND, torch.from_numpy(same_N2)).mean().item())
    monkeypatch.setattr(vectors, "BLOCK", 4)
    assert score_pairs(a_ND, b_ND, same_N2) == pytest.approx(whole)
    many_ND = torch.randn(2, 40, 4, dtype=torch.float64, generator=generator).unbind()
    first_NN, second_NN = (F.normalize(each, dim=1) for each in many_ND)
    cosine_NN = first_NN @ second_NN.T
    within = (cosine_NN >= cosine_NN.diag()[:, None]).sum(1) <= 10
    assert score_pairs(*many_ND, np.arange(80).reshape(40, 2))["recall_at_10"] == pytest.approx(within.double().mean())
    collapsed = score_pairs(torch.ones_like(a_ND), torch.ones_like(b_ND), same_N2)
    assert collapsed["recall_at_1"] == 0  # a tie counts against a text
    same_N2[:, 1] = 7  # every second text is the same: none counts against another
    assert score_pairs(a_ND, b_ND, same_N2)["recall_at_1"] == 1


def test_a_text_that_is_first_and_second_is_not_its_own_negative(monkeypatch):
    """Pairs that are listed both ways: vectors that are right find all, and the loss is that of two pairs."""
    monkeypatch.setattr(vectors, "BLOCK", 3)  # texts that belong together are in different blocks
    a, b, c, d = torch.eye(4, dtype=torch.float64)
    b, d = a + 0.3 * b, c + 0.3 * d
    first_ND, second_ND = torch.stack([a, b, c, d]), torch.stack([b, a, d, c])
    same_N2 = np.array([[0, 1], [1, 0], [2, 3], [3, 2]])
    scores = score_pairs(first_ND, second_ND, same_N2)
    assert scores["recall_at_1"] == 1
    losses_B2 = contrastive_losses(first_ND, second_ND, torch.from_numpy(same_N2))
    assert losses_B2.max() < 1e-5 and scores["loss"] == pytest.approx(losses_B2.mean().item())


def test_halves_hold_every_token_once():
    tokenizer, halved = byte_tokenizer(), ["abcdef", "abcde", "ab"]
    pairs = read_texts(tokenizer, text_examples(halved), in_pairs=True)
    for text, a, b in zip(halved, pairs.ids, pairs.second_ids, strict=True):
        assert a[0] == b[0] == 256 and bytes([*a[1:], *b[1:]]).decode() == text and 0 <= len(b) - len(a) <= 1
    assert read_texts(tokenizer, text_examples(["abcdef", "ab"]), 4, in_pairs=True).n_cut == 1
    texts = text_examples([("a", "b"), ("ab", "c"), ("a", "bc"), ("a", "b")])
    same_N2 = vectors.same_texts(read_texts(tokenizer, texts, in_pairs=True)).tolist()
    assert same_N2 == [[0, 1], [2, 3], [0, 4], [0, 1]]
    with pytest.raises(DataError, match="too short to be halved: text 2"):
        read_texts(tokenizer, text_examples(["abc", "a"]), in_pairs=True)
    with pytest.raises(DataError, match="one pair only"):
        read_texts(tokenizer, text_examples(["abc"]), in_pairs=True)


def test_all_rows_of_a_step_are_negatives(folder):
    """However long they are: a micro-batch is not cut to what it has in pretraining."""
    train = plan(folder, Path("x"), settings={}).train_config(1e-3, 8192, 33, None)
    assert train.micro_batch_tokens == train.tokens_per_step == 32 * 8192
    assert train.steps * 32 >= 33 * 10  # a step that is not full counts


def test_a_batch_has_the_two_texts_of_a_pair_and_says_which_are_equal():
    """Also of rows in another order than the file's."""
    texts = read_texts(byte_tokenizer(), text_examples([(chr(97 + i // 2), chr(110 + i)) for i in range(8)]),
                       in_pairs=True)
    how = FineTuning("", ("x",), ("x",), Path("x"), "embed", settings={"tokens_per_step": 4 * CONTEXT})
    task = PairObjective(runs_of(how, model_config("flash", context=CONTEXT), 8)["1e-03"], texts, texts)
    for step in range(4):
        for first_T, second_T, (a, b) in zip(*task.batch(step), strict=True):
            row = second_T[1] - 110
            assert first_T[1] == 97 + row // 2 and (task.same_N2[row] == (a, b)).all()


def test_it_learns_and_the_folder_holds_the_best(folder, done):
    result = json.loads((done / "result.json").read_text())
    assert result["without_training"]["mrr"] < 0.5 < 0.8 < result["test"]["mrr"]
    first, *_, last = [line["loss"] for line in read_metrics(done / "lr-1e-02") if "loss" in line]
    assert last < first - 0.5
    model, tokenizer, facts = lineartime.load_model(done)
    assert type(model) is DocumentEncoder and facts["step"] == result["learning_rates"]["1e-02"]["best_step"]
    vectors = [torch.from_numpy(lineartime.embed(model, tokenizer, [row[name] for row in made_pairs(13, 52)]))
               for name in ("text", "other")]
    assert score_pairs(*vectors, np.arange(26).reshape(13, 2))["mrr"] == pytest.approx(result["test"]["mrr"])
    assert "13 test pairs" in (done / "report.md").read_text()


def test_the_verbs(folder, done, tmp_path, call):
    line = ["finetune", folder / "model", "--task", "embed", "--documents", folder / "train.jsonl", "--validation",
            folder / "dev.jsonl", "--out", tmp_path / "out", "--learning-rates", "1e-3", "--epochs", 1]
    code, out, err = call(*line)
    assert code == 0 and "halves of documents" in out and "without training found first" in out, err
    assert len(call("embed", done, folder / "test.jsonl")[1].splitlines()) == 13
    code, _, err = call("export", done, "--out", tmp_path / "shared")
    assert code == 0 and type(lineartime.load_model(tmp_path / "shared")[0]) is DocumentEncoder, err
    new = ["--out", tmp_path / "x"]
    for arguments, words in ((["generate", done, "x"], "only a causal language model"),
                             (["export", done / "lr-1e-02", *new], "one run of a fine-tuning"),
                             (["train", "--from", done / "best", "--data", folder, *new], "gives documents vectors"),
                             ([*line, "--set", f"micro_batch_tokens={CONTEXT}"], "no negatives")):
        assert_refused(*call(*arguments)[::2], 2, words)
