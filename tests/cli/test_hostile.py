"""Files and terminals that mean harm: refused in one line, in little time and memory."""

import gzip
import importlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from command_line import Call, assert_refused
from lineartime import __main__ as entry
from lineartime.base.errors import ResourceError
from lineartime.cli import verbs
from lineartime.cli.terminal import Terminal
from lineartime.folders import model_folder
from lineartime.training.language import new_model
from lineartime.training.run_config import run_config
from tiny_runs import command as train_command

LINEARTIME = [sys.executable, "-m", "lineartime"]


def shell(line: str, command: Sequence[str] = LINEARTIME, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line in which `lineartime` is the command, in a shell that fails if any part fails."""
    line = line.replace("lineartime ", " ".join(command) + " ")
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment}, errors="surrogateescape")


def test_a_model_larger_than_memory_is_refused() -> None:
    config = run_config({"model": "flash", "data": "x", "out": "y", "n_layers": 1024, "d_model": 2**17})
    with pytest.raises(ResourceError, match=r"the model does not fit into memory: [\d,.]+ GiB needed"):
        new_model(config)


@pytest.mark.parametrize("fault", ["an id of 2^32 - 1", "a panic"])
def test_a_hostile_tokenizer_is_refused(fault: str, tmp_path: Path, warm_command: list[str]) -> None:
    """In a process of its own, since native code that panics prints its stack past Python."""
    made = json.loads((model_folder("small") / "tokenizer.json").read_text())
    if fault == "a panic":
        made["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    else:
        made["model"]["vocab"]["zzz"] = 2**32 - 1
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    prepare = f"lineartime prepare {tmp_path}/a.txt --out {tmp_path}/out --tokenizer {tmp_path}/tokenizer.json"
    done = shell(prepare, warm_command, RUST_BACKTRACE="1")
    assert_refused(done.returncode, done.stderr, 3, tmp_path / "tokenizer.json")
    assert not (tmp_path / "out").exists()


MEASURED = """
import resource, sys
from pathlib import Path
from lineartime.cli.verbs import main

out, *paths = sys.argv[1:]
for path in paths:
    sys.argv[1:] = ["prepare", path, "--out", out, "--tokenizer", "bytes"]
    try:
        main()
    except SystemExit as end:
        print(end.code, end=" ")
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # ru_maxrss has that of who started it
print(sum(each.ru_utime + each.ru_stime for each in used), max(int(peak), used[1].ru_maxrss))
"""


def test_bombs_are_refused_in_little_time_and_memory(tmp_path: Path) -> None:
    folder = tmp_path / "bombs"
    folder.mkdir()
    for name, block in (("lines.jsonl.gz", b"\n" * (1 << 20)), ("line.jsonl.gz", bytes(1 << 20)),
                        ("line.csv.gz", b"x" * (1 << 20))):
        (folder / name).write_bytes(gzip.compress(block) * 1000)
    text, how = "x " * (5 << 20), {"compression": "zstd", "compression_level": 1, "write_statistics": False}
    again = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, pyarrow.int32()), pyarrow.array([text]))
    parquet.write_table(pyarrow.table({"text": again}), folder / "again.parquet", **how)
    parquet.write_table(pyarrow.table({"text": [text] * 50}), folder / "large.parquet", use_dictionary=False, **how)
    paths = sorted(folder.iterdir())
    done = subprocess.run([sys.executable, "-c", MEASURED, tmp_path / "out", *paths], capture_output=True, text=True)
    *codes, seconds, kib = done.stdout.split()
    for path, code, line in zip(paths, codes, done.stderr.splitlines(), strict=True):
        words = "line is too long" if path.name.startswith("line.") else "the text is more than 100 times the file"
        assert_refused(int(code), line + "\n", 3, words, path)
    assert float(seconds) < 6 and int(kib) < 500_000  # of processor time, of which 1 is for imports
    assert not (tmp_path / "out").exists()


def test_only_regular_files_are_read(call: Call, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "a.txt").write_text("some text")
    prepare = ["prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer"]
    for path in sorted(tmp_path.glob("*.toml")):
        for code, words, line in ((2, "cannot read the configuration", ["train"]),
                                  (3, "cannot read", ["generate", "small", "--prompt-file"]),
                                  (2, "cannot read the tokenizer", prepare),
                                  (3, "", ["evaluate", "small", "--questions"]),
                                  (3, "", ["prepare", "--out", tmp_path / "out"])):
            assert_refused(*call(*line, path)[::2], code, words, path)


def test_an_address_that_does_not_open_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text, and no archive")
    prepare = ["--tokenizer", "bytes", "--out"]
    for address, to_read, to_write in ((f"zip://b::{tmp_path}/a.txt", 3, 6), ("ftp://127.0.0.1:9/b", 3, 6),
                                       ("dir://b", 2, 2)):
        for code, line in ((to_read, ["prepare", address, *prepare, tmp_path / "out"]), (to_read, ["info", address]),
                           (to_read, ["evaluate", "small", "--data", address]), (to_read, ["generate", address]),
                           (to_read, ["generate", "small", "--prompt-file", address]),
                           (to_write, ["prepare", tmp_path / "a.txt", *prepare, address]),
                           (2, ["train", "flash", "--data", address, "--out", address]),
                           (2, ["read", tmp_path / "a.txt", "--model", "small", "--out", address])):
            assert_refused(*call(*line)[::2], code, address)


def test_a_wrong_configuration_is_named(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "model"
    shutil.copytree(model_folder("small"), out)
    (out / "MANIFEST.json").unlink()  # as `save_pretrained` writes a folder
    made = json.loads((out / "config.json").read_text())
    for name, value, words in (("n_layers", 10**9, "n_layers is too large"), ("n_layers", 900, "tensors for n_layers"),
                               ("vocab_size", float("nan"), "wrong value")):
        (out / "config.json").write_text(json.dumps({**made, name: value}))
        begun = time.process_time()
        code, _, err = call("generate", out)
        assert_refused(code, err, 4 if value == 900 else 2, words, "config.json")
        assert time.process_time() - begun < 2


def test_a_stdout_that_is_full_or_closed(tmp_path: Path, warm_command: list[str]) -> None:
    (tmp_path / "a.txt").write_text("some text " * 2000)
    prepare = f"lineartime prepare {tmp_path}/a.txt --tokenizer bytes --held-out 0.2 --out {tmp_path}"
    train = "lineartime " + " ".join(train_command(tmp_path / "1", tmp_path / "run1", steps=2, warmup_steps=1))
    for line, folder, command in ((f"{prepare}/1 | true", "1", warm_command), (f"{prepare}/2 >&-", "2", LINEARTIME),
                                  (f"{train} > /dev/full 2>&1", "run1", warm_command)):
        done = shell(line, command)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), line
        assert (tmp_path / folder / ("result.json" if "run" in folder else "manifest.json")).exists()
    full = shell("lineartime config > /dev/full")  # here the text is the result
    assert (full.returncode, full.stderr) == (6, "error: No space left on device\n")
    first = shell("lineartime info flash | head -1", warm_command, PYTHONUNBUFFERED="1")
    assert (first.returncode, first.stdout[:5], first.stderr) == (0, "flash", "")


def test_what_a_terminal_lacks_is_written_as_an_escape(warm_command: list[str]) -> None:
    done = shell("lineartime info 'naïve東京'", PYTHONIOENCODING="latin-1")
    assert done.returncode == 2 and done.stderr.startswith("error: unknown model or folder: na")
    done = shell("lineartime generate small --max-new-tokens 1 $'a\\x1b]0;title\\x07b'", warm_command)
    assert "\x1b" not in done.stdout and done.stdout.startswith("a\\x1b]0;title\\x07b")


def test_a_signal_inside_an_import_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There a library may swallow KeyboardInterrupt, or break."""
    (tmp_path / "swallows.py").write_text("try:\n    import signals\nexcept KeyboardInterrupt:\n    pass\n")
    (tmp_path / "signals.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "_exit", sys.exit)
    before, ends = signal.getsignal(signal.SIGINT), []  # which a shell's background job ignores
    for call in (lambda: importlib.import_module("swallows"), lambda: signal.raise_signal(signal.SIGINT)):
        monkeypatch.setattr(verbs, "main", call)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
            entry.main()
        ends.append(getattr(end.value, "code", None))
    signal.signal(signal.SIGINT, before)
    assert ends == [130, None]


def test_a_terminal_gets_a_bar_that_reads_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(writer, "w", encoding="utf-8") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with Terminal() as terminal:
            terminal.count("tokenising", 3, 10)
            terminal.count("step", 1, 5, "[red]loss")
    printed = b""
    with suppress(OSError):  # the end of what was written; it may come in parts
        while True:
            printed += os.read(reader, 1 << 16)
    os.close(reader)
    assert b"tokenising 3/10" in printed and b"step 1/5" in printed and b"[red]loss" in printed
