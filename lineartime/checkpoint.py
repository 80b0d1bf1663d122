"""Checkpoints as folders that are complete or absent, and the lock on a run's folder.

`RUN/step-00000042/` holds safetensors files, text files and `MANIFEST.json`: the format version, the run, the step,
and the size and SHA-256 of every other file. A save writes a temporary folder, flushes it to the disk and renames it,
and only then removes older checkpoints. A load uses no file that does not match the manifest.

A folder for sharing has a manifest without run and step; files that it does not list, such as a README, may change."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from lineartime.atomic_io import fsync, hashed_file, locked, open_regular, read_bytes
from lineartime.distributed.ranks import ALONE, Ranks, gather_json, wait_for_all
from lineartime.errors import CheckpointError, ResourceError

FORMAT = 1
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 1 << 20
LEFTOVER = re.compile(r"\.(tmp|trash)-step-([0-9]{8,18}|link)-[0-9a-f]{16}")
TENSORS = ".safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


Contents = dict[str, tuple[bytes, list[Tensor]]]


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    path: Path
    step: int
    run: str
    tensors: dict[str, dict[str, Tensor]]
    """By file stem, then by tensor name; on the CPU."""
    files: dict[str, str]
    """Texts by file name."""


class Newest(NamedTuple):
    """The newest valid checkpoint of a run."""

    path: Path
    step: int
    run: str
    damaged: dict[int, str]
    """The reason of each newer, damaged checkpoint by step, newest first."""

    def reasons(self) -> str:
        """The newer, damaged checkpoints and what is wrong with each, in one line."""
        return "; ".join(f"step {step}: {reason}" for step, reason in self.damaged.items())


def save(run_dir: Path, step: int, *, run: str, tensors: Mapping[str, Mapping[str, Tensor]],
         files: Mapping[str, str], keep: int, spare: int | None = None, ranks: Ranks = ALONE) -> Path:
    """Write the checkpoint of `step`, then remove checkpoints older than the `keep` newest valid ones, but for that of
    the step `spare`. The caller must hold `lock`.

    run: an id of the run. tensors: named tensors on any device by file stem (a shared tensor once). files: texts by
    file name. Each of several ranks writes its own files into one folder, which rank 0 makes and renames. An existing
    valid checkpoint of this run and step is kept. Raises ResourceError if the disk is full or fails, and leaves earlier
    checkpoints untouched; CheckpointError if a checkpoint of another run has this step; ValueError for a name, step or
    dtype that cannot be stored."""
    run_dir = Path(run_dir)
    target = run_dir / f"step-{step:08d}"
    contents = _contents(tensors, files)  # what can be refused is, before the disk changes
    if _step_of(target.name) != step or not 0 < len(run) <= 100:
        raise ValueError(f"not a step or not a run: {step}, {run!r:.100}")
    try:
        aside = None
        if ranks.is_first:
            _make_dirs(run_dir)
            _remove_leftovers(run_dir)
            aside = None if _is_saved(target, run) else f".tmp-{target.name}-{secrets.token_hex(8)}"
        aside = gather_json(aside, ranks)[0]
        if aside is not None:
            _write_checkpoint(run_dir / aside, target, run, contents, ranks)
        # Now the checkpoint is there, and older ones may go; after a kill here the next save removes them.
        if ranks.is_first:
            _fsync_dir(run_dir)
            point(run_dir / "latest", target.name)
            _retain(run_dir, step, keep, spare)
        wait_for_all(ranks)
    except OSError as error:
        needed = sum(len(head) + sum(tensor.nbytes for tensor in body) for head, body in contents.values())
        raise _save_error(error, target, needed) from error
    return target


def _contents(tensors: Mapping[str, Mapping[str, Tensor]], files: Mapping[str, str]) -> Contents:
    """The files of a checkpoint by name: bytes, and the tensors whose bytes follow them."""
    contents: Contents = {name: (text.encode(), []) for name, text in files.items()}
    for stem, named in tensors.items():
        head, names = _layout(named)
        contents[stem + TENSORS] = head, [named[name] for name in names]
    for name in contents:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST or (name in files and name.endswith(TENSORS)):
            raise ValueError(f"not a name for a file of a checkpoint: {name!r}")
    return contents


def newest(run_dir: Path, ranks: Ranks = ALONE) -> Newest | None:
    """The newest checkpoint of a run whose every byte matches its manifest; None without any checkpoint.

    Each of several ranks reads a share of the files. Raises CheckpointError, with each reason, if all checkpoints are
    damaged."""
    run_dir = Path(run_dir)
    damaged: dict[int, str] = {}
    try:
        steps = saved_steps(run_dir)
    except FileNotFoundError:
        return None
    except (OSError, MemoryError) as error:
        raise CheckpointError("the run cannot be read", f"{run_dir}: {_reason(error)}") from error
    # From the newest to the oldest, until every rank finds its share of the files whole.
    for step in steps:
        path = run_dir / f"step-{step:08d}"
        run, reason = "", None
        try:
            run = _check(path, ranks)
        except CheckpointError as error:
            reason = str(error.where)
        reason = next(filter(None, gather_json(reason, ranks)), None)
        if reason is None:
            return Newest(path, step, run, damaged)
        damaged[step] = reason
    if damaged:
        raise CheckpointError("no checkpoint can be used", "; ".join(damaged.values()),
                              "restore one from a copy, or start a run in another folder")
    return None


def load(path: Path, stem: str | None = None) -> Checkpoint:
    """The content of one checkpoint. Each file is read once, and parsed only after it matched the manifest.

    stem: of the tensors only these are kept, in one file or in parts; all others are compared with the manifest too.
    Raises CheckpointError for any damage."""
    path = Path(path)
    manifest = _manifest_at(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    files: dict[str, str] = {}
    for name, entry in manifest["files"].items():
        is_text = not name.endswith(TENSORS)
        keep = is_text or stem is None or re.fullmatch(f"{stem}(-.*)?{TENSORS}", name) is not None
        data = _read(path / name, entry, keep)
        try:
            if is_text:
                files[name] = data.decode()
            elif keep:
                tensors[name.removesuffix(TENSORS)] = safetensors.torch.load(data)
        except Exception as error:  # parsers document no complete list of their exceptions
            raise _damage(path / name, f"cannot be parsed ({type(error).__name__})") from error
    return Checkpoint(path, manifest["step"], manifest["run"], tensors, files)


def joined(loaded: Checkpoint, stem: str) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint that are in one file, or in the parts that `STEM.json` names; none if there is
    neither. Parts are taken out of `loaded` one by one, so that there is not all of it twice."""
    if index_name(stem) not in loaded.files:
        return loaded.tensors.get(stem, {})
    index = json.loads(loaded.files[index_name(stem)])
    whole = {}
    for name, entry in index.items():
        parts = [loaded.tensors[file.removesuffix(TENSORS)].pop(name) for file, _, _ in entry["parts"]]
        whole[name] = torch.cat(parts).view(entry["shape"])
    return whole


def index_name(stem: str) -> str:
    """The file that says which files of a checkpoint hold which parts of its tensors `stem`."""
    return f"{stem}.json"


def read_parts(folder: Path, stem: str, wanted: Mapping[str, tuple[Sequence[int], int, int]]) -> dict[str, Tensor]:
    """Elements [start, stop) of flattened tensors of a checkpoint, on the CPU: no more is read than these.

    wanted: the shape of the whole tensor, start and stop by name. stem: the tensors are in one file,
    `STEM.safetensors`, or `STEM.json` says for each its shape and its parts: the file that holds each, flattened, start
    and stop. Raises CheckpointError for tensors that are not as expected, or not finite."""
    try:
        index = _index(folder, stem)
        # A shape of [] stands for [1], see `reshaped`.
        wrong = [name for name, (shape, _, _) in wanted.items()
                 if name not in index or index[name]["shape"] not in (list(shape), [])
                 or math.prod(index[name]["shape"]) != math.prod(shape)]
        if wrong:
            raise CheckpointError("the checkpoint's tensors are not this model's", f"{folder}: {first_five(wrong)}")
        # The pieces of [start, stop) lie one behind the other in the parts that overlap it.
        found = {}
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}
            for name, (_, start, stop) in wanted.items():
                pieces = [torch.zeros(0)]  # of a part without elements
                for file_name, first, last in index[name]["parts"]:
                    if first < stop and start < last:
                        if file_name not in files:
                            files[file_name] = stack.enter_context(safetensors.safe_open(folder / file_name, "pt"))
                        flat = files[file_name].get_tensor(name).view(-1)
                        if not flat.is_floating_point():
                            raise _damage(folder / file_name, f"{name} is {flat.dtype}")
                        pieces.append(flat[max(start - first, 0) : stop - first])
                found[name] = torch.cat(pieces)
                if len(found[name]) != stop - start:
                    raise _damage(folder, f"{name} has holes")
    except (OSError, ValueError, KeyError, TypeError, MemoryError, RuntimeError, safetensors.SafetensorError) as error:
        raise _damage(folder, f"the tensors of {stem} cannot be read ({_reason(error)})") from error
    check_finite(found, folder)
    return found


def _index(folder: Path, stem: str) -> dict[str, Any]:
    """The shape and the parts of each tensor: by the index, or of one file, in which each is a part of its own."""
    if (folder / index_name(stem)).exists():
        return json.loads((folder / index_name(stem)).read_bytes())
    index = {}
    with safetensors.safe_open(folder / f"{stem}{TENSORS}", "pt") as file:
        for name in file.keys():
            shape = file.get_slice(name).get_shape()
            index[name] = {"shape": shape, "parts": [[f"{stem}{TENSORS}", 0, math.prod(shape)]]}
    return index


def has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest, be it a link that leads nowhere."""
    return os.path.lexists(folder / MANIFEST)


def manifest_of(files: Mapping[str, bytes], written: Mapping[str, Any]) -> bytes:
    """The manifest of a folder for sharing, from the contents of its files by name, and from the entries of those that
    `write_tensors` has written."""
    entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return _manifest({"format": FORMAT, "files": {**entries, **written}})


def check_files(folder: Path, names: Iterable[str]) -> int | None:
    """Compare these files of a folder for sharing, or of a copied checkpoint, with its manifest; returns the step of a
    checkpoint. Raises CheckpointError, with the file, for a difference and for a file that the manifest does not list.
    """
    manifest = _read_manifest(folder)
    for name in names:
        if name not in manifest["files"]:
            raise _damage(folder / MANIFEST, f"{name} is not in it")
        _read(folder / name, manifest["files"][name], keep=False)
    return manifest.get("step")


def point(link: Path, target: Path | str) -> None:
    """Point a link at `target`, unless another kind of file has its name, and remove what killed processes have left
    beside it. Links are for users alone, so errors of the file system are ignored."""
    aside = link.with_name(f".tmp-step-link-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        _remove_leftovers(link.parent)
        if link.is_symlink() or not link.exists():
            _symlink(target, aside)
            try:
                _rename(aside, link)
            except OSError:
                _unlink(aside)
                raise


def reshaped(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """A stored tensor in the shape of its parameter: older versions stored scalar parameters as `[]`, now `[1]`."""
    return stored.reshape(1) if tuple(stored.shape) == () and tuple(shape) == (1,) else stored


def check_tensors(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors of the file `path` in the shapes of their parameters, see `reshaped`.

    Raises CheckpointError, with the file and the first five differences, unless names, shapes and dtypes are as
    expected and every number is finite."""
    # Names, shapes and types first, then numbers: a tensor of another model is not called damaged.
    loaded = {name: reshaped(tensor, expected[name].shape) if name in expected else tensor
              for name, tensor in loaded.items()}
    wrong = [f"{name} is missing" for name in expected if name not in loaded]
    wrong += [f"{name} is not expected" for name in loaded if name not in expected]
    wrong += [f"{name} is {_kind(loaded[name])}, expected {_kind(tensor)}" for name, tensor in expected.items()
              if name in loaded and _kind(loaded[name]) != _kind(tensor)]
    if wrong:
        raise CheckpointError("the checkpoint's tensors are not this model's", f"{path}: {first_five(wrong)}")
    check_finite(loaded, path)
    return loaded


def check_finite(tensors: Mapping[str, Tensor], path: Path | str) -> None:
    """Raise CheckpointError, with the file `path` and the first five names, for tensors with NaN or infinity."""
    wrong = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if wrong:
        raise CheckpointError("weights that are not finite", f"{path}: {first_five(wrong)}", "use another checkpoint")


def first_five(wrong: list[str]) -> str:
    """The first five of a list for a message, and how many more there are."""
    return ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Lock a run's folder, which is created if necessary. The kernel frees the lock when the process ends.

    Raises ResourceError, with the process that holds the lock, if the run is in use."""
    path = Path(run_dir) / "run.lock"
    try:
        _make_dirs(path.parent)
        descriptor = locked(path)
        _held.add(descriptor)
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(descriptor, f"pid {os.getpid()} on host {socket.gethostname()} since {since}\n".encode(), 0)
    except BlockingIOError as error:
        with contextlib.suppress(OSError):
            holder = "".join(c for c in read_bytes(path).decode(errors="replace")[:200] if c.isprintable())
        raise ResourceError("the run is in use", f"{run_dir}: in use by {holder or 'another process'}",
                            "wait until it ends, or choose another folder") from error
    except OSError as error:
        raise ResourceError("the run cannot be locked", f"{path}: {_reason(error)}") from error
    try:
        yield
    finally:
        _release(descriptor)


_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _release(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _release_all() -> None:
    """Release all locks in a forked child, which shares its parent's and may outlive it."""
    for descriptor in [*_held]:
        _release(descriptor)


os.register_at_fork(after_in_child=_release_all)


def write_tensors(path: Path, like: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> dict[str, Any]:
    """Write and flush a new safetensors file, a tensor at a time; returns its entry in a manifest.

    like: tensors of the shapes and dtypes to write, which may be on the meta device. tensor: what has this name."""
    head, names = _layout(like)
    return _write_file(path, head, map(tensor, names))


def _layout(named: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """A safetensors file's header, and its tensors' names in file order: by falling width, which aligns them, then by
    name.

    Not the library's writer, which needs a second copy of the state in memory and does not flush the file."""
    # The file is the header's length, the header, and the tensors' bytes; data_offsets count from the header's end.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = sorted(named, key=lambda name: (-named[name].element_size(), name))
    end = 0
    for name in names:
        tensor = named[name]
        if tensor.dtype not in DTYPES or name in header:
            raise ValueError(f"cannot be stored: {name!r} of {tensor.dtype}")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def _write_checkpoint(folder: Path, target: Path, run: str, contents: Contents, ranks: Ranks) -> None:
    """Write every rank's files and the manifest into a new folder, flush them to the disk, and give the folder its
    name. After an error nothing is left of it."""
    try:
        if ranks.is_first:
            _mkdir(folder)
        wait_for_all(ranks)
        # Each rank writes its files, and the first one the manifest of all, as the last file.
        own = {name: _write_file(folder / name, *contents[name]) for name in sorted(contents)}
        entries = dict(sorted((name, entry) for each in gather_json(own, ranks) for name, entry in each.items()))
        if ranks.is_first:
            manifest = {"format": FORMAT, "run": run, "step": _step_of(target.name), "files": entries}
            _write_file(folder / MANIFEST, _manifest(manifest), [])
            _fsync_dir(folder)
            if os.path.lexists(target):  # it is damaged
                _rename(target, _trash(target))
            _rename(folder, target)
    except BaseException:
        if ranks.is_first:  # another rank still writes
            with contextlib.suppress(OSError):
                _remove_tree(folder)
        raise


def _write_file(path: Path, head: bytes, body: Iterable[Tensor]) -> dict[str, Any]:
    """Write and flush a new file: bytes, then those of tensors. Returns its manifest entry."""
    entries: dict[str, Any] = {}
    with hashed_file(path, entries) as write:
        write(head)
        for tensor in body:
            whole = tensor.detach().cpu().contiguous()
            write(whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data)
    return entries[path.name]


def _manifest(content: dict[str, Any]) -> bytes:
    """The manifest's bytes: the content, then the SHA-256 of the content's JSON. The same in every format version."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=1) + "\n").encode()


def _manifest_at(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, for which exactly the files that it lists are there."""
    step = _step_of(path.name)
    if step is None:
        raise CheckpointError("a checkpoint under another name", path,
                              "give it its name back, such as step-00000042, or copy with `lineartime export`")
    try:
        present = os.listdir(path)
    except (OSError, ValueError, MemoryError) as error:
        raise _damage(path, f"cannot be read ({_reason(error)})") from error
    content = _read_manifest(path)
    if content.get("step") != step or not isinstance(content.get("run"), str):
        raise _damage(path / MANIFEST, f"expected step {step} of a run, found step {content.get('step')!a:.20}")
    for name in sorted({*content["files"], MANIFEST} ^ {*present}):
        raise _damage(path, f"{name!a:.100} is {'missing' if name in content['files'] else 'in no manifest'}")
    return content


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a manifest, of a checkpoint or of a folder for sharing, without its own hash."""
    path = folder / MANIFEST
    try:
        raw = read_bytes(path, MAX_MANIFEST_BYTES)
        content = json.loads(raw.decode())
        del content["sha256"]
        is_whole = raw == _manifest(content)
        version, files = content["format"], content.get("files")
    except (OSError, MemoryError) as error:
        raise _damage(path, f"cannot be read ({_reason(error)})") from error
    except Exception as error:
        raise _damage(path, f"not a manifest ({type(error).__name__})") from error
    if not is_whole:
        raise _damage(path, "does not match its own sha256")
    if type(version) is int and version > FORMAT:
        raise CheckpointError("checkpoint of a newer version", f"{folder}: format {version}, this version reads "
                              f"{FORMAT}", f"install a version that reads format {version}")
    if version != FORMAT or not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise _damage(path, f"expected format {FORMAT}, and the size and sha256 of files")
    return content


def _read(path: Path, entry: Mapping[str, Any], keep: bool) -> bytes:
    """A regular file's bytes after they matched `entry`. Without `keep` they are checked in little memory, not kept."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.get("bytes"):
                raise _damage(path, f"expected {entry.get('bytes')!a:.20} bytes, found {size}")
            data = file.readall() if keep else b""
            found = (hashlib.sha256(data) if keep else hashlib.file_digest(file, "sha256")).hexdigest()
    except (OSError, MemoryError) as error:
        raise _damage(path, f"cannot be read ({_reason(error)})") from error
    if found != entry.get("sha256"):
        raise _damage(path, f"expected sha256 {entry.get('sha256')!a:.10}..., found {found!a:.10}...")
    return data


def _check(path: Path, ranks: Ranks = ALONE) -> str:
    """The id of a checkpoint's run, after every file, or every one of this rank's share, matched its manifest."""
    manifest = _manifest_at(path)
    for name, entry in list(manifest["files"].items())[ranks.rank :: ranks.size]:
        _read(path / name, entry, keep=False)
    return manifest["run"]


def _is_saved(target: Path, run: str) -> bool:
    try:
        found = _check(target)
    except CheckpointError:
        return False
    if found != run:
        raise CheckpointError("another run's checkpoint is in the way", f"{target}: run {found!a}, this run is {run!a}",
                              "choose another folder")
    return True


def _step_of(name: str) -> int | None:
    digits = name.removeprefix("step-")
    is_step = re.fullmatch("[0-9]{8,18}", digits) and name == f"step-{int(digits):08d}"
    return int(digits) if is_step else None


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the entries that are named like checkpoints, highest first."""
    return sorted((step for step in map(_step_of, os.listdir(run_dir)) if step is not None), reverse=True)


def _retain(run_dir: Path, saved: int, keep: int, spare: int | None) -> None:
    """Remove checkpoints older than the `keep` newest valid ones; the newest is `saved`, which was just written."""
    valid = 1
    # A damaged checkpoint does not count, but is not removed before it is old: it may be all that somebody has.
    for step in saved_steps(run_dir):
        path = run_dir / f"step-{step:08d}"
        if step < saved and valid >= keep and step != spare:
            _rename(path, _trash(path))
        elif step < saved:
            with contextlib.suppress(CheckpointError):
                _check(path)
                valid += 1
    _remove_leftovers(run_dir)


def _trash(path: Path) -> Path:
    return path.with_name(f".trash-{path.name}-{secrets.token_hex(8)}")


def _remove_leftovers(run_dir: Path) -> None:
    for name in os.listdir(run_dir):
        if LEFTOVER.fullmatch(name):
            _remove_tree(run_dir / name)


def _remove_tree(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        _unlink(path)
    else:
        shutil.rmtree(path)


def _make_dirs(path: Path) -> None:
    if not path.is_dir():
        _make_dirs(path.absolute().parent)
        with contextlib.suppress(FileExistsError):
            _mkdir(path)
        _fsync_dir(path.absolute().parent)


def _save_error(error: OSError, target: Path, needed: int) -> ResourceError:
    where, todo = f"{target}: {_reason(error)}", "look at the disk"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = "free some space"
        with contextlib.suppress(OSError):
            free = os.statvfs(target.parent)
            where += f" ({needed:,} bytes needed, {free.f_bavail * free.f_frsize:,} free)"
    return ResourceError("the checkpoint cannot be saved", where, f"{todo}; earlier checkpoints are untouched")


def _damage(path: Path, reason: str) -> CheckpointError:
    return CheckpointError("damaged checkpoint", f"{path}: {reason}")


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# A save changes the disk by these names and `hashed_file`, so that a test can end the process at each change.
_mkdir, _rename, _symlink, _unlink, _fsync_dir = os.mkdir, os.rename, os.symlink, os.unlink, fsync
