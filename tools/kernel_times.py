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
from kernel_devices import (  # noqa: E402
    BEST,
    DEVICES,
    REGISTERS,
    SCHEDULERS,
    SPECIAL,
    THREADS,
    WAITS_OF_PASS,
    WORST,
    Assumed,
    Device,
    constants_table,
)

from lineartime import ModelConfig, model_config  # noqa: E402
from lineartime.benchmark.markdown import folded, markdown  # noqa: E402

PLACE = re.compile(r"(<!-- times: begin -->\n).*?(<!-- times: end -->)", re.DOTALL)
BATCH = 2**18


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
    for kernel, options, arch, warps, stages, registers, shared, *counted in line.findall(page):
        program = Program(int(warps), int(stages), int(registers), float(shared), *map(int, counted))
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
    return assumed["launch"] + max(n * max(memory, products) / 1e6, WAITS_OF_PASS * assumed["latency"])


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


def span(best: float, worst: float) -> str:
    """A range, the smaller number first."""
    low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in sorted((best, worst)))
    return low if low == high else f"{low} to {high}"


Range = tuple[float, float]
"""At best and at worst."""


def total(ranges: Sequence[dict[str, float]], *names: str) -> Range:
    """The sums of some parts."""
    best, worst = (sum(each[name] for name in names) for each in ranges)
    return best, worst


def verdict(kernels: Range, reference: Range) -> str:
    """Which of two times is shorter by the whole range, "kernels" or "reference"; "open" if neither is."""
    return "kernels" if kernels[1] < reference[0] else "reference" if reference[1] < kernels[0] else "open"


ATTENTION = ("attention, forward", "attention, backward")
CALL = (*ATTENTION, "small operations")
LEAST_KB = (18.9, 26.9)
"""What must be moved of a token at 110 M, forward and backward: docs/tuning.md."""
CALLS = (2**11, 2**12, 2**13, 2**14, 2**16)
"""Tokens of a call of mixed chunk attention."""


def attention_ns(config: ModelConfig, n: int, device: Device, programs: Programs) -> list[Range]:
    """A call of mixed chunk attention of n tokens, forward and backward: by the kernels, by the compiled reference."""
    return [total([layer_ns(config, n, device, programs, each, kernels) for each in (BEST, WORST)], *CALL)
            for kernels in (True, False)]


def by_tokens(config: ModelConfig, programs: Programs) -> str:
    """A table of `attention_ns` by the tokens of a call; what is shorter by the whole range is bold."""
    lines = []
    for device in DEVICES:
        for kernels in (True, False):
            line = [device.name if kernels else "", ("kernels", "reference")[not kernels]]
            for n in CALLS:
                pair = attention_ns(config, n, device, programs)
                wins = verdict(*pair) == line[1]
                line.append(f"**{span(*pair[not kernels])}**" if wins else span(*pair[not kernels]))
            lines.append(line)
    return markdown(["GPU", "ns", *(f"{n:,}" for n in CALLS)], lines)


def launches_table(config: ModelConfig, device: Device, programs: Programs) -> str:
    """A line for each launch of a layer, forward, backward and norm."""
    n, lines = device.tokens, []
    for launch in [*counts.forward(config, n, device.kind), *counts.backward(config, n, device.kind),
                   *counts.norms(config, n)]:
        program = program_of(launch, programs, device)
        (best, waits), (worst, waits_worst) = (launch_us(launch, program, device, each) for each in (BEST, WORST))
        at_once, (name, _, options) = occupancy(device, program), launch.kernel.partition(" ")
        lines.append([f"`{name}` {options}".strip() + f", round {launch.round + 1}" * (launch.round > 0),
                      f"{launch.programs:,}", str(at_once),
                      f"{launch.programs * launch.busy / at_once / device.n_sms:.1f}", f"{launch.dram / n / 1e3:.1f}",
                      f"{launch.flop / n / 1e6:.2f}", span(best * 1e3 / n, worst * 1e3 / n),
                      waits if waits == waits_worst else f"{waits}; {waits_worst}"])
    return markdown(["kernel", "programs", "at once on an SM", "waves", "KB", "MFLOP", "ns", "bound by"], lines)


def section(programs: Programs) -> str:
    """The predictions, as docs/tuning.md has them."""
    config, large = model_config("flash"), model_config("flash", "pg19")
    steps = [[[step_ns(config, device.tokens, device, programs, each, kernels) for each in (BEST, WORST)]
              for kernels in (True, False)] for device in DEVICES]
    head = ["ns", *(f"{device.name} ({device.kind})" for device in DEVICES)]
    lines = [[name, *(span(*total(kernels, name)) for kernels, _ in steps)] for name in steps[0][0][0]]
    lines += [[f"compiled reference: {name}", *(span(*total(other, name)) for _, other in steps)]
              for name in (*ATTENTION, "layer", "step")]
    for i, title in enumerate(("tokens per second, thousands: kernels", "compiled reference")):
        lines.append([title, *(span(*(1e6 / x for x in total(sides[i], "step"))) for sides in steps)])
    for title, kernels in (("500 M: kernels", True), ("compiled reference", False)):
        lines.append([title, *(span(*(1e6 / step_ns(large, device.tokens // 4, device, programs, each, kernels)["step"]
                                      for each in (BEST, WORST))) for device in DEVICES)])
    at = [device.name for device in DEVICES].index("H200")
    ours, reference = steps[at]
    rates = [span(*(100 * least / DEVICES[at].copy / x for x in total(ours, name)))
             for name, least in zip(ATTENTION, LEAST_KB, strict=True)]
    (best, worst), (other_best, other_worst) = total(ours, "step"), total(reference, "step")
    goals = [["forward, share of a copy's rate", "55%, aim 80%", f"{rates[0]}%"],
             ["backward, share of a copy's rate", "45%, aim 65%", f"{rates[1]}%"],
             ["a step, tokens per second, 110 M", "585,000, aim 650,000", span(1e9 // best, 1e9 // worst)],
             ["over the compiled reference, a step", "1.15, aim 1.35", span(other_best / worst, other_worst / best)]]
    return "\n\n".join([
        "**Predictions. No GPU has run any of this.** A range is from the constants that favour speed to those that do "
        "not. FLASH in bfloat16, documents, rows of 2,048 tokens; nanoseconds per token, and in a layer per layer.",
        "Of an H200:", markdown(["what", "goal", "predicted"], goals),
        "Mixed chunk attention, forward and backward with its small operations, 110 M, by the tokens of a call; the "
        "reference is compiled. Bold: shorter by the whole range.", by_tokens(config, programs),
        "The same of 500 M, with the registers of chunks of 256:", by_tokens(large, programs),
        f"A training step of {BATCH:,} tokens, 110 M, in micro-batches of {DEVICES[0].tokens:,}, on the RTX 4090 of "
        f"{DEVICES[-1].tokens:,}; of 500 M the tokens per second, with a quarter in a micro-batch:",
        markdown(head, lines),
        *(folded(f"The launches of a layer, {device.name}", launches_table(config, device, programs))
          for device in DEVICES), folded("The constants", constants_table())])


def main() -> None:
    parser = argparse.ArgumentParser(description="How long FLASH's kernels and a step should take: predictions.")
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
