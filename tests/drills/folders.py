"""Everything that a user can have in a folder, as small as it can be."""

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import made_questions
import tiny_runs
from drills import child, odd_files

ROOT = Path(__file__).parents[2]
SETTINGS = tiny_runs.SETTINGS | {"steps": 6, "eval_every": 3, "keep": 2, "eval_tokens": 100}
MODEL = ("n_layers", "d_model", "query_key_dim", "chunk_size")  # settings that weights to begin with have already
QUESTIONS = ["--learning-rates", "1e-2,2.5e-3", "--context", "48", "--epochs", "1", "--max-answer-tokens", "6", "--set",
             "chunk_size=4", "--set", "tokens_per_step=384", "--set", "eval_tokens=100"]
PROMPT = "Reader, I"
Command = Callable[[Path, Path, Path], Callable[[], object]]
"""Of the folders `made`, `it` (or a file) and `out`: what a process does."""
MADE = Path("{made}")


def verb(*arguments: str) -> Command:
    """A command line whose arguments name {made}, {it} and {out}."""
    return lambda made, it, out: child.verb([text.format(made=made, it=it, out=out) for text in arguments])


def train(data: object, out: object, **changes: object) -> list[str]:
    return tiny_runs.command(data, out, **SETTINGS | changes)


def train_from(run: object, data: object, out: object) -> list[str]:
    kept = [word for name, value in SETTINGS.items() if name not in MODEL for word in ("--set", f"{name}={value}")]
    return ["train", "--from", str(run), "--data", str(data), "--out", str(out), *kept]


def finetune(made: Path, out: object) -> list[str]:
    return ["finetune", str(made / "masked"), "--questions", str(made / "train.json"), "--validation",
            str(made / "dev.json"), "--out", str(out), *QUESTIONS]


def prepare(text: object, out: object, *more: str) -> list[str]:
    size = [] if "--tokenizer" in more else ["--vocab-size", "280"]
    return ["prepare", str(text), "--out", str(out), "--held-out", "0.2", "--jobs", "1", *size, *more]


def command(made: Path, arguments: list[str]) -> None:
    ended = child.run(child.verb(arguments), made)
    if ended.code != 0:
        raise RuntimeError(f"{arguments}: {ended}")


def save_pretrained(source: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lineartime.hf  # noqa: F401

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def make(work: Path) -> Path:
    """The folder `made` in `work`, made again where the program has changed."""
    made, sources = work / "made", hashlib.sha256()
    for path in [*sorted((ROOT / "lineartime").rglob("*.py")), Path(__file__), Path(odd_files.__file__)]:
        sources.update(path.read_bytes())
    stamp = made / "stamp"
    if stamp.exists() and stamp.read_text() == sources.hexdigest():
        return made
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    text = (ROOT / "lineartime/text/jane_eyre.txt").read_text(encoding="utf-8")
    for number, name in enumerate(("", "2")):
        part = text[20_000 + 10_000 * number :][:10_000]
        (made / f"text{name}.txt").write_text(part, encoding="utf-8")
        command(made, prepare(made / f"text{name}.txt", made / f"data{name}"))
        command(made, train(made / f"data{name}", made / f"run{name}", seed=number))
        command(made, ["export", str(made / f"run{name}"), "--out", str(made / f"exported{name}")])
        ended = child.run(lambda n=name: save_pretrained(made / f"run{n}" / "latest", made / f"transformers{n}"), made)
        assert ended.code == 0, ended
        unfinish(made / f"run{name}", made / f"unfinished{name}")
        made_questions.write_questions(made / f"train{name}.json", 12 * number, 12)
    made_questions.write_questions(made / "dev.json", 100, 4)
    command(made, prepare(made / "text.txt", made / "masked-data", "--mlm"))
    command(made, train(made / "masked-data", made / "masked", causal="false", steps=4))
    command(made, finetune(made, made / "finetuned"))
    command(made, [*finetune(made, made / "finetuned2"), "--set", "seed=1"])
    command(made, ["evaluate", str(made / "finetuned"), "--questions", str(made / "dev.json"), "--context", "48",
                   "--max-answer-tokens", "6", "--predictions", str(made / "predictions.json")])
    shutil.copytree(ROOT / "lineartime/models/small", made / "small")
    shutil.copytree(ROOT / "tests/training/run_of_1ec0ebd4/flash+", made / "old")
    documents = [json.dumps({"text": part}) + "\n" for part in text[30_000:34_000].split("\n\n") if part.strip()]
    (made / "text.jsonl").write_text("".join(documents), encoding="utf-8")
    (made / "text.jsonl.gz").write_bytes(gzip.compress("".join(documents).encode(), mtime=0))
    odd_files.make(made)
    stamp.write_text(sources.hexdigest())
    return made


def unfinish(run: Path, out: Path) -> None:
    """A run as a kill after step 5 leaves it: checkpoints of the steps 2 and 4."""
    shutil.copytree(run, out, symlinks=True)
    for path in ("result.json", "sample.txt", "loss.png", "latest"):
        (out / path).unlink()
    steps = sorted(out.glob("step-*"))
    shutil.rmtree(steps[-1])
    os.symlink(steps[-2].name, out / "latest")
    lines = (out / "metrics.jsonl").read_text().splitlines(True)
    (out / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 5))


def left(folder: Path) -> dict[str, object]:
    """What a command leaves: every file's content but clocks, and of checkpoints the newest."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name, parent = str(path.relative_to(folder)), path.parent
        if parent.name.startswith("step-") and parent.name != max(each.name for each in parent.parent.glob("step-*")):
            continue
        if path.is_symlink():
            found[name] = "-> " + os.readlink(path)
        elif path.is_dir() and path.name.startswith("step-"):
            continue
        elif path.is_dir():
            found[name] = "folder"
        elif not path.is_file() or path.stat().st_size > 1 << 30:
            found[name] = "not a file of ours"
        else:
            found[name] = content(path)
    return found


def content(path: Path) -> object:
    try:
        if path.name == "README.md":
            return path.read_text(encoding="utf-8").partition("<sub>")[0]
        return tiny_runs.content(path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return path.read_bytes()
