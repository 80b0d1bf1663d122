"""Fields, helps and completion, which need no torch; and the commands of the pages. Those of
docs/guides/own-text.md run, at few steps on a small text, but for `small`, whose steps are long;
every other is what its verb takes."""

import inspect
import os
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer

from command_line import Call, assert_refused, commands_of
from lineartime.base.settings import choices_of
from lineartime.cli import verbs
from lineartime.cli.options import options_of, spelled
from lineartime.config import MODEL_FIELDS, TRAIN_FIELDS, ModelConfig, TrainConfig
from lineartime.data.prepare_config import SAMPLE
from lineartime.training.run_config import SIZES
from text_files import make

ROOT = Path(__file__).parents[2]
COMMANDS = [line for line in commands_of(ROOT / "docs" / "guides" / "own-text.md") if "small" not in line]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
APP = typer.main.get_command(verbs.app)


def check_words(name: str, words: list[str]) -> None:
    """There are such a verb and such options. Values that need files or torch are not looked at."""
    verb = APP.get_command(typer.Context(APP), name)  # type: ignore[attr-defined]
    assert verb is not None, name
    verb.make_context(name, words)


def test_torch_is_not_imported_for_what_there_is_and_for_help(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every example in a help is parsed by its verb, which is not called."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for line in ("config", "config transformer++ --size tiny", "--version"):
        code, out, err = call(*line.split())
        assert (code, err) == (0, "") and out, line
    for verb, examples in ((verb.__name__, examples) for verb, examples in verbs.VERBS.items()):
        code, out, err = call(verb, "--help")
        assert (code, err) == (0, "")
        for line in examples:
            assert line in out
            name, *words = shlex.split(line.split("lineartime ")[-1])
            assert name == verb
            check_words(verb, words)


def test_every_field_is_described(call: Call) -> None:
    _, out, _ = call("config", "flash", "--size", "tiny", "--task", "pg19")
    hints = typing.get_type_hints(ModelConfig, None, None, True) | typing.get_type_hints(TrainConfig, None, None, True)
    for name in (*MODEL_FIELDS, *TRAIN_FIELDS):
        (text,) = hints[name].__metadata__
        assert f"\n{name} = " in out and len(text) > 10 and text.endswith((".", ".)")), name
    assert "\nn_layers = 6  [a whole number; Tables 8-10]\n    GAU layers, or pairs" in out
    assert "\nclip = 0.1  [a number or none; Tables 6-7]\n" in out
    assert "\nrope_base = 10000.0  [a number; beyond the paper]\n" in out


def test_info_takes_its_task_by_set_too(call: Call) -> None:
    _, expected, _ = call("info", "flash", "--task", "pg19", "--set", "n_layers=1")
    assert call("info", "flash", "--set", "task=pg19", "--set", "n_layers=1")[:2] == (0, expected)
    for line, words in (("info flash --set task=c5", "did you mean c4"), ("info flash --set steps=3", "unknown set"),
                        ("config flush", "did you mean flash"), ("config --size huge", "unknown size: huge")):
        assert_refused(*call(*line.split())[::2], 2, words)


def test_a_number_of_more_than_64_bits_is_refused_by_its_option(call: Call) -> None:
    whole = [(verb.__name__, spelled(option)) for verb in verbs.VERBS
             for parameter in inspect.signature(verb, eval_str=True).parameters.values()
             for option in options_of(parameter) if int in choices_of(option.annotation.__origin__)]
    assert {verb for verb, _ in whole} == {"prepare", "train", "finetune", "evaluate", "generate"}
    for verb, option in whole:
        needed = [word for each in APP.commands[verb].params if each.required  # type: ignore[attr-defined]
                  for word in ([each.opts[0], "x"] if each.opts[0].startswith("-") else ["x"])]
        for value in (2**63, -(2**63) - 1):
            code, _, err = call(verb, *needed, option, value)
            assert_refused(code, err, 2, f"wrong value: {option} = {value}; the number is too large")


@pytest.mark.parametrize(("line", "words"), [
    ("train flash --steps 5 --set steps=2", "a setting is given twice: steps and --set steps; give it once"),
    ("train flash --set steps=2 --set steps=2", "a setting is given twice: steps=2 steps=2; give it once"),
    ("train a.toml --from a --set from=b", "a setting is given twice: from and --set from"),
    ("info flash --set model=flash", "a setting is given twice: model and --set model"),
    ("info flash --task c4 --set task=pg19", "a setting is given twice: task and --set task"),
    ("generate small --lr 1", "No such option: --lr")])
def test_an_option_that_is_given_twice_or_is_none_is_refused(line: str, words: str, call: Call, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text('model = "flash"')
    assert_refused(*call(*line.split())[::2], 2, words)


@pytest.mark.parametrize(("line", "expected"), [
    ("lineartime gen", {"generate"}), ("lineartime train fla", {"flash", "flash+", "flash-quad"})])
def test_the_shell_completes(line: str, expected: set[str]) -> None:
    """What bash is offered behind a line."""
    code = ("import sys; sys.modules['torch'] = None; sys.argv[1:] = []\n"
            "from lineartime.cli.verbs import main\nmain()")
    environment = {"_LINEARTIME_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr, {*done.stdout.split()}) == (0, "", expected)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_commands_that_there_are(page: Path) -> None:
    lines = "\n".join(commands_of(page)).replace("\\\n", " ").splitlines()
    for line in (line for line in lines if "lineartime " in line and "docker " not in line):
        words = shlex.split(line, comments=True)
        name, *arguments = words[words.index("lineartime") + 1 :]
        check_words(name, arguments)


def test_the_walk(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "tiny", {**SIZES["tiny"], "steps": 2, "n_layers": 1, "eval_tokens": 512})
    text = SAMPLE.read_text(encoding="utf-8")
    make(Path(), {f"books/{i}.{'md' if i % 2 else 'txt'}": text[i * 9_000 : (i + 1) * 9_000] for i in range(12)})
    make(Path(), {f"more/{i}.txt": text[200_000 + i * 9_000 : 209_000 + i * 9_000] for i in range(3)})
    make(Path(), {"books/cover.png": b"\x89PNG"})
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
