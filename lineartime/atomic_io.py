"""Files that are complete or absent, whenever the process dies: atomic replacement of text and folders, append-only
JSON lines, and files with a SHA-256; whole files of limited size."""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from lineartime.errors import CheckpointError, DataError, ResourceError, UsageError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def hash_of(path: Path) -> dict[str, Any]:
    """The size in bytes and the SHA-256 of a file. Raises DataError for a file that cannot be read."""
    try:
        with open_regular(path) as file:
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError as e:
        raise DataError("cannot read", path, e.strerror) from None


def is_as_written(path: Path, expected: dict[str, Any], by_hash: bool = True) -> bool:
    """Whether a file has the size and, unless without `by_hash`, the SHA-256 of `hash_of`."""
    with contextlib.suppress(OSError, DataError):
        same_size = path.stat().st_size == expected["bytes"]  # first: a hash of 100 GiB takes minutes
        return same_size and (not by_hash or hash_of(path) == expected)
    return False


MAX_BYTES = 64 << 20
"""Largest file that is read whole: configurations, tokenizers, results, prompts."""


MAX_LINES_BYTES = 1 << 30
"""Largest file of JSON lines that is read."""


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file, or a link to one, for reading. Raises OSError, also for a pipe, a device or a folder, which
    are not waited for."""
    try:
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError as e:  # a NUL in the path
        raise OSError(errno.EINVAL, str(e), str(path)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError, also for a file of more than `limit` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
        return file.readall()


@contextlib.contextmanager
def hashed_file(path: Path, files: dict[str, dict[str, Any]]) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Write a new file, flush it to the disk, and add its size and hash to `files`. The hash is of the bytes in memory,
    not read back."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:

        def write(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        yield write
        file.flush()
        os.fsync(file.fileno())
        files[path.name] = {"bytes": file.tell(), "sha256": digest.hexdigest()}


@contextlib.contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """Write a folder atomically: yields an empty folder, whose files become `out` at the end.

    If the block raises, the folder and the parents created for it are removed. Raises ResourceError if another process
    is writing `out`, OSError if `out` is there and not an empty folder."""
    with unfinished_folder(out) as folder:
        (folder / DONE).mkdir()
        yield folder / DONE


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, on the same disk, that is removed at the end. Raises as `written_aside` does."""
    with unfinished_folder(out.with_name(f"{out.name}.source")) as folder:
        (folder / "scratch").mkdir()
        yield folder / "scratch"


@contextlib.contextmanager
def unfinished_folder(out: Path, worth: str | None = None) -> Iterator[Path]:
    """A hidden folder beside `out`, which one process at a time has. At the end its subfolder `done`, if there is one,
    becomes `out`, and the rest is removed.

    worth: a file that makes the folder worth keeping. An interrupt or a ResourceError then leaves it, and what a killed
    process left is in it. Without one it begins empty, and is removed after every error, with the parents created for
    it. Raises ResourceError if another process has it, OSError if `out` is there and not an empty folder."""
    made = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = _hidden(out, "unfinished")
    descriptor = _lock_folder(folder, out)
    try:
        if worth is None:
            _empty(folder)
        yield folder
        if (folder / DONE).exists():
            for path in (folder / DONE).rglob("*"):
                fsync(path)
            fsync(folder / DONE)
            os.rename(folder / DONE, out)
            fsync(out.parent)
        shutil.rmtree(folder, ignore_errors=True)  # what stays goes with the next that has it
    except BaseException as e:
        if worth is None or not (isinstance(e, KeyboardInterrupt | ResourceError) and (folder / worth).exists()):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
        raise
    finally:
        os.close(descriptor)


def remove_leftovers(out: Path) -> None:
    """Remove the hidden folder of `out` that a process left which was killed at its end; not that of a living one."""
    folder = _hidden(out, "unfinished")
    with contextlib.suppress(OSError, ResourceError):
        if folder.exists():
            descriptor = _lock_folder(folder, out)
            try:
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


DONE, LOCK = "done", "lock"
"""What a hidden folder holds: what becomes the output, and the file that the process which has the folder has locked.
"""


def _hidden(path: Path, ending: str) -> Path:
    """The name of what stands for `path` until it is complete. A hash, because a name has at most 255 bytes."""
    return path.with_name(f".lineartime-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}.{ending}")


def _lock_folder(folder: Path, out: Path) -> int:
    """Make a hidden folder if it is missing and lock it; returns the descriptor of its locked file."""
    while True:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(folder))
        try:
            return locked(folder / LOCK)
        except FileNotFoundError:  # another process has just removed the folder
            continue
        except BlockingIOError:
            raise ResourceError("another process is writing this folder", out, "wait for it") from None


def _empty(folder: Path) -> None:
    """Remove all but the lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def locked(path: Path, *, wait: bool = False) -> int:
    """Make a file if it is missing, and lock it; returns its descriptor. The kernel frees the lock when the descriptor
    is closed, and when the process ends. Raises OSError, also for a link; BlockingIOError, unless it is to `wait`, if
    another process has the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The process that had the lock may have renamed or removed the file since it was opened.
            if os.path.lexists(path) and os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Replace a regular file atomically, or make a new one: yields the file to write, which is flushed to the disk.

    A pipe and a character device such as /dev/stdout are written in place. Raises ResourceError for a pipe that nobody
    reads, any other kind of file, a link to a regular file, and errors of the system."""
    try:
        if not _is_replaceable(path):
            with _open_now(path, "wb") as file:
                yield file
            return
        aside = _hidden(path, "tmp")
        with os.fdopen(locked(aside, wait=True), "r+b") as file:  # a killed process may have left it
            try:
                file.truncate(0)
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(aside, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)
                raise
        fsync(path.parent)
    except OSError as e:
        raise ResourceError("cannot write", path, _why(e)) from None


def _open_now(path: Path, mode: str) -> IO[bytes]:
    """Open a file for writing. A pipe that nobody reads is an error and not waited for. Raises OSError."""
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
    os.set_blocking(file.fileno(), True)
    return file


def _why(error: OSError) -> str:
    return "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror or str(error)


def _is_replaceable(path: Path) -> bool:
    """Whether `path` is a regular file or absent, not a pipe or a character device. Raises OSError for other kinds."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "embedded null byte")
    if not os.path.lexists(path):
        return True
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and path.is_symlink():
        raise OSError(errno.EEXIST, "it is a link; name the file that it points to")
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "it is a folder")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        raise OSError(errno.EINVAL, "it is no regular file")
    return stat.S_ISREG(mode)


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file atomically, see `replaced`. Raises ResourceError."""
    with replaced(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: dict[str, Any], *, ascii_only: bool = True) -> None:
    """Replace a file atomically by an object as indented JSON. Raises ResourceError."""
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=ascii_only) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError for a missing or damaged file."""
    try:
        content = json.loads(read_bytes(path))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return content
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError("damaged", path, str(e)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises UsageError for a section, because settings are flat."""
    try:
        settings = tomllib.loads(read_bytes(path).decode())
    except OSError as e:
        raise UsageError("cannot read the configuration", path, e.strerror) from None
    except (ValueError, RecursionError) as e:
        raise UsageError("not valid TOML", path, str(e)) from None
    for name, value in settings.items():
        if isinstance(value, dict):
            raise UsageError("settings are flat", f"[{name}] in {path}", "move its fields to the top")
    return settings


def append_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to a file, one line each, and flush it to the disk. An incomplete last line is removed first. Raises
    ResourceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_now(path, "ab") as file:
            if path.is_file():  # not a pipe
                fcntl.flock(file, fcntl.LOCK_EX)  # what another process has half written is not cut off
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
        raise ResourceError("cannot write", path, _why(e)) from None


def read_json_lines(path: Path, parse: Callable[[Any], T], what: str) -> list[T]:
    """The lines of a file, parsed from JSON and then by `parse`, which may raise. A last line without its end is left
    out, with a warning, if it is wrong: another process may be writing it. Raises DataError for any other line that is
    wrong.

    what: a noun for a line, for the message ("a row of a run")."""
    try:
        lines = read_bytes(path, MAX_LINES_BYTES).split(b"\n")
    except OSError as e:
        raise DataError("cannot read the rows", path, e.strerror) from None
    parsed = []
    for number, line in enumerate(lines, 1):
        whole = number < len(lines)
        try:
            row = json.loads(line.decode())
            whole = True  # what is cut off from an object is not JSON
            parsed.append(parse(row))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
            if whole:
                raise DataError(f"not {what}", f"{path}, line {number}", f"{type(e).__name__}: {e}") from None
            if line:
                logger.warning(f"an incomplete last line is left out: {path}, line {number}")
    return parsed
