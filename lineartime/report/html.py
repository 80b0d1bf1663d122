"""A report in Markdown as one HTML page that opens from disk: pictures are inside, it needs no script and no network.

Not all of Markdown is read, only what `report` writes: headings, paragraphs, lists, tables, pictures that stand alone,
bold, code, links, and the tags `details`, `summary`, `sub`, `sup`, `br`. All else is text.
"""

import base64
import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from lineartime.errors import DataError

INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\[(?P<words>[^\]]+)\]\((?P<link>[^)\s]+)\)|\*\*(?P<bold>.+?)\*\*|\\(?P<sign>[\\*_|`])"
    r"|(?P<tag></?(?:sub|sup|summary|details|br)>)")
PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+)\)")
HEADING = re.compile(r"(#{1,6}) (.+)")
ITEM = re.compile(r"( *)- (.+)")

CSS_DPI, DPI = 96, 150
"""Of a page, and of the pictures that `plot` draws."""

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: #222; background: #fff;
       font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3, h4 { line-height: 1.25; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.4rem; } h3 { font-size: 1.2rem; }
h2, h3 { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid #ccc; }
a { color: #0057a0; }
nav ul { margin: 0; padding-left: 1.2rem; }
.wide { overflow-x: auto; margin: 1rem 0; overflow-wrap: normal; }
.wide img { display: block; max-width: max(100%, 52rem); height: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
.number { text-align: right; } .pale { color: #767676; }
tr > :first-child { position: sticky; left: 0; background: #fff; }
tbody tr:hover > * { background: #f3f6fa; }
sub, sup { font-size: .85rem; vertical-align: baseline; color: #555; }
code { font-size: .9em; background: #f3f3f3; padding: .1em .25em; }
details { margin: .8rem 0; } summary { cursor: pointer; }
@media (max-width: 40rem) {
  body { padding: .6rem; } th, td { padding: .25rem .4rem; }
  tr > :first-child { max-width: 8rem; white-space: normal; }
}
"""


def page(title: str, text: str, folder: Path) -> str:
    """A Markdown text as an HTML page, with a list of its headings behind the first paragraphs.

    folder: what the paths of pictures start from. Raises DataError for a picture that cannot be read."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if HEADING.match(line)), len(lines))
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>", "</head>", "<body>", f"<h1>{escape(title)}</h1>", *blocks(lines[:start], folder),
        *contents(lines[start:]), "<main>", *blocks(lines[start:], folder), "</main>", "</body>", "</html>", ""])


def contents(lines: Sequence[str]) -> Iterator[str]:
    """A list of links to the headings, as deep as they are."""
    found = headings(lines)
    if found:
        yield "<nav>"
        yield from listed([(level, f'<a href="#{anchor}">{inline(words)}</a>') for level, words, anchor in found])
        yield "</nav>"


def headings(lines: Sequence[str]) -> list[tuple[int, str, str]]:
    """Level, words and anchor of each heading; an anchor that is taken gets a number."""
    found: list[tuple[int, str, str]] = []
    taken: dict[str, int] = {}
    for match in filter(None, map(HEADING.fullmatch, lines)):
        anchor = re.sub(r"\W+", "-", match[2].lower()).strip("-")
        taken[anchor] = taken.get(anchor, 0) + 1
        found.append((len(match[1]), match[2], anchor if taken[anchor] == 1 else f"{anchor}-{taken[anchor]}"))
    return found


def blocks(lines: Sequence[str], folder: Path) -> Iterator[str]:
    """Lines of Markdown as HTML. A block's lines are of one kind and stand together."""
    anchors = iter(headings(lines))
    for kind, group in groupby(lines, kind_of):
        together = list(group)
        if kind == "heading":
            for level, words, anchor in (next(anchors) for _ in together):
                yield f'<h{level} id="{anchor}">{inline(words)}</h{level}>'
        elif kind == "table":
            yield from table(together)
        elif kind == "list":
            items = [match for match in map(ITEM.fullmatch, together) if match]
            yield from listed([(len(match[1]), inline(match[2])) for match in items])
        elif kind == "picture":
            yield from (picture(line, folder) for line in together)
        elif kind == "fold":
            yield from map(inline, together)
        elif kind == "text":
            yield f"<p>{inline(' '.join(together))}</p>"


def kind_of(line: str) -> str:
    """What a line is part of."""
    for kind, pattern in (("heading", HEADING), ("list", ITEM), ("picture", PICTURE)):
        if pattern.fullmatch(line):
            return kind
    if line.startswith("|"):
        return "table"
    return "fold" if re.match("</?details", line) else "text" if line.strip() else ""


def table(lines: Sequence[str]) -> Iterator[str]:
    """The lines of a table: names of columns, how they are aligned, rows. It scrolls by itself where it is too wide."""
    head, rule, *rows = ([part.strip() for part in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in lines)

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(cell(words, how, tag) for words, how in zip(cells, rule, strict=True))}</tr>"

    yield '<div class="wide" tabindex="0"><table>'
    yield f"<thead>{row(head, 'th')}</thead><tbody>"
    yield from (row(cells, "td") for cells in rows)
    yield "</tbody></table></div>"


def cell(words: str, rule: str, tag: str) -> str:
    """A number stands at the right; words in its place, such as "not run", are pale."""
    if not rule.endswith(":"):
        return f"<{tag}>{inline(words)}</{tag}>"
    pale = tag == "td" and not re.search(r"\d", words)
    return f'<{tag} class="number{" pale" if pale else ""}">{inline(words)}</{tag}>'


def listed(items: Sequence[tuple[int, str]]) -> Iterator[str]:
    """Items with their depths, any rising numbers, as lists in lists."""
    depths: list[int] = []
    for depth, words in items:
        while len(depths) > 1 and depth < depths[-1]:
            depths.pop()
            yield "</li></ul>"
        if not depths or depth > depths[-1]:
            depths.append(depth)
            yield "<ul>"
        else:
            yield "</li>"
        yield f"<li>{words}"
    yield "</li></ul>" * len(depths)


def picture(line: str, folder: Path) -> str:
    """A PNG inside the page, as wide as it was drawn. Raises DataError."""
    match = PICTURE.fullmatch(line)
    assert match
    path = folder / match["path"]
    try:
        content = path.read_bytes()
    except OSError as e:
        raise DataError("cannot read the picture", path, e.strerror) from None
    width = round(int.from_bytes(content[16:20]) * CSS_DPI / DPI)
    return (f'<div class="wide"><img alt="{escape(match["alt"])}" width="{width}" '
            f'src="data:image/png;base64,{base64.b64encode(content).decode()}"></div>')


def inline(text: str) -> str:
    """A line's words: what is marked as HTML, the rest escaped."""
    made, end = [], 0
    for match in INLINE.finditer(text):
        made += [escape(text[end:match.start()], quote=False), marked(match)]
        end = match.end()
    return "".join(made) + escape(text[end:], quote=False)


def marked(match: re.Match[str]) -> str:
    kind = match.lastgroup
    if kind == "code":
        return f"<code>{escape(match['code'], quote=False)}</code>"
    if kind == "bold":
        return f"<strong>{inline(match['bold'])}</strong>"
    if kind == "link":
        return f'<a href="{escape(match["link"])}">{inline(match["words"])}</a>'
    return match["tag"] or escape(match["sign"], quote=False)
