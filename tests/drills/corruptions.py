"""Files that are damaged, and then read: an error names the file, or the result is right."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from drills import child, folders
from drills.folders import MADE, Command, verb


def in_python(function: Callable[[Path], object]) -> Command:
    return lambda made, it, out: child.as_verb(lambda: print(json.dumps(function(it))))


def loaded(it: Path) -> list[float]:
    import torch

    import lineartime

    model, tokenizer, facts = lineartime.load_model(it)
    with torch.no_grad():
        x = model.embed(torch.tensor([tokenizer.encode(folders.PROMPT)])).sum().item()
    return [x, sum(p.double().sum().item() for p in model.parameters()), tokenizer.vocab_size, facts.get("step", 0)]


FOREIGN = "transformers says"


def from_pretrained(it: Path) -> list[object]:
    """Its errors count as ours."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lineartime.hf  # noqa: F401
    from lineartime.base.errors import CheckpointError, LineartimeError

    try:
        tokenizer, model = AutoTokenizer.from_pretrained(it), AutoModelForCausalLM.from_pretrained(it)
        with torch.no_grad():
            logits = model.eval()(**tokenizer(folders.PROMPT, return_tensors="pt")).logits
    except LineartimeError:
        raise
    except Exception as e:
        raise CheckpointError(FOREIGN, f"{type(e).__name__}: {e}"[:2000]) from None
    return [logits.double().sum().item(), list(logits.shape), model.generation_config.to_dict().get("eos_token_id")]


class Subject(NamedTuple):
    """Something on the disk, something like it by another run, and what reads it."""

    source: str
    other: str
    readers: dict[str, Command]


LOAD = {"load_model": in_python(loaded)}
OPEN = {"from_pretrained": in_python(from_pretrained)}
PLOT = {"plot": verb("plot", "{it}")}
EVALUATE = {"evaluate": verb("evaluate", "{it}", "--data", "{made}/data", "--json")}
GENERATE = {"generate": verb("generate", "{it}", folders.PROMPT, "--max-new-tokens", "8", "--temperature", "0.7")}
ASK = ("--context", "48", "--max-answer-tokens", "6", "--json")
SUBJECTS = [
    Subject("run", "run2", {
        **LOAD, "from_pretrained": in_python(lambda it: from_pretrained(it / "latest")), **EVALUATE,
        "evaluate latest": verb("evaluate", "{it}/latest", "--data", "{made}/data", "--json"), **GENERATE, **PLOT,
        "plot side by side": verb("plot", "a={it}", "b={made}/run2", "--out", "{out}/both.png"),
        "export": verb("export", "{it}", "--out", "{out}/exported"),
        "train, complete": verb(*folders.train("{made}/data", "{it}"))}),
    Subject("unfinished", "run2", {"train, resumed": verb(*folders.train("{made}/data", "{it}")), **LOAD, **PLOT}),
    Subject("data", "data2", {
        "train": verb(*folders.train("{it}", "{out}/run")),
        "train --from": verb(*folders.train_from("{made}/run", "{it}", "{out}/run")),
        "evaluate": verb("evaluate", "{made}/run", "--data", "{it}", "--json"),
        "export": verb("export", "{made}/run", "--data", "{it}", "--out", "{out}/exported"),
        "prepare over": verb(*folders.prepare("{made}/text.txt", "{it}"))}),
    Subject("exported", "exported2", LOAD | OPEN | EVALUATE | GENERATE),
    Subject("small", "exported", LOAD | GENERATE),
    Subject("transformers", "transformers2", OPEN | LOAD | GENERATE),
    Subject("finetuned", "finetuned2", {
        "evaluate --questions": verb("evaluate", "{it}", "--questions", "{made}/dev.json", *ASK),
        "finetune, complete": verb(*folders.finetune(MADE, "{it}")), **LOAD}),
    Subject("old", "run2", LOAD | GENERATE | PLOT),
]
PAIRS = [(subject, name) for subject in SUBJECTS for name in subject.readers]
OFTEN = [pair for pair in PAIRS if pair[0].source in ("run", "unfinished", "data", "exported")]


def change_bytes(path: Path, random: Random) -> str:
    data = path.read_bytes()
    kind = random.choice(["a bit", "a byte", "cut", "extended", "empty", "zeros", "other text"])
    at = random.randrange(min(len(data), 1000) if random.random() < 0.5 else len(data)) if data else 0
    if kind in ("a bit", "a byte"):
        old = data[at : at + 1] or b"\0"
        value = old[0] ^ 1 << random.randrange(8) if kind == "a bit" else random.choice([0, 10, 34, 48, 123, 255])
        data = data[:at] + bytes([value]) + data[at + 1 :]
    elif kind == "cut":
        data = data[: random.choice([at, len(data) - 1, len(data) // 2, 8])]
    elif kind == "extended":
        data += random.choice([b"\0", b"\n", b"{}", b"\0" * 4096, b"{\"step\": 99}\n", data])
    elif kind == "zeros":  # as a file system leaves a file after a power loss
        at = at // 512 * 512
        data = data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]
    else:
        data = b"" if kind == "empty" else random.choice([
            b"\xff\xfe{}", b"\xef\xbb\xbf" + data, b"[" * 100_000, b"null", b"[]", b"{}", b'"text"', b"1e999", b"NaN",
            data.replace(b"\n", b"\r\n")])
    path.write_bytes(data)
    return f"{kind}, byte {at} of {len(data)}"


def change_lines(path: Path, random: Random) -> str:
    lines = path.read_bytes().splitlines(True)
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    digits = [match.start() for match in re.finditer(rb"\d", lines[at])]
    kind = random.choice(["deleted", "doubled", "swapped", "added", *["digit"] * 2 * bool(digits)])
    if kind == "deleted":
        del lines[at]
    elif kind == "doubled":
        lines.insert(other, lines[at])
    elif kind == "swapped":
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "added":
        lines.insert(at, random.choice([b"{}\n", b"\n", b"garbage\n", b"\xff\n"]))
    else:
        line, digit = lines[at], random.choice(digits)
        lines[at] = line[:digit] + b"%d" % ((line[digit] - 48 + random.randint(1, 9)) % 10) + line[digit + 1 :]
    path.write_bytes(b"".join(lines))
    return f"line {at + 1}, {other + 1}: {kind}"


def grow(path: Path, random: Random) -> str:
    os.truncate(path, 100 << 30)
    return "100 GiB long"


def replace(path: Path, random: Random) -> str:
    path.unlink()
    kind = random.choice(["link to itself", "link to nothing", "link to /dev/null", "folder", "full folder"])
    if "folder" in kind:
        path.mkdir()
        if kind == "full folder":
            (path / "file").write_text("x")
    else:
        path.symlink_to(path.name if kind.endswith("itself") else kind.split()[-1])
    return f"a {kind}"


def not_finite(path: Path, random: Random) -> str:
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = random.choice([each for each in header if each != "__metadata__"])
    start, stop = (8 + length + at for at in header[name]["data_offsets"])
    nan = {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\x7f", "F16": b"\0\x7e", "F64": bytes(6) + b"\xf8\x7f"}[
        header[name]["dtype"]]
    stop = random.choice([start + len(nan), stop])
    data[start:stop] = nan * ((stop - start) // len(nan))
    path.write_bytes(data)
    return name


def delete(path: Path, random: Random) -> str:
    path.unlink()
    return ""


ANY = [*[change_bytes] * 7, delete, replace, grow]
MORE = {".safetensors": [not_finite] * 5, ".json": [change_bytes] * 2, ".jsonl": [change_lines] * 8}


def damage(subject: Subject, made: Path, it: Path, random: Random) -> tuple[str, str]:
    """Damage one file, or put another run's or an old version's in its place; its name and how."""
    files = sorted(path for path in it.rglob("*") if not path.is_dir() or path.is_symlink()) if it.is_dir() else [it]
    path = random.choice([path for path in files if path.is_symlink() or path.stat().st_size] or files)
    twin = made / subject.other / path.relative_to(it) if it.is_dir() else made / subject.other
    others = [each for each in (twin, *sorted((made / "old").rglob(path.name))[:1]) if each.is_file()]
    chosen = random.choice([delete] if path.is_symlink() else [*ANY, *MORE.get(path.suffix, []), *others])
    name = str(path.relative_to(it.parent))
    if isinstance(chosen, Path):
        shutil.copyfile(chosen, path)
        return name, f"it is {chosen.relative_to(made)}"
    return name, f"{chosen.__name__}: {chosen(path, random)}"


def begin(made: Path, folder: Path, source: str) -> tuple[Path, Path]:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    it = folder / "it" / source
    it.parent.mkdir(parents=True)
    if (made / source).is_dir():
        shutil.copytree(made / source, it, symlinks=True)
    else:
        shutil.copyfile(made / source, it)
    return it, folder / "out"


@cache
def undamaged(made: Path, folder: Path, source: str, read: Command) -> tuple[str, dict[str, object]]:
    it, out = begin(made, folder, source)
    ended = child.run(read(made, it, out), folder)
    assert ended.code == 0, (source, ended)
    return ended.out, folders.left(out) | written(it)


def written(it: Path) -> dict[str, object]:
    """What a reader may write into what it reads: a run that goes on, and its picture."""
    if it.name not in ("run", "unfinished"):
        return {}
    return {name: value for name, value in folders.left(it).items()
            if name in ("result.json", "loss.png", "sample.txt")}


def trial(made: Path, folder: Path, random: Random,
          pairs: Sequence[tuple[Subject, str]] = (*PAIRS, *OFTEN)) -> dict[str, object]:
    subject, reader = random.choice(pairs)
    expected = undamaged(made, folder, subject.source, subject.readers[reader])
    it, out = begin(made, folder, subject.source)
    name, how = damage(subject, made, it, random)
    ended = child.run(subject.readers[reader](made, it, out), folder)
    path, words = it.parent / name, ended.out + ended.err
    named = path.name in words or str(path.parent) in words or str(path.parent.with_name("latest")) in words
    left = folders.left(out) | written(it)
    other = [each for each in sorted({*left, *expected[1]}) if left.get(each) != expected[1].get(each)
             and Path(each).name != path.name]
    wrong, message = child.misbehaviour(ended), (ended.err or ended.out)[-500:]
    if wrong is None and "\x1b" in words:
        wrong = "escape"
    elif wrong is None and ended.code != 0:
        wrong = None if named or FOREIGN in ended.err else "unnamed"
    elif wrong is None and (ended.out != expected[0] or other) and not (
            named and (re.search("warning|note", words) or reader in ("load_model", "from_pretrained"))):
        wrong = "unnoticed" if plausible(path, how) else "silent"
        message = str(other or (ended.out[:300], expected[0][:300]))
    return {"verdict": wrong or "ok", "what": f"{reader} of {name}", "how": how, "message": message, "code": ended.code,
            "outcome": "refused" if ended.code else "warned" if named else "same"}


def plausible(path: Path, how: str) -> bool:
    """Whether a damaged file cannot be told from a whole one: it is well-formed, without a hash."""
    hashed = path.parent.name.startswith("step-") or (path.parent / "manifest.json").exists()
    if hashed or path.suffix == ".ids" or how.startswith("not_finite"):
        return False
    if how.startswith("delete"):
        return path.name == "result.json"  # the run has not ended yet
    try:
        if not path.stat().st_size:
            return False
        if path.suffix == ".jsonl":
            return all(isinstance(json.loads(line), dict) for line in path.read_text(encoding="utf-8").splitlines())
        return path.suffix != ".json" or isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError, MemoryError):
        return False
