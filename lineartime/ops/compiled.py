"""The kernels for processors: C99 beside this file, compiled at first use, one library for all.

The compiler is `$CC` or `cc`. What it makes is kept in a folder of this user, under a name that
depends on the sources, the flags, the compiler and the processor: `$LINEARTIME_CACHE`, or
`compiled` in the cache folder. Without a compiler, or with LINEARTIME_NO_C=1, there is no library,
and PyTorch does the same work. Numbers are float32 or bfloat16: float64 is PyTorch's."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path

from lineartime.base.errors import ResourceError
from lineartime.base.files import replaced

HERE = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c99", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math",
         "-fassociative-math", "-fno-signed-zeros", "-ffp-contract=fast")
"""Sums may be taken in any order and products be added at once. Not -ffast-math: NaN stays NaN."""
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
    try:
        # The compiler's own macros name its version and what this processor can do.
        compiler = [*shlex.split(os.environ.get("CC") or "cc"), *FLAGS]
        macros = output_of([*compiler, "-dM", "-E", "-x", "c", os.devnull])
        made_by = output_of([compiler[0], "--version"]).partition("\n")[0].strip()
        sources = sorted(HERE.glob("*.[ch]"))
        text = "\0".join([*compiler, macros, *(source.read_text("utf-8") for source in sources)])
        kept = cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
        if is_own(kept):
            return ctypes.CDLL(str(kept)), f"C ({made_by})"
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "kernels.so")
            output_of([*compiler, "-o", str(made), *(str(path) for path in sources if path.suffix == ".c"), "-lm"])
            return ctypes.CDLL(str(kept if keep(made, kept) else made)), f"C ({made_by})"
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        said = (getattr(e, "stderr", None) or str(e)).strip().splitlines() or [type(e).__name__]
        return None, f"PyTorch (no kernels in C: {said[0]})"


def output_of(command: list[str]) -> str:
    """What a command prints. Raises OSError and SubprocessError."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
                          timeout=300).stdout


def cache_folder() -> Path:
    """Where libraries are kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lineartime", "compiled")
    return Path(os.environ.get(CACHE) or default).expanduser()


def is_own(kept: Path) -> bool:
    """Whether a library is there that nobody but this user can have put there."""
    with contextlib.suppress(OSError):
        folder, file = kept.parent.lstat(), kept.lstat()
        return (stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode) and not folder.st_mode & 0o022
                and folder.st_uid == file.st_uid == os.geteuid())
    return False


def keep(made: Path, kept: Path) -> bool:
    """Put a library into the cache, whole or not at all; False where that cannot be."""
    with contextlib.suppress(OSError, ResourceError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replaced(kept) as file:
            file.write(made.read_bytes())
    return is_own(kept)
