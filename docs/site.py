"""The Markdown pages of this repository as one tree for the site's builder, and a check of the site
it built.

    python docs/site.py pages FOLDER     copy the pages; a source file that one links to becomes one
    python docs/site.py check FOLDER     every link and anchor of the built HTML leads somewhere

On a code host a link such as ../lineartime/model/gau.py opens the file. A site has no files, so
there it opens a page with the file's text."""

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?P<before>\]\(|^\[[^\]\n]+\]: )(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?", re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml"}


def copy_pages(out: Path) -> None:
    """Write README, the other pages at the root, docs/ and all they link to under `out`, each at
    its own path.

    Exits with a message that names the page and the link where a link leads nowhere."""
    shutil.rmtree(out, ignore_errors=True)
    open_pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    seen = set(open_pages)
    while open_pages:
        page = open_pages.pop()

        def link(match: re.Match[str], page: Path = page) -> str:
            path, anchor = match["path"], match["anchor"] or ""
            if urlsplit(path).scheme:
                return match[0]
            target = (page.parent / path).resolve()
            if not target.is_file() or ROOT not in target.parents:
                sys.exit(f"error: a link leads to no file: {page.relative_to(ROOT)}, {path}")
            if target.suffix == ".md" and target not in seen:
                seen.add(target)
                open_pages.append(target)
            elif target.suffix in LANGUAGES:
                write_source(target, out)
                path += ".md"
            elif target.suffix != ".md":
                (out / target.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, out / target.relative_to(ROOT))
            return match["before"] + path + anchor

        write(out / page.relative_to(ROOT), LINK.sub(link, page.read_text(encoding="utf-8")))
    write(out / "docs" / "site.css", (ROOT / "docs" / "site.css").read_text(encoding="utf-8"))


def write_source(path: Path, out: Path) -> None:
    """A source file as a page, which the site's search leaves out."""
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    fence = "`" * 4
    write(out / f"{name}.md", f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n"
                              f"{fence}{LANGUAGES[path.suffix]}\n{text}{fence}\n")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class Page(HTMLParser):
    """What an HTML page links to, and the anchors that it has."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and (name == "id" or (name == "name" and tag == "a")):
                self.anchors.add(value)
            elif value and name in ("href", "src") and tag != "link":
                self.links.append(value)


def check_site(site: Path) -> None:
    """Exits with the links that lead nowhere, where there are any."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are relative to wherever it is shown
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            found = target.is_file() and (target not in pages or unquote(parts.fragment) in pages[target].anchors)
            if not found:
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    if broken or not pages:
        sys.exit("error: links that lead nowhere:\n" + "\n".join(broken or ["no page was built"]))
    print(f"{len(pages)} pages, every link leads somewhere: {site}/index.html")


if __name__ == "__main__":
    {"pages": copy_pages, "check": check_site}[sys.argv[1]](Path(sys.argv[2]))
