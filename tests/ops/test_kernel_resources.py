"""Kernels compiled without a GPU, for six architectures: they fit, nothing spills, and they use the tensor cores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "kernel_resources.py"
SHARED_KIB = {80: 163, 90: 227, 86: 99, 89: 99, 100: 227, 120: 99}
"""Shared memory that one program can have, by architecture: NVIDIA's table of compute capabilities."""
PRODUCTS = {"add_up", "attend_queries", "differentiate_head", "differentiate_keys", "differentiate_scores",
            "walk_states", "weigh"}
"""Kernels that multiply matrices, and so must use the tensor cores in types of 16 bits."""
CHUNKED = {"attend_queries", "differentiate_keys", "walk_states"}
KNOWN_SPILLS = {("attend_queries", 90, 512): 112, ("differentiate_keys", 80, 128): 8}
"""Bytes of a thread by kernel, architecture and chunk. The tiles were chosen for chunks of 256."""
OTHERS = {"add_norm_rows", "add_norm_rows_backward", "base_gradient_kernel", "decode_columns", "make_heads_kernel"}


@pytest.fixture(scope="module", params=[
    pytest.param((90, 80), marks=pytest.mark.rest),
    *(pytest.param((arch,), marks=pytest.mark.campaign) for arch in SHARED_KIB)], ids=str)
def rows(request, tmp_path_factory):
    """Every program of the selected cases, from a process of its own: others here interpret kernels. `make
    test-all` has few cases for two architectures, the campaign all for each one."""
    path = tmp_path_factory.mktemp("resources") / "rows.jsonl"
    selection = "everything" if len(request.param) == 1 else "few"
    done = subprocess.run([sys.executable, SCRIPT, path, selection, *map(str, request.param)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kernels_compile_fit_and_do_not_spill(rows):
    """All kernels for a Hopper, and for the others what has other tiles there."""
    compiled = {arch: {row["kernel"] for row in rows if row["arch"] == arch} for arch in SHARED_KIB}
    first, *others = filter(None, (compiled[arch] for arch in (90, 80, 86, 89, 100, 120)))
    assert first - {"scan_states"} == PRODUCTS | OTHERS
    assert all(kernels >= CHUNKED for kernels in others)
    if any(row["n_tokens"] > 2**13 for row in rows):
        assert "scan_states" in first
    for row in rows:
        assert row["spilled"] <= KNOWN_SPILLS.get((row["kernel"], row["arch"], row["chunk"]), 0), row
        assert row["shared"] <= SHARED_KIB[row["arch"]] * 1024, row


def test_products_are_made_once_by_tensor_cores_while_copies_are_in_flight(rows):
    """In types of 16 bits. A program's warps cover no more rows than its tile has; bidirectional tiles of a GPU with
    little shared memory are the one exception, for others of that size spill."""
    for row in rows:
        short = row["dtype"] != "float32"
        assert row["kernel"] not in PRODUCTS or (row["tensor_cores"] > 0) == short, row
        if row["kernel"] in CHUNKED:
            assert row["in_flight"] > 0 or not short, row
            if row["causal"] or row["arch"] in (90, 100):
                assert row["rows_of_warps"] <= (row["tile_rows"] or 128), row
