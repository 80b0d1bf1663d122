"""Masked models under transformers: fill-mask, labels, padding, and predicted tokens."""

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from lineartime.base.errors import UsageError
from lineartime.config import model_config
from lineartime.data.prepare_config import SAMPLE
from lineartime.data.tokenizer import END_OF_DOCUMENT, train_tokenizer
from lineartime.hf import LineartimeForMaskedLM, LineartimeTokenizer
from lineartime.model.language_model import masked_token_losses
from marks import rest
from tiny_checkpoints import random_model, write_checkpoint

TOKENIZER = train_tokenizer([SAMPLE.read_text(encoding="utf-8")[:30_000]], 500, mlm=True)
EOD, MASK = TOKENIZER.end_of_document, TOKENIZER.mask
SIZES = {"n_layers": 2, "d_model": 16, "vocab_size": TOKENIZER.vocab_size, "context": 96, "end_of_document": EOD}
CONFIGS = {
    "flash": model_config("flash", "c4", **SIZES, query_key_dim=8, chunk_size=4),
    "transformer++": model_config("transformer++", "c4", **SIZES, n_heads=2),
}


@pytest.fixture(scope="module", params=["flash", *rest("transformer++")])
def ours(request):
    return random_model(CONFIGS[request.param])


@pytest.fixture(scope="module")
def folder(ours, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), ours, TOKENIZER)


def some_ids(n_rows=2, length=30):
    ids_BT = torch.randint(3, TOKENIZER.vocab_size, (n_rows, length), generator=torch.Generator().manual_seed(1))
    ids_BT[0, 0] = ids_BT[0, 11] = ids_BT[1, 17] = EOD
    ids_BT[:, 5] = MASK
    return ids_BT


def test_a_checkpoint_says_what_it_is_and_gives_the_same_logits(ours, folder):
    hf, loading = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert type(hf) is LineartimeForMaskedLM and not any(loading.values()), loading
    assert hf.config.architectures == ["LineartimeForMaskedLM"]
    ids_BT = some_ids()
    with torch.no_grad():
        assert torch.equal(hf(ids_BT).logits, ours(ids_BT))
        assert torch.equal(hf(ids_BT, return_dict=False)[0], ours(ids_BT))
        assert torch.equal(AutoModel.from_pretrained(folder)(ids_BT).last_hidden_state, ours.hidden(ids_BT))


def test_the_loss_is_the_mean_over_labels(ours, folder):
    hf, ids_BT = AutoModelForMaskedLM.from_pretrained(folder), some_ids()
    targets_BT = torch.full_like(ids_BT, -1)
    targets_BT[0, [3, 5, 20]], targets_BT[1, 5] = torch.tensor([7, 8, 9]), 10
    expected = masked_token_losses(ours, ids_BT, targets_BT).detach()
    labels_BT = torch.where(targets_BT < 0, -100, targets_BT)
    output = hf(ids_BT, labels=labels_BT)
    assert torch.allclose(output.loss, expected.mean(), rtol=1e-6) and output.logits is not None
    assert torch.allclose(hf(ids_BT, labels=labels_BT, num_items_in_batch=7).loss, expected.sum() / 7, rtol=1e-6)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, 15:] = mask_BT[1, :2] = 0
    learned, some = (hf(ids_BT, attention_mask=mask_BT, labels=each_BT).loss
                     for each_BT in (ids_BT, ids_BT.masked_fill(mask_BT == 0, -100)))
    assert torch.equal(learned, some)  # padding is no target, whatever its id
    output.loss.backward()
    assert all(p.grad.abs().max() > 0 for p in hf.parameters())
    hf.zero_grad()
    nothing = hf(ids_BT, labels=torch.full_like(ids_BT, -100)).loss
    nothing.backward()
    assert nothing == 0 and all((p.grad == 0).all() for p in hf.parameters())
    trained = hf.train()(ids_BT, labels=labels_BT)
    assert torch.equal(trained.loss, output.loss) and trained.logits is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side, ours, folder):
    hf = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    texts = ["Reader, I [MASK] him.", "There was no [MASK] of taking a walk that day; we had been wandering", "[MASK]"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        logits_BTV, embeds_BTD = hf(**batch).logits, hf.model.embed(batch["input_ids"])
        of_vectors = hf(inputs_embeds=embeds_BTD, attention_mask=batch["attention_mask"]).logits
        assert (of_vectors - logits_BTV)[batch["attention_mask"].bool()].abs().max() < 1e-11
        for row, text in enumerate(texts):
            alone = tokenizer(text, return_tensors="pt")["input_ids"]
            assert alone[0, 0] == EOD and (alone == MASK).sum() == 1
            found = logits_BTV[row, batch["attention_mask"][row].bool()]
            assert (found - ours.double()(alone)[0]).abs().max() < 1e-11
    ours.float()


def test_a_mask_in_the_text_is_the_token(folder, tmp_path):
    """Though a document that spells it out is text; around it is the text."""
    tokenizer, text = AutoTokenizer.from_pretrained(folder), "Reader, I [MASK] him.[SEP]b"
    assert tokenizer.bos_token == tokenizer.pad_token == END_OF_DOCUMENT and len(tokenizer) == TOKENIZER.vocab_size
    tokenizer.save_pretrained(tmp_path)
    before, after, last = (TOKENIZER.encode(part) for part in ("Reader, I", " him.", "b"))
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert type(each) is LineartimeTokenizer
        assert (each.mask_token_id, each.sep_token_id) == (MASK, TOKENIZER.separator)
        assert each(text)["input_ids"] == [EOD, *before, MASK, *after, TOKENIZER.separator, *last]


def test_fill_mask_pipeline(ours, folder):
    """The likeliest tokens and their probabilities are the model's own."""
    pipeline = transformers.pipeline("fill-mask", model=str(folder), tokenizer=str(folder))
    ids = [EOD, *TOKENIZER.encode("Reader, I"), MASK, *TOKENIZER.encode(" him.")]
    with torch.no_grad():
        values, tokens = ours(torch.tensor([ids]))[0, ids.index(MASK)].softmax(-1).topk(5)
    answers = pipeline("Reader, I [MASK] him.")
    assert [answer["token"] for answer in answers] == tokens.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(values.tolist(), rel=1e-4)
    assert answers[0]["sequence"] == "Reader, I" + TOKENIZER.decode([answers[0]["token"]]) + " him."


def test_wrong_class_and_what_would_be_ignored_are_refused(folder, tmp_path):
    with pytest.raises(UsageError, match=r"causal = false; AutoModelForMaskedLM opens it"):
        AutoModelForCausalLM.from_pretrained(folder)
    causal = random_model(model_config("flash", **SIZES, query_key_dim=8, chunk_size=4))
    with pytest.raises(UsageError, match=r"causal = true; AutoModelForCausalLM opens it"):
        AutoModelForMaskedLM.from_pretrained(write_checkpoint(tmp_path, causal, TOKENIZER))
    hf = AutoModelForMaskedLM.from_pretrained(folder)
    for given, words in (({"position_ids": some_ids()}, "position_ids"), ({"use_cache": True}, "only a causal")):
        with pytest.raises(UsageError, match=words):
            hf(some_ids(), **given)
