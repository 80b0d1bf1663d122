"""Masks: the shares that are asked for, of which tokens, and that they depend on seed, epoch and row alone."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.base.errors import DataError
from lineartime.data.prepare import prepare
from lineartime.data.tokens import open_split
from lineartime.training.masking import NO_TARGET, mask_tokens, masked_batch, masked_rows
from tiny_runs import prepare_text


def a_stream(vocab_size=50, special=(0, 1, 2), mask=1):
    """What `mask_tokens` reads of a stream."""
    ordinary = np.setdiff1d(np.arange(vocab_size), special)
    return SimpleNamespace(mask=mask, special=list(special), ordinary=ordinary)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return open_split(prepare_text(tmp_path_factory.mktemp("data"), mlm=True), "train")


def assert_binomial(count, n, p):
    """Within five standard deviations: once in two million runs by chance, and the masks are always the same."""
    assert abs(count - n * p) < 5 * math.sqrt(n * p * (1 - p)), f"{count} of {n}, {n * p:.0f} expected"


def test_shares():
    n = 400_000
    stream = a_stream()
    ids = np.random.default_rng(0).integers(3, 50, n)
    inputs, targets = mask_tokens(ids, stream, seed=0, epoch=0, row=0)
    asked = targets != NO_TARGET
    assert (targets[asked] == ids[asked]).all() and (inputs[~asked] == ids[~asked]).all()
    n_asked = int(asked.sum())
    masked = inputs[asked] == stream.mask
    other = ~masked & (inputs[asked] != ids[asked])
    assert_binomial(n_asked, n, 0.15)
    assert_binomial(masked.sum(), n_asked, 0.8)
    assert_binomial(other.sum(), n_asked, 0.1 * 46 / 47)  # one replacement in 47 is the token itself
    assert_binomial((~masked & ~other).sum(), n_asked, 0.1 + 0.1 / 47)
    for token in stream.ordinary:
        assert_binomial((inputs[asked][other] == token).sum(), int(other.sum()), 1 / 47)


@settings(max_examples=60)
@given(special=st.sets(st.integers(0, 29), min_size=1, max_size=20), length=st.integers(0, 200),
       seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 10**6), row=st.integers(0, 10**12))
def test_special_tokens_are_neither_chosen_nor_put_in(special, length, seed, epoch, row):
    stream = a_stream(30, sorted(special), mask=min(special))
    ids = np.random.default_rng(length).integers(0, 30, length)
    before = ids.copy()
    inputs, targets = mask_tokens(ids, stream, seed=seed, epoch=epoch, row=row)
    assert inputs.dtype == targets.dtype == np.int64 and inputs.shape == targets.shape == ids.shape
    is_special = np.isin(ids, stream.special)
    assert (targets[is_special] == NO_TARGET).all() and (inputs[is_special] == ids[is_special]).all()
    assert ((inputs[~is_special] == stream.mask) | ~np.isin(inputs[~is_special], stream.special)).all()
    assert (ids == before).all()


def test_masks_are_a_function_of_seed_epoch_and_row(stream):
    ids = stream.read(0, 200)
    places = [(seed, epoch, row) for seed in (0, 1) for epoch in (0, 1) for row in (0, 1, 2**40)]
    first = {place: mask_tokens(ids, stream, seed=place[0], epoch=place[1], row=place[2]) for place in places}
    for seed, epoch, row in reversed(places):
        again = mask_tokens(ids, stream, seed=seed, epoch=epoch, row=row)
        assert np.array_equal(again, first[seed, epoch, row])
        shorter = mask_tokens(ids[:70], stream, seed=seed, epoch=epoch, row=row)
        assert np.array_equal(shorter, np.array(first[seed, epoch, row])[:, :70])
    assert len({targets.tobytes() for _, targets in first.values()}) == len(places)


def test_masks_are_those_on_record():
    """So that a run resumed under another version of numpy goes on with the same masks."""
    inputs, targets = mask_tokens(np.tile(np.arange(3, 50), 3), a_stream(), seed=1, epoch=2, row=3)
    asked = np.flatnonzero(targets != NO_TARGET)
    assert asked.tolist() == [2, 3, 12, 23, 49, 69, 86, 100, 101, 109, 114, 117, 132, 135, 139, 140]
    assert targets[asked].tolist() == [5, 6, 15, 26, 5, 25, 42, 9, 10, 18, 23, 26, 41, 44, 48, 49]
    assert inputs[asked].tolist() == [1, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 1, 1, 48, 19]


def test_a_step_is_rows_of_the_stream_under_their_masks(stream):
    context, per_step = 37, 4
    n_rows, seen = len(stream) // context, []
    for step in range(2 * n_rows // per_step + 1):
        batch = masked_batch(stream, seed=5, step=step, rows_per_step=per_step, context=context)
        for i, (inputs, targets) in enumerate(zip(*batch, strict=True)):
            original = np.where(targets == NO_TARGET, inputs, targets)
            row = next(row for row in range(n_rows)
                       if np.array_equal(stream.read(row * context, (row + 1) * context), original))
            epoch = (step * per_step + i) // n_rows
            expected = mask_tokens(original, stream, seed=5, epoch=epoch, row=row)
            assert np.array_equal(inputs, expected[0]) and np.array_equal(targets, expected[1])
            seen.append(row)
    assert sorted(seen[:n_rows]) == sorted(seen[n_rows : 2 * n_rows]) == list(range(n_rows))
    assert seen[:n_rows] != seen[n_rows : 2 * n_rows]


def test_held_out_rows_are_the_stream_and_their_masks_are_fixed(stream):
    context = 61
    rows = list(masked_rows(stream, context))
    original = [np.where(targets == NO_TARGET, inputs, targets) for inputs, targets in rows]
    assert np.array_equal(np.concatenate(original), stream.read(0, len(stream)))
    assert [len(row) for row in original] == [context] * (len(stream) // context) + [len(stream) % context]
    assert 0 < len(stream) % context
    for number, (masked, ids) in enumerate(zip(rows, original, strict=True)):
        assert np.array_equal(masked, mask_tokens(ids, stream, seed=0, epoch=0, row=number))


def test_a_stream_that_fills_exactly_one_row(stream):
    inputs, _ = masked_batch(stream, seed=0, step=0, rows_per_step=2, context=len(stream))
    assert inputs.shape == (2, len(stream))
    with pytest.raises(DataError, match=f"the largest context that works is {len(stream):,}"):
        masked_batch(stream, seed=0, step=0, rows_per_step=1, context=len(stream) + 1)


@pytest.mark.parametrize("how, special", [({"tokenizer": "bytes"}, [256, 257, 258]), ({"vocab_size": 300}, [0, 1, 2])])
def test_mask_and_separator_in_a_document_are_text(how, special, tmp_path):
    """And the manifest says which ids are special."""
    text = "Reader, I [MASK] him.[SEP] <|endoftext|>[MASK]\n" * 40
    (tmp_path / "a.txt").write_text(text)
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "data", mlm=True, **how)
    assert [manifest.tokenizer[name] for name in ("end_of_document", "mask", "separator")] == special
    stream = open_split(tmp_path / "data", "train")
    assert (stream.mask, stream.special) == (special[1], special)
    assert sorted([*stream.ordinary, *special]) == list(range(stream.vocab_size))
    ids = stream.read(0, len(stream))
    assert np.isin(ids, special).sum() == 2 and ids[0] == ids[-1] == special[0]


@pytest.mark.parametrize("token", ["[MASK]", "[SEP]"])
def test_a_tokenizer_that_reads_a_mask_out_of_text_is_refused(token, tmp_path):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, token: 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(f"a {token} a")
    with pytest.raises(DataError, match=r"reads \[MASK\] or \[SEP\] out of text"):
        prepare([tmp_path / "a.txt"], tmp_path / "data", tokenizer=tmp_path / "tokenizer.json", mlm=True)
    assert not (tmp_path / "data").exists()
