"""Files and folders that are complete or absent, and JSON lines that are read while they grow."""

import fcntl
import os
from pathlib import Path

import pytest

from lineartime.base.errors import DataError, ResourceError, UsageError
from lineartime.base.files import _hidden, check_place, locked, new_folder, read_json_lines, replaced, write_atomically


def values(path):
    return read_json_lines(path, lambda row: row["a"], "a row of ours")


def test_lines_are_read_and_one_that_is_wrong_is_said_with_its_number(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    for text, found in ((b'{"a": 1}\n{"a": 2}\n', [1, 2]), (b'{"a": 1}\n{"a": 2}', [1, 2]), (b"", [])):
        path.write_bytes(text)
        assert values(path) == found and not caplog.messages
    for last in (b'{"a": 2', b"\xff"):  # somebody may be writing this line
        path.write_bytes(b'{"a": 1}\n' + last)
        assert values(path) == [1] and f"last line is left out: {path}, line 2" in caplog.messages[-1]
    for last in (b'{"a": 2', b"\x00\x00", b'{"a": "\xff"}', b"", b'{"b": 1}', b"7", b"[" * 5000):
        path.write_bytes(b'{"a": 1}\n' + last + b"\n")
        with pytest.raises(DataError, match=r"not a row of ours: .*rows\.jsonl, line 2"):
            values(path)
    with pytest.raises(DataError, match="cannot read the rows"):
        values(tmp_path / "none.jsonl")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    path.chmod(0o600)
    with pytest.raises(KeyError), replaced(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]
    write_atomically(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.json"] and path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "none" / "file")
    with pytest.raises(UsageError, match="it is a folder"):
        check_place(tmp_path)
    for path in (tmp_path / "none" / "a", tmp_path / "link", Path(__file__) / "a"):
        with pytest.raises(UsageError, match="there is no such folder"):
            check_place(path)
    for path in (tmp_path / "new", Path("/dev/null")):
        check_place(path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # the root user may write everywhere
    with pytest.raises(ResourceError, match=f"cannot write: {tmp_path}/new; {tmp_path} is read-only for you"):
        check_place(tmp_path / "new")


def test_a_link_a_device_and_a_pipe_stay_what_they_are(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for name, target in (("link", "file"), ("null", "/dev/null")):
        (tmp_path / name).symlink_to(target)
        write_atomically(tmp_path / name, "text")
        assert (tmp_path / name).is_symlink()
    os.mkfifo(path := tmp_path / "pipe")
    held = os.open(path, os.O_RDWR)
    write_atomically(path, "text")
    assert os.read(held, 10) == b"text" and path.is_fifo()
    os.close(held)
    ends = os.pipe()  # as /dev/stdout is in front of a `|`
    write_atomically(Path(f"/dev/fd/{ends[1]}"), "text")
    assert os.read(ends[0], 10) == b"text"
    for name, why in (("folder", "Is a directory"), ("x" * 300, "File name too long")):
        with pytest.raises(ResourceError, match=rf"cannot write.*{why}"):
            write_atomically(tmp_path / name, "text")
    assert (tmp_path / "file").read_text() == "text"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link", "null", "pipe"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    left = [_hidden(tmp_path / "d", "unfinished"), _hidden(tmp_path / "a.json", "tmp")]
    (tmp_path / ".lineartime-01234567.unfinished").mkdir()
    kept = set(os.listdir(tmp_path))
    (left[0] / "done" / "deep").mkdir(parents=True)
    left[1].write_text("a longer text")
    write_atomically(tmp_path / "a.json", "text")
    with new_folder(tmp_path / "d") as aside:
        (aside / "file").write_text("text")
    assert set(os.listdir(tmp_path)) == kept | {"a.json", "d"} and (tmp_path / "a.json").read_text() == "text"
    assert os.listdir(tmp_path / "d") == ["file"]
    with new_folder(tmp_path / "new" / "d") as aside:  # parents are made
        (aside / "file").touch()
    assert set(os.listdir(tmp_path)) == kept | {"a.json", "d", "new"} and os.listdir(tmp_path / "new") == ["d"]


@pytest.mark.parametrize(("ending", "link"), [
    ("tmp", os.symlink), ("tmp", os.link), ("lock", os.symlink), ("unfinished", os.symlink)])
def test_a_link_in_the_place_of_a_hidden_file_is_not_followed(tmp_path, ending, link):
    """Whoever may write into the folder can know the hidden file's name."""
    hidden, mine = _hidden(tmp_path / "out", ending), tmp_path / "folder" / "mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    link(mine.parent if ending == "unfinished" else mine, hidden)
    writer = replaced if ending == "tmp" else new_folder
    with pytest.raises((ResourceError, OSError), match=f"{hidden.name} beside it is a link; remove it"):
        with writer(tmp_path / "out"):
            pass
    assert mine.read_text() == "mine" and os.listdir(mine.parent) == ["mine"]


@pytest.mark.parametrize(("module", "name"), [(fcntl, "flock"), (os, "fstat")])
def test_a_file_that_was_renamed_while_it_was_waited_for_is_not_locked(tmp_path, monkeypatch, module, name):
    """Else two processes that replace a file at once would write over the first's."""
    path, real, calls = tmp_path / "aside", getattr(module, name), []

    def call(descriptor, *how):
        calls.append(descriptor)
        if len(calls) == 1:  # who had the lock ends now
            os.replace(path, tmp_path / "file")
        return real(descriptor, *how)

    monkeypatch.setattr(module, name, call)
    descriptor = locked(path, wait=True)
    assert len(calls) == 2 and os.path.samestat(os.fstat(descriptor), path.stat())
    os.close(descriptor)


def test_a_folder_that_another_process_writes_is_refused(tmp_path):
    with new_folder(tmp_path / "d") as aside:
        assert aside.parent.parent == tmp_path
        refused = pytest.raises(ResourceError, match="another process is writing this folder")
        with refused, new_folder(tmp_path / "d"):
            pass
        with new_folder(tmp_path / "other"):
            pass
        assert aside.exists()
    assert sorted(os.listdir(tmp_path)) == ["d", "other"]
