"""Named calls and shapes of models, from `cells.toml`, and calls in a process of their own."""

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.provenance import append_json_lines, rows_in
from lineartime.base.settings import require_name
from lineartime.config import ModelConfig, model_config

LISTS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("cells.toml").read_text(encoding="utf-8"))
SHAPES: dict[str, dict[str, Any]] = LISTS.pop("shapes")  # type: ignore[assignment]
PEERS: dict[str, dict[str, Any]] = LISTS.pop("peers")  # type: ignore[assignment]
NAMES, SUMMARY = LISTS.pop("names"), LISTS.pop("summary")
LINEARTIME, BENCHMARKS = (sys.executable, "-m", "lineartime"), (sys.executable, "-m", "benchmarks")
TOLD_EVERY_S = 30.0  # between two lines of a process's progress
SAVE_S = 600.0  # a process's time to save when this one ends


def named_calls(names: Sequence[str]) -> dict[str, list[str]]:
    """The calls of lists, or of tables: what stands before a slash. Raises UsageError."""
    known = {name: dict(calls) for name, calls in LISTS.items()}
    for call, words in (each for calls in LISTS.values() for each in calls.items()):
        known.setdefault(call.partition("/")[0], {})[call] = words
    for name in names:
        require_name("name of cells", name, known)
    return {call: words.split() for name in names for call, words in known[name].items()}


def shaped_config(preset: str, task: str = "wiki40b", shape: dict[str, Any] | None = None,
                  settings: Mapping[str, Any] | None = None) -> ModelConfig:
    """A preset in a shape, with settings. A field such as heads goes to models that have it."""
    plain, shape = model_config(preset, task), shape or {}
    fields = {name: value for name, value in shape.items() if not isinstance(value, dict)}
    fields |= shape.get("gau" if plain.ffn == "gau" else "pairs", {})
    if settings and settings.get("layers"):  # they say how many there are
        fields.pop("n_layers", None)
    fields |= settings or {}
    skipped = {"chunk_size", "chunk_parts", "chunk_pooling"} if plain.chunk_size is None else set()
    skipped |= {"n_heads"} if plain.ffn == "gau" else {"query_key_dim"}
    skipped |= {"prefix_sum"} if plain.attn_type != "linear" else set()
    return model_config(preset, task, **{name: value for name, value in fields.items() if name not in skipped})


def measure_call(name: str, arguments: Sequence[str], rows: Path) -> int:
    """Make a call of `python -m benchmarks`, with all of its rows or none; its exit code."""
    aside = rows.with_name(f".{rows.name}.{os.getpid()}.call")
    code = run([*BENCHMARKS, *arguments, "--json", str(aside)])
    if code == 0:
        append_json_lines(rows, [row | {"cell": name} for row in rows_in(aside)])
    aside.unlink(missing_ok=True)
    return code


def run(command: Sequence[str], log: Path | None = None, *, stop: Callable[[], bool] = lambda: False,
        tell: Callable[[str], object] = lambda _: None, threads: int | None = None) -> int:
    """Run a command of this checkout, which saves and ends with this process, however that ends;
    its exit code. log: gets its output, in place of the terminal. stop: whether to ask it to save
    and end now. tell: gets the last line of the log twice a minute. threads: of OpenMP."""
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                 "PYTHONUNBUFFERED": "1", **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    # The shell asks whether this process ended before the signal was set. Only Linux has setpriv.
    tied = ["setpriv", "--pdeathsig", "TERM", "sh", "-c", f'[ $PPID = {os.getpid()} ] && exec "$@"', "sh"]
    command = [*(tied if shutil.which("setpriv") else []), *command]
    with log.open("wb") if log else nullcontext() as out:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=out, stderr=out, start_new_session=True)
    told = time.monotonic()
    try:
        while process.poll() is None and not stop():
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if log and time.monotonic() - told > TOLD_EVERY_S:
                tell(last_line(log))
                told = time.monotonic()
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAVE_S)
        with suppress(ProcessLookupError):  # the processes that it has left
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a signal that came inside `wait` may have left its lock held
            process.wait(10)
    return process.returncode


def last_line(path: Path) -> str:
    return (path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
