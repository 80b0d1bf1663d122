"""What all reports share: numbers and words of a table, and where they come from."""

import math
import re
from collections.abc import Iterable, Sequence

from benchmarks import Row
from lineartime.base.errors import escaped
from lineartime.base.words import in_markdown

MACHINES, COMMANDS = 3, 3  # most of each in the line under a table


def parameters(n: int) -> str:
    """"1.8 M"; a small number in full."""
    return f"{n:,}" if n < 1e5 else f"{n / 1e6:.1f} M" if n < 1e7 else f"{n / 1e6:.0f} M"


def tokens(n: int) -> str:
    """512, 2K, 128K."""
    return f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}"


def number(x: float, figures: int = 3) -> str:
    """Three figures or so, never an exponent."""
    return f"{x:.{max(0, figures - 1 - max(0, math.floor(math.log10(abs(x)))))}f}" if x else "0"


def listed(words: Iterable[object]) -> str:
    """Each once, in Markdown."""
    return ", ".join(unique(in_markdown(str(word)) for word in words))


def unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def machine(row: Row) -> str:
    if row["device"] == "cpu":
        threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
        return f"{threads} of {in_markdown(row['cpu'])}, {row['cores']} cores, {row['memory_gib']:.0f} GiB"
    return f"one {in_markdown(row['gpu'])}, beside {in_markdown(row['cpu'])}"


def source_line(rows: Sequence[Row]) -> str:
    """Where numbers come from: machine, commits, torch, and the commands that make such rows."""
    commands = unique(map(command_of, rows))
    on_a_line = [" ".join(escaped(command).replace("`", "").split()) for command in commands[:COMMANDS]]
    made_by = ", ".join(f"`{command}`" for command in on_a_line)
    more = f" and {len(commands) - COMMANDS} more, which the rows have" if len(commands) > COMMANDS else ""
    commits = listed(re.sub(r"^(\w{10})\w*", r"\1", row.get("commit") or "unknown") for row in rows)
    machines = "; ".join(unique(map(machine, rows))[:MACHINES])
    return f"<sub>{machines}; commit {commits}; torch {listed(row['torch'] for row in rows)}; {made_by}{more}</sub>"


def command_of(row: Row) -> str:
    """The command that makes such a row today: what measures was once a verb of `lineartime`."""
    if row["command"].endswith(".call"):  # of `run`, whose calls have a file of their own
        return f"python -m benchmarks run {row['cell'].partition('/')[0]}"
    command = re.sub(r" --json [^ ]+", "", row["command"]).replace("lineartime benchmark ", "python -m benchmarks ")
    return re.sub("benchmarks memory (.*)", r"benchmarks step \1 --tokens 1 --together", command)
