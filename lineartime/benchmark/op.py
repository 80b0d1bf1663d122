"""Forward and backward of one op at the size a model gives it: every implementation beside its PyTorch reference.

An implementation is a function of tensors and of nothing else; all of an op's take the same. The first of them is the
reference, against which outputs and gradients are checked in float64. An op that knows the bytes it must move has
forward and backward timed apart too, beside a copy: memory is what such an op waits for.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lineartime import ops
from lineartime.benchmark import Row, measure
from lineartime.benchmark.measure import OnRows, Progress, Stopwatch, ignore
from lineartime.benchmark.peers import attention_backend, softmax_attention
from lineartime.config import ModelConfig, to_dict
from lineartime.ops import reference
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import rotary
from lineartime.settings import require, require_name

LIMITS = {"float32": 1e-4, "bfloat16": 0.06}
"""Largest relative error of the output and of any gradient that is let pass, against the reference in float64."""

KERNEL = "triton"
"""What an implementation is called that runs on a GPU only."""

Inputs = dict[str, Tensor]
Implementation = Callable[..., Tensor | tuple[Tensor, ...]]
Settings = dict[str, str]
"""What an op takes of a model besides tensors: the field of `ModelConfig` by the op's keyword."""


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


def side_by_side(settings: Settings, **functions: Implementation) -> Callable[[ModelConfig], dict[str, Implementation]]:
    """Functions by name, called with an op's tensors in their order and a model's settings; behind "reference" the same
    compiled."""
    def made(config: ModelConfig) -> dict[str, Implementation]:
        given = {keyword: getattr(config, field) for keyword, field in settings.items()}

        def with_settings(function: Implementation) -> Implementation:
            return lambda **inputs: function(*inputs.values(), **given)

        found = {name: with_settings(function) for name, function in functions.items()}
        if "reference" in found:
            found = {"reference": found["reference"], "compiled": compiled(found["reference"]), **found}
        return found
    return made


def compiled(function: Implementation) -> Implementation:
    """A function that is compiled at its first call."""
    once = functools.cache(lambda: torch.compile(function))
    return lambda **inputs: once()(**inputs)


def in_kernels(module: str, name: str) -> Implementation:
    """An op of `lineartime.ops` in kernels, imported at its first call: Triton is not everywhere."""
    def kernel(*tensors: Tensor, **settings: Any) -> Tensor | tuple[Tensor, ...]:
        return getattr(importlib.import_module(f"lineartime.ops.{module}"), name)(*tensors, **settings)
    return kernel


def chunked_inputs(config: ModelConfig, n_rows: int, names: Sequence[str]) -> Inputs:
    """q, k `[B, G, C, S]` and v `[B, G, C, E]`, a model without chunks having one; and w, the bias of positions in a
    chunk."""
    c = config.chunk_size or config.context
    shape = (n_rows, max(config.context // c, 1), c)
    return {name: torch.randn(2 * c - 1) * 0.02 if name == "w" else
            torch.randn(*shape, config.v_width if name == "v" else config.qk_width) for name in names}


def head_inputs(n_tokens: int, vocab_size: int, d_model: int) -> Inputs:
    """Of the head and the loss: logits are of about 1."""
    return {"x": torch.randn(n_tokens, d_model), "weight": torch.randn(vocab_size, d_model) / d_model**0.5,
            "bias": torch.randn(vocab_size), "targets": torch.randint(vocab_size, (n_tokens,))}


def plain(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """The loss with all logits in memory."""
    return F.cross_entropy(at_least_float32(F.linear(x_ND, weight_VD, bias_V)), targets_N, reduction="none")


def row_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    """q, k, v `[B, T, H, K]` of softmax attention."""
    return {name: torch.randn(n_rows, config.context, config.n_heads, config.qk_width) for name in "qkv"}


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


CAUSAL = {"causal": "causal"}
SCALED = {"scale_len": "scale_len", **CAUSAL}
PARAMETERS = ("gamma", "beta", "sin", "cos", "w")
OPS: dict[str, Op] = {
    "gated_chunk_attention": Op(gated_inputs, side_by_side(
        {"chunk_size": "scale_len", **CAUSAL}, reference=reference.gated_chunk_attention,
        triton=in_kernels("mixed_chunk", "gated_chunk_attention")),
        PARAMETERS, ("sin", "cos"), bytes_of_gated_chunks),
    "gated_quadratic_attention": Op(gated_inputs, side_by_side(
        SCALED, reference=reference.gated_quadratic_attention,
        triton=in_kernels("quadratic", "gated_quadratic_attention")),
        PARAMETERS, ("sin", "cos"), bytes_of_gated_row),
    "add_norm": Op(norm_inputs, side_by_side(
        {}, reference=reference.add_norm, triton=in_kernels("norm", "add_norm")),
        ("weight", "bias"), (), bytes_of_add_norm),
    "mixed_chunk_attention": Op(
        lambda config, n: chunked_inputs(config, n, ("q_quad", "k_quad", "q_lin", "k_lin", "v", "w")),
        side_by_side(SCALED, reference=ops.mixed_chunk_attention)),
    "quadratic_attention": Op(lambda config, n: chunked_inputs(config, n, "qkvw"),
                              side_by_side(SCALED, reference=ops.quadratic_attention)),
    "linear_attention": Op(lambda config, n: chunked_inputs(config, n, "qkv"),
                           side_by_side(CAUSAL, reference=reference.linear_attention)),
    "softmax_attention": Op(row_inputs, side_by_side(CAUSAL, unfused=softmax_attention, fused=fused_softmax)),
    "linear_cross_entropy": Op(
        lambda config, n: head_inputs(n * config.context, config.vocab_size, config.d_model), lambda config: {
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
    peaks = {precision: measure.peak_flops(precision, threads, device) for precision in precisions}
    cases = [(f"context {config.context:,}, {precision}", {
        "name": name, "config": to_dict(config), "n_rows": max(tokens // config.context, 1), "precision": precision,
        "only": list(only), "repeats": repeats, "threads": threads, "device": device, "seed": seed})
        for precision in precisions for config in configs]

    def row_of(case: Row, implementation: str, found: Row) -> Row:
        context, n_rows, precision = case["config"]["context"], case["n_rows"], case["precision"]
        n_tokens, flops = n_rows * context, found.pop("flops")
        return {"benchmark": "op", "cell": None, "op": name, "model": name, "variant": implementation,
                "label": f"{name}:{implementation}", "config": case["config"], "n_parameters": 0,
                "context_tokens": context, "batch_size": n_rows, "tokens_per_step": n_tokens, "dtype": precision,
                "device": device, "threads": threads, "unit": "call", "implementation": implementation, **found,
                **measure.utilisation(found, n_tokens, flops / n_tokens, peaks[precision]), "warm_up": 2,
                "repeats": repeats}

    return measure.measured_side_by_side("op", name, cases, row_of, progress, on_rows)


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
        found: dict[str, Row] = {}
        for each in chosen:
            ours = value_and_gradients(every[each], inputs, cotangents)
            checked = measure.compare(each, ours, expected, LIMITS[precision])
            del ours
            memory = measure.peak_of(functools.partial(value_and_gradients, every[each], inputs, cotangents), on)
            found[each] = {"check": checked, "flops": counter.get_total_flops(), **memory}
        del expected
        watches = times_in_turn({each: every[each] for each in chosen}, inputs, cotangents, repeats, on)
    answer: Row = {"settings": settings, "found": found}
    for each, (both, *_) in watches.items():
        found[each] |= measure.spreads(both.times)
    if op.least_bytes:
        rate, n_tokens = copy_rate(on), n_rows * fields.context
        least = op.least_bytes(fields, getattr(torch, precision).itemsize)
        for each, (_, *parts) in watches.items():
            for (part, n_bytes), watch in zip(least.items(), parts, strict=True):
                ms = measure.spread(watch.compared())
                found[each][part] = {"ms": ms, "least_bytes_per_token": n_bytes,
                                     "copy_share": n_bytes * n_tokens * 1e3 / ms["median"] / rate}
        answer["copy_bytes_per_s"] = rate
    yield answer


def times_in_turn(functions: Mapping[str, Implementation], inputs: Inputs, cotangents: Sequence[Tensor], repeats: int,
                  device: torch.device) -> dict[str, tuple[Stopwatch, ...]]:
    """By name the times of forward and backward together, of forward and of backward."""
    watches = {name: tuple(Stopwatch(device) for _ in range(3)) for name in functions}
    for _, name in measure.in_turn([*functions], range(repeats)):
        both, forward, backward = watches[name]
        both.wait()
        begun = both.mark()
        made = outputs(functions[name], inputs)
        between = both.mark()
        gradients(made, inputs, cotangents)
        ended = both.mark(wait=True)
        both.add([begun, ended])
        forward.add([begun, between])
        backward.add([between, ended])
        del made
    return watches


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy in memory reads and writes: the best of seven."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / measure.best_ms(lambda: target.copy_(source), device)


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
    measure.print_runs(f"{rows[0]['op']}, forward and backward", {
        "implementation": "{implementation}", "type": "{dtype}", "rows": "{batch_size}",
        "context": "{context_tokens:,}", "ms": "{ms[median]:,.2f}", "quartiles": "{ms[q1]:,.2f} to {ms[q3]:,.2f}",
        "memory MiB": "{above_import_mib:,.1f}", "GFLOP/s": "{gflops:,.0f}", "error": "{check[error]:.1g}"},
        [row | {"gflops": row["flops_per_token"] * row["tokens_per_s"] / 1e9} for row in rows])
    if "forward" in rows[0]:
        rate = f"{rows[0]['copy_bytes_per_s'] / 1e9:,.0f} GB/s of a copy here"
        measure.print_table(f"Of the bytes that must be moved, at {rate}:", {
            "implementation": "{implementation}", "context": "{context_tokens:,}",
            "forward ms": "{forward[ms][median]:,.2f}", "of a copy's rate": "{forward[copy_share]:.0%}",
            "backward ms": "{backward[ms][median]:,.2f}", "of it": "{backward[copy_share]:.0%}"}, rows)
