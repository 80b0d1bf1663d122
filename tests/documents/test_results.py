"""The unfinished file of `embed` and `classify`: damaged in any way, somebody else's, or left by a kill."""

import os
import random
import resource
from pathlib import Path

import numpy as np
import pytest

from dying_saves import Died, die, limited
from lineartime.documents.results import check_out, part_of, unfinished_rows
from lineartime.errors import ResourceError, UsageError

MADE_OF = {"weights": "0" * 64, "files": [["texts.jsonl", 1, 2]]}


def put(lines, i, *new):
    """The lines with others in place of line i."""
    return [*lines[:i], *new, *lines[i + 1:]]


def changed(line, draw):
    at = draw.randrange(len(line))
    return line[:at] + bytes([line[at] ^ 1 << draw.randrange(8)]) + line[at + 1:]


DAMAGES = {
    "a line is deleted": lambda lines, i, draw: put(lines, i),
    "two lines are swapped": lambda lines, i, draw: put(put(lines, i, lines[-1]), len(lines) - 1, lines[i]),
    "a byte is another": lambda lines, i, draw: put(lines, i, changed(lines[i], draw)),
    "the end is cut off": lambda lines, i, draw: [*lines[:i], lines[i][:draw.randrange(len(lines[i]))]],
    "there is more": lambda lines, i, draw: [*lines, draw.choice([b"{}\n", b"\n", lines[i], b"0" * 5000])],
}
ROWS = [{"file": f"é{i % 2}.jsonl", "number": i, "tokens": 10 * i, "cut": i % 3 == 0,
         "embedding": np.random.default_rng(i).normal(size=3).astype(np.float32).tolist()} for i in range(8)]


def go_on(out: Path, stop: int = len(ROWS)) -> int:
    """Add the rows that are missing before `stop`; fewer than all are those of a process that was killed then."""
    with unfinished_rows(out, MADE_OF) as (n_done, add):
        for row in ROWS[n_done:stop]:
            add(row)
        if stop < len(ROWS):
            raise Died
    return n_done


def killed_after(out: Path, n_rows: int) -> list[bytes]:
    with pytest.raises(Died):
        go_on(out, n_rows)
    return part_of(out).read_bytes().splitlines(True)


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_changes_the_output(tmp_path, monkeypatch, name):
    """The rows in front of the damage are kept, the others are made again; a damaged first line may be refused."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    out, draw = tmp_path / "v.jsonl", random.Random(name)
    go_on(out)
    undisturbed = out.read_bytes()
    out.unlink()
    whole = killed_after(out, 6)
    for _ in range(40):
        part_of(out).write_bytes(b"".join(DAMAGES[name](whole, draw.randrange(len(whole)), draw)))
        damaged = part_of(out).read_bytes().splitlines(True)
        n_sound = next((i for i, line in enumerate(whole) if damaged[i:i + 1] != [line]), len(whole))
        try:
            assert go_on(out) == max(n_sound - 1, 0)
        except UsageError as e:
            assert n_sound == 0 and "unfinished" in str(e)
            continue
        assert out.read_bytes() == undisturbed and not part_of(out).exists()
        out.unlink()


@pytest.mark.parametrize("text", [
    b"notes", b"{", b'{"lineartime_rows": "' + b"0" * 64 + b'"}\n{"file": "a"}\n'])
def test_a_file_that_is_not_ours_stays(tmp_path, text):
    part = part_of(tmp_path / "v.jsonl")
    part.write_bytes(text)
    with pytest.raises(UsageError, match="unfinished") as raised:
        go_on(tmp_path / "v.jsonl")
    assert part.read_bytes() == text and "\n" not in str(raised.value)


def test_without_rows_nothing_stays(tmp_path):
    """So that other settings are not refused. A full disk leaves no few bytes of a first line either."""
    with pytest.raises(Died):
        go_on(tmp_path / "v.jsonl", 0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ResourceError, match="cannot write"), limited(resource.RLIMIT_FSIZE, 3):
        go_on(tmp_path / "v.jsonl")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_the_rows_are_read_loses_none(tmp_path, monkeypatch):
    killed_after(tmp_path / "v.jsonl", 2)
    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr("lineartime.documents.results.sound_rows", die)
        go_on(tmp_path / "v.jsonl")
    assert go_on(tmp_path / "v.jsonl") == 2


def test_one_process_at_a_time(tmp_path):
    with unfinished_rows(tmp_path / "v.jsonl", MADE_OF) as (_, add):
        add(ROWS[0])
        with pytest.raises(ResourceError, match="another process is writing this file"):
            go_on(tmp_path / "v.jsonl")


def test_a_kill_around_the_rename_loses_nothing(tmp_path, monkeypatch):
    out = tmp_path / "v.jsonl"
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(os, "replace", die)
        go_on(out)
    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(Path, "unlink", die)
        assert go_on(out) == len(ROWS)
    whole = part_of(out).read_bytes()
    for left, stays in ((whole, False), (whole[:-1], True)):  # rows of which there is no output stay
        part_of(out).write_bytes(left)
        with pytest.raises(UsageError, match="the output exists already"):
            check_out(out, (".jsonl",))
        assert part_of(out).exists() == stays
