"""Laws of pooling: a document's vector is that of one long row, whatever the windows, the batch and the padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import lineartime
from lineartime.config_json import Head
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.documents.classify import ONE
from lineartime.documents.pooling import Reading, carries_state, document_ids, document_means, read_means, row_means
from lineartime.documents.vectors import contrastive_losses
from lineartime.errors import DataError, UsageError
from lineartime.model import DocumentClassifier, LanguageModel
from tiny_models import BIDIRECTIONAL, CONFIGS, CONTEXT, UNPACKED, case_of, random_model, with_end

LENGTHS = (1, 61, 24, 3, 25, 23, 48, 2)


def documents(lengths=LENGTHS):
    """Ids as `document_ids` gives them: the end-of-document token first."""
    generator = torch.Generator().manual_seed(3)
    return [np.array([0, *torch.randint(1, 13, (n - 1,), generator=generator)], np.uint16) for n in lengths]


def row_of(ids):
    return torch.from_numpy(ids.astype(np.int64))[None]


def close(a, b):
    return np.abs(a - b).max() <= 1e-12 * max(1, np.abs(b).max())


@pytest.mark.parametrize("name", [case_of(name, rest=" " in name) for name in CONFIGS])
def test_a_causal_model_reads_any_length_as_one_row(name):
    """`make test` takes the presets; that rows may be cut anywhere is a law of decoding, for every model."""
    model = random_model(with_end(CONFIGS[name]))
    assert carries_state(model.config) == (model.config.max_len is None)
    lengths = [n for n in LENGTHS if carries_state(model.config) or n <= CONTEXT]
    found = list(read_means(model, documents(lengths), Reading(batch_rows=3)))
    for ids, mean_D in zip(documents(lengths), found, strict=True):
        with torch.no_grad():
            x_TD = model.hidden(row_of(ids))[0]
        assert close(mean_D, x_TD.mean(0).numpy()), (name, len(ids))


@pytest.mark.parametrize("config", [
    replace(CONFIGS["flash"], causal=False), BIDIRECTIONAL["flash cls"], CONFIGS["transformer"],
    replace(CONFIGS["flash"], document_mask="paper"), UNPACKED["flash learned weights"]],
    ids=["flash", "cls", "position table", "leaking mask", "learned weights"])
def test_other_models_read_windows_that_count_by_their_tokens(config):
    model = random_model(with_end(config))
    assert not carries_state(model.config)
    for ids, mean_D in zip(documents(), read_means(model, documents(), Reading(batch_rows=3)), strict=True):
        total_D = 0
        for first in range(0, len(ids), CONTEXT):
            with torch.no_grad():
                total_D = total_D + model.hidden(row_of(ids[first : first + CONTEXT]))[0].sum(0).numpy()
        assert close(mean_D, total_D / len(ids))


@pytest.mark.parametrize("causal", [True, False])
def test_batches_order_and_neighbours_change_nothing(causal):
    model = random_model(with_end(replace(CONFIGS["flash"], causal=causal)))
    alone = [next(read_means(model, [ids])) for ids in documents()]
    many = list(read_means(model, documents()[::-1] * 5, Reading(batch_rows=2)))[::-1]
    assert all(close(a_D, b_D) for a_D, b_D in zip(alone * 5, many, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_sums_of_a_float32_model_are_float64(causal):
    """In every window and over windows: float32 would lose each 1 that is added to 1e9."""
    class Loud(LanguageModel):
        def hidden(self, ids_BT, *_, **__):
            return torch.where(ids_BT[..., None] == 0, 1e9, 1.0).expand(*ids_BT.shape, self.config.d_model)

        extend = hidden

    (mean_D,) = read_means(Loud(replace(CONFIGS["flash"], causal=causal)).eval(), [np.array([0, *[1] * 99])])
    assert (mean_D == (1e9 + 99) / 100).all()


def test_memory_does_not_grow_with_a_document():
    """The model never sees more than a window, and its state keeps its size."""
    class Watched(LanguageModel):
        def extend(self, ids_BN, n_new_B, state, **more):
            widths.append(ids_BN.shape[1])
            sizes.append(state.n_bytes)
            return super().extend(ids_BN, n_new_B, state, **more)

    widths, sizes = [], []
    assert len(list(read_means(Watched(with_end(CONFIGS["flash"])).eval(), [np.ones(700)]))) == 1
    assert sum(widths) == 700 and set(widths) == {24, 700 % 24} and len(set(sizes)) == 1


def test_the_ids_of_a_document():
    """A pair is one document. A long text is cut where tokens end, and no more of it is tokenised than is kept."""
    masked, plain = byte_tokenizer(mlm=True), byte_tokenizer()
    assert document_ids(masked, "ab", "c")[0].tolist() == [256, 97, 98, 258, 99]
    assert document_ids(plain, "ab", "c")[0].tolist() == [256, 97, 98, 10, 10, 99]
    text = "a word " * 30_000
    for most in (None, len(text) + 1, len(text), 70_000, 1):
        ids_N, is_cut = document_ids(plain, text, max_tokens=most)
        assert bytes([*ids_N[1:]]) == text.encode()[: len(ids_N) - 1]
        assert (len(ids_N), is_cut) == (min(len(text) + 1, most or 10**9), most is not None and most <= len(text))


def test_embed_is_the_mean_of_the_last_states():
    model = random_model(replace(CONFIGS["flash"], vocab_size=257, end_of_document=256))
    texts = ["once", "upon a time there was a row of more than a window", ("a", "pair")]
    vectors_ND = lineartime.embed(model, byte_tokenizer(), texts)
    assert vectors_ND.shape == (3, 8) and vectors_ND.dtype == np.float64
    for text, vector_D in zip([*texts[:2], "a\n\npair"], vectors_ND, strict=True):
        with torch.no_grad():
            assert close(vector_D, model.hidden(torch.tensor([[256, *text.encode()]]))[0].mean(0).numpy())
    assert lineartime.embed(model, byte_tokenizer(), []).shape == (0, 8)
    seen = []
    cut_ND = lineartime.embed(model, byte_tokenizer(), texts, max_tokens=30, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 5 + 30 + 8
    assert close(cut_ND[1], lineartime.embed(model, byte_tokenizer(), [texts[1][:29]])[0])
    with pytest.raises(DataError, match="an empty document: text 2"):
        lineartime.embed(model, byte_tokenizer(), ["a", " \n"])
    for name, wrong in (("batch_rows", 0), ("max_tokens", 1.5)):
        with pytest.raises(UsageError, match=name):
            lineartime.embed(model, byte_tokenizer(), ["a"], **{name: wrong})


def test_autocast_rounds_neither_means_nor_logits_nor_cosines(monkeypatch):
    """One token of 1,000 that is 0.1 away moves the mean by 1e-4, and its label's logit: bfloat16 would lose both."""
    x_BTD = torch.ones(2, 1000, CONFIGS["flash"].d_model)
    x_BTD[1, 0] += 0.1
    model = DocumentClassifier(CONFIGS["flash"], Head(ONE, ("a", "b")))
    monkeypatch.setattr(model, "hidden", lambda ids_BT, **_: x_BTD.bfloat16())
    same_B2 = torch.arange(4).view(2, 2)

    def all_three():
        mean_BD = document_means(x_BTD, torch.zeros(2, 1000, dtype=torch.long))[:, 0]
        return mean_BD, model.label_logits(row_means(model, torch.zeros(2, 1000, dtype=torch.long))), \
            contrastive_losses(mean_BD * torch.randn(mean_BD.shape, generator=torch.Generator().manual_seed(0)),
                               mean_BD, same_B2)

    with torch.autocast("cpu", torch.bfloat16):
        rounded = all_three()
    for a, b in zip(rounded, all_three(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
    mean_BD, logits_BL, _ = rounded
    assert abs((mean_BD[1] - mean_BD[0]) - 1e-4).max() < 1e-6 and (logits_BL[0] != logits_BL[1]).all()
    mean_BND = document_means(x_BTD.to("meta"), torch.zeros(2, 1000, dtype=torch.long, device="meta"), n=1)
    assert model.to("meta").label_logits(mean_BND[:, 0]).is_meta  # which has no autocast to turn off
