"""Reports from measured rows: ratios by hand and within a run, pages in step with their rows."""

import json

import pytest

from benchmarks.markdown import number
from benchmarks.speed import compare, ratio_table, read_rows, speed_section, tables_of
from lineartime.errors import DataError

FACTS = {"commit": "0123456789abcdef", "command": "python -m benchmarks run made-up", "cpu": "Made-up CPU", "cores": 2,
         "memory_gib": 23.6, "gpu": None, "load_average": 0.25, "torch": "2.13.0", "time": "2026-01-01T00:00:00Z"}


def made(model="flash", ms=100.0, *, context=2048, variant="eager", dtype="float32", run="1", benchmark="step",
         quartiles=(0.9, 1.1), failed=None, peak=1000.0, **more):
    """A row; quartiles are in medians."""
    row = {"benchmark": benchmark, "cell": "small", "run": run, "model": model, "variant": variant, "label": model,
           "n_parameters": 1_800_000, "context_tokens": context, "dtype": dtype, "device": "cpu", "threads": 1,
           "unit": "step" if benchmark == "step" else "token", "warm_up": 3, "repeats": 5,
           "settings": {"allocator": "keeps freed memory"}, **FACTS, **more}
    row |= {"tokens_per_step": max(8192, context)} if benchmark == "step" else {
        "batch_size": 1, "slowest_token_ms": {"max": 9.0}, "state_bytes": 2**20}
    if failed:
        return row | {"failed": failed}
    low, high = quartiles
    times = {"median": ms, "q1": ms * low, "q3": ms * high, "min": ms * low, "max": ms * high, "n": 5}
    return row | {"clock": "cpu", "cpu_ms": times, "wall_ms": times, "peak_mib": peak, "above_import_mib": peak - 300}


def cells_of(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rows(path)


def only_table(tmp_path, rows):
    (table,) = tables_of(cells_of(tmp_path, rows))
    return table


def test_a_ratio_is_the_others_time_over_ours_with_the_quartiles_apart(tmp_path):
    table = only_table(tmp_path, [made(ms=100, quartiles=(0.9, 1.25)),
                                  made("transformer++", 150, quartiles=(0.8, 1.2))])
    (both,) = compare(table, "flash", "transformer++", by_type=True).itertuples()
    assert (both.value, both.low, both.high) == pytest.approx((1.5, 150 * 0.8 / 125, 150 * 1.2 / 90))
    assert "| Transformer++ | float32 | fastest of each | 1.50 (0.96-2.00) |" in ratio_table(table)


def test_each_sides_fastest_variant_counts_and_eager_meets_eager(tmp_path):
    table = only_table(tmp_path, [made(ms=100), made(ms=50, variant="compiled"), made("transformer++", 90),
                                  made("transformer++", 75, variant="compiled"),
                                  made("transformer++", 400, attention="unfused")])
    text = ratio_table(table)
    assert "| Transformer++ | float32 | fastest of each | 1.50 " in text and "| both eager | **0.90** " in text
    assert "| Transformer++, unfused attention | float32 | fastest of each | 8.00 " in text


def test_a_variant_that_only_flash_was_measured_in_is_marked(tmp_path):
    rows = [made(), made(ms=50, variant="compiled"), made("transformer++", 100), made("flash-pytorch", 100),
            made("flash-pytorch", 90, variant="compiled")]
    text = ratio_table(only_table(tmp_path, rows))
    assert "| Transformer++ | float32 | fastest of each | 2.00 (1.64-2.44)\\* |" in text
    assert "| FLASH-pytorch | float32 | fastest of each | 1.80 (1.47-2.20) |" in text
    assert text.endswith("\n\n\\* FLASH was measured compiled too, the other was not.")


def test_only_rows_of_one_run_are_divided_and_the_newest_run_counts(tmp_path):
    old, new = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
    rows = [made(ms=100, run="b", time=new), made("transformer++", 130, run="b", time=new),
            made(ms=10, run="a", time=old), made("transformer++", 999, run="a", time=old),
            made("flash-pytorch", 70, run="c", time=new)]
    text = ratio_table(only_table(tmp_path, rows))
    assert "1.30" in text and "99.9" not in text and "FLASH-pytorch" not in text


def test_what_failed_and_what_is_missing_is_said(tmp_path):
    rows = [made(), made("transformer++", failed="out of memory"), made(context=8192),
            made("transformer++", 200, context=8192), made(context=512), made("flash-pytorch", 300, context=512)]
    text = speed_section(tables_of(cells_of(tmp_path, rows)))
    assert "| Transformer++ | float32 | fastest of each | - | other failed | 2.00 (1.64-2.44) |" in text
    assert "Failed: Transformer++, eager, float32, at 2K: out of memory." in text


@pytest.mark.parametrize("wrong", [{"q1": 0}, {"q1": -1.0}, {"q3": 0.5}, {"median": 10**9}])
def test_times_that_are_no_quartiles_are_refused(tmp_path, wrong):
    row = made()
    with pytest.raises(DataError, match="not a row of a measurement"):
        cells_of(tmp_path, [row | {"cpu_ms": row["cpu_ms"] | wrong}])


def test_a_model_without_its_kernels_is_another_side(tmp_path):
    rows = [made(ms=50, variant="compiled"), made(ms=60), made(ms=100, attention="reference"),
            made(ms=80, attention="reference", variant="compiled")]
    assert "|\n| FLASH without kernels | float32 | fastest of each | 1.60 " in ratio_table(only_table(tmp_path, rows))


@pytest.mark.parametrize(("x", "text"), [(0.0123, "0.01"), (0.98765, "0.99"), (1.0, "1.00"), (9.987, "9.99"),
                                         (12.34, "12.3"), (123.4, "123"), (0, "0"), (1234.5, "1234")])
def test_numbers_have_three_figures(x, text):
    assert number(x) == text
