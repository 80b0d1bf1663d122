"""Prepared tokens read back: every target once, rows from seed and step alone, and damage never."""

import json
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.base.errors import DataError
from lineartime.base.files import json_sha256
from lineartime.data import tokens
from lineartime.data.prepare import prepare
from lineartime.data.tokens import batch_rows, eval_rows, open_split
from text_files import make, stream_of

EOD = 256


@pytest.fixture
def prepared(tmp_path):
    """Ten documents as bytes in shards of 37 tokens."""
    make(tmp_path, {"a.jsonl": [f"document {i}" * (i % 3 + 1) for i in range(10)]})
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", shard_tokens=37, held_out=0.2)
    return tmp_path / "out"


def test_words_and_bytes_of_the_first_tokens(tmp_path):
    """Here a byte is a token, and a cut character does not count. Rows add up to the whole."""
    make(tmp_path, {"a.jsonl": ["One book,\n naïve.\n", "Another\u3000東京\xa0book", "Short"]})
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes")
    stream = open_split(tmp_path / "out", "train")
    for n in range(1, stream.n_tokens + 1):
        first = bytes(0 if i == EOD else i for i in stream.read(1, n + 1).tolist()).decode(errors="ignore")
        expected = len(first.replace("\0", " ").split()), len(first.replace("\0", "").encode())
        assert tokens.words_and_bytes(stream, n, (0,)) == expected, n
        whole = tokens.words_and_bytes(stream, n, tuple(range(0, stream.n_tokens, n)))
        assert whole == (stream.n_words, stream.n_bytes), n


def test_every_target_is_read_once_in_an_epoch(prepared):
    """Rows cross the ends of shards, in evaluation in the order of the text."""
    stream, whole = open_split(prepared, "train"), stream_of(prepared)
    assert len(list(prepared.glob("train-0*.bin"))) > 3
    for context in (1, 7, 36, 37, 38, len(stream) - 1):
        n_rows = (len(stream) - 1) // context
        for epoch in (0, 1):
            rows = batch_rows(stream, seed=3, step=epoch, rows_per_step=n_rows, context=context)
            assert rows.shape == (n_rows, context + 1) and rows.dtype == np.int64
            expected = [whole[r * context:(r + 1) * context + 1] for r in range(n_rows)]
            assert sorted(rows.tolist()) == sorted(expected)
    for context in (1, 7, 36, 37, 38, len(stream) - 1, len(stream), 10 * len(stream)):
        rows = list(eval_rows(stream, context))
        assert [i for row in rows for i in row[1:].tolist()] == whole[1:]
        assert [row[0] for row in rows] == whole[:-1:context]
        assert all(len(row) == context + 1 for row in rows[:-1])


@given(seed=st.integers(0, 2**70), steps=st.lists(st.integers(0, 20), min_size=1, max_size=8), rows=st.integers(1, 50))
@settings(max_examples=50)
def test_rows_are_a_pure_function_of_seed_and_step(pure_stream, seed, steps, rows):
    """Whatever was read before, from however many rows at once: row n of all is the same."""
    tokens.orders.cache_clear()
    in_order = [row for n in range(max(steps) * rows + rows) if n >= min(steps) * rows
                for row in batch_rows(pure_stream, seed=seed, step=n, rows_per_step=1, context=9).tolist()]
    tokens.orders.cache_clear()
    for step in steps:
        got = batch_rows(pure_stream, seed=seed, step=step, rows_per_step=rows, context=9).tolist()
        first = (step - min(steps)) * rows
        assert got == in_order[first:first + rows]


@pytest.fixture(scope="module")
def pure_stream(tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("pure"), {"a.txt": "".join(f"{i:04d} " for i in range(40))})
    prepare([folder / "a.txt"], folder / "out", tokenizer="bytes")
    return open_split(folder / "out", "train")


def test_the_order_stays_what_it_was():
    """Written down once: a change would give a resumed run other batches."""
    assert tokens.orders(0, 10)(0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert tokens.orders(1, 10)(2).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


def test_a_stream_shorter_than_a_row_names_the_context_that_works(pure_stream):
    with pytest.raises(DataError, match=r"too few tokens for a row of 202: .*; the largest context that works is 201"):
        batch_rows(pure_stream, seed=0, step=0, rows_per_step=1, context=202)
    assert batch_rows(pure_stream, seed=0, step=5, rows_per_step=1, context=201).shape == (1, 202)


def test_what_is_missing_or_of_a_newer_format_is_refused(prepared):
    with pytest.raises(DataError, match=r"no test split: .*; it has train, validation"):
        open_split(prepared, "test")
    path = prepared / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2, "unheard_of": 1}))
    with pytest.raises(DataError, match=r"prepared by a newer lineartime: .*; it has format 2, this reads 1"):
        open_split(prepared, "train")
    path.unlink()
    with pytest.raises(DataError, match="no manifest of prepared text"):
        open_split(prepared, "train")


def test_a_forged_manifest_is_refused(prepared, monkeypatch):
    """Signed anew, without a field or with another kind of value, or with an odd size of a file;
    and one of 100 GiB."""
    path = prepared / "manifest.json"
    whole = {name: value for name, value in json.loads(path.read_text()).items() if name != "manifest_sha256"}
    tokenizer, files = whole["tokenizer"], whole["files"]
    forged = [{name: whole[name] for name in whole if name != lost} for lost in ("tokenizer", "files", "dtype")]
    forged += [whole | {name: value} for name in whole for value in (None, 7, "x", [1], {"x": 1}) if name not in (
        "version", "notes", "sources", "blank_documents") and (name, value) != ("settings", {"x": 1})]
    forged += [whole | {"tokenizer": tokenizer | {name: "x"}} for name in tokenizer if name != "sha256"]
    forged += [whole | {"files": files | {name: files[name] | {"bytes": 7}}} for name in files if name.endswith(".bin")]
    for content in forged:
        path.write_text(json.dumps(content | {"manifest_sha256": json_sha256(content)}))
        with pytest.raises(DataError, match=r"damaged manifest: .*manifest\.json"):
            open_split(prepared, "train")
    os.truncate(path, 100 << 30)
    monkeypatch.setattr(tokens, "read_all", None)  # it is not read
    with pytest.raises(DataError, match=r"damaged manifest: .*manifest\.json"):
        open_split(prepared, "train")


def damage(rng, folder):
    """Damage a file in one of five ways: its name, and whether it changed."""
    path, other = rng.sample(sorted(folder.iterdir()), 2)
    old = path.read_bytes()
    at = rng.randrange(len(old))
    new = rng.choice([old[:at] + bytes([old[at] ^ 1 << rng.randrange(8)]) + old[at + 1:], old[:at], old + b"x",
                      other.read_bytes(), None])
    path.unlink()
    if new is not None:
        path.write_bytes(new)
    return path.name, new != old


def test_damage_is_never_read(prepared):
    rng = random.Random(0)
    whole = {split: stream_of(prepared, split) for split in ("train", "validation")}
    intact = {path.name: path.read_bytes() for path in prepared.iterdir()}
    for _ in range(150):
        name, changed = damage(rng, prepared)
        for split in ("train", "validation"):
            if changed and (name.startswith(split) or name in ("manifest.json", "tokenizer.json")):
                with pytest.raises(DataError) as caught:
                    open_split(prepared, split)
                assert str(prepared) in str(caught.value) and "\n" not in str(caught.value)
            else:
                assert stream_of(prepared, split) == whole[split], name
        (prepared / name).write_bytes(intact[name])


def test_large_data_are_compared_by_size_alone(prepared, monkeypatch):
    """And their ids, when they are read, with the size of the vocabulary."""
    shard, refused = prepared / "train-00001.bin", r"damaged or missing file: .*train-00001.bin"
    content = shard.read_bytes()
    monkeypatch.setattr(tokens, "HASHED_BYTES", 0)
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=refused):
        open_split(prepared, "train")
    shard.write_bytes(content[:-2] + b"\x01\x01")
    with pytest.raises(DataError, match=r"a token outside the vocabulary: .*train-00001.bin, token 36"):
        stream_of(prepared)
    with pytest.raises(DataError, match=refused):
        tokens.verify_data(prepared)
