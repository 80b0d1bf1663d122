"""The commands of docs/guides/own-text.md, as they stand there, on a small text and at few steps."""

import shlex
from pathlib import Path

import pytest

from command_line import Call, commands_of
from lineartime.data.prepare_config import SAMPLE
from lineartime.training.run_config import SIZES

COMMANDS = commands_of(Path(__file__).parents[2] / "docs" / "guides" / "own-text.md")


def test_the_walk(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "tiny", {**SIZES["tiny"], "steps": 2, "n_layers": 1, "eval_tokens": 512})
    text = SAMPLE.read_text(encoding="utf-8")
    Path("books").mkdir()
    Path("more").mkdir()
    for i in range(12):
        Path(f"books/{i}.{'md' if i % 2 else 'txt'}").write_text(text[i * 9_000 : (i + 1) * 9_000], encoding="utf-8")
    for i in range(3):
        Path(f"more/{i}.txt").write_text(text[200_000 + i * 9_000 : 209_000 + i * 9_000], encoding="utf-8")
    Path("books/cover.png").write_bytes(b"\x89PNG")
    said = []
    for line in COMMANDS:
        program, *words = shlex.split(line)
        code, out, err = call(*words)
        assert (program, code) == ("lineartime", 0), (line, err)
        said.append(out)
    assert [line.split()[1] for line in COMMANDS] == ["prepare", "train", "train", "plot", "evaluate", "generate",
                                                      "prepare", "train", "export", "generate"]
    assert "skipped     cover.png" in said[0] and "1 of 12 documents, at equal distances" in said[0]
    assert said[1].startswith("size     tiny\nmodel    flash, ") and "complete" in said[2]
    assert {path.name for path in Path("run").iterdir()} >= {"loss.png", "latest", "result.json"}
    assert said[7].startswith("size     tiny\n") and "in rows of 1,024:" in said[7]
    assert Path("model/README.md").exists()
