"""Forward and backward of one op at the size a model gives it: every implementation beside its PyTorch reference.

An implementation is a function of tensors and of nothing else; all of an op's take the same. The first of them is the
reference, against which outputs and gradients are checked in float64. An op that knows the bytes it must move has
forward and backward timed apart too, beside a copy: memory is what such an op waits for.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lineartime import ops
from lineartime.benchmark import Row, measure
from lineartime.benchmark.loss import plain
from lineartime.benchmark.measure import OnRows, Progress, Stopwatch, ignore
from lineartime.benchmark.peers import attention_backend, softmax_attention
from lineartime.config import ModelConfig, to_dict
from lineartime.ops import reference
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.reference import rotary
from lineartime.settings import require, require_name

LIMITS = {"float32": 1e-4, "bfloat16": 0.06}
"""Largest relative error of the output and of any gradient that is let pass, against the reference in float64."""

KERNEL = "triton"
"""What an implementation is called that runs on a GPU only."""

Inputs = dict[str, Tensor]
Implementation = Callable[..., Tensor | tuple[Tensor, ...]]
Settings = Callable[[ModelConfig], dict[str, Any]]
"""What an op takes of a model besides tensors."""


@dataclass(frozen=True)
class Op:
    """One op as a model has it."""

    inputs: Callable[[ModelConfig, int], Inputs]
    """Its tensors for a model and a number of rows: normal numbers, and integers where it takes integers."""
    implementations: Callable[[ModelConfig], dict[str, Implementation]]
    """By name, the reference first."""
    wide: tuple[str, ...] = ()
    """Inputs that are float32 in a step of bfloat16 too."""
    fixed: tuple[str, ...] = ()
    """Inputs that have no gradient."""
    least_bytes: Callable[[ModelConfig, int], dict[str, float]] | None = None
    """What must be read and written for a token, numbers taking so many bytes: by "forward" and "backward"."""


def chunked_inputs(config: ModelConfig, n_rows: int, names: Sequence[str]) -> Inputs:
    """q, k `[B, G, C, S]` and v `[B, G, C, E]`; a model without chunks has one."""
    c = config.chunk_size or config.context
    shape = (n_rows, max(config.context // c, 1), c)
    return {name: torch.randn(*shape, config.v_width if name == "v" else config.qk_width) for name in names}


def with_bias(made: Inputs) -> Inputs:
    """A position bias for chunks of the length of v's."""
    return {**made, "w": torch.randn(2 * made["v"].shape[2] - 1) * 0.02}


def head_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    n_tokens, d, vocabulary = n_rows * config.context, config.d_model, config.vocab_size
    return {"x": torch.randn(n_tokens, d), "weight": torch.randn(vocabulary, d) * 0.02,
            "bias": torch.randn(vocabulary) * 0.02, "targets": torch.randint(vocabulary, (n_tokens,))}


def row_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    """q, k, v `[B, T, H, K]` of softmax attention."""
    return {name: torch.randn(n_rows, config.context, config.n_heads, config.qk_width) for name in "qkv"}


def side_by_side(settings: Settings, **functions: Implementation) -> Callable[[ModelConfig], dict[str, Implementation]]:
    """Functions by name, called with an op's tensors in their order and a model's settings; behind "reference" the same
    compiled."""
    def made(config: ModelConfig) -> dict[str, Implementation]:
        found: dict[str, Implementation] = {}
        for name, function in functions.items():
            found[name] = with_settings(function, settings(config))
            if name == "reference":
                found["compiled"] = compiled(found[name])
        return found
    return made


def with_settings(function: Implementation, settings: dict[str, Any]) -> Implementation:
    return lambda **inputs: function(*inputs.values(), **settings)


def compiled(function: Implementation) -> Implementation:
    """A function that is compiled at its first call."""
    once = functools.cache(lambda: torch.compile(function))
    return lambda **inputs: once()(**inputs)


def in_kernels(module: str, name: str) -> Implementation:
    """An op of `lineartime.ops` in kernels, imported at its first call: Triton is not everywhere."""
    def kernel(*tensors: Tensor, **settings: Any) -> Tensor | tuple[Tensor, ...]:
        return getattr(importlib.import_module(f"lineartime.ops.{module}"), name)(*tensors, **settings)
    return kernel


def causal(config: ModelConfig) -> dict[str, Any]:
    return {"causal": config.causal}


def scaled(config: ModelConfig) -> dict[str, Any]:
    return {"scale_len": config.scale_len, "causal": config.causal}


def chunked(config: ModelConfig) -> dict[str, Any]:
    return {"chunk_size": config.scale_len, "causal": config.causal}


def fused_softmax(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, *, causal: bool) -> Tensor:
    q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=causal).transpose(1, 2)


def gated_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    """What a GAU layer has between its projections. gamma and beta are larger than in a new layer: their product with z
    must show in the scores."""
    n_heads, n, s = (2, config.context, config.qk_width) if config.chunk_size is None else (
        4, config.chunk_size, config.qk_width)
    sin, cos = rotary(torch.arange(config.context)[None], s, torch.float32)
    return {"uvz": torch.randn(n_rows, config.context, 2 * config.v_width + s), "gamma": torch.randn(n_heads, s),
            "beta": torch.randn(n_heads, s), "sin": sin, "cos": cos, "w": torch.randn(2 * n - 1) * 0.02}


def bytes_of_gated_chunks(config: ModelConfig, size: int) -> dict[str, float]:
    """Of two kernels forward and two backward: chunk states go from the one to the other through memory.

    Forward, v and z become silu(v) and states, then u, silu(v), z and states the output. Backward, u, z and the
    output's gradient become the states' gradient; then all of these, silu(v) and states the gradients of u, v and z."""
    e, s = config.v_width, config.qk_width
    states = s * e / config.scale_len * (1 if config.causal else 2)
    return {"forward": size * ((2 * e + s + states) + (2 * e + s + states + e)),
            "backward": size * ((2 * e + s + states) + (3 * e + s + 2 * states) + (2 * e + s))}


def bytes_of_gated_row(config: ModelConfig, size: int) -> dict[str, float]:
    """Inputs read once and outputs written once: beside what is multiplied it is little."""
    e, s = config.v_width, config.qk_width
    return {"forward": size * (3 * e + s), "backward": size * (2 * (2 * e + s) + e)}


def norm_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    d = config.d_model
    return {"x": torch.randn(n_rows * config.context, d), "delta": torch.randn(n_rows * config.context, d),
            "weight": torch.randn(d), "bias": torch.randn(d)}


def bytes_of_add_norm(config: ModelConfig, size: int) -> dict[str, float]:
    """Two tensors read and two written, and back three read and one written."""
    return {"forward": 4 * size * config.d_model, "backward": 4 * size * config.d_model}


PARAMETERS = ("gamma", "beta", "sin", "cos", "w")
OPS: dict[str, Op] = {
    "gated_chunk_attention": Op(gated_inputs, side_by_side(
        chunked, reference=reference.gated_chunk_attention, triton=in_kernels("mixed_chunk", "gated_chunk_attention")),
        PARAMETERS, ("sin", "cos"), bytes_of_gated_chunks),
    "gated_quadratic_attention": Op(gated_inputs, side_by_side(
        scaled, reference=reference.gated_quadratic_attention,
        triton=in_kernels("quadratic", "gated_quadratic_attention")),
        PARAMETERS, ("sin", "cos"), bytes_of_gated_row),
    "add_norm": Op(norm_inputs, side_by_side(
        lambda config: {}, reference=reference.add_norm, triton=in_kernels("norm", "add_norm")),
        ("weight", "bias"), (), bytes_of_add_norm),
    "mixed_chunk_attention": Op(lambda config, n: with_bias(chunked_inputs(
        config, n, ("q_quad", "k_quad", "q_lin", "k_lin", "v"))), side_by_side(
        scaled, reference=ops.mixed_chunk_attention)),
    "quadratic_attention": Op(lambda config, n: with_bias(chunked_inputs(config, n, "qkv")), side_by_side(
        scaled, reference=ops.quadratic_attention)),
    "linear_attention": Op(lambda config, n: chunked_inputs(config, n, "qkv"), side_by_side(
        causal, reference=reference.linear_attention)),
    "softmax_attention": Op(row_inputs, side_by_side(causal, unfused=softmax_attention, fused=fused_softmax)),
    "linear_cross_entropy": Op(head_inputs, lambda config: {
        "plain": lambda **inputs: plain(*inputs.values()).mean(),
        "without logits": lambda **inputs: linear_cross_entropy(*inputs.values()).mean()}),
}

MODEL_OF = {"gated_quadratic_attention": "flash-quad", "quadratic_attention": "flash-quad",
            "softmax_attention": "transformer++"}
"""The preset whose sizes an op has, where it is not FLASH."""


def benchmark_op(name: str, configs: Sequence[ModelConfig], *, tokens: int = 8192,
                 precisions: Sequence[str] = ("float32",), only: Sequence[str] = (), repeats: int = 10,
                 threads: int = 1, device: str = "cpu", seed: int = 0,
                 progress: Progress = ignore, on_rows: OnRows = ignore) -> list[Row]:
    """Time and memory of forward and backward of one op; a row per implementation, model and type.

    The op has the sizes that a model gives it in a step of `tokens` (one row where the context is longer). A model and
    type is one process, in which the implementations take turns. Before a time counts, the output and every gradient
    have been compared with those of the reference in float64. only: the implementations wanted, by default all that
    the device can run. Raises UsageError for an unknown op, implementation or type and for a kernel on a processor,
    ResourceError where the process dies."""
    require_name("op", name, OPS)
    require(KERNEL not in only or device == "cuda", "kernels run on a GPU", f"--only {KERNEL} on {device}",
            "leave it out, or take --device cuda")
    measure.require_positive(models=len(configs), repeats=repeats, threads=threads, tokens=tokens)
    for precision in precisions:
        require_name("precision", precision, LIMITS)
    rows = []
    for precision in precisions:
        peak = measure.peak_flops(precision, threads, device)
        for config in configs:
            progress(f"{name}, context {config.context:,}, {precision}")
            n_rows = max(tokens // config.context, 1)
            answer = measure.measured_alone("op", {
                "name": name, "config": to_dict(config), "n_rows": n_rows, "precision": precision, "only": list(only),
                "repeats": repeats, "threads": threads, "device": device, "seed": seed},
                f"{name} failed", f"context {config.context:,}, {precision}")
            found, shared = answer.pop("found"), {**measure.facts_of_run(), **answer}
            made = [op_row(name, config, n_rows, precision, each, peak, threads, device, repeats) | shared
                    for each in found]
            on_rows(made)
            rows += made
    return rows


def op_row(name: str, config: ModelConfig, n_rows: int, precision: str, found: Row, peak: Row, threads: int,
           device: str, repeats: int) -> Row:
    """The row of one implementation, without what it shares with others."""
    n_tokens, ms = n_rows * config.context, measure.compared_ms(found)["median"]
    flops = found.pop("flops") / n_tokens
    return {"benchmark": "op", "cell": None, "op": name, "model": name, "variant": found["implementation"],
            "label": f"{name}:{found['implementation']}", "config": to_dict(config), "n_parameters": 0,
            "context_tokens": config.context, "batch_size": n_rows, "tokens_per_step": n_tokens, "dtype": precision,
            "device": device, "threads": threads, "unit": "call", **found, "tokens_per_s": n_tokens * 1e3 / ms,
            "flops_per_token": flops, **peak, "warm_up": 2, "repeats": repeats,
            "mfu": flops * n_tokens * 1e3 / ms / peak["peak_flops"] if peak["peak_flops"] else None}


def measure_op(name: str, config: Row, n_rows: int, precision: str, only: Sequence[str], repeats: int, threads: int,
               device: str, seed: int) -> Iterator[Row]:
    """One process's part of `benchmark_op`."""
    on, settings = measure.set_up(threads, device, seed)
    fields, op = ModelConfig(**config), OPS[name]
    every = op.implementations(fields)
    for each in only:
        require_name("implementation", each, every)
    first = next(iter(every.values()))
    chosen = list(only) or [each for each in every if each != KERNEL or on.type == "cuda"]
    inputs = typed(op, op.inputs(fields, n_rows), on, getattr(torch, precision))
    with attention_backend(on):
        # Of the rounded inputs, so that what is measured is the op's own error.
        exact = typed(op, inputs, on, torch.float64)
        cotangents = [torch.randn_like(out) for out in outputs(first, exact)]
        expected = value_and_gradients(first, exact, cotangents)
        with FlopCounterMode(display=False) as counter:
            value_and_gradients(first, inputs, cotangents)
        del exact
        cotangents = [x.to(out.dtype) for x, out in zip(cotangents, outputs(first, inputs), strict=True)]
        found = []
        for label in chosen:
            ours = value_and_gradients(every[label], inputs, cotangents)
            check = measure.compare(label, ours, expected, LIMITS[precision])
            del ours
            peak, above = measure.peak_of(functools.partial(value_and_gradients, every[label], inputs, cotangents), on)
            found.append({"implementation": label, "check": check, "flops": counter.get_total_flops(),
                          "peak_mib": peak / 2**20, "above_import_mib": above / 2**20})
        del expected
        watches = {label: {part: Stopwatch(on) for part in ("both", "forward", "backward")} for label in chosen}
        for _, label in measure.in_turn(chosen, range(repeats)):
            with watches[label]["both"].running():
                value_and_gradients(every[label], inputs, cotangents)
            if op.least_bytes:
                with watches[label]["forward"].running():
                    made = outputs(every[label], inputs)
                with watches[label]["backward"].running():
                    gradients(made, inputs, cotangents)
                del made
    answer: Row = {"settings": settings, "found": [row | measure.spreads(watches[row["implementation"]]["both"].times)
                                                   for row in found]}
    if op.least_bytes:
        rate, n_tokens = copy_rate(on), n_rows * fields.context
        for part, n_bytes in op.least_bytes(fields, getattr(torch, precision).itemsize).items():
            for row in answer["found"]:
                ms = measure.spread(watches[row["implementation"]][part].compared())
                row[part] = {"ms": ms, "least_bytes_per_token": n_bytes,
                             "copy_share": n_bytes * n_tokens * 1e3 / ms["median"] / rate}
        answer["copy_bytes_per_s"] = rate
    yield answer


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy in memory reads and writes: the best of seven."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    target, watch = torch.empty_like(source), Stopwatch(device)
    for _ in range(8):
        with watch.running():
            target.copy_(source)
    return 2e3 * source.nbytes / min(watch.compared()[1:])


def typed(op: Op, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Copies on a device, numbers in a type (or float32 if that is wider) and wanting a gradient, but for integers and
    what the op says."""
    def copied(key: str, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.to(device)
        kind = torch.promote_types(dtype, torch.float32) if key in op.wide else dtype
        return x.detach().to(device, kind).requires_grad_(key not in op.fixed)

    return {key: copied(key, x) for key, x in inputs.items()}


def outputs(function: Implementation, inputs: Inputs) -> tuple[Tensor, ...]:
    out = function(**inputs)
    return (out,) if isinstance(out, Tensor) else out


def gradients(outs: Sequence[Tensor], inputs: Inputs, cotangents: Sequence[Tensor]) -> Inputs:
    """Of the sum of the outputs' products with `cotangents`, by every input that has one."""
    wanted = {key: x for key, x in inputs.items() if x.requires_grad}
    given = [x.to(out.dtype) for x, out in zip(cotangents, outs, strict=True)]
    return dict(zip(wanted, torch.autograd.grad(outs, list(wanted.values()), given), strict=True))


def value_and_gradients(function: Implementation, inputs: Inputs, cotangents: Sequence[Tensor]) -> Inputs:
    """The outputs, and their `gradients`."""
    outs = outputs(function, inputs)
    found = {f"gradient of {key}": x for key, x in gradients(outs, inputs, cotangents).items()}
    return {"output" if i == 0 else f"output {i + 1}": out.detach() for i, out in enumerate(outs)} | found


def print_op(rows: Sequence[Row]) -> None:
    """Print `benchmark_op`'s rows as a table."""
    measure.print_table(measure.heading(f"{rows[0]['op']}, forward and backward", rows[0]),
                ["implementation", "rows", "context", "ms", "quartiles", "memory MiB", "GFLOP/s", "error"],
                ([row["implementation"], str(row["batch_size"]), f"{row['context_tokens']:,}",
                  *measure.quartiles(row, ",.2f"), f"{row['above_import_mib']:,.1f}",
                  f"{row['flops_per_token'] * row['tokens_per_s'] / 1e9:,.0f}", f"{row['check']['error']:.1g}"]
                 for row in rows), width=20)
    if "forward" in rows[0]:
        rate = f"{rows[0]['copy_bytes_per_s'] / 1e9:,.0f} GB/s of a copy here"
        measure.print_table(f"Of the bytes that must be moved, at {rate}:",
                    ["implementation", "context", "forward ms", "share", "backward ms", "share"],
                    ([row["implementation"], f"{row['context_tokens']:,}", *(
                        text for part in ("forward", "backward")
                        for text in (f"{row[part]['ms']['median']:,.2f}", f"{row[part]['copy_share']:.0%}"))]
                     for row in rows), width=20)
