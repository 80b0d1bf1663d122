"""Files by name: a path, or an address that fsspec knows, such as s3://, hf:// or memory://."""

import bz2
import contextlib
import glob
import gzip
import hashlib
import io
import lzma
import os
import select
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lineartime.base.errors import DataError, LineartimeError, ResourceError, UsageError, reason_of
from lineartime.base.files import open_regular, replaced
from lineartime.base.settings import require

Name = str | Path  # a path, or an address where one may be given: a `str`, for a `Path` would lose a slash of it


def is_address(name: Name) -> bool:
    """Whether this names something in a store, and not on this machine."""
    return "://" in str(name)


def store_of(name: Name) -> tuple[Any, str]:
    """The file system of a name, and the path there. Raises UsageError without its library and for
    an address that fsspec does not understand; where it connects at once, what its library does."""
    import fsspec

    if not is_address(name):  # fsspec would join file systems at a "::", and take "~" for a home
        return fsspec.filesystem("file"), str(Path(name).absolute())
    try:
        return fsspec.core.url_to_fs(str(name))
    except (ImportError, ValueError, TypeError, AttributeError) as e:
        raise UsageError("cannot open this address", name, f"{type(e).__name__}: {e}") from None


@contextlib.contextmanager
def reading(name: Name, kind: type[LineartimeError] = DataError) -> Iterator[None]:
    """Inside the block, errors of a file, a store's own too, are DataErrors. kind: ResourceError
    for an output."""
    what = "cannot read" if kind is DataError else "cannot write"
    try:
        yield
    except LineartimeError:
        raise
    except FileNotFoundError:
        raise kind(what, name, "no such file or folder") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:
        if packing_of(name) and getattr(e, "errno", None) is None:
            raise kind(f"damaged {packing_of(name)} file", name, str(e)) from None
        raise kind(what, name, reason_of(e)) from None
    except Exception as e:
        if not is_address(name):
            raise
        raise kind(what, name, f"{type(e).__name__}: {e}") from None


def opened(name: Name) -> io.BufferedReader:
    """The bytes of a regular file. Raises OSError, and what the store's library raises."""
    if is_address(name):
        store, path = store_of(name)
        return io.BufferedReader(store.open(path, "rb"), 1 << 20)
    return io.BufferedReader(open_regular(Path(name)), 1 << 20)


def packing_of(name: Name) -> str:
    """The ending of a packed file in lower case, else ""."""
    ending = f".{str(name).rpartition('.')[2].lower()}"
    return ending if ending in (".gz", ".bz2", ".xz", ".zst") else ""


@contextlib.contextmanager
def unpacked(name: Name) -> Iterator[Any]:
    """A file's bytes, unpacked. Raises DataError in the block."""
    with reading(name), opened(name) as file:
        packing = packing_of(name) if file.peek(1) else ""  # nothing is packed in an empty file
        plain: Any = file
        if packing == ".zst":
            import pyarrow

            plain = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
        elif packing:
            packers: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}
            plain = packers[packing].open(file)
        with plain:
            yield plain


def file_blocks(name: Name, size: int = 1 << 16) -> Iterator[bytes]:
    """The bytes of a file, unpacked, in blocks of `size`; `-` is stdin. Raises DataError."""
    if name == "-":
        yield from stdin_blocks()
        return
    with unpacked(name) as file:
        while block := file.read(size):
            yield block


def stdin_blocks(size: int = 1 << 20, *, ticks: bool = False) -> Iterator[bytes]:
    """Blocks of at most `size` bytes of stdin. ticks: also b"" now and then while nothing comes."""
    with reading("stdin"):
        while sys.stdin is not None:
            # A little at a time: a signal that comes before a read is seen when the read returns.
            if select.select([sys.stdin], [], [], 0.2)[0]:
                if not (block := os.read(sys.stdin.fileno(), size)):
                    return
                yield block
            elif ticks:
                yield b""


def read_all(name: Name, most: int = -1) -> bytes:
    """The bytes of a file, or the first `most`. Raises DataError for one that cannot be read."""
    with reading(name), opened(name) as file:
        return file.read(most)


def size_of(name: Name) -> int:
    """The bytes of a file. Raises DataError for one that is missing."""
    with reading(name):
        store, path = store_of(name)
        return store.size(path) or 0


def exists(name: Name, kind: type[LineartimeError] = DataError) -> bool:
    """Whether there is a file or folder of this name. kind: see `reading`."""
    with reading(name, kind):
        store, path = store_of(name)
        return bool(store.exists(path)) or (not is_address(name) and os.path.lexists(name))


def check_new_folder(out: Name) -> None:
    """Raise before long work: UsageError if something has this name, ResourceError where no folder
    can be made."""
    require(not exists(out, ResourceError), "the output exists already", str(out), "choose another or delete it")
    if not is_address(out):
        parent = next(each for each in Path(os.path.abspath(out)).parents if each.exists())
        require(parent.is_dir() and os.access(parent, os.W_OK), "cannot write", out,
                f"{parent} is no folder that you may write to", ResourceError)


def is_empty(folder: Name) -> bool:
    """Whether nothing has this name but an empty folder. Raises ResourceError."""
    with reading(folder, ResourceError):
        store, path = store_of(folder)
        return not exists(folder, ResourceError) or (store.isdir(path) and not store.ls(path))


def require_there(names: Iterable[Name]) -> None:
    """Raise DataError for a missing file or folder, before torch is imported. `-` is stdin."""
    for name in names:
        is_elsewhere = name == "-" or is_address(name) or str(name).startswith("hub:")
        if not is_elsewhere and not glob.has_magic(str(name)) and not os.path.lexists(name):
            raise DataError("cannot read", name, "no such file or folder")


@contextlib.contextmanager
def uploaded(address: Name | None) -> Iterator[Path]:
    """An empty folder, whose files go to an address at the end of the block, the manifest last, so
    that a part of them is not taken for all; None: nowhere."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "done")
        folder.mkdir()
        yield folder
        if address is not None:
            with reading(address, ResourceError):
                store, path = store_of(address)
                store.makedirs(path, exist_ok=True)
                for file in sorted(folder.iterdir(), key=lambda file: file.name.lower() == "manifest.json"):
                    store.put(str(file), os.path.join(path, file.name), recursive=True)


def cached(folder: Name, sizes: dict[str, int], key: str) -> Path:
    """A folder in the cache of this machine with files of a folder in a store, by name and size.
    key: a hash of what they hold. Raises DataError for a bad name and a missing file."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lineartime" / key[:16]
    cache.mkdir(parents=True, exist_ok=True)
    for name, n_bytes in sizes.items():
        if Path(name).name != name:  # a manifest may come from anybody
            raise DataError("not the name of a file", os.path.join(folder, name))
        if not (cache / name).exists() or (cache / name).stat().st_size != n_bytes:
            there = os.path.join(folder, name)
            with reading(there), opened(there) as file, replaced(cache / name) as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
    return cache


def expanded(name: Name) -> list[str]:
    """The files and folders of a pattern such as `books/*.txt`, in order; or the name itself."""
    if is_address(name):
        with reading(name):
            store, path = store_of(name)
            found = store.glob(path) if glob.has_magic(path) and not store.exists(path) else []
        return [store.unstrip_protocol(each) for each in sorted(found)] or [str(name)]
    return ([] if os.path.lexists(name) else sorted(glob.glob(str(name), recursive=True))) or [str(name)]


def files_below(folder: Name) -> list[str]:
    """Relative names of all files that are not hidden, in order; each folder is read once, through
    links too. Raises DataError for one that cannot be read."""
    if is_address(folder):
        with reading(folder):
            store, top = store_of(folder)
            found = [each.removeprefix(top).lstrip("/") for each in store.find(top)]
        return sorted(name for name in found if "/." not in f"/{name}")

    def refuse(e: OSError) -> None:
        raise DataError("cannot read", e.filename, e.strerror)

    names, seen = list[str](), set[str]()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        if os.path.realpath(parent) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(parent))
        folders[:] = [name for name in sorted(folders) if not name.startswith(".")]
        names += [(Path(parent) / name).relative_to(folder).as_posix() for name in files if not name.startswith(".")]
    return sorted(names)


def hash_of(name: Name) -> dict[str, Any]:
    """The bytes and the SHA-256 of a file. Raises DataError for one that cannot be read."""
    with reading(name), opened(name) as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def is_as_written(path: Path, expected: dict[str, Any], by_hash: bool = True) -> bool:
    """Whether a file has the size and, with `by_hash`, the SHA-256 of `expected`, see `hash_of`."""
    # expected: what somebody's file says
    with contextlib.suppress(OSError, DataError, ValueError, TypeError, LookupError):
        same_size = path.stat().st_size == expected["bytes"]  # first: a hash of 100 GiB takes minutes
        return same_size and (not by_hash or hash_of(path) == expected)
    return False
