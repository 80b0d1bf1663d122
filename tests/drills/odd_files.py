"""Files that nobody means to give to a program: depths, wrong types, names with escape sequences.
Bombs and odd tokenizers are in cli/test_hostile.py."""

import gzip
import json
import os
import shutil
from pathlib import Path

DEEP = 100_000
ESCAPE = "\x1b[31mred\x1b[0m"


def make(made: Path) -> None:
    odd = made / "odd"
    odd.mkdir()
    for name, data in {
        "empty.txt": b"", "blank.txt": b" \n\t\n" * 100, "binary.txt": bytes(range(256)) * 8,
        "latin.txt": "é".encode("latin-1"), "nul.txt": b"a\0b\n" * 50, "one.txt": b"x",
        "long_line.txt": b"a" * 3_000_000, "marks.txt": b"\xef\xbb\xbf[MASK] [SEP]\n" * 9,
        "escape.txt": f"{ESCAPE} text\n".encode() * 20, "not.gz.jsonl.gz": b"this is no gzip",
        "cut.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-9],
        "not.parquet": b"PAR1" + bytes(100) + b"PAR1",
        "nul.toml": b'model = "flash\0"\n', "deep.toml": b"a = " + b"[" * DEEP,
        "latin.toml": 'model = "é"'.encode("latin-1"), "types.toml": b'model = 3\nsteps = "many"\ndata = []\n',
        "numbers.toml": b'model = "flash"\nsteps = 1' + b"0" * 400,
        "floats.toml": b'model = "flash"\ndata = "data"\nout = "new"\nlearning_rate = nan\nclip = inf\n',
        "section.toml": b'[model]\nname = "flash"\n', "date.toml": b'model = "flash"\nsteps = 1979-05-27\n',
        "escape.toml": b'model = "\\u001b[31mx"\n', "ok.toml": b'model = "flash"\ndata = "data"\nout = "new"\n',
        "deep.json": b"[" * DEEP, "deep_object.json": b'{"a":' * DEEP, "deep.jsonl": b"[" * DEEP + b"\n{}\n",
        "types.json": b'{"data": {"title": 3}}', "null.json": b"null", "list.json": b"[1, 2]",
        "cut.json": b'{"data": [{"par', "number.json": b"1" + b"0" * 5000, "twice.json": b'{"data": [], "data": 3}',
        "surrogate.json": b'{"a": "\\ud800"}',
        "questions.json": json.dumps({"Data": [{"QuestionId": ESCAPE, "Question": 7}]}).encode(),
        "answers.json": b'{"0-0": 3, "x": null}',
        "escape.jsonl": (json.dumps({"text": ESCAPE, "kind": ESCAPE}) + "\n").encode() * 3,
        "fields.jsonl": b'{"text": 3}\n{"txt": "a"}\n', "halves.jsonl": b'{"text": "\\ud800 \\udc00"}\n' * 9,
    }.items():
        (odd / name).write_bytes(data)
    models(made, odd)


def models(made: Path, odd: Path) -> None:
    """Exported models whose configuration is not that of the weights."""
    good = json.loads((made / "exported/config.json").read_text())
    for name, change in {
        "layers": {"n_layers": 10**9}, "width": {"d_model": 10**9}, "huge": {"vocab_size": 10**400},
        "negative": {"d_model": -16}, "zero": {"chunk_size": 0}, "text": {"query_key_dim": "x"},
        "context": {"context": 10**18}, "none": {"n_layers": None}, "float": {"expansion_factor": 1e308},
        "escape": {"norm": ESCAPE}, "field": {ESCAPE: 1}, "end": {"end_of_document": 2**40},
    }.items():
        shutil.copytree(made / "exported", odd / f"model_{name}")
        (odd / f"model_{name}" / "config.json").write_text(json.dumps(good | change))


def place(made: Path, box: Path, names: set[str]) -> None:
    for name in sorted(names):
        path = box / name
        if name in ("", ".", "..") or "\0" in name or len(os.fsencode(name)) > 200 or os.path.lexists(path):
            continue
        path.parent.mkdir(exist_ok=True)
        if (made / name).is_dir():
            shutil.copytree(made / name, path, symlinks=True)
        elif (made / name).is_file():
            shutil.copyfile(made / name, path)
        elif name == "fifo" or name.startswith("fifo."):
            os.mkfifo(path)
        elif name == "loop":
            path.symlink_to("loop")
        elif name == "file":
            path.write_text("some text\n")
        elif name in ("folder", "[red]folder[", ESCAPE, "full"):
            path.mkdir()
            if name == "full":
                (path / "keep").write_text("keep\n")
        elif name == "link_to_fifo":
            os.mkfifo(box / "a_fifo")
            path.symlink_to("a_fifo")
