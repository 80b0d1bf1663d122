"""Where a number comes from: commit, command, machine and versions."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lineartime.base.words import in_markdown

ROOT = Path(__file__).resolve().parents[1]


def provenance() -> dict[str, Any]:
    """What a measurement needs to be repeated: commit, command, hardware, versions, and how busy
    the machine was."""
    import torch  # here, because a report of rows needs `machine` alone, and no torch

    program = Path(sys.argv[0])
    begun = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit(),
            "command": shlex.join([*begun, *sys.argv[1:]]),
            "cpu": cpu_model(), "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load_average": round(os.getloadavg()[0], 2), "python": platform.python_version(),
            "torch": torch.__version__, "lineartime": installed_version("lineartime")}


def commit() -> str | None:
    """The checkout's commit, with "+changes" where its programs differ from it; measured rows and
    their tables are not counted, for a study writes them. Without git what the environment's
    LINEARTIME_COMMIT says, or None."""
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = named.get("model name", platform.machine())
    return f"{name} (family {named['cpu family']}, model {named['model']})" if "cpu family" in named else name


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(row: dict[str, Any]) -> str:
    """What a row was measured on."""
    if row["device"] == "cpu":
        threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
        return f"{threads} of {in_markdown(row['cpu'])}, {row['cores']} cores, {row['memory_gib']:.0f} GiB"
    return f"one {in_markdown(row['gpu'])}, beside {in_markdown(row['cpu'])}"
