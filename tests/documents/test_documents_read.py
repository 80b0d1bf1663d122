"""Reading documents and labels from every kind of file, in order; wrong ones are refused with their place."""

import json
import sys

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from lineartime.documents.examples import Fields, read_examples
from lineartime.errors import DataError, UsageError

ROWS = [{"text": "one, two", "label": "a"}, {"text": 'a "word"\nof it', "label": "b"}, {"text": "é", "label": "a"}]


def write_rows(path, rows=ROWS):
    if path.name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if path.name.endswith(".csv"):
        cells = [list(rows[0]), *([str(value).replace('"', '""') for value in row.values()] for row in rows)]
        text = "".join(",".join(f'"{cell}"' for cell in row) + "\r\n" for row in cells)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(text.encode())
    return path


def read(*names, fields=None, labels="one"):
    return [(example.text, example.second, example.label) for example in read_examples(names, fields, labels)]


@pytest.mark.parametrize("kind", [None, pyarrow.string(), pyarrow.string_view(), pyarrow.large_string(),
                                  pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_records(tmp_path, kind):
    """Of a table, and of every type of text in parquet."""
    path = write_rows(tmp_path / ("x.parquet" if kind else "x.csv"))
    if kind:
        parquet.write_table(parquet.read_table(path).cast(pyarrow.schema({"text": kind, "label": kind})), path)
    assert read(path) == [(row["text"], None, row["label"]) for row in ROWS]
    assert read(path, fields=Fields("label", "text"), labels=None) == [
        (row["label"], row["text"], None) for row in ROWS]
    assert [(example.file, example.number) for example in read_examples([path])] == [(str(path), n) for n in (1, 2, 3)]
    with pytest.raises(DataError, match=r"'title'.*text"):
        read(path, fields=Fields("title"))
    with pytest.raises(DataError, match=r"'class'.*text"):
        read(path, fields=Fields(label="class"))


def test_a_folder_by_label(tmp_path, caplog):
    for name in ("b/2.txt", "a/deep/1.md", "a/0.txt", "a/.hidden.txt", "a/cover.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert read(tmp_path) == [("text of a/0.txt", None, "a"), ("text of a/deep/1.md", None, "a"),
                              ("text of b/2.txt", None, "b")]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "a/cover.png (1 files)" in caplog.text
    (tmp_path / "c.txt").write_text("at the top")
    assert read(tmp_path, labels=None)[-1] == ("at the top", None, None)
    with pytest.raises(DataError, match=r"no label: .*c.txt; put it into a folder"):
        read(tmp_path)
    assert read(tmp_path / "a" / "**" / "*.*t*", labels=None) == read(tmp_path / "a" / "0.txt", labels=None)


@pytest.mark.parametrize(("labels", "given", "read_as"), [
    ("one", "x", "x"), ("one", 3, "3"), ("one", True, "True"), ("one", " x ", "x"),
    ("several", ["b", "a", "b"], ("b", "a")), ("several", "b;a", ("b", "a")), ("several", [], ()),
    ("several", 3, "3"), ("number", 1.5, 1.5), ("number", "-2", -2.0), ("one", "cafe\u0301", "caf\u00e9")])
def test_labels(tmp_path, labels, given, read_as):
    path = write_rows(tmp_path / "x.jsonl", [{"text": "t", "label": given}])
    assert read(path, labels=labels) == [("t", None, read_as)]


@pytest.mark.parametrize(("labels", "given", "words"), [
    ("one", None, "no label"), ("one", "", "no label"), ("one", "  ", "no class"), ("one", 1.5, "no class"),
    ("several", None, "no label"), ("several", ["a", None], "no class"), ("several", "a;;b", "no class"),
    ("number", "x", "no number"), ("number", True, "no number"), ("number", "nan", "no number"),
    ("number", 10**400, "no number")])
def test_wrong_labels_are_refused_with_their_place(tmp_path, labels, given, words):
    path = write_rows(tmp_path / "x.jsonl", [{"text": "t", "label": "1"}, {"text": "t", "label": given}])
    with pytest.raises(DataError, match=f"{words}: .*x.jsonl:2"):
        read(path, labels=labels)


@pytest.mark.parametrize(("name", "content", "words"), [
    ("x.csv", "text,label\n", "no documents"), ("x.csv", "text,text\na,b\n", "the same column twice"),
    ("x.csv", 'text,label\n"a,b\n', "not valid CSV"),
    ("x.csv", 'text,label\n\n"a\nb",c\n\n"d\ne"\n', "a row of another length: .*x.csv:6;"),
    ("x.csv", b"text,label\nab,c\ncaf\xe9,b\n" + b"d,e\n" * 9999, "not valid UTF-8: .*x.csv:3; save it as UTF-8"),
    ("x.jsonl", '{"text": "a", "label": "b"}\n{"text": " ", "label": "b"}\n', "an empty document: .*x.jsonl:2"),
    ("x.jsonl", "", "no documents: .*x.jsonl; take it out")])
def test_damaged_files_are_refused_with_their_place(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        read(path)


def test_a_csv_whose_last_line_has_no_end_is_a_warning(tmp_path, caplog):
    (tmp_path / "cut.csv").write_text("text,label\na,b\nc,d")
    assert read(tmp_path / "cut.csv")[0] == ("a", None, "b")
    assert caplog.messages == [f"the last line has no end, so the file may be cut: {tmp_path}/cut.csv:3: 'c,d'"]


def test_inputs_that_are_none(tmp_path):
    (tmp_path / "x.docx").write_text("x")
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, error, words in (("x.docx", UsageError, "unknown kind of file"),
                               ("y.txt", DataError, "no such file or folder"), ("empty", DataError, "nothing to read"),
                               ("*.csv", DataError, "no such file or folder"), ("x.txt", DataError, "no label")):
        with pytest.raises(error, match=words):
            read(tmp_path / name)
    with pytest.raises(UsageError, match="no pairs"):
        read(tmp_path / "x.txt", fields=Fields(pair="b"), labels=None)


def test_what_is_wrong_in_several_files_is_said_at_once(tmp_path):
    for i in range(12):
        (tmp_path / f"{i:02}.jsonl").write_text('{"text": "a"}\n' + '{"text": " "}\n{' * (i != 5))
    with pytest.raises(DataError, match=r"11 files cannot be read: .*00.jsonl:2; .* \| .*10.jsonl:2.* and 1 more$"):
        read(tmp_path, labels=None)


def test_a_store(tmp_path):
    store = fsspec.filesystem("memory")
    for name, text in (("a/0.txt", "in a"), ("b/1.txt", "in b"), (".x/2.txt", "hidden")):
        store.pipe_file(f"/labelled/{name}", text.encode())
    assert read("memory://labelled") == [("in a", None, "a"), ("in b", None, "b")]
    assert read("memory://labelled/b/*.txt", labels=None) == [("in b", None, None)]
    store.pipe_file("/rows.parquet", write_rows(tmp_path / "x.parquet").read_bytes())
    assert read("memory://rows.parquet") == read(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"cannot read: memory://no\.txt; no such file"):
        read("memory://no.txt")


def test_another_encoding(tmp_path):
    (tmp_path / "x.csv").write_bytes("text,label\ncaf\u00e9,th\u00e9\n".encode("latin-1"))
    assert read(tmp_path / "x.csv", fields=Fields(encoding="latin-1")) == [("caf\u00e9", None, "th\u00e9")]
    with pytest.raises(UsageError, match="unknown encoding: latin-99"):
        Fields(encoding="latin-99")


@pytest.mark.parametrize(("kind", "text", "found"), [
    ("text", "\ufeffwhole\ntext", ["whole\ntext"]), ("jsonl", '{"text": "a"}\n\n{"text": "b"}', ["a", "b"]),
    ("text", "", "nothing on stdin"), ("text", " ", "an empty document: stdin"), ("jsonl", "\n{", "stdin:2"),
    ("text", "x" * 99, "the text is too large: stdin; at most 64 bytes")])
def test_stdin(tmp_path, monkeypatch, kind, text, found):
    monkeypatch.setattr("lineartime.documents.examples.MAX_STDIN", 64)
    (tmp_path / "stdin").write_text(text, encoding="utf-8")
    with (tmp_path / "stdin").open(encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        if isinstance(found, list):
            assert [each[0] for each in read("-", fields=Fields(stdin=kind), labels=None)] == found
            return
        with pytest.raises(DataError, match=found):
            read("-", fields=Fields(stdin=kind), labels=None)


def test_an_unknown_kind_of_stdin():
    with pytest.raises(UsageError, match=r"unknown kind of stdin: json; did you mean jsonl\?"):
        Fields(stdin="json")
