"""Laws of pooling: a document's vector is that of one long row, whatever the windows, the batch and the padding."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import lineartime
from lineartime.config_json import Head
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.documents.classify import ONE
from lineartime.documents.pooling import (
    Reading,
    carries_state,
    document_ids,
    document_means,
    read_means,
    row_means,
    token_pieces,
)
from lineartime.documents.vectors import contrastive_losses
from lineartime.errors import DataError, UsageError
from lineartime.model import DocumentClassifier, LanguageModel
from tiny_models import BIDIRECTIONAL, CONFIGS, CONTEXT, UNPACKED, case_of, random_model, with_end

LENGTHS = (1, 61, 24, 3, 25, 23, 48, 2)


def documents(lengths=LENGTHS):
    """Ids as `document_ids` gives them: the end-of-document token, then pieces of odd sizes."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for n in lengths:
        ids = torch.randint(1, 13, (n - 1,), generator=generator).tolist()
        made.append([[0], ids[:5], [], ids[5:17], ids[17:]])
    return made


def flat(pieces):
    return [i for piece in pieces for i in piece]


def close(a, b):
    return np.abs(a - b).max() <= 1e-12 * max(1, np.abs(b).max())


@pytest.mark.parametrize("name", [case_of(name, rest=" " in name) for name in CONFIGS])
def test_a_causal_model_reads_any_length_as_one_row(name):
    """`make test` takes the presets; that rows may be cut anywhere is a law of decoding, for every model."""
    model = random_model(with_end(CONFIGS[name]))
    assert carries_state(model.config) == (model.config.max_len is None)
    lengths = [n for n in LENGTHS if carries_state(model.config) or n <= CONTEXT]
    found = list(read_means(model, documents(lengths), Reading(batch_rows=3)))
    assert [mean.n_tokens for mean in found] == lengths and not any(mean.is_cut for mean in found)
    for pieces, mean in zip(documents(lengths), found, strict=True):
        with torch.no_grad():
            x_TD = model.hidden(torch.tensor([flat(pieces)]))[0]
        assert close(mean.vector_D, x_TD.mean(0).numpy()), (name, mean.n_tokens)


@pytest.mark.parametrize("config", [
    replace(CONFIGS["flash"], causal=False), BIDIRECTIONAL["flash cls"], CONFIGS["transformer"],
    replace(CONFIGS["flash"], document_mask="paper"), UNPACKED["flash learned weights"]],
    ids=["flash", "cls", "position table", "leaking mask", "learned weights"])
def test_other_models_read_windows_that_count_by_their_tokens(config):
    model = random_model(with_end(config))
    assert not carries_state(model.config)
    for pieces, mean in zip(documents(), read_means(model, documents(), Reading(batch_rows=3)), strict=True):
        ids, total_D = flat(pieces), 0
        for first in range(0, len(ids), CONTEXT):
            with torch.no_grad():
                total_D = total_D + model.hidden(torch.tensor([ids[first : first + CONTEXT]]))[0].sum(0).numpy()
        assert mean.n_tokens == len(ids) and close(mean.vector_D, total_D / len(ids))


@pytest.mark.parametrize("causal", [True, False])
def test_batches_order_and_neighbours_change_nothing(causal):
    model = random_model(with_end(replace(CONFIGS["flash"], causal=causal)))
    alone = [next(read_means(model, [pieces])) for pieces in documents()]
    many = list(read_means(model, documents()[::-1] * 5, Reading(batch_rows=2)))[::-1]
    assert all(close(a.vector_D, b.vector_D) for a, b in zip(alone * 5, many, strict=True))


@pytest.mark.parametrize("piece", [1, 3, 20])
def test_windows_hold_every_token_once_up_to_the_most(piece):
    """Of documents in pieces that are shorter than a window, and longer."""
    for n, most in itertools.product((1, 7, 8, 9, 16, 17), (None, 1, 8, 9, 16)):
        pieces = [[*range(first, min(first + piece, n))] for first in range(0, n, piece)]
        windows, n_read = list(token_pieces(iter([[], *pieces]), 8, most)), min(n, most or n)
        assert [i for window in windows for i in window.ids] == [*range(n_read)]
        assert [window.is_last for window in windows] == [*[False] * (len(windows) - 1), True]
        assert all(len(window.ids) == 8 for window in windows[:-1]) and windows[-1].ids
        assert [window.is_cut for window in windows] == [*[False] * (len(windows) - 1), n > n_read]


@pytest.mark.parametrize("causal", [True, False])
def test_sums_of_a_float32_model_are_float64(causal):
    """In every window and over windows: float32 would lose each 1 that is added to 1e9."""
    class Loud(LanguageModel):
        def hidden(self, ids_BT, *_, **__):
            return torch.where(ids_BT[..., None] == 0, 1e9, 1.0).expand(*ids_BT.shape, self.config.d_model)

        extend = hidden

    (mean,) = read_means(Loud(replace(CONFIGS["flash"], causal=causal)).eval(), [[[0], [1] * 99]])
    assert mean.n_tokens == 100 and (mean.vector_D == (1e9 + 99) / 100).all()


def test_memory_does_not_grow_with_a_document():
    """The model never sees more than a window, and the tokens are taken as they are read."""
    class Watched(LanguageModel):
        def extend(self, ids_BN, n_new_B, state, **more):
            widths.append(ids_BN.shape[1])
            sizes.append(state.n_bytes)
            taken.append(len(given))
            return super().extend(ids_BN, n_new_B, state, **more)

    widths, sizes, taken, given = [], [], [], []

    def pieces():
        for number in range(100):
            given.append(number)
            yield [1] * 7

    (mean,) = read_means(Watched(with_end(CONFIGS["flash"])).eval(), [pieces()])
    assert mean.n_tokens == 700 and set(widths) == {24, 700 % 24} and len(set(sizes)) == 1
    assert all(7 * n_read <= 24 * (number + 1) + 7 for number, n_read in enumerate(taken))


def test_a_pair_is_one_document():
    masked, plain = byte_tokenizer(mlm=True), byte_tokenizer()
    assert flat(document_ids(masked, ["ab"], "c")) == [256, 97, 98, 258, 99]
    assert flat(document_ids(plain, ["ab"], "c")) == [256, 97, 98, 10, 10, 99]


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
    with pytest.raises(UsageError, match="batch_rows"):
        lineartime.embed(model, byte_tokenizer(), ["a"], batch_rows=0)


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
