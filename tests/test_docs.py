"""The pages of docs/ name files, functions and tests that are there, and their examples run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SOURCES = {path.name: path for folder in ("tests", "lineartime") for path in sorted((ROOT / folder).rglob("*.py"))
           if path.name != "__init__.py"}
NAME = re.compile(r"`(\w+\.py):{1,2}([\w.]+)`")


def defined(tree: ast.AST) -> set[str]:
    """What a module or class defines: `name`, and `Class.name` below."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{below}" for below in defined(node)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_are_defined(page: Path) -> None:
    names = NAME.findall(page.read_text())
    files = {file for file, _ in names if file in SOURCES}
    known = {file: defined(ast.parse(SOURCES[file].read_text())) for file in files}
    assert [f"{file}:{name}" for file, name in names if name not in known.get(file, ())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    used, given = set(re.findall(r"\]\[(\w+)\]", text)), dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    assert used == set(given)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + list(given.values())
    headings = {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in text.splitlines() if line.startswith("#")}
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if target.startswith("#") and target[1:] not in headings] == []
    assert [target for target in local if not (page.parent / target.split("#")[0]).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    """The Python of a page, from top to bottom."""
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(page), "exec"), names)


def test_there_are_pages() -> None:
    assert {page.name for page in PAGES} >= {"paper.md", "walk.md"}
    assert len(NAME.findall((ROOT / "docs" / "paper.md").read_text())) > 100
