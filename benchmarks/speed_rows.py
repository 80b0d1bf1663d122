"""Measured rows as data frames: what may stand in one table, and what may be divided by what.

A table is a data frame with a row for each measurement, in the order of time. A ratio is made of two rows of one run
(one call of `python -m benchmarks`), which measured them in turn. The newest run that has both counts.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import Row
from lineartime.atomic_io import read_json_lines

if TYPE_CHECKING:
    from pandas import DataFrame

NAMES = {"flash": "FLASH", "flash+": "FLASH+", "flash-quad": "FLASH-Quad", "transformer": "Transformer",
         "transformer+": "Transformer+", "transformer++": "Transformer++", "mc-tfm++": "MC-TFM++",
         "combiner": "Combiner", "performer": "Performer", "performer-matmul": "Performer-Matmul",
         "flash-pytorch": "FLASH-pytorch"}
OURS = "flash"
"""The side that is compared with every other."""

TITLES = {"step": "A training step", "decode": "Decoding", "decode-read": "Decoding after contexts that were read"}
"""Benchmarks of whole models, in the order that they are shown."""

KIND = ["side", "variant", "dtype"]
"""Columns that tell the lines of a table apart."""

SAME_SIZE = 1.3
"""Runs whose models' numbers of parameters are within this factor share a table; the models of one run always do."""


def side_name(side: str) -> str:
    """What a person calls a side: "Transformer++, unfused"."""
    model, _, attention = side.partition("/")
    words = {"": "", "unfused": ", unfused attention", "reference": " without kernels"}
    return NAMES.get(model, model) + words[attention]


def read_rows(path: Path) -> list[Row]:
    """The measurements of a file of JSON lines, but for those of `benchmark read`, which no table shows.

    Raises DataError for a file that is not there or not of rows. The last line may be cut off: a benchmark may be
    writing it."""
    def parse(row: Row) -> Row | None:
        return None if row["benchmark"] == "read" else measurement(row)

    return [row for row in read_json_lines(path, parse, "a row of a measurement") if row is not None]


def require_types(row: Row, types: Mapping[type, str]) -> None:
    """Raise KeyError for a field that is missing, TypeError for one of another type; numbers are finite.

    types: names of fields; a dot leads into a field, and one with "?" may be missing or null."""
    for wanted, name in ((wanted, name) for wanted, names in types.items() for name in names.split()):
        value: Any = row
        for key in name.rstrip("?").split("."):
            value = value.get(key) if name.endswith("?") else value[key]
        number = wanted is float and type(value) in (int, float) and abs(value) < math.inf
        if not (number or (wanted is not float and type(value) is wanted) or (value is None and name.endswith("?"))):
            raise TypeError(f"{name.rstrip('?')} is {str(value)[:40]}")


def require_times(times: Row) -> None:
    """Raise as `require_types` for a spread that is not one of times, ValueError for one that does not rise from 0."""
    require_types(times, {float: "median q1 q3", int: "n"})
    if not 0 < times["q1"] <= times["median"] <= times["q3"]:
        raise ValueError("its quartiles are not times")


def require_provenance(row: Row) -> None:
    """Raise as `require_types` for what every row says of its machine and its making."""
    require_types(row, {
        str: "time command device dtype cpu torch commit?" + " gpu" * (row["device"] != "cpu"), int: "threads cores",
        float: "memory_gib load_average"})


def measurement(row: Row) -> Row:
    """The columns of a table, from a row as `python -m benchmarks` writes it. Raises KeyError, TypeError, ValueError.

    `side` is what is compared with what: the model, "model/unfused" for attention that is not fused, "model/reference"
    for the PyTorch reference where there are kernels. `ms` (with quartiles) is milliseconds per token by the clock that
    counts, NaN where the measurement failed. `n_tokens` is of a step; of what else is timed, rows at once."""
    require_provenance(row)
    require_types(row, {
        str: "benchmark run model variant? attention? context? cell? failed? unit?", dict: "settings? many_tokens?",
        int: "context_tokens n_parameters tokens_per_step? batch_size? warm_up?", float: "peak_mib? above_import_mib?"})
    require_types(row.get("many_tokens") or {}, {int: "tokens?", float: "counted_mib?"})
    side = row["model"] + (f"/{row['attention']}" if row.get("attention") in ("unfused", "reference") else "")
    decoding, well = row["benchmark"] == "decode", not row.get("failed")
    times: Row = dict.fromkeys(("median", "q1", "q3", "n"), math.nan)
    if well:
        times = row[f"{row['clock']}_ms"]
        require_times(times)
        require_types(row, {float: "slowest_token_ms.max state_bytes" * decoding})
    tokens = row["tokens_per_step"] if row.get("unit") == "step" else 1
    if min(tokens, row["context_tokens"]) < 1:
        raise ValueError(f"{tokens} tokens, context {row['context_tokens']}")
    return {
        # A decoding state may have been made up; then its context is a length, and no text that was read.
        "benchmark": row["benchmark"] + ("-read" if row.get("context") == "read" else ""),
        "name": (row.get("cell") or "").partition("/")[0], "run": row["run"], "side": side,
        "variant": row.get("variant") or "eager", "dtype": row["dtype"], "context": row["context_tokens"],
        "device": row["device"], "hardware": row["cpu"] if row["device"] == "cpu" else row["gpu"],
        "threads": row["threads"], "n_parameters": row["n_parameters"],
        "n_tokens": row.get("tokens_per_step") or row.get("batch_size") or 1, "time": row["time"],
        "ms": times["median"] / tokens, "q1": times["q1"] / tokens, "q3": times["q3"] / tokens, "n": times["n"],
        # Decoding has all models in one process.
        "peak_mib": row.get("peak_mib", math.nan) if well and not decoding else math.nan,
        "failed": row.get("failed") or "", "row": row}


def tables_of(rows: Sequence[Row]) -> "list[DataFrame]":
    """`read_rows`' measurements in tables: of one benchmark, name, machine, number of threads and size of model.

    Where one context was measured with several numbers of tokens in a step, each number's rank makes a table: the
    largest ones stand together."""
    import pandas

    if not rows:
        return []
    cells = pandas.DataFrame(list(rows)).sort_values("time", kind="stable", ignore_index=True)
    size_of_run = ours_first(cells).drop_duplicates("run").set_index("run").n_parameters
    sizes = size_of_run.drop_duplicates().sort_values()
    classes = dict(zip(sizes, (sizes > SAME_SIZE * sizes.shift(fill_value=0)).cumsum(), strict=True))
    cells["size"] = cells.run.map(size_of_run).map(classes)
    keys = ["benchmark", "name", "hardware", "threads", "size"]
    cells["rank"] = cells.groupby([*keys, "context"]).n_tokens.rank("dense", ascending=False)
    order = {benchmark: i for i, benchmark in enumerate(TITLES)}
    return sorted((table for _, table in cells.groupby([*keys, "rank"], sort=False)), key=lambda table: (
        order.get(table.benchmark.iat[0], len(order)), table.device.iat[0] == "cpu", size_of(table),
        table.name.iat[0], -table.n_tokens.max()))


def ours_first(cells: "DataFrame") -> "DataFrame":
    """FLASH's rows before others."""
    return cells.sort_values("side", key=lambda side: side != OURS, kind="stable")


def size_of(table: "DataFrame") -> int:
    """The number of parameters of FLASH, else of the first model."""
    return int(ours_first(table).n_parameters.iat[0])


def contexts_of(table: "DataFrame") -> list[int]:
    return sorted(table.context.unique().tolist())


def dtypes_of(table: "DataFrame") -> list[str]:
    """float32 first."""
    return sorted(table.dtype.unique(), key=lambda dtype: (dtype != "float32", dtype))


def newest(table: "DataFrame") -> "DataFrame":
    """The last measured row of each side, variant, type and context; one that failed only where none went well. Sides
    are in the order they were measured first, in each its variants and types in theirs, and in those contexts grow."""
    table = table.assign(well=table.ms.notna(), n_side=table.groupby("side", sort=False).ngroup(),
                         n_kind=table.groupby(KIND, sort=False).ngroup())
    last = table.sort_values("well", kind="stable").drop_duplicates([*KIND, "context"], keep="last")
    return last.sort_values(["n_side", "n_kind", "context"])


def compare(table: "DataFrame", ours: str, rival: str, *, by_type: bool, variant: str | None = None) -> "DataFrame":
    """Two sides at each context (by_type: and in each type), in the newest run that has both: each in its fastest
    variant, or in the one that is given; without by_type, each in its fastest type.

    Columns of the rival end in "_rival"; `value`, `low` and `high` are the rival's time over ours, and take each side's
    one quartile over the other's opposite one; `unmatched` lists the variants that only our side was measured in, where
    none is given. A side that failed in every way is there as it failed, without times."""
    keys = ["context", "dtype"] if by_type else ["context"]
    table = table.assign(at=table.index, n_run=table.groupby("run", sort=False).ngroup())

    def fastest(side: str) -> "DataFrame":
        found = table[(table.side == side) & (True if variant is None else table.variant == variant)]
        return found.sort_values("ms", kind="stable").drop_duplicates(["n_run", *keys])

    both = fastest(ours).merge(fastest(rival), on=["n_run", *keys], suffixes=("", "_rival"))
    both = both.sort_values("n_run").drop_duplicates(keys, keep="last").sort_values("context")
    variants = table.groupby(["side", "n_run", "context"]).variant.unique()
    both["unmatched"] = [[each for each in variants[ours, *at] if variant is None and each not in variants[rival, *at]]
                         for at in zip(both.n_run, both.context, strict=True)]
    return both.assign(value=both.ms_rival / both.ms, low=both.q1_rival / both.q3, high=both.q3_rival / both.q1)
