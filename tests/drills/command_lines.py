"""Command lines that make no sense, and some that do: each ends in time, with a documented exit
code and at most one error line, and touches nothing outside its folder."""

import dataclasses
import re
import shlex
import shutil
from functools import cache
from pathlib import Path
from random import Random

from drills import child, folders, odd_files
from lineartime.config import PRESETS, ModelConfig, TrainConfig

WHOLE = ["0", "-1", "1", "2", "7", "100000", "1000000000", "2147483648", "9223372036854775808", "1" + "0" * 400]
ODD_NUMBERS = ["-1" + "0" * 400, "nan", "inf", "-inf", "1e-320", "1e400", "0x10", "1_000", "\u0661\u0662", "1.5",
               "-0.0", "true", "none", "", " 3", "0.5"]
ODD_WORDS = ["", " ", "-", "--", "---", ".", "..", "x" * 6000, "é" * 3000, "\u202e\u0000".replace("\0", ""),
             "\udcff\udce9", "a\nb\tc", odd_files.ESCAPE, "[red]x[/red]", "[/]", "[bold", "%s%d", "{0}", "$HOME", "~",
             "'", '"', "\\", "=", "=x", "x=", "a=b=c", "None", "\U0001f600", "\ud800", "-x", "--nope", "@file", "*",
             "--out", "flash", "NaN"]
ODD_IN = ["missing", "missing/a/b", "file", "folder", "full", "fifo", "loop", "loop/x", "/dev/zero", "/dev/null",
          "text.txt", "run", "data", "exported", "masked", "finetuned", "[red]folder[", odd_files.ESCAPE, "x" * 300,
          "file/below", "run/run.json", "link_to_fifo", "run/latest/model.safetensors",
          "fifo.json", "fifo.toml", "odd"]
ODD_OUT = ["new", "deep/er/new", "file", "file/below", "folder", "full", "loop", "loop/x", "run", "data",
           "exported", "finetuned", "[red]folder[", odd_files.ESCAPE, "x" * 300, ".", "..", "text.txt",
           "new.png", "new.json", "unfinished"]
FIELDS = [*(field.name for kind in (ModelConfig, TrainConfig) for field in dataclasses.fields(kind)), "no_such_field",
          "", "size", "from"]
NAMED = ("model", "size", "log", "task", "split", "precision", "device")  # options that take a name
NAMES = [*PRESETS, "tiny", "paper", "tensorboard", "c4", "pg19", "train", "test", "float32,float32", "cuda", "meta"]
TINY = ["--set", "n_layers=1", "--set", "d_model=16", "--set", "query_key_dim=8", "--set", "chunk_size=8"]
OUTPUTS = {"out", "predictions", "state"}  # options whose path is written
SIZES = {"n_layers", "d_model", "vocab_size", "context", "chunk_size", "query_key_dim"}
LONG = {"train", "finetune", "generate", "score", "read"}
"""Verbs that may work for long; they are interrupted after a few seconds."""
SECONDS = 6.0

RECIPES: dict[str, list[list[str]]] = {
    "prepare": [["text.txt", "--out", "new", "--vocab-size", "280", "--held-out", "0.2", "--jobs", "1"],
                ["text.jsonl.gz", "--out", "new", "--tokenizer", "bytes", "--validation", "text2.txt"],
                ["text.txt", "--out", "data", "--vocab-size", "280", "--held-out", "0.2"],
                ["-", "--out", "new", "--tokenizer", "bytes", "--jobs", "1"],
                ["text.txt", "--out", "new", "--tokenizer", "run", "--held-out", "0.2", "--jobs", "1"]],
    "train": [folders.train("data", "new", steps=3)[1:], folders.train("data", "unfinished")[1:],
              ["odd/ok.toml", "--steps", "2", "--context", "16", "--tokens-per-step", "32", *TINY, "--set",
               "warmup_steps=0", "--set", "micro_batch_tokens=16"],
              ["--from", "run", "--data", "data", "--out", "new", "--context", "16", "--steps", "2",
               "--tokens-per-step", "32", "--set", "micro_batch_tokens=16"],
              ["flash", "--size", "tiny", "--data", "data:0.7,data2:0.3", "--out", "new", "--steps", "1"]],
    "evaluate": [["run", "--data", "data"], ["run", "--data", "data", "--context", "16"],
                 ["exported", "--data", "data", "--json", "--batch-rows", "3"],
                 ["finetuned", "--questions", "dev.json", "--context", "48", "--max-answer-tokens", "6",
                  "--predictions", "new.json"]],
    "finetune": [folders.finetune(Path("."), "new")[1:]],
    "generate": [["run", "Reader, I", "--max-new-tokens", "4"],
                 ["exported", "-", "--max-new-tokens", "4", "--temperature", "0"],
                 ["unfinished", "a", "b", "--max-new-tokens", "3", "--stop", "e"],
                 ["small", "I", "--max-new-tokens", "2"]],
    "score": [["run", "text.txt", "--state", "new"], ["small", "-", "--per", "token"],
              ["exported", "text.jsonl.gz", "--json", "--per", "document"]],
    "read": [["text.txt", "--model", "run", "--out", "new"], ["-", "--model", "small", "--out", "new"]],
    "export": [["run", "--out", "new", "--device", "cpu"]],
    "info": [["flash"], ["flash", "--plan", "2", *TINY], ["transformer++", "--task", "pg19", "--set", "n_layers=2"]],
    "config": [["flash", "--size", "tiny"], ["transformer++", "--task", "c4"]],
    "plot": [["run"], ["a=run", "b=run2", "--out", "new.png"]],
}
OFTEN = ["prepare", "train", "evaluate", "generate", "plot", "export"]


@cache
def options(verb: str) -> list[tuple[str, str, bool]]:
    import typer

    from lineartime.cli import verbs

    found = typer.main.get_command(verbs.app).commands[verb]
    return [(each.name, each.opts[0], bool(each.is_flag)) for each in found.params if each.opts[0].startswith("--")]


FITTING = {"questions": (".json",), "data": (".json",), "evidence": ("model_zero",),
           "inputs": (".txt", ".jsonl", ".gz", ".parquet"), "validation": (".txt", ".gz"), "test": (".txt", ".parquet"),
           "document": (".txt", ".json"), "prompt_file": (".txt",), "about": (".md", ".txt"), "": ("model_", ".toml")}
"""Parts of the names of odd files that an option, or an argument (""), would take for its own."""


def odd_value(verb: str, name: str, odd: list[str], random: Random) -> str:
    """A value that nobody means for an option, or an argument (""). odd: names of odd files."""
    number = random.choice(WHOLE if random.random() < 0.6 else ODD_NUMBERS)
    parts = FITTING["inputs" if (verb, name) == ("prepare", "") else name] if name in FITTING else ()
    fitting = [each for each in odd if any(part in each for part in parts)]
    if name == "settings":
        field, word = random.choice(FIELDS), random.choice(ODD_WORDS)
        return f"{field}={number}" if random.random() < 0.7 else random.choice([f"{field}={word}", word])
    if name in OUTPUTS:
        return random.choice([*ODD_OUT, *ODD_OUT, *ODD_OUT, *ODD_WORDS])
    if name in NAMED:
        return random.choice([*NAMES, *ODD_WORDS, number])
    if fitting and random.random() < 0.5:
        return random.choice(fitting)
    if not fitting and random.random() < 0.7:
        return random.choice([number, number, f"{number},{random.choice(WHOLE)}"])
    return random.choice([*ODD_IN, *odd, *ODD_WORDS, number])


def draw(made: Path, random: Random) -> list[str]:
    """A command line: a right one with some of its values replaced, options added or taken away."""
    odd = [f"odd/{path.name}" for path in sorted((made / "odd").iterdir())]
    verb = random.choice([*RECIPES, *OFTEN * 4])
    arguments = list(random.choice(RECIPES[verb])) if random.random() < 0.95 else []
    known = options(verb)
    spelled = {spelling: name for name, spelling, _ in known}
    for _ in range(random.choice([0, 1, 1, 1, 2, 2, 3, 6])):
        how = random.random()
        if how < 0.45 and arguments:
            at = random.randrange(len(arguments))
            if not arguments[at].startswith("--"):
                arguments[at] = odd_value(verb, spelled.get(arguments[at - 1], "") if at else "", odd, random)
        elif how < 0.85 and known:
            name, spelling, flag = random.choice(known)
            at = random.choice([0, len(arguments)])
            arguments[at:at] = [spelling] if flag else [spelling, odd_value(verb, name, odd, random)]
        elif how < 0.92 and arguments:
            del arguments[random.randrange(len(arguments))]
        else:
            arguments.insert(random.randint(0, len(arguments)), random.choice([*ODD_WORDS, *ODD_IN, "--help", *odd]))
    return [verb, *arguments]


STDIN = [b"", b"", b"Reader, I", b"\xff\xfe\0", b"x" * 1_000_000, None, Path("/dev/zero"), Path("/dev/null"),
         b"\x1b[31m"]
STDOUT = {"full": {"stdout": Path("/dev/full")}, "closed": {"closed": True}, "broken": {"broken": True},
          "ascii": {"encoding": "ascii"}, "latin-1": {"encoding": "latin-1"}}


def named(arguments: list[str]) -> set[str]:
    names = {"run2", "text2.txt"} & {text.partition("=")[2] or text for text in arguments}
    for text in arguments:
        for each in (text, text.partition("=")[2], text.partition("=")[0]):
            parts = each.split("/")
            names.add("/".join(parts[:2]) if parts[0] == "odd" else parts[0])
    if "odd/ok.toml" in names:
        names.add("data")
    return names | {name for name in ("dev.json", "train.json", "masked") if any(name in text for text in arguments)}


def trial(made: Path, folder: Path, random: Random) -> dict[str, object]:
    box = folder / "a" / "box"
    shutil.rmtree(folder, ignore_errors=True)
    box.mkdir(parents=True)
    arguments = [text.replace("\0", "") for text in draw(made, random)]
    stdin, stdout = random.choice(STDIN), random.choice(["pipe"] * 12 + [*STDOUT])
    streams = child.Streams(stdin, **STDOUT.get(stdout, {}))
    # As the system could give them to a program, where only bytes that are no UTF-8 are surrogates.
    given = [re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", text) for text in arguments]
    odd_files.place(made, box, named(given))
    long = arguments[0] in LONG and not any(huge_size(text) for text in arguments)
    ended = child.run(child.verb(given), box, streams, seconds=SECONDS if long else child.SECONDS)
    works = long and not ended.killed and ended.over == "working"
    wrong = child.misbehaviour(ended._replace(over="") if works else ended)
    if wrong is None and "\x1b" in ended.out + ended.err:
        wrong = "escape"
    if wrong is None and streams.stdout and ended.code == 0 and arguments[0] in ("info", "evaluate"):
        wrong = "silent"  # it cannot have said what it was asked for
    shown = shlex.join(text if len(text) < 80 else f"{text[:20]}...{len(text)}" for text in given)
    return {"verdict": wrong or "ok", "what": "lineartime " + shown.encode(errors="backslashreplace").decode(),
            "how": f"stdin {str(stdin)[:15]}, stdout {stdout}", "message": ended.err[-500:], "code": ended.code,
            "over": ended.over, "mib": ended.mib}


def huge_size(text: str) -> bool:
    name, _, value = text.partition("=")
    return text.startswith("odd/model_") or (name in SIZES and bool(re.fullmatch(r"-?\d{5,}", value)))
