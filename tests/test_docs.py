"""README and the pages of docs/ name files, functions and tests that are there, and their examples
run."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted((ROOT / "benchmarks").rglob("*.md"))]
CARD = ROOT / "lineartime" / "models" / "small" / "README.md"
SOURCES = sorted(path for folder in ("tests", "lineartime", "benchmarks", "tools")
                 for path in (ROOT / folder).rglob("*.py"))
LINK = re.compile(r"\[(?P<label>`[^`]+`|[^\]\[]+)\](?:\((?P<target>[^)\s]+)\)|\[(?P<key>\w+)\])")
NAME = re.compile(r"`([\w/]+\.py):{1,2}([\w.]+)`")
FILE = re.compile(r"`?([\w/.-]+\.(?:py|toml|sh|md|jsonl))(?::{1,2}([\w.]+))?`?")

every_page = pytest.mark.parametrize("page", [*PAGES, CARD], ids=lambda page: page.relative_to(ROOT).as_posix())


@cache
def defined(path: Path) -> set[str]:
    """What a file defines: `name`, and `Class.name` below."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            below = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
            names |= {node.name, *(f"{node.name}.{name}" for name in below)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def links(text: str) -> list[tuple[str, str]]:
    """The label and the target of each link; a target of the form [label][key] is looked up."""
    given = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    return [(link["label"], link["target"] or given[link["key"]]) for link in LINK.finditer(text)]


def wrong_names(text: str, folder: Path) -> list[str]:
    """The names `file.py:function` of a page that are not defined in the file that the name's link
    leads to or, where it is no link, in the only file of that name; and labels that are another
    file's name than their link's."""
    wrong = []
    for label, target in links(text):
        named = FILE.fullmatch(label)
        if named is None or "://" in target:
            continue
        path = (folder / target.split("#")[0]).resolve()
        if not path.match(named[1].lstrip("./")) or (named[2] and named[2] not in defined(path)):
            wrong.append(f"{label} -> {target}")
    for file, name in NAME.findall(LINK.sub("", text)):
        found = [path for path in SOURCES if path.match(file)]
        if len(found) != 1 or name not in defined(found[0]):
            wrong.append(f"{file}:{name}, in {len(found)} files of this name")
    return wrong


@every_page
def test_names_are_defined(page: Path) -> None:
    assert wrong_names(page.read_text(encoding="utf-8"), page.parent) == []


@every_page
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of a page, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(code, "page", "exec"), names)


def test_the_pages_stay_short() -> None:
    """30,000 words in docs/, 150 lines of README: more is not read."""
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS) <= 30_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_nothing_says_to_install_us_by_name() -> None:
    """No index has the package: whoever registered its name would be run. Of all tracked files."""
    by_name = re.compile(r"""(?:pip install|uv add|uv pip install)\b[^\n;,]*[\s"'`]lineartime(?![\w/])""")
    assert by_name.search("pip install -U 'lineartime[x]'") and not by_name.search("pip install '.[x]'")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {name: (ROOT / name).read_bytes().decode(errors="replace") for name in listed}
    assert [name for name, text in texts.items() if name != "tests/test_docs.py" and by_name.search(text)] == []


def test_every_module_is_in_the_reference() -> None:
    """All that a program can import but kernels, which docs/kernels.md explains, the verbs, and the
    file by which a model's folder names its classes."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    modules = set()
    for path in (ROOT / "lineartime").rglob("*.py"):
        parts, source = path.relative_to(ROOT).with_suffix("").parts, path.read_text(encoding="utf-8")
        defines = "__all__" in source if path.name == "__init__.py" else path.name != "__main__.py"
        if defines and parts[1] not in ("cli", "models") and "@triton.jit" not in source:
            modules.add(".".join(part for part in parts if part != "__init__"))
    assert set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)) == modules


def test_every_page_is_in_the_site() -> None:
    shown = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} <= set(shown)


def test_a_broken_link_of_the_site_is_an_error(tmp_path: Path) -> None:
    """By docs/site.py, which `make docs` calls before and after the site's builder."""
    command = [sys.executable, ROOT / "docs" / "site.py"]
    assert subprocess.run([*command, "pages", tmp_path / "pages"]).returncode == 0
    assert "(../lineartime/config.py.md)" in (tmp_path / "pages/docs/guide.md").read_text(encoding="utf-8")
    site = tmp_path / "site"
    (site / "b").mkdir(parents=True)
    (site / "b" / "index.html").write_text('<h1 id="here"></h1>')
    for there in (("b/", "b/#here", "#top"), ("b/#there", "c/", "#bottom")):
        (site / "index.html").write_text('<h1 id="top"></h1>' + "".join(f'<a href="{link}">b</a>' for link in there))
        done = subprocess.run([*command, "check", site], capture_output=True, text=True)
        if there[0] == "b/":
            assert done.returncode == 0, done.stderr
    assert done.returncode == 1 and all(f"index.html: {link}" in done.stderr for link in there)
