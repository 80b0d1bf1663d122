"""The commands of docs/guides/documents.md, as they stand there, on a small text and a tiny model."""

import csv
import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from command_line import Call, commands_of
from lineartime import model_names
from made_documents import made_rows, write_model, write_rows

COMMANDS = commands_of(Path(__file__).parents[2] / "docs" / "guides" / "documents.md")


def test_the_guide(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_names, "MODELS", tmp_path / "models")
    write_model(tmp_path / "models" / "small")
    Path("books").mkdir()
    for i, row in enumerate(made_rows(3)):
        Path(f"books/{i}.txt").write_text(row["text"])
    for name, n in (("train", 12), ("dev", 6), ("test", 6)):
        with open(f"{name}.csv", "w", newline="") as file:
            table = csv.DictWriter(file, ["text", "label"])
            table.writeheader()
            table.writerows(made_rows(n, n))
    for name in ("new", "texts", "held-out", "pairs", "dev-pairs"):
        write_rows(Path(f"{name}.jsonl"), [{**row, "answer": row["label"]} for row in made_rows(4, len(name))])
    said = {}
    for line in COMMANDS:
        piped = line.startswith("cat notes.txt | ")
        program, *words = shlex.split(line.removeprefix("cat notes.txt | "))
        code, out, err = call(*words, stdin="My notes." if piped else "")
        assert (program, code) == ("lineartime", 0), (line, err)
        said[line] = out
    assert [line.split(" | ")[-1].split()[1] for line in COMMANDS] == [
        "embed", "embed", "finetune", "classify", "finetune", "finetune", "embed", "export"]
    assert np.load("vectors.npy").shape == (3, 16) and np.load("new.npy").shape == (4, 16)
    assert json.loads(said[COMMANDS[1]])["tokens"] == len("My notes.") + 1
    assert {json.loads(line)["label"] for line in Path("found.jsonl").read_text().splitlines()} <= {
        "sea", "wood", "town"}
    assert "test         accuracy" in said[COMMANDS[2]] and "halves" in said[COMMANDS[4]]
    assert "halves" not in said[COMMANDS[5]] and Path("shared/modules.json").exists()
