"""Tokens that other programs wrote are prepared as they are, and read by others' trainers."""

import struct

import numpy as np
import pytest
import torch

from lineartime.base.errors import DataError, UsageError
from lineartime.data.prepare import prepare
from lineartime.data.token_files import read_token_file
from lineartime.data.tokenizer import train_tokenizer
from lineartime.data.tokens import Rows, batch_rows
from text_files import contents, make

TEXTS = ["The first document,\n naïve. ", "Another 東京 document", "A third"] * 5


def write_datatrove(path, documents, dtype):
    """As datatrove's DocumentTokenizer writes a file."""
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    ends = np.cumsum([len(ids) for ids in documents])
    path.with_name(f"{path.name}.index").write_bytes(ends.astype("<u8").tobytes())
    path.with_name(f"{path.name}.metadata").write_text(f"some/tokenizer|{dtype[-1]}\n{ends[-1]}\n0 T")


def write_megatron(path, documents, code, dtype):
    """As IndexedDatasetBuilder of Megatron-LM writes a file."""
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    lengths = np.array([len(ids) for ids in documents], "<i4")
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
                                         + lengths.tobytes() + pointers.tobytes()
                                         + np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def test_token_files_give_what_their_text_gives(tmp_path):
    tokenizer = train_tokenizer(TEXTS, 300)
    make(tmp_path, {"a.jsonl": TEXTS, "tokenizer.json": tokenizer.json})
    documents = [np.array([*tokenizer.encode(text), tokenizer.end_of_document]) for text in TEXTS]
    for name in ("two", "four", "int32", "uint16"):
        (tmp_path / name).mkdir()
    write_datatrove(tmp_path / "two/a.ds", documents, "<u2")
    write_datatrove(tmp_path / "four/a.ds", [ids[:-1] for ids in documents], "<u4")
    write_megatron(tmp_path / "int32/a.bin", [np.roll(ids, 1) for ids in documents], 4, "<i4")
    write_megatron(tmp_path / "uint16/a.bin", documents, 8, "<u2")
    how = {"tokenizer": tmp_path / "tokenizer.json", "held_out": 0.2, "jobs": 1}
    expected = prepare([tmp_path / "a.jsonl"], tmp_path / "out", **how)
    for name in ("two", "four", "int32", "uint16"):
        made = prepare([tmp_path / name], tmp_path / f"{name}-out", **how, unit_bytes=100)
        assert made.splits == expected.splits
        assert all(contents(tmp_path / f"{name}-out")[file] == content
                   for file, content in contents(tmp_path / "out").items() if file.endswith(".bin"))


def test_token_files_have_the_splits_of_their_names(tmp_path, caplog):
    """Nothing is said of the indexes beside them."""
    caplog.set_level("INFO", "lineartime")
    write_datatrove(tmp_path / "train.ds", [np.array([5, 6])] * 3, "<u2")
    write_megatron(tmp_path / "validation.bin", [np.array([5, 6])] * 2, 4, "<i4")
    made = prepare(tmp_path, tmp_path / "out", tokenizer="bytes")
    assert {name: split.documents for name, split in made.splits.items()} == {"train": 3, "validation": 2}
    assert not caplog.messages


def test_token_files_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, 300).json)
    write_datatrove(tmp_path / "a.ds", [np.array([5, 600])], "<u2")
    write_datatrove(tmp_path / "c.ds", [np.array([5, 0, 5])], "<u2")
    (tmp_path / "b.bin").write_bytes(b"12")
    with pytest.raises(UsageError, match="token files need the tokenizer that made them"):
        prepare([tmp_path / "a.ds"], tmp_path / "out")
    for name, message in (("a.ds", r"a token outside the vocabulary: .*a\.ds"), ("b.bin", r"cannot read: .*b\.idx"),
                          ("c.ds", r"its end-of-document token out of text: .*c\.ds: '.<")):
        with pytest.raises(DataError, match=message):
            prepare([tmp_path / name], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name, damaged", [("a.ds", "a.ds"), ("a.ds", "a.ds.index"), ("a.bin", "a.bin"),
                                           ("a.bin", "a.idx")])
def test_token_files_that_were_cut_off_are_refused(tmp_path, name, damaged):
    documents = [np.array([1, 2, 3]), np.array([4, 5])]
    write_datatrove(tmp_path / "a.ds", documents, "<u2")
    write_megatron(tmp_path / "a.bin", documents, 4, "<i4")
    whole = (tmp_path / damaged).read_bytes()
    assert [ids.tolist() for ids in read_token_file(tmp_path / name)] == [[1, 2, 3], [4, 5]]
    beyond = struct.pack("<5Q", 2**62, 2**63 - 1, 2**63 + 5, 2**63 + 2**62, 5)  # ends whose differences wrap around
    for content in [whole[:n_bytes] for n_bytes in range(min(len(whole), 42))] + [beyond] * damaged.endswith("index"):
        (tmp_path / damaged).write_bytes(content)
        with pytest.raises(DataError, match="not an index of these tokens"):
            list(read_token_file(tmp_path / name))


def test_rows_for_other_trainers(tmp_path):
    """All tokens in order; documents by their positions; an epoch's order is ours."""
    make(tmp_path, {"a.jsonl": TEXTS})
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer="bytes")
    rows = Rows(tmp_path / "out", "train", 16)
    text = torch.cat([row["input_ids"] for row in torch.utils.data.DataLoader(rows, batch_size=None)])
    assert text.tolist() == rows.stream.read(0, len(rows) * 16).tolist()
    for row in rows:
        assert ((row["position_ids"] == 0) >= (row["input_ids"] == 256)).all() and row["position_ids"][0] == 0
        assert (row["position_ids"].diff()[row["input_ids"][1:] != 256] == 1).all()
        assert torch.equal(row["labels"], row["input_ids"])
    ours = batch_rows(rows.stream, seed=1, step=2, rows_per_step=len(rows), context=16)  # a step is an epoch
    theirs = Rows(tmp_path / "out", "train", 16, seed=1, epoch=2, shifted=False)
    assert [[row["input_ids"][0].item(), *row["labels"].tolist()] for row in theirs] == ours.tolist()
    for context, error in ((0, UsageError), (10**6, DataError)):
        with pytest.raises(error, match=f"context = {context:,}"):
            Rows(tmp_path / "out", "train", context)
