"""On which devices kernels run, with which tiles, and what is too large for them."""

from types import SimpleNamespace

import pytest
import torch

from kernel_law import S
from lineartime.ops import dispatch
from lineartime.ops.reference import HeadsFromZ


@pytest.mark.parametrize(("major", "kib", "kind"), [
    (8, 163, "small"), (8, 99, "small"), (12, 99, "small"), (9, 227, "hopper"), (10, 227, "large"), (9, 164, "small")])
def test_tiles_are_those_of_the_shared_memory(major, kib, kind, monkeypatch):
    """First of all: compute capability 12.0 has 99 KiB, 10.0 has 227."""
    properties = SimpleNamespace(shared_memory_per_block_optin=kib * 1024, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert dispatch.tile_class(torch.device("cuda")) == kind
    assert dispatch.tile_class(torch.device("cpu")) == "large"


def test_rocm_runs_the_reference(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch.unsupported_device(torch.device("cuda"), torch.float32) == "kernels are for CUDA, not for ROCm"


def test_what_is_too_large_for_kernels_or_of_another_width():
    """Sizes that do not fit a grid or an offset of 32 bits, widths and chunks of no kernel."""
    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, device="meta", dtype=dtype)

    def heads(s):
        return HeadsFromZ(*[empty(4, s)] * 4)

    for shape, words in (
            ((65_536, 1, 256), "65,536 rows, kernels have 65,535"),
            ((1, 2**24, 256), "16,777,216 tokens in a row, kernels have 16,777,215"),
            ((1, 1, 2**22 + 128), "4,194,432 columns, kernels have 4,194,303"),
            ((65_535, 1, 256), None), ((1, 2**24 - 1, 256), None), ((1, 1, 2**22 - 128), None)):
        for reason in (dispatch.unsupported_rows(empty(*shape), heads(S)),
                       dispatch.unsupported_chunks(empty(*shape), heads(S), 256, "mean")):
            assert reason == words
    for (n, c, e), width, words in (
            ((65_535, 256, 64), S, None), ((65_536, 256, 64), S, "65,536 rows, kernels have 65,535"),
            ((1, 256, 64), 64, "keys of width 64, a decode step in a kernel has 128"),
            ((1, 256, 96), S, "d_inner 96, kernels have multiples of 64"),
            ((1, 64, 64), S, "chunk_size 64, kernels have 128, 256, 512")):
        assert dispatch.unsupported_step(empty(n, c, width), empty(n, c, e)) == words
    for s, dtype, pooling, words in (
            (64, torch.bfloat16, "written", None), (128, torch.float16, "mean", None),
            (256, torch.bfloat16, "mean", "query_key_dim 256, kernels have at most 128"),
            (64, torch.float16, "written", 'sums of chunk_pooling "written" do not fit float16')):
        made = [empty(2, 300, s, dtype=dtype)] * 4
        assert dispatch.unsupported_chunks(empty(2, 300, 2 * 64, dtype=dtype), made, 256, pooling) == words
    assert dispatch.unsupported_rows(empty(1, 5, 256), heads(64)) == "query_key_dim 64, kernels have 128"
