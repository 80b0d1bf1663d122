"""What tools/kernel_times.py assumes of GPUs, and of what no assembler says."""

from typing import NamedTuple

from lineartime.benchmark.markdown import markdown
from lineartime.ops.dispatch import TileClass


class Device(NamedTuple):
    """A GPU. Pairs are what is assumed at best and at worst."""

    name: str
    arch: int
    """Whose programs of the page it has; those of sm_80 stand for sm_89, which has the same tiles."""
    kind: TileClass
    n_sms: int
    """Streaming multiprocessors."""
    ghz: float
    copy: float
    """TB/s of a large copy, bytes read and written counted alike."""
    cache: float
    """TB/s of the second-level cache."""
    peak: float
    """TFLOP/s of dense bfloat16, sums in float32."""
    shared: int
    """KiB of a multiprocessor."""
    warps: int
    programs: int
    issue: float
    """Instructions of warps that a multiprocessor begins in a cycle."""
    matmul: tuple[float, float]
    """The share of `peak` of large matmuls in cuBLAS."""
    product: tuple[float, float]
    """The same of the products in a kernel's loop, but for `fixed`."""
    fixed: tuple[float, float]
    """What a tensor-core instruction costs beside its columns, in columns."""
    tokens: int
    """Of a micro-batch at 110 M parameters: a power of 2 that the compiled reference has memory for."""


# Multiprocessors, peak, shared memory, warps and programs: NVIDIA's papers on the architectures of A100, H100 and Ada,
# the H200's data sheet, and the table of compute capabilities in the CUDA programming guide. ghz: the boost clock, of
# an H100 and H200 less, for their power limit: assumed. copy: the H200's is that of docs/tuning.md; the others are 0.86
# to 0.91 of the 3.35, 2.04 and 1.01 of the data sheets: assumed. cache: assumed, about what public micro-benchmarks
# reach. issue: 4 schedulers; an A100 has half of the float32 units, which is taken as 3. matmul: 0.80 is the 790 of 989
# of docs/tuning.md for an H200, the rest assumed. product: assumed; on sm_80 each warp loads an operand from shared
# memory for itself, which takes all of that memory's rate on an A100. fixed: assumed; a wgmma of few columns waits for
# its operand in registers.
DEVICES = (
    Device("H100 SXM", 90, "hopper", 132, 1.75, 3.0, 6.5, 989, 228, 64, 32, 4, (.75, .62), (.9, .75), (16, 48), 2**16),
    Device("H200", 90, "hopper", 132, 1.75, 4.3, 6.5, 989, 228, 64, 32, 4, (.80, .68), (.9, .75), (16, 48), 2**16),
    Device("A100 80GB", 80, "small", 108, 1.41, 1.75, 4.5, 312, 164, 64, 32, 3, (.85, .72), (.65, .4), (0, 0), 2**16),
    Device("RTX 4090", 80, "small", 128, 2.52, .92, 5.0, 165, 100, 48, 24, 4, (.95, .8), (.85, .6), (0, 0), 2**14))
REGISTERS, SPECIAL, SCHEDULERS, THREADS = 65536, 16, 4, 32
"""Of a multiprocessor, by the CUDA guide: registers, special-function results in a cycle, schedulers; of a warp."""

ASSUMED = {
    "stream": ("share of a copy's rate, where nothing else is in the way", (.97, .85)),
    "latency": ("us until bytes of GPU memory are there, under load; idle it is about 0.3", (.5, .9)),
    "near": ("us until bytes of the second-level cache are there, or a sum over the threads of a program", (.2, .35)),
    "exposed": ("share of such a wait in a loop that the program's own instructions do not hide", (.5, 1.)),
    "issue": ("share of the instructions that a multiprocessor could begin", (.8, .5)),
    "batched": ("share of the peak of cuBLAS, matmuls of one chunk each", (.6, .35)),
    "launch": ("us between two kernels", (1., 2.)),
    "small": ("us of an operation of PyTorch on a few numbers", (1.5, 3.5))}
"""What no assembler says, at best and at worst. Nothing of it was measured."""
WAITS_OF_PASS = 4
"""For GPU memory, one after another, in a pass over few tokens: assumed too."""
Assumed = dict[str, float]
BEST, WORST = ({"side": side, **{name: pair[side] for name, (_, pair) in ASSUMED.items()}} for side in (0, 1))


def pair_of(value: float | tuple[float, float]) -> list[float]:
    """Both numbers of a pair, the smaller one first, or the one that there is."""
    return sorted(set(value)) if isinstance(value, tuple) else [value]


def constants_table() -> str:
    """Tables of what is assumed of devices, and beside."""
    named = {"n_sms": "multiprocessors", "ghz": "GHz", "copy": "TB/s of a copy",
             "cache": "TB/s of the second-level cache", "peak": "TFLOP/s", "shared": "KiB of shared memory",
             "warps": "warps", "issue": "instructions in a cycle", "matmul": "cuBLAS, share of TFLOP/s",
             "product": "products in kernels, share of TFLOP/s",
             "fixed": "what an instruction for the tensor cores costs beside its columns, in columns"}
    shown = [[title,
              *(" to ".join(f"{x:g}" for x in pair_of(getattr(device, field))) for device in DEVICES)]
             for field, title in named.items()]
    assumed = [[f"`{name}`", what, f"{best:g}", f"{worst:g}"] for name, (what, (best, worst)) in ASSUMED.items()]
    return (markdown(["of a multiprocessor or a device", *(device.name for device in DEVICES)], shown) + "\n\n"
            + markdown(["constant", "what", "at best", "at worst"], assumed))
