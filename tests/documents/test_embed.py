"""`lineartime embed`: every format of output, stopped at any moment, bad input."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

import lineartime
from command_line import assert_refused
from dying_saves import Died, die
from lineartime.config import model_config
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.documents import results
from lineartime.errors import UsageError
from tiny_checkpoints import random_model, write_checkpoint

TEXTS = ["once upon a time", "there was", "a document that is longer than a row of the model, by far. " * 6, "end"]

MODEL = {"n_layers": 2, "d_model": 16, "vocab_size": 257, "context": 96, "end_of_document": 256, "query_key_dim": 8,
         "chunk_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and the same documents as files and as records."""
    folder = tmp_path_factory.mktemp("embed")
    config = model_config("flash", **MODEL)
    (folder / "model").mkdir()
    write_checkpoint(folder / "model", random_model(config), byte_tokenizer())
    (folder / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "texts" / f"{i}.txt").write_text(text)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text, "other": text}) + "\n" for text in TEXTS))
    return folder


@pytest.fixture(scope="module")
def vectors(folder):
    model, tokenizer, _ = lineartime.load_model(folder / "model")
    return lineartime.embed(model, tokenizer, TEXTS)


def test_every_output_has_the_same_vectors_in_order(folder, vectors, tmp_path, call):
    for inputs in (folder / "texts", folder / "texts.jsonl"):
        code, out, err = call("embed", folder / "model", inputs)
        rows = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and np.array_equal(np.array([row["embedding"] for row in rows], np.float32), vectors)
        assert [row["tokens"] for row in rows] == [len(text) + 1 for text in TEXTS]
        assert "4 documents" in err and "tokens/s" in err and "cut" not in err
    for ending in ("jsonl", "npy"):
        assert call("embed", folder / "model", folder / "texts.jsonl", "--out", tmp_path / f"v.{ending}")[0] == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["v.jsonl", "v.npy"]
    assert np.array_equal(np.load(tmp_path / "v.npy"), vectors)
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert lines == [{**row, "file": str(folder / "texts.jsonl"), "number": i} for i, row in enumerate(rows, 1)]


def test_a_store_and_stdin_give_the_same_vectors(folder, vectors, tmp_path, call):
    store = fsspec.filesystem("memory")
    store.pipe_file("/embed.jsonl", (folder / "texts.jsonl").read_bytes())
    out = tmp_path / "v.npy"
    assert call("embed", folder / "model", "memory://embed.jsonl", "--out", out)[0] == 0
    assert np.array_equal(np.load(out), vectors)
    _, said, _ = call("embed", folder / "model", "-", "--stdin", "jsonl", stdin=(folder / "texts.jsonl").read_text())
    rows = [json.loads(line) for line in said.splitlines()]
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), vectors)
    assert [(row["file"], row["number"]) for row in rows] == [("stdin", i) for i in range(1, 5)]
    before = results.state_of("memory://embed.jsonl")
    assert results.state_of("memory://embed.jsonl") == before
    store.pipe_file("/embed.jsonl", store.cat("/embed.jsonl")[::-1])
    assert results.state_of("memory://embed.jsonl") != before


def test_a_cut_is_said(folder, call):
    _, out, _ = call("embed", folder / "model", folder / "texts", "--max-tokens", 17)
    assert [json.loads(line)["cut"] for line in out.splitlines()] == [False, False, True, False]


def test_a_file_name_that_is_not_utf8_is_refused(folder, tmp_path, call):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("hello")
    assert_refused(*call("embed", folder / "model", tmp_path)[::2], 3, "its name is no valid Unicode")


def test_a_file_that_is_half_written_goes_on_with_the_same_command(folder, vectors, tmp_path, call, monkeypatch):
    """test_results.py has damages of every kind."""
    out, asked = tmp_path / "v.npy", ("embed", folder / "model", folder / "texts.jsonl", "--out")
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(results, "write_rows", die)
        call(*asked, out)
    whole = results.part_of(out).read_bytes()
    results.part_of(out).write_bytes(whole[: len(whole) // 2])
    code, _, err = call(*asked, out)
    assert code == 0 and "behind the first 1 document" in err, err
    assert np.array_equal(np.load(out), vectors) and not results.part_of(out).exists()
    assert_refused(*call(*asked, out)[::2], 2, "the output exists already")
    results.part_of(tmp_path / "w.npy").write_bytes(whole)
    other = model_config("flash", **{**MODEL, "rope_base": 500.0})  # the same weights
    (tmp_path / "other").mkdir()
    write_checkpoint(tmp_path / "other", random_model(other), byte_tokenizer())
    for model, more in ((tmp_path / "other", []), *((folder / "model", each) for each in (
            ["--max-tokens", 5], ["--precision", "bfloat16"], ["--text-field", "other"], ["--pair-field", "other"],
            ["--encoding", "ascii"]))):
        assert_refused(*call("embed", model, *asked[2:], tmp_path / "w.npy", *more)[::2], 2, "unfinished", "w.npy.part")
    (folder / "texts.jsonl").touch()
    assert_refused(*call(*asked, tmp_path / "w.npy")[::2], 2, "unfinished", "w.npy.part")


def test_an_output_that_another_process_wrote_meanwhile_is_kept(folder, tmp_path, call, monkeypatch):
    def written(*given, **how):
        (tmp_path / "v.jsonl").write_text("theirs")
        return {}

    monkeypatch.setattr(results, "description_of", written)
    code, _, err = call("embed", folder / "model", folder / "texts.jsonl", "--out", tmp_path / "v.jsonl")
    assert code == 2 and "the output exists already: " in err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("v.jsonl", "theirs")]


@pytest.mark.parametrize(("texts", "words"), [
    ("hello", "a list of texts is needed: 'hello'; put the text into a list"),
    (["a", 1], "neither a text nor a pair of texts: text 2"), ([("a",)], "text 1"), ([("a", 2)], "text 1")])
def test_what_is_no_text_is_refused(folder, texts, words):
    model, tokenizer, _ = lineartime.load_model(folder / "model")
    with pytest.raises(UsageError, match=words):
        lineartime.embed(model, tokenizer, texts)


def test_a_signal_before_the_first_row_keeps_nothing_and_says_so(folder, tmp_path, call, monkeypatch):
    def stopped(*_, progress):
        signal.raise_signal(signal.SIGTERM)
        yield progress(9)

    monkeypatch.setattr("lineartime.documents.pooling.named_means", stopped)
    code, _, err = call("embed", folder / "model", folder / "texts.jsonl", "--out", tmp_path / "v.npy")
    assert code == 143 and "no document is read; the command begins anew" in err and not [*tmp_path.iterdir()]


def test_a_signal_keeps_what_is_read(folder, tmp_path, warm_command):
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"text": text * 30}) + "\n" for text in TEXTS * 100))
    line = [*warm_command, "embed", folder / "model", tmp_path / "many.jsonl", "--out", tmp_path / "v.npy"]
    process = subprocess.Popen([*map(str, line)], stderr=subprocess.PIPE, text=True)
    part, deadline = tmp_path / "v.npy.part", time.monotonic() + 100
    while not (part.exists() and part.stat().st_size > 2_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 143 and "; the same command goes on" in err, err
    assert "Traceback" not in err and part.read_bytes().count(b"\n") > 1 and not (tmp_path / "v.npy").exists()


def test_bad_input_is_one_line(folder, tmp_path, call):
    lines, text, model = tmp_path / "x.jsonl", folder / "texts" / "0.txt", folder / "model"
    lines.write_text('{"text": "good"}\n' * 400 + '{"text": " "}\n')
    for arguments, code, words in (
            ([tmp_path / "none", text], 2, "no weights here"), ([folder / "texts", text], 2, "not a run"),
            ([model, lines], 3, "x.jsonl:401"), ([model, lines, "--out", tmp_path / "v.jsonl"], 3, "x.jsonl:401"),
            ([model, text, "--out", tmp_path / "v.csv"], 2, ".jsonl, .npy"),
            ([model, text, "--out", tmp_path / "no" / "v.npy"], 2, "there is no such folder"),
            ([model, text, "--max-tokens", 0], 2, "max_tokens = 0")):
        code_said, out, err = call("embed", *arguments)
        assert_refused(code_said, err, code, words)
        assert not out and not [*tmp_path.glob("v.*")]  # a bad row is found before any is read
