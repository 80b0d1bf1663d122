"""What a Markdown text makes when it is rendered: its words, and the rest."""

import re

from markdown_it import MarkdownIt

ODD = ["![x](http://host/t.png)", "[x](javascript:alert(1))", "<img src=x onerror=alert(1)>", "a`<img src=x>`", "a|b",
       r"a\|b", r"\[x\](http://host)", "`` `", "a & b &lt;", "<http://host>", "[x]", "a\n\n<script>", "\x1b[1m"]
"""Text that means something else in Markdown."""


def rendered(text):
    """The words of a text, and its links, pictures and tags: their kinds with where they lead."""
    words, more = "", []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for token in [each for block in tokens for each in [block, *(block.children or [])]]:
        if token.type in ("text", "code_inline", "code_block", "fence"):
            words += token.content + "\n"
        elif token.type in ("html_inline", "html_block"):
            more += re.findall("<[^>]*>", token.content)
        elif token.type in ("image", "link_open"):
            more.append(token.attrs.get("src") or token.attrs["href"])
    return words, more
