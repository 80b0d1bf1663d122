"""`lineartime embed`: every format of output, stopped at any moment, bad input."""

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

import lineartime
from command_line import assert_refused
from command_line import call as call  # a fixture
from lineartime.config import model_config
from lineartime.data.tokenizer import byte_tokenizer
from lineartime.documents import results
from lineartime.errors import UsageError
from tiny_checkpoints import random_model, write_checkpoint

TEXTS = ["once upon a time", "there was", "a document that is longer than a row of the model, by far. " * 6, "end"]

MODEL = {"n_layers": 2, "d_model": 16, "vocab_size": 257, "context": 96, "end_of_document": 256, "query_key_dim": 8,
         "chunk_size": 4}


class Killed(BaseException):
    pass


def killed(*arguments):
    raise Killed


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
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
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
    for ending in ("jsonl", "npy", "parquet"):
        assert call("embed", folder / "model", folder / "texts.jsonl", "--out", tmp_path / f"v.{ending}")[0] == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["v.jsonl", "v.npy", "v.parquet"]
    assert np.array_equal(np.load(tmp_path / "v.npy"), vectors)
    table = parquet.read_table(tmp_path / "v.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert table == lines == [{**row, "file": str(folder / "texts.jsonl"), "number": i}
                              for i, row in enumerate(rows, 1)]
    code, out, _ = call("embed", folder / "model", "-", stdin=TEXTS[2])
    assert np.array_equal(np.array(json.loads(out)["embedding"], np.float32), vectors[2])


def test_a_cut_is_said(folder, call):
    _, out, err = call("embed", folder / "model", folder / "texts", "--max-tokens", 17)
    assert [json.loads(line)["cut"] for line in out.splitlines()] == [False, False, True, False]
    assert "cut      1 document to 17 tokens" in err


def test_documents_cut_before_a_kill_are_counted(folder, tmp_path, call, monkeypatch):
    out, asked = tmp_path / "v.npy", ("embed", folder / "model", folder / "texts", "--max-tokens", 17, "--out")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(results, "write_rows", killed)
        call(*asked, out)
    code, _, err = call(*asked, out)
    assert code == 0 and "behind the first 4 documents" in err and "cut      1 document to 17 tokens" in err


def test_names_of_files(folder, tmp_path, call):
    """JSON on stdout is ASCII; a name that is not UTF-8 is refused before the model reads."""
    (tmp_path / "\x96é.txt").write_text("hello")
    (line,) = call("embed", folder / "model", tmp_path)[1].splitlines()
    assert line.isascii() and json.loads(line)["file"] == str(tmp_path / "\x96é.txt")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("hello")
    assert_refused(*call("embed", folder / "model", tmp_path)[::2], 3, "a file whose name is not valid UTF-8",
                   "rename it")


def test_a_file_that_is_half_written_goes_on(folder, vectors, tmp_path, call, monkeypatch):
    """A kill is a copy of the unfinished file as it was then, whatever its length."""
    out, asked = tmp_path / "v.npy", ("embed", folder / "model", folder / "texts.jsonl", "--out")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(results, "write_rows", killed)
        call(*asked, out)
    whole = results.part_of(out).read_bytes()
    first = whole.index(b"\n") + 1
    for end in (0, first // 2, len(whole) // 2, len(whole)):  # test_results.py has damages of every kind
        out.unlink(missing_ok=True)
        results.part_of(out).write_bytes(whole[:end])
        code, _, err = call(*asked, out)
        n_done = max(whole[:end].count(b"\n") - 1, 0)
        assert code == 0 and (f"behind the first {n_done} document" in err) == (n_done > 0), err
        assert np.array_equal(np.load(out), vectors) and not results.part_of(out).exists()
    assert_refused(*call(*asked, out)[::2], 2, "the output exists already")
    results.part_of(tmp_path / "w.npy").write_bytes(whole)
    for more in (["--max-tokens", 5], ["--precision", "bfloat16"]):
        assert_refused(*call(*asked, tmp_path / "w.npy", *more)[::2], 2, "unfinished", "w.npy.part")
    other = model_config("flash", **{**MODEL, "rope_base": 500.0})  # the same weights
    (tmp_path / "other").mkdir()
    write_checkpoint(tmp_path / "other", random_model(other), byte_tokenizer())
    assert_refused(*call("embed", tmp_path / "other", *asked[2:], tmp_path / "w.npy")[::2], 2, "unfinished")
    (folder / "texts.jsonl").touch()
    assert_refused(*call(*asked, tmp_path / "w.npy")[::2], 2, "unfinished", "w.npy.part")
    for text in ("my notes", "my notes\n", "my notes\nand more\n"):
        results.part_of(tmp_path / "w.npy").write_text(text)
        assert_refused(*call(*asked, tmp_path / "w.npy")[::2], 2, "unfinished", "w.npy.part")
        assert results.part_of(tmp_path / "w.npy").read_text() == text
    for end in (first, first + 40):  # no row was made, as of a file that could not be read and is mended now
        out.unlink(missing_ok=True)
        results.part_of(out).write_bytes(whole[:end])
        assert call(*asked, out, "--max-tokens", 5)[0] == 0 and len(np.load(out)) == len(TEXTS)


@pytest.mark.parametrize(("texts", "words"), [
    ("hello", "a list of texts is needed: 'hello'; put the text into a list"),
    (["a", 1], "neither a text nor a pair of texts: text 2"), ([None], "text 1"), ([("a",)], "text 1"),
    ([("a", 2)], "text 1"), ([["a", "b", "c"]], "text 1")])
def test_what_is_no_text_is_refused(folder, texts, words):
    model, tokenizer, _ = lineartime.load_model(folder / "model")
    with pytest.raises(UsageError, match=words):
        lineartime.embed(model, tokenizer, texts)


def test_a_signal_keeps_what_is_read(folder, tmp_path, warm_command):
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"text": text * 30}) + "\n" for text in TEXTS * 400))
    line = [*warm_command, "embed", folder / "model", tmp_path / "many.jsonl", "--out", tmp_path / "v.npy"]
    process = subprocess.Popen([*map(str, line)], stderr=subprocess.PIPE, text=True)
    part, deadline = tmp_path / "v.npy.part", time.monotonic() + 100
    while not (part.exists() and part.stat().st_size > 20_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 143 and "what is read is kept; the same command goes on" in err, err
    assert "Traceback" not in err and part.read_bytes().count(b"\n") > 1 and not (tmp_path / "v.npy").exists()


def test_a_bad_row_of_a_file_is_refused_before_any_is_read(folder, tmp_path, call):
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n' * 400 + '{"text": " "}\n')
    for more in ([], ["--out", tmp_path / "v.jsonl"]):
        code, out, err = call("embed", folder / "model", folder / "texts.jsonl", tmp_path / "x.jsonl", *more)
        assert not out and not [*tmp_path.glob("v.jsonl*")]
        assert_refused(code, err, 3, "an empty document", "x.jsonl:401")


def test_rows_of_stdin_before_a_bad_one_are_written(folder, call):
    code, out, err = call("embed", folder / "model", "-", "--stdin", "jsonl", stdin='{"text": "good"}\n{"text": 3}\n')
    assert [json.loads(line)["number"] for line in out.splitlines()] == [1]
    assert_refused(code, err, 3, "not a string", "stdin:2")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stdin_is_answered_while_it_is_open_and_a_signal_ends_the_waiting(folder, warm_command, number):
    line = [*warm_command, "embed", folder / "model", "-", "--stdin", "jsonl"]
    process = subprocess.Popen([*map(str, line)], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)

    def answered():
        assert select.select([process.stdout], [], [], 30)[0], "no answer"
        return json.loads(process.stdout.readline())["number"]

    with process.stdin, process.stdout, process.stderr:
        process.stdin.write(b'{"text": "one"}\n{"text": "two"}\n{"text": "thr')
        assert [answered(), answered()] == [1, 2]
        process.stdin.write(b'ee"}\n')
        assert answered() == 3
        process.send_signal(number)
        process.wait(30)
        err = process.stderr.read().decode()
    assert process.returncode == 128 + number and "error: " not in err and "Traceback" not in err, err
    assert sum(line.startswith("stopped by ") for line in err.splitlines()) == 1


def test_bad_input_is_one_line(folder, tmp_path, call):
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "x.txt").write_text("x")
    os.mkdir(tmp_path / "no-model")
    model = folder / "model"
    for arguments, code, words in (
            ([tmp_path / "none", tmp_path / "x.txt"], 2, "no weights here"),
            ([tmp_path / "no-model", tmp_path / "x.txt"], 2, "not a run"),
            ([model, tmp_path / "blank.txt"], 3, "an empty document"),
            ([model, tmp_path / "x.txt", tmp_path / "x.txt"], 2, "the same input twice"),
            ([model, tmp_path / "x.txt", f"{tmp_path}/./x.txt"], 2, "the same input twice"),
            ([model, tmp_path / "no-model", "--out", tmp_path / "no-model" / "v.npy"], 2, "inside an input folder"),
            ([model, "-"], 3, "nothing on stdin"),
            ([model, tmp_path / "x.txt", "--out", tmp_path / "v.csv"], 2, ".jsonl, .parquet, .npy"),
            ([model, tmp_path / "x.txt", "--out", tmp_path / "no" / "v.npy"], 2, "there is no such folder"),
            ([model, tmp_path / "x.txt", "--max-tokens", 0], 2, "max_tokens = 0"),
            ([model, tmp_path / "x.txt", "--precision", "float16"], 2, "precision"),
            ([model, tmp_path / "x.txt", "--device", "tpu"], 2, "unknown device")):
        assert_refused(*call("embed", *arguments)[::2], code, words)
