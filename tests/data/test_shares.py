"""Text prepared in shares and in stores: the bytes of one process, whatever does the work; and what is held out."""

import random
from unittest.mock import DEFAULT, Mock

import fsspec
import pytest

from lineartime.data import read_text, shares
from lineartime.data.prepare import prepare
from lineartime.data.prepare_config import SAMPLE, PrepareSettings
from lineartime.data.tokens import open_split, verify_data
from lineartime.errors import DataError, UsageError
from text_files import contents, documents_of, make


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A folder of a store in memory, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # as good as unset
    monkeypatch.setenv("HOME", str(tmp_path))
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return files


def test_any_number_of_shares_in_any_order_gives_the_same_bytes(store, tmp_path):
    """A share that is done is done again without a difference; one that was cut off is made whole."""
    text = SAMPLE.read_text(encoding="utf-8")[:60_000]
    make(tmp_path, {"a.txt": text[:30_000], "b.jsonl": text[30_000:].split("\n\n")})
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]
    prepare(inputs, tmp_path / "one", vocab_size=300, held_out=0.2)
    asked = PrepareSettings(tuple(inputs), "memory://out", vocab_size=300, held_out=0.2, unit_bytes=5000)
    draw = random.Random(0)
    for n in (1, 3, 20):
        work, out = f"memory://work-{n}", f"memory://out-{n}"
        shares.plan(asked, work)
        for k in draw.sample(range(n), n):
            shares.encode(work, k, n)
        damaged = f"/work-{n}/units/00003.ids"
        store.pipe(damaged, store.cat(damaged)[:-2])
        with pytest.raises(DataError, match="damaged file"):
            shares.join(work, out)
        shares.encode(work, 0, 2)
        shares.encode(work, 1, 2)
        shares.join(work, out)
        expected = contents(tmp_path / "one")
        assert {name: store.cat(f"/out-{n}/{name}") for name in expected} == expected
    other = PrepareSettings(tuple(inputs), "memory://out", tokenizer="bytes", unit_bytes=5000)
    with pytest.raises(UsageError, match="the work of other text or settings"):
        shares.plan(other, "memory://work-3")
    shares.plan(other, "memory://work-3", anew=True)
    with pytest.raises(DataError, match="made from other text or another tokenizer"):
        shares.join("memory://work-3", "memory://out-4")


def test_text_and_tokens_may_be_in_a_store(store, tmp_path):
    make(tmp_path, {"books/a.txt": "One book,\n naïve.\n", "books/b.txt": "Another book"})
    store.put(str(tmp_path / "books"), "/books", recursive=True)
    own = prepare([tmp_path / "books"], tmp_path / "own", tokenizer="bytes", held_out=0.5)
    assert prepare(["memory://books"], "memory://out", tokenizer="bytes", held_out=0.5).sha256 == own.sha256
    assert prepare(["memory://books/*.txt"], "memory://out", tokenizer="bytes", held_out=0.5).already_prepared
    assert sorted(store.ls("/", detail=False)) == ["/books", "/out"]
    stream = open_split("memory://out", "train")
    assert stream.read(0, len(stream)).tolist() == [256, *"One book,\n naïve.\n".encode(), 256]
    assert verify_data("memory://out").sha256 == own.sha256
    assert prepare(["memory://books"], tmp_path / "b", tokenizer="memory://out").tokenizer == own.tokenizer
    with pytest.raises(UsageError, match=r"no tokenizer\.json here: memory://books"):
        prepare(["memory://books"], tmp_path / "none", tokenizer="memory://books")
    store.pipe("/out/train-00000.bin", b"x")
    with pytest.raises(DataError, match=r"damaged or missing file: memory://out/train-00000\.bin"):
        verify_data("memory://out")
    with pytest.raises(DataError, match=r"cannot read: memory://none\.txt; no such file"):
        prepare(["memory://none.txt"], tmp_path / "none", tokenizer="bytes")
    assert [path.name for path in (tmp_path / ".cache").iterdir()] == ["lineartime"]


def test_equal_documents_stay_on_one_side(tmp_path):
    draw = random.Random(1)
    texts = [f"document {draw.randrange(10, 30)}" for _ in range(60)]
    make(tmp_path, {"a.jsonl": texts[:30], "b.jsonl": texts[30:]})
    prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", tokenizer="bytes", held_out=0.2)
    train, held = documents_of(tmp_path / "out"), documents_of(tmp_path / "out", "validation")
    assert sorted(train + held) == sorted(texts) and not {*train} & {*held} and len(held) >= 12


def test_what_is_wrong_in_several_files_is_said_at_once(tmp_path):
    make(tmp_path, {f"text/{i:02d}.jsonl": '{"content": "x"}\n' if i else ["good"] for i in range(13)})
    with pytest.raises(DataError) as caught:
        prepare([tmp_path / "text"], tmp_path / "out", tokenizer="bytes")
    message = str(caught.value)
    assert message.startswith("12 files cannot be read: no field 'text': ") and message.endswith("and 2 more")
    assert message.count("--text-field content") == 10 and not (tmp_path / "out").exists()


def test_a_share_that_could_not_read_a_file_goes_on_when_it_can(tmp_path, monkeypatch):
    """A unit that was only read, because one before it was wrong, is not taken for done."""
    make(tmp_path, {"a.txt": "line\n" * 60})
    work, asked = tmp_path / "work", PrepareSettings((str(tmp_path / "a.txt"),), "-", tokenizer="bytes", unit_bytes=60)
    shares.plan(asked, work)
    answers = [DEFAULT, OSError(5, "no answer"), *[DEFAULT] * 9]
    with monkeypatch.context() as patch:
        patch.setattr(read_text, "unpacked", Mock(wraps=read_text.unpacked, side_effect=answers))
        shares.encode(work)
    with pytest.raises(DataError, match=r"cannot read: .*a\.txt; no answer"):
        shares.join(work, tmp_path / "out")
    shares.encode(work)
    make(tmp_path, {"whole/tokenizer.json": "of a killed call", "other/tokenizer.json": "", "other/run.json": ""})
    assert shares.join(work, tmp_path / "whole").splits["train"].bytes == 300
    for name, what in (("other", "run.json"), ("whole", "manifest.json")):
        with pytest.raises(UsageError, match=f"the output has other files: .*{name}, {what}; choose another"):
            shares.join(work, tmp_path / name)


@pytest.mark.parametrize("name, text", [
    ("a.txt", "naïve"), ("a.csv", "text\nnaïve\n"), ("a.jsonl", '{"text": "naïve"}')])
def test_text_in_another_encoding(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    for encoding in ("utf-8", "UTF-8"):
        with pytest.raises(DataError, match=r"not valid UTF-8: .*a\.(csv:2|txt, byte|jsonl:1).*--encoding latin-1"):
            prepare([tmp_path / name], tmp_path / "out", tokenizer="bytes", encoding=encoding)
    with pytest.raises(DataError, match="UTF-16"):  # it has no byte order mark
        prepare([tmp_path / name], tmp_path / "out", tokenizer="bytes", encoding="utf-16")
    for encoding, written in (("latin-1", "latin-1"), ("U16", "utf-16"), ("UTF8", "utf-8-sig")):
        (tmp_path / name).write_bytes(text.encode(written))
        prepare([tmp_path / name], tmp_path / encoding, tokenizer="bytes", encoding=encoding)
        assert documents_of(tmp_path / encoding) == ["naïve"]
    assert prepare([tmp_path / name], tmp_path / "UTF8", tokenizer="bytes").already_prepared
    for wrong in ("latin-99", "hex"):
        with pytest.raises(UsageError, match=f"unknown encoding: {wrong}"):
            prepare([tmp_path / name], tmp_path / "out", tokenizer="bytes", encoding=wrong)
