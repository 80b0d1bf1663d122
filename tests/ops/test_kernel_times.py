"""Predicted times without a GPU: the arithmetic, what is counted, and the page that has them."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import interpreter  # noqa: F401 - first: has Triton interpret
from lineartime import model_config
from lineartime.ops import mixed_chunk, norm
from lineartime.ops.dispatch import FEW_TOKENS
from scripts import loaded

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE, KERNELS = ROOT / "tools" / "kernel_times.py", ROOT / "docs" / "tuning.md", ROOT / "docs" / "kernels.md"

kernel_times = loaded("tools", "kernel_times")
counts, DEVICES, BEST, WORST = (kernel_times.counts, kernel_times.DEVICES, kernel_times.BEST, kernel_times.WORST)
Launch, Program = kernel_times.Launch, kernel_times.Program
H100, H200, A100, RTX_4090 = DEVICES
FLASH = {"110 M": model_config("flash"), "500 M": model_config("flash", "pg19")}


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def programs(page):
    return kernel_times.programs_of(page)


def made(registers=32, warps=4, shared=0.0, stages=3, instructions=0, in_loop=0, special=0):
    return Program(warps, stages, registers, shared, instructions, in_loop, special)


@pytest.mark.parametrize(("device", "program", "at_once"), [
    (H100, made(255, 8), 1), (H100, made(255, 4), 2), (H100, made(128, 8), 2), (H100, made(129, 8), 1),
    (A100, made(168, 4), 3),  # 5,376 registers a warp: 12 warps fit
    (H100, made(97, 4), 4), (H100, made(96, 4), 5),  # 3,328 registers a warp, 19 fit; 3,072 and 21
    (A100, made(32, 4), 16), (RTX_4090, made(32, 4), 12),  # 64 and 48 warps
    (H100, made(32, 1), 32), (RTX_4090, made(32, 1), 24),  # programs of a multiprocessor
    (A100, made(32, 4, shared=48), 3), (H100, made(32, 4, shared=48), 4), (RTX_4090, made(32, 4, shared=48), 2),
    (A100, made(32, 4, shared=163), 1), (H100, made(32, 4, shared=227), 1), (RTX_4090, made(32, 4, shared=99), 1),
    (H100, made(32, 4, shared=113), 2), (H100, made(32, 4, shared=113.1), 1)])
def test_occupancy_is_that_of_nvidias_rules(device, program, at_once):
    """65,536 registers, given out to a warp by 256; 228, 164 and 100 KiB, of which each program takes 1 more."""
    assert kernel_times.occupancy(device, program) == at_once


def test_many_programs_of_bytes_alone_take_what_the_memory_takes():
    launch = Launch("copy", 10**6, dram=1e9, cache=0.0)
    time, bound = kernel_times.launch_us(launch, made(), H200, BEST)
    assert bound == "memory"
    assert time == pytest.approx(BEST["launch"] + 1e9 / (H200.copy * 1e6 * BEST["stream"]), rel=1e-2)


def test_copies_on_their_way_are_those_of_littles_law():
    """A wave of programs that only copy, in a loop of three stages: bytes in flight over the latency."""
    launch = Launch("copy", H200.n_sms, dram=0.0, cache=0.0, trips=100)
    for stages in (2, 3, 5):
        time, bound = kernel_times.launch_us(launch, made(stages=stages), H200, BEST)
        assert (time, bound) == (pytest.approx(BEST["launch"] + 100 * BEST["latency"] / (stages - 1)), "latency")


def test_a_wave_that_is_not_full_takes_a_wave():
    """Products alone, with one program at once on a multiprocessor or two: one more than there are multiprocessors
    takes as long as twice as many."""
    def of(n_programs, warps=8):
        launch = Launch("products", n_programs, dram=0.0, cache=0.0, flop=1e9 * n_programs)
        return kernel_times.launch_us(launch, made(255, warps), A100, BEST)[0] - BEST["launch"]

    assert of(A100.n_sms + 1, warps=4) == pytest.approx(of(2 * A100.n_sms, warps=4)) == pytest.approx(2 * of(1))
    assert of(A100.n_sms + 1) == pytest.approx(2 * of(A100.n_sms)) == pytest.approx(of(2 * A100.n_sms))
    assert of(A100.n_sms) == pytest.approx(1e9 / (A100.peak * 1e6 / A100.n_sms * A100.product[0]))


def test_instructions_take_the_cycles_of_the_schedulers():
    """1,000 rounds of 100 instructions by 8 warps: 200,000 cycles of four schedulers at the assumed share."""
    launch = Launch("loop", H100.n_sms, dram=0.0, cache=0.0, trips=1000, ahead=False)
    time, _ = kernel_times.launch_us(launch, made(255, 8, instructions=100, in_loop=100), H100, BEST)
    assert time == pytest.approx(BEST["launch"] + 200_000 / BEST["issue"] / (H100.ghz * 1e3))
    special, _ = kernel_times.launch_us(launch, made(255, 8, instructions=100, in_loop=100, special=100), H100, BEST)
    assert special == pytest.approx(BEST["launch"] + 1000 * 100 * 8 * 32 / 16 / (H100.ghz * 1e3))


def every_launch(device, config=FLASH["110 M"]):
    n = device.tokens
    return [*counts.forward(config, n, device.kind), *counts.backward(config, n, device.kind), *counts.norms(config, n)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_nothing_is_slower_on_a_faster_device(device, programs):
    """Of memory, cache, clock, products and multiprocessors; and the worst is not better than the best."""
    faster = {"copy": 1.5, "cache": 1.5, "ghz": 1.5, "peak": 1.5, "shared": 2, "warps": 2, "programs": 2}
    for launch in every_launch(device):
        program = kernel_times.program_of(launch, programs, device)
        assert kernel_times.occupancy(device, program) >= 1
        time, worst = (kernel_times.launch_us(launch, program, device, each)[0] for each in (BEST, WORST))
        assert 0 < time <= worst < math.inf
        for field, factor in faster.items():
            other = device._replace(**{field: getattr(device, field) * factor})
            # A wave of more programs may leave a last one that is less full.
            limit = time * (1.5 if field in ("shared", "warps", "programs") else 1 + 1e-9)
            assert kernel_times.launch_us(launch, program, other, BEST)[0] <= limit, (launch.kernel, field)


class Recorded(list):
    """The launches of the ops, in place of running them: the kernel and the programs."""

    def __init__(self, monkeypatch, kind):
        def record(executor, *args, **kwargs):
            grid = executor.grid(kwargs) if callable(executor.grid) else executor.grid
            self.append((executor.fn.__name__, math.prod(grid)))

        monkeypatch.setattr(GridExecutor, "__call__", record)
        monkeypatch.setattr(mixed_chunk, "tile_class", lambda device: kind)


@pytest.mark.parametrize("kind", ["small", "hopper"])
@pytest.mark.parametrize("size", FLASH)
def test_launches_are_those_of_the_ops(size, kind, monkeypatch):
    """In their order, with their programs: forward, backward, and the norm's."""
    config, n = FLASH[size], 2 * counts.ROW
    e, s, d = config.d_inner, counts.S, config.d_model
    recorded = Recorded(monkeypatch, kind)
    row = torch.zeros(2, counts.ROW, 2 * e + s, dtype=torch.bfloat16, requires_grad=True)
    angles, scales = torch.zeros(1, counts.ROW, s // 2), torch.zeros(4, s)
    out = mixed_chunk.gated_chunk_attention(row, scales, scales, angles, angles, torch.zeros(2 * config.chunk_size - 1),
                                            chunk_size=config.chunk_size, causal=True,
                                            segment_ids_BT=torch.zeros(2, counts.ROW, dtype=torch.long))
    out.sum().backward()
    x = torch.zeros(n, d, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        both = norm.add_norm(x, torch.zeros(n, d, dtype=torch.bfloat16), torch.zeros(d), torch.zeros(d))
    sum(each.sum() for each in both).backward()
    wanted = [*counts.forward(config, n, kind), *counts.backward(config, n, kind), *counts.norms(config, n)]
    assert recorded == [(launch.kernel.partition(" ")[0], launch.programs) for launch in wanted]


def test_bytes_are_those_of_the_page_of_the_kernels():
    """At 110 M, with Hopper's tiles; the gradient of z also writes its sums, which that page leaves out."""
    forward, backward = (int(total.replace(",", "")) for total in
                         re.findall(r"\*\*([\d,]+)\*\* \|$", KERNELS.read_text(encoding="utf-8"), re.MULTILINE))
    config, sums = FLASH["110 M"], 32 * counts.S / counts.gradients.BASE_TILE
    assert sum(launch.dram for launch in counts.forward(config, 1024, "hopper")) / 1024 == forward
    assert sum(launch.dram for launch in counts.backward(config, 2048, "hopper")) / 2048 == backward + sums


def test_products_do_not_depend_on_the_tiles():
    """Rounds and narrower tiles make the same products, of tiles of 128 keys."""
    for of in (counts.forward, counts.backward):
        small, hopper = (sum(launch.flop for launch in of(FLASH["110 M"], 4096, kind)) for kind in ("small", "hopper"))
        assert small == hopper


def test_what_is_not_counted_is_refused():
    with pytest.raises(ValueError, match="2 rows of 16 chunks: states in two levels are not counted"):
        counts.walk(replace(FLASH["110 M"], chunk_size=128), 4096, "hopper", False)


@pytest.mark.parametrize("row", [512, 2048])
@pytest.mark.parametrize("size", FLASH)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_the_compiled_reference_runs_where_it_wins_or_ties(device, size, row, programs, monkeypatch):
    """`dispatch.compile_reference`, forward and backward together, in short rows too. By the whole range it wins at
    half of FEW_TOKENS; on an A100 it wins or ties throughout."""
    monkeypatch.setattr(counts, "ROW", row)
    verdicts = {n: kernel_times.verdict(*kernel_times.attention_ns(FLASH[size], n, device, programs))
                for n in (FEW_TOKENS // 2, FEW_TOKENS, 2 * FEW_TOKENS, 8 * FEW_TOKENS)}
    assert verdicts[FEW_TOKENS // 2] == "reference" and verdicts[FEW_TOKENS] != "kernels"
    if "A100" in device.name:
        assert "kernels" not in verdicts.values()


def test_a_verdict_takes_the_whole_range():
    assert [kernel_times.verdict((1.0, 2.0), other) for other in ((2.1, 3.0), (1.9, 3.0), (0.2, 0.9), (0.2, 1.1))] \
        == ["kernels", "open", "reference", "open"]


def test_the_page_has_what_the_tool_writes(page, programs):
    assert f"<!-- times: begin -->\n\n{kernel_times.section(programs)}\n\n<!-- times: end -->" in page


def test_a_page_without_a_place_is_refused(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# A page\n")
    done = subprocess.run([sys.executable, SCRIPT, "--into", path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (f"error: no place for the tables: {path}; add <!-- times: begin -->, <!-- times: end -->\n")
    assert path.read_text() == "# A page\n"
