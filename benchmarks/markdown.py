"""Measured rows as Markdown: tables, pictures and captions, made of the rows and nothing else."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks import Row
from benchmarks.speed_rows import KIND, OURS, TITLES, compare, contexts_of, dtypes_of, newest, side_name, size_of
from lineartime.markdown import code_span, in_markdown, markdown
from lineartime.release.provenance import machine

if TYPE_CHECKING:
    from pandas import DataFrame

CLOCKS = {"cpu": "processor time", "gpu": "CUDA events", "wall": "time on the clock"}
SPEED, TIMES, MEMORY, STATE = ("Tokens per second", "Milliseconds per token, and of the slowest", "Peak memory, MiB",
                               "Decoding state, MiB")
VALUES: dict[str, Callable[[Row], str]] = {
    SPEED: lambda row: f"{1e3 / row['ms']:,.0f}",
    TIMES: lambda row: f"{number(row['ms'])} / {number(row['row']['slowest_token_ms']['max'])}",
    MEMORY: lambda row: "-" if math.isnan(row["peak_mib"]) else f"{row['peak_mib']:,.0f}",
    STATE: lambda row: f"{row['row']['state_bytes'] / 2**20:,.1f}"}
"""What can be shown of every row of a table: the text of a number by its heading."""

SUMMARY = (("transformer++", "bfloat16"), ("transformer++", "float32"), ("transformer++/unfused", "bfloat16"),
           ("flash-pytorch", "bfloat16"))
"""The lines of the short table: with whom FLASH is compared, in which type. FLASH loses most to Transformer++ in
float32."""

Pictures = Callable[["DataFrame"], Sequence[str]]
"""The paths of a table's pictures."""


def speed_section(tables: "Sequence[DataFrame]", *, shown: Sequence[str] = (),
                  pictures: Pictures = lambda table: ()) -> str:
    """The tables of `tables_of`; with names in `shown`, a summary of those that have them."""
    if shown:
        return speed_summary(tables, shown, pictures)
    others = [table for table in tables if table.benchmark.iat[0] not in TITLES]
    parts = [part for table in tables if table.benchmark.iat[0] in TITLES
             for part in table_parts(table, pictures(table))]
    parts += ["### Parts alone"] * bool(others) + [
        part for table in others for part in (part_table(table), caption(table))]
    return "\n\n".join(part for part in parts if part) + "\n"


def table_parts(table: "DataFrame", pictures: Sequence[str]) -> list[str]:
    """A title, pictures, ratios, and folded what they are made of."""
    benchmark = table.benchmark.iat[0]
    parts = [f"### {in_markdown(title(table))}", *links(table, pictures)]
    shown = [SPEED] if benchmark == "step" else [TIMES, STATE]
    shown += [MEMORY] * bool(benchmark == "step" and table.peak_mib.notna().any())
    return [*parts, ratio_table(table), *(folded(what, value_table(table, what)) for what in shown), caption(table)]


def speed_summary(tables: "Sequence[DataFrame]", names: Sequence[str], pictures: Pictures) -> str:
    """A picture and a table of a few lines: FLASH's speed over others in training steps, from the tables that have one
    of the names, alone or with a hyphen behind it, on the machine of the one with most contexts."""
    import pandas

    chosen = [table for table in tables if table.benchmark.iat[0] == "step" and table.side.nunique() > 1
              and any(f"{table.name.iat[0]}-".startswith(f"{name}-") for name in names)]
    if not chosen:
        return "No training steps of two models were measured side by side yet.\n"
    widest, same = max(chosen, key=lambda table: table.context.nunique()), ["hardware", "threads", "size"]
    chosen = [table for table in chosen if (table[same].iloc[0] == widest[same].iloc[0]).all()]
    cells = pandas.concat(chosen, ignore_index=True)
    lines = [([side_name(rival), dtype], compare(cells[cells.dtype == dtype], OURS, rival, by_type=False).to_dict(
        "records")) for rival, dtype in SUMMARY]
    how = f"{in_markdown(title(widest.assign(name='')))}, each model in its fastest variant. Bold: FLASH is slower."
    parts = [*links(widest, pictures(widest)[:1]), how,
             ratio_lines(["type"], contexts_of(cells), [line for line in lines if line[1]]), caption(cells)]
    return "\n\n".join(parts) + "\n"


def title(table: "DataFrame") -> str:
    """"A training step of 8,192 tokens, 1.8 M parameters, on a processor (small)"."""
    first, n_tokens = table.iloc[0], span_of(f"{n:,}" for n in sorted(table.n_tokens.unique()))
    words = TITLES[first["benchmark"]]
    if first["benchmark"] == "step":
        words += f" of {n_tokens} tokens"
    elif n_tokens != "1":
        words += f" {n_tokens} rows at once"
    words += f", {parameters(size_of(table))} parameters, "
    words += "on a processor" if first["device"] == "cpu" else f"on one {first['hardware']}"
    return words + (f" ({first['name']})" if first["name"] else "")


def links(table: "DataFrame", paths: Sequence[str]) -> list[str]:
    """Pictures, and in words what they show."""
    words = in_markdown(title(table))
    return [f"![{'Peak memory' if 'memory' in path else 'Time per token'} against context. {words}]({path})"
            for path in paths]


def ratio_table(table: "DataFrame") -> str:
    """FLASH's speed over each rival, by context: each side's fastest, then both eager; below 1 in bold. Steps are
    compared in each type, decoding in each side's fastest. A star marks where FLASH had a variant that the other had
    not."""
    lines = []
    for rival in table.side.unique() if OURS in set(table.side) else ():
        shown: list[list[tuple[int, int]]] = []
        for how, variant, by_type in (("fastest of each", None, table.benchmark.iat[0] == "step"),
                                      ("both eager", "eager", True)):
            both = compare(table, OURS, rival, by_type=by_type, variant=variant)
            for dtype in dtypes_of(table) if by_type else [None]:
                pairs = (both if dtype is None else both[both.dtype == dtype]).to_dict("records")
                ids = [(pair["at"], pair["at_rival"]) for pair in pairs]
                if rival != OURS and pairs and ids not in shown:
                    shown.append(ids)
                    lines.append(([side_name(rival), dtype or "fastest of each", how], pairs))
    return ratio_lines(["type", "how"], contexts_of(table), lines) if lines else ""


def ratio_lines(words: Sequence[str], contexts: Sequence[int], lines: Sequence[tuple[list[str], list[Row]]]) -> str:
    """Ratios as a table, with a note of the variants that only FLASH was measured in: of each line its words, and rows
    of `compare`."""
    texts = [(first, {pair["context"]: ratio_text(pair) for pair in pairs}) for first, pairs in lines]
    unmatched = unique(each for _, pairs in lines for pair in pairs for each in pair["unmatched"])
    note = f"\n\n\\* FLASH was measured {listed(unmatched)} too, the other was not." if unmatched else ""
    return by_context(["FLASH's speed over", *words], contexts, texts) + note


def by_context(words: Sequence[str], contexts: Sequence[int],
               lines: Iterable[tuple[Sequence[str], Mapping[int, str]]]) -> str:
    """A table with a column for each context: of each line its words, and what is known by context."""
    return markdown([*words, *map(tokens, contexts)], without_repeats(
        [[*map(in_markdown, first), *(texts.get(context, "-") for context in contexts)] for first, texts in lines]))


def ratio_text(pair: Row) -> str:
    """A ratio and its quartiles; below 1 in bold. A star marks a variant that only FLASH was measured in."""
    star = "\\*" * bool(pair["unmatched"])
    if math.isnan(pair["value"]):
        return " and ".join(who for who, ms in (("FLASH", pair["ms"]), ("other", pair["ms_rival"]))
                            if math.isnan(ms)) + " failed" + star
    value = f"**{number(pair['value'])}**" if pair["value"] < 1 else number(pair["value"])
    return f"{value} ({number(pair['low'])}-{number(pair['high'])}){star}"


def value_table(table: "DataFrame", what: str) -> str:
    """One of `VALUES` by context, a line for each model, variant and type."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in newest(table).to_dict("records"):
        texts = lines.setdefault((side_name(row["side"]), row["variant"], row["dtype"]), {})
        texts[row["context"]] = "failed" if row["failed"] else VALUES[what](row)
    return by_context(["model", "variant", "type"], contexts_of(table), list(lines.items()))


def part_table(table: "DataFrame") -> str:
    """What is neither a step nor decoding: a line for each implementation, its time over the first's of its run."""
    keys, lines = ["run", "side", "dtype", "context"], []
    over = (table.ms / table.groupby(keys).ms.transform(lambda ms: ms.iat[0])).where(table.duplicated(keys))
    shown = table.assign(over=over).drop_duplicates([*KIND, "context", "n_tokens"], keep="last")
    for row in shown.to_dict("records"):
        above, many = row["row"].get("above_import_mib"), row["row"].get("many_tokens") or {}
        names = row["side"].replace("_", " "), row["variant"], row["dtype"]
        lines.append([*map(in_markdown, names), f"{row['n_tokens']:,}",
                      f"{row['context']:,}",
                      "failed" if row["failed"] else f"{number(row['ms'])} ({number(row['q1'])}-{number(row['q3'])})",
                      "-" if math.isnan(row["over"]) else number(row["over"]),
                      "-" if above is None else f"{above:,.1f}",
                      f"{many['counted_mib']:,.0f} at {many['tokens']:,}" if many.get("counted_mib") else "-"])
    return markdown(["what", "by", "type", "tokens", "in rows of", "ms, forward and backward", "time over the first's",
                     "MiB above its inputs", "MiB counted"], without_repeats(lines))


def caption(table: "DataFrame") -> str:
    """Where the numbers come from: machine, clock, repeats, commit, versions, commands; and what failed."""
    rows: list[Row] = table.row.tolist()
    words = [machine(rows[0]), listed(CLOCKS[row["clock"]] for row in rows if "clock" in row),
             listed(dtypes_of(table))]
    if "filled" in [row.get("context") for row in rows]:
        words.append("states of random numbers that were never tokens")
    counts, warm = sorted(table.n.dropna().unique()), sorted({row.get("warm_up", 0) for row in rows})
    if counts:
        words.append(f"medians of {span_of(f'{n:.0f}' for n in counts)}, after {span_of(map(str, warm))} to warm up")
    words += provenance_words(rows)
    for name in sorted({name for row in rows for name in row.get("settings") or {}}):
        chosen = listed((row.get("settings") or {}).get(name, "not set") for row in rows)
        words.append(f"{in_markdown(name.replace('_', ' '))}: {chosen}")
    overhead = [row["peak_mib"] - row["above_import_mib"] for row in rows
                if row.get("peak_mib") and row.get("above_import_mib") is not None]
    if overhead and table.benchmark.iat[0] == "step":
        words.append(f"memory is the process's own, {statistics.median(overhead):,.0f} MiB of it the imported program")
    commands = unique(re.sub(r" --json [^ ]+", "", command_of(row)) for row in rows)
    made_by = ", ".join(map(code_span, commands[:3]))
    more = f" and {len(commands) - 3} more like them, which the rows have" if len(commands) > 3 else ""
    text = f"<sub>{'; '.join(word for word in words if word)}. Made by {made_by}{more}.</sub>"
    last = newest(table).sort_index()
    failed = unique(f"{side_name(row.side)}, {row.variant}, {row.dtype}, at {tokens(row.context)}: {row.failed}"
                    for row in last[last.failed != ""].itertuples())
    return text + (f"\n\nFailed: {'; '.join(map(in_markdown, failed))}." if failed else "")


def command_of(row: Row) -> str:
    """The command that makes such a row today: the verbs that measure were once verbs of `lineartime`."""
    verb = r"(-m )?\blineartime (benchmark |(?=recall |reproduce ))"
    return re.sub(verb, lambda found: f"{found[1] or 'python -m '}benchmarks ", row["command"])


def provenance_words(rows: Sequence[Row]) -> list[str]:
    """How busy the machine was, and which commit and torch made the rows."""
    loads = [row["load_average"] for row in rows]
    commits = listed(re.sub(r"^(\w{10})\w*", r"\1", row.get("commit") or "unknown") for row in rows)
    return [f"load {span_of([f'{min(loads):.1f}', f'{max(loads):.1f}'])}", f"commit {commits}",
            "torch " + listed(row["torch"] for row in rows)]


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


def span_of(texts: Iterable[str]) -> str:
    """`8,192`, or `8,192 to 16,384` for the first and last of several."""
    known = unique(texts)
    return known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"


def listed(words: Iterable[object]) -> str:
    """Each once, in Markdown."""
    return ", ".join(unique(in_markdown(str(word)) for word in words))


def unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def without_repeats(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Leave out a first entry that is the one above it."""
    return [["" if i and lines[i - 1][0] == line[0] else line[0], *line[1:]] for i, line in enumerate(lines)]


def folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"
