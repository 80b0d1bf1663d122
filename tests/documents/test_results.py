"""The unfinished file of `embed` and `classify`: damaged in any way, somebody else's, or left by a kill."""

import json
import os
import random
import resource
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from lineartime.documents import results
from lineartime.documents.embed import embedded_schema
from lineartime.documents.results import check_out, part_of, unfinished_rows
from lineartime.errors import ResourceError, UsageError

MADE_OF = {"weights": "0" * 64, "files": [["texts.jsonl", 1, 2]]}
ENDINGS = (".jsonl", ".npy", ".parquet")
DAMAGES = {
    "a line is deleted": lambda lines, i, draw: lines[:i] + lines[i + 1:],
    "a line is there twice": lambda lines, i, draw: lines[:i] + lines[i:i + 1] + lines[i:],
    "two lines are swapped": lambda lines, i, draw: swapped(lines, i, draw.randrange(len(lines))),
    "a byte is another": lambda lines, i, draw: [*lines[:i], changed(lines[i], draw), *lines[i + 1:]],
    "a digit is another": lambda lines, i, draw: [*lines[:i], other_digit(lines[i], draw), *lines[i + 1:]],
    "bytes are missing": lambda lines, i, draw: [*lines[:i], lines[i][draw.randrange(1, len(lines[i])):],
                                                 *lines[i + 1:]],
    "the end is cut off": lambda lines, i, draw: [*lines[:i], lines[i][:draw.randrange(len(lines[i]))]],
    "there is more": lambda lines, i, draw: [*lines, draw.choice([b"{}\n", b"\n", lines[i], b"0" * 5000, b"whole\n"])],
    "there is more inside": lambda lines, i, draw: [*lines[:i], b"whole\n", *lines[i:]],
}


class Killed(BaseException):
    pass


def swapped(lines, i, j):
    lines = list(lines)
    lines[i], lines[j] = lines[j], lines[i]
    return lines


def changed(line, draw):
    at = draw.randrange(len(line))
    return line[:at] + bytes([line[at] ^ 1 << draw.randrange(8)]) + line[at + 1:]


def other_digit(line, draw):
    at = draw.choice([i for i, byte in enumerate(line) if 48 <= byte < 58])
    return line[:at] + bytes([48 + (line[at] - 48 + draw.randrange(1, 10)) % 10]) + line[at + 1:]


def made_row(i):
    return {"file": f"é{i % 2}.jsonl", "number": i, "tokens": 10 * i, "cut": i % 3 == 0,
            "embedding": np.random.default_rng(i).normal(size=3).astype(np.float32).tolist()}


ROWS = [made_row(i) for i in range(8)]


def go_on(out: Path, stop: int = len(ROWS), made_of: dict = MADE_OF) -> int:
    """Add the rows that are missing before `stop`; fewer than all are those of a process that was killed then."""
    with unfinished_rows(out, made_of, embedded_schema) as (n_done, n_cut, add):
        assert n_cut == sum(row["cut"] for row in ROWS[:n_done])
        for row in ROWS[n_done:stop]:
            add(row)
        if stop < len(ROWS):
            raise Killed
    return n_done


def killed_after(out: Path, n_rows: int) -> list[bytes]:
    """The lines of the unfinished file of a process that was killed behind some rows."""
    with pytest.raises(Killed):
        go_on(out, n_rows)
    return part_of(out).read_bytes().splitlines(True)


@pytest.fixture(scope="module", params=ENDINGS)
def undisturbed(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / f"v{request.param}"
    go_on(out)
    return out


def test_the_output_is_the_rows(undisturbed):
    if undisturbed.suffix == ".jsonl":
        assert undisturbed.read_text() == "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    elif undisturbed.suffix == ".npy":
        assert np.load(undisturbed).tolist() == [row["embedding"] for row in ROWS]
    else:
        assert pyarrow.parquet.read_table(undisturbed).to_pylist() == ROWS


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_changes_the_output(undisturbed, tmp_path, monkeypatch, name):
    """The rows in front of the damage are kept, the others are made again; a damaged first line may be refused."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    out, draw = tmp_path / f"v{undisturbed.suffix}", random.Random(name)
    whole = killed_after(out, 6)
    for _ in range(60):
        lines = DAMAGES[name](whole, draw.randrange(len(whole)), draw)
        part_of(out).write_bytes(b"".join(lines))
        damaged = part_of(out).read_bytes().splitlines(True)
        n_sound = next((i for i, line in enumerate(whole) if damaged[i:i + 1] != [line]), len(whole))
        try:
            assert go_on(out) == max(n_sound - 1, 0)
        except UsageError as e:
            assert n_sound == 0 and "unfinished" in str(e)
            continue
        assert out.read_bytes() == undisturbed.read_bytes() and not part_of(out).exists()
        out.unlink()


def test_a_file_that_is_changed_while_it_is_written_is_an_error(undisturbed, tmp_path):
    out = tmp_path / f"v{undisturbed.suffix}"
    for change in (lambda lines: lines[:-1], lambda lines: lines[:2] + lines[3:]):
        with pytest.raises(ResourceError, match="another process has changed this file"):
            with unfinished_rows(out, MADE_OF, embedded_schema) as (n_done, _, add):
                for row in ROWS[n_done:]:
                    add(row)
                part_of(out).write_bytes(b"".join(change(part_of(out).read_bytes().splitlines(True))))
        assert not out.exists()
    go_on(out)
    assert out.read_bytes() == undisturbed.read_bytes()


@pytest.mark.parametrize("text", [
    b"notes", b"{", b'{"weights": "', b'{"weights": "' + b"0" * 64 + b'"}\n{"file": "a"}\n', b'{"lineartime_rows": "',
    b'{"lineartime_rows": "' + b"0" * 40, b'{"lineartime_rows": "' + b"0" * 64 + b'"}\n{"file": "a"}\n'])
def test_a_file_that_is_not_ours_stays(tmp_path, text):
    """Neither is one of the version before, which had no checksums."""
    part = part_of(tmp_path / "v.jsonl")
    part.write_bytes(text)
    if text == b'{"lineartime_rows": "':  # it might be of a kill in the first write
        killed_after(tmp_path / "v.jsonl", 4)
        assert go_on(tmp_path / "v.jsonl") == 4
        return
    with pytest.raises(UsageError, match="unfinished") as raised:
        go_on(tmp_path / "v.jsonl")
    assert part.read_bytes() == text and "\n" not in str(raised.value)


def test_a_disk_that_is_full_at_the_first_line_leaves_no_file(tmp_path):
    """What a few bytes of that line are of could not be told."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, before[1]))
    try:
        with pytest.raises(ResourceError, match="cannot write"):
            go_on(tmp_path / "v.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    go_on(tmp_path / "v.jsonl")


@pytest.mark.parametrize("kind", ["a link", "a link to nowhere", "a second name", "a pipe", "a folder"])
def test_only_a_regular_file_with_one_name_is_written(tmp_path, kind):
    notes, part = tmp_path / "notes", part_of(tmp_path / "v.jsonl")
    if kind == "a pipe":
        os.mkfifo(part)
    elif kind == "a folder":
        part.mkdir()
    else:
        if kind != "a link to nowhere":
            notes.touch()
        (part.hardlink_to if kind == "a second name" else part.symlink_to)(notes)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ResourceError, match=r"v\.jsonl\.part"):
        go_on(tmp_path / "v.jsonl")
    assert sorted(tmp_path.iterdir()) == before and (not notes.exists() or not notes.read_bytes())


def test_one_process_at_a_time(tmp_path):
    with unfinished_rows(tmp_path / "v.jsonl", MADE_OF, embedded_schema):
        with pytest.raises(ResourceError, match="another process is writing this file"):
            go_on(tmp_path / "v.jsonl")


def test_what_a_kill_behind_the_rename_leaves_goes(tmp_path, monkeypatch):
    out = tmp_path / "v.jsonl"

    def refused():
        with pytest.raises(UsageError, match="the output exists already"):
            check_out(out, ENDINGS)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: killed())
        go_on(out)
    assert out.exists() and part_of(out).exists()
    refused()
    assert out.exists() and not part_of(out).exists()
    killed_after(tmp_path / "w.jsonl", 4)  # rows of which there is no output: somebody has put another file there
    for left in (part_of(tmp_path / "w.jsonl").read_bytes(), b"notes\nwhole\n"):
        part_of(out).write_bytes(left)
        refused()
        assert part_of(out).read_bytes() == left


def test_a_kill_in_front_of_the_rename_goes_on(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", lambda *paths: killed())
        go_on(tmp_path / "v.jsonl")
    assert part_of(tmp_path / "v.jsonl").read_bytes().endswith(results.WHOLE)
    assert go_on(tmp_path / "v.jsonl") == len(ROWS) and [*tmp_path.iterdir()] == [tmp_path / "v.jsonl"]


def killed():
    raise Killed
