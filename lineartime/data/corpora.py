"""The paper's data sets as published: C4 (`allenai/c4`), gzipped lines of JSON with plain text;
Wiki-40B (`google/wiki40b`), parquet with structure markers; PG-19, a `.txt` per book or the parquet
of `emozilla/pg19`, with an official number of words."""

import re

MARKER = re.compile("_START_(ARTICLE|SECTION|PARAGRAPH)_")
PG19 = ((28_602, 1_973_136_207), (50, 3_007_061), (100, 6_966_499))
"""Books and words of the train, validation and test split, as published."""
PG19_TOLERANCE = 0.02


def published_words(documents: int, words: int) -> int | None:
    """The official number of words of the PG-19 split with these counts; None for any other text.
    Books are equal in number, words within 2%: copies differ in line ends and headers."""
    return next((official for books, official in PG19
                 if documents == books and abs(words - official) <= PG19_TOLERANCE * official), None)


def wiki40b_text(text: str) -> str:
    """Plain text of a Wiki-40B article, with every word and without markers.

    A marker begins a part: `_START_ARTICLE_` the title, `_START_SECTION_` a heading,
    `_START_PARAGRAPH_` paragraphs, in which `_NEWLINE_` is a line feed. Each part is stripped of
    white space; empty parts are left out. A paragraph that follows its heading begins on the next
    line; a blank line separates all other parts.

    Some languages are published as Python literals of bytes, b'\\n_START_ARTICLE_...', which are
    decoded. Raises ValueError for a text without a marker that is not blank."""
    if text.startswith(("b'", 'b"')) and text.endswith(text[1]):
        text = text[2:-1].encode("ascii").decode("unicode_escape").encode("latin-1").decode("utf-8")
    written, *marked = (each.replace("_NEWLINE_", "\n").strip() for each in MARKER.split(text))
    if not marked and text.strip():
        raise ValueError("no structure marker such as _START_ARTICLE_")
    last = ""
    for part, content in zip(marked[::2], marked[1::2], strict=True):
        if content and written:
            written += "\n" if (last, part) == ("SECTION", "PARAGRAPH") else "\n\n"
        if content:
            written, last = written + content, part
    return written
