"""No launch of a kernel depends on the order in which a GPU happens to run its programs; each is on
the device of its tensors."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import triton
import triton.language as tl
from test_kernel_decode import BUFFERS, ROWS, call
from test_kernel_decode import make_inputs as make_decode_inputs
from triton.runtime.interpreter import GridExecutor

import launch_order
from kernel_law import documents, make_inputs, run
from lineartime.ops import decode_step, gradients, mixed_chunk, quadratic


def chunks(n_tokens=140):
    return run(mixed_chunk.gated_chunk_attention, make_inputs(2, n_tokens, torch.bfloat16), chunk_size=128, causal=True,
               segment_ids_BT=documents(2, n_tokens))


def row(n_tokens=140):
    return run(quadratic.gated_quadratic_attention, make_inputs(2, n_tokens, torch.bfloat16, chunk=None),
               scale_len=100, causal=True, segment_ids_BT=documents(2, n_tokens))


@torch.no_grad()
def decode():
    """Rows at several places of their chunk; with heads made and to be made."""
    made = []
    for heads in (False, True):
        inputs = make_decode_inputs(torch.float32, ROWS, 96, heads=heads)
        made += [call(decode_step.chunk_decode_step, inputs), *(inputs[name] for name in BUFFERS)]
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


def test_the_device_of_the_tensors_is_current_at_every_launch(monkeypatch):
    """Triton launches on the current device; a model on cuda:1 would otherwise run on cuda:0."""
    current, launched = [], []

    @contextmanager
    def device_of(tensor):
        assert isinstance(tensor, torch.Tensor)
        current.append(tensor)
        yield
        current.pop()

    def launch(self, *args, **kwargs):
        launched.append((self.fn.__name__, bool(current)))
        return whole(self, *args, **kwargs)

    whole = GridExecutor.__call__
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    assert len(chunks(40)) == len(row(40)) and decode()
    assert {name for name, _ in launched} >= {"attend_queries", "differentiate_keys", "walk_states", "weigh", "add_up",
                                              "decode_columns"}
    assert [name for name, guarded in launched if not guarded] == []
