"""The report as one HTML page: what Markdown it reads, that nothing else gets through, and that it stands alone."""

import base64
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime.errors import DataError
from lineartime.plot import Panel, Picture, draw
from lineartime.report.html import TEMPLATE, page

VOID = {"meta", "img", "br", "hr"}


class Tree(HTMLParser):
    """Tags as they open, the text, and every tag that was closed out of turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.wrong = [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    def handle_data(self, data):
        self.words += data

    def attributes(self, tag, name):
        return [attributes.get(name) for each, attributes in self.tags if each == tag]


def body(text, folder="."):
    """What is made of a text below its title."""
    made = page("T", text, folder)
    tree = Tree(made)
    assert not tree.wrong and not tree.open
    return made.split("<h1>T</h1>\n")[1].split("<main>")[0 if "<main>\n\n</main>" in made else 1].strip()


def test_a_table_keeps_its_cells_and_their_alignment():
    made = body("| model | ours |\n| --- | ---: |\n| a \\| b | **1.5** |\n| c | not run |\n").replace("\n", "")
    right = 'style="text-align:right"'
    assert (f'<thead><tr><th>model</th><th {right}>ours</th></tr></thead><tbody>'
            f'<tr><td>a | b</td><td {right}><strong>1.5</strong></td></tr>'
            f'<tr><td>c</td><td {right} class="pale">not run</td></tr></tbody>') in made


def test_lists_are_nested_as_they_are_indented():
    made = body("- a\n  - b\n  - c\n- d\n").replace("\n", "")
    assert made.startswith("<ul><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ul>")


def test_every_heading_is_in_the_contents_once_and_has_a_place_of_its_own():
    text = "words before\n\n## Table 1: GAU\n\n### cpu\n\ntext\n\n## Table 2\n\n### cpu\n"
    made = page("T", text, ".")
    tree = Tree(made)
    links = [link.removeprefix("#") for link in tree.attributes("a", "href")]
    assert links == [attributes["id"] for tag, attributes in tree.tags if tag in ("h2", "h3")]
    assert len(set(links)) == 4 and all(f'">{words}</a>' in made for words in ("Table 1: GAU", "cpu", "Table 2"))
    assert made.index("<nav>") < made.index("<main>") < made.index("words before")


@pytest.mark.parametrize(("target", "is_link"), [
    ("https://a.b/c:d", True), ("HTTP://a.b", True), ("#part", True), ("docs/x.md#a:b", True), ("?q=a:b", True),
    ("javascript:alert(1)", False), ("jAvaScript:x", False), ("java%0ascript:x", False), ("data:text/html,x", False),
    ("file:///etc/passwd", False), ("//other.host/x", False), ("mailto:x", False)])
def test_links_go_to_pages_alone(target, is_link):
    assert ('href="' in page("T", f"[text]({target})", ".")) == is_link


@pytest.mark.parametrize(("text", "html"), [
    ("a < b & c > d", "a &lt; b &amp; c &gt; d"),
    ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ("`<b>` and `**`", "<code>&lt;b&gt;</code> and <code>**</code>"),
    ("**a `b` c**", "<strong>a <code>b</code> c</strong>"),
    ("[a **b**](docs/x.md)", '<a href="docs/x.md">a <strong>b</strong></a>'),
    ('[a](x"y)', '<a href="x%22y">a</a>'),
    (r"2\* and \|", "2* and |"),
    ("<sub>small</sub>", "<sub>small</sub>"),
])
def test_words(text, html):
    assert html in body(text)


def test_what_is_folded_stays_folded():
    made = body("<details><summary>More</summary>\n\n| a |\n| --- |\n| b |\n\n</details>")
    assert made.index("<details><summary>More</summary>") < made.index("<table>") < made.index("</details>")


def test_a_picture_is_inside_the_page(tmp_path):
    draw(Picture("words", (Panel("lines", "x"),)), tmp_path / "x.png")
    tree = Tree(page("T", '## A\n\n![what "it" shows](x.png)\n', tmp_path))
    (source,) = tree.attributes("img", "src")
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == (tmp_path / "x.png").read_bytes()
    assert tree.attributes("img", "alt") == ['what "it" shows'] and tree.attributes("img", "width") == [str(8 * 96)]
    with pytest.raises(DataError, match="cannot read the picture") as raised:
        page("T", "![a](y.png)\n", tmp_path)
    assert "\n" not in str(raised.value)


def test_the_page_needs_nothing_but_itself():
    made = page("T", "## A\n\ntext\n", ".")
    assert made.startswith("<!DOCTYPE html>") and 'name="viewport"' in made
    assert not any(word in made for word in ("<script", "<link", "http:", "https:", "url(", "@import"))
    assert "overflow-x: auto" in TEMPLATE.read_text()


@given(st.text(st.sampled_from("ab <>&\"'`*_[]()\\#-\n"), max_size=80))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_no_text_breaks_the_page(text):
    tree = Tree(page("T", text, "."))
    assert not tree.wrong and not tree.open
    assert {tag for tag, _ in tree.tags} <= {
        "html", "head", "meta", "title", "style", "body", "main", "nav", "h1", "h2", "h3", "h4", "h5", "h6", "p", "ul",
        "li", "a", "strong", "code", "em", "br", "hr", "pre", "blockquote"}
