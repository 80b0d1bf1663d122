"""Prepared tokens: whole or not there, what the text says; and rows from seed and step alone."""

import errno
import gzip
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lineartime.atomic_io
import lineartime.data.prepare
import lineartime.data.units
from lineartime.data import tokens
from lineartime.data.prepare import SAMPLE, prepare
from lineartime.data.read_text import READS
from lineartime.data.slices import CheckedFile, spread_documents
from lineartime.data.tokenizer import load_tokenizer, train_tokenizer
from lineartime.data.tokens import Split, batch_rows, eval_rows, open_split, read_manifest
from lineartime.errors import DataError, ResourceError, UsageError
from text_files import make

EOD = 256
BOOKS = {"train/a.txt": "One book,\n naïve.\n", "train/b.txt": "Another <|endoftext|> book", "train/c.txt": " \n",
         "validation/d.txt": "held out", "test/e.txt": "東京"}


def stream_of(data, split="train", **options):
    stream = open_split(data, split, **options)
    return stream.read(0, len(stream)).tolist()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_nothing_at(out):
    assert not out.exists() and not any(path.name.startswith(f".{out.name}") for path in out.parent.iterdir())


@pytest.fixture
def prepared(tmp_path):
    """Ten documents as bytes in shards of 37 tokens."""
    make(tmp_path, {"a.jsonl": [f"document {i}" * (i % 3 + 1) for i in range(10)]})
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", shard_tokens=37, held_out=0.2)
    return tmp_path / "out"


def test_streams_and_counts_are_those_of_the_text(tmp_path):
    make(tmp_path / "books", BOOKS)
    manifest = prepare([tmp_path / "books"], tmp_path / "out", tokenizer="bytes")
    a, b, d, e = (BOOKS[name].encode() for name in ("train/a.txt", "train/b.txt", "validation/d.txt", "test/e.txt"))
    assert stream_of(tmp_path / "out") == [EOD, *a, EOD, *b, EOD]
    assert stream_of(tmp_path / "out", "validation") == [EOD, *d, EOD]
    assert stream_of(tmp_path / "out", "test") == [EOD, *e, EOD]
    assert manifest.splits["train"] == Split(documents=2, tokens=len(a) + len(b) + 2, words=6, bytes=len(a) + len(b))
    assert manifest.splits["test"] == Split(documents=1, tokens=7, words=1, bytes=6)
    assert manifest.notes == ["1 documents are white space only and were left out"]
    assert (manifest.vocab_size, manifest.end_of_document, manifest.dtype) == (257, 256, "<u2")
    assert manifest.tokenizer["sha256"] == load_tokenizer(tmp_path / "out" / "tokenizer.json").sha256
    assert [(s["split"], s["name"], s["bytes"]) for s in manifest.sources][:2] == [
        ("train", "train/a.txt", len(a)), ("train", "train/b.txt", len(b))]
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    assert read_manifest(tmp_path / "out") == manifest
    stream = open_split(tmp_path / "out", "train")
    assert (stream.n_tokens, stream.n_documents) == (len(a) + len(b) + 2, 2)
    assert (stream.n_words, stream.n_bytes) == (6, len(a) + len(b))
    first, second, last = stream.document_positions.tolist()
    assert bytes(stream.read(first + 1, second).tolist()) == a and bytes(stream.read(second + 1, last).tolist()) == b


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_words_and_bytes_of_the_first_tokens(tmp_path, monkeypatch, at_once):
    """Of any number of tokens: here a byte is a token, and a character may be cut."""
    monkeypatch.setattr(tokens, "COUNTED_AT_ONCE", at_once)
    texts = ["One book,\n naïve.\n", "Another\u3000東京\xa0book", "Short"]
    make(tmp_path, {"a.jsonl": texts})
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes")
    stream = open_split(tmp_path / "out", "train")
    for n in range(1, stream.n_tokens + 1):
        first = bytes(0 if i == EOD else i for i in stream.read(1, n + 1).tolist())  # no text has a 0
        words = first.decode(errors="ignore").replace("\0", " ").split()
        assert tokens.words_and_bytes(stream, n) == (len(words), len(first.replace(b"\0", b""))), n
    assert tokens.words_and_bytes(stream, stream.n_tokens) == (stream.n_words, stream.n_bytes)


def test_every_format_gives_the_same_tokens(tmp_path):
    texts = ["The first.\n", "   ", "The second " * 9, "The third, naïve and 東京."]
    make(tmp_path, {"a.jsonl": texts, "b.jsonl.gz": texts, "c.json.gz": texts, "d.parquet": texts,
                    **{f"books/{i}.txt": text for i, text in enumerate(texts)}})
    shards = set()
    for name in ("a.jsonl", "b.jsonl.gz", "c.json.gz", "d.parquet", "books"):
        out = tmp_path / "out" / name
        manifest = prepare([tmp_path / name], out, vocab_size=280)
        assert manifest.splits["train"].documents == 3 and manifest.blank_documents == 1
        shards.add((out / "train-00000.bin").read_bytes() + (out / "tokenizer.json").read_bytes())
    assert len(shards) == 1


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=60), min_size=1, max_size=6),
       shard_tokens=st.integers(1, 40), jobs=st.sampled_from([1, 2]))
@settings(max_examples=60)
def test_any_text_comes_back_from_its_shards(tmp_path_factory, texts, shard_tokens, jobs):
    folder = make(tmp_path_factory.mktemp("any"), {"a.jsonl": texts})
    kept = [text for text in texts if text and not text.isspace()]
    if not kept:
        with pytest.raises(DataError, match="nothing but white space"):
            prepare([folder / "a.jsonl"], folder / "out", tokenizer="bytes")
        assert_nothing_at(folder / "out")
        return
    manifest = prepare([folder / "a.jsonl"], folder / "out", vocab_size=270, shard_tokens=shard_tokens, jobs=jobs)
    counts = manifest.splits["train"]
    stream, tokenizer = open_split(folder / "out", "train"), load_tokenizer(folder / "out" / "tokenizer.json")
    at = stream.document_positions.tolist()
    assert [tokenizer.decode(stream.read(a + 1, b).tolist()) for a, b in itertools.pairwise(at)] == kept
    assert at[0] == 0 and at[-1] == len(stream) - 1
    assert (stream.read(0, len(stream)) == stream.end_of_document).sum() == len(kept) + 1
    assert counts.bytes == sum(len(text.encode()) for text in kept)
    assert counts.words == sum(len(text.split()) for text in kept)
    assert counts.tokens == len(kept) + sum(len(tokenizer.encode(text)) for text in kept)


def test_a_long_document_is_counted_and_tokenised_as_a_whole(tmp_path, monkeypatch):
    text = SAMPLE.read_text(encoding="utf-8")[:60_000]
    make(tmp_path, {"a.txt": text, "b.txt": "x" * 9000})
    tokenizer = train_tokenizer([text[:20_000]], 500)
    (tmp_path / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    whole = prepare(inputs, tmp_path / "whole", tokenizer=tmp_path / "tokenizer.json")
    monkeypatch.setattr("lineartime.data.read_text.cut.__defaults__", (1000,))
    pieces = prepare(inputs, tmp_path / "pieces", tokenizer=tmp_path / "tokenizer.json")
    assert stream_of(tmp_path / "whole")[:10_000] == stream_of(tmp_path / "pieces")[:10_000]
    assert whole.splits["train"].words == pieces.splits["train"].words == len(text.split()) + 1


def test_the_result_does_not_depend_on_jobs(tmp_path):
    text = SAMPLE.read_text(encoding="utf-8")[:400_000]
    make(tmp_path, {"a.jsonl": [text[i:i + 3000] for i in range(0, len(text), 3000)], "b.jsonl": [text]})
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    results = []
    for jobs, unit_characters in ((1, 1 << 23), (1, 5_000), (2, 60_000), (3, 20_000)):
        prepare(inputs, tmp_path / f"{jobs}-{unit_characters}", vocab_size=1000, held_out=0.1, jobs=jobs,
                shard_tokens=70_000, unit_characters=unit_characters)
        results.append(contents(tmp_path / f"{jobs}-{unit_characters}"))
    assert results[0] == results[1] == results[2] == results[3]
    assert "train-00002.bin" in results[0]


def test_the_result_does_not_depend_on_what_one_process_takes_at_once(tmp_path, monkeypatch):
    """A book cut in many places, also inside a word and inside what is held out, and small files in one unit."""
    monkeypatch.setattr("lineartime.data.read_text.cut.__defaults__", (900,))
    text = "\ufeff" + SAMPLE.read_text(encoding="utf-8")[:20_000] + "é" * 6000 + " end"
    make(tmp_path, {"a.txt": text, "b.txt": " \n", "c.jsonl": ["", "second", " ", "third " * 900, ""],
                    "d.parquet": [f"row {i} " * (i % 7) for i in range(60)],
                    "e.json.gz": ["fifth " * 500, "", "sixth"]})
    for name, inputs in (("one", "a"), ("all", "abcde")):
        paths = [path for letter in inputs for path in tmp_path.glob(f"{letter}.*")]
        made = []
        for unit_characters in (1 << 23, 3_000, 700):
            out = tmp_path / f"{name}-{unit_characters}"
            manifest = prepare(paths, out, tokenizer="bytes", held_out=0.3, jobs=1, unit_characters=unit_characters)
            made.append(contents(out))
        assert made[0] == made[1] == made[2]
        rows = [f"row {i} " * (i % 7) for i in range(60) if i % 7]
        documents = [text[1:], "second", "third " * 900, *rows, "fifth " * 500, "sixth"]
        stream = [stream_of(out, split)[1:] for split in ("train", "validation")]
        if name == "one":  # it is cut inside
            assert bytes(stream[0][:-1] + stream[1][:-1]).decode() == documents[0]
            continue
        n, k = len(documents), manifest.splits["validation"].documents
        held = {(2 * j + 1) * n // (2 * k) for j in range(k)}
        for ids, kept in zip(stream, (set(range(n)) - held, held), strict=True):
            assert bytes(i % EOD for i in ids).decode() == "".join(documents[i] + "\0" for i in sorted(kept))
        assert sum(split.words for split in manifest.splits.values()) == sum(len(one.split()) for one in documents)
        assert sum(split.documents for split in manifest.splits.values()) == len(documents)


def test_an_error_of_a_process_is_that_of_one_process(tmp_path):
    make(tmp_path, {"a.txt": "good " * 3000, "b.jsonl": '{"text": "good"}\n{"text": 1}\n',
                    "c.txt": b"bad \xff" * 1000})
    for jobs in (1, 2):
        with pytest.raises(DataError, match=r"field 'text' is not a string: .*b\.jsonl:2"):
            prepare([tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt")], tmp_path / "out", tokenizer="bytes",
                    jobs=jobs, unit_characters=1000)
        assert not list(tmp_path.glob(".lineartime-*"))


def test_a_process_that_dies_is_a_resource_error(tmp_path, monkeypatch):
    make(tmp_path, {"a.jsonl": ["text " * 400] * 9})

    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "false")
        with pytest.raises(ResourceError, match=r"a process that tokenises has died: exit code 1; .* goes on"):
            prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", jobs=2, unit_characters=1000)
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", jobs=1, unit_characters=1000)
    assert open_split(tmp_path / "out", "train").n_tokens == 9 * 2001


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    make(tmp_path, {"a.txt": "a b b\na"})
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert (manifest.dtype, manifest.vocab_size) == ("<u4", 70_001)
    assert stream_of(tmp_path / "out") == [2, 0, 70_000, 70_000, 0, 2]
    assert manifest.notes == ["this tokenizer does not keep the text exactly: scores per byte leave out what it drops"]


def test_a_tokenizer_that_reads_the_end_out_of_text_is_refused(tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="<|endoftext|>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    make(tmp_path, {"a.txt": "a b"})
    with pytest.raises(DataError, match="reads its end-of-document token out of text"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert_nothing_at(tmp_path / "out")


def test_too_little_text_for_the_vocabulary_is_noted(tmp_path):
    make(tmp_path, {"a.txt": "again and again " * 9})
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert manifest.notes == [f"the text gave a vocabulary of {manifest.vocab_size} of the 32,000 asked for"]


def test_the_tokenizer_sees_the_train_split_only(tmp_path):
    make(tmp_path, {"train.txt": "one two " * 50, "validation.txt": "zebra " * 500})
    prepare([tmp_path / "train.txt", tmp_path / "validation.txt"], tmp_path / "out", vocab_size=400)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert len(tokenizer.encode(" two")) == 1 and len(tokenizer.encode(" zebra")) == 6


def test_the_tokenizer_is_trained_on_a_spread_of_a_large_text(tmp_path):
    make(tmp_path, {"a.jsonl": [f"{word} " * 100 for word in ("first", "other", "other", "fourth", "last")]})
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", vocab_size=400, train_characters=1100)  # every third
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    learnt = [word for word in ("first", "other", "fourth", "last") if len(tokenizer.encode(f" {word}")) == 1]
    assert learnt == ["first", "fourth"]


@pytest.mark.parametrize("n, held_out, held", [
    (10, 0.1, [5]), (10, 0.25, [1, 5, 8]), (3, 0.01, [1]), (2, 0.6, [1]), (90, 0.1, range(5, 90, 10)),
    (9, 0.99, [0, 1, 2, 3, 5, 6, 7, 8])])
def test_documents_at_equal_distances_are_held_out(tmp_path, n, held_out, held, caplog):
    caplog.set_level("INFO", "lineartime")
    texts = [f"document {i:02d}" for i in range(n)]
    third = n // 3
    rest = [" ", *texts[third + 1:]]
    make(tmp_path, {"a.jsonl": texts[:third], "b.txt": texts[third], "c.jsonl": rest, "d.txt": "t"})
    inputs = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl")][n < 3:]
    prepare(inputs, tmp_path / "out", tokenizer="bytes", held_out=held_out, test=[tmp_path / "d.txt"])
    joined = {split: bytes(i % EOD for i in stream_of(tmp_path / "out", split)[1:-1]).decode().split("\0")
              for split in ("train", "validation", "test")}
    assert joined == {"train": [text for i, text in enumerate(texts) if i not in held],
                      "validation": [texts[i] for i in held], "test": ["t"]}
    share = f"{len(held)} of {n} documents, at equal distances: {len(held) / n:.1%} of the tokens"
    assert caplog.messages == [f"held out    {share}"]


@settings(max_examples=200)
@given(files=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 1000)), min_size=1, max_size=6),
       share=st.floats(0.001, 0.999))
def test_at_least_the_share_is_held_out_and_not_all(files, share):
    """By the mean of each file; a document more than that, or two, at most where the documents are alike."""
    checked = [CheckedFile("", "train", n, 0, n * mean, []) for n, mean in files]
    n = sum(n for n, _ in files)
    if n < 2:
        return
    held = spread_documents(checked, share)
    assert held == sorted({*held}) and 0 <= held[0] and held[-1] < n and len(held) < n
    mean_D = np.repeat([mean for _, mean in files], [n for n, _ in files])
    assert len(held) == n - 1 or mean_D[held].sum() >= share * mean_D.sum() * (1 - 1e-9)
    gaps = np.diff([-1, *held, n])
    assert max(gaps[1:-1], default=1) - min(gaps[1:-1], default=1) <= 1
    if len({mean for _, mean in files}) == 1:
        assert len(held) <= max(1, round(n * share) + 1)


def test_a_large_file_among_small_ones_does_not_leave_too_little(tmp_path):
    """The middle document alone would be a hundredth of the text."""
    make(tmp_path, {f"{i}.txt": "x" * (1000 if i in (0, 6) else 10) for i in range(7)})
    manifest = prepare([tmp_path], tmp_path / "out", tokenizer="bytes", held_out=0.2)
    assert manifest.splits["validation"].tokens >= 0.2 * (2000 + 50)


def test_held_out_documents_may_lie_anywhere_in_a_file_of_ids(tmp_path, monkeypatch):
    """Also across two of the blocks that it is read in."""
    make(tmp_path, {"a.jsonl": [f"document {i} " * (i % 5 + 1) for i in range(40)]})
    for name, n_ids in (("large", 1 << 22), ("small", 10)):
        monkeypatch.setattr(lineartime.data.units, "BLOCK_IDS", n_ids)
        prepare([tmp_path / "a.jsonl"], tmp_path / name, tokenizer="bytes", held_out=0.3, jobs=1)
    assert contents(tmp_path / "large") == contents(tmp_path / "small")


def test_plain_text_is_read_in_any_form(tmp_path, caplog):
    """What is skipped is said; beside records, and about the folder, an .md or .txt.gz is skipped as ever."""
    caplog.set_level("INFO", "lineartime")
    make(tmp_path / "text", {"a.md": "# A\n", "b.txt": "b\n", "README.md": "about", "d.png": "x", "e": "y"})
    (tmp_path / "text" / "c.txt.gz").write_bytes(gzip.compress(("c" * 99 + "\n").encode() * 4000))
    for jobs, unit_characters in ((1, 1 << 23), (2, 1000)):
        manifest = prepare([tmp_path / "text"], tmp_path / f"out{jobs}", tokenizer="bytes", jobs=jobs,
                           unit_characters=unit_characters)
        assert [source["name"] for source in manifest.sources] == ["a.md", "b.txt", "c.txt.gz"]
        found = bytes(i % EOD for i in stream_of(tmp_path / f"out{jobs}")[1:-1]).split(b"\0")
        assert found == [b"# A\n", b"b\n", (b"c" * 99 + b"\n") * 4000]
    where = f"in {tmp_path / 'text'}"
    assert caplog.messages[:2] == [f"skipped     d.png, e {where}: {READS}",
                                   f"skipped     README.md {where}: they lie beside other text, or are about the "
                                   "folder"]
    caplog.clear()
    make(tmp_path / "records", {"a.jsonl": ["a"], "notes.md": "n"})
    manifest = prepare([tmp_path / "records"], tmp_path / "out3", tokenizer="bytes")
    assert [source["name"] for source in manifest.sources] == ["a.jsonl"] and "notes.md in" in caplog.text


def test_of_a_single_document_the_last_lines_are_held_out(tmp_path):
    lines = "".join(f"line {i:02d}\n" for i in range(50))  # 400 characters, 8 to a line
    for text, train in ((lines, lines[:360 + 8]), ("é" * 21, "é" * 19), ("a\nb" * 100, "a\nb" * 90 + "a\n"),
                        ("x" * 100 + "\n" * 10, "x" * 100 + "\n"), ("x" * 99 + "\n", "x" * 90)):
        make(tmp_path, {"a.txt": text})
        manifest = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes", held_out=0.1)
        both = [bytes(stream_of(tmp_path / "out", split)[1:-1]).decode() for split in ("train", "validation")]
        assert "".join(both) == text
        assert both[0] == train, text
        n_bytes = len(both[1].encode())
        assert manifest.splits["validation"] == Split(1, n_bytes + 1, len(both[1].split()), n_bytes)
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("text, held_out", [("x", 0.5), ("xy", 0.1), ("xy", 0.01)])
def test_too_little_text_to_hold_some_out(tmp_path, text, held_out):
    make(tmp_path, {"a.txt": text})
    with pytest.raises(DataError, match="too little text to hold some out"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes", held_out=held_out)
    assert_nothing_at(tmp_path / "out")


def test_the_sample_is_prepared_without_inputs(tmp_path):
    manifest = prepare([], tmp_path / "out", sample=True, tokenizer="bytes", held_out=0.1)
    train, held_out = stream_of(tmp_path / "out"), stream_of(tmp_path / "out", "validation")
    assert [split.documents for split in manifest.splits.values()] == [1, 1]
    assert train[0] == train[-1] == held_out[0] == held_out[-1] == EOD
    text = SAMPLE.read_bytes()
    assert bytes(train[1:-1]) + bytes(held_out[1:-1]) == text
    assert 0.0995 < (len(held_out) - 2) / len(text) <= 0.1 and train[-2] == ord("\n")


@pytest.mark.parametrize("options, message", [
    ({"inputs": []}, "wrong inputs: there are none"),
    ({"sample": True}, "wrong inputs: 1 and the sample"),
    ({"held_out": 0}, "held_out = 0; it lies between 0 and 1"),
    ({"held_out": 1.5}, "held_out = 1.5"),
    ({"held_out": float("nan")}, "held_out = nan"),
    ({"held_out": 0.1, "validation": ["v.txt"]}, "two validation splits: held_out = 0.1"),
    ({"jobs": 0}, "jobs = 0; it takes 1 or more"),
    ({"shard_tokens": 0}, "shard_tokens = 0"),
    ({"vocab_size": 256}, "vocab_size = 256; it takes 257 to 16,777,216"),
    ({"tokenizer": "none.json"}, "cannot read the tokenizer: none.json"),
])
def test_wrong_arguments_are_usage_errors_before_anything_is_read(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, {"a.txt": b"\xff", "v.txt": "v"})
    inputs = options.pop("inputs", ["a.txt"])
    with pytest.raises(UsageError) as caught:
        prepare(inputs, tmp_path / "out", **options)
    assert message in str(caught.value)
    assert_nothing_at(tmp_path / "out")


def test_a_fault_in_the_last_file_leaves_nothing(tmp_path):
    make(tmp_path, {"a.txt": "good", "b.txt": "good too", "c.txt": b"bad \xff"})
    with pytest.raises(DataError, match=r"c\.txt, byte 4"):
        prepare([tmp_path / f"{name}.txt" for name in "abc"], tmp_path / "new" / "out", tokenizer="bytes")
    assert not (tmp_path / "new").exists()


def test_the_same_text_in_two_splits_is_refused(tmp_path):
    make(tmp_path, {"train.txt": "same", "validation.txt": "same"})
    with pytest.raises(DataError, match=r"the same text in two splits: train\.txt of train and val"):
        prepare([tmp_path / "train.txt", tmp_path / "validation.txt"], tmp_path / "out", tokenizer="bytes")


def test_a_full_disk_is_a_resource_error_and_leaves_nothing(tmp_path, monkeypatch):
    make(tmp_path, {"a.txt": "text " * 20_000})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ResourceError, match="cannot write"):
            prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_nothing_at(tmp_path / "out")

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match=r"cannot write: .*; No space left on device"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes")
    assert_nothing_at(tmp_path / "out")


def test_an_interrupted_prepare_goes_on(tmp_path, monkeypatch):
    """Before the first unit nothing is left; after it what is done is not done again."""
    make(tmp_path, {"a.jsonl": [f"document {i} " * 100 for i in range(20)]})
    options = {"tokenizer": "bytes", "jobs": 1, "unit_characters": 1000, "held_out": 0.2}
    prepare([tmp_path / "a.jsonl"], tmp_path / "whole", **options)

    def interrupt(*_):
        raise KeyboardInterrupt

    for name in ("divide", "_write_split"):
        with monkeypatch.context() as patched:
            patched.setattr(lineartime.data.prepare, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                prepare([tmp_path / "a.jsonl"], tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        assert bool(list(tmp_path.glob(".lineartime-*"))) == (name == "_write_split")
    monkeypatch.setattr("lineartime.data.units.read_slice", interrupt)
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".lineartime-*"))


def unfinished(tmp_path, monkeypatch, **options):
    """The folder that an interrupt leaves after three units."""
    done = []

    def encode(*arguments):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(lineartime.data.units.encode_unit(*arguments))
        return done[-1]

    with monkeypatch.context() as patched:
        patched.setattr("lineartime.data.prepare.encode_unit", encode)
        with pytest.raises(KeyboardInterrupt):
            prepare([tmp_path / "a.jsonl"], tmp_path / "out", jobs=1, unit_characters=1000, **options)
    (folder,) = tmp_path.glob(".lineartime-*.unfinished")
    assert len(list((folder / "units").glob("*.ids"))) == 3
    return folder


def test_work_for_other_text_or_settings_begins_anew(tmp_path, monkeypatch):
    texts = [f"document {i} " * 100 for i in range(10)]
    for other in ({"a.jsonl": texts[1:]}, {}):
        make(tmp_path, {"a.jsonl": texts})
        unfinished(tmp_path, monkeypatch, tokenizer="bytes")
        make(tmp_path, other)
        options = {} if other else {"mlm": True}
        made = [prepare([tmp_path / "a.jsonl"], tmp_path / name, tokenizer="bytes", unit_characters=1000, **options)
                for name in ("out", "again")]
        assert contents(tmp_path / "out") == contents(tmp_path / "again") and not made[0].already_prepared
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "again")


def test_damaged_work_is_not_used(tmp_path, monkeypatch):
    make(tmp_path, {"a.jsonl": [f"document {i} " * 100 for i in range(10)]})
    prepare([tmp_path / "a.jsonl"], tmp_path / "whole", vocab_size=300)
    for name, edit in (("begun", lambda c: c[:-9]), ("finished/00001.json", lambda c: c[:-20]),
                       ("finished/00001.json", lambda c: b"[" * 10_000), ("finished/00001.json", lambda c: b"{}"),
                       ("tokenizer.json", lambda c: c.replace(b"a", b"b", 1)), ("units/00001.ids", lambda c: c[:-2]),
                       ("units/00001.ids", lambda c: bytes(len(c))), ("units/00001.rows", lambda c: c + b"1")):
        path = unfinished(tmp_path, monkeypatch, vocab_size=300) / name
        path.write_bytes(edit(path.read_bytes()))
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", vocab_size=300, unit_characters=1000)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole"), name
        shutil.rmtree(tmp_path / "out")


def test_prepared_again_is_left_alone_and_otherwise_is_refused(tmp_path):
    make(tmp_path, {"a.txt": "text " * 100})
    make(tmp_path / "other", {"a.txt": "more " * 100})
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    first = prepare([tmp_path / "a.txt"], out, vocab_size=260, held_out=0.1)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = prepare([tmp_path / "a.txt"], out, vocab_size=260, held_out=0.1, jobs=2)
    assert again.already_prepared and not first.already_prepared and again.sha256 == first.sha256
    for inputs, options, difference in (
            ([tmp_path / "a.txt"], {"vocab_size": 261, "held_out": 0.1}, "vocab_size 260 -> 261"),
            ([tmp_path / "a.txt"], {"vocab_size": 260}, "held_out 0.1 -> None"),
            ([tmp_path / "a.txt"], {"tokenizer": "bytes", "held_out": 0.1}, "tokenizer train -> "),
            ([tmp_path / "other" / "a.txt"], {"vocab_size": 260, "held_out": 0.1}, "(text)")):
        with pytest.raises(UsageError, match="the output was prepared differently") as caught:
            prepare(inputs, out, **options)
        assert difference in str(caught.value)
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "train-00000.bin").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"damaged or missing file: .*train-00000.bin"):
        prepare([tmp_path / "a.txt"], out, vocab_size=260, held_out=0.1)


def test_an_output_of_another_kind_is_never_touched(tmp_path):
    make(tmp_path, {"a.txt": "text", "full/precious": "p", "file": "f"})
    for name in ("full", "file"):
        with pytest.raises(UsageError, match="the output exists and is not a prepared folder"):
            prepare([tmp_path / "a.txt"], tmp_path / name, tokenizer="bytes")
    assert (tmp_path / "full" / "precious").read_text() == "p" and (tmp_path / "file").read_text() == "f"


def test_odd_paths_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, {"in put/naïve 東京.txt": "text"})
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for out in ("out put ü", "deep/er/out", "link", "x" * 200):
        prepare([Path("in put")], Path(out), tokenizer="bytes")
        assert stream_of(Path(out)) == [EOD, *b"text", EOD]
    assert (tmp_path / "link").is_symlink()


SCRIPT = """
import sys
from pathlib import Path
from lineartime.data.prepare import SAMPLE, prepare
prepare([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer="bytes", held_out=0.3, shard_tokens=100_000, jobs=2,
        unit_characters=100_000)
"""


def test_a_killed_prepare_leaves_nothing_half_written(tmp_path):
    make(tmp_path, {"a.jsonl": ["some text " * 1000] * 150})
    out = tmp_path / "out"
    command = [sys.executable, "-c", SCRIPT, tmp_path / "a.jsonl", out]
    first = None
    for awaited in ("begun", "finished/00000.json", "finished/00007.json", "done/train-00003.bin"):
        process = subprocess.Popen(command)
        while not list(tmp_path.glob(f".lineartime-*.unfinished/{awaited}")):
            assert process.poll() is None, f"it was done before {awaited} was seen"
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        (folder,) = tmp_path.glob(".lineartime-*")
        assert not out.exists()
        if (folder / "finished" / "00000.json").exists() and first is None:
            first = (folder / "units" / "00000.ids").stat()
    assert os.path.samestat(first, (folder / "units" / "00000.ids").stat()), "it was made again"
    subprocess.run(command, check=True)
    assert not list(tmp_path.glob(".lineartime-*"))
    assert open_split(out, "train").n_tokens == 105 * 10_001 and open_split(out, "validation").n_tokens == 45 * 10_001
    prepare([tmp_path / "a.jsonl"], tmp_path / "whole", tokenizer="bytes", held_out=0.3, shard_tokens=100_000)
    assert contents(out) == contents(tmp_path / "whole")


def test_two_at_once_do_not_mix(tmp_path):
    make(tmp_path, {"a.jsonl": ["some text " * 1000] * 100})
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path / "a.jsonl", out])
    while not list(tmp_path.glob(".lineartime-*.unfinished/finished/00000.json")):
        assert process.poll() is None
        time.sleep(0.0005)
    with pytest.raises(ResourceError, match="another process is writing this folder"):
        prepare([tmp_path / "a.jsonl"], out, tokenizer="bytes", held_out=0.1)
    assert process.wait() == 0
    assert open_split(out, "train").n_documents == 70


MEMORY = """
import resource, sys
from pathlib import Path
from lineartime.data.prepare import SAMPLE, prepare
prepare([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer="bytes", shard_tokens=1_000_000, jobs=int(sys.argv[3]),
        unit_characters=1_000_000)
print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) // 1024)
"""


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.rest)])
def test_memory_does_not_grow_with_the_text(tmp_path, jobs):
    peaks = []
    for megabytes in (2, 10):
        with (tmp_path / "a.txt").open("w") as file:
            for _ in range(megabytes):
                file.write("some more text, " * (1 << 16))
        run = subprocess.run([sys.executable, "-c", MEMORY, tmp_path / "a.txt", tmp_path / f"{megabytes}", jobs],
                             check=True, stdout=subprocess.PIPE)
        peaks.append(int(run.stdout))
    assert peaks[1] - peaks[0] < 6


def test_reads_across_shards(prepared):
    stream, whole = open_split(prepared, "train"), stream_of(prepared)
    assert len(list(prepared.glob("train-0*.bin"))) > 3
    for _ in range(200):
        start, stop = sorted(random.Random(_).choices(range(len(stream) + 1), k=2))
        ids = stream.read(start, stop)
        assert ids.dtype == np.int64 and ids.tolist() == whole[start:stop]
    for start, stop in ((-1, 3), (5, 4), (0, len(stream) + 1)):
        with pytest.raises(IndexError):
            stream.read(start, stop)


def test_every_target_is_read_once_in_an_epoch(prepared):
    stream, whole = open_split(prepared, "train"), stream_of(prepared)
    for context in (1, 2, 7, 36, 37, 38, len(stream) - 1):
        n_rows = (len(stream) - 1) // context
        for epoch in (0, 1):
            rows = batch_rows(stream, seed=3, step=epoch, rows_per_step=n_rows, context=context)
            assert rows.shape == (n_rows, context + 1) and rows.dtype == np.int64
            expected = [whole[r * context:(r + 1) * context + 1] for r in range(n_rows)]
            assert sorted(rows.tolist()) == sorted(expected)


def test_evaluation_reads_every_target_once_in_order(prepared):
    stream, whole = open_split(prepared, "train"), stream_of(prepared)
    for context in (1, 2, 7, 36, 37, 38, len(stream) - 1, len(stream), 10 * len(stream)):
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


def test_epochs_and_seeds_have_their_own_order(pure_stream):
    orders = [batch_rows(pure_stream, seed=seed, step=epoch, rows_per_step=22, context=9).tolist()
              for seed in (0, 1) for epoch in (0, 1, 2)]
    for i, order in enumerate(orders):
        assert sorted(order) == sorted(orders[0])
        assert all(order != other for other in orders[:i])


def test_the_order_stays_what_it_was():
    """Written down once: a change would give a resumed run other batches."""
    assert tokens.epoch_order(0, 0, 10).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert tokens.epoch_order(1, 2, 10).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


def test_a_stream_shorter_than_a_row_names_the_context_that_works(pure_stream):
    with pytest.raises(DataError, match=r"too few tokens for a row of 202: .*; the largest context that works is 201"):
        batch_rows(pure_stream, seed=0, step=0, rows_per_step=1, context=202)
    assert batch_rows(pure_stream, seed=0, step=5, rows_per_step=1, context=201).shape == (1, 202)


def test_a_missing_folder_or_split_is_refused(prepared):
    with pytest.raises(UsageError, match="no such folder"):
        open_split(prepared / "none", "train")
    with pytest.raises(DataError, match=r"no test split: .*; it has train, validation"):
        open_split(prepared, "test")
    (prepared / "manifest.json").unlink()
    with pytest.raises(DataError, match="no manifest"):
        open_split(prepared, "train")


def test_a_newer_format_is_refused(prepared):
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest |= {"version": 2, "unheard_of": 1}
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"prepared by a newer lineartime: .*; it has format 2, this reads 1"):
        open_split(prepared, "train")


def damage(rng, folder):
    """Flip a bit of a file, cut it, lengthen it, remove it, or put another in its place."""
    path, other = rng.sample(sorted(folder.iterdir()), 2)
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "lengthen", "remove", "swap"])
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[rng.randrange(len(content)):]
    elif kind == "lengthen":
        content.append(rng.randrange(256))
    elif kind == "swap":
        content = other.read_bytes()
    path.write_bytes(content)
    if kind == "remove":
        path.unlink()
    return path.name, kind


def test_damage_is_never_read(prepared):
    rng = random.Random(0)
    whole = {split: stream_of(prepared, split) for split in ("train", "validation")}
    intact = contents(prepared)
    refused = 0
    for _ in range(400):
        name, kind = damage(rng, prepared)
        changed = (prepared / name).read_bytes() != intact[name] if (prepared / name).exists() else True
        for split in ("train", "validation"):
            own = name.startswith(split) or name in ("manifest.json", "tokenizer.json")
            if changed and own:
                with pytest.raises(DataError) as caught:
                    open_split(prepared, split)
                assert str(prepared) in str(caught.value) and "\n" not in str(caught.value)
                refused += 1
            else:
                assert stream_of(prepared, split) == whole[split], (name, kind)
        (prepared / name).write_bytes(intact[name])
    assert refused > 300


def test_without_verification_sizes_are_still_compared(prepared):
    shard = prepared / "train-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"damaged or missing file: .*train-00001.bin"):
        open_split(prepared, "train", verify=False)
    shard.write_bytes(content[:-2] + b"\x01\x01")
    with pytest.raises(DataError, match=r"a token outside the vocabulary: .*train-00001.bin, token 36"):
        stream_of(prepared, verify=False)


@pytest.fixture
def hashed(prepared, monkeypatch):
    """The files that are hashed when data are opened, which are large here and were written long ago."""
    names, whole = [], lineartime.atomic_io.hash_of

    def hash_of(path):
        names.append(path.name)
        return whole(path)

    monkeypatch.setattr(lineartime.atomic_io, "hash_of", hash_of)
    monkeypatch.setattr(tokens, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(tokens, "SETTLED", 0)
    return names


def test_large_data_are_hashed_once(prepared, hashed):
    whole = stream_of(prepared)
    assert sorted(hashed) == sorted(path.name for path in prepared.glob("t*"))
    hashed.clear()
    assert stream_of(prepared) == whole and not hashed
    stream_of(prepared, "validation")
    assert hashed and all(name.startswith("validation-") for name in hashed)
    hashed.clear()
    assert stream_of(prepared, "train") == whole and not hashed
    os.utime(prepared / "train-00001.bin")
    assert stream_of(prepared) == whole and hashed == ["train-00001.bin"]
    hashed.clear()
    tokens.verify_data(prepared)
    assert sorted(hashed) == sorted(read_manifest(prepared).files)


def test_a_changed_file_is_hashed_again_whatever_its_times_say(prepared, hashed):
    stream_of(prepared)
    path = prepared / "train-00001.bin"
    before, content = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes([content[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"damaged or missing file: .*train-00001.bin"):
        open_split(prepared, "train")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b'{"train-00001.bin": 3}', b"\xff"])
def test_a_damaged_memory_is_not_believed(prepared, hashed, content):
    whole = stream_of(prepared)
    (prepared / tokens.VERIFIED_FILE).write_bytes(content)
    hashed.clear()
    assert stream_of(prepared) == whole and "train-00001.bin" in hashed


def test_a_forged_memory_is_no_worse_than_a_comparison_of_sizes(prepared, hashed):
    stream_of(prepared)
    memory, path = prepared / tokens.VERIFIED_FILE, prepared / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    marks, found = json.loads(memory.read_text()), path.stat()
    marks[path.name][1:] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    memory.write_text(json.dumps(marks))
    with pytest.raises(DataError, match=r"damaged or missing file: .*train-00001.bin"):
        open_split(prepared, "train")


def test_what_is_small_or_new_or_cannot_be_remembered_is_hashed_again(prepared, hashed, monkeypatch):
    for name, value in (("REMEMBERED_BYTES", 1 << 20), ("SETTLED", 2.0), ("os.access", lambda *_: False)):
        with monkeypatch.context() as patched:
            patched.setattr(f"lineartime.data.tokens.{name}", value)
            for _ in range(2):
                hashed.clear()
                stream_of(prepared)
                assert "train-00001.bin" in hashed, name
        assert not (prepared / tokens.VERIFIED_FILE).exists()


def test_those_that_open_at_once_hash_once(prepared, hashed, monkeypatch):
    noted = lineartime.atomic_io.hash_of
    monkeypatch.setattr(lineartime.atomic_io, "hash_of", lambda path: (time.sleep(0.01), noted(path))[1])
    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(tuple, pool.map(lambda _: stream_of(prepared), range(8))))) == 1
    assert len(hashed) == len(set(hashed))
