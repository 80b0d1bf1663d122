"""Files that are read whole, up to a size; files that are hashed as they are written; and files and
folders that are complete or absent, whenever the process dies."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from lineartime.base.errors import CheckpointError, DataError, ResourceError, UsageError, raised_as
from lineartime.base.settings import require

Parsed = TypeVar("Parsed")

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # largest file that is read whole: configurations, tokenizers, results, prompts
MAX_LINES_BYTES = 1 << 30  # largest file of JSON lines that is read


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file. Raises OSError, at once for a pipe, a device or a folder."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
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


def read_text(path: Path) -> str:
    """The text of a file. Raises CheckpointError if it cannot be read or is not UTF-8."""
    with raised_as(CheckpointError, "cannot read", path, OSError, UnicodeDecodeError):
        return read_bytes(path).decode()


def damaged(path: Path) -> contextlib.AbstractContextManager[None]:
    """Inside the block, a wrong value from a file is a CheckpointError that names the file."""
    return raised_as(CheckpointError, "damaged", path, OSError, KeyError, ValueError, TypeError, AttributeError,
                     ArithmeticError, RecursionError, UsageError)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it cannot be read or holds none."""
    with damaged(path):
        content = json.loads(read_bytes(path))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return content


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises UsageError if it cannot be read or has a section."""
    with (raised_as(UsageError, "not valid TOML", path, ValueError, RecursionError),
          raised_as(UsageError, "cannot read the configuration", path, OSError)):
        settings = tomllib.loads(read_bytes(path).decode("utf-8-sig"))
    for name, value in settings.items():
        require(not isinstance(value, dict), "settings are flat", f"[{name}] in {path}", "move its fields to the top")
    return settings


def read_json_lines(path: Path, parse: Callable[[Any], Parsed], what: str) -> list[Parsed]:
    """The lines of a file, parsed from JSON and then by `parse`, which may raise. A wrong last line
    without its end is left out, with a warning: another process may be writing it. Raises DataError
    for any other wrong line, which it calls `what`, such as "a row of a run"."""
    with raised_as(DataError, "cannot read the rows", path, OSError):
        lines = read_bytes(path, MAX_LINES_BYTES).split(b"\n")
    parsed = []
    for number, line in enumerate(lines, 1):
        whole = number < len(lines)
        try:
            row = json.loads(line.decode())
            whole = True  # an object that was cut off is not JSON
            parsed.append(parse(row))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
            if whole:
                raise DataError(f"not {what}", f"{path}, line {number}", f"{type(e).__name__}: {e}") from None
            if line:
                logger.warning(f"an incomplete last line is left out: {path}, line {number}")
    return parsed


@contextlib.contextmanager
def hashed_stream(path: Path, files: dict[str, dict[str, Any]]) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Make a file: yields what writes to it. At the end it is flushed to the disk, and its size and
    SHA-256 stand in `files` by its name. The hash is of the bytes in memory. Raises OSError."""
    digest = hashlib.sha256()

    def write(data: bytes | memoryview) -> None:
        new.write(data)
        digest.update(data)

    with open(path, "xb") as new:
        yield write
        new.flush()
        os.fsync(new.fileno())
        files[path.name] = {"bytes": new.tell(), "sha256": digest.hexdigest()}


def json_sha256(content: Any) -> str:
    """The hash of a JSON value, whose keys may be in any order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: dict[str, Any], *, ascii_only: bool = True) -> None:
    """Replace a file by an object as indented JSON, see `replaced`. Raises ResourceError."""
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=ascii_only) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file, see `replaced`. Raises ResourceError."""
    with replaced(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Replace a file atomically, or make it. A link stays, and what it points to is replaced. A
    pipe and a device such as /dev/stdout are written in place. Raises ResourceError."""
    with system_errors(path):
        if path.exists() and not path.is_file():  # first: `realpath` names no pipe that is /dev/stdout
            with open(path, "wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        # Whoever writes this file has its hidden one locked. A killed process may have left that.
        aside = _hidden(target, "tmp")
        with os.fdopen(locked(aside, wait=True), "r+b") as file:
            if os.fstat(file.fileno()).st_nlink > 1:
                raise _link_in_the_way(aside)
            try:
                file.truncate(0)
                if target.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(aside, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    aside.unlink(missing_ok=True)
                raise
        fsync(target.parent)


def check_place(path: Path) -> None:
    """Raise before long work if `replaced` could not write this file: UsageError for a folder and a
    file in no folder, ResourceError for a place where this user must not write."""
    in_place = path.exists() and not path.is_file()
    place = path if in_place else Path(os.path.realpath(path)).parent
    if path.is_dir() or not (in_place or place.is_dir()):
        raise UsageError("cannot write", path, "it is a folder" if path.is_dir() else "there is no such folder")
    require(os.access(place, os.W_OK), "cannot write", path, f"{place} is read-only for you", ResourceError)


def check_new(path: Path) -> None:
    """Raise as `check_place` does, and UsageError if something is there, but a pipe or a device."""
    if os.path.lexists(path) and (path.is_file() or path.is_dir() or not path.exists()):
        raise UsageError("the output exists already", path, "choose another or delete it")
    check_place(path)


def system_errors(out: Path | str) -> contextlib.AbstractContextManager[None]:
    """Inside the block, an OSError is a ResourceError that says what cannot be written."""
    return raised_as(ResourceError, "cannot write", out, OSError)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Write a folder that is complete or absent: yields an empty folder, which becomes `out` at the
    end of the block. Until then the block may put other folders beside it, which are removed. After
    an error nothing is left, nor of the parents that were made. Raises ResourceError if another
    process is writing this folder, OSError if `out` is there and not an empty folder."""
    if os.path.ismount(out):
        raise OSError(errno.EBUSY, "it is a mount point; name a folder in it", str(out))
    made = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden, lock = _hidden(out, "unfinished"), _hidden(out, "lock")
    with raised_as(ResourceError, "another process is writing this folder", out, BlockingIOError, todo="wait for it"):
        descriptor = locked(lock)
    try:
        shutil.rmtree(hidden, ignore_errors=True)  # a killed process may have left it
        if hidden.is_symlink():
            raise _link_in_the_way(hidden)
        folder = hidden / "done"
        folder.mkdir(parents=True)
        yield folder
        # Every byte is on the disk before the folder gets its name, the name before this returns.
        for path in [*folder.rglob("*"), folder]:
            fsync(path)
        os.rename(folder, out)
        fsync(out.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)  # what cannot be removed goes when it is next used
        with contextlib.suppress(OSError):
            lock.unlink()
            for parent in made:  # they stay if the output is in them
                parent.rmdir()
        os.close(descriptor)


def clear_leftovers(out: Path) -> None:
    """Remove what a process has left that was killed when `new_folder` had given `out` its name."""
    hidden, lock = _hidden(out, "unfinished"), _hidden(out, "lock")
    if hidden.exists() or lock.exists():
        # Another process may write the folder anew, or it is read-only.
        with contextlib.suppress(OSError), os.fdopen(locked(lock)):
            shutil.rmtree(hidden, ignore_errors=True)
            lock.unlink()


def _hidden(path: Path, ending: str) -> Path:
    """The name of what becomes `path`. A hash, because a name has at most 255 bytes."""
    path = path.absolute()  # "." has no name
    return path.with_name(f".lineartime-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}.{ending}")


def _link_in_the_way(path: Path) -> OSError:
    """The error for a link in the place of a hidden file: the file that it names is somebody's."""
    return OSError(errno.EMLINK, f"{path.name} beside it is a link; remove it", str(path))


def locked(path: Path, *, wait: bool = False) -> int:
    """Make a file if it is missing, and lock it: its descriptor, with which the lock ends. If
    another process has the lock, waits or raises BlockingIOError. No link is followed: OSError."""
    while True:
        if path.is_symlink():
            raise _link_in_the_way(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever had the lock may have renamed or removed the file since it was opened.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.lstat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
