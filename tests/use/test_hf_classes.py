"""Classes of rows, and embeddings of documents: exact under padding and packing."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForSequenceClassification

from lineartime.base.errors import UsageError
from lineartime.config import model_config
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.hf import document_means
from tiny_checkpoints import random_model, write_checkpoint

EOD, PAD = 256, 257
SIZES = {"n_layers": 2, "d_model": 16, "vocab_size": 257, "context": 96, "end_of_document": EOD, "query_key_dim": 8,
         "chunk_size": 4}
TEXTS = [[EOD, *b"once upon"], [EOD, *b"a"], [EOD, *b"no more of this"]]


@pytest.fixture(scope="module", params=[True, False], ids=["causal", "masked"])
def ours(request):
    return random_model(model_config("flash", **SIZES, causal=request.param))


@pytest.fixture(scope="module")
def folder(ours, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), ours, byte_tokenizer())


def padded(texts, left):
    width = max(map(len, texts))
    rows = [(width - len(text)) * [PAD] + text if left else text + (width - len(text)) * [PAD] for text in texts]
    ids_BT = torch.tensor(rows)
    return {"input_ids": ids_BT, "attention_mask": (ids_BT != PAD).long()}


def test_means_count_tokens_of_each_document_only():
    x_BTD = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    segment_ids_BT = torch.tensor([[0, 0, 1, 1, 1, 3, -1], [-1, -1, 0, 0, 0, 0, 0]])
    means_BND = document_means(x_BTD, segment_ids_BT)
    assert means_BND.shape == (2, 4, 3)
    for row, n, places in ((0, 0, [0, 1]), (0, 1, [2, 3, 4]), (0, 3, [5]), (1, 0, [2, 3, 4, 5, 6])):
        assert torch.allclose(means_BND[row, n], x_BTD[row, places].mean(0), atol=1e-15)
    assert (means_BND[0, 2] == 0).all() and (means_BND[1, 1:] == 0).all()
    assert (document_means(x_BTD, torch.full((2, 7), -1)) == 0).all()
    ones_BTD = torch.ones(1, 3000, 1, dtype=torch.bfloat16)  # whose sum in bfloat16 is 256
    assert document_means(ones_BTD, torch.zeros(1, 3000, dtype=torch.long)).item() == 1


def test_the_class_of_a_row_does_not_depend_on_its_batch(ours, folder, tmp_path):
    hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, dtype=torch.float64)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for left in (True, False):
            batch = padded(TEXTS, left)
            logits_BL = hf(**batch).logits
            if ours.config.causal:  # a padding token of its own says where padding is
                assert torch.equal(hf(batch["input_ids"]).logits, logits_BL)
            for row, text in enumerate(TEXTS):
                mean_D = ours.double().hidden(torch.tensor([text]))[0].mean(0)
                assert (logits_BL[row] - hf.score(mean_D)).abs().max() < 1e-11
            states_BTD = trunk(**batch).last_hidden_state
            embedding_BD = document_means(states_BTD, batch["attention_mask"] - 1)[:, 0]
            assert (hf.score(embedding_BD) - logits_BL).abs().max() < 1e-11
    ours.float()
    hf.save_pretrained(tmp_path)
    again, loading = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True,
                                                                        dtype=torch.float64)
    assert not any(loading.values()), loading
    assert again.config.num_labels == 3
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, logits_BL)
    with pytest.raises(UsageError, match="labels_of"):
        hf(**batch, labels_of="x")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_classifier_is_exported(folder):
    hf, batch = AutoModelForSequenceClassification.from_pretrained(folder), tuple(padded(TEXTS, True).values())
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(hf, batch).module()(*batch).logits, hf(*batch).logits)


@pytest.mark.parametrize("kind, labels, loss", [
    (None, [2, 0, 1], F.cross_entropy),
    ("multi_label_classification", [[1, 0, 1], [0, 0, 0], [1, 1, 1]], F.binary_cross_entropy_with_logits),
    ("regression", [[0.5, 1, 2], [0, 0, 1], [3, 2, 1]], F.mse_loss),
    ("regression of one", [0.5, -1, -100], F.mse_loss)])
def test_losses_of_rows(folder, kind, labels, loss):
    """Labels `[B]` and `[B, 1]` are the same."""
    one, labels = kind == "regression of one", torch.tensor(labels, dtype=None if kind is None else torch.float)
    how = {"num_labels": 1} if one else {"num_labels": 3, "problem_type": kind}
    hf = AutoModelForSequenceClassification.from_pretrained(folder, **how)
    output = hf(**padded(TEXTS, True), labels=labels)
    assert torch.allclose(output.loss, loss(output.logits[:, 0] if one else output.logits, labels))
    if one or kind is None:
        assert torch.equal(hf(**padded(TEXTS, True), labels=labels[:, None]).loss, output.loss)
    output.loss.backward()
    assert hf.score.weight.grad.abs().sum() > 0 and 0 < hf.score.weight.std() < 0.04
