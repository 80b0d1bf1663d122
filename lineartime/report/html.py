"""A report in Markdown as one HTML page that opens from disk: pictures are inside, it needs no script and no network.

Of HTML inside the Markdown only the tags `details`, `summary`, `sub`, `sup` and `br` are kept; all else is text.
"""

import base64
import re
import tempfile
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt

from lineartime.atomic_io import write_atomically
from lineartime.errors import DataError
from lineartime.plot import DPI, Picture, draw
from lineartime.report.pages import illustrated
from lineartime.reproduce.results import Results

TEMPLATE = Path(__file__).with_name("page.html")


class Renderer(MarkdownIt):
    """Markdown whose links go to http(s), to a fragment or to a file beside the page; any other is left as text."""

    def validateLink(self, url: str) -> bool:
        return re.match("https?://|(?!//)[^:]*([#?/]|$)", url.strip(), re.IGNORECASE) is not None


MARKDOWN = Renderer("commonmark", {"html": False}).enable("table")
CSS_DPI = 96


def page(title: str, text: str, folder: Path) -> str:
    """A Markdown text as an HTML page, with a list of its headings before it.

    folder: what the paths of pictures start from. Raises DataError for a picture that cannot be read."""
    headings: list[str] = []

    def heading(found: re.Match[str]) -> str:
        headings.append(f'<li><a href="#part-{len(headings)}">{found[2]}</a></li>')
        return f'<h{found[1]} id="part-{len(headings) - 1}">{found[2]}</h{found[1]}>'

    def picture(found: re.Match[str]) -> str:
        try:
            content = (Path(folder) / found[1]).read_bytes()
        except OSError as e:
            raise DataError("cannot read the picture", Path(folder) / found[1], e.strerror) from None
        width = round(int.from_bytes(content[16:20]) * CSS_DPI / DPI)  # as wide as it was drawn
        return (f'<span class="wide"><img alt="{found[2]}" width="{width}" '
                f'src="data:image/png;base64,{base64.b64encode(content).decode()}"></span>')

    main = re.sub(r"&lt;(/?(?:sub|sup|summary|details|br))&gt;", r"<\1>", MARKDOWN.render(text))
    main = re.sub(r"<p>(</?details>.*?)</p>", r"\1", main)
    main = main.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")
    main = re.sub(r'<td (style="text-align:right")>([^\d<]*)</td>', r'<td \1 class="pale">\2</td>', main)
    main = re.sub(r"<h(\d)>(.*?)</h\1>", heading, main)
    main = re.sub(r'<img src="([^"]*)" alt="([^"]*)" />', picture, main)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), main=main, contents="\n".join(["<nav><ul>", *headings, "</ul></nav>"] if headings else []))


def write_page(shown: Iterable[Results], html: Path) -> None:
    """Tables and their pictures in one file. Raises ResourceError."""
    with tempfile.TemporaryDirectory() as scratch:
        def show(name: str, picture: Picture) -> str:
            draw(picture, Path(scratch) / name)
            return name

        text = "\n".join(illustrated(results, show) for results in shown)
        write_atomically(html, page("The paper's tables and figures, and ours", text, Path(scratch)))
