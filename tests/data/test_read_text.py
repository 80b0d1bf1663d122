"""Documents from files, and files into splits; whatever is wrong is refused with the file and its line, row or byte."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import resource
import subprocess
import sys

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lineartime.data.read_text import cut, read_pieces
from lineartime.data.slices import check_file, read_slice
from lineartime.data.splits import find_sources
from lineartime.data.tokenizer import train_tokenizer
from lineartime.errors import DataError, UsageError
from text_files import make

DOCUMENTS = ["One line.\r\nAnother\u2028line, naïve.\n", " ", "東京 \U0001f600 <|endoftext|>\n\n", "x" * 10]


def documents(path, **options):
    texts = [""]
    for text, last, _ in read_pieces(path, **options):
        texts[-1] += text
        texts += [""] * last
    assert texts.pop() == ""
    return texts


def split_names(sources):
    return [(source.split, source.name) for source in sources]


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


LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(DOCUMENTS))
KINDS = {"a.jsonl": LINES, "A.JSONL.GZ": LINES, "a.json": LINES, "a.json.gz": LINES, "a.jsonl.zst": LINES,
         "a.json.bz2": json.dumps([{"text": text} for text in DOCUMENTS], indent=1), "a.csv": table(DOCUMENTS),
         "a.tsv.xz": table(DOCUMENTS, "\t")}


@pytest.mark.parametrize("name", [*KINDS, "a.parquet"])
def test_documents_of_every_kind(tmp_path, name):
    make(tmp_path, {"a.parquet": DOCUMENTS})
    for mark in ("", "\ufeff") if name in KINDS else ():
        (tmp_path / name).write_bytes(packed((mark + KINDS[name]).encode(), name.lower()))
        assert documents(tmp_path / name) == [DOCUMENTS[0], "", DOCUMENTS[2], DOCUMENTS[3]]
    assert documents(tmp_path / name) == [DOCUMENTS[0], "", DOCUMENTS[2], DOCUMENTS[3]]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.txt.bz2", "a.md.xz", "a.txt.zst"])
def test_a_text_file_of_every_kind_is_one_document(tmp_path, name):
    text = "Naïve.\r\n" * 9
    (tmp_path / name).write_bytes(packed(("\ufeff" + text).encode(), name))
    assert documents(tmp_path / name) == [text]
    (tmp_path / name).write_bytes(b"")
    assert documents(tmp_path / name) == []


def test_a_text_file_is_one_document(tmp_path):
    for text in (*DOCUMENTS, "word " * 300_000, "é" * 700_001):
        make(tmp_path, {"a.txt": text})
        assert documents(tmp_path / "a.txt") == [text]


def test_byte_order_mark_and_blank_lines_are_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    make(tmp_path, {"a.txt": mark + b"A" + mark, "a.jsonl": mark + b'{"text": "A"}\r\n\n  \n{"text": "B"}'})
    assert documents(tmp_path / "a.txt") == ["A\ufeff"]
    assert documents(tmp_path / "a.jsonl") == ["A", "B"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.jsonl.gz"])
def test_a_file_can_be_read_from_each_of_its_slices(tmp_path, name, monkeypatch):
    monkeypatch.setattr("lineartime.data.read_text.cut.__defaults__", (40,))
    if name == "a.parquet":
        texts = [f"row {i} é " * (i % 9) for i in range(90)]
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name, row_group_size=7)
    else:
        lines = ["é 東京\n" * 9, " ", "x" * 90] * 9
        make(tmp_path, {name: "\ufeff" + ("One naïve 東京. \n" * 9 + "é" * 300) * 9 if name == "a.txt" else lines})
    pieces = list(read_pieces(tmp_path / name))
    checked = check_file(str(tmp_path / name), "train", {}, 100)
    assert (len(checked.slices) == 1) == name.endswith(".gz")
    read = []
    for one in checked.slices:
        before = read[-1] if read else None
        assert one.in_word == bool(before and not before[1] and not before[0][-1].isspace())
        own = [(text, last) for text, last, _ in read_slice(one, {})]
        assert one.characters == sum(len(text) for text, _ in own)
        read += own
    assert read == [(text, last) for text, last, _ in pieces if text]
    assert checked[2:5] == (sum(last and text != "" for text, last, _ in pieces),
                            sum(text == "" for text, *_ in pieces), sum(len(text) for text, *_ in pieces))


def test_a_line_keeps_its_number_when_reading_begins_later(tmp_path):
    make(tmp_path, {"a.jsonl": '{"text": "first"}\n\n{"text": "second"}\n{"text": 3}\n'})
    first = next(read_pieces(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"not a string: .*a\.jsonl:4"):
        list(read_pieces(tmp_path / "a.jsonl", start=first.next))


def test_the_field_is_a_choice(tmp_path):
    make(tmp_path, {"a.jsonl": '{"body": "A", "text": 1}\n'})
    parquet.write_table(pyarrow.table({"body": pyarrow.array(["A"]).dictionary_encode(), "text": [1]}),
                        tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert documents(tmp_path / name, field="body") == ["A"]


def test_several_gzip_members_and_zero_padding_are_read(tmp_path):
    members = [gzip.compress(b'{"text": "%c"}\n' % letter) for letter in b"AB"]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(members) + b"\0" * 9)
    assert documents(tmp_path / "a.jsonl.gz") == ["A", "B"]


PLAIN = st.sampled_from([" ", "\n", "  ", "   ", "\r\n", "\n\n", "\n\n\n", "\u3000 ", "\u2028 ", "\x85\n", "\t\t "])
ODD = st.sampled_from(["\t", "\x1c", " \x1c", "\xa0", " \u3000", ""])
LETTER = st.sampled_from("aZé東1,.'“\U0001f600\u0301")
WORD = st.sampled_from(["it's", "don't"]) | st.text(LETTER, min_size=1, max_size=6)
PROSE = st.lists(st.tuples(WORD, ODD, WORD, PLAIN).map("".join), min_size=1, max_size=40).map("".join)
TOKENIZER = train_tokenizer(["it's the aZ don't 1, 2. 東東 \n\n\n the\r\n   the\t\tit's .\x1c, ,\x1c. '\x1c'"] * 4, 330)


@given(PROSE, st.integers(20, 60))
@settings(max_examples=300)
def test_pieces_have_the_tokens_of_the_whole(text, size):
    pieces = [piece.text for piece in cut([text], size)]
    assert "".join(pieces) == text
    assert all(len(piece) <= size + 1 for piece in pieces)
    assert [i for piece in pieces for i in TOKENIZER.encode(piece)] == TOKENIZER.encode(text)


@given(st.text(max_size=200), st.integers(2, 50), st.lists(st.integers(0, 200)))
def test_pieces_do_not_depend_on_the_blocks_they_come_in(text, size, cuts):
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    blocks = [text[a:b] for a, b in itertools.pairwise(bounds)]
    pieces = list(cut(blocks, size))
    assert pieces == list(cut([text], size))
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def broken_parquet(column, edit=None):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": column}), sink, compression="none", use_dictionary=False)
    content = sink.getvalue().to_pybytes()
    return edit(content) if edit else content


GOOD = b'{"text": "good"}\n'
FAULTS = {
    "invalid UTF-8": ("a.txt", b"x" * 1_500_000 + b"\xff" + b"y", "not valid UTF-8: {}, byte 1500000"),
    "UTF-8 cut at a block": ("a.txt", b"x" * (2**20 - 1) + b"\xc3" + b"(", f"not valid UTF-8: {{}}, byte {2**20 - 1}"),
    "UTF-8 cut at the end": ("a.txt", "xé".encode()[:-1], "not valid UTF-8: {}, byte 1; save it as UTF-8"),
    "surrogate in UTF-8": ("a.txt", b"ab\xed\xa0\x80", "not valid UTF-8: {}, byte 2"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), "{}, byte "),
    "binary": ("a.txt", b"x" * 1_500_000 + b"\0", "a NUL byte: this is no text: {}, byte 1500000"),
    "invalid UTF-8 in a line": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "not valid UTF-8: {}:2, byte 10"),
    "bad JSON": ("a.jsonl", GOOD * 2 + b'{"text": "good",}\n', "not valid JSON: {}:3, column 17"),
    "half a line": ("a.jsonl", GOOD + b'{"text": "go', "not valid JSON: {}:2"),
    "a name twice": ("a.jsonl", b'{"text": "good", "text": "other"}\n', "not valid JSON: {}:1; a name occurs twice"),
    "huge integer": ("a.jsonl", b'{"text": "good", "n": ' + b"1" * 5000 + b"}\n", "not valid JSON: {}:1"),
    "deep JSON": ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", "not valid JSON: {}:2; it is nested too deeply"),
    "no object": ("a.jsonl", GOOD + b'["text"]\n', "not a JSON object: {}:2"),
    "no field": ("a.jsonl", GOOD + b'{"body": "x", "id": 1}\n', "no field 'text': {}:2; it has 'body', 'id'"),
    "field is null": ("a.jsonl", GOOD + b'{"text": null}\n', "field 'text' is not a string: {}:2; make it one"),
    "field is a list": ("a.jsonl", GOOD + b'{"text": ["x"]}\n', "field 'text' is not a string: {}:2"),
    "lone surrogate": ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "a lone surrogate: {}:2"),
    "long line": ("a.jsonl", GOOD + b'{"text": "' + b"x" * 2000 + b'"}\n', "line is too long: {}:2; the limit is 1000"),
    "no gzip": ("a.raw.json.gz", GOOD, "damaged .gz file: {}; Not a gzipped file"),
    "no bzip2": ("a.jsonl.bz2", GOOD, "damaged .bz2 file: {}"),
    "no xz": ("a.jsonl.xz", GOOD, "damaged .xz file: {}"),
    "no zstd": ("a.txt.zst", GOOD, "damaged .zst file: {}"),
    "cut xz": ("a.txt.xz", lzma.compress(GOOD * 99)[:-9], "damaged .xz file: {}"),
    "cut zstd": ("a.txt.zst", packed(GOOD * 99, ".zst")[:-3], "damaged .zst file: {}"),
    "cut gzip": ("a.raw.json.gz", gzip.compress(GOOD * 9)[:-9], "damaged .gz file: {}"),
    "garbage after gzip": ("a.raw.json.gz", gzip.compress(GOOD) + b"garbage", "damaged .gz file: {}"),
    "bad JSON in gzip": ("a.json.gz", GOOD + b"{", "not valid JSON: {}:2"),
    "no parquet": ("a.parquet", b"PAR1 and more", "cannot read as parquet: {}"),
    "cut parquet": ("a.parquet", broken_parquet(["good"], lambda content: content[:-30]), "cannot read as parquet: {}"),
    "no column": ("a.parquet", broken_parquet(["x"], lambda content: content.replace(b"text", b"body")),
                  "no column 'text': {}; its columns are body"),
    "column of numbers": ("a.parquet", broken_parquet([1]), "field 'text' is not a string: {}, row 1"),
    "null in a column": ("a.parquet", broken_parquet(["x"] * 20 + [None]), "field 'text' is not a string: {}, row 21"),
    "invalid UTF-8 in a column": ("a.parquet", broken_parquet(["x", "QQQQ"], lambda c: c.replace(b"QQQQ", b"\xff" * 4)),
                                  "not valid UTF-8: {}, row 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused_with_their_place(tmp_path, fault):
    name, content, message = FAULTS[fault]
    if name.endswith(".gz") and ".raw." not in name:
        content = gzip.compress(content)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        limit = 1000 if fault == "long line" else 1 << 20
        check_file(str(path), "train", {"max_line_bytes": limit}, 1 << 23)
    assert message.format(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_gzip_never_gives_another_text(tmp_path):
    content = bytearray(gzip.compress(b"".join(b'{"text": "document %d"}\n' % i for i in range(200))))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    whole = documents(path)
    for byte in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[byte] ^= 1 << byte % 8
        path.write_bytes(damaged)
        try:
            check_file(str(path), "train", {}, 1 << 23)
        except DataError:
            continue
        assert documents(path) == whole, "only what the header says besides may change unnoticed"


def test_what_is_no_regular_file_is_refused_without_being_opened(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(DataError, match="not a regular file"):
            find_sources([path])
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="not a regular file"):
        find_sources([tmp_path / "zero.txt"])


READ = """
import pathlib, sys
from lineartime.errors import DataError
from lineartime.data.read_text import read_pieces
for name in sys.argv[1:]:
    try:
        list(read_pieces(pathlib.Path(name)))
    except DataError as e:
        print(e)
"""


def test_a_giant_line_is_refused_in_little_memory(tmp_path):
    """A sparse gigabyte of NUL, as a line and as a text, in a process that may have half of that."""
    for name in ("a.jsonl", "a.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)
    run = subprocess.run([sys.executable, "-c", READ, tmp_path / "a.jsonl", tmp_path / "a.txt"], text=True, timeout=30,
                         stdout=subprocess.PIPE, check=True,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20)))
    assert run.stdout.splitlines() == [f"line is too long: {tmp_path}/a.jsonl:1; the limit is {64 << 20} bytes",
                                       f"a NUL byte: this is no text: {tmp_path}/a.txt, byte 0"]


def test_a_folder_is_read_by_its_first_kinds(tmp_path):
    """What lies beside rows or books is left out: another kind of table, settings, pages about the folder."""
    for number, (names, read) in enumerate([
            (("a.txt", "b.csv", "c.json", "d.txt.xz"), ["a.txt"]),
            (("a.jsonl", "b.md", "c.txt.gz", "d.tsv"), ["a.jsonl"]),
            (("README.md", "a.csv", "b.csv"), ["a.csv", "b.csv"]), (("a.json", "b.md"), ["b.md"]),
            (("README.md", "LICENSE.md"), ["LICENSE.md", "README.md"]), (("a.json",), ["a.json"])]):
        make(tmp_path, {f"{number}/{name}": "text" for name in names})
        assert [source.name for source in find_sources([tmp_path / str(number)])] == read
    assert [source.name for source in find_sources([tmp_path / "*" / "*.csv"])] == ["b.csv", "a.csv", "b.csv"]


def test_a_folder_of_books_is_train_in_the_order_of_names(tmp_path):
    make(tmp_path, {"b.txt": "b", "a/z.txt": "z", "a/10.txt": "1", ".h.txt": "h", ".h/c.txt": "c", "README.md": "r"})
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert split_names(find_sources([tmp_path])) == [("train", "a/10.txt"), ("train", "a/z.txt"), ("train", "b.txt")]


def test_subfolders_are_splits(tmp_path):
    make(tmp_path, {"test/3.txt": "3", "train/2.txt": "2", "train/1.txt": "1", "validation/4.txt": "4",
                    "books.jsonl": ["metadata"], "metadata.csv": "m"})
    assert split_names(find_sources([tmp_path])) == [("train", "train/1.txt"), ("train", "train/2.txt"),
                                                     ("validation", "validation/4.txt"), ("test", "test/3.txt")]


@pytest.mark.parametrize("names", [
    ("train.parquet", "validation.parquet", "test.parquet"),
    ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    ("c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz", "c4-test.0.json.gz"),
    ("train.txt", "valid.txt", "test.txt"),
])
def test_files_are_splits_as_a_folder_and_by_name(tmp_path, names):
    make(tmp_path, {name: ["x"] if name[-1] != "t" or name.endswith("parquet") else "x" for name in names})
    make(tmp_path, {"about.jsonl": ["metadata"]})
    expected = list(zip(("train", "validation", "test"), names, strict=True))
    assert split_names(find_sources([tmp_path])) == expected
    assert split_names(find_sources([tmp_path / name for name in reversed(names)])) == expected


def test_names_mean_nothing_without_a_train(tmp_path):
    make(tmp_path, {"test.txt": "t", "night-train.txt": "n", "other/x.txt": "x"})
    assert split_names(find_sources([tmp_path / "test.txt"])) == [("train", "test.txt")]
    assert split_names(find_sources([tmp_path / "night-train.txt", tmp_path / "other"])) == [
        ("train", "night-train.txt"), ("train", "x.txt")]


def test_validation_and_test_can_be_named(tmp_path):
    make(tmp_path, {"train.txt": "t", "v/a.txt": "a", "v/b.txt": "b", "dev/c.jsonl": ["c"]})
    assert split_names(find_sources([tmp_path / "train.txt"], [tmp_path / "v"], [tmp_path / "dev" / "c.jsonl"])) == [
        ("train", "train.txt"), ("validation", "a.txt"), ("validation", "b.txt"), ("test", "c.jsonl")]


LAYOUT_FAULTS = {
    "two kinds": ({"train.parquet": ["a"], "train.jsonl.gz": ["a"]}, ".", "has .jsonl.gz and .parquet; name the files"),
    "two kinds of books": ({"a.txt": "a", "b.jsonl": ["b"]}, ".", "has .jsonl and .txt; name the files of one kind"),
    "a stray file": ({"train.txt": "a", "validation.txt": "v", "more.txt": "m"}, ".", "belongs to no split"),
    "night train": ({"night-train.txt": "a", "dubliners.txt": "d"}, ".", "dubliners.txt; leave it out"),
    "deeper files": ({"en/train.parquet": ["a"], "en/test.parquet": ["t"]}, ".", "the splits lie deeper"),
    "deeper folders": ({"en/train/a.txt": "a", "en/test/b.txt": "b"}, ".", "the splits lie deeper in this folder"),
    "unknown kind": ({"a.doc": "a"}, "a.doc", "unknown kind of file: {}; it takes .txt, .md, .csv"),
}


@pytest.mark.parametrize("fault", LAYOUT_FAULTS)
def test_layouts_that_could_mean_two_things_are_usage_errors(tmp_path, fault):
    files, name, message = LAYOUT_FAULTS[fault]
    make(tmp_path, files)
    with pytest.raises(UsageError) as caught:
        find_sources([tmp_path / name])
    assert message.format(tmp_path / name) in str(caught.value)


def test_inputs_that_contradict_each_other_are_usage_errors(tmp_path):
    make(tmp_path, {"train.txt": "a", "validation.txt": "v", "more.txt": "m", "link.txt": "l", "books/train/a.txt": "a",
                    "books/test/b.txt": "b"})
    (tmp_path / "link.txt").unlink()
    (tmp_path / "link.txt").symlink_to("more.txt")
    train, validation, more, link = (tmp_path / f"{name}.txt" for name in ("train", "validation", "more", "link"))
    for inputs, held_out, message in (([train, validation, more], [], "more.txt; leave it out or rename it"),
                                      ([train, validation], [more], "two validation splits"),
                                      ([more, link], [], "the same file twice"),
                                      ([more], [more], "the same file twice"),
                                      ([more], [tmp_path / "books"], "this folder has splits of its own")):
        with pytest.raises(UsageError, match=message):
            find_sources(inputs, held_out)


def test_what_is_missing_is_named(tmp_path):
    make(tmp_path, {"a.txt": "a"})
    for arguments in ([["none.txt"]], [["a.txt"], ["none.txt"]], [["a.txt"], [], ["none.txt"]]):
        with pytest.raises(DataError, match=r"cannot read the input: .*none.txt; No such file or directory"):
            find_sources(*([tmp_path / name for name in names] for names in arguments))


def test_a_folder_with_nothing_to_read_is_refused(tmp_path):
    make(tmp_path, {"a.rst": "a", "sub/b.doc": "b"})
    with pytest.raises(DataError, match="nothing to read in this folder"):
        find_sources([tmp_path])
