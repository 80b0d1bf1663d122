"""Kernels compiled without a GPU, for two architectures: they fit, nothing spills, and the log says what they take."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, LOG = ROOT / "tools" / "kernel_resources.py", ROOT / "docs" / "tuning.md"

spec = importlib.util.spec_from_file_location("kernel_resources", SCRIPT)
kernel_resources = importlib.util.module_from_spec(spec)
sys.modules["kernel_resources"] = kernel_resources
spec.loader.exec_module(kernel_resources)
Case, SHARED_KIB = kernel_resources.Case, kernel_resources.SHARED_KIB

PRODUCTS = {"add_up", "attend_queries", "differentiate_head", "differentiate_keys", "differentiate_scores",
            "walk_states", "weigh"}
"""Kernels that multiply matrices, and so must use the tensor cores in types of 16 bits."""


@pytest.fixture(scope="module", params=["push", *(pytest.param(name, marks=pytest.mark.campaign)
                                                for name in ("usual", "everywhere"))])
def rows(request, tmp_path_factory):
    """Every program of the selected cases, from a process of its own: others here interpret kernels."""
    path = tmp_path_factory.mktemp("resources") / "rows.jsonl"
    done = subprocess.run([sys.executable, SCRIPT, "--quick", request.param, "--json", path], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_kernel_of_every_op_compiles_for_each(rows, request):
    """Float32 too, but on a push and for every architecture."""
    selection = request.node.callspec.params["rows"]
    everywhere, types = selection == "everywhere", {"bfloat16"} | ({"float32"} if selection == "usual" else set())
    for op in kernel_resources.OPS:
        names = {arch: {(row["kernel"], row["options"], row["dtype"]) for row in rows
                        if (row["op"], row["arch"]) == (op, arch)}
                 for arch in (SHARED_KIB if everywhere else kernel_resources.SHOWN)}
        assert {dtype for _, _, dtype in names[80]} >= types, op
        first = {name for name in names[80] if name[2] == "bfloat16" or selection != "push"}
        assert first and all(found == first for arch, found in names.items() if arch != 80), op


def test_no_kernel_spills(rows):
    assert [row for row in rows if row["spilled"]] == []


CHUNKED = {"attend_queries", "differentiate_keys", "walk_states"}


def test_chunk_kernels_copy_while_they_multiply(rows):
    """In types of 16 bits, every program has copies in flight in the loop that multiplies."""
    chunked = [row for row in rows if row["kernel"] in CHUNKED and row["dtype"] != "float32"]
    assert {row["kernel"] for row in chunked} == CHUNKED
    assert [row for row in chunked if row["in_flight"] == 0] == []


def test_no_product_is_made_twice(rows):
    """The warps of a program cover no more rows than its tile has; the bidirectional tiles of a GPU with little shared
    memory are the one exception, for others of that size spill."""
    for row in rows:
        if row["kernel"] in CHUNKED and (row["causal"] or row["arch"] in (90, 100)):
            tile = re.search(r"\bBM (\d+)", row["tiles"])
            assert row["rows_of_warps"] <= (int(tile[1]) if tile else 128), row


def test_every_kernel_fits_into_shared_memory(rows):
    assert [row for row in rows if row["shared"] > SHARED_KIB[row["arch"]] * 1024] == []


def test_products_of_16_bits_are_made_by_tensor_cores(rows):
    products = [row for row in rows if row["kernel"] in PRODUCTS]
    assert {row["kernel"] for row in products} == PRODUCTS
    assert [row for row in products if (row["tensor_cores"] > 0) != (row["dtype"] != "float32")] == []


def test_the_log_has_what_is_compiled(rows):
    """Every line; where another version of Triton made the log, its numbers are others."""
    log = LOG.read_text(encoding="utf-8")
    written = re.search(r"resources: begin -->\n\nTriton ([\d.]+),", log)
    assert written, "tools/kernel_resources.py --into docs/tuning.md writes it"
    if written[1] == kernel_resources.triton.__version__ and {row["arch"] for row in rows} == {*kernel_resources.SHOWN}:
        lines = ["| " + " | ".join([*line, of.partition(",")[0]]) for *line, of in kernel_resources.lines_of(rows)]
        assert [line for line in lines if line not in log] == []
