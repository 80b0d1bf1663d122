"""The kernels for processors: C99 beside this file, compiled at first use, one library for all.

The compiler is `$CC` or `cc`. What it makes is kept for this user alone, under a name that depends
on the sources, the flags, the compiler and the processor, in `$LINEARTIME_CACHE` or the cache
folder. Without a compiler, or with LINEARTIME_NO_C=1, PyTorch does the same work. Loops share
PyTorch's threads where both have OpenMP."""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path

from lineartime.base.errors import ResourceError
from lineartime.base.files import replaced

HERE = Path(__file__).parent
FLAGS = shlex.split("-O3 -std=c99 -fPIC -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros "
                    "-ffp-contract=fast")
"""Sums may be taken in any order and products be added at once. Not -ffast-math: NaN stays NaN."""
PROCESSORS: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])  # for clang on ARM; to cross-compile
THREADS = ("-fopenmp", "-fopenmp-simd")  # not every compiler has PyTorch's OpenMP, as clang has not that of gcc
NO_C, CACHE = "LINEARTIME_NO_C", "LINEARTIME_CACHE"


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none: `in_words` says why."""
    return None if os.environ.get(NO_C) == "1" else loaded()[0]


def in_words() -> str:
    """What runs on a processor: "C (gcc 14.2.0)", or "PyTorch" and why there is no C."""
    return f"PyTorch ({NO_C} is 1)" if os.environ.get(NO_C) == "1" else loaded()[1]


@functools.cache
def loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None; and what `in_words` says."""
    for processor, threads in itertools.product(PROCESSORS, THREADS):
        try:
            compiler = [*shlex.split(os.environ.get("CC") or "cc"), *FLAGS, *processor, threads]
            made_by = output_of([*compiler, "--version"]).partition("\n")[0].strip()
            with tempfile.TemporaryDirectory() as folder:
                return ctypes.CDLL(str(made_or_kept(compiler, Path(folder)))), f"C ({made_by})"
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            said = (getattr(e, "stderr", None) or str(e)).strip().splitlines() or [type(e).__name__]
    return None, f"PyTorch (no kernels in C: {said[0]})"


def made_or_kept(compiler: list[str], folder: Path) -> Path:
    """The library, in the cache or, where that cannot be written, in a folder that will go."""
    # The compiler's own macros name its version and what this processor can do.
    sources, macros = sorted(HERE.glob("*.[ch]")), output_of([*compiler, "-dM", "-E", "-x", "c", os.devnull])
    text = "\0".join([*compiler, macros, *(source.read_text("utf-8") for source in sources)])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lineartime", "compiled")
    kept = Path(os.environ.get(CACHE) or cache).expanduser() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    if is_own(kept):
        return kept
    output_of([*compiler, "-c", *(str(path) for path in sources if path.suffix == ".c")], folder)
    # Linked without -fopenmp: OpenMP is then the one that PyTorch has loaded, with its threads.
    made = folder / "kernels.so"
    output_of([*compiler[:-1], "-shared", "-o", str(made), *map(str, folder.glob("*.o")), "-lm"], folder)
    return kept if keep(made, kept) else made


def output_of(command: list[str], folder: Path | None = None) -> str:
    """What a command prints that runs in a folder. Raises OSError and SubprocessError."""
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
                          timeout=300).stdout


def keep(made: Path, kept: Path) -> bool:
    """Put a library into the cache, whole or not at all; False where that cannot be."""
    with contextlib.suppress(OSError, ResourceError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replaced(kept) as file:
            file.write(made.read_bytes())
    return is_own(kept)


def is_own(kept: Path) -> bool:
    """Whether a library is there that nobody but this user can have put there."""
    with contextlib.suppress(OSError):
        folder, file = kept.parent.lstat(), kept.lstat()
        return (stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode) and not folder.st_mode & 0o022
                and folder.st_uid == file.st_uid == os.geteuid())
    return False
