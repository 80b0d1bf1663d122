"""Models of documents in `transformers`, and the folder that `sentence-transformers` reads: the same numbers."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import lineartime
import lineartime.hf
from command_line import assert_refused
from lineartime.finetune_config import FineTuning
from lineartime.finetuning import finetune
from made_documents import CONTEXT, made_rows, write_model, write_rows
from marks import rest

CPU = torch.device("cpu")
TEXTS = [row["text"] for row in made_rows(5, 9)]


@pytest.fixture(scope="module", params=["one, causal", *rest("several, both ways")])
def trained(request, tmp_path_factory):
    """A fine-tuned model, and what it learned."""
    folder, (kind, ways) = tmp_path_factory.mktemp("trained"), request.param.split(", ")
    write_model(folder / "model", causal=ways == "causal")
    rows = write_rows(folder / "rows.jsonl", made_rows(8, 1, kind))
    settings = {"tokens_per_step": 4 * CONTEXT, "eval_every": 100, "clip": None}
    finetune(FineTuning(folder / "model", rows, (rows,), folder / "out", "classify", labels=kind, epochs=1,
                                      learning_rates=(1e-2,), settings=settings), device=CPU)
    return folder / "out", kind


def test_transformers_opens_the_folder_with_its_head(trained):
    out, kind = trained
    hf, loading = AutoModelForSequenceClassification.from_pretrained(out / "best", output_loading_info=True,
                                                                     dtype=torch.float64)
    assert not any(loading.values()), loading
    ours, tokenizer, _ = lineartime.load_classifier(out)
    encode = AutoTokenizer.from_pretrained(out / "best")
    texts = [text for text in TEXTS if hf.config.causal or len(text) < CONTEXT]
    assert any(len(text) > CONTEXT for text in texts) == hf.config.causal and len(texts) > 1
    found = lineartime.classify(ours.double(), tokenizer, texts)
    with torch.no_grad():
        logits_BL = hf(**encode(texts, padding=True, return_tensors="pt")).logits
    p_BL = logits_BL.softmax(-1) if kind == "one" else logits_BL.sigmoid()
    for each, p_L in zip(found, p_BL.tolist(), strict=True):
        assert [*each.scores] == [hf.config.id2label[i] for i in range(len(p_L))]
        assert np.abs(np.array([*each.scores.values()]) - p_L).max() < 1e-12


def test_a_number_is_the_same_number_in_transformers(tmp_path):
    """And not its distance from the mean in standard deviations."""
    write_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", made_rows(8, 1, "number"))
    settings = {"tokens_per_step": 4 * CONTEXT, "eval_every": 100, "clip": None}
    finetune(FineTuning(tmp_path / "model", rows, (rows,), tmp_path / "out", "classify", labels="number", epochs=1,
                        learning_rates=(1e-2,), settings=settings), device=CPU)
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "best", dtype=torch.float64)
    ours, tokenizer, _ = lineartime.load_classifier(tmp_path / "out")
    (found,) = lineartime.classify(ours.double(), tokenizer, TEXTS[:1])
    with torch.no_grad():
        number = hf(torch.tensor([[256, *TEXTS[0].encode()]])).logits.item()
    assert number == pytest.approx(found.label, rel=1e-9) and number > 90


def test_an_exported_folder_opens_everywhere(trained, tmp_path, call):
    """What `sentence-transformers` does with these files is done here by hand: it is not installed."""
    out, _ = trained
    code, said, err = call("export", out, "--out", tmp_path / "shared")
    assert code == 0 and "sentence-transformers" in said, err
    assert_refused(*call("export", out, "--out", tmp_path / "shared")[::2], 2, "the output exists already")
    assert_refused(*call("export", out, "--out", tmp_path / "x", "--about", "x")[::2], 2, "leave out")
    ours, tokenizer, _ = lineartime.load_classifier(out)
    shared = lineartime.load_classifier(tmp_path / "shared")[0]
    assert lineartime.classify(shared, tokenizer, TEXTS) == lineartime.classify(ours, tokenizer, TEXTS)
    modules = json.loads((tmp_path / "shared" / "modules.json").read_text())
    assert [each["type"].rpartition(".")[2] for each in modules] == ["Transformer", "Pooling"]
    pooling = json.loads((tmp_path / "shared" / modules[1]["path"] / "config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens", "include_prompt"]
    limit = json.loads((tmp_path / "shared" / "sentence_bert_config.json").read_text())["max_seq_length"]
    trunk = AutoModel.from_pretrained(tmp_path / "shared", trust_remote_code=True, dtype=torch.float64)
    encode = AutoTokenizer.from_pretrained(tmp_path / "shared", trust_remote_code=True)
    texts = [text for text in TEXTS if trunk.config.causal or len(text) < CONTEXT]
    batch = encode(texts, padding=True, truncation="longest_first", max_length=limit, return_tensors="pt")
    with torch.no_grad():
        x_BTD = trunk(**batch).last_hidden_state
    mask_BT1 = batch["attention_mask"][..., None]
    means_BD = (x_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
    assert pooling["word_embedding_dimension"] == means_BD.shape[1]
    assert np.abs(means_BD.numpy() - lineartime.embed(ours.double(), tokenizer, texts)).max() < 1e-12
    card = (tmp_path / "shared" / "README.md").read_text()
    assert card.startswith("---\n") and "# Labels of documents" in card
    assert "\npipeline_tag: text-classification\n" in card


@pytest.mark.parametrize(("how", "labels", "kind"), [
    ({"num_labels": 2}, ("LABEL_0", "LABEL_1"), "single_label_classification"),
    ({"num_labels": 1}, ("LABEL_0",), "regression"),
    ({"id2label": {0: "no", 1: "yes", 2: "both"}, "problem_type": "multi_label_classification"}, ("no", "yes", "both"),
     "multi_label_classification")])
def test_a_head_that_transformers_made_is_one_of_ours(tmp_path, how, labels, kind):
    folder = write_model(tmp_path / "model")
    hf = AutoModelForSequenceClassification.from_pretrained(folder, **how)
    hf.save_pretrained(tmp_path / "head")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "head")
    ours, tokenizer, _ = lineartime.load_classifier(tmp_path / "head")
    assert ours.head.labels == labels and ours.head.problem_type == kind
    (found,) = lineartime.classify(ours, tokenizer, TEXTS[:1])
    with torch.no_grad():
        logits_L = hf.eval()(torch.tensor([[256, *TEXTS[0].encode()]])).logits[0]
    as_said = {"single_label_classification": logits_L.softmax(0), "regression": logits_L}
    expected = as_said.get(kind, logits_L.sigmoid())
    assert [*(found.scores or {"": found.label}).values()] == pytest.approx(expected.tolist(), abs=1e-5)
