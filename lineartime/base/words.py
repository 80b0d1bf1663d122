"""Text for people: progress, numbers as they are shown, and Markdown of text from data."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lineartime.base.errors import escaped

Progress = Callable[[str, int, int | None], None]
"""Takes a description, the amount done, and the total (None if unknown)."""


def installed_version() -> str:
    """The version of this package; "unknown" for a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # of tens of milliseconds

    with suppress(PackageNotFoundError):
        return version("lineartime")
    return "unknown"


def millions(n: float) -> str:
    """"112.1 M", or a small count in full."""
    return f"{n / 1e6:,.1f} M" if n >= 1e6 else f"{n:,.0f}"


def part_of(scores: dict[str, Any]) -> str:
    """How much a held-out score has, such as "5 of 9 tokens"; "" for all, and in older metrics."""
    return next((f"{n:,} of {scores[f'of_{what}']:,} {what}" for what in ("tokens", "questions")
                 if (n := scores.get(f"n_{what}", 0)) < scores.get(f"of_{what}", 0)), "")


def mib(n_bytes: float) -> str:
    """"1.5 MiB"."""
    return f"{n_bytes / 2**20:,.1f} MiB"


def in_markdown(text: str) -> str:
    """Text on one line of Markdown, which does not steer a terminal either."""
    shown = escaped(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`!\[\]|]", r"\\\g<0>", shown)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], n_words: int | None = None) -> str:
    """A table. Columns after the first `n_words` are right-aligned: by default from the first whose
    name begins with a digit, or is tokens or ms."""
    if n_words is None:
        n_words = next((i for i, name in enumerate(head) if name[:1].isdigit() or name in ("tokens", "ms")), len(head))
    rule = ["---" if i < n_words else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
