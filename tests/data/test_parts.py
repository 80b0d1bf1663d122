"""Parts prepared apart and joined are what one process makes; parts that do not belong together are refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Call, assert_refused
from command_line import call as call  # a fixture
from lineartime.data.prepare import SAMPLE, join, prepare
from lineartime.data.tokenizer import train_tokenizer
from lineartime.errors import DataError, UsageError
from text_files import contents, make

OPTIONS = {"held_out": 0.3, "shard_tokens": 3000}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files of several kinds and sizes, among them a blank one, and a tokenizer."""
    root, text = tmp_path_factory.mktemp("texts"), SAMPLE.read_text(encoding="utf-8")
    make(root, {"a.txt": text[:9000], "b.jsonl": [text[i:i + 500] for i in range(9000, 20_000, 500)], "c.txt": " \n",
                "d.parquet": [text[20_000:21_000], "", text[21_000:22_000]], "e.txt": text[22_000:23_000],
                "f.json.gz": [text[23_000:30_000], "last"], "test.txt": text[30_000:31_000]})
    (root / "tokenizer.json").write_text(train_tokenizer([text[:20_000]], 400).json, encoding="utf-8")
    return root


def inputs(texts: Path) -> dict[str, object]:
    return {"inputs": sorted(texts.glob("[a-f].*")), "test": [texts / "test.txt"],
            "tokenizer": texts / "tokenizer.json", **OPTIONS}


def make_parts(texts: Path, out: Path, of: int, **more: object) -> list[Path]:
    folders = [out / f"part{number}" for number in range(1, of + 1)]
    for number, folder in enumerate(folders, 1):
        prepare(out=folder, part=f"{number}/{of}", **inputs(texts) | more)
    return folders


@pytest.fixture(scope="module")
def parts(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_parts(texts, tmp_path_factory.mktemp("parts"), 3)


def test_joined_parts_are_what_one_process_makes(texts: Path, tmp_path: Path) -> None:
    whole = prepare(out=tmp_path / "whole", **inputs(texts))
    for of, unit_characters, jobs in ((2, 3000, 2), (7, 700, 1)):
        folders = make_parts(texts, tmp_path / f"{of}", of, unit_characters=unit_characters, jobs=jobs)
        assert join(folders[::-1], tmp_path / f"{of}" / "out").sha256 == whole.sha256
        assert contents(tmp_path / f"{of}" / "out") == contents(tmp_path / "whole")
    assert join(folders, tmp_path / "7" / "out").already_prepared
    assert prepare(out=tmp_path / "7" / "out", **inputs(texts)).already_prepared


def test_a_part_prepared_again_is_left_alone_and_otherwise_is_refused(texts: Path, parts: list[Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in parts[1].iterdir()}
    assert prepare(out=parts[1], part="2/3", **inputs(texts)).already_prepared
    for changed in ({"part": "1/3"}, {"part": "2/3", "held_out": 0.1}):
        with pytest.raises(UsageError, match="the output was prepared differently"):
            prepare(out=parts[1], **inputs(texts) | changed)
    with pytest.raises(UsageError, match="the output exists and is not a part"):
        prepare(out=texts, part="2/3", **inputs(texts))
    assert before == {path: path.stat().st_mtime_ns for path in parts[1].iterdir()}


def test_parts_that_do_not_belong_together_are_refused(texts: Path, parts: list[Path], tmp_path: Path) -> None:
    first, second, third = parts
    others = {name: tmp_path / name for name in ("settings", "number", "files")}
    prepare(out=others["settings"], part="3/3", **inputs(texts) | {"held_out": 0.1})
    prepare(out=others["number"], part="2/2", **inputs(texts))
    prepare(out=others["files"], part="3/3", **inputs(texts) | {"inputs": sorted(texts.glob("[a-e].*"))})
    for folders, message in (
            ([first, third], "parts are missing: 2/3; name the folder of every part"),
            ([first, second, third, second], "part 2/3 twice"),
            ([first, second, others["settings"]], r"do not belong together: .* \(held_out\)"),
            ([first, others["number"]], r"do not belong together: .* \(number of parts\)"),
            ([first, second, others["files"]], r"do not belong together: .* \(files\)"),
            ([], "there are no parts to join")):
        with pytest.raises(UsageError, match=message) as caught:
            join(folders, tmp_path / "out")
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="no part of prepared text"):
        join([first, tmp_path / "none"], tmp_path / "out")
    with pytest.raises(DataError, match="no part of prepared text"):
        join([texts], tmp_path / "out")


def test_a_damaged_part_is_refused(parts: list[Path], tmp_path: Path) -> None:
    """Nor is a pipe waited for, or a file of 100 GiB read to its end."""
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 100 << 30)
    def put(new: Callable[[bytes], bytes]) -> Callable[[Path, bytes], object]:
        return lambda path, content: path.write_bytes(new(content))

    for name, edit in (("part.json", put(lambda c: c.replace(b": 1", b": 2", 1))), ("part.json", put(lambda c: b"[1]")),
                       ("00000.ids", put(lambda c: bytes([c[0] ^ 1]) + c[1:])), ("00000.rows", put(lambda c: c + c)),
                       ("tokenizer.json", put(lambda c: c.replace(b"a", b"b", 1))), ("00000.ids", None),
                       ("00000.ids", lambda path, content: os.mkfifo(path)),
                       ("00000.ids", lambda path, content: path.symlink_to(tmp_path / "large"))):
        copy = tmp_path / "copy"
        shutil.copytree(parts[0], copy)
        path, content = copy / name, (copy / name).read_bytes()
        path.unlink()
        if edit is not None:
            edit(path, content)
        with pytest.raises(DataError) as caught:
            join([copy, *parts[1:]], tmp_path / "out")
        assert str(copy) in str(caught.value) and "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(copy)


def test_what_only_the_parts_together_show_is_refused(tmp_path: Path) -> None:
    make(tmp_path, {"train.txt": "same", "validation.txt": "same", "a.txt": "one " * 99, "b.txt": " "})
    for name, files, options, message in (
            ("same", ("train", "validation"), {}, "the same text in two splits"),
            ("single", ("a", "b"), {"held_out": 0.1}, "a single document cannot be held out in parts")):
        folders = [tmp_path / f"{name}{number}" for number in (1, 2)]
        for number, folder in enumerate(folders, 1):
            prepare([tmp_path / f"{file}.txt" for file in files], folder, part=f"{number}/2", tokenizer="bytes",
                    **options)
        with pytest.raises((DataError, UsageError), match=message):
            join(folders, tmp_path / "out")


def test_parts_on_the_command_line(texts: Path, tmp_path: Path, call: Call) -> None:
    words = ["prepare", texts / "a.txt", texts / "b.jsonl", "--held-out", "0.2"]
    code, _, err = call(*words, "--out", tmp_path / "1", "--part", "1/2")
    assert_refused(code, err, 2, "a part needs a tokenizer that is there")
    for number in (1, 2):
        code, out, err = call(*words, "--out", tmp_path / f"{number}", "--part", f"{number}/2", "--tokenizer", "bytes")
        assert code == 0 and "lineartime prepare --join PART1 PART2" in out, err
    joining = ["prepare", "--join", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "o"]
    code, _, err = call(*joining, "--held-out", "0.1")
    assert_refused(code, err, 2, "--join takes the folders of the parts and --out: --held-out")
    code, out, err = call(*joining)
    assert code == 0 and "train" in out and "lineartime train flash --data" in out, err
    code, out, err = call("info", tmp_path / "o", "--verify")
    assert code == 0 and json.loads((tmp_path / "o" / "manifest.json").read_text())["manifest_sha256"] in out
    shard = tmp_path / "o" / "train-00000.bin"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    code, _, err = call("info", tmp_path / "o", "--verify")
    assert_refused(code, err, 3, "damaged or missing file", shard)
