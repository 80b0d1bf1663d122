"""Named calls of the command line and shapes of models, from a TOML file, and how a list of calls is gone through.

A file has shapes in `[shapes]`, and in each other table a list: calls by name, gone through in their order. A call's
name is that of the table its rows are for, a slash, and what tells it from the table's others.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.append import append_json_lines
from lineartime.atomic_io import read_bytes, read_json_lines
from lineartime.config import ModelConfig, model_config
from lineartime.errors import UsageError
from lineartime.run_config import parse_setting
from lineartime.settings import require, require_name

CELLS = Path(__file__).with_name("cells.toml")
LINEARTIME, BENCHMARKS = (sys.executable, "-m", "lineartime"), (sys.executable, "-m", "benchmarks")
DONE, STOPPED, SAVED = "done", "stopped at the end of its time", "saved at the end of its time"
"""How a call can end well: what saved goes on. What else is said of one is why it failed."""
Calls = Mapping[str, Sequence[str]]
"""The arguments of `lineartime`, by a call's name."""


def read_cells(path: Path = CELLS) -> tuple[dict[str, Any], dict[str, dict[str, list[str]]]]:
    """The shapes and the lists of calls of a file, by default the package's. Raises UsageError where it is not one."""
    require(path.exists(), "no file of cells", str(path), "name one with --cells; the package's is in its repository")
    try:
        content = tomllib.loads(read_bytes(path).decode())
        shapes = content.pop("shapes", {})
        return shapes, {name: {call: words.split() for call, words in calls.items()} for name, calls in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as e:
        raise UsageError("not a file of cells", path, str(e)) from None


def named_calls(names: Sequence[str], path: Path = CELLS) -> dict[str, list[str]]:
    """The calls of lists, and those for a table. Raises UsageError for an unknown name."""
    _, lists = read_cells(path)
    known = {name: dict(calls) for name, calls in lists.items()}
    for call, words in (each for calls in lists.values() for each in calls.items()):
        known.setdefault(call.partition("/")[0], {})[call] = words
    for name in names:
        require_name("name of cells", name, known)
    return {call: words for name in names for call, words in known[name].items()}


def shape_named(name: str | None) -> dict[str, Any]:
    """The fields of a shape of the package's file; none without a name. Raises UsageError for an unknown one."""
    if name is None:
        return {}
    shapes, _ = read_cells()
    require_name("shape", name, shapes)
    return shapes[name]


def shaped_config(preset: str, task: str = "wiki40b", shape: dict[str, Any] | None = None,
                  settings: Sequence[str] = ()) -> ModelConfig:
    """A preset in a shape, then with settings (NAME=VALUE).
    A field that only some models have (a chunk size, heads) is given to those."""
    plain, shape = model_config(preset, task), shape or {}
    fields = {name: value for name, value in shape.items() if not isinstance(value, dict)}
    fields |= shape.get("gau" if plain.ffn == "gau" else "pairs", {})
    fields |= dict(parse_setting(text) for text in settings)
    skipped = {"chunk_size", "chunk_parts", "chunk_pooling"} if plain.chunk_size is None else set()
    skipped |= {"n_heads"} if plain.ffn == "gau" else {"query_key_dim"}
    skipped |= {"prefix_sum"} if plain.attn_type != "linear" else set()
    return model_config(preset, task, **{name: value for name, value in fields.items() if name not in skipped})


def run_calls(calls: Calls, call: Callable[[str, Sequence[str], float], str], done: Collection[str], tried: Path,
              tell: Callable[[str], None], *, deadline: float = math.inf, guess_s: float = 0.0) -> bool:
    """Go through calls in their order, those that were tried in vain last; True where none fails.

    call: makes one, of its name and arguments within so many seconds, and says how it ended. done: names that are left
    out. tried: a file that gets how each call ended. deadline: by `time.monotonic`; nothing is begun that may take
    longer than is left, which is as long as the longest so far, at first `guess_s`."""
    lines = read_json_lines(tried, dict, "a call") if tried.exists() else []
    in_vain = Counter(line["cell"] for line in lines if line["ended"] not in (DONE, SAVED))
    left = sorted((name for name in calls if name not in done), key=in_vain.__getitem__)
    well, longest = True, guess_s
    for i, name in enumerate(left):
        started = time.monotonic()
        if deadline - started < longest:
            tell(f"{deadline - started:.0f} s are left and a call may take {longest:.0f}; the same command goes on "
                 f"with {', '.join(left[i:])}")
            break
        ended = call(name, calls[name], deadline - started)
        took = time.monotonic() - started
        longest = max(longest if i else 0.0, 1.2 * took * (ended != SAVED))
        append_json_lines(tried, [{"cell": name, "ended": ended, "seconds": round(took, 1)}])
        tell(f"{name}: {ended} ({took:.0f} s)")
        well &= ended in (DONE, STOPPED, SAVED)
    return well


def measure_call(name: str, arguments: Sequence[str], seconds: float, rows: Path, more: Sequence[str],
                 log: Path | None = None) -> str:
    """A call of `python -m benchmarks`, whose rows are written together or not at all; how it ended."""
    aside = rows.with_name(f".{rows.name}.call")
    aside.unlink(missing_ok=True)
    ended = run([*BENCHMARKS, *arguments, *more, "--json", str(aside)], seconds, log)
    if ended == DONE:
        append_json_lines(rows, [row | {"cell": name} for row in read_json_lines(aside, dict, "a row")])
    aside.unlink(missing_ok=True)
    return ended


def end_with_parent(parent: int, number: int) -> None:
    """Ask Linux to send this process a signal when its parent ends, so that it does not go on holding a run's lock.

    parent: the process id of the parent, which may have ended before this call; then this process ends too."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # a handler of the parent's would take it and be gone after exec
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def started(command: Sequence[str], log: Path | None, ends_with: int, **variables: str) -> subprocess.Popen[bytes]:
    """A process that imports this checkout, in a session of its own.

    log: gets what it says, in place of the terminal. ends_with: the signal that it gets when this process is killed.
    variables: of its environment."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") if log else nullcontext() as out:
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}, stdout=out,
            stderr=out, start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid(), ends_with))


def run(command: Sequence[str], seconds: float = math.inf, log: Path | None = None, save_s: float = 0.0) -> str:
    """Run a command of this checkout for at most so long; how it ended.

    log: gets what it says, in place of the terminal. save_s: how long before the end it is asked to save, if it can."""
    process = started(command, log, signal.SIGTERM if save_s else signal.SIGKILL)
    try:
        code = process.wait(None if seconds == math.inf else max(seconds - save_s, 1))
    except subprocess.TimeoutExpired:
        return SAVED if save_s else STOPPED
    finally:
        if process.poll() is None and save_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(save_s)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a signal that came inside `wait` may have left its lock held
                process.wait(10)
    return DONE if code == 0 else (last_line(log) if log else f"exit code {code}")


def last_line(path: Path) -> str:
    """Of a file that may be empty."""
    return (path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
