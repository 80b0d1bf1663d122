"""Kernels compiled without a GPU, for two architectures: they fit, nothing spills, and the log says what they take."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import loaded

ROOT = Path(__file__).parents[2]
SCRIPT, LOG = ROOT / "tools" / "kernel_resources.py", ROOT / "docs" / "tuning.md"

kernel_resources = loaded("tools", "kernel_resources")
Case, SHARED_KIB = kernel_resources.Case, kernel_resources.SHARED_KIB

PRODUCTS = {"add_up", "attend_queries", "differentiate_head", "differentiate_keys", "differentiate_scores",
            "walk_states", "weigh"}
"""Kernels that multiply matrices, and so must use the tensor cores in types of 16 bits."""
CHUNKED = {"attend_queries", "differentiate_keys", "walk_states"}


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


LISTING = """
        /*0000*/                   MUFU.EX2 R2, R2 ;           /* 0x0000000200027308 */
                                                               /* 0x000fc80000000f00 */
        /*0010*/                   IMAD R1, R1, 0x2, R3 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24 ;
        /*0030*/                   MUFU.RCP R2, R2 ;
        /*0040*/              @P0  BRA 0x20 ;
        /*0050*/                   FADD R1, R1, R2 ;
        /*0060*/              @!P1 BRA 0x10 ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80;
"""


def test_the_loop_is_the_longest_without_another_inside():
    """A jump to itself, which fills up the end of a program, is none."""
    found = kernel_resources.instructions_of(LISTING)
    assert found == {"instructions": 9, "in_loop": 3, "special": 1}
    without = LISTING.replace("BRA 0x20", "BRA 0x80").replace("BRA 0x10", "BRA 0x80")
    assert kernel_resources.instructions_of(without) == {"instructions": 9, "in_loop": 0, "special": 2}


def test_loops_of_products_have_their_instructions(rows):
    chunked = [row for row in rows if row["kernel"] in CHUNKED]
    assert [row for row in chunked if not 0 < row["in_loop"] < row["instructions"]] == []
    assert [row for row in chunked if not 0 < row["special"] < row["in_loop"]] == []


def test_no_kernel_spills(rows):
    assert [row for row in rows if row["spilled"]] == []


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
