"""Forward and backward of one op at the size a model gives it: every implementation beside its definition.

An implementation is a function of tensors and of nothing else; all of an op's take the same. The first of them is the
definition, which is also what outputs and gradients are checked against, in float64.
"""

import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lineartime import ops
from lineartime.benchmark.loss import plain
from lineartime.benchmark.measure import (
    Row,
    Stopwatch,
    compare,
    in_own_process,
    peak_flops,
    peak_of,
    provenance,
    what_is_timed,
)
from lineartime.benchmark.peers import attention_backend, softmax_attention
from lineartime.config import ModelConfig, to_dict
from lineartime.errors import ResourceError
from lineartime.info import table
from lineartime.machine import choose_settings
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.reference import linear_attention
from lineartime.settings import require, require_name

LIMITS = {"float32": 1e-4, "bfloat16": 0.06}
"""Largest relative error of the output and of any gradient that is let pass, against the definition in float64."""

Inputs = dict[str, Tensor]
Implementation = Callable[..., Tensor]


@dataclass(frozen=True)
class Op:
    """One op as a model has it."""

    inputs: Callable[[ModelConfig, int], Inputs]
    """Its tensors for a model and a number of rows: normal numbers, and integers where it takes integers."""
    implementations: Callable[[ModelConfig], dict[str, Implementation]]
    """By name, the definition first."""


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


def and_compiled(definition: Implementation) -> dict[str, Implementation]:
    """A definition, and the same compiled at its first call."""
    compiled = functools.cache(lambda: torch.compile(definition))
    return {"reference": definition, "compiled": lambda **inputs: compiled()(**inputs)}


def mixed_chunk(config: ModelConfig) -> dict[str, Implementation]:
    def definition(q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return ops.mixed_chunk_attention(q_quad, k_quad, q_lin, k_lin, v, w, scale_len=config.scale_len,
                                         causal=config.causal)

    return and_compiled(definition)


def quadratic(config: ModelConfig) -> dict[str, Implementation]:
    def definition(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return ops.quadratic_attention(q, k, v, w, scale_len=config.scale_len, causal=config.causal)

    return and_compiled(definition)


def linear(config: ModelConfig) -> dict[str, Implementation]:
    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, causal=config.causal)

    return and_compiled(definition)


def softmax(config: ModelConfig) -> dict[str, Implementation]:
    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=config.causal).transpose(1, 2)

    return {"unfused": functools.partial(softmax_attention, causal=config.causal), "fused": fused}


def cross_entropy(config: ModelConfig) -> dict[str, Implementation]:
    def with_logits(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        return plain(x, weight, bias, targets).mean()

    def by_chunks(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, bias, targets).mean()

    return {"plain": with_logits, "without logits": by_chunks}


OPS: dict[str, Op] = {
    "mixed_chunk_attention": Op(lambda config, n: with_bias(chunked_inputs(
        config, n, ("q_quad", "k_quad", "q_lin", "k_lin", "v"))), mixed_chunk),
    "quadratic_attention": Op(lambda config, n: with_bias(chunked_inputs(config, n, "qkv")), quadratic),
    "linear_attention": Op(lambda config, n: chunked_inputs(config, n, "qkv"), linear),
    "softmax_attention": Op(row_inputs, softmax),
    "linear_cross_entropy": Op(head_inputs, cross_entropy),
}

MODEL_OF = {"quadratic_attention": "flash-quad", "softmax_attention": "transformer++"}
"""The preset whose sizes an op has, where it is not FLASH."""


def benchmark_op(name: str, configs: Sequence[ModelConfig], *, tokens: int = 8192,
                 precisions: Sequence[str] = ("float32",), only: Sequence[str] = (), repeats: int = 10,
                 threads: int = 1, device: str = "cpu", seed: int = 0,
                 progress: Callable[[str], None] = lambda line: None,
                 on_rows: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
    """Time and memory of forward and backward of one op; a row per implementation, model and type.

    The op has the sizes that a model gives it in a step of `tokens` (one row where the context is longer). A model and
    type is one process, in which the implementations take turns. Before a time counts, the output and every gradient
    have been compared with those of the definition in float64. only: the implementations wanted, all by default. Raises
    UsageError for an unknown op, implementation or type, ResourceError where the process dies."""
    require_name("op", name, OPS)
    require(bool(configs) and min(repeats, threads, tokens) >= 1, "nothing to measure",
            f"{len(configs)} models, repeats = {repeats}, threads = {threads}, tokens = {tokens}")
    for precision in precisions:
        require_name("precision", precision, LIMITS)
    rows = []
    for precision in precisions:
        peak = peak_flops(precision, threads, device)
        for config in configs:
            progress(f"{name}, context {config.context:,}, {precision}")
            n_rows = max(tokens // config.context, 1)
            answer = in_own_process("op", {
                "name": name, "config": to_dict(config), "n_rows": n_rows, "precision": precision, "only": list(only),
                "repeats": repeats, "threads": threads, "device": device, "seed": seed})
            if "failed" in answer:
                raise ResourceError(f"{name} failed", f"context {config.context:,}, {precision}", answer["failed"])
            shared = {"run": uuid.uuid4().hex[:12], **provenance()}
            made = [op_row(name, config, n_rows, precision, found, peak, threads, device, repeats)
                    | {"settings": answer["settings"]} | shared for found in answer["found"]]
            on_rows(made)
            rows += made
    return rows


def op_row(name: str, config: ModelConfig, n_rows: int, precision: str, found: Row, peak: Row, threads: int,
           device: str, repeats: int) -> Row:
    """The row of one implementation, without what it shares with others."""
    n_tokens, ms = n_rows * config.context, found[f"{found['clock']}_ms"]["median"]
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
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    on, fields, op = torch.device(device), ModelConfig(**config), OPS[name]
    settings, every = choose_settings(on), op.implementations(fields)
    for each in only:
        require_name("implementation", each, every)
    definition = next(iter(every.values()))
    made = op.inputs(fields, n_rows)
    inputs = typed(made, on, getattr(torch, precision))
    with attention_backend(on):
        # Of the rounded inputs, so that what is measured is the op's own error.
        exact = typed(inputs, on, torch.float64)
        cotangent = torch.randn_like(definition(**{key: x.detach() for key, x in exact.items()}))
        expected = value_and_gradients(definition, exact, cotangent)
        with FlopCounterMode(display=False) as counter:
            value_and_gradients(definition, inputs, cotangent)
        del exact
        found = []
        for label, function in ((each, every[each]) for each in only or every):
            check = compare(label, value_and_gradients(function, inputs, cotangent), expected, LIMITS[precision])
            peak, above = peak_of(functools.partial(value_and_gradients, function, inputs, cotangent), on)
            found.append({"implementation": label, "check": check, "flops": counter.get_total_flops(),
                          "peak_mib": peak / 2**20, "above_import_mib": above / 2**20})
        watches = [Stopwatch(on) for _ in found]
        for repeat in range(repeats):
            for i in range(len(found))[:: -1 if repeat % 2 else 1]:
                with watches[i].running():
                    value_and_gradients(every[found[i]["implementation"]], inputs, cotangent)
    yield {"settings": settings, "found": [row | watch.spreads() for row, watch in zip(found, watches, strict=True)]}


def typed(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Copies on a device, numbers in a type and wanting a gradient, integers as they are."""
    return {key: x.detach().to(device, dtype).requires_grad_() if x.is_floating_point() else x.to(device)
            for key, x in inputs.items()}


def value_and_gradients(function: Implementation, inputs: Inputs, cotangent: Tensor) -> Inputs:
    """The output, and the gradient of its product with `cotangent` by every input that has one."""
    out = function(**inputs)
    wanted = {key: x for key, x in inputs.items() if x.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), cotangent.to(out.dtype))
    return {"output": out.detach(), **{f"gradient of {key}": g for key, g in zip(wanted, gradients, strict=True)}}


def print_op(rows: Sequence[Row]) -> None:
    """Print `benchmark_op`'s rows as a table."""
    console, first = Console(highlight=False), rows[0]
    console.width = max(console.width, 120)
    console.print(f"{first['op']}, forward and backward, {what_is_timed(first)}, {first['dtype']}; "
                  f"{first['repeats']} rounds, "
                  f"run {first['run']}", markup=False)
    made = table("implementation", "rows", "context", "ms", "quartiles", "memory MiB", "GFLOP/s", "error", width=20)
    for row in rows:
        times = row[f"{row['clock']}_ms"]
        made.add_row(row["implementation"], str(row["batch_size"]), f"{row['context_tokens']:,}",
                     f"{times['median']:,.2f}", f"{times['q1']:,.2f} to {times['q3']:,.2f}",
                     f"{row['above_import_mib']:,.1f}",
                     f"{row['flops_per_token'] * row['tokens_per_s'] / 1e9:,.0f}", f"{row['check']['error']:.1g}")
    console.print(made)
