"""Rows of measurements: where a number comes from, and files of rows, which a kill may cut off."""

import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import ROOT, Row
from lineartime.base.files import read_json_lines, system_errors


def provenance() -> Row:
    """What a measurement needs to be repeated: commit, command, hardware, versions, load."""
    import torch  # here, for a report of rows needs none

    return {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit(),
            "command": shlex.join(["python", *sys.orig_argv[1:]]), "cpu": cpu_model(), "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load_average": round(os.getloadavg()[0], 2), "python": platform.python_version(),
            "torch": torch.__version__, "lineartime": installed_version("lineartime")}


def commit() -> str | None:
    """The checkout's commit, with "+changes" where its programs differ from it: a study writes rows
    and tables, which are not counted. Without git the environment's LINEARTIME_COMMIT, or None."""
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "benchmarks/provenance.py")
        changes = git("status", "--porcelain", "--untracked-files=no", "--", "lineartime", "benchmarks", "studies",
                      ":!benchmarks/rows", ":!benchmarks/tables")
        return git("rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LINEARTIME_COMMIT") or None


def cpu_model() -> str:
    """The processor's name, with family and model where Linux tells them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = named.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {named['cpu family']}, model {named['model']})" if "cpu family" in named else name


def installed_version(package: str) -> str | None:
    return next((each.version for each in importlib.metadata.distributions(name=package)), None)


def rows_in(path: Path, parse: Callable[[Any], Row] = dict, what: str = "a row") -> list[Row]:
    """The rows of a file, oldest first, but for a last line that was cut off; none without a file.
    parse, what: as in `read_json_lines`. Raises DataError."""
    return read_json_lines(path, parse, what) if path.exists() else []


def append_json_lines(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file, in place of a last line that was cut off. Raises ResourceError."""
    with system_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            if path.is_file():  # not /dev/stdout
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
