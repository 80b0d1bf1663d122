"""No launch of a kernel depends on the order in which a GPU happens to run its programs."""

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl

import launch_order
from kernel_law import S, documents, make_inputs, run
from lineartime.model.layers import rotary
from lineartime.ops import decode_step, gradients, mixed_chunk, quadratic
from lineartime.ops.reference import HeadsFromZ


def numbers(*shape, seed=0, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2).to(dtype).requires_grad_()


def chunks():
    return run(mixed_chunk.gated_chunk_attention, make_inputs(2, 140, torch.bfloat16), chunk_size=128, causal=True,
               segment_ids_BT=documents(2, 140))


def row():
    inputs = make_inputs(2, 140, torch.bfloat16, chunk=140)
    inputs |= {name: inputs[name][:2] for name in ("gamma", "beta")}
    return run(quadratic.gated_quadratic_attention, inputs, scale_len=100, causal=True,
               segment_ids_BT=documents(2, 140))


@torch.no_grad()
def decode():
    """Rows at several places of their chunk; with heads made and to be made."""
    position, start = torch.tensor([(0, 0), (127, 0), (289, 0), (461, 429), (461, 461)]).T
    offset, n = position % 128, len(position)
    carried = (position - offset - start).clamp(min=0)
    angles = rotary(position[:, None], S, torch.float32)
    parameters = HeadsFromZ(numbers(4, S, seed=1), numbers(4, S, seed=2), *angles)
    made = []
    for given in ((numbers(n, 1, 2 * 96 + S), parameters), (numbers(n, 1, 2 * 96), numbers(4, n, 1, S, seed=5))):
        buffers = [numbers(n, 128, width, seed=width).detach() for width in (S, S, 96)]
        out = decode_step.chunk_decode_step(
            *given, numbers(128, seed=3), *buffers, numbers(n, S, 96, seed=4), offset, start - position + offset,
            torch.where(carried > 0, 1 / carried.clamp(min=1), 0.0))
        made += [out, *buffers]
    return made


CASES = [(chunks, {(mixed_chunk, "MANY_CHUNKS"): 0}), (row, {}), (decode, {})]
KERNELS = {name for module in (decode_step, gradients, mixed_chunk, quadratic)
           for name, each in vars(module).items() if isinstance(each, triton.runtime.interpreter.InterpretedFunction)}


@pytest.mark.rest
def test_no_launch_depends_on_the_order_of_its_programs(monkeypatch):
    """By the addresses that programs read and write, and by all bits in other orders."""
    launched = set()
    for case, settings in CASES:
        with monkeypatch.context() as patch:
            for (module, name), value in settings.items():
                patch.setattr(module, name, value)
            with launch_order.watched(monkeypatch) as launches:
                first = case()
            assert {launch.kernel: launch.faults() for launch in launches if launch.faults()} == {}
            assert all(bool(x.isfinite().all()) for x in first)
            for order in ("backwards", "shuffled"):
                with launch_order.in_order(monkeypatch, order):
                    again = case()
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), order
        launched |= {launch.kernel for launch in launches if len(launch.loads) > 1}
    assert launched <= KERNELS and len(launched) == 11


@triton.jit
def adds_the_one_before(x):
    at = tl.program_id(0)
    tl.store(x + at, tl.load(x + at) + tl.load(x + at - 1, mask=at > 0, other=0.0))


def test_a_race_is_seen(monkeypatch):
    made = []
    with launch_order.watched(monkeypatch) as launches:
        for order in ("forwards", "backwards"):
            x = torch.ones(8)
            with launch_order.in_order(monkeypatch, order) if order == "backwards" else nullcontext():
                adds_the_one_before[(8,)](x)
            made.append(x.tolist())
    assert "a program reads what another stores" in launches[0].faults()
    assert made[0] == [1, 2, 3, 4, 5, 6, 7, 8] != made[1]
