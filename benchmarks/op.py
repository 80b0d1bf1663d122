"""Forward and backward of one op at the size a model gives it: every implementation beside its PyTorch reference.

An implementation is a function of tensors and of nothing else; all of an op's take the same in the same order. The
first is the reference, against which outputs and gradients are checked in float64.
"""

import importlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import Row, measure
from benchmarks.measure import Case, OnRows, Setup, Times, ignore
from lineartime.config import ModelConfig, to_dict
from lineartime.ops import reference
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import rotary
from lineartime.runtime import peak_rss_bytes, rss_bytes
from lineartime.settings import require_name

LIMITS = {"float32": 1e-4, "bfloat16": 0.06}
"""Largest relative error of the output and of any gradient that is let pass, against the reference in float64."""

HEAD_LIMITS, CHECKED_TOKENS = {"float32": 1e-5, "bfloat16": 0.02}, 512
"""Of the head with the loss: its limits, and its tokens that are compared, as logits in float64 may not fit."""

KERNEL = "triton"
"""What an implementation is called that runs on a GPU only."""

Inputs = dict[str, Tensor]
Implementation = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Op:
    """One op as a model has it."""

    inputs: Callable[[ModelConfig, int], Inputs]
    """Its tensors for a model and a number of rows: normal numbers, and integers where it takes integers."""
    functions: Mapping[str, Implementation]
    """By name, the one that defines the op first; each is called with the tensors in their order."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keywords of the functions, and the fields of a model that they get."""
    wide: tuple[str, ...] = ()
    """Inputs that are float32 in a step of bfloat16 too."""
    fixed: tuple[str, ...] = ()
    """Inputs that have no gradient."""
    head: bool = False
    """Whether it is the head with the loss, which is called under autocast as in a step."""

    def implementations(self, config: ModelConfig) -> dict[str, Implementation]:
        """The functions for a model; behind "reference" the same compiled."""
        given = {keyword: getattr(config, name) for keyword, name in self.settings.items()}
        found: dict[str, Implementation] = {name: partial(each, **given) for name, each in self.functions.items()}
        if "reference" in found:
            found = {"reference": found["reference"], "compiled": torch.compile(found["reference"]), **found}
        return found


def in_kernels(module: str, name: str) -> Implementation:
    """An op of `lineartime.ops` in kernels, imported at its first call: Triton is not everywhere."""
    def kernel(*tensors: Tensor, **settings: Any) -> Tensor | tuple[Tensor, ...]:
        return getattr(importlib.import_module(f"lineartime.ops.{module}"), name)(*tensors, **settings)
    return kernel


def plain_loss(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """The mean loss of a training step with all logits in memory."""
    return F.cross_entropy(at_least_float32(F.linear(x_ND, weight_VD, bias_V)), targets_N)


def loss_by_chunks(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """Ours, which never holds all logits."""
    return linear_cross_entropy(x_ND, weight_VD, bias_V, targets_N).mean()


def torch_loss(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """PyTorch's `F.linear_cross_entropy`. Autocast does not reach it, so its inputs are cast before."""
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    x_ND, weight_VD, bias_V = (x.to(dtype) for x in (x_ND, weight_VD, bias_V))
    return at_least_float32(F.linear_cross_entropy(
        x_ND, weight_VD, targets_N, linear_bias=bias_V, options=torch.nn.LinearCrossEntropyOptions()))


def head_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    """Of the head and the loss: logits are of about 1."""
    n_tokens, v, d = n_rows * config.context, config.vocab_size, config.d_model
    return {"x": torch.randn(n_tokens, d), "weight": torch.randn(v, d) / d**0.5, "bias": torch.randn(v),
            "targets": torch.randint(v, (n_tokens,))}


def gated_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    """What a GAU layer has between its projections. gamma and beta are larger than in a new layer: their product with z
    must show in the scores."""
    n_heads, n, s = (2, config.context, config.qk_width) if config.chunk_size is None else (
        4, config.chunk_size, config.qk_width)
    sin, cos = rotary(torch.arange(config.context)[None], s, torch.float32)
    return {"uvz": torch.randn(n_rows, config.context, 2 * config.v_width + s), "gamma": torch.randn(n_heads, s),
            "beta": torch.randn(n_heads, s), "sin": sin, "cos": cos, "w": torch.randn(2 * n - 1) * 0.02}


def norm_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    d = config.d_model
    return {"x": torch.randn(n_rows * config.context, d), "delta": torch.randn(n_rows * config.context, d),
            "weight": torch.randn(d), "bias": torch.randn(d)}


PARAMETERS = ("gamma", "beta", "sin", "cos", "w")
OPS: dict[str, Op] = {
    "gated_chunk_attention": Op(gated_inputs, {
        "reference": reference.gated_chunk_attention, KERNEL: in_kernels("mixed_chunk", "gated_chunk_attention")},
        {"chunk_size": "scale_len", "causal": "causal"}, PARAMETERS, ("sin", "cos")),
    "gated_quadratic_attention": Op(gated_inputs, {
        "reference": reference.gated_quadratic_attention,
        KERNEL: in_kernels("quadratic", "gated_quadratic_attention")},
        {"scale_len": "scale_len", "causal": "causal"}, PARAMETERS, ("sin", "cos")),
    "add_norm": Op(norm_inputs, {"reference": reference.add_norm, KERNEL: in_kernels("norm", "add_norm")},
                   wide=("weight", "bias")),
    # PyTorch's own loss where this version has it.
    "linear_cross_entropy": Op(head_inputs, {
        "plain": plain_loss, "by chunks": loss_by_chunks,
        **({"torch": torch_loss} if hasattr(torch.nn, "LinearCrossEntropyOptions") else {})},
        wide=("x", "weight", "bias"), head=True),
}

MODEL_OF = {"gated_quadratic_attention": "flash-quad"}
"""The preset whose sizes an op has, where it is not FLASH."""


def benchmark_op(name: str, configs: Sequence[ModelConfig], setup: Setup, *, tokens: int = 8192,
                 precisions: Sequence[str] = ("float32",), on_rows: OnRows = ignore) -> list[Row]:
    """Time and memory of forward and backward of one op; a row per implementation, model and type.

    The op has the sizes that a model gives it in a step of `tokens` (one row where the context is longer). The
    implementations of a model and type take turns. Before a time counts, the output and every gradient have been
    compared with those of the reference in float64. Kernels are left out on a processor. Raises UsageError for an
    unknown op or type."""
    require_name("op", name, OPS)
    measure.require_measurable(precisions, models=len(configs), repeats=setup.repeats, threads=setup.threads,
                               tokens=tokens)
    rows: list[Row] = []
    for precision, config in itertools.product(precisions, configs):
        n_rows, cases = max(tokens // config.context, 1), []
        for variant in OPS[name].implementations(config):
            if variant != KERNEL or setup.device == "cuda":
                row = {"model": name, "variant": variant, "label": f"{name}:{variant}", "config": to_dict(config),
                       "n_parameters": 0, "context_tokens": config.context, "batch_size": n_rows,
                       "tokens_per_step": n_rows * config.context, "dtype": precision, "unit": "call"}
                cases.append(Case(measure_op, {
                    "name": name, "label": variant, "config": to_dict(config), "n_rows": n_rows,
                    "precision": precision, "place": setup.place}, row, n_rows * config.context))
        made = measure.side_by_side(cases, "op", setup, 2)
        on_rows(made)
        rows += made
    return rows


def measure_op(name: str, label: str, config: Row, n_rows: int, precision: str,
               place: Row) -> Generator[Row, Row, None]:
    """The job of an implementation: checks it against the reference, then calls it whenever it is asked."""
    on, settings = measure.set_up(**place)
    fields, op, dtype = ModelConfig(**config), OPS[name], getattr(torch, precision)
    every = op.implementations(fields)
    first, function = next(iter(every.values())), every[label]
    inputs = typed(op, op.inputs(fields, n_rows), on, dtype)
    few = {key: x[:CHECKED_TOKENS] if op.head and key in ("x", "targets") else x for key, x in inputs.items()}
    with torch.autocast(on.type, torch.bfloat16, enabled=op.head and dtype == torch.bfloat16):
        # Of the rounded inputs, so that what is measured is the op's own error.
        exact = typed(op, few, on, torch.float64)
        cotangents = [torch.randn_like(out) for out in outputs(first, exact)]
        expected = value_and_gradients(first, exact, cotangents)
        del exact
        few = typed(op, few, on, dtype)
        cotangents = [x.to(out.dtype) for x, out in zip(cotangents, outputs(first, few), strict=True)]
        # The same cotangents, so that gradients can be compared too.
        found = value_and_gradients(function, few, cotangents)
        checked = measure.check({each: measure.relative_error(found[each], x) for each, x in expected.items()},
                                (HEAD_LIMITS if op.head else LIMITS)[precision],
                                "output and gradients against the reference in float64", "not what the reference gives")
        del expected, found
        # The first whole call says how much memory it takes, and warms up.
        measure.release_memory(on)
        before = torch.cuda.memory_allocated(on) if on.type == "cuda" else rss_bytes() or peak_rss_bytes()
        measure.forget_peak(on)
        value_and_gradients(function, inputs, cotangents)
        answer: Row = {"check": checked, "settings": settings, **measure.peak_since(before, on)}
        both, forward, backward = Times(), Times(), Times()
        while True:
            order = yield answer
            # Forward and backward are marked apart; both together are what is compared.
            for timed in [False] * order["warm"] + [order["timed"]]:
                measure.wait(on)
                begun = measure.mark(on)
                made = outputs(function, inputs)
                between = measure.mark(on)
                gradients(made, inputs, cotangents)
                ended = measure.mark(on, done=True)
                del made
                if timed:
                    for times, marks in ((both, [begun, ended]), (forward, [begun, between]),
                                         (backward, [between, ended])):
                        measure.add_times(times, marks)
            if both:
                clock = "gpu_ms" if "gpu_ms" in both else "cpu_ms"
                answer = {"times": both, "forward": {"ms": measure.spread(forward[clock])},
                          "backward": {"ms": measure.spread(backward[clock])}}


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
    out = function(*inputs.values())
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
