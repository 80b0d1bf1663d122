"""How long FLASH's kernels, a layer and a training step should take on a GPU that need not be here: predictions.

`python tools/kernel_times.py` takes what tools/kernel_counts.py counts, and registers and shared memory from the table
that tools/kernel_resources.py wrote into docs/tuning.md; `--into docs/tuning.md` writes the predictions there.

A program alone waits for its copies and does one thing after another. A multiprocessor has as many programs as its
registers, shared memory and warps allow, and all share its units and the memory. A wave of programs takes the longer of
the two, and a launch is its waves, of which the last need not be full. Every time is a range: with the constants that
favour speed, and with those that do not.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

import kernel_counts as counts  # noqa: E402
from kernel_counts import Launch, Pass  # noqa: E402

from lineartime import ModelConfig, model_config  # noqa: E402
from lineartime.benchmark.markdown import folded, markdown  # noqa: E402
from lineartime.ops.dispatch import TileClass  # noqa: E402

PLACE = re.compile(r"(<!-- times: begin -->\n).*?(<!-- times: end -->)", re.DOTALL)
BATCH = 2**18


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


# Multiprocessors, clock, peak, shared memory, warps and programs: NVIDIA's papers on the architectures of A100, H100 and
# Ada, the H200's data sheet, the table of compute capabilities in the CUDA programming guide. copy: 4.3 was measured on
# an H200; the others are 0.86 to 0.91 of 3.35, 2.04 and 1.01 of the data sheets, assumed. cache: assumed, about what
# public micro-benchmarks reach. issue: 4 schedulers; an A100 has half of the float32 units, taken as 3. matmul: 790 of 989 was measured on an H200; the rest is assumed, an H100 a little less
# for its power limit. product: assumed; on sm_80 each warp loads an operand from shared memory for itself, which takes
# all of that memory's rate on an A100. fixed: assumed; wgmma of few columns waits for the operand in registers.
DEVICES = (
    Device("H100 SXM", 90, "hopper", 132, 1.75, 3.0, 6.5, 989, 228, 64, 32, 4, (.75, .62), (.9, .75), (16, 48), 2**16),
    Device("H200", 90, "hopper", 132, 1.75, 4.3, 6.5, 989, 228, 64, 32, 4, (.80, .68), (.9, .75), (16, 48), 2**16),
    Device("A100 80GB", 80, "small", 108, 1.41, 1.75, 4.5, 312, 164, 64, 32, 3, (.85, .72), (.65, .4), (0, 0), 2**16),
    Device("RTX 4090", 80, "small", 128, 2.52, .92, 5.0, 165, 100, 48, 24, 4, (.95, .8), (.85, .6), (0, 0), 2**14))
REGISTERS, SPECIAL, SCHEDULERS, THREADS = 65536, 16, 4, 32
"""Of a multiprocessor, by the CUDA guide: registers, special-function results in a cycle, schedulers; of a warp."""

ASSUMED = {
    "stream": (.97, .85, "share of a copy's rate, where nothing else is in the way"),
    "latency": (.5, .9, "us until bytes of GPU memory are there, under load; idle it is about 0.3"),
    "near": (.2, .35, "us until bytes of the second-level cache are there, or a sum over the threads of a program"),
    "exposed": (.5, 1., "share of such a wait in a loop that the program's own instructions do not hide"),
    "issue": (.8, .5, "share of the instructions that a multiprocessor could begin"),
    "batched": (.6, .35, "share of the peak of cuBLAS, matmuls of one chunk each"),
    "launch": (1., 2., "us between two kernels"),
    "small": (1.5, 3.5, "us of an operation of PyTorch on a few numbers")}
"""What no assembler says, at best and at worst. Nothing of it was measured."""
BEST, WORST = ({"side": side, **{name: pair[side] for name, pair in ASSUMED.items()}} for side in (0, 1))
Assumed = dict[str, float]


class Program(NamedTuple):
    """A line of the page: see `kernel_resources.Program`. shared: KiB."""

    warps: int
    stages: int
    registers: int
    shared: float
    instructions: int
    in_loop: int
    special: int


Programs = dict[tuple[str, int], list[Program]]


def programs_of(page: str) -> Programs:
    """By kernel and architecture, the programs of a training run in chunks of 256 that a page has, one for a round."""
    line = re.compile(r"^\| `(\w+)`(?: (\([^|]*\)))? \| sm_(\d+) \| [^|]* \| (\d+), (\d+) \| (\d+) \| [^|]* \| "
                      r"([\d.]+) \| \d+ \| (\d+), (\d+), (\d+) \| bfloat16(?:, C 256, causal, documents)? \|$",
                      re.MULTILINE)
    found: Programs = {}
    for kernel, options, arch, *numbers in line.findall(page):
        program = Program(*(float(x) if "." in x else int(x) for x in numbers))
        found.setdefault((f"{kernel} {options}".strip(), int(arch)), []).append(program)
    return found


def occupancy(device: Device, program: Program) -> int:
    """The programs that a multiprocessor holds at once, by NVIDIA's rules for compute capability 8.0 and above: a warp
    has registers by 256, warps come four at a time; a program has shared memory by 128 bytes, and 1 KiB beside it."""
    of_warp = -(-program.registers * 32 // 256) * 256
    by_registers = REGISTERS // of_warp // SCHEDULERS * SCHEDULERS // program.warps
    by_shared = int(device.shared / (-(-program.shared * 1024 // 128) / 8 + 1))
    return min(by_registers, by_shared, device.warps // program.warps, device.programs)


def wave(launch: Launch, program: Program, device: Device, assumed: Assumed, there: float) -> dict[str, float]:
    """Microseconds of `there` programs that run side by side: what each unit takes for all of them, and "latency", what
    one program takes alone."""
    side, n_busy, on_each = int(assumed["side"]), launch.programs * launch.busy, -(-there // device.n_sms)
    tensor = (device.peak / device.n_sms * device.product[side] * launch.width
              / (launch.width + device.fixed[side]) * 1e6)
    products = launch.flop / n_busy / tensor
    run = launch.trips * program.in_loop + launch.rest * (program.instructions - program.in_loop)
    special = program.special * (launch.trips if program.in_loop else 1) * THREADS / SPECIAL
    issue = program.warps * max(run / (device.issue * assumed["issue"]), special) / (device.ghz * 1e3)
    # Of a program with few warps, the next instruction often waits for the one before.
    alone = products + issue / min(program.warps / 8, 1)
    # Little's law: of a loop with k stages, the copies of k - 1 rounds are on their way in one latency.
    alone = max(alone, launch.ahead * launch.trips * assumed["latency"] / max(program.stages - 1, 1))
    alone += assumed["latency"] * (launch.waits + assumed["exposed"] * launch.waits_in_loop)
    alone += assumed["near"] * assumed["exposed"] * launch.near
    return {"memory": launch.dram / n_busy * there / (device.copy * 1e6 * assumed["stream"]),
            "cache": launch.cache / n_busy * there / (device.cache * 1e6),
            "products": on_each * products, "issue": on_each * issue, "latency": alone}


def launch_us(launch: Launch, program: Program, device: Device, assumed: Assumed) -> tuple[float, str]:
    """Microseconds of a launch, and what a wave of it waits for."""
    n_busy, at_once = launch.programs * launch.busy, occupancy(device, program) * device.n_sms
    full = wave(launch, program, device, assumed, min(at_once, n_busy))
    left = n_busy % at_once
    last = max(wave(launch, program, device, assumed, left).values()) if left else 0.0
    return assumed["launch"] + n_busy // at_once * max(full.values()) + last, max(full, key=lambda name: full[name])


def pass_us(each: Pass, n: int, device: Device, assumed: Assumed) -> float:
    """Microseconds of a pass over n tokens."""
    share = assumed["batched"] if each.chunked else device.matmul[int(assumed["side"])]
    memory, products = each.bytes / (device.copy * assumed["stream"]), each.flop / (device.peak * share)
    return assumed["launch"] + n * max(memory, products) / 1e6


def program_of(launch: Launch, programs: Programs, device: Device) -> Program:
    """A later round has the last round's program that the page has: larger chunks are not in it."""
    rounds = programs[launch.kernel, device.arch]
    return rounds[min(launch.round, len(rounds) - 1)]


def layer_ns(config: ModelConfig, n: int, device: Device, programs: Programs, assumed: Assumed,
             kernels: bool) -> dict[str, float]:
    """Nanoseconds per token of what a layer does, with the kernels or with the compiled reference."""
    def of_launches(launches: Iterable[Launch]) -> float:
        return sum(launch_us(x, program_of(x, programs, device), device, assumed)[0] for x in launches) * 1e3 / n

    def of_passes(passes: Iterable[Pass]) -> float:
        return sum(pass_us(x, n, device, assumed) for x in passes) * 1e3 / n

    extra = (counts.EXTRA_FORWARD + counts.EXTRA_BACKWARD) if kernels else counts.EXTRA_COMPILED
    parts = {"the two projections": of_passes(counts.projections(config))}
    if kernels:
        parts |= {"attention, forward": of_launches(counts.forward(config, n, device.kind)),
                  "attention, backward": of_launches(counts.backward(config, n, device.kind)),
                  "norm and residual": of_launches(counts.norms(config, n))}
    else:
        parts |= {"attention, forward": of_passes(counts.reference_forward(config)),
                  "attention, backward": of_passes(counts.reference_backward(config)),
                  "norm and residual": of_passes(counts.reference_norms(config))}
    return parts | {"small operations": extra * assumed["small"] * 1e3 / n,
                    "gradients of biases": of_passes(counts.biases(config))}


def step_ns(config: ModelConfig, n: int, device: Device, programs: Programs, assumed: Assumed,
            kernels: bool) -> dict[str, float]:
    """Nanoseconds per token of a training step of BATCH tokens in micro-batches of n, and of its parts."""
    parts = layer_ns(config, n, device, programs, assumed, kernels)
    parts["layer"] = sum(parts.values())
    passes, chunk = counts.head_and_loss(config)
    whole = {f"{config.n_layers} layers": config.n_layers * parts["layer"],
             "head and loss": sum(pass_us(each, chunk, device, assumed) for each in passes) * 1e3 / chunk,
             "embedding, optimizer": sum(pass_us(each, n, device, assumed)
                                         for each in counts.rest_of_step(config, n, BATCH)) * 1e3 / n}
    return parts | whole | {"step": sum(whole.values())}


def span(best: float, worst: float, form: str = ".3g") -> str:
    """Two numbers as a range, the smaller one first; one number where both are written alike."""
    low, high = (format(x, form) for x in sorted((best, worst)))
    return low if low == high else f"{low} to {high}"


def both(ranges: Sequence[dict[str, float]], *names: str) -> tuple[float, float]:
    """The sums of some parts, at best and at worst."""
    best, worst = (sum(each[name] for name in names) for each in ranges)
    return best, worst


def verdict(kernels: tuple[float, float], reference: tuple[float, float]) -> str:
    """What the whole ranges of two times say."""
    if kernels[1] < reference[0]:
        return "kernels"
    return "compiled reference" if reference[1] < kernels[0] else "open: the ranges overlap"


ATTENTION = ("attention, forward", "attention, backward")
LEAST_KB = (18.9, 26.9)
"""What must be moved of a token at 110 M, forward and backward: docs/tuning.md."""


def launch_lines(config: ModelConfig, device: Device, programs: Programs) -> list[list[str]]:
    """A line for each launch of a layer on a device."""
    n, lines = device.tokens, []
    groups = {"forward": counts.forward, "backward": counts.backward, "norm": lambda config, n, _: counts.norms(config, n)}
    for group, launches in groups.items():
        for launch in launches(config, n, device.kind):
            program = program_of(launch, programs, device)
            (best, waits), (worst, waits_worst) = (launch_us(launch, program, device, each) for each in (BEST, WORST))
            at_once, name = occupancy(device, program), launch.kernel.partition(" (")[0]
            lines.append([f"`{name}`, {group}" + f", round {launch.round + 1}" * (launch.round > 0),
                          f"{launch.programs:,}", str(at_once),
                          f"{launch.programs * launch.busy / at_once / device.n_sms:.1f}", f"{launch.dram / n / 1e3:.1f}",
                          f"{launch.flop / n / 1e6:.2f}", span(best * 1e3 / n, worst * 1e3 / n),
                          waits if waits == waits_worst else f"{waits}; {waits_worst}"])
    return lines


def section(programs: Programs) -> str:
    """The predictions, as docs/tuning.md has them."""
    config, large = model_config("flash"), model_config("flash", "pg19")
    steps = {device.name: tuple([step_ns(config, device.tokens, device, programs, each, kernels)
                                 for each in (BEST, WORST)] for kernels in (True, False)) for device in DEVICES}
    head = ["GPU", "tiles", "kernels: forward", "backward", "both", "compiled reference: forward", "backward", "both",
            "shorter by the whole range"]
    compared = [[device.name, device.kind] + [span(*both(side, *names)) for side in steps[device.name]
                                              for names in (ATTENTION[:1], ATTENTION[1:], ATTENTION)]
                + [verdict(*(both(side, *ATTENTION) for side in steps[device.name]))] for device in DEVICES]
    parts = ["**Predictions. No GPU has run any of this.** A range is from the constants that favour speed to those that "
             "do not. FLASH in bfloat16, documents, rows of 2,048 tokens, micro-batches of 65,536 tokens, on the RTX "
             "4090 of 16,384; steps of 262,144 tokens. Nanoseconds are per token, and in a layer per layer.",
             "Mixed chunk attention, 110 M, ns:", markdown(head, compared)]
    names = [*steps["H200"][0][0]]
    lines = [[name, *(span(*both(kernels, name)) for kernels, _ in steps.values())] for name in names]
    lines += [[f"compiled reference: {name}", *(span(*both(other, name)) for _, other in steps.values())]
              for name in ("layer", "step")]
    lines.append(["tokens per second, thousands, kernels",
                  *(span(*(1e6 / x for x in both(kernels, "step")), ".0f") for kernels, _ in steps.values())])
    lines.append(["compiled reference", *(span(*(1e6 / x for x in both(other, "step")), ".0f")
                                          for _, other in steps.values())])
    for title, kernels in (("500 M, kernels", True), ("compiled reference", False)):
        speeds = [[1e6 / step_ns(large, device.tokens // 4, device, programs, each, kernels)["step"]
                   for each in (BEST, WORST)] for device in DEVICES]
        lines.append([title, *(span(*speed, ".0f") for speed in speeds)])
    parts += ["A training step, 110 M; of 500 M the tokens per second, in micro-batches of a quarter, with the registers "
              "of chunks of 256:", markdown(["ns", *steps], lines)]
    head = ["kernel", "programs", "at once on an SM", "waves", "KB", "MFLOP", "ns", "waits for, at best; at worst"]
    parts += [folded(f"The launches of a layer, {device.name}", markdown(head, launch_lines(config, device, programs)))
              for device in DEVICES]
    ours, reference = steps["H200"]
    copy = DEVICES[1].copy
    shares = [sorted(100 * least / copy / x for x in both(ours, name))
              for name, least in zip(ATTENTION, LEAST_KB, strict=True)]
    ratio = [both(reference, "step")[0] / both(ours, "step")[1], both(reference, "step")[1] / both(ours, "step")[0]]
    goals = [["forward, share of a copy's rate", "55%, aim 80%", span(*shares[0], ".0f") + "%"],
             ["backward, share of a copy's rate", "45%, aim 65%", span(*shares[1], ".0f") + "%"],
             ["tokens per second, 110 M", "585,000, aim 650,000",
              span(*(round(1e6 / x) * 1000 for x in both(ours, "step")), ",")],
             ["over the compiled references, a step", "1.15, aim 1.35", span(*ratio, ".2f")]]
    parts += ["Goals, for an H200:", markdown(["what", "goal", "predicted"], goals)]
    fields = ["n_sms", "ghz", "copy", "cache", "peak", "shared", "warps", "issue", "matmul", "product", "fixed"]
    what = ["multiprocessors", "GHz", "TB/s of a copy", "TB/s of the second-level cache", "TFLOP/s", "KiB shared", "warps",
            "instructions of warps in a cycle", "cuBLAS, share of TFLOP/s", "products in kernels, share",
            "columns' worth that an instruction costs besides"]
    shown = [[title, *(span(*x) if isinstance(x := getattr(device, field), tuple) else f"{x:g}" for device in DEVICES)]
             for title, field in zip(what, fields, strict=True)]
    constants = [[f"`{name}`", what, f"{best:g}", f"{worst:g}"] for name, (best, worst, what) in ASSUMED.items()]
    parts.append(folded("The constants", markdown(["of a device", *steps], shown) + "\n\n"
                        + markdown(["assumed", "what", "at best", "at worst"], constants)))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long FLASH's kernels and a training step should take: predictions.")
    parser.add_argument("--resources", type=Path, default=ROOT / "docs" / "tuning.md",
                        help="the page that has the table of tools/kernel_resources.py")
    parser.add_argument("--into", type=Path, help="write the predictions into this page")
    given = parser.parse_args()
    page = given.into.read_text(encoding="utf-8") if given.into else ""
    if given.into and not PLACE.search(page):
        sys.exit(f"error: no place for the tables: {given.into}; add <!-- times: begin -->, <!-- times: end -->")
    text = section(programs_of(given.resources.read_text(encoding="utf-8")))
    if given.into:
        given.into.write_text(PLACE.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
