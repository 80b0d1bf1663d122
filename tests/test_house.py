"""The project stays small and in order: a budget of lines for each folder, which only a change of
these numbers lets grow; imports that go down; functions that fit a screen; code on pages that does
too."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
FILES = [Path(name) for name in LISTED if (ROOT / name).exists()]
SOURCES = {path: (ROOT / path).read_text(encoding="utf-8") for path in FILES if path.suffix == ".py"}
PACKAGE = {path: ast.parse(text) for path, text in SOURCES.items() if path.parts[0] == "lineartime"}
MOST = {"top": 915, "base": 1_080, "ops": 3_216, "model": 2_828, "data": 2_038, "weights": 1_503, "training": 2_069,
        "tasks": 998, "use": 1_134, "cli": 1_150, "tests": 17_702, "benchmarks": 4_932}
"""Lines of Python, of the package 16,934 in all; `use` has hf.py, benchmarks has studies."""
ORDER = "base config folders ops model data weights training tasks use hf cli".split()
"""The storeys from the ground up: folders, and files at the top."""


def budget_of(path: Path) -> str:
    first, *rest = path.parts
    if first == "lineartime":
        return "use" if rest == ["hf.py"] else rest[0] if len(rest) > 1 else "top"
    return "benchmarks" if first == "studies" else first


def test_no_folder_grows() -> None:
    lines = dict.fromkeys(MOST, 0)
    for path, text in SOURCES.items():
        if budget_of(path) in lines:
            lines[budget_of(path)] += text.count("\n")
    assert not {folder: f"{n} of {MOST[folder]}" for folder, n in lines.items() if n > MOST[folder]}, lines


def imported(tree: ast.AST) -> set[Path]:
    """The modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        names = [(each.name, "") for each in node.names] if isinstance(node, ast.Import) else []
        names += [(node.module or "", each.name) for each in node.names] if isinstance(node, ast.ImportFrom) else []
        for module, name in names:
            places = [Path(*module.split("."), name), Path(*module.split("."))]
            files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
            found |= {*[file for file in files if file in PACKAGE][:1]}
    return found


def storey_of(path: Path) -> int:
    """The command `python -m lineartime` and the package's front door are above all."""
    name = path.with_suffix("").parts[1]
    return ORDER.index(name) if name in ORDER else len(ORDER)


def test_imports_go_down() -> None:
    assert [f"{path} imports {file}" for path, tree in PACKAGE.items() for file in imported(tree)
            if storey_of(file) > storey_of(path)] == []
    top = {path.stem for path in PACKAGE if len(path.parts) == 2}
    assert len(top) <= 7 and top <= {*ORDER, "__init__", "__main__"}
    outer = r"^\s*(?:from|import) (?:benchmarks|studies|examples|tests|drills)\b"
    assert [path for path in PACKAGE if re.search(outer, SOURCES[path], re.MULTILINE)] == []


def test_no_modules_import_each_other() -> None:
    left = {path: imported(tree) - {path} for path, tree in PACKAGE.items()}
    while free := {path for path, needed in left.items() if not needed & left.keys()}:
        left = {path: needed for path, needed in left.items() if path not in free}
    assert not left, {str(path): [str(each) for each in needed & left.keys()] for path, needed in left.items()}


BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.comprehension)


def test_functions_fit_a_screen() -> None:
    """At most 60 lines below the docstring, and 24 branching expressions."""
    for path, tree in PACKAGE.items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            first = node.body[0 if not ast.get_docstring(node) or len(node.body) < 2 else 1].lineno
            assert node.end_lineno is not None and node.end_lineno - first < 60, f"{path}: {node.name}"
            assert sum(isinstance(each, BRANCHES) for each in ast.walk(node)) <= 24, f"{path}: {node.name}"


@pytest.mark.parametrize("page", [path for path in FILES if path.suffix == ".md" and path.parts[0] in
                                  ("README.md", "CONTRIBUTING.md", "docs")], ids=str)
def test_code_on_pages_fits_a_screen(page: Path) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 80] == []
