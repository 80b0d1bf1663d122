"""Documents from files, and files into splits; what is wrong is refused with its place."""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import sys

import fsspec
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lineartime.base.errors import DataError, UsageError
from lineartime.data.read_text import cut_pieces, read_pieces, read_small
from lineartime.data.sources import find_sources
from lineartime.data.tokenizer import train_tokenizer
from text_files import make

DOCUMENTS = ["One line.\r\nAnother\u2028line, naïve.\n", " ", "東京 \U0001f600 <|endoftext|>\n\n", "x" * 10]


def documents(path):
    texts = [""]
    for text, last in read_pieces(path):
        texts[-1] += text
        texts += [""] * last
    assert texts.pop() == ""
    return texts


def packed(content, name):
    """Bytes as a file of this name holds them."""
    if name.endswith(".zst"):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return packers.get(name[name.rfind("."):], bytes)(content)


def table(texts, delimiter=","):
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows([("id", "text"), *enumerate(texts)])
    return file.getvalue()


LINES = "".join(json.dumps({"id": i, "text": text}) + "\r\n\n  \n" for i, text in enumerate(DOCUMENTS))
KINDS = {"a.jsonl": LINES, "A.JSONL.GZ": LINES, "a.json": LINES, "a.json.gz": LINES, "a.jsonl.zst": LINES,
         "a.jsonl.bz2": LINES, "a.csv": table(DOCUMENTS), "a.tsv.xz": "\r\n\n" + table(DOCUMENTS, "\t")}


@pytest.mark.parametrize("name", [*KINDS, "a.parquet"])
def test_documents_of_every_kind(tmp_path, name):
    make(tmp_path, {"a.parquet": DOCUMENTS})
    if name in KINDS:
        (tmp_path / name).write_bytes(packed(("\ufeff" + KINDS[name]).encode(), name.lower()))
    assert documents(tmp_path / name) == [DOCUMENTS[0], "", DOCUMENTS[2], DOCUMENTS[3]]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.txt.bz2", "a::b.md.xz", "a.txt.zst"])
def test_a_text_file_of_every_kind_is_one_document(tmp_path, name):
    for text in ("Naïve.\r\n" * 9, "é" * 700_001, "\ufeff <|endoftext|>\n\n"):
        (tmp_path / name).write_bytes(packed(("\ufeff" + text).encode(), name))
        assert documents(tmp_path / name) == [text]
    (tmp_path / name).write_bytes(b"")
    assert documents(tmp_path / name) == []


@pytest.mark.parametrize("name", ["a.txt", "a.gz", "memory://small/a.zst", "-"])
def test_a_small_text_comes_from_anywhere(tmp_path, monkeypatch, name):
    path = name if "://" in name else str(tmp_path / name)
    for text, fault in (("\ufeffnaïve\r\n", ""), ("\ufeff\udcff", ", byte 3; convert it"), ("x" * 99, "64 bytes")):
        with fsspec.open(path, "wb") as file:
            file.write(packed(text.encode(errors="surrogateescape"), name))
        with fsspec.open(path, "rb") as file:
            monkeypatch.setattr(sys, "stdin", file)
            with pytest.raises(DataError, match=fault) if fault else contextlib.nullcontext():
                assert read_small("-" if name == "-" else path, 64) == "naïve\r\n"
    with open("/dev/zero", "rb") as endless, pytest.raises(DataError, match="too large: stdin; at most 64 bytes"):
        monkeypatch.setattr(sys, "stdin", endless)
        read_small("-", 64)


PLAIN = st.sampled_from([" ", "\n", "  ", "   ", "\r\n", "\n\n", "\n\n\n", "\u3000 ", "\u2028 ", "\x85\n", "\t\t "])
ODD = st.sampled_from(["\t", "\x1c", " \x1c", "\xa0", " \u3000", ""])
LETTER = st.sampled_from("aZé東1,.'“\U0001f600\u0301")
WORD = st.sampled_from(["it's", "don't"]) | st.text(LETTER, min_size=1, max_size=6)
PROSE = st.lists(st.tuples(WORD, ODD, WORD, PLAIN).map("".join), min_size=1, max_size=40).map("".join)
TOKENIZER = train_tokenizer(["it's the aZ don't 1, 2. 東東 \n\n\n the\r\n   the\t\tit's .\x1c, ,\x1c. '\x1c'"] * 4, 330)


@given(PROSE, st.integers(20, 60))
@settings(max_examples=300)
def test_pieces_have_the_tokens_of_the_whole(text, size):
    pieces = [piece.text for piece in cut_pieces([text], size)]
    assert "".join(pieces) == text
    assert all(len(piece) <= size + 1 for piece in pieces)
    assert [i for piece in pieces for i in TOKENIZER.encode(piece)] == TOKENIZER.encode(text)


@given(st.text(max_size=200), st.integers(2, 50), st.lists(st.integers(0, 200)))
def test_pieces_do_not_depend_on_the_blocks_they_come_in(text, size, cuts):
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    blocks = [text[a:b] for a, b in itertools.pairwise(bounds)]
    pieces = list(cut_pieces(blocks, size))
    assert pieces == list(cut_pieces([text], size))
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def parquet_of(**columns):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink, compression="none", use_dictionary=False)
    return sink.getvalue().to_pybytes()


GOOD = b'{"text": "good"}\n'
FAULTS = {
    "UTF-8 cut at a block": ("a.txt", b"x" * (2**20 - 1) + b"\xc3" + b"(", f"not valid UTF-8: {{}}, byte {2**20 - 1}"),
    "UTF-8 cut at the end": ("a.txt", "xé".encode()[:-1],
                             "not valid UTF-8: {0}, byte 1; convert it: iconv -f latin1 -t utf-8 {0}"),
    "a NUL": ("a.txt", b"x" * 9 + bytes(9), "a NUL byte: this is no text: {}, byte 9"),
    "invalid UTF-8 in a line": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "not valid UTF-8: {}:2, byte 10"),
    "bad JSON": ("a.jsonl", GOOD * 2 + b'{"text": "good",}\n', "not valid JSON: {}:3, column 17"),
    "an array of JSON": ("a.json", b'[\n{"text": "x"}\n]\n', "an array of JSON: {0}:1; write each item on a line of "
                         "its own: jq -c .[] {0}"),
    "deep JSON": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", "not valid JSON: {}:2; it is nested too deeply"),
    "no object": ("a.jsonl", GOOD + b'["text"]\n', "not a JSON object: {}:2"),
    "no field": ("a.jsonl", GOOD + b'{"body": "x", "id": 1}\n', "no field 'text': {}:2; it has 'body', 'id'"),
    "field is null": ("a.jsonl", GOOD + b'{"text": null}\n', "field 'text' is not a string: {}:2; make it one"),
    "lone surrogate": ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "a lone surrogate: {}:2"),
    "long line": ("a.jsonl", GOOD + b'{"text": "' + b"x" * 2000 + b'"}\n', "line is too long: {}:2; the limit is 1000"),
    "no CSV": ("a.csv", "id,text\n1,\"a\"b\n", "not valid CSV: {}:2"),
    "a blank in a header": ("a.csv", "id, text\n1, x\n", "it has 'id', ' text'; name it: --text-field ' text'"),
    "capitals in a header": ("a.csv", "id,Text Of\n1,x\n", "it has 'id', 'Text Of'; name it: --text-field 'Text Of'"),
    "semicolons": ("a.csv", "id;text\n1;a, b\n", "not a comma between the columns: {}; it is ';'; save it with"),
    "a short row": ("a.tsv", "id\ttext\n1\ta\n2\n", "a row of another length: {}:3; it has 1 fields; give it 2"),
    "a column twice": ("a.csv", "text,text\n", "the same column twice: {}; text, text"),
    "invalid UTF-8 in a table": ("a.csv", b"text\na\n\xff\n", "not valid UTF-8: {}:3; convert it"),
    "a NUL in a table": ("a.csv", b"text\na\0", "a NUL byte: this is no text: {}:2"),
    "no bzip2": ("a.jsonl.bz2", GOOD, "damaged .bz2 file: {}"),
    "cut zstd": ("a.txt.zst", packed(GOOD * 99, ".zst")[:-3], "damaged .zst file: {}"),
    "cut gzip": ("a.json.gz", gzip.compress(GOOD * 9)[:-9], "damaged .gz file: {}"),
    "no parquet": ("a.parquet", b"PAR1 and more", "cannot read as parquet: {}"),
    "no column": ("a.parquet", parquet_of(id=[1], body=["x"]),
                  "no column 'text': {}; it has 'id', 'body'; name one with --text-field"),
    "null in a column": ("a.parquet", parquet_of(text=["x"] * 20 + [None]), "field 'text' is not a string: {}, row 21"),
    "a day beyond Python's years": ("a.parquet", parquet_of(text=pyarrow.array([2**30], pyarrow.date32())),
                                    "cannot read as parquet: {}"),
    "invalid UTF-8 in a column": ("a.parquet", parquet_of(text=["x", "QQQQ"]).replace(b"QQQQ", b"\xff" * 4),
                                  "not valid UTF-8: {}, row 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_with_their_place(tmp_path, fault, monkeypatch):
    name, content, message = FAULTS[fault]
    monkeypatch.setattr("lineartime.data.read_text.MAX_LINE_BYTES", 1000 if fault == "long line" else 1 << 20)
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        list(read_pieces(path))
    assert message.format(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_lies_beside_the_text_of_a_folder_is_left_out(tmp_path, caplog):
    """Files without text, pages about the folder and copies of Wiki-40B, which are counted."""
    caplog.set_level("INFO", "lineartime")
    for number, (names, read) in enumerate([
            (("a.txt", "b.pdf", "d.txt.xz", "c/.e.txt"), ["a.txt", "d.txt.xz"]), (("a.json", "README.md"), ["a.json"]),
            (("notes.txt", "test.tsv", "train.tsv"), ["train.tsv", "test.tsv"]),
            (("a.jsonl.gz", "a.parquet"), ["a.parquet"])]):
        make(tmp_path, {f"{number}/{name}": "text" for name in names})
        assert [source.name for source in find_sources([tmp_path / str(number)], task="wiki40b")] == read
    assert caplog.messages[0] == (f"left out    1 of 3 files in {tmp_path / '0'}: no text, about the folder, or of no "
                                  "split")
    assert [source.name for source in find_sources([tmp_path / "*" / "a.*"])] == [
        "a.txt", "a.json", "a.jsonl.gz", "a.parquet"]


@pytest.mark.parametrize(("names", "expected"), [
    ("b.txt a/z.txt a/10.txt .h.txt .h/c.txt README.md", "train:a/10.txt train:a/z.txt train:b.txt"),
    ("test/3.txt train/2.txt train/1.txt validation/4.txt books.jsonl metadata.csv",
     "train:train/1.txt train:train/2.txt validation:validation/4.txt test:test/3.txt"),
    ("about.jsonl c4-train.00000-of-01024.json.gz c4-validation.00000-of-00008.json.gz c4-test.0.json.gz",
     "train:c4-train.00000-of-01024.json.gz validation:c4-validation.00000-of-00008.json.gz test:c4-test.0.json.gz"),
    ("train.txt valid.txt test-00000-of-00001.txt",
     "train:train.txt validation:valid.txt test:test-00000-of-00001.txt"),
    ("test.txt validation.txt", "train:test.txt train:validation.txt")])
def test_splits_are_found_from_names(tmp_path, names, expected):
    make(tmp_path, dict.fromkeys(names.split(), "x"))
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [f"{source.split}:{source.name}" for source in find_sources([tmp_path])] == expected.split()


def test_splits_of_several_inputs(tmp_path):
    """What one folder holds out is not trained on with another."""
    make(tmp_path, dict.fromkeys(("held/test.txt", "held/val.txt", "all/train.txt", "train/a.txt", "valid/b.txt"), "x"))
    for *inputs, expected in (("held all", "", "", "train:train.txt validation:val.txt test:test.txt"),
                             ("train valid", "", "", "train:a.txt validation:b.txt"), ("valid", "", "", "train:b.txt"),
                             ("all/train.txt", "train", "valid/b.txt", "train:train.txt validation:a.txt test:b.txt")):
        found = find_sources(*([tmp_path / name for name in names.split()] for names in inputs))
        assert [f"{source.split}:{source.name}" for source in found] == expected.split()


@pytest.mark.parametrize("names, inputs, held_out, message", [
    ("train.parquet train.jsonl.gz", ".", "", "has .jsonl.gz and .parquet; name the files of one kind"),
    ("a.txt b.jsonl", ".", "", "has .jsonl and .txt; name the files of one kind"),
    ("en/train/a.txt en/test/b.txt", ".", "", "the splits lie deeper in this folder"),
    ("en/train.txt en/test.txt", ".", "", "the splits lie deeper in this folder"),
    ("a.txt test.txt", ".", "", "this folder has a split and text of none: .*test.txt; rename it or leave it out"),
    ("a.txt test/b.txt", ".", "", "this folder has a split and text of none: .*test/b.txt"),
    ("a.log", "*.log", "", r"unknown kind of file: .*a\.log; it takes \.txt, \.md, \.csv"),
    ("train.txt validation.txt more.txt", "train.txt validation.txt more.txt", "", "more.txt; leave it out, rename"),
    ("held/test.txt a.txt", "held a.txt", "", "a.txt; .*give the others with --validation and --test"),
    ("train.txt validation.txt more.txt", "train.txt validation.txt", "more.txt", "two validation splits"),
    ("more.txt", "more.txt", ".", "the same file twice"),
    ("a.txt books/train/a.txt books/test/b.txt", "a.txt", "books", "this folder has splits of its own"),
])
def test_layouts_that_could_mean_two_things_are_usage_errors(tmp_path, names, inputs, held_out, message):
    make(tmp_path, dict.fromkeys(names.split(), "x"))
    with pytest.raises(UsageError, match=message):
        find_sources([tmp_path / name for name in inputs.split()], [tmp_path / name for name in held_out.split()])


def test_text_of_another_name_is_read_where_it_is_named(tmp_path):
    make(tmp_path, {"a.txt": "One line.\n" * 99, "a.py": "One line.\n" * 99, "a.doc": b"text\0", "a.pdf": b"%PDF\xff",
                    "a.log.gz": "One line.\n" * 99})
    for name in ("a.py", "a.log.gz"):
        source, = find_sources([tmp_path / name])
        assert documents(tmp_path / name) == documents(tmp_path / "a.txt") and source.kind == ".txt"
    for name in ("a.doc", "a.pdf"):
        with pytest.raises(UsageError, match="unknown kind of file"):
            find_sources([tmp_path / name])


def test_what_is_missing_is_named(tmp_path):
    make(tmp_path, {"a.txt": "a", "none/a.rst": "a"})
    with pytest.raises(DataError, match=r"cannot read: .*none.txt; no such file or folder"):
        find_sources([tmp_path / "a.txt"], [], [tmp_path / "none.txt"])
    with pytest.raises(DataError, match="nothing to read in this folder"):
        find_sources([tmp_path / "none"])
