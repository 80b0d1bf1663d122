"""Prepared tokens: whole or not there, what the text says, and always the same."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import lineartime.data.prepare
from disk import limited
from lineartime.base.errors import DataError, ResourceError, UsageError
from lineartime.base.files import _hidden
from lineartime.data.prepare import divided, prepare
from lineartime.data.prepare_config import SAMPLE
from lineartime.data.tokenizer import load_tokenizer
from lineartime.data.tokens import Split, open_split, read_manifest
from text_files import contents, documents_of, make, stream_of

EOD = 256
BOOKS = {"train/a.txt": "One book,\n naïve.\n", "train/b.txt": "Another <|endoftext|> book", "train/c.txt": " \n",
         "validation/d.txt": "held out", "test/e.txt": "東京"}


def assert_nothing_at(out):
    assert not out.exists() and not list(out.parent.glob(".lineartime-*"))


def test_streams_and_counts_are_those_of_the_text(tmp_path):
    make(tmp_path / "books", BOOKS)
    manifest = prepare(tmp_path / "books", tmp_path / "out", tokenizer="bytes")
    a, b, _, d, e = (text.encode() for text in BOOKS.values())
    assert stream_of(tmp_path / "out") == [EOD, *a, EOD, *b, EOD]
    assert stream_of(tmp_path / "out", "validation") == [EOD, *d, EOD]
    assert stream_of(tmp_path / "out", "test") == [EOD, *e, EOD]
    assert manifest.splits["train"] == Split(documents=2, tokens=len(a) + len(b) + 2, words=6, bytes=len(a) + len(b))
    assert manifest.splits["test"] == Split(documents=1, tokens=7, words=1, bytes=6)
    assert manifest.notes == ["1 documents are white space only and were left out"]
    assert (manifest.vocab_size, manifest.end_of_document, manifest.dtype) == (257, 256, "<u2")
    assert [s["name"] for s in manifest.sources][:2] == ["train/a.txt", "train/b.txt"]
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    assert read_manifest(tmp_path / "out") == manifest
    assert manifest.settings.keys() == {"held_out", "field", "shard_tokens", "tokenizer"}  # they are in its hash


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=60), max_size=6),
       shard_tokens=st.integers(1, 40))
@settings(max_examples=40)
def test_any_text_comes_back_from_its_shards(tmp_path_factory, texts, shard_tokens):
    folder = make(tmp_path_factory.mktemp("any"), {"a.jsonl": [*texts, "end"]})
    kept = [text for text in [*texts, "end"] if text and not text.isspace()]
    manifest = prepare([folder / "a.jsonl"], folder / "out", vocab_size=270, shard_tokens=shard_tokens, jobs=1)
    counts = manifest.splits["train"]
    stream, tokenizer = open_split(folder / "out", "train"), load_tokenizer(folder / "out" / "tokenizer.json")
    assert documents_of(folder / "out") == kept
    assert (stream.read(0, len(stream)) == stream.end_of_document).sum() == len(kept) + 1
    assert counts.bytes == sum(len(text.encode()) for text in kept)
    assert counts.words == sum(len(text.split()) for text in kept)
    assert counts.tokens == len(kept) + sum(len(tokenizer.encode(text)) for text in kept)


@pytest.mark.parametrize("name", ["one", "all"])
def test_the_result_does_not_depend_on_what_one_process_takes_at_once(tmp_path, monkeypatch, name):
    """A book cut in many places, also in a word and in what is held out; small files."""
    monkeypatch.setattr("lineartime.data.read_text.cut_pieces.__defaults__", (900,))
    text = "\ufeff" + SAMPLE.read_text(encoding="utf-8")[:20_000] + "é" * 6000 + " end"
    make(tmp_path, {"a.txt": text, "b.txt": " \n", "c.jsonl": ["", "second", " ", "third " * 900, ""],
                    "d.parquet": [f"row {i} " * (i % 7) for i in range(60)],
                    "e.json.gz": ["fifth " * 500, "", "sixth", "third " * 900]})
    paths = [tmp_path / "a.txt"] if name == "one" else sorted(tmp_path.glob("[a-e].*"))
    made = []
    for unit_bytes, block in ((1 << 23, 1 << 21), (700, 10)):
        monkeypatch.setattr(lineartime.data.prepare, "BLOCK_IDS", block)
        out = tmp_path / f"{unit_bytes}"
        manifest = prepare(paths, out, tokenizer="bytes", held_out=0.3, jobs=1, unit_bytes=unit_bytes)
        made.append(contents(out))
    assert made[0] == made[1]
    kept = documents_of(out) + documents_of(out, "validation")
    if name == "one":  # it is cut inside
        assert "".join(kept) == text[1:]
        return
    rows = [f"row {i} " * (i % 7) for i in range(60) if i % 7]
    assert sorted(kept) == sorted([text[1:], "second", "third " * 900, *rows, "fifth " * 500, "sixth", "third " * 900])
    assert sum(split.words for split in manifest.splits.values()) == sum(len(one.split()) for one in kept)


def test_an_error_of_a_process_is_that_of_one_process(tmp_path):
    make(tmp_path, {"a.txt": "good " * 3000, "b.jsonl": '{"text": "good"}\n{"text": 1}\n', "c.txt": b"bad \xff" * 1000})
    for jobs in (1, 2):
        with pytest.raises(DataError, match=r"field 'text' is not a string: .*b\.jsonl:2"):
            prepare([tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt")], tmp_path / "new" / "out",
                    tokenizer="bytes", jobs=jobs, unit_bytes=1000)
        assert not (tmp_path / "new").exists()
    (tmp_path / "d.ds").write_bytes(b"\1\2" * 99)  # ids of no byte, which is seen after more is read
    (tmp_path / "d.ds.index").write_bytes((99).to_bytes(8, "little"))
    for jobs in (1, 2):
        with pytest.raises(DataError, match=r"a token outside the vocabulary: .*d\.ds"):
            prepare([tmp_path / "d.ds", tmp_path / "b.jsonl"], tmp_path / "out", tokenizer="bytes", jobs=jobs,
                    unit_bytes=20)


def test_a_process_that_dies_is_a_resource_error(tmp_path, monkeypatch):
    make(tmp_path, {"a.jsonl": ["text " * 400] * 9})
    monkeypatch.setattr(lineartime.data.prepare, "end_with_parent", os.abort)
    with pytest.raises(ResourceError, match=r"a process that tokenises has died: .*; .* use fewer --jobs"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes", jobs=2, unit_bytes=1000)
    assert_nothing_at(tmp_path / "out")


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    make(tmp_path, {"a.txt": "a b b\na", "tokenizer.json": of_words.to_str()})
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert (manifest.dtype, manifest.vocab_size) == ("<u4", 70_001)
    assert stream_of(tmp_path / "out") == [2, 0, 70_000, 70_000, 0, 2]
    assert manifest.notes == ["this tokenizer does not keep the text exactly: scores per byte leave out what it drops "
                              "(1 documents, 40.00% of the tokens are unknown)"]


def test_the_tokenizer_sees_a_spread_of_the_train_split(tmp_path):
    make(tmp_path, {"train.txt": "one two " * 50, "validation.txt": "zebra " * 500,
                    "a.jsonl": [f"{word} " * 100 for word in ("first", "other", "other", "fourth", "last")]})
    manifest = prepare([tmp_path / "train.txt", tmp_path / "validation.txt"], tmp_path / "out", vocab_size=400)
    assert manifest.notes == [f"the text gave a vocabulary of {manifest.vocab_size} of the 400 asked for"]
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert len(tokenizer.encode(" two")) == 1 and len(tokenizer.encode(" zebra")) == 6
    prepare([tmp_path / "a.jsonl"], tmp_path / "spread", vocab_size=400, train_characters=1100)  # every third
    tokenizer = load_tokenizer(tmp_path / "spread" / "tokenizer.json")
    learnt = [word for word in ("first", "other", "fourth", "last") if len(tokenizer.encode(f" {word}")) == 1]
    assert learnt == ["first", "fourth"]


@pytest.mark.parametrize("n, held_out, held", [
    (10, 0.25, [1, 5, 8]), (2, 0.6, [1]), (90, 0.1, range(5, 90, 10)), (9, 0.99, [0, 1, 2, 3, 5, 6, 7, 8])])
def test_documents_at_equal_distances_are_held_out(tmp_path, n, held_out, held, caplog):
    caplog.set_level("INFO", "lineartime")
    texts = [f"document {i:02d}" for i in range(n)]
    make(tmp_path, {"a.jsonl": texts[:1], "b.txt": texts[1], "c.jsonl": [" ", *texts[2:]]})
    prepare(sorted(tmp_path.iterdir()), tmp_path / "out", tokenizer="bytes", held_out=held_out)
    assert documents_of(tmp_path / "out") == [text for i, text in enumerate(texts) if i not in held]
    assert documents_of(tmp_path / "out", "validation") == [texts[i] for i in held]
    assert caplog.messages == [f"held out    {len(held)} of {n} documents, at equal distances: "
                               f"{len(held) / n:.1%} of the tokens"]


def test_of_a_single_document_the_last_lines_are_held_out(tmp_path):
    lines = "".join(f"line {i:02d}\n" for i in range(50))  # 400 characters, 8 to a line
    for i, (text, train) in enumerate((
            (lines, lines[:360 + 8]), ("é" * 21, "é" * 19), ("a\nb" * 100, "a\nb" * 90 + "a\n"),
            ("x" * 99 + "\n", "x" * 90), ("x" * 95 + "\nTail", "x" * 90))):
        make(tmp_path, {"a.txt": text, "test.txt": f"{i}"})
        out = tmp_path / f"{i}"
        manifest = prepare([tmp_path / "a.txt"], out, tokenizer="bytes", held_out=0.1, test=[tmp_path / "test.txt"],
                           unit_bytes=7, jobs=1)
        (begun,), (rest,) = documents_of(out), documents_of(out, "validation")
        assert begun + rest == text and begun == train
        n_bytes = len(rest.encode())
        assert manifest.splits["validation"] == Split(1, n_bytes + 1, len(rest.split()), n_bytes)
        assert list(manifest.splits) == ["train", "validation", "test"]


def test_an_empty_file_does_not_refuse_a_folder(tmp_path):
    make(tmp_path, {"text/a.parquet": ["a"], "text/b.parquet": ["b"], "text/c.parquet": b""})
    manifest = prepare([tmp_path / "text"], tmp_path / "out", tokenizer="bytes")
    assert documents_of(tmp_path / "out") == ["a", "b"]
    assert manifest.notes == ["1 files have no documents and were left out"]
    make(tmp_path, {"one/a.txt": "one\n" * 40, "one/b.txt": ""})
    manifest = prepare([tmp_path / "one"], tmp_path / "of one", tokenizer="bytes", held_out=0.1)
    assert documents_of(tmp_path / "of one", "validation") == ["one\n" * 3]
    assert manifest.notes == ["1 files have no documents and were left out"]


def test_a_long_document_is_not_held_out_beside_short_ones():
    rows_D4 = np.array([[1, 1, 22_800 if i == 4 else 200, i] for i in range(10)], np.uint64)
    held_D = divided("train", rows_D4, 0.05, "")["validation"]
    assert held_D.any() and not held_D[4]


@pytest.mark.parametrize("options, message", [
    ({"inputs": []}, "wrong inputs: there are none"),
    ({"sample": True}, "wrong inputs: 1 and the sample"),
    ({"held_out": 1.0}, "held_out = 1.0; it lies between 0 and 1"),
    ({"held_out": 0.1, "validation": ["v.txt"]}, "two validation splits: held_out = 0.1"),
    ({"jobs": 0}, "jobs must be at least 1: jobs = 0"),
    ({"vocab_size": 256}, "vocab_size = 256; it takes 257 to 16,777,216"),
    ({"vocab_size": 258, "mlm": True}, "vocab_size = 258; it takes 259 to 16,777,216"),
    ({"tokenizer": "bytes", "vocab_size": 500}, "its own vocabulary: --tokenizer bytes --vocab-size 500; leave"),
    ({"tokenizer": "none.json"}, "cannot read the tokenizer: none.json"),
    ({"vocab_size": np.int64(300)}, "vocab_size = np.int64(300); it takes a whole number or None"),
])
def test_wrong_arguments_are_usage_errors_before_anything_is_read(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, {"a.txt": b"\xff", "v.txt": "v"})
    inputs = options.pop("inputs", ["a.txt"])
    with pytest.raises(UsageError, match=re.escape(message)):
        prepare(inputs, tmp_path / "out", **options)
    assert_nothing_at(tmp_path / "out")


@pytest.mark.parametrize(("files", "held_out", "message"), [
    ({"a.txt": "xy"}, 0.1, "too little text to hold some out"),
    ({"a.txt": "x" * 100 + "\n" * 10}, 0.1, "nothing but white space"),
    ({"a.jsonl": ["one " * 99, " "]}, 0.1, "of one document in rows nothing can be held out"),
    ({"a.jsonl": "\n"}, None, r"no documents: .*a\.jsonl; the train split would be empty"),
    ({"train.txt": "a", "validation.txt": "a"}, None, r"the same text in two splits: train\.txt of train and val")])
def test_text_that_gives_no_splits_is_refused(tmp_path, files, held_out, message):
    with pytest.raises(DataError, match=message):
        prepare([make(tmp_path / "in", files)], tmp_path / "out", tokenizer="bytes", held_out=held_out)
    assert_nothing_at(tmp_path / "out")


def test_prepared_again_is_left_alone_and_otherwise_is_refused(tmp_path):
    make(tmp_path, {"a.txt": "text " * 100, "other/a.txt": "more " * 100})
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    first = prepare([tmp_path / "a.txt"], out, vocab_size=260, held_out=0.1)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    _hidden(out, "lock").touch()  # what a process leaves that is killed in its last moment
    _hidden(out, "unfinished").mkdir()
    again = prepare([tmp_path / "a.txt"], out, vocab_size=260, held_out=0.1, jobs=2)
    assert not [*tmp_path.glob(".lineartime-*")]
    assert again.already_prepared and not first.already_prepared and again.sha256 == first.sha256
    for name, options, difference in (
            ("a.txt", {"vocab_size": 260}, "held_out 0.1 -> None"),
            ("a.txt", {"tokenizer": "bytes", "held_out": 0.1}, "tokenizer train -> "),
            ("other/a.txt", {"vocab_size": 260, "held_out": 0.1}, "\\(text\\)")):
        with pytest.raises(UsageError, match=f"the output was prepared differently: .*{difference}"):
            prepare([tmp_path / name], out, **options)
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "train-00000.bin").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"damaged or missing file: .*train-00000.bin"):
        prepare([tmp_path / "a.txt"], out, vocab_size=260, held_out=0.1)


def test_a_file_may_grow_while_it_is_read(tmp_path, monkeypatch):
    """Such as a log: its document has an end, and the next one begins."""
    make(tmp_path, {"in/a.txt": "one two ", "in/b.txt": "three"})
    hashed = lineartime.data.prepare.listed

    def grown(*given):
        files = hashed(*given)
        (tmp_path / "in/a.txt").write_text("one two more and more")
        return files

    monkeypatch.setattr(lineartime.data.prepare, "listed", grown)
    prepare([tmp_path / "in"], tmp_path / "out", tokenizer="bytes")
    assert documents_of(tmp_path / "out") == ["one two more and more", "three"]


def test_an_output_of_another_kind_is_never_touched(tmp_path, monkeypatch):
    make(tmp_path, {"a.txt": "text", "full/precious": "p", "file": "f"})
    monkeypatch.setattr(lineartime.data.prepare, "find_text", None)  # said before text is read
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


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    make(tmp_path, {"a.txt": "text"})
    monkeypatch.setattr("os.path.ismount", lambda path: True)
    with pytest.raises(ResourceError, match=r"cannot write: .*; it is a mount point; name a folder in it"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes")


def test_a_full_disk_is_a_resource_error_and_leaves_nothing(tmp_path):
    make(tmp_path, {"a.txt": "text " * 20_000})
    with pytest.raises(ResourceError, match="cannot write"), limited(resource.RLIMIT_FSIZE, 50_000):
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="bytes")
    assert not (tmp_path / "out").exists()


SCRIPT = """
import resource, sys
from pathlib import Path
from lineartime.data.prepare import prepare
prepare([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer="bytes", held_out=0.3, shard_tokens=100_000, jobs=2,
        unit_bytes=100_000)
(own_kib,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")]
print((own_kib + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024)
"""


def test_a_killed_prepare_leaves_nothing_half_written(tmp_path):
    """Whenever it is killed, the folder is not there or whole; the next call begins again."""
    make(tmp_path, {"a.jsonl": [f"{i:09d} " + "some text " * 999 for i in range(150)]})
    prepare([tmp_path / "a.jsonl"], tmp_path / "whole", tokenizer="bytes", held_out=0.3, shard_tokens=100_000)
    (tmp_path / ".script.py").write_text(SCRIPT)  # which the processes that tokenise must not run
    out, command = tmp_path / "out", [sys.executable, tmp_path / ".script.py", tmp_path / "a.jsonl", tmp_path / "out"]
    for awaited in (".lineartime-*.lock", ".lineartime-*/done/tokenizer.json", ".lineartime-*/done/train-00003.bin",
                    ".lineartime-*/done/validation-00000.bin", "out"):
        assert not out.exists()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not list(tmp_path.glob(awaited)):
            assert process.poll() is None, f"it was done before {awaited} was seen"
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert {path.name for path in tmp_path.glob("[!.]*")} - {"out"} == {"a.jsonl", "whole"}
        if out.exists():
            assert contents(out) == contents(tmp_path / "whole")
            shutil.rmtree(out)
    subprocess.run(command, check=True)
    assert contents(out) == contents(tmp_path / "whole") and not list(tmp_path.glob(".lineartime-*"))


def test_memory_does_not_grow_with_the_text(tmp_path):
    peaks = []
    for megabytes in (5, 12):
        make(tmp_path, {"a.txt": "some more text, " * (megabytes << 16)})
        run = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "a.txt", tmp_path / f"{megabytes}"], check=True,
                             stdout=subprocess.PIPE)
        peaks.append(int(run.stdout))
    assert peaks[1] - peaks[0] < 6
