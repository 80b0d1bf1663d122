"""The command line in a test's own process."""

import re
import sys
import tempfile
from pathlib import Path
from typing import Protocol

import pytest
import typer

from lineartime.cli import verbs


class Call(Protocol):
    """The command in this process: exit code, stdout, stderr. app: other verbs."""

    def __call__(self, *arguments: object, stdin: str = "", app: typer.Typer = verbs.app) -> tuple[int, str, str]: ...


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def run_here(*arguments: object, stdin: str = "", app: typer.Typer = verbs.app) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lineartime", *map(str, arguments)])
        with (tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape") as file,
              pytest.raises(SystemExit) as stopped):
            file.write(stdin)
            file.seek(0)
            monkeypatch.setattr(sys, "stdin", file)
            verbs.main(app)
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run_here


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for language, block in blocks if not language for line in block.splitlines()]


def assert_refused(code: int, err: str, expected_code: int, *words: object) -> None:
    assert code == expected_code, err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert str(word) in err
