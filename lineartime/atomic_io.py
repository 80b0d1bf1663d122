"""Files that are complete or absent, whenever the process dies: atomic replacement of text and folders, append-only
JSON lines, and files with a SHA-256."""

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
    """The size in bytes and the SHA-256 of a file. Raises DataError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError as e:
        raise DataError("cannot read", path, e.strerror) from None


@contextlib.contextmanager
def hashed_file(path: Path, files: dict[str, dict[str, Any]]) -> Iterator[Callable[[bytes], None]]:
    """Write a new file, flush it to the disk, and add its size and hash to `files`."""
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
    """Write a folder atomically: yields a folder beside `out`, which becomes `out` at the end, and its file `last`.

    The file is also the lock, which is held until the rename. Leftovers of a killed run are removed."""
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
    """A temporary folder beside `out`, on the same disk. Leftovers of a killed run are removed."""
    scratch = out.with_name(f".{out.name}.source")
    with _locked_folder(scratch, "lock", out):
        yield scratch
        shutil.rmtree(scratch)


@contextlib.contextmanager
def _locked_folder(folder: Path, lock: str, out: Path) -> Iterator[IO[bytes]]:
    """Create a locked, empty folder and yield its lock file. If the block raises, the folder and parents created for
    it are removed. Raises ResourceError if another process holds the lock."""
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
    """Flush a folder's entries to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Replace a file atomically: yields the path of a file to write, which becomes `path`. Raises ResourceError."""
    aside = path.with_name(f".tmp-{path.name}")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as e:
        aside.unlink(missing_ok=True)
        raise ResourceError("cannot write", path, e.strerror) from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file atomically and flush it to the disk. Raises ResourceError."""
    with replaced(path) as aside, open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: dict[str, Any], *, ascii_only: bool = True) -> None:
    """Replace a file atomically by an object as indented JSON. Raises ResourceError."""
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=ascii_only) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError for a missing or damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return content
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError("damaged", path, str(e)) from None


def append_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a file, one line each, and flush it to the disk. An incomplete last line is removed first. Raises
    ResourceError."""
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


def read_json_lines(path: Path, parse: Callable[[Any], T], what: str) -> list[T]:
    """The lines of a file, parsed from JSON and then by `parse`, which may raise. A last line without its end is left
    out if it is wrong, because another process may be writing it. Raises DataError for any other line that is wrong.

    what: a noun for a line, for the message ("a row of a run")."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise DataError("cannot read the rows", path, e.strerror) from None
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(parse(json.loads(line.decode())))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            if number < len(lines):
                raise DataError(f"not {what}", f"{path}, line {number}", f"{type(e).__name__}: {e}") from None
    return parsed
