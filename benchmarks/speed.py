"""What measured rows say of speed and memory, as Markdown. A table is a data frame of measurements
in the order of time. A ratio is made of two rows of the newest run (one call) that has both."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from benchmarks import Row
from benchmarks.cells import NAMES, SUMMARY
from benchmarks.markdown import folded, listed, number, parameters, source_line, tokens, unique
from lineartime.base.files import read_json_lines
from lineartime.base.words import in_markdown, markdown

OURS = "flash"  # the side that is compared with every other
TITLES = {"step": "A training step", "forward": "Reading", "decode": "Decoding"}
"""Benchmarks of whole models, in the order that they are shown."""
KIND = ["side", "variant", "dtype"]  # columns that tell the lines of a table apart
Pictures = Callable[[pd.DataFrame], Sequence[str]]  # a table's pictures in Markdown


def side_name(side: str) -> str:
    """What a person calls a side: "Transformer++, unfused attention"."""
    model, _, attention = side.partition("/")
    words = {"": "", "unfused": ", unfused attention", "reference": " without kernels"}
    return NAMES.get(model, model) + words[attention]


def read_rows(path: Path) -> list[Row]:
    """The measurements of whole models in a file. Raises DataError."""
    rows = read_json_lines(path, lambda row: measurement(row) if row["benchmark"] in TITLES else None,
                           "a row of a measurement")
    return [row for row in rows if row is not None]


def measurement(row: Row) -> Row:
    """The columns of a table, from a row of a file: `side` is what is compared, "model",
    "model/unfused" or "model/reference"; `ms` (with quartiles) milliseconds per token by the clock
    that counts, NaN where the measurement failed; `n_tokens` the tokens of a step, or the rows that
    are decoded at once. Raises KeyError, TypeError, ValueError."""
    decoding, failed = row["benchmark"] == "decode", row.get("failed") or ""
    times = dict.fromkeys(("median", "q1", "q3"), math.nan) if failed else row[f"{row['clock']}_ms"]
    n_tokens = row["tokens_per_step"] if row.get("unit") == "step" else 1
    if not failed and not 0 < times["q1"] <= times["median"] <= times["q3"]:
        raise ValueError("its quartiles are not times")
    return {
        "benchmark": row["benchmark"], "rows": row.get("batch_size") if decoding else 0,
        "name": (row.get("cell") or "").partition("/")[0], "run": row["run"],
        "side": row["model"] + (f"/{row['attention']}" if row.get("attention") in ("unfused", "reference") else ""),
        "variant": row.get("variant") or "eager", "dtype": row["dtype"], "context": row["context_tokens"],
        "device": row["device"], "hardware": row["cpu"] if row["device"] == "cpu" else row["gpu"],
        "threads": row["threads"], "n_parameters": row["n_parameters"],
        "n_tokens": row.get("tokens_per_step") or row.get("batch_size") or 1, "time": row["time"],
        "ms": times["median"] / n_tokens, "q1": times["q1"] / n_tokens, "q3": times["q3"] / n_tokens,
        # Older rows of decoding had all models in one process.
        "peak_mib": math.nan if failed or decoding else row.get("peak_mib", math.nan), "failed": failed, "row": row}


def tables_of(rows: Sequence[Row]) -> list[pd.DataFrame]:
    """A table for each benchmark, name, machine, number of threads and size of FLASH."""
    cells = pd.DataFrame(list(rows)).sort_values("time", kind="stable", ignore_index=True)
    ours_first = cells.sort_values("side", key=lambda side: side != OURS, kind="stable")
    cells["size"] = cells.run.map(ours_first.drop_duplicates("run").set_index("run").n_parameters)
    of_table = ["benchmark", "name", "hardware", "threads", "size", "rows"]
    tables = (table for _, table in cells.groupby(of_table, sort=False))
    return sorted(tables, key=lambda table: (
        [*TITLES].index(table.benchmark.iat[0]), table.device.iat[0] == "cpu", size_of(table), table.name.iat[0],
        -table.n_tokens.max()))


def size_of(table: pd.DataFrame) -> int:
    """The number of parameters of FLASH, else of the first model."""
    return int(table["size"].iat[0])


def contexts_of(table: pd.DataFrame) -> list[int]:
    return sorted(table.context.unique().tolist())


def dtypes_of(table: pd.DataFrame) -> list[str]:
    """float32 first."""
    return sorted(table.dtype.unique(), key=lambda dtype: (dtype != "float32", dtype))


def newest(table: pd.DataFrame) -> pd.DataFrame:
    """The last measured row of each side, variant, type and context, in the order of their first
    measurements, then by context; one that failed only where none went well."""
    table = table.assign(well=table.ms.notna(), n_side=table.groupby("side", sort=False).ngroup(),
                         n_kind=table.groupby(KIND, sort=False).ngroup())
    last = table.sort_values("well", kind="stable").drop_duplicates([*KIND, "context"], keep="last")
    return last.sort_values(["n_side", "n_kind", "context"])


def compare(table: pd.DataFrame, rival: str, *, by_type: bool, variant: str | None = None) -> pd.DataFrame:
    """FLASH and another side at each context (by_type: and in each type), in the newest run that
    has both: each in its fastest variant, or in the one that is given; without by_type, each in its
    fastest type. A side that failed in every variant is there without times.

    Columns of the rival end in "_rival". `value` is the rival's median time over ours; `low` and
    `high` are a quartile of the rival over our opposite quartile; `unmatched` the variants that
    only ours was measured in, where none is given."""
    keys = ["context", "dtype"] if by_type else ["context"]
    table = table.assign(at=table.index, n_run=table.groupby("run", sort=False).ngroup())
    shown = table if variant is None else table[table.variant == variant]
    fastest, fastest_rival = (shown[shown.side == side].sort_values("ms", kind="stable").drop_duplicates(
        ["n_run", *keys]) for side in (OURS, rival))
    # Rows of one run stand beside each other; of several runs the newest stays.
    both = fastest.merge(fastest_rival, on=["n_run", *keys], suffixes=("", "_rival"))
    both = both.sort_values("n_run").drop_duplicates(keys, keep="last").sort_values("context")
    # What FLASH was measured in and the other was not makes a ratio unfair: it is marked.
    variants = table.groupby(["side", "n_run", "context"]).variant.unique()
    both["unmatched"] = [[each for each in variants[OURS, *at] if variant is None and each not in variants[rival, *at]]
                         for at in zip(both.n_run, both.context, strict=True)]
    return both.assign(value=both.ms_rival / both.ms, low=both.q1_rival / both.q3, high=both.q3_rival / both.q1)


def speed_section(tables: Sequence[pd.DataFrame], pictures: Pictures) -> str:
    parts: list[str] = []
    for table in tables:
        parts += [f"### {in_markdown(title(table))}", *pictures(table), ratio_table(table), *value_tables(table),
                  *sources(table)]
    return "\n\n".join(part for part in parts if part) + "\n"


def sources(table: pd.DataFrame) -> list[str]:
    """Where a table's numbers come from, and what failed and never went well."""
    last = newest(table).sort_index()
    failed = unique(f"{side_name(row.side)}, {row.variant}, {row.dtype}, at {tokens(row.context)}: {row.failed}"
                    for row in last[last.failed != ""].itertuples())
    return [source_line(table.row.tolist()), f"Failed: {'; '.join(map(in_markdown, failed))}." if failed else ""]


def speed_summary(tables: Sequence[pd.DataFrame], names: Sequence[str], pictures: Pictures) -> str:
    """A picture and a few lines without quartiles: FLASH's speed over others in training steps,
    from the tables that have one of the names, alone or with a hyphen behind it, on a device like
    the one with most contexts; the picture is of its machine."""
    steps = [table for table in tables if table.benchmark.iat[0] == "step" and table.side.nunique() > 1
             and any(f"{table.name.iat[0]}-".startswith(f"{name}-") for name in names)]
    if not steps:
        return "No training steps of two models were measured side by side yet.\n"
    widest, same = max(steps, key=lambda table: table.context.nunique()), ["device", "threads", "size"]
    cells = pd.concat([table for table in steps if (table[same].iloc[0] == widest[same].iloc[0]).all()],
                      ignore_index=True)
    drawn = cells[cells.hardware == widest.hardware.iat[0]].assign(name="")
    lines = [([side_name(rival), dtype], compare(cells[cells.dtype == dtype], rival, by_type=False).to_dict(
        "records")) for rival, types in SUMMARY.items() for dtype in types]
    how = f"{in_markdown(title(drawn))}. Bold: FLASH is slower. The full tables have quartiles."
    table = ratio_lines(["type"], contexts_of(cells), [line for line in lines if line[1]], spread=False)
    return "\n\n".join([*pictures(drawn), how, table]) + "\n"


def title(table: pd.DataFrame) -> str:
    """"A training step of 8,192 tokens, 1.8 M parameters, on a processor (small)"."""
    first = table.iloc[0]
    n_tokens = " to ".join(unique(f"{n:,}" for n in (table.n_tokens.min(), table.n_tokens.max())))
    words = TITLES[first["benchmark"]]
    if first["benchmark"] in ("step", "forward"):
        words += f" of {n_tokens} tokens"
    elif n_tokens != "1":
        words += f" {n_tokens} rows at once"
    words += f", {parameters(size_of(table))} parameters, "
    words += "on a processor" if first["device"] == "cpu" else f"on one {first['hardware']}"
    return words + (f" ({first['name']})" if first["name"] else "")


def ratio_table(table: pd.DataFrame) -> str:
    """FLASH's speed over each rival, by context: each side's fastest, then both eager. Steps are
    compared in each type, decoding in each side's fastest; but with a rival that has a type that
    FLASH has not, in each type, and in that one with FLASH's fastest."""
    lines, ours = [], set(table.dtype[table.side == OURS])
    for rival in table.side.unique() if ours else ():
        shown: list[list[tuple[int, int]]] = []
        for how, variant, by_type in (("fastest of each", None, table.benchmark.iat[0] in ("step", "forward")),
                                      ("both eager", "eager", True)):
            by_type = by_type or not ours.issuperset(table.dtype[table.side == rival])
            both = compare(table, rival, by_type=by_type, variant=variant)
            for dtype in dtypes_of(table) if by_type else [None]:
                pairs = (both if dtype is None else both[both.dtype == dtype]).to_dict("records")
                if dtype is not None and dtype not in ours:
                    alone = table[(table.side == OURS) | (table.dtype == dtype)]
                    pairs = compare(alone, rival, by_type=False, variant=variant).to_dict("records")
                ids = [(pair["at"], pair["at_rival"]) for pair in pairs]
                if rival != OURS and pairs and ids not in shown:
                    shown.append(ids)
                    said = how if dtype is None or dtype in ours else "FLASH in its fastest type"
                    lines.append(([side_name(rival), dtype or "fastest of each", said], pairs))
    return ratio_lines(["type", "how"], contexts_of(table), lines) if lines else ""


def ratio_lines(words: Sequence[str], contexts: Sequence[int], lines: Sequence[tuple[list[str], list[Row]]], *,
                spread: bool = True) -> str:
    """A table of lines, each with its words and rows of `compare`, and a note on variants."""
    texts = [(first, {pair["context"]: ratio_text(pair, spread) for pair in pairs}) for first, pairs in lines]
    unmatched = unique(each for _, pairs in lines for pair in pairs for each in pair["unmatched"])
    note = f"\n\n\\* FLASH was measured {listed(unmatched)} too, the other was not." if unmatched else ""
    return by_context(["FLASH's speed over", *words], contexts, texts) + note


def ratio_text(pair: Row, spread: bool) -> str:
    """A ratio, perhaps its quartiles; below 1 in bold. A star marks a variant of FLASH alone."""
    star = "\\*" * bool(pair["unmatched"])
    if math.isnan(pair["value"]):
        return " and ".join(who for who, ms in (("FLASH", pair["ms"]), ("other", pair["ms_rival"]))
                            if math.isnan(ms)) + " failed" + star
    value = f"**{number(pair['value'])}**" if pair["value"] < 1 else number(pair["value"])
    return value + f" ({number(pair['low'])}-{number(pair['high'])})" * spread + star


def by_context(words: Sequence[str], contexts: Sequence[int],
               lines: Iterable[tuple[Sequence[str], Mapping[int, str]]]) -> str:
    """A table of lines, each with its words and its texts by context."""
    made = [[*map(in_markdown, first), *(texts.get(context, "-") for context in contexts)] for first, texts in lines]
    repeats = [i > 0 and made[i - 1][0] == line[0] for i, line in enumerate(made)]
    return markdown([*words, *map(tokens, contexts)], [["" if repeats[i] else line[0], *line[1:]]
                                                       for i, line in enumerate(made)])


def value_tables(table: pd.DataFrame) -> list[str]:
    """Folded: of steps tokens per second and memory, of decoding times and size of the state."""
    if table.benchmark.iat[0] in ("step", "forward"):
        shown: dict[str, Callable[[Row], str]] = {"Tokens per second": lambda row: f"{1e3 / row['ms']:,.0f}"}
        if table.peak_mib.notna().any():
            shown["Peak memory, MiB"] = lambda row: "-" if math.isnan(row["peak_mib"]) else f"{row['peak_mib']:,.0f}"
    else:
        shown = {"Milliseconds per token, and of the slowest":
                 lambda row: f"{number(row['ms'])} / {number(row['row']['slowest_token_ms']['max'])}",
                 "Decoding state, MiB": lambda row: f"{row['row']['state_bytes'] / 2**20:,.1f}"}
    made = []
    for heading, text in shown.items():
        lines: dict[tuple[str, ...], dict[int, str]] = {}
        for row in newest(table).to_dict("records"):
            texts = lines.setdefault((side_name(row["side"]), row["variant"], row["dtype"]), {})
            texts[row["context"]] = "failed" if row["failed"] else text(row)
        made.append(folded(heading, by_context(["model", "variant", "type"], contexts_of(table), [*lines.items()])))
    return made
