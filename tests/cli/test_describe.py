"""What there is to choose from: models, fields, examples, completion. None of it needs torch."""

import os
import shlex
import subprocess
import sys
import typing

import pytest
import typer

from command_line import Call, assert_refused
from lineartime.cli import verbs
from lineartime.config import MODEL_FIELDS, TRAIN_FIELDS, ModelConfig, TrainConfig

APP = typer.main.get_command(verbs.app)
EXAMPLES = {verb.__name__: examples for verb, examples in verbs.VERBS.items()}


def test_torch_is_not_imported_for_what_there_is_and_for_help(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every example in a help is parsed by its verb, which is not called."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for line in ("config", "config transformer++ --size tiny", "--version"):
        code, out, err = call(*line.split())
        assert (code, err) == (0, "") and out, line
    for verb, examples in EXAMPLES.items():
        code, out, err = call(verb, "--help")
        assert (code, err) == (0, "")
        for line in examples:
            assert line in out
            name, *words = shlex.split(line.split("lineartime ")[-1])
            assert name == verb
            APP.get_command(typer.Context(APP), verb).make_context(verb, words)  # type: ignore[attr-defined]


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
    for given in (["flash", "--set", "task=pg19"], ["transformer", "--set", "model=flash", "--task", "pg19"]):
        assert call("info", *given, "--set", "n_layers=1")[:2] == (0, expected)
    for line, words in (("info flash --set task=c5", "did you mean c4"), ("info flash --set steps=3", "unknown set"),
                        ("config flush", "did you mean flash"), ("config --size huge", "unknown size: huge")):
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
