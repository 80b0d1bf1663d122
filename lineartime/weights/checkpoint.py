"""Checkpoints as folders that are complete or absent, and the lock on a run's folder.

`RUN/step-00000042/` holds safetensors files, text files and `MANIFEST.json`: the format version,
the run, the step, and the size and SHA-256 of every other file. A save writes a temporary folder,
flushes it and renames it, and only then removes older ones. A load uses no file that does not match
the manifest, and runs no code. A folder for sharing has a manifest without run and step; files that
it does not list, such as a README, may change."""

import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor

from lineartime.base.errors import CheckpointError, ResourceError, raised_as, reason_of
from lineartime.base.files import damaged, fsync, hashed_stream, locked, read_bytes, read_json
from lineartime.base.ranks import ALONE, Ranks, gather_json, wait_for_all
from lineartime.base.settings import require
from lineartime.base.stores import is_as_written
from lineartime.base.tensor_bytes import bytes_of
from lineartime.folders import STEP, saved_steps, step_name

FORMAT = 1
MANIFEST = "MANIFEST.json"
TENSORS = ".safetensors"
INDEX = ".json"  # in place of `TENSORS`: which files of a checkpoint hold which parts of these tensors
LEFTOVERS = (".tmp-step-", ".trash-step-")  # how the names of what a killed save or removal leaves begin
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


class Checkpoint(NamedTuple):
    """A checkpoint. After `newest` every byte of it has matched its manifest, after `check` this
    rank's share. damaged: what is wrong with newer ones by step, which only `newest` says."""

    path: Path
    step: int
    run: str
    damaged: dict[int, str]

    def reasons(self) -> str:
        """What is wrong with newer checkpoints, in one line."""
        return "; ".join(f"step {step}: {reason}" for step, reason in self.damaged.items())


Content = bytes | Mapping[str, Tensor]  # what a file holds: the bytes of a text, or named tensors


def save(run_dir: Path, step: int, *, run: str, tensors: Mapping[str, Mapping[str, Tensor]],
         files: Mapping[str, str], keep: int, ranks: Ranks = ALONE) -> Path:
    """Write the checkpoint of `step`, then remove those older than the `keep` newest valid ones.
    The caller must hold `lock`. A valid checkpoint of this run and step that is there is kept.

    run: an id of the run. tensors: named tensors on any device by file stem (a shared tensor once).
    files: texts by file name. Each of several ranks writes its own files into one folder, which
    rank 0 makes and renames. Raises ResourceError if the disk fails; CheckpointError if another
    run's checkpoint has this step; ValueError for a dtype that cannot be stored."""
    target = run_dir / step_name(step)
    contents: dict[str, Content] = {name: text.encode() for name, text in files.items()}
    contents |= {stem + TENSORS: named for stem, named in tensors.items()}
    try:
        # Rank 0 decides whether there is something to write, and where.
        aside = None
        if ranks.is_first:
            _make_dirs(run_dir)
            _remove_leftovers(run_dir)
            there = _run_of(target)
            require(there in (None, run), "another run's checkpoint is in the way",
                    f"{target}: run {there!a}, this run is {run!a}", "choose another folder", CheckpointError)
            aside = f".tmp-{target.name}-{secrets.token_hex(8)}" if there is None else None
        if (aside := gather_json(aside, ranks)[0]) is not None:
            _write_checkpoint(run_dir / aside, target, {"format": FORMAT, "run": run, "step": step}, contents, ranks)
        # Now the checkpoint is there; older ones may go, after a kill here by the next save.
        if ranks.is_first:
            fsync(run_dir)
            point(run_dir / "latest", target.name)
            _retain(run_dir, step, keep)
        wait_for_all(ranks)
    except OSError as error:
        n_bytes = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
        raise ResourceError("the checkpoint cannot be saved",
                            f"{target}: {reason_of(error)} ({n_bytes:,} bytes needed)",
                            "free some space, or look at the disk; earlier checkpoints are untouched") from error
    return target


def _write_checkpoint(folder: Path, target: Path, facts: dict[str, Any], contents: Mapping[str, Content],
                      ranks: Ranks) -> None:
    """Write every rank's files and the manifest into a new folder, flush them to the disk, and give
    the folder its name. After an error nothing is left of it."""
    try:
        if ranks.is_first:
            os.mkdir(folder)
        wait_for_all(ranks)
        own = {name: write_file(folder / name, contents[name]) for name in sorted(contents)}
        entries = dict(sorted((name, entry) for each in gather_json(own, ranks) for name, entry in each.items()))
        if ranks.is_first:
            write_file(folder / MANIFEST, manifest_of({**facts, "files": entries}))
            # All of it is on the disk before it gets its name: no power loss leaves half under it.
            fsync(folder)
            if os.path.lexists(target):  # it is damaged
                _discard(target)
            os.rename(folder, target)
    except BaseException:
        if ranks.is_first:  # another rank still writes
            shutil.rmtree(folder, ignore_errors=True)
        raise


def write_file(path: Path, content: Content) -> dict[str, Any]:
    """Write and flush a new file, a text or named tensors in the format of safetensors: its entry
    of the manifest. Raises OSError, and ValueError for a dtype that cannot be stored."""
    head, tensors = (content, []) if isinstance(content, bytes) else _layout(content)
    entries: dict[str, Any] = {}
    with hashed_stream(path, entries) as write:
        write(head)
        for tensor in tensors:
            write(bytes_of(tensor))
    return entries[path.name]


def _layout(named: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """A safetensors file's header, and its tensors in file order: by falling width, which aligns
    them, then by name.

    The library's `save` copies the whole state in memory. Its `save_file` neither hashes nor
    flushes a file, which only its owner can read, and the tests of a failing disk do not see it."""
    # The header's length, the header, and the tensors' bytes; data_offsets count from its end.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, ordered = 0, dict(sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0])))
    for name, tensor in ordered.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"cannot be stored: {name!r} of {tensor.dtype}")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [*ordered.values()]


def newest(run_dir: Path, ranks: Ranks = ALONE) -> Checkpoint | None:
    """The newest checkpoint of a run whose every byte matches its manifest; None without any.
    Raises CheckpointError, with each reason, if all checkpoints are damaged."""
    damaged: dict[int, str] = {}
    # Until every rank finds its share of the files whole.
    for step in saved_steps(run_dir):
        path = run_dir / step_name(step)
        run, reason = "", None
        try:
            run = check(path, ranks).run
        except CheckpointError as error:
            reason = f"{error.where}: {error.todo}"
        reason = next(filter(None, gather_json(reason, ranks)), None)
        if reason is None:
            return Checkpoint(path, step, run, damaged)
        damaged[step] = reason
    require(not damaged, "no checkpoint can be used", "; ".join(damaged.values()),
            "restore one from a copy, or start a run in another folder", CheckpointError)
    return None


def check(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """A checkpoint, whose bytes have matched its manifest, or this rank's share of them. Raises
    CheckpointError for damage, and for a folder that is not named like a checkpoint."""
    found = STEP.fullmatch(path.name)
    if found is None:
        raise CheckpointError("a checkpoint under another name", path,
                              "give it its name back, such as step-00000042, or copy with `lineartime export`")
    manifest, step = check_files(path, ranks=ranks), int(found[1])
    require_whole(manifest.get("step") == step and "run" in manifest, path / MANIFEST,
                  f"expected step {step} of a run, found step {manifest.get('step')!a:.20}")
    return Checkpoint(path, step, manifest["run"], {})


def check_files(folder: Path, names: Iterable[str] | None = None, ranks: Ranks = ALONE) -> dict[str, Any]:
    """The manifest of a folder, after these files have matched it; by default this rank's share of
    all. Raises CheckpointError for a difference and for a file that the manifest does not list."""
    manifest = _read_manifest(folder)
    listed = manifest["files"]
    for name in list(listed)[ranks.rank :: ranks.size] if names is None else names:
        require_whole(name in listed, folder / MANIFEST, f"{name} is not in it")
        require_whole((folder / name).exists(), folder / name, "it is missing")
        is_whole = is_as_written(folder / name, listed[name])
        require_whole(is_whole, folder / name, f"it is not the file that {MANIFEST} describes")
    return manifest


def read_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors `stem` of a checkpoint by name, on the CPU. Raises as `read_parts` does."""
    shapes = {name: entry["shape"] for name, entry in _index(folder, stem).items()}
    flat = read_parts(folder, stem, {name: (shape, 0, math.prod(shape)) for name, shape in shapes.items()})
    return {name: flat[name].view(shape) for name, shape in shapes.items()}


def read_parts(folder: Path, stem: str, wanted: Mapping[str, tuple[Sequence[int], int, int]]) -> dict[str, Tensor]:
    """Elements [start, stop) of flattened tensors of a checkpoint, on the CPU, float32 at least.

    wanted: the shape of the whole tensor, start and stop by name. stem: the tensors are in
    `STEM.safetensors`, or `STEM.json` says for each its shape and its parts: file, start and stop.
    Raises CheckpointError for tensors that cannot be read, are not as expected, or not finite."""
    found = {}
    index = _index(folder, stem)
    wrong = [name for name, (shape, _, _) in wanted.items() if name not in index or index[name]["shape"] != list(shape)]
    if wrong:
        raise CheckpointError("the checkpoint's tensors are not this model's", f"{folder}: {first_five(wrong)}")
    # Each part that overlaps [start, stop) gives a piece of it; the parts are in order.
    with (raised_as(CheckpointError, "the tensors cannot be read", folder / stem, safetensors.SafetensorError),
          contextlib.ExitStack() as stack):
        files = {name: stack.enter_context(open_tensors(folder / name))
                 for name in {part[0] for entry in index.values() for part in entry["parts"]}}
        for name, (_, start, stop) in wanted.items():
            pieces = [files[file].get_tensor(name).view(-1)[max(start - first, 0) : stop - first]
                      for file, first, last in index[name]["parts"] if first < stop and start < last]
            found[name] = torch.cat([torch.zeros(0, dtype=torch.float32, device="cpu"), *pieces])  # also of no piece
            is_whole = len(found[name]) == stop - start
            require_whole(is_whole, folder / f"{stem}{INDEX}", f"the parts of {name} are not all of it")
    check_finite(found, folder / f"{stem}{TENSORS}")
    return found


def open_tensors(path: Path) -> safetensors.safe_open:
    """Open a safetensors file. Raises CheckpointError for one that is missing or damaged."""
    with raised_as(CheckpointError, "the tensors cannot be read", path, OSError, safetensors.SafetensorError):
        return safetensors.safe_open(path, "pt")


def _index(folder: Path, stem: str) -> dict[str, Any]:
    """The shape and the parts of each tensor, from the index file; in one file each is one part."""
    path, name = folder / f"{stem}{INDEX}", f"{stem}{TENSORS}"
    if path.exists():
        with damaged(path):
            return {each: {"shape": [*map(int, entry["shape"])],
                           "parts": [(str(file), int(start), int(stop)) for file, start, stop in entry["parts"]]}
                    for each, entry in read_json(path).items()}
    with open_tensors(folder / name) as file:
        shapes = {each: file.get_slice(each).get_shape() for each in file.keys()}
    return {each: {"shape": shape, "parts": [(name, 0, math.prod(shape))]} for each, shape in shapes.items()}


def check_tensors(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError, with the first five differences, unless the names, shapes and dtypes
    of tensors are as expected, and every number is finite. path: their file."""
    def kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in tensors.items()}

    # Names, shapes and types first, then numbers: a tensor of another model is not called damaged.
    found, wanted = kinds(loaded), kinds(expected)
    wrong = [f"{name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'no such tensor')}"
             for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if wrong:
        raise CheckpointError("the checkpoint's tensors are not this model's", f"{path}: {first_five(wrong)}")
    check_finite(loaded, path)


def check_finite(tensors: Mapping[str, Tensor], path: Path | str) -> None:
    """Raise CheckpointError, with the first five names, for NaN and infinity."""
    wrong = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if wrong:
        raise CheckpointError("weights that are not finite", f"{path}: {first_five(wrong)}", "use another checkpoint")


def first_five(wrong: list[str]) -> str:
    """The first five of a list for a message, and how many more there are."""
    return ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")


def manifest_of(content: dict[str, Any]) -> bytes:
    """A manifest's bytes in every version: the content, then the SHA-256 of its JSON."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=1) + "\n").encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a manifest, without its own hash. Raises CheckpointError."""
    path = folder / MANIFEST
    with raised_as(CheckpointError, "damaged checkpoint", path, OSError, ValueError, LookupError, TypeError,
                   RecursionError):
        raw = read_bytes(path)
        content = json.loads(raw)
        del content["sha256"]
    require_whole(raw == manifest_of(content), path, "it does not match its own sha256")
    if type(version := content.get("format")) is int and version != FORMAT:
        raise CheckpointError("checkpoint of a newer version", f"{folder}: format {version}, this version reads "
                              f"{FORMAT}", f"install a version that reads format {version}")
    files, run = content.get("files"), content.get("run", "")
    require_whole(version == FORMAT and isinstance(files, dict) and isinstance(run, str), path,
                  "its format, files or run are not those of a manifest")
    return content


def _run_of(path: Path) -> str | None:
    """The id of the run of a checkpoint; None for one that is damaged or not there."""
    with contextlib.suppress(CheckpointError):
        return check(path).run
    return None


def require_whole(condition: bool, path: Path, reason: str) -> None:
    """Raise CheckpointError unless the condition holds: something is wrong with this file."""
    require(condition, "damaged checkpoint", path, reason, CheckpointError)


def point(link: Path, target: Path | str) -> None:
    """Point a link at `target`, unless a file has its name, and remove what killed processes have
    left beside it. Links are for users alone: errors of the system are ignored."""
    with contextlib.suppress(OSError):
        if link.is_symlink() or not link.exists():
            aside = link.with_name(f".tmp-step-link-{secrets.token_hex(8)}")
            os.symlink(target, aside)
            os.rename(aside, link)
    with contextlib.suppress(OSError):
        _remove_leftovers(link.parent)


def _retain(run_dir: Path, saved: int, keep: int) -> None:
    """Remove checkpoints older than the `keep` newest valid ones up to `saved`, which is valid."""
    valid = 1
    # A damaged one does not count, but stays until it is old: it may be all that somebody has.
    for step in saved_steps(run_dir):
        path = run_dir / step_name(step)
        if step < saved and valid < keep:
            valid += _run_of(path) is not None
        elif step < saved:
            _discard(path)
    _remove_leftovers(run_dir)


def _discard(path: Path) -> None:
    """Rename a checkpoint for `_remove_leftovers`, so that a kill leaves no half of one."""
    os.rename(path, path.with_name(f".trash-{path.name}-{secrets.token_hex(8)}"))


def _remove_leftovers(run_dir: Path) -> None:
    for path in (run_dir / name for name in os.listdir(run_dir) if name.startswith(LEFTOVERS)):
        if path.is_symlink() or not path.is_dir():
            os.unlink(path)
        else:
            shutil.rmtree(path)


def _make_dirs(path: Path) -> None:
    if not path.is_dir():
        _make_dirs(path.absolute().parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        fsync(path.absolute().parent)


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Make a run's folder if it is missing, and lock it; the kernel frees the lock when the process
    ends. Raises ResourceError, with the process that holds the lock, if the run is in use."""
    path = run_dir / "run.lock"
    with raised_as(ResourceError, "the run cannot be locked", path, OSError):
        _make_dirs(path.parent)
        try:
            descriptor = locked(path)
        except BlockingIOError:
            holder = path.read_text(errors="replace").strip() or "another process"
            raise ResourceError("the run is in use", f"{run_dir}: in use by {holder}",
                                "wait until it ends, or choose another folder") from None
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        with contextlib.suppress(OSError):  # for people alone; a full disk is told by what needs it
            file.truncate()
            file.write(f"pid {os.getpid()} on host {socket.gethostname()} since {since}\n".encode())
        yield
