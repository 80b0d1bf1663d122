"""A report in Markdown as one HTML page that opens from disk: pictures are inside, it needs no script and no network.

Of HTML inside the Markdown only the tags `details`, `summary`, `sub`, `sup` and `br` are kept; all else is text.
"""

import base64
import itertools
import re
from collections.abc import Iterator, MutableMapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from lineartime.errors import DataError

TEMPLATE = Path(__file__).with_name("page.html")
TAGS = re.compile(r"(</?(?:sub|sup|summary|details|br)>)")
CSS_DPI, DPI = 96, 150
"""Of a page, and of the pictures that `plot` draws."""


class Renderer(RendererHTML):
    """Wide tables scroll by themselves, words in a number's place are pale, pictures are inside the page."""

    def html_inline(self, tokens: Sequence[Token], i: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        return "".join(part if TAGS.fullmatch(part) else escape(part, quote=False)
                       for part in TAGS.split(tokens[i].content))

    def html_block(self, tokens: Sequence[Token], i: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        return self.html_inline(tokens, i, options, env)

    def table_open(self, tokens: Sequence[Token], i: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        return '<div class="wide" tabindex="0"><table>\n'

    def table_close(self, tokens: Sequence[Token], i: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        return "</table></div>\n"

    def td_open(self, tokens: Sequence[Token], i: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        if tokens[i].attrGet("style") == "text-align:right" and not re.search(r"\d", tokens[i + 1].content):
            tokens[i].attrSet("class", "pale")
        return self.renderToken(tokens, i, options, env)

    def image(self, tokens: Sequence[Token], i: int, options: OptionsDict, env: MutableMapping[str, Any]) -> str:
        """As wide as it was drawn. Raises DataError."""
        path = env["folder"] / str(tokens[i].attrGet("src"))
        try:
            content = path.read_bytes()
        except OSError as e:
            raise DataError("cannot read the picture", path, e.strerror) from None
        width = round(int.from_bytes(content[16:20]) * CSS_DPI / DPI)
        return (f'<span class="wide"><img alt="{escape(tokens[i].content)}" width="{width}" '
                f'src="data:image/png;base64,{base64.b64encode(content).decode()}"></span>')


MARKDOWN = MarkdownIt("commonmark", renderer_cls=Renderer).enable("table")


def page(title: str, text: str, folder: Path) -> str:
    """A Markdown text as an HTML page, with a list of its headings behind the first paragraphs.

    folder: what the paths of pictures start from. Raises DataError for a picture that cannot be read."""
    tokens = MARKDOWN.parse(text)
    contents = "\n".join(list_of(headings(tokens)))
    start = next((i for i, token in enumerate(tokens) if token.type == "heading_open"), len(tokens))
    before, main = (MARKDOWN.renderer.render(part, MARKDOWN.options, {"folder": Path(folder)})
                    for part in (tokens[:start], tokens[start:]))
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), before=before, main=main,
        contents=f"<nav>\n{MARKDOWN.render(contents)}</nav>" if contents else "")


def headings(tokens: Sequence[Token]) -> Iterator[tuple[int, str, str]]:
    """Level, words and anchor of each heading, which gets the anchor; one that is taken gets a number."""
    taken: dict[str, int] = {}
    for token, words in itertools.pairwise(tokens):
        if token.type == "heading_open":
            anchor = re.sub(r"\W+", "-", words.content.lower()).strip("-")
            taken[anchor] = taken.get(anchor, 0) + 1
            anchor += f"-{taken[anchor]}" if taken[anchor] > 1 else ""
            token.attrSet("id", anchor)
            yield int(token.tag[1]), words.content, anchor


def list_of(found: Iterator[tuple[int, str, str]]) -> Iterator[str]:
    """Links to headings, as deep as they are below the one before, as lines of Markdown."""
    above: list[int] = []
    for level, words, anchor in found:
        above = [*(each for each in above if each < level), level]
        yield f"{'  ' * (len(above) - 1)}- [{words}](#{anchor})"
