"""Files that are whole or not there, whenever the process dies: text replaced at once, folders written aside, links,
files of JSON lines that only grow; and files known by their hash."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from lineartime.errors import CheckpointError, DataError, ResourceError

T = TypeVar("T")


def hash_of(path: Path) -> dict[str, Any]:
    """The size in bytes and the SHA-256 of a file. Raises DataError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError as e:
        raise DataError("cannot read", path, e.strerror) from None


@contextlib.contextmanager
def hashed_file(path: Path, files: dict[str, dict[str, Any]]) -> Iterator[Callable[[bytes], None]]:
    """Write a new file; at the end it is on the disk, and its size and hash are in `files`."""
    digest = hashlib.sha256()
    with path.open("xb") as file:

        def write(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        yield write
        file.flush()
        os.fsync(file.fileno())
        files[path.name] = {"bytes": file.tell(), "sha256": digest.hexdigest()}


@contextlib.contextmanager
def written_aside(out: Path, last: str) -> Iterator[tuple[Path, IO[bytes]]]:
    """A folder beside `out` and its file to write, which take the place of `out` together at the end or not at all.

    The file is the lock: it is held until the folder has its name. What a killed run left is removed."""
    aside = out.with_name(f".{out.name}.partial")
    with _locked_folder(aside, last, out) as file:
        yield aside, file
        file.flush()
        os.fsync(file.fileno())
        fsync_folder(aside)
        os.rename(aside, out)
        fsync_folder(out.parent)


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, on its disk, that is gone afterwards. What a killed run left is removed."""
    scratch = out.with_name(f".{out.name}.source")
    with _locked_folder(scratch, "lock", out):
        yield scratch
        shutil.rmtree(scratch)


@contextlib.contextmanager
def _locked_folder(folder: Path, lock: str, out: Path) -> Iterator[IO[bytes]]:
    """An empty folder of this process alone, and the file in it that is its lock. Where the block raises, nothing is
    left of the folder and of the parents made for it."""
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / lock).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(file.fileno()), (folder / lock).stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise ResourceError("another process is writing this folder", out, "wait for it")
        try:
            for left in folder.iterdir():
                if left.name != lock:
                    left.unlink()
            file.truncate(0)
            yield file
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            raise


def fsync_folder(folder: Path) -> None:
    """See a folder's entries to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The name of a file beside `path` to write, which takes its place at the end: `path` is either old or new.
    Raises ResourceError."""
    aside = path.with_name(f".tmp-{path.name}")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as e:
        aside.unlink(missing_ok=True)
        raise ResourceError("cannot write", path, e.strerror) from None


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is either old or new, and see it to the disk. Raises ResourceError."""
    with replaced(path) as aside, open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: dict[str, Any], *, ascii_only: bool = True) -> None:
    """Write an object as indented JSON that is either old or new. Raises ResourceError."""
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=ascii_only) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object that `write_json` wrote. Raises CheckpointError where the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return content
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError("damaged", path, str(e)) from None


def append_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a file, one line each, and see them to the disk; a last line that a kill cut off is taken out before.
    Raises ResourceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            if path.is_file():  # not a pipe
                whole, newline, last = path.read_bytes().rpartition(b"\n")
                try:
                    if last:
                        json.loads(last)
                        file.write(b"\n")
                except ValueError:
                    file.truncate(len(whole + newline))
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            file.flush()
            if path.is_file():
                os.fsync(file.fileno())
    except OSError as e:
        raise ResourceError("cannot write", path, e.strerror) from None


def read_json_lines(path: Path, parse: Callable[[Any], T], what: str | None) -> list[T]:
    """The lines of a file, each given to `parse`, which raises for what is not `what` ("a row of a run"). A last line
    that is cut off is left out, as somebody may be writing it. Raises DataError.

    what: None ends the lines at the first that `parse` refuses, wherever it is."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace" if what is None else "strict").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError("cannot read the rows", path, getattr(e, "strerror", None) or str(e)) from None
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            if what is None:
                break
            if number < len(lines):
                raise DataError(f"not {what}", f"{path}, line {number}", f"{type(e).__name__}: {e}") from None
    return parsed
