"""The speed section: sentences, tables and captions as Markdown, made of measured rows and nothing else."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lineartime.benchmark.rows import STEPS, Cell, Ratio, Table, ratio, side_name, tables_of

TITLES = {"step": "A training step", "memory": "Memory of a training step", "decode": "Decoding",
          "decode-read": "Decoding after contexts that were read"}
CLOCKS = {"cpu": "processor time", "gpu": "CUDA events", "wall": "time on the clock"}
Row = dict[str, Any]
RIVALS_OF = {"flash-quad": ("transformer++", "transformer++/unfused")}
"""Besides FLASH against everything: what else of ours is compared, and with whom."""


def speed_section(cells: Sequence[Cell], n_old: int = 0, *, shown: Sequence[str] = (),
                  pictures: Callable[[Table], Sequence[str]] = lambda table: ()) -> str:
    """What the rows say: the losses of all, then the tables. shown: names of tables or benchmarks to show, by default
    every one. pictures: the paths of a table's pictures."""
    tables = tables_of(cells)
    parts = [losses(tables)]
    tables = [table for table in tables if table.among(shown)]
    for table in tables:
        if table.benchmark not in TITLES:
            continue
        parts.append(f"### {title(table)}")
        parts += [f"![{alt_text(table, path)}]({path})" for path in pictures(table)]
        if table.benchmark == "memory":
            parts.append("Peak memory, MiB:\n\n" + value_table(table, memory_text))
        parts.append(ratio_table(table))
        if table.decoding:
            parts.append(folded("Milliseconds per token, and of the slowest", value_table(table, time_text)))
        else:
            parts.append(folded("Tokens per second", value_table(table, tokens_text)))
        if table.benchmark != "memory" and any(cell.peak_mib for cell in table.cells):
            parts.append(folded("Peak memory, MiB", value_table(table, memory_text)))
        if any(cell.row.get("mfu") for cell in table.cells):
            heading = ("Share of the peak rate that the model's FLOPs take; causal squares are counted whole, and "
                       "fused attention skips half of them")
            parts.append(folded(heading, value_table(table, mfu_text)))
        if any(cell.row.get("state_bytes") for cell in table.cells):
            parts.append(folded("Decoding state, MiB", value_table(table, state_text)))
        parts.append(caption(table))
    others = [table for table in tables if table.benchmark not in TITLES]
    if others:
        parts.append("### Parts alone")
    for table in others:
        parts += [part_table(table), caption(table)]
    if n_old:
        parts.append(f"Left out: {n_old} rows of an older form, which say neither their run nor their quartiles.")
    return "\n\n".join(part for part in parts if part) + "\n"


def title(table: Table) -> str:
    """"A training step of 8,192 tokens, 1.8 M parameters, on a processor (small)"."""
    n_tokens = span_of(f"{n:,}" for n in sorted({cell.n_tokens for cell in table.cells}))
    words = TITLES[table.benchmark]
    if table.benchmark in STEPS:
        words += f" of {n_tokens} tokens"
    elif n_tokens != "1":
        words += f" {n_tokens} rows at once"
    words += f", {parameters(table.n_parameters)} parameters, "
    words += "on a processor" if table.on_cpu else f"on one {table.hardware}"
    return words + (f" ({table.name})" if table.name else "")


def alt_text(table: Table, path: str) -> str:
    what = "Peak memory" if "memory" in path else "Time per token"
    return f"{what} against context. {title(table)}"


def losses(tables: Sequence[Table]) -> str:
    """Where FLASH loses, in words; where it does not, how near it comes to that."""
    lines, ratios = [], []
    for table in tables:
        if table.benchmark not in TITLES:
            continue
        found = []
        for ours, rival in opponents(table):
            slow, eager, heavy, compared = losses_to(table, ours, rival)
            ratios += [(value, f"{side_name(rival)}, {where}") for value, where in compared if ours == "flash"]
            said = [f"it is slower {joined(slow)}"] if slow else []
            said += [f"with both eager it is slower {'also ' if slow else ''}{joined(eager)}"] if eager else []
            said += [f"it takes more memory {joined(heavy)}"] if heavy else []
            if said:
                found.append(f"  - {side_name(ours)} against {side_name(rival)}: {'; '.join(said)}.")
        if found:
            lines += [f"- {title(table)}:", *found]
    if lines:
        how = ("The number is FLASH's speed in times the other's, or its memory in times the other's; each side at its "
               "fastest unless it says otherwise. \"?\" marks what lies within the quartiles' reach of even.")
        return "**Where it loses, first.** " + how + "\n\n" + "\n".join(lines)
    if not ratios:
        return "No two models were measured side by side yet."
    value, where = min(ratios)
    return ("**Where it loses, first.** Nowhere in these rows: its speed is at least "
            f"{number(value)} times the other's ({where}).")


def losses_to(table: Table, ours: str, rival: str,
              ) -> tuple[list[str], list[str], list[str], list[tuple[float, str]]]:
    """Where `ours` is slower, slower with both eager though not at its fastest, and larger; and every ratio of
    fastest to fastest with where it is."""
    slow: list[str] = []
    eager: list[str] = []
    heavy: list[str] = []
    compared = []
    for dtype in pair_dtypes(table):
        by_kind: dict[str, list[str]] = {"slow": [], "eager": [], "heavy": []}
        for context in table.contexts:
            pair = table.pair(ours, rival, context, dtype)
            if pair is None or (both := ratio(pair[1], pair[0])) is None:
                continue
            at = tokens(context)
            compared.append((both.value, f"{dtype + ' ' if dtype else ''}at {at}"))
            same = table.pair(ours, rival, context, dtype, "eager")
            plain = ratio(same[1], same[0]) if same else None
            if both.value < 1:
                by_kind["slow"].append(f"{at} ({doubtful(both)})")
            elif plain and plain.value < 1:
                by_kind["eager"].append(f"{at} ({doubtful(plain)})")
            mine, theirs = pair[0].peak_mib, pair[1].peak_mib
            if mine and theirs and mine > theirs:
                by_kind["heavy"].append(f"{at} ({number(mine / theirs)})")
        for kind, texts in (("slow", slow), ("eager", eager), ("heavy", heavy)):
            if by_kind[kind]:
                texts.append(f"{'in ' + dtype + ' ' if dtype else ''}at {listed(by_kind[kind])}")
    return slow, eager, heavy, compared


def opponents(table: Table) -> list[tuple[str, str]]:
    """FLASH with everybody, then what else is ours with its rivals."""
    pairs = [("flash", side) for side in table.sides if side != "flash" and "flash" in table.sides]
    return pairs + [(ours, side) for ours, rivals in RIVALS_OF.items() for side in rivals
                    if ours in table.sides and side in table.sides]


def pair_dtypes(table: Table) -> list[str | None]:
    """In which types two sides meet: in each type for steps, each in its fastest for decoding."""
    return [None] if table.decoding else list(table.dtypes)


def ratio_table(table: Table) -> str:
    """FLASH's speed over each rival, by context: each side's fastest, then both eager. A star marks where FLASH had a
    variant that the other had not."""
    lines = []
    unmatched: list[str] = []
    for ours, rival in opponents(table):
        if ours != "flash":
            continue
        shown = []
        for how, variant in (("fastest of each", None), ("both eager", "eager")):
            for dtype in (table.dtypes if variant else pair_dtypes(table)):
                pairs = [table.pair(ours, rival, context, dtype, variant) for context in table.contexts]
                if any(pairs) and pairs not in shown:
                    shown.append(pairs)
                    ahead = [table.unmatched(*pair) if pair and not variant else [] for pair in pairs]
                    unmatched += [each for alone in ahead for each in alone]
                    lines.append([side_name(rival), dtype or "fastest of each", how,
                                  *(ratio_text(pair) + "\\*" * bool(alone)
                                    for pair, alone in zip(pairs, ahead, strict=True))])
    if not lines:
        return ""
    head = ["FLASH's speed over", "type", "how", *map(tokens, table.contexts)]
    note = ""
    if unmatched:
        note = f"\n\n\\* FLASH was measured {listed(list(dict.fromkeys(unmatched)))} too, the other was not."
    return markdown(head, without_repeats(lines)) + note


def ratio_text(pair: tuple[Cell, Cell] | None) -> str:
    if pair is None:
        return "-"
    both = ratio(pair[1], pair[0])
    if both is None:
        return " and ".join(who for who, cell in zip(("FLASH", "other"), pair, strict=True) if not cell.ms) + " failed"
    value = f"**{number(both.value)}**" if both.value < 1 else number(both.value)
    return f"{value} ({number(both.low)}-{number(both.high)})"


def value_table(table: Table, text: Callable[[Cell], str]) -> str:
    """One number of each cell, a line for each model, variant and type, a column for each context."""
    lines = []
    for side in table.sides:
        kinds = dict.fromkeys((cell.variant, cell.dtype) for cell in table.cells if cell.side == side)
        for variant, dtype in kinds:
            found = [table.newest(side=side, variant=variant, dtype=dtype, context=context)
                     for context in table.contexts]
            lines.append([side_name(side), variant, dtype,
                          *("-" if cell is None else "failed" if cell.failed else text(cell) for cell in found)])
    return markdown(["model", "variant", "type", *map(tokens, table.contexts)], without_repeats(lines))


def tokens_text(cell: Cell) -> str:
    return f"{cell.tokens_per_s:,.0f}"


def time_text(cell: Cell) -> str:
    slowest = cell.row.get("slowest_token_ms")
    return (number(cell.ms.median) if cell.ms else "") + (f" / {number(slowest['max'])}" if slowest else "")


def memory_text(cell: Cell) -> str:
    return "-" if cell.peak_mib is None else f"{cell.peak_mib:,.0f}"


def mfu_text(cell: Cell) -> str:
    return f"{cell.row['mfu']:.0%}" if cell.row.get("mfu") else "-"


def state_text(cell: Cell) -> str:
    return f"{cell.row['state_bytes'] / 2**20:,.1f}" if cell.row.get("state_bytes") else "-"


def part_table(table: Table) -> str:
    """What is neither a step nor decoding: a line for each implementation, its time over the first's of its run."""
    lines = []
    newest = {(cell.side, cell.dtype, cell.context, cell.n_tokens, cell.variant): cell for cell in table.cells}
    for cell in newest.values():
        first = next(other for other in table.cells if (other.run, other.side, other.dtype, other.context)
                     == (cell.run, cell.side, cell.dtype, cell.context))
        both = ratio(cell, first)
        ms = "failed" if cell.ms is None else f"{number(cell.ms.median)} ({number(cell.ms.q1)}-{number(cell.ms.q3)})"
        above, many = cell.row.get("above_import_mib"), cell.row.get("many_tokens") or {}
        lines.append([cell.side.replace("_", " "), cell.variant, cell.dtype, f"{cell.n_tokens:,}",
                      f"{cell.context:,}", ms, number(both.value) if both and cell is not first else "-",
                      "-" if above is None else f"{above:,.1f}",
                      f"{many['counted_mib']:,.0f} at {many['tokens']:,}" if many.get("counted_mib") else "-"])
    return markdown(["what", "by", "type", "tokens", "in rows of", "ms, forward and backward", "time over the first's",
                     "MiB above its inputs", "MiB counted"], without_repeats(lines))


def caption(table: Table) -> str:
    """Where the numbers come from: machine, clock, repeats, commit, versions, commands; and what failed."""
    rows = [cell.row for cell in table.cells]
    first = rows[0]
    words = [machine_text(first)]
    words.append(joined(unique(CLOCKS[row["clock"]] for row in rows if "clock" in row)))
    words.append(joined(table.dtypes))
    if "filled" in [row.get("context") for row in rows]:
        words.append("states of random numbers that were never tokens")
    counts = sorted({cell.ms.n for cell in table.cells if cell.ms})
    warm = sorted({row.get("warm_up", 0) for row in rows})
    if counts:
        words.append(f"medians of {span_of(map(str, counts))}, after {span_of(map(str, warm))} to warm up")
    words += provenance_words(rows)
    for name in sorted({name for row in rows for name in row.get("settings") or {}}):
        chosen = unique(str((row.get("settings") or {}).get(name, "not set")) for row in rows)
        words.append(f"{name.replace('_', ' ')}: {joined(chosen)}")
    overhead = [row["peak_mib"] - row["above_import_mib"] for row in rows
                if row.get("peak_mib") and row.get("above_import_mib") is not None]
    if overhead and table.benchmark in STEPS:
        words.append(f"memory is the process's own, {statistics.median(overhead):,.0f} MiB of it the imported program")
    commands = unique(re.sub(r" --json [^ ]+", "", row["command"]) for row in rows)
    made_by = ", ".join(f"`{command}`" for command in commands[:3])
    more = f" and {len(commands) - 3} more like them, which the rows have" if len(commands) > 3 else ""
    text = f"<sub>{'; '.join(word for word in words if word)}. Made by {made_by}{more}.</sub>"
    failed = unique(f"{cell.text}, at {tokens(cell.context)}: {cell.failed}" for cell in table.cells
                    if cell.failed and table.newest(side=cell.side, variant=cell.variant, dtype=cell.dtype,
                                                    context=cell.context) is cell)
    return text + (f"\n\nFailed: {'; '.join(failed)}." if failed else "")


def machine_text(row: Row) -> str:
    """What a row was measured on."""
    if row["device"] == "cpu":
        threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
        return f"{threads} of {row['cpu']}, {row['cores']} cores, {row['memory_gib']:.0f} GiB"
    return f"one {row['gpu']}, beside {row['cpu']}"


def provenance_words(rows: Sequence[Row]) -> list[str]:
    """How busy the machine was, and which commit and torch made the rows."""
    loads = [row["load_average"] for row in rows]
    return [f"load {span_of([f'{min(loads):.1f}', f'{max(loads):.1f}'])}",
            "commit " + joined(unique(short(row["commit"]) for row in rows)),
            "torch " + joined(unique(row["torch"] for row in rows))]


def short(commit: str | None) -> str:
    """Enough of a commit to find it; what was changed beside it stays said."""
    if commit is None:
        return "unknown"
    name, plus, changes = commit.partition("+")
    return name[:10] + plus + changes


def parameters(n: int) -> str:
    """"1.8 M"; a small number in full."""
    if n < 1e5:
        return f"{n:,}"
    return f"{n / 1e6:.1f} M" if n < 1e7 else f"{n / 1e6:.0f} M"


def tokens(n: int) -> str:
    """512, 2K, 128K."""
    return f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}"


def number(x: float, figures: int = 3) -> str:
    """Three figures or so, never an exponent."""
    return f"{x:.{max(0, figures - 1 - max(0, math.floor(math.log10(abs(x)))))}f}" if x else "0"


def doubtful(both: Ratio) -> str:
    """A ratio, with "?" where quartile against quartile comes out the other way."""
    return number(both.value) + ("?" if both.high >= 1 else "")


def span_of(texts: Iterable[str]) -> str:
    """`8,192`, or `8,192 to 16,384` for the first and last of several."""
    known = unique(texts)
    return known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"


def listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def joined(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def without_repeats(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Leave out a first entry that is the one above it."""
    return [["" if i and lines[i - 1][0] == line[0] else line[0], *line[1:]] for i, line in enumerate(lines)]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], n_words: int | None = None) -> str:
    """A table; columns after the words, which are as many as is said, are right-aligned."""
    if n_words is None:
        n_words = next((i for i, name in enumerate(head) if name[:1].isdigit() or name in ("tokens", "ms")), len(head))
    rule = ["---" if i < n_words else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
