"""Commands of the pages: those of docs/guides/own-text.md run as they stand there, on a small text
and at few steps; every other one is what its verb takes."""

import shlex
from pathlib import Path

import pytest
import typer

from command_line import Call, commands_of
from lineartime.cli import verbs
from lineartime.data.prepare_config import SAMPLE
from lineartime.training.run_config import SIZES

ROOT = Path(__file__).parents[2]
COMMANDS = commands_of(ROOT / "docs" / "guides" / "own-text.md")
APP = typer.main.get_command(verbs.app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_commands_that_there_are(page: Path) -> None:
    """Verbs and options; values that need files or torch are not looked at."""
    lines = "\n".join(commands_of(page)).replace("\\\n", " ").splitlines()
    for line in (line for line in lines if "lineartime " in line and "docker " not in line):
        words = shlex.split(line, comments=True)
        name, *arguments = words[words.index("lineartime") + 1 :]
        verb = APP.get_command(typer.Context(APP), name)  # type: ignore[attr-defined]
        assert verb is not None, line
        verb.make_context(name, arguments)


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
    assert "left out    1 of 13 files in books" in said[0] and "1 of 12 documents, at equal distances" in said[0]
    assert said[1].startswith("size     tiny\nmodel    flash, ") and "complete" in said[2]
    assert {path.name for path in Path("run").iterdir()} >= {"loss.png", "latest", "result.json"}
    assert said[7].startswith("size     tiny\n") and "in rows of 1,024:" in said[7]
    assert Path("model/README.md").exists()
