"""A training run of a few seconds: its text, its command, and what it leaves behind."""

import json
import os

from lineartime.data.prepare import prepare
from lineartime.data.prepare_config import SAMPLE

STEPS, SAVE_EVERY, EVAL_EVERY = 15, 2, 3
SETTINGS = {"size": "paper", "context": 32, "tokens_per_step": 128, "steps": STEPS, "micro_batch_tokens": 64,
            "n_layers": 1, "d_model": 16, "query_key_dim": 8, "chunk_size": 8, "warmup_steps": 3, "learning_rate": 0.01,
            "save_every": SAVE_EVERY, "eval_every": EVAL_EVERY, "eval_tokens": 200}


def prepare_text(folder, tokenizer="bytes", first=20_000, **options):
    """Ten thousand characters of the book that ships with the package, a fifth of them held out."""
    text = SAMPLE.read_text(encoding="utf-8")[first : first + 10_000]
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text.txt"], folder / "prepared", tokenizer=tokenizer, held_out=0.2, jobs=1, **options)
    return folder / "prepared"


def command(data, out, model="flash", **changes):
    pairs = [word for name, value in (SETTINGS | changes).items() for word in ("--set", f"{name}={value}")]
    return ["train", model, "--data", str(data), "--out", str(out), *pairs]


def what_is_left(out):
    """What a run leaves: every file's `content`, and links as what they name; of checkpoints the
    last, for which one is before it depends on where the run was stopped."""
    last = f"step-{steps_saved(out):08d}"
    paths = [path for path in sorted(out.rglob("*")) if path.is_symlink() or not path.is_dir()]
    return {str(path.relative_to(out)): os.readlink(path) if path.is_symlink() else content(path)
            for path in paths if path.parent.name == last or not path.parent.name.startswith("step-")}


CHANGING = {"run.json": ["id"], "result.json": ["run", "peak_mib", "sha256"], "MANIFEST.json": ["run", "sha256"]}


def content(path):
    if path.name == "metrics.jsonl":
        return [{**json.loads(line), "clock": None} for line in path.read_text().splitlines()]
    if path.name in CHANGING:
        return json.loads(path.read_text()) | dict.fromkeys(CHANGING[path.name])
    return None if path.name == "run.lock" else path.read_bytes()


def assert_same(out, expected, but=()):
    found = what_is_left(out)
    different = [name for name in sorted({*found, *expected} - {*but}) if found.get(name) != expected.get(name)]
    assert not different, f"{different}; there are {sorted(found)}"


def steps_saved(out):
    return max((int(path.name.removeprefix("step-")) for path in out.glob("step-*")), default=0)


def steps_done(out):
    """The last step that has a whole line."""
    path = out / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in whole), default=0)


def touched(out):
    """When each file of a run was written, but for its lock."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in out.rglob("*") if path.name != "run.lock"}
